//! Partial reuse: which part of a block a request goes on from, and whose page it gets.

use crate::common::{claim, computed, config, copy_pages, forward, hit, overridden, prompt, row, salted};
use block_hash::Token;
use block_pool::PageId;
use cache_manager::{EventKind, Ledger, LedgerConfig, LedgerError, NewSequence, Outlook, Reserve, SlotId};

pub(crate) fn partly(pages: u32) -> LedgerConfig {
    LedgerConfig { partial_reuse: true, ..config(pages) }
}

fn moving(pages: u32) -> LedgerConfig {
    LedgerConfig { copy_on_partial_reuse: false, event_buffer_max_size: 100, ..partly(pages) }
}

/// Computes the tokens and releases them.
pub(crate) fn stored(ledger: &mut Ledger, tokens: &[Token]) {
    let slot = computed(ledger, tokens);
    ledger.release(&[slot]).unwrap();
    ledger.verify().unwrap();
}

/// Claims each prompt and plans all of them together; gives the cached tokens and the row of each.
fn planned<const N: usize>(ledger: &mut Ledger, prompts: [&[Token]; N]) -> [(u32, Vec<u32>); N] {
    let slots = prompts.map(|tokens| claim(ledger, prompt(tokens)));
    ledger.alloc(&slots, &[]).unwrap();
    ledger.verify().unwrap();
    slots.map(|slot| (ledger.position(slot).unwrap().cached, row(ledger, slot)))
}

#[test]
fn a_prompt_goes_on_from_the_tokens_that_a_block_begins_with() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5, 6, 70, 80, 90]]), [(6, vec![1, 3, 4])]);
    assert_eq!(copy_pages(&mut ledger), [(2, 3)]);
    let counters = ledger.counters();
    assert_eq!((counters.partial_hits, counters.partial_tokens, counters.reused_tokens), (1, 2, 6));
    assert_eq!(counters.reused_blocks, 1);
    assert_eq!(ledger.cached_blocks(), 2); // the block that was copied is as it was
}

#[test]
fn schedulers_are_told_of_parts() {
    let mut ledger = Ledger::new(partly(4));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let slot = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 70]));
    let needed = |ledger: &mut Ledger| ledger.needed_blocks_one_step(&[slot], Outlook::default()).unwrap();
    // The block that is hit, the one that is copied, and its copy.
    assert_eq!(needed(&mut ledger), [3]);
    assert_eq!(ledger.reusable_tokens(&[slot]).unwrap(), [6]);
    assert_eq!(ledger.reuse_adjusted_compute(&[slot], &[]).unwrap(), [1]);
    let other = computed(&mut ledger, &[9; 7]); // on the two pages that are left
    assert_eq!(needed(&mut ledger), [2]); // no room for a copy, and the block goes
    ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(row(&ledger, slot), [1, 2]);
    assert_eq!(row(&ledger, other), [3, 4]);
}

#[test]
fn the_first_block_of_a_prompt_may_be_a_part() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4]);
    assert_eq!(planned(&mut ledger, [&[1, 2, 30]]), [(2, vec![2])]);
    assert_eq!(copy_pages(&mut ledger), [(1, 2)]);
}

#[test]
fn the_last_token_of_a_prompt_is_computed() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5, 6, 7, 8]]), [(7, vec![1, 3])]);
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5]]), [(4, vec![1, 4])]); // of its second block nothing is left
}

#[test]
fn of_several_blocks_that_with_the_most_tokens_serves() {
    let mut ledger = Ledger::new(partly(8));
    for tokens in [[1, 2, 3, 4, 5, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6, 0, 0]] {
        stored(&mut ledger, &tokens);
    }
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5, 6, 7, 8, 9]]), [(7, vec![1, 5, 6])]);
    assert_eq!(copy_pages(&mut ledger), [(3, 5)]);
}

#[test]
fn an_idle_tail_with_no_other_tokens_is_taken_over() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    assert_eq!(ledger.tails(), 1);
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5, 6, 7, 8, 9]]), [(6, vec![1, 2, 3])]);
    assert_eq!(copy_pages(&mut ledger), []);
    assert_eq!(ledger.tails(), 0);
}

#[test]
fn a_tail_that_says_more_than_the_prompt_is_copied() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5, 6, 70]]), [(6, vec![1, 3])]);
    assert_eq!(copy_pages(&mut ledger), [(2, 3)]);
    assert_eq!(ledger.tails(), 1);
}

