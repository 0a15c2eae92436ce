//! Drafts: what a step reserves for them, what a result says of them, and what is never stored.

use crate::common::{PAGE, claim, config, drafting, forward, hit, prompt, row};
use block_hash::Token;
use block_pool::GroupId;
use cache_manager::{Ledger, LedgerConfig, LedgerError, Position, SlotId, VarlenTables};

/// A request with `drafts` drafts whose prompt, 1 to `len`, is computed, and whose next token is known.
fn decoding(ledger: &mut Ledger, len: Token, drafts: u32) -> SlotId {
    let slot = claim(ledger, drafting(&(1..=len).collect::<Vec<_>>(), drafts));
    ledger.alloc(&[slot], &[]).unwrap();
    ledger.step(&[slot], &[len + 1], None).unwrap();
    slot
}

/// Plans the next step of the request and launches it.
fn launch(ledger: &mut Ledger, slot: SlotId) {
    ledger.alloc(&[slot], &[]).unwrap();
    ledger.close_step();
    ledger.verify().unwrap();
}

fn step(ledger: &mut Ledger, slot: SlotId, tokens: &[Token]) -> Result<(), LedgerError> {
    let outcome = ledger.step(&[slot], tokens, Some(&[tokens.len() as u32]));
    ledger.verify().unwrap();
    outcome
}

fn at(ledger: &Ledger, slot: SlotId) -> (u32, u32, u32) {
    let Position { processed, active, known, .. } = ledger.position(slot).unwrap();
    (processed, active, known)
}

// Pages

#[test]
fn a_step_has_pages_for_its_drafts_and_for_the_next_ones() {
    let mut ledger = Ledger::new(config(8));
    let slot = claim(&mut ledger, drafting(&[1, 2, 3, 4], 2));
    launch(&mut ledger, slot); // 4 tokens + 2 * 2
    assert_eq!(row(&ledger, slot), [1, 2]);
    step(&mut ledger, slot, &[5]).unwrap();
    launch(&mut ledger, slot); // 5 tokens + 2 * 2
    assert_eq!(row(&ledger, slot), [1, 2, 3]);
}

#[test]
fn a_step_planned_ahead_has_pages_for_the_drafts_of_the_step_before_it_too() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 1);
    launch(&mut ledger, slot); // 5 tokens + 2 * 1
    assert_eq!(row(&ledger, slot), [1, 2]);
    launch(&mut ledger, slot); // 6 tokens + 1 + 2 * 1
    assert_eq!(row(&ledger, slot), [1, 2, 3]);
}

#[test]
fn drafts_that_were_rejected_take_no_further_page() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 3, 2);
    launch(&mut ledger, slot); // 4 tokens + 2 * 2
    assert_eq!(row(&ledger, slot), [1, 2]);
    step(&mut ledger, slot, &[60]).unwrap();
    let taken = ledger.counters().pages_allocated;
    assert_eq!((taken, row(&ledger, slot)), (2, vec![1, 2]));
}

#[test]
fn pages_for_drafts_may_lie_behind_the_longest_sequence() {
    let longest = LedgerConfig { max_seq_len: Some(8), ..config(8) };
    assert_eq!(longest.max_blocks_per_request(0), 2);
    assert_eq!(longest.max_blocks_per_request(2), 4); // 8 tokens + 3 * 2 + 1
    let mut ledger = Ledger::new(longest);
    let slot = decoding(&mut ledger, 6, 2);
    launch(&mut ledger, slot);
    launch(&mut ledger, slot); // 8 tokens + 2 + 2 * 2
    assert_eq!(row(&ledger, slot).len(), 4);
    assert!(matches!(ledger.alloc(&[slot], &[]), Err(LedgerError::TwoStepsOut { .. })));
}

#[test]
fn a_request_that_fits_but_for_its_drafts_is_too_large() {
    let mut ledger = Ledger::new(config(1));
    let slot = claim(&mut ledger, drafting(&[1, 2, 3], 1)); // 3 tokens + 2 * 1
    let before = ledger.fingerprint();
    let refused = ledger.alloc(&[slot], &[]);
    assert!(matches!(refused, Err(LedgerError::RequestTooLarge { tokens: 5, limit: 1, .. })), "{refused:?}");
    assert_eq!(ledger.fingerprint(), before);
}

// Results

#[test]
fn accepted_drafts_have_kv_and_the_newest_token_has_none() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot);
    assert_eq!(at(&ledger, slot), (4, 1, 5));
    step(&mut ledger, slot, &[61, 62, 63]).unwrap();
    assert_eq!(at(&ledger, slot), (7, 0, 8));
    launch(&mut ledger, slot);
    assert_eq!(at(&ledger, slot), (7, 1, 8));
}

#[test]
fn a_step_none_of_whose_drafts_were_right_is_a_step_without_drafts() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[61]).unwrap();
    assert_eq!(at(&ledger, slot), (5, 0, 6));
}

#[test]
fn more_tokens_than_drafts_and_one_are_refused() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot);
    let before = ledger.fingerprint();
    let refused = step(&mut ledger, slot, &[61, 62, 63, 64]).unwrap_err();
    assert!(refused.to_string().contains("verified 2 drafts: at most 3"), "{refused}");
    assert_eq!(ledger.fingerprint(), before);
}

#[test]
fn without_drafts_tokens_behind_the_first_are_computed_next() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 0);
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[61, 62, 63]).unwrap();
    assert_eq!(at(&ledger, slot), (5, 0, 8));
    launch(&mut ledger, slot);
    assert_eq!(at(&ledger, slot), (5, 3, 8));
}

