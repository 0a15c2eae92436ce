//! Two sequences that computed the same block, and the order in which what they held is evicted.

use crate::common::{claim, config, forward, hit, private, prompt, row};
use block_pool::PageId;
use cache_manager::{Ledger, LedgerConfig, SlotId};

/// Both prompts are planned in one step; `first` and then `second` is delivered.
fn computed_together(config: LedgerConfig, first: &[i32], second: &[i32]) -> (Ledger, SlotId, SlotId) {
    let mut ledger = Ledger::new(config);
    let slots = [claim(&mut ledger, prompt(first)), claim(&mut ledger, prompt(second))];
    ledger.alloc(&slots, &[]).unwrap();
    ledger.close_step();
    ledger.step(&slots, &[], None).unwrap();
    ledger.verify().unwrap();
    (ledger, slots[0], slots[1])
}

/// The order of eviction, as page ids.
fn order(ledger: &Ledger) -> Vec<u32> {
    ledger.verify().unwrap();
    ledger.pool().eviction_order().map(|page| page.0).collect()
}

#[test]
fn the_second_publisher_adopts_the_stored_page_and_gives_up_its_own() {
    let (ledger, first, second) = computed_together(config(8), &[1, 2, 3, 4, 5], &[1, 2, 3, 4, 6]);
    assert_eq!((row(&ledger, first), row(&ledger, second)), (vec![1, 2], vec![1, 4]));
    assert_eq!(order(&ledger), [3]);
    assert_eq!(ledger.counters().adopted_blocks, 1);
}

#[test]
fn a_page_that_a_fork_has_too_is_not_given_up_for_one_that_nobody_holds() {
    let mut ledger = Ledger::new(config(8));
    let before = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5]));
    forward(&mut ledger, before);
    ledger.release(&[before]).unwrap();
    let parent = claim(&mut ledger, prompt(&[1, 2, 3]));
    ledger.alloc(&[parent], &[]).unwrap();
    ledger.close_step();
    ledger.step(&[parent], &[4], None).unwrap();
    ledger.alloc(&[parent], &[]).unwrap();
    ledger.close_step();
    let child = ledger.fork(parent).unwrap();
    let (own, free) = (row(&ledger, parent), ledger.pool().available());
    ledger.step(&[parent], &[5], None).unwrap();
    ledger.verify().unwrap();
    // The block is stored on page 1. With that one taken, the child would still have the other.
    assert_eq!((row(&ledger, parent), row(&ledger, child)), (own.clone(), own));
    assert_eq!((ledger.pool().refs(PageId(1)), ledger.pool().available()), (0, free));
    assert_eq!((ledger.counters().adopted_blocks, ledger.counters().private_blocks), (0, 1));
}

#[test]
fn a_private_twin_keeps_its_page_and_the_stored_one_is_what_others_hit() {
    let (mut ledger, _, second) = computed_together(private(8), &[1, 2, 3, 4, 5], &[1, 2, 3, 4, 6]);
    assert_eq!(row(&ledger, second), [3, 4]);
    let third = claim(&mut ledger, prompt(&[1, 2, 3, 4, 7]));
    ledger.alloc(&[third], &[]).unwrap();
    assert_eq!(row(&ledger, third)[0], 1);
    assert_eq!(ledger.counters().private_blocks, 1);
    ledger.verify().unwrap();
}

#[test]
fn a_private_twin_goes_before_every_stored_block_when_it_is_released() {
    let (mut ledger, first, second) = computed_together(private(8), &[1, 2, 3, 4], &[1, 2, 3, 4]);
    ledger.release(&[first]).unwrap();
    ledger.release(&[second]).unwrap();
    assert_eq!(order(&ledger), [2, 1]);
}

#[test]
fn a_sequence_is_evicted_from_its_tail() {
    let mut ledger = Ledger::new(config(8));
    let slot = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    // The last page holds one token and is not stored: it goes first.
    assert_eq!(order(&ledger), [3, 2, 1]);
}

#[test]
fn the_stored_block_above_a_private_twin_outlives_what_the_sequence_stored_below() {
    // Pages 1: [1..4] of `first`; 2, 3: [1..4], [5..8] of `second`, whose first block is a twin.
    let (mut ledger, first, second) = computed_together(private(8), &[1, 2, 3, 4], &[1, 2, 3, 4, 5, 6, 7, 8]);
    ledger.release(&[first]).unwrap();
    ledger.release(&[second]).unwrap();
    assert_eq!(order(&ledger), [2, 3, 1]);
}

#[test]
fn the_same_holds_when_only_the_tail_is_cut_off() {
    let (mut ledger, first, second) = computed_together(private(8), &[1, 2, 3, 4], &[1, 2, 3, 4, 5, 6, 7, 8]);
    ledger.release(&[first]).unwrap();
    ledger.truncate(second, 4).unwrap();
    assert_eq!(order(&ledger), [3, 1]);
}

#[test]
fn a_stored_twin_goes_before_the_stored_block_above_it() {
    // `first` stores [1..4] on page 1, and computes [5..8] on page 2 while `second` stores it on page 3.
    let mut ledger = Ledger::new(private(8));
    let first = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8]));
    ledger.alloc(&[first], &[4]).unwrap();
    ledger.close_step();
    ledger.step(&[first], &[], None).unwrap();
    ledger.alloc(&[first], &[]).unwrap();
    let second = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8]));
    ledger.alloc(&[second], &[]).unwrap();
    ledger.close_step();
    ledger.step(&[second, first], &[], None).unwrap();
    ledger.release(&[second]).unwrap();
    ledger.release(&[first]).unwrap();
    assert_eq!(order(&ledger), [2, 3, 1]);
}

#[test]
fn an_evicted_block_that_is_computed_again_leads_to_its_descendants_again() {
    // The top block alone is idle, on page 1: `second` has a twin of it and keeps the block below.
    let (mut ledger, first, second) = computed_together(private(4), &[1, 2, 3, 4], &[1, 2, 3, 4, 5, 6, 7, 8]);
    ledger.release(&[first]).unwrap();
    let other = claim(&mut ledger, prompt(&[9; 7]));
    forward(&mut ledger, other);
    assert_eq!(ledger.counters().evictions, 1);
    ledger.release(&[second]).unwrap();
    ledger.release(&[other]).unwrap();
    let again = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8]));
    forward(&mut ledger, again);
    assert_eq!(ledger.position(again).unwrap().cached, 0);
    ledger.release(&[again]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])), 8);
    ledger.verify().unwrap();
}
