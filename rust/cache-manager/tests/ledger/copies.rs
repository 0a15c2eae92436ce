//! Copies: what they hold, after which step they may start, and what their end does to the queues.

use crate::common::{claim, computed, config, finish_copies, forward, prompt, row};
use block_pool::{PageId, PageState, Priority, Retention, Step};
use cache_manager::{BlockRetention, CopyEnd, Ledger, NewSequence, SlotId, TokenRange};
use std::sync::Arc;

/// Two stored blocks on pages 1 and 2, and the request that holds them.
fn two_blocks() -> (Ledger, SlotId) {
    let mut ledger = Ledger::new(config(8));
    let slot = computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    (ledger, slot)
}

fn order(ledger: &Ledger) -> Vec<u32> {
    ledger.verify().unwrap();
    ledger.pool().eviction_order().map(|page| page.0).collect()
}

#[test]
fn a_copy_names_its_pages_in_the_order_of_the_blocks() {
    let (mut ledger, slot) = two_blocks();
    assert_eq!(ledger.start_copy(slot, 0, 2).unwrap().pages, [PageId(1), PageId(2)]);
    assert_eq!(ledger.start_copy(slot, 1, 1).unwrap().pages, [PageId(2)]);
    ledger.verify().unwrap();
}

#[test]
fn a_copy_waits_for_the_newest_step_of_its_request() {
    let (mut ledger, slot) = two_blocks();
    ledger.update(slot, 9).unwrap();
    ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(ledger.start_copy(slot, 0, 1).unwrap().after, Step(2));
}

#[test]
fn a_copy_of_an_adopted_page_waits_for_the_step_that_writes_it() {
    let mut ledger = Ledger::new(config(8));
    let adopter = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5]));
    let writer = claim(&mut ledger, prompt(&[1, 2, 3, 4, 6]));
    for slot in [adopter, writer] {
        ledger.alloc(&[slot], &[]).unwrap();
        ledger.close_step();
    }
    ledger.step(&[writer], &[], None).unwrap();
    ledger.step(&[adopter], &[], None).unwrap();
    assert_eq!(row(&ledger, adopter)[0], row(&ledger, writer)[0]);
    assert_eq!(ledger.start_copy(adopter, 0, 1).unwrap().after, Step(2));
}

#[test]
fn a_released_page_remembers_the_newest_step_of_its_holder() {
    let (mut ledger, slot) = two_blocks();
    ledger.update(slot, 9).unwrap();
    ledger.alloc(&[slot], &[]).unwrap();
    ledger.release(&[slot]).unwrap();
    assert_eq!([1, 2, 3].map(|page| ledger.pool().last_use(PageId(page))), [Step(2); 3]);
}

#[test]
fn a_load_waits_for_the_last_forward_that_reads_the_pages_it_writes_to() {
    let mut ledger = Ledger::new(config(3));
    let reader = computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    ledger.update(reader, 9).unwrap();
    ledger.alloc(&[reader], &[]).unwrap(); // step 2 is out, and reads pages 1 to 3
    ledger.close_step();
    ledger.release(&[reader]).unwrap();
    let waiting = claim(&mut ledger, prompt(&[11, 12, 13, 14, 15]));
    let jobs = ledger.alloc_with_loads(&[waiting], &[], &[1]).unwrap();
    let page = jobs[0].copy.pages[0];
    assert!((1..=3).contains(&page.0), "all pages were the reader's");
    assert_eq!(jobs[0].copy.after, Step(2));
}

#[test]
fn a_page_released_during_a_copy_is_handed_out_after_its_end() {
    let mut ledger = Ledger::new(config(2));
    let slot = computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let job = ledger.start_copy(slot, 0, 2).unwrap();
    ledger.release(&[slot]).unwrap();
    assert_eq!((ledger.pool().in_flight(), ledger.pool().available()), (2, 0));
    let other = claim(&mut ledger, prompt(&[9]));
    assert!(ledger.alloc(&[other], &[]).is_err());
    finish_copies(&mut ledger, &[job.id.0]).unwrap();
    forward(&mut ledger, other);
    ledger.verify().unwrap();
}

