//! Extra keys: which blocks they change, that no two are confused, and what is refused.

use block_hash::{Algo, Chain, ContentSpan, ExtraInputs, ExtraKeys, HashError, Root, Token};
use proptest::prelude::*;

const PAGE: usize = 8;

fn keys_with(tokens: &[Token], extras: &ExtraKeys) -> Vec<u64> {
    let mut chain = Chain::new(Algo::Sha256, &Root([0; 32]));
    chain.extend(tokens, PAGE, extras);
    chain.keys().to_vec()
}

fn span(start: u64, length: u64, byte: u8) -> ContentSpan {
    ContentSpan { start, length, hash: [byte; 32] }
}

fn mm(mm_items: &[ContentSpan]) -> ExtraKeys {
    ExtraKeys::new(&ExtraInputs { mm_items, ..Default::default() }).unwrap()
}

fn embeds(prompt_embeds: &[ContentSpan]) -> ExtraKeys {
    ExtraKeys::new(&ExtraInputs { prompt_embeds, ..Default::default() }).unwrap()
}

fn ids(extra_ids: &[u64]) -> ExtraKeys {
    ExtraKeys::new(&ExtraInputs { extra_ids, ..Default::default() }).unwrap()
}

fn overrides(overrides: &[(i64, i128)]) -> ExtraKeys {
    ExtraKeys::new(&ExtraInputs { overrides, ..Default::default() }).unwrap()
}

#[test]
fn no_two_layouts_over_equal_tokens_are_confused() {
    let layouts = [
        ExtraKeys::default(),
        mm(&[span(2, 4, 1)]),
        mm(&[span(3, 4, 1)]),
        mm(&[span(2, 5, 1)]),
        mm(&[span(2, 4, 2)]),
        mm(&[span(2, 4, 1), span(2, 4, 2)]),
        mm(&[span(2, 4, 1), span(2, 4, 1)]),
        embeds(&[span(2, 4, 1)]),
        ids(&[0, 0, 1]),
        ids(&[0, 0, 0, 1]),
        ids(&[0, 0, 1 << 40]),
        overrides(&[(2, 1 << 40)]),
        overrides(&[(3, 1 << 40)]),
        overrides(&[(2, -(1 << 40))]),
        overrides(&[(2, 1)]),
        overrides(&[(2, 1 << 31)]),
        overrides(&[(2, -(1 << 31))]),
        overrides(&[(2, (1 << 64) - 1)]),
        overrides(&[(2, -1)]),
    ];
    let hashes: Vec<u64> = layouts.iter().map(|extras| keys_with(&[0; PAGE], extras)[0]).collect();
    for (i, hash) in hashes.iter().enumerate() {
        assert!(!hashes[..i].contains(hash), "layout {i} is confused with an earlier one");
    }
}

#[test]
fn a_span_over_a_boundary_enters_both_blocks_with_its_offset_in_each() {
    let mut first = Vec::new();
    let mut second = Vec::new();
    let extras = mm(&[span(6, 4, 0xAB)]);
    extras.encode(0, 8, &mut first);
    extras.encode(8, 16, &mut second);
    let record = |offset: i64| {
        let head = [1, 0, 0, 0, 48, 0, 0, 0].to_vec();
        [head, offset.to_le_bytes().to_vec(), 4_u64.to_le_bytes().to_vec(), vec![0xAB; 32]].concat()
    };
    assert_eq!(first, record(6));
    assert_eq!(second, record(-2));
}

