//! Each test breaks one link or count of the lists and asks which page is named.

use super::{EvictionQueues, QueueId, place};
use crate::ids::{PageId, Priority};

const FIRST: PageId = PageId(1);
const SECOND: PageId = PageId(2);
const THIRD: PageId = PageId(3);

fn after(damage: impl FnOnce(&mut EvictionQueues)) -> Option<(PageId, &'static str)> {
    let mut queues = EvictionQueues::new(4);
    for _ in 0..4 {
        queues.add_page();
    }
    for page in [FIRST, SECOND, THIRD] {
        queues.push_back(page, QueueId::UNCACHED);
    }
    assert_eq!(queues.first_broken(), None);
    damage(&mut queues);
    queues.first_broken()
}

#[test]
fn a_page_that_names_another_predecessor_is_found() {
    let broken = after(|queues| queues.links[place(THIRD) as usize].prev = place(FIRST));
    assert_eq!(broken, Some((THIRD, "its list links disagree")));
}

#[test]
fn a_page_that_is_skipped_shows_at_the_next() {
    let broken = after(|queues| queues.links[place(FIRST) as usize].next = place(THIRD));
    assert_eq!(broken, Some((THIRD, "its list links disagree")));
}

#[test]
fn a_list_that_runs_in_a_circle_is_found() {
    let broken = after(|queues| queues.links[place(THIRD) as usize].next = place(SECOND));
    assert_eq!(broken, Some((SECOND, "its list links disagree")));
}

#[test]
fn a_list_whose_end_is_not_its_last_page_is_found() {
    let broken = after(|queues| {
        queues.links[usize::from(QueueId::UNCACHED.0)].prev = place(SECOND);
    });
    assert_eq!(broken, Some((THIRD, "the end of its list is wrong")));
}

#[test]
fn a_list_that_counts_as_empty_is_found() {
    let broken = after(|queues| queues.occupied = 0);
    assert_eq!(broken, Some((THIRD, "its list's occupied bit is wrong")));
}

#[test]
fn an_empty_list_that_counts_as_occupied_is_found() {
    let broken = after(|queues| queues.occupied |= 1 << QueueId::of(Priority::DEFAULT).0);
    assert_eq!(broken.map(|(_, what)| what), Some("its list's occupied bit is wrong"));
}

#[test]
fn a_wrong_number_of_queued_pages_is_found() {
    let broken = after(|queues| queues.queued -= 1);
    assert_eq!(broken, Some((PageId::NULL, "the number of queued pages is wrong")));
}