#[test]
fn whoever_stores_nothing_leaves_the_tail_where_it_is() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    let slot = claim(&mut ledger, NewSequence { no_store: true, ..prompt(&[1, 2, 3, 4, 5, 6, 7]) });
    forward(&mut ledger, slot);
    assert_eq!(row(&ledger, slot), [1, 3]);
    ledger.release(&[slot]).unwrap();
    assert_eq!(ledger.tails(), 1);
}

#[test]
fn the_last_of_a_batch_keeps_an_idle_tail_and_the_others_get_copies() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    let prompts: [&[Token]; 3] = [&[1, 2, 3, 4, 5, 6, 7], &[1, 2, 3, 4, 5, 6, 8], &[1, 2, 3, 4, 5, 6, 9]];
    let found = planned(&mut ledger, prompts);
    assert_eq!(found, [(6, vec![1, 3]), (6, vec![1, 4]), (6, vec![1, 2])]);
    assert_eq!(copy_pages(&mut ledger), [(2, 3), (2, 4)]);
    ledger.verify().unwrap();
}

#[test]
fn a_tail_is_of_use_to_a_shorter_prompt_beside_the_one_that_keeps_it() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7]);
    let found = planned(&mut ledger, [&[1, 2, 3, 4, 5, 6, 7, 8], &[1, 2, 3, 4, 5, 60]]);
    assert_eq!(found, [(7, vec![1, 2]), (5, vec![1, 3])]);
    assert_eq!(copy_pages(&mut ledger), [(2, 3)]);
}

#[test]
fn a_block_that_others_hold_is_copied() {
    let mut ledger = Ledger::new(partly(8));
    let holder = computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5, 60]]), [(5, vec![1, 3])]);
    assert_eq!(copy_pages(&mut ledger), [(2, 3)]);
    assert_eq!(row(&ledger, holder), [1, 2]);
}

#[test]
fn a_source_is_free_again_when_its_copies_are_made() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    planned(&mut ledger, [&[1, 2, 30], &[1, 2, 3, 40]]);
    assert!(!ledger.pool().is_evictable(PageId(1)));
    assert_eq!(copy_pages(&mut ledger), [(1, 3), (1, 4)]);
    assert!(ledger.pool().is_evictable(PageId(1)));
    ledger.verify().unwrap();
}

#[test]
fn no_page_of_a_part_is_handed_out_in_the_same_batch() {
    let mut ledger = Ledger::new(partly(4));
    stored(&mut ledger, &[1, 2, 3, 4]);
    stored(&mut ledger, &[5, 6, 7, 8]);
    // The first page would go first. It is the source of a copy.
    let found = planned(&mut ledger, [&[90, 91, 92], &[1, 2, 30]]);
    assert_eq!(found, [(0, vec![3]), (2, vec![4])]);
    assert_eq!(copy_pages(&mut ledger), [(1, 4)]);
}

#[test]
fn where_source_and_copy_have_no_room_the_prompt_is_computed() {
    let mut ledger = Ledger::new(partly(2));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    // Two pages are needed: the part would hold a third.
    assert_eq!(planned(&mut ledger, [&[1, 2, 30, 40, 50]]), [(0, vec![2, 1])]);
    assert_eq!(ledger.counters().failed_allocs, 0);
    assert_eq!(ledger.counters().partial_hits, 0);
}

#[test]
fn a_batch_with_parts_that_does_not_fit_changes_nothing() {
    let mut ledger = Ledger::new(partly(5));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    let slots = [&[1, 2, 3, 4, 5, 6, 7][..], &[1, 2, 3, 4, 5, 6, 8], &[0; 13]]
        .map(|it| claim(&mut ledger, prompt(it)));
    for count in 1..=slots.len() {
        let mut other = vec![SlotId(99)];
        other.splice(0..0, slots[..count].iter().copied());
        let before = ledger.fingerprint();
        assert_eq!(ledger.alloc(&other, &[]), Err(LedgerError::UnknownSlot(SlotId(99))));
        assert_eq!(ledger.fingerprint(), before);
    }
    let before = ledger.fingerprint();
    let refused = ledger.alloc(&slots, &[]).unwrap_err();
    assert!(matches!(refused, LedgerError::InsufficientBlocks { slot, .. } if slot == slots[2]));
    assert_eq!(ledger.fingerprint(), before);
}

#[test]
fn results_of_a_forward_that_came_before_its_copies_are_refused() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4]);
    let slot = claim(&mut ledger, prompt(&[1, 2, 30]));
    ledger.alloc(&[slot], &[]).unwrap();
    let before = ledger.fingerprint();
    assert_eq!(ledger.step(&[slot], &[7], None), Err(LedgerError::PageCopiesLeft { slot }));
    assert_eq!(ledger.fingerprint(), before);
    copy_pages(&mut ledger);
    ledger.step(&[slot], &[7], None).unwrap();
}