#[test]
fn a_replaced_token_hashes_as_if_it_had_been_given() {
    let given = [1, 2, 3, -4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    let mut placeholders = given;
    placeholders[3] = 0;
    placeholders[12] = 0;
    let replaced = keys_with(&placeholders, &overrides(&[(12, 13), (3, -4)]));
    assert_eq!(replaced, keys_with(&given, &ExtraKeys::default()));
}

#[test]
fn replacements_apply_to_a_slice_of_the_sequence() {
    let mut tokens = [0; 4];
    overrides(&[(9, 90), (10, 1 << 31), (11, 110), (12, 120), (16, 160)]).replace_tokens(9, &mut tokens);
    assert_eq!(tokens, [90, 0, 110, 120]);
}

#[test]
fn overrides_outside_the_sequence_are_ignored() {
    let tokens = [5; 2 * PAGE];
    let outside = overrides(&[(-1, 7), (16, 7), (i64::MAX, 1 << 40), (i64::MIN, 7)]);
    assert_eq!(keys_with(&tokens, &outside), keys_with(&tokens, &ExtraKeys::default()));
    assert!(overrides(&[(-1, 7)]).is_empty());
}

#[test]
fn inputs_that_say_nothing_are_empty() {
    assert!(ids(&[0, 0, 0]).is_empty());
    assert!(!ids(&[0, 0, 1]).is_empty());
    assert!(!mm(&[span(900, 1, 0)]).is_empty());
}

#[test]
fn the_order_in_which_keys_are_given_does_not_matter() {
    let (a, b, c) = (span(1, 9, 1), span(4, 2, 2), span(4, 2, 3));
    assert_eq!(mm(&[a, b, c]), mm(&[c, b, a]));
    assert_eq!(overrides(&[(1, 5), (0, 1 << 50)]), overrides(&[(0, 1 << 50), (1, 5)]));
}

#[test]
fn two_overrides_of_one_token_are_refused() {
    let inputs = ExtraInputs { overrides: &[(4, 1), (2, 9), (4, 1)], ..Default::default() };
    let error = ExtraKeys::new(&inputs).unwrap_err();
    assert_eq!(error, HashError::DuplicateOverride { token: 4 });
}

#[test]
fn an_override_value_beyond_64_bits_is_refused() {
    for value in [1_i128 << 64, -(1 << 63) - 1] {
        let inputs = ExtraInputs { overrides: &[(0, 1), (4, value)], ..Default::default() };
        let error = ExtraKeys::new(&inputs).unwrap_err();
        assert_eq!(error, HashError::OverrideValue { index: 1, token: 4, value });
    }
}

#[test]
fn a_span_of_no_tokens_is_refused() {
    let inputs = ExtraInputs { prompt_embeds: &[span(0, 1, 0), span(3, 0, 0)], ..Default::default() };
    let error = ExtraKeys::new(&inputs).unwrap_err();
    assert_eq!(error.to_string(), "prompt_embeds[1]: length is 0 tokens, must be at least 1");
}

#[test]
fn a_span_beyond_every_position_is_refused() {
    for (start, length) in [(u64::MAX, 1), (1, u64::MAX), (i64::MAX as u64, 1)] {
        let inputs = ExtraInputs { mm_items: &[span(start, length, 0)], ..Default::default() };
        let error = ExtraKeys::new(&inputs).unwrap_err();
        assert_eq!(error, HashError::SpanTooFar { field: "mm_items", index: 0, start, length });
    }
}

#[test]
fn the_next_touched_token_is_the_nearest_of_every_kind_of_key() {
    let item = [span(9, 2, 1)];
    let inputs = ExtraInputs {
        mm_items: &item,
        prompt_embeds: &[span(6, 1, 2)],
        extra_ids: &[0, 0, 0, 7],
        overrides: &[(1, 5), (13, 1 << 40)],
    };
    let extras = ExtraKeys::new(&inputs).unwrap();
    let touched: Vec<Option<usize>> = (0..15).map(|start| extras.next_touched(start)).collect();
    let expected = [1, 1, 3, 3, 6, 6, 6, 9, 9, 9, 10, 13, 13, 13].map(Some);
    assert_eq!(touched, [&expected[..], &[None]].concat());
}

proptest! {
    #[test]
    fn exactly_the_touched_blocks_are_encoded(
        spans in prop::collection::vec((0..100_u64, 1..40_u64), 0..6),
        start in 0..100_usize,
        length in 1..20_usize,
    ) {
        let spans: Vec<_> = spans.into_iter().map(|(start, length)| span(start, length, 1)).collect();
        let extras = mm(&spans);
        let covers = |span: &&ContentSpan| {
            (start..start + length).any(|at| (span.start..span.start + span.length).contains(&(at as u64)))
        };
        let touching = spans.iter().filter(covers).count();
        let mut bytes = Vec::new();
        extras.encode(start, start + length, &mut bytes);
        prop_assert_eq!(bytes.len(), 56 * touching); // tag 4, length 4, offset 8, length 8, hash 32
        prop_assert_eq!(extras.touches(start, start + length), touching > 0);
        let covered = |at: &usize| spans.iter().any(|span| (span.start..span.start + span.length).contains(&(*at as u64)));
        prop_assert_eq!(extras.next_touched(start), (start..140).find(covered));
    }

    #[test]
    fn a_key_changes_the_blocks_from_the_one_it_touches_on(at in 0..64_usize, id in 1..u64::MAX) {
        let tokens = [3; 64];
        let mut extra_ids = vec![0; 64];
        extra_ids[at] = id;
        let plain = keys_with(&tokens, &ExtraKeys::default());
        let keyed = keys_with(&tokens, &ids(&extra_ids));
        for block in 0..8 {
            prop_assert_eq!(plain[block] == keyed[block], block < at / PAGE);
        }
    }
}