#[test]
fn a_prompt_chunk_verifies_no_draft() {
    let mut ledger = Ledger::new(config(8));
    let slot = claim(&mut ledger, drafting(&[1, 2, 3], 2));
    launch(&mut ledger, slot);
    assert_eq!(ledger.batch_shape(&[slot]).unwrap().total_active, 3);
    step(&mut ledger, slot, &[61, 62]).unwrap();
    assert_eq!(at(&ledger, slot), (3, 0, 5)); // the second token is computed next
}

#[test]
fn a_token_given_by_update_accepts_no_draft() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot);
    ledger.update(slot, 61).unwrap();
    step(&mut ledger, slot, &[]).unwrap();
    assert_eq!(at(&ledger, slot), (5, 0, 6));
}

#[test]
fn a_step_planned_ahead_moves_by_the_drafts_that_were_right() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot); // token 5, at position 4
    launch(&mut ledger, slot);
    let mut lengths = [0];
    ledger.write_cache_lengths(&[slot], &mut lengths).unwrap();
    assert_eq!(lengths, [5]);
    step(&mut ledger, slot, &[61, 62, 63]).unwrap();
    ledger.write_cache_lengths(&[slot], &mut lengths).unwrap();
    assert_eq!((lengths, at(&ledger, slot)), ([7], (7, 1, 8)));
    step(&mut ledger, slot, &[64, 65]).unwrap();
    assert_eq!(at(&ledger, slot), (9, 0, 10));
    assert_eq!(ledger.tokens(slot).unwrap(), [1, 2, 3, 4, 5, 61, 62, 63, 64, 65]);
}

#[test]
fn drafts_of_a_step_whose_own_token_is_missing_are_not_told_of() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot);
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[]).unwrap(); // its token comes later
    let before = ledger.fingerprint();
    assert!(step(&mut ledger, slot, &[61, 62]).is_err());
    assert_eq!(ledger.fingerprint(), before);
    step(&mut ledger, slot, &[61]).unwrap();
    assert_eq!(at(&ledger, slot), (6, 0, 6));
}

#[test]
fn accepted_drafts_beyond_the_limit_of_a_request_are_refused() {
    let mut ledger = Ledger::new(config(8));
    let mut request = drafting(&[1, 2, 3, 4], 2);
    request.max_length = 6;
    let slot = claim(&mut ledger, request);
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[5]).unwrap();
    launch(&mut ledger, slot);
    let before = ledger.fingerprint();
    let refused = step(&mut ledger, slot, &[61, 62]).unwrap_err();
    assert!(matches!(refused, LedgerError::TooLong { tokens: 7, limit: 6, .. }), "{refused}");
    assert_eq!(ledger.fingerprint(), before);
    step(&mut ledger, slot, &[61]).unwrap();
}

#[test]
fn accepted_drafts_beyond_the_longest_sequence_are_refused() {
    let mut ledger = Ledger::new(LedgerConfig { max_seq_len: Some(6), ..config(8) });
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot);
    let before = ledger.fingerprint();
    let refused = step(&mut ledger, slot, &[61, 62]).unwrap_err();
    assert!(matches!(refused, LedgerError::TooLong { tokens: 7, limit: 6, .. }), "{refused}");
    assert_eq!(ledger.fingerprint(), before);
}

#[test]
fn a_preemption_makes_accepted_drafts_part_of_the_prompt() {
    let mut ledger = Ledger::new(LedgerConfig { prefix_caching: false, ..config(8) });
    let slot = decoding(&mut ledger, 4, 2);
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[61, 62]).unwrap();
    ledger.preempt(&[slot]).unwrap();
    launch(&mut ledger, slot);
    assert_eq!(at(&ledger, slot), (0, 7, 7));
    assert_eq!(ledger.batch_shape(&[slot]).unwrap().total_active, 7);
}

// What is stored

#[test]
fn blocks_are_stored_with_accepted_drafts_and_without_rejected_ones() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 6, 2); // 1 to 7 are known; drafts go to positions 7 and 8
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[50]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 50, 9])), 4); // 50 has no KV yet
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[51, 52]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 50, 51, 52])), 8);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])), 4);
}

#[test]
fn a_block_is_stored_as_soon_as_its_last_draft_is_accepted() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 5, 2); // 1 to 6 are known; drafts go to positions 6 and 7
    launch(&mut ledger, slot);
    step(&mut ledger, slot, &[50, 51, 52]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 50, 51, 52])), 8);
}

// Tables

#[test]
fn tables_of_a_decode_step_cover_its_drafts() {
    let mut ledger = Ledger::new(config(8));
    let slot = decoding(&mut ledger, 6, 2);
    launch(&mut ledger, slot); // position 6, drafts at 7 and 8
    let shape = ledger.batch_shape(&[slot]).unwrap();
    assert_eq!((shape.total_active, shape.max_active, shape.max_total, shape.total_pages), (3, 3, 9, 3));
    let (mut lengths, mut starts, mut mapping) = ([0], [0; 2], [0; 3]);
    let mut tables =
        VarlenTables { seq_lens: &mut lengths, slot_mapping: &mut mapping, query_start_loc: &mut starts };
    ledger.write_varlen(GroupId::FIRST, &[slot], &mut tables).unwrap();
    let row = row(&ledger, slot);
    let [second, third] = [row[1], row[2]].map(|page| i64::from(page * PAGE));
    assert_eq!((lengths, starts, mapping), ([9], [0, 3], [second + 2, second + 3, third]));
}

#[test]
fn a_padding_request_verifies_no_draft() {
    let mut ledger = Ledger::new(config(1));
    let slot = claim(&mut ledger, drafting(&[1], 2));
    ledger.alloc_dummy(slot).unwrap();
    ledger.step(&[slot], &[2], None).unwrap();
    forward(&mut ledger, slot);
    ledger.update(slot, 3).unwrap();
    ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(ledger.batch_shape(&[slot]).unwrap().total_active, 1);
}
