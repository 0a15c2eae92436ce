use super::*;

fn kept(priority: i64) -> Retention {
    Priority::new(priority).expect("a level").into()
}

fn range(start: u32, end: Option<u32>, priority: i64) -> TokenRange {
    TokenRange { start, end, retention: kept(priority) }
}

/// The ranges of a prompt of 20 tokens, whose generated blocks have priority 10.
fn of_twenty(ranges: &[TokenRange]) -> Result<BlockRetention, RangeError> {
    BlockRetention::new(ranges.to_vec(), kept(10), 20)
}

fn refusal(ranges: &[TokenRange]) -> RangeError {
    of_twenty(ranges).expect_err("these ranges are refused")
}

/// The priority of the block that begins at `token` of such a request.
fn priority(retention: &BlockRetention, token: u32) -> Option<u8> {
    retention.of(token, 20).map(|retention| retention.priority().level())
}

#[test]
fn a_range_holds_from_its_first_token_to_the_one_before_its_end() {
    let retention = of_twenty(&[range(4, Some(8), 90)]).expect("valid");
    let levels = [3, 4, 7, 8].map(|token| priority(&retention, token));
    assert_eq!(levels, [None, Some(90), Some(90), None]);
}

#[test]
fn tokens_between_two_ranges_are_in_neither() {
    let retention = of_twenty(&[range(0, Some(4), 90), range(8, Some(12), 1)]).expect("valid");
    let levels = [0, 4, 7, 8, 12].map(|token| priority(&retention, token));
    assert_eq!(levels, [Some(90), None, None, Some(1), None]);
}

#[test]
fn a_range_may_begin_where_the_one_before_ends() {
    let retention = of_twenty(&[range(0, Some(4), 90), range(4, Some(8), 1)]).expect("valid");
    assert_eq!([3, 4].map(|token| priority(&retention, token)), [Some(90), Some(1)]);
}

#[test]
fn an_open_range_ends_with_the_prompt_and_generated_blocks_have_a_priority_of_their_own() {
    let retention = of_twenty(&[range(4, None, 90)]).expect("valid");
    let levels = [0, 19, 20, 24].map(|token| priority(&retention, token));
    assert_eq!(levels, [None, Some(90), Some(10), Some(10)]);
}

#[test]
fn a_prompt_that_was_cut_short_ends_where_it_was_cut() {
    let retention = of_twenty(&[range(0, Some(16), 90)]).expect("valid");
    assert_eq!(retention.of(8, 8), Some(kept(10)));
}

#[test]
fn without_ranges_a_prompt_is_left_as_it_is() {
    let retention = of_twenty(&[]).expect("valid");
    assert_eq!([0, 19, 20].map(|token| priority(&retention, token)), [None, None, Some(10)]);
}

#[test]
fn a_range_may_reach_to_the_last_token_and_no_further() {
    assert!(of_twenty(&[range(0, Some(20), 90)]).is_ok());
    assert!(of_twenty(&[range(19, None, 90)]).is_ok());
    let past = RangeError::PastThePrompt { index: 0, token: 20, tokens: 20 };
    assert_eq!(refusal(&[range(0, Some(21), 90)]), past);
    assert_eq!(refusal(&[range(20, None, 90)]), past);
    let largest = RangeError::PastThePrompt { index: 0, token: u32::MAX, tokens: 20 };
    assert_eq!(refusal(&[range(u32::MAX, None, 90)]), largest);
}

#[test]
fn a_range_without_a_token_is_refused() {
    assert_eq!(refusal(&[range(4, Some(4), 90)]), RangeError::Empty(0));
    assert_eq!(refusal(&[range(0, Some(4), 90), range(8, Some(6), 90)]), RangeError::Empty(1));
}

#[test]
fn ranges_that_overlap_or_are_not_sorted_are_refused() {
    let overlap = [range(0, Some(8), 90), range(7, Some(12), 1)];
    assert_eq!(refusal(&overlap), RangeError::Overlap(1));
    let unsorted = [range(8, Some(12), 90), range(0, Some(4), 1)];
    assert_eq!(refusal(&unsorted), RangeError::Overlap(1));
    assert_eq!(
        refusal(&overlap).to_string(),
        "ranges[1]: starts before ranges[0] ends; ranges are sorted and disjoint"
    );
}

#[test]
fn only_the_last_range_may_be_open() {
    assert_eq!(refusal(&[range(0, None, 90), range(8, Some(12), 1)]), RangeError::Open(0));
}
