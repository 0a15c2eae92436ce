//! Forks: what the child shares, who copies before writing, and how both live on.

use crate::common::{claim, computed, config, finish_copies, forward, hit, private, prompt, row};
use block_pool::{GroupId, PageId, PageState, Step};
use cache_manager::{CopyEnd, Ledger, LedgerConfig, LedgerError, SlotId};

/// Six computed tokens on pages 1 and 2, and a fork of them.
fn forked(config: LedgerConfig) -> (Ledger, SlotId, SlotId) {
    let mut ledger = Ledger::new(config);
    let parent = computed(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    let child = ledger.fork(parent).unwrap();
    ledger.verify().unwrap();
    (ledger, parent, child)
}

/// Appends a token to each request and plans all of them together.
fn extend(ledger: &mut Ledger, batch: &[SlotId]) -> Result<(), LedgerError> {
    for (token, &slot) in (60..).zip(batch) {
        ledger.update(slot, token)?;
    }
    let outcome = ledger.alloc(batch, &[]);
    ledger.verify().unwrap();
    outcome
}

fn taken(ledger: &mut Ledger) -> Vec<(u32, u32)> {
    let copies = ledger.take_page_copies(GroupId::FIRST);
    ledger.verify().unwrap();
    copies.iter().map(|copy| (copy.source.0, copy.destination.0)).collect()
}

#[test]
fn a_child_holds_the_pages_of_all_computed_tokens() {
    let (ledger, parent, child) = forked(config(8));
    assert_eq!((row(&ledger, parent), row(&ledger, child)), (vec![1, 2], vec![1, 2]));
    assert_eq!([1, 2].map(|page| ledger.pool().refs(PageId(page))), [2, 2]);
    assert_eq!(ledger.tokens(child).unwrap(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(ledger.position(child).unwrap().processed, 6);
}

#[test]
fn the_first_to_write_gets_a_copy_and_the_last_writes_in_place() {
    let (mut ledger, parent, child) = forked(config(8));
    extend(&mut ledger, &[child]).unwrap();
    assert_eq!(row(&ledger, child), [1, 3]);
    extend(&mut ledger, &[parent]).unwrap(); // the copy was not even taken yet
    assert_eq!(row(&ledger, parent), [1, 2]);
    assert_eq!(taken(&mut ledger), [(2, 3)]);
    assert_eq!(taken(&mut ledger), []);
    assert_eq!(ledger.counters().page_copies, 1);
}

#[test]
fn all_but_the_last_of_a_batch_get_copies() {
    let (mut ledger, parent, child) = forked(config(8));
    let third = ledger.fork(child).unwrap();
    extend(&mut ledger, &[child, third, parent]).unwrap();
    assert_eq!([child, third, parent].map(|slot| row(&ledger, slot)[1]), [3, 4, 2]);
    assert_eq!(taken(&mut ledger), [(2, 3), (2, 4)]);
}

#[test]
fn blocks_that_are_full_are_not_copied() {
    let mut ledger = Ledger::new(config(8));
    let parent = computed(&mut ledger, &[1, 2, 3, 4]);
    let child = ledger.fork(parent).unwrap();
    extend(&mut ledger, &[parent, child]).unwrap();
    assert_eq!((row(&ledger, parent), row(&ledger, child)), (vec![1, 2], vec![1, 3]));
    assert_eq!(taken(&mut ledger), []);
}

#[test]
fn copies_count_among_the_pages_that_are_needed() {
    let (mut ledger, parent, child) = forked(config(2));
    ledger.update(child, 7).unwrap();
    let before = ledger.fingerprint();
    let refused = ledger.alloc(&[child], &[]).unwrap_err();
    assert!(
        matches!(refused, LedgerError::InsufficientBlocks { slot, room } if slot == child && room.needed == 1 && room.free == 0),
        "{refused}"
    );
    assert_eq!(ledger.fingerprint(), before);
    ledger.release(&[parent]).unwrap();
    ledger.alloc(&[child], &[]).unwrap(); // alone, it writes in place
    assert_eq!((row(&ledger, child), taken(&mut ledger)), (vec![1, 2], vec![]));
}

#[test]
fn a_page_that_a_mover_reads_is_not_written_to() {
    let mut ledger = Ledger::new(config(8));
    let slot = computed(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    let job = ledger.start_copy(slot, 1, 1).unwrap();
    extend(&mut ledger, &[slot]).unwrap();
    assert_eq!((row(&ledger, slot), taken(&mut ledger)), (vec![1, 3], vec![(2, 3)]));
    finish_copies(&mut ledger, &[job.id.0]).unwrap();
    assert_eq!(ledger.pool().state(PageId(2)), PageState::Evictable);
}

// Planned copies

#[test]
fn a_page_of_a_planned_copy_is_handed_out_when_the_copy_was_taken() {
    let (mut ledger, parent, child) = forked(config(3));
    extend(&mut ledger, &[child]).unwrap();
    ledger.release(&[parent, child]).unwrap();
    assert_eq!((ledger.pool().available(), ledger.pool().in_flight()), (1, 2));
    assert_eq!(taken(&mut ledger), [(2, 3)]);
    assert_eq!((ledger.pool().available(), ledger.pool().in_flight()), (3, 0));
}

#[test]
fn a_copy_of_a_copy_comes_after_it() {
    let (mut ledger, _, child) = forked(config(8));
    extend(&mut ledger, &[child]).unwrap();
    let grandchild = ledger.fork(child).unwrap();
    assert_eq!(row(&ledger, grandchild), [1, 3]);
    extend(&mut ledger, &[grandchild]).unwrap();
    assert_eq!(taken(&mut ledger), [(2, 3), (3, 4)]);
}

#[test]
fn a_mover_waits_for_the_step_that_a_page_was_copied_before() {
    let (mut ledger, parent, child) = forked(config(8));
    extend(&mut ledger, &[child]).unwrap(); // step 2
    ledger.release(&[parent, child]).unwrap();
    ledger.begin_step(None, &[]).unwrap(); // step 3: the copy is carried out late
    taken(&mut ledger);
    assert_eq!([2, 3].map(|page| ledger.pool().last_use(PageId(page))), [Step(3), Step(3)]);
}

// Steps

#[test]
fn steps_out_and_placeholders_stay_with_the_parent() {
    let mut ledger = Ledger::new(config(8));
    let parent = computed(&mut ledger, &[1, 2, 3, 4, 5]);
    ledger.update(parent, 6).unwrap();
    for _ in 0..2 {
        ledger.alloc(&[parent], &[]).unwrap();
        ledger.close_step();
    }
    let child = ledger.fork(parent).unwrap();
    ledger.verify().unwrap();
    assert_eq!(ledger.tokens(child).unwrap(), [1, 2, 3, 4, 5, 6]);
    let position = ledger.position(child).unwrap();
    assert_eq!((position.processed, position.active, position.known), (5, 0, 6));
    assert_eq!(ledger.step(&[child], &[7], None), Err(LedgerError::NotPlanned { slot: child }));
    ledger.step(&[parent], &[7], None).unwrap();
    ledger.step(&[parent], &[8], None).unwrap();
    assert_eq!(ledger.tokens(parent).unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(ledger.tokens(child).unwrap(), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_child_does_not_have_a_token_that_is_computed_and_not_known() {
    let mut ledger = Ledger::new(config(8));
    let parent = computed(&mut ledger, &[1, 2, 3]);
    ledger.update(parent, 4).unwrap();
    for _ in 0..2 {
        ledger.alloc(&[parent], &[]).unwrap();
        ledger.close_step();
    }
    for _ in 0..2 {
        ledger.step(&[parent], &[], None).unwrap(); // the tokens come later, by update
    }
    assert_eq!(ledger.position(parent).unwrap().processed, 5);
    let child = ledger.fork(parent).unwrap();
    ledger.verify().unwrap();
    assert_eq!((ledger.position(child).unwrap().processed, row(&ledger, child)), (4, vec![1]));
}

#[test]
fn a_step_planned_before_the_fork_writes_in_place_and_the_child_gets_a_copy() {
    let mut ledger = Ledger::new(config(8));
    let parent = computed(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    extend(&mut ledger, &[parent]).unwrap();
    let child = ledger.fork(parent).unwrap();
    extend(&mut ledger, &[child]).unwrap();
    assert_eq!((row(&ledger, parent), row(&ledger, child)), (vec![1, 2], vec![1, 3]));
    assert_eq!(taken(&mut ledger), [(2, 3)]);
}

#[test]
fn a_fork_in_mid_prompt_goes_on_with_the_prompt() {
    let mut ledger = Ledger::new(config(8));
    let parent = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    ledger.alloc(&[parent], &[6]).unwrap();
    ledger.step(&[parent], &[], None).unwrap();
    let child = ledger.fork(parent).unwrap();
    ledger.alloc(&[child], &[]).unwrap();
    assert_eq!((row(&ledger, child), taken(&mut ledger)), (vec![1, 3, 4], vec![(2, 3)]));
    assert_eq!(ledger.position(child).unwrap().active, 3);
    ledger.step(&[child], &[], None).unwrap();
    forward(&mut ledger, parent); // finds the block that its child stored
    assert_eq!(row(&ledger, parent)[..2], [1, 3]);
    assert_eq!(ledger.counters().admissions, 1);
    ledger.verify().unwrap();
}

// Blocks that the parent stores on a page that the child holds

/// Nine tokens to compute: the parent stores the second block while its child still holds the page of the
/// block as its partial last one.
fn stored_behind(pages: u32) -> (Ledger, SlotId, SlotId) {
    let mut ledger = Ledger::new(config(pages));
    let parent = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    ledger.alloc(&[parent], &[6]).unwrap();
    ledger.step(&[parent], &[], None).unwrap();
    ledger.alloc(&[parent], &[2]).unwrap();
    let child = ledger.fork(parent).unwrap();
    ledger.step(&[parent], &[], None).unwrap();
    ledger.verify().unwrap();
    assert!(ledger.pool().node(PageId(2)).is_some());
    (ledger, parent, child)
}

#[test]
fn a_stored_page_is_not_written_to_by_its_only_holder() {
    let (mut ledger, parent, child) = stored_behind(8);
    ledger.truncate(child, 6).unwrap();
    ledger.release(&[parent]).unwrap();
    extend(&mut ledger, &[child]).unwrap();
    assert_ne!(row(&ledger, child)[1], 2);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9])), 8);
}

#[test]
fn a_hit_on_the_page_that_a_request_holds_itself_gives_no_page_back() {
    let (mut ledger, parent, child) = stored_behind(3);
    ledger.release(&[parent]).unwrap();
    let other = computed(&mut ledger, &[50]); // has the third page
    assert!(matches!(ledger.alloc(&[child], &[]), Err(LedgerError::InsufficientBlocks { .. })));
    ledger.release(&[other]).unwrap();
    ledger.alloc(&[child], &[]).unwrap();
    assert_eq!((row(&ledger, child), ledger.position(child).unwrap().active), (vec![1, 2, 3], 1));
    ledger.verify().unwrap();
}

#[test]
fn a_child_that_goes_last_leaves_the_tail_to_be_evicted_first() {
    let (mut ledger, parent, child) = stored_behind(8);
    ledger.release(&[parent]).unwrap();
    ledger.release(&[child]).unwrap();
    ledger.verify().unwrap();
    let order: Vec<u32> = ledger.pool().eviction_order().map(|page| page.0).collect();
    assert_eq!(order, [2, 1]);
}

#[test]
fn an_idle_twin_above_a_page_that_the_child_gives_up_late_is_evicted_after_it() {
    let mut ledger = Ledger::new(private(8));
    let twin = computed(&mut ledger, &[1, 2, 3, 4]); // page 1
    let mut request = prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    request.no_read = true;
    let parent = claim(&mut ledger, request); // its first block stays private, on page 2
    ledger.alloc(&[parent], &[6]).unwrap();
    ledger.step(&[parent], &[], None).unwrap();
    ledger.alloc(&[parent], &[2]).unwrap();
    let child = ledger.fork(parent).unwrap();
    ledger.step(&[parent], &[], None).unwrap(); // its second block is stored, on page 3
    ledger.release(&[twin, parent]).unwrap();
    ledger.release(&[child]).unwrap();
    ledger.verify().unwrap();
    let order: Vec<u32> = ledger.pool().eviction_order().map(|page| page.0).collect();
    assert_eq!(order, [2, 3, 1]);
}

// Neither disturbs the other

#[test]
fn a_truncation_of_one_leaves_the_page_to_the_other() {
    let (mut ledger, parent, child) = forked(config(8));
    ledger.truncate(child, 5).unwrap();
    ledger.verify().unwrap();
    assert_eq!((row(&ledger, child), row(&ledger, parent)), (vec![1], vec![1, 2]));
    assert_eq!(ledger.position(parent).unwrap().processed, 6);
    extend(&mut ledger, &[parent]).unwrap();
    assert_eq!((row(&ledger, parent), taken(&mut ledger)), (vec![1, 2], vec![]));
}

#[test]
fn a_preemption_of_one_leaves_the_pages_to_the_other() {
    let (mut ledger, parent, child) = forked(config(8));
    ledger.preempt(&[parent]).unwrap();
    ledger.verify().unwrap();
    assert_eq!((row(&ledger, child), ledger.position(child).unwrap().processed), (vec![1, 2], 6));
    forward(&mut ledger, parent);
    assert_eq!(row(&ledger, parent), [1, 3]);
}

#[test]
fn pages_are_free_when_the_last_of_a_family_has_gone() {
    let (mut ledger, parent, child) = forked(config(2));
    ledger.release(&[parent]).unwrap();
    assert_eq!(ledger.pool().available(), 0);
    ledger.release(&[child]).unwrap();
    assert_eq!(ledger.pool().available(), 2);
    ledger.verify().unwrap();
}

#[test]
fn a_child_of_a_request_from_before_a_reset_is_from_before_it_too() {
    let (mut ledger, parent, _) = forked(config(8));
    ledger.reset_prefix_cache();
    let child = ledger.fork(parent).unwrap();
    ledger.update(child, 7).unwrap();
    ledger.update(child, 8).unwrap();
    forward(&mut ledger, child);
    ledger.verify().unwrap();
    assert_eq!((ledger.cached_blocks(), hit(&mut ledger, prompt(&[1, 2, 3, 4, 5]))), (0, 0));
}

#[test]
fn private_blocks_are_private_to_both() {
    let mut ledger = Ledger::new(private(8));
    computed(&mut ledger, &[1, 2, 3, 4]);
    let mut request = prompt(&[1, 2, 3, 4, 5]);
    request.no_read = true;
    let parent = claim(&mut ledger, request);
    forward(&mut ledger, parent);
    let child = ledger.fork(parent).unwrap();
    ledger.verify().unwrap();
    ledger.release(&[parent]).unwrap();
    ledger.verify().unwrap();
    assert_eq!(row(&ledger, child), [2, 3]);
    ledger.release(&[child]).unwrap();
    ledger.verify().unwrap();
}

// Refusals

#[test]
fn a_padding_request_is_not_forked() {
    let mut ledger = Ledger::new(config(2));
    let slot = claim(&mut ledger, prompt(&[1]));
    ledger.alloc_dummy(slot).unwrap();
    let before = ledger.fingerprint();
    assert_eq!(ledger.fork(slot), Err(LedgerError::Padding(slot)));
    assert_eq!(ledger.fingerprint(), before);
}

#[test]
fn a_slot_that_nobody_has_is_not_forked() {
    let (mut ledger, parent, _) = forked(config(2));
    ledger.release(&[parent]).unwrap();
    let before = ledger.fingerprint();
    assert_eq!(ledger.fork(parent), Err(LedgerError::UnknownSlot(parent)));
    assert_eq!(ledger.fingerprint(), before);
}

#[test]
fn a_shared_page_that_a_load_replaces_is_not_evicted_after_the_block_above_it() {
    let mut ledger = Ledger::new(private(16));
    let long = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let first = claim(&mut ledger, prompt(&long[..4]));
    let parent = claim(&mut ledger, prompt(&long));
    ledger.alloc(&[first, parent], &[4, 6]).unwrap();
    ledger.step(&[first, parent], &[], None).unwrap(); // the first block is stored; the parent keeps a twin
    ledger.alloc(&[parent], &[2]).unwrap();
    ledger.close_step();
    let child = ledger.fork(parent).unwrap();
    let jobs = ledger.alloc_with_loads(&[child], &[], &[1]).unwrap();
    ledger.step(&[parent], &[], None).unwrap(); // stores the page of the second block, which the child holds
    ledger.release(&[first, parent]).unwrap();
    ledger.end_copies(&[(jobs[0].copy.id.0, CopyEnd::Done)]).unwrap();
    ledger.verify().unwrap();
}

#[test]
fn a_fork_without_pages_of_a_request_from_before_a_reset_takes_part_in_the_cache_again() {
    let mut ledger = Ledger::new(config(8));
    let parent = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5]));
    ledger.alloc(&[parent], &[]).unwrap();
    ledger.reset_prefix_cache();
    let child = ledger.fork(parent).unwrap();
    forward(&mut ledger, child);
    assert_eq!(ledger.counters().published_blocks, 1, "its full block");
    ledger.verify().unwrap();
}
