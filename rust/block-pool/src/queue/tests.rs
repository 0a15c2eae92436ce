//! Each test breaks one link, count or index entry of the lists and asks which page is named.

use super::{EvictionQueues, QueueId};
use crate::ids::{PageId, Priority};
use crate::page::Page;

const FIRST: PageId = PageId(1);
const SECOND: PageId = PageId(2);
const THIRD: PageId = PageId(3);
/// Lies beside them in the moved list: it was queued elsewhere before the first.
const MOVED: PageId = PageId(4);

fn list() -> QueueId {
    QueueId::of(Priority::DEFAULT, false)
}

fn after(damage: impl FnOnce(&mut EvictionQueues, &mut [Page])) -> Option<(PageId, &'static str)> {
    let mut queues = EvictionQueues::new();
    let mut pages = [Page::new(Priority::DEFAULT); 5];
    queues.push_back(&mut pages, MOVED, QueueId::of(Priority::DEFAULT, true));
    for page in [FIRST, SECOND, THIRD] {
        queues.push_back(&mut pages, page, list());
    }
    queues.remove(&mut pages, MOVED);
    queues.insert(&mut pages, MOVED, list());
    assert_eq!(queues.first_broken(&pages), None);
    damage(&mut queues, &mut pages);
    queues.first_broken(&pages)
}

#[test]
fn a_page_that_names_another_predecessor_is_found() {
    let broken = after(|_, pages| pages[THIRD.index()].prev = FIRST);
    assert_eq!(broken, Some((THIRD, "its list links disagree")));
}

#[test]
fn a_page_that_is_skipped_shows_at_the_next() {
    let broken = after(|_, pages| pages[FIRST.index()].next = THIRD);
    assert_eq!(broken, Some((THIRD, "its list links disagree")));
}

#[test]
fn a_list_that_runs_in_a_circle_is_found() {
    let broken = after(|_, pages| pages[THIRD.index()].next = SECOND);
    assert_eq!(broken, Some((SECOND, "its list links disagree")));
}

#[test]
fn a_page_that_remembers_another_list_is_found() {
    let broken = after(|_, pages| pages[SECOND.index()].queue = QueueId::of(Priority::DEFAULT, true));
    assert_eq!(broken, Some((SECOND, "it is in another list than it remembers")));
}

#[test]
fn a_page_stamped_before_the_page_before_it_is_found() {
    let broken = after(|_, pages| pages[THIRD.index()].stamp = pages[FIRST.index()].stamp);
    assert_eq!(broken, Some((THIRD, "it is out of the order of release")));
}

#[test]
fn a_page_stamped_in_the_future_is_found() {
    let broken = after(|queues, pages| pages[THIRD.index()].stamp = queues.clock() + 1);
    assert_eq!(broken, Some((THIRD, "it is out of the order of release")));
}

#[test]
fn a_moved_page_that_is_not_indexed_is_found() {
    let broken = after(|queues, _| queues.moved.clear());
    assert_eq!(broken, Some((MOVED, "its place in its list is not indexed")));
}

#[test]
fn an_index_entry_of_a_page_that_is_not_in_the_list_is_found() {
    let broken = after(|queues, _| assert_eq!(queues.moved.insert((list().moved(), 99), SECOND), None));
    assert_eq!(broken, Some((PageId::NULL, "the number of indexed pages is wrong")));
}

#[test]
fn a_list_whose_end_is_not_its_last_page_is_found() {
    let broken = after(|queues, _| queues.lists[usize::from(list().0)].last = SECOND);
    assert_eq!(broken, Some((THIRD, "the end of its list is wrong")));
}

#[test]
fn a_list_whose_length_is_wrong_is_found() {
    let broken = after(|queues, _| queues.lists[usize::from(list().0)].len += 1);
    assert_eq!(broken, Some((THIRD, "the length of its list is wrong")));
}

#[test]
fn a_level_that_counts_as_empty_is_found() {
    let broken = after(|queues, _| queues.occupied = 0);
    assert_eq!(broken, Some((THIRD, "its level's occupied bit is wrong")));
}

#[test]
fn an_empty_level_that_counts_as_occupied_is_found() {
    let broken = after(|queues, _| queues.occupied |= QueueId::UNCACHED.bit());
    assert_eq!(broken, Some((PageId::NULL, "the occupied bit of an empty level is wrong")));
}

#[test]
fn a_wrong_number_of_queued_pages_is_found() {
    let broken = after(|queues, _| queues.queued -= 1);
    assert_eq!(broken, Some((PageId::NULL, "the number of queued pages is wrong")));
}