#[test]
fn copies_of_a_later_step_do_not_hold_up_an_earlier_one() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4]);
    let early = claim(&mut ledger, prompt(&[9, 9]));
    ledger.alloc(&[early], &[]).unwrap();
    ledger.close_step();
    let late = claim(&mut ledger, prompt(&[1, 2, 30]));
    ledger.alloc(&[late], &[]).unwrap();
    ledger.step(&[early], &[7], None).unwrap();
}

#[test]
fn a_chunk_may_end_in_a_block_and_the_next_part_is_found_behind_it() {
    let mut ledger = Ledger::new(partly(9));
    let slot = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 70, 80]));
    ledger.alloc(&[slot], &[4]).unwrap();
    ledger.close_step();
    ledger.step(&[slot], &[], None).unwrap();
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]); // meanwhile
    ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(ledger.position(slot).unwrap().cached, 3);
    assert_eq!(ledger.counters().late_reused_tokens, 3);
    ledger.verify().unwrap();
}

#[test]
fn a_request_keeps_the_page_that_it_has_for_the_block() {
    let mut ledger = Ledger::new(LedgerConfig { reserve: Reserve::Prompt, ..partly(9) });
    let slot = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 70, 80]));
    ledger.alloc(&[slot], &[4]).unwrap();
    ledger.close_step();
    ledger.step(&[slot], &[], None).unwrap();
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(ledger.position(slot).unwrap().cached, 0);
}

#[test]
fn parts_are_found_within_a_namespace() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4]);
    assert_eq!(hit(&mut ledger, salted(&[1, 2, 30], "other", 4)), 0);
}

#[test]
fn a_block_on_which_something_else_lies_has_no_parts() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4]);
    assert_eq!(hit(&mut ledger, overridden(&[1, 2, 3, 30, 5], &[(3, 7)])), 0);
    let slot = claim(&mut ledger, overridden(&[9, 9, 9], &[(1, 7)]));
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    assert_eq!(ledger.tails(), 0);
    assert_eq!(hit(&mut ledger, prompt(&[9, 9, 9, 9])), 0);
}

#[test]
fn whoever_reads_nothing_finds_no_part() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4]);
    assert_eq!(hit(&mut ledger, NewSequence { no_read: true, ..prompt(&[1, 2, 30]) }), 0);
}

// Without copies

#[test]
fn without_copies_an_idle_leaf_is_taken_over_and_told_as_removed() {
    let mut ledger = Ledger::new(moving(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    ledger.take_events(None);
    assert_eq!(planned(&mut ledger, [&[1, 2, 3, 4, 5, 6, 70]]), [(6, vec![1, 2])]);
    assert_eq!(ledger.cached_blocks(), 1);
    let events = ledger.take_events(None);
    assert!(matches!(&events[0].kind, EventKind::Removed { keys, .. } if keys.len() == 1));
    assert_eq!(ledger.counters().evictions, 0);
}

#[test]
fn without_copies_a_block_that_is_held_or_followed_serves_nobody() {
    let mut ledger = Ledger::new(moving(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 30])), 0); // another block follows it
    computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 60])), 4);
}

#[test]
fn without_copies_a_full_match_has_the_block_whatever_the_order() {
    for reversed in [false, true] {
        let mut ledger = Ledger::new(moving(9));
        stored(&mut ledger, &[1, 2, 3, 4]);
        let mut slots = [&[1, 2, 30][..], &[1, 2, 3, 4, 5]].map(|it| claim(&mut ledger, prompt(it)));
        let [part, full] = slots;
        if reversed {
            slots.reverse();
        }
        ledger.alloc(&slots, &[]).unwrap();
        ledger.verify().unwrap();
        assert_eq!([part, full].map(|slot| ledger.position(slot).unwrap().cached), [0, 4]);
        assert_eq!(row(&ledger, full)[0], 1);
    }
}

#[test]
fn without_copies_one_of_a_batch_takes_a_leaf_over() {
    let mut ledger = Ledger::new(moving(9));
    stored(&mut ledger, &[1, 2, 3, 4]);
    let found = planned(&mut ledger, [&[1, 2, 30], &[1, 2, 40]]);
    assert_eq!(found, [(2, vec![1]), (0, vec![2])]);
    assert_eq!(copy_pages(&mut ledger), []);
}