#[test]
fn a_page_in_flight_can_be_hit() {
    let (mut ledger, slot) = two_blocks();
    let job = ledger.start_copy(slot, 0, 2).unwrap();
    ledger.release(&[slot]).unwrap();
    let again = claim(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    ledger.alloc(&[again], &[]).unwrap();
    assert_eq!(row(&ledger, again)[..2], [1, 2]);
    finish_copies(&mut ledger, &[job.id.0]).unwrap();
    assert_eq!(ledger.pool().state(PageId(1)), PageState::Referenced);
    ledger.verify().unwrap();
}

#[test]
fn a_page_that_is_being_copied_is_never_written_again() {
    let mut ledger = Ledger::new(config(8));
    let slot = computed(&mut ledger, &[1, 2, 3]);
    let job = ledger.start_copy(slot, 0, 1).unwrap();
    ledger.truncate(slot, 2).unwrap();
    assert_eq!(ledger.position(slot).unwrap().processed, 0);
    ledger.update(slot, 9).unwrap();
    ledger.alloc(&[slot], &[]).unwrap();
    assert_ne!(row(&ledger, slot), [job.pages[0].0]);
    assert_eq!(ledger.pool().state(job.pages[0]), PageState::InFlight);
    ledger.verify().unwrap();
}

#[test]
fn copies_that_end_root_first_leave_the_tail_to_be_evicted_first() {
    let (mut ledger, slot) = two_blocks();
    let jobs = [0, 1].map(|block| ledger.start_copy(slot, block, 1).unwrap().id.0);
    ledger.release(&[slot]).unwrap();
    finish_copies(&mut ledger, &jobs).unwrap();
    assert_eq!(order(&ledger), [2, 1]);
}

#[test]
fn a_copy_of_the_tail_that_ends_late_does_not_put_it_behind_the_block_above() {
    let (mut ledger, slot) = two_blocks();
    let job = ledger.start_copy(slot, 1, 1).unwrap();
    ledger.release(&[slot]).unwrap();
    assert_eq!(order(&ledger), [1]);
    finish_copies(&mut ledger, &[job.id.0]).unwrap();
    assert_eq!(order(&ledger), [2, 1]);
}

#[test]
fn a_block_whose_retention_ends_is_behind_the_block_below_it_however_copies_ended() {
    let brief = Retention::new(Priority::LOWEST, Some(1.0), None).unwrap();
    let first_block = TokenRange { start: 0, end: Some(4), retention: brief };
    let retention = BlockRetention::new(vec![first_block], Priority::DEFAULT.into(), 8).unwrap();
    let mut ledger = Ledger::new(config(8));
    ledger.begin_step(Some(0.0), &[]).unwrap();
    let tokens = prompt(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let slot = claim(&mut ledger, NewSequence { retention: Some(Arc::new(retention)), ..tokens });
    forward(&mut ledger, slot);
    let jobs = [0, 1].map(|block| ledger.start_copy(slot, block, 1).unwrap().id.0);
    ledger.release(&[slot]).unwrap();
    finish_copies(&mut ledger, &jobs).unwrap();
    assert_eq!(order(&ledger), [1, 2], "the lowest priority first");
    ledger.begin_step(Some(2.0), &[]).unwrap();
    assert_eq!(order(&ledger), [2, 1]);
}

#[test]
fn completions_may_come_with_the_opening_of_a_step() {
    let (mut ledger, slot) = two_blocks();
    let job = ledger.start_copy(slot, 0, 1).unwrap();
    assert_eq!(ledger.begin_step(Some(1.5), &[(job.id.0, CopyEnd::Done)]), Ok((Step(2), vec![])));
    assert_eq!(ledger.pool().pins(PageId(1)), 0);
    ledger.verify().unwrap();
}

#[test]
fn a_dump_lists_the_pages_of_pins_and_copies() {
    let (mut ledger, slot) = two_blocks();
    ledger.pin(slot).unwrap();
    ledger.start_copy(slot, 1, 1).unwrap();
    let waiting = claim(&mut ledger, prompt(&[11, 12, 13, 14, 15]));
    ledger.alloc_with_loads(&[waiting], &[], &[1]).unwrap();
    let dump = ledger.debug_dump();
    let lines: Vec<_> =
        dump.lines().filter(|line| line.starts_with("pin") || line.starts_with("copy")).collect();
    let expected = ["pin 0: pages [1, 2]", "copy 0: reads pages [2]", "copy 1: for slot 1, pages [3]"];
    assert_eq!(lines, expected);
    assert_eq!((ledger.pins(), ledger.copies_in_flight()), (1, 2));
}
