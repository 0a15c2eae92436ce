//! Each test damages one field and asks which page is named.

use crate::ids::{NodeLink, PageId, Priority, Step};
use crate::page::{ColdPage, Flags};
use crate::policy::EvictionPolicy;
use crate::pool::Pool;
use crate::queue::QueueId;
use crate::retention::Retention;
use crate::verify::PageFault;

const HELD: PageId = PageId(1);
const CACHED: PageId = PageId(2);
const UNCACHED: PageId = PageId(3);

/// [`CACHED`] and [`UNCACHED`] are evictable, a fourth page is pristine.
fn sound() -> Pool {
    let mut pool = Pool::new(4, EvictionPolicy::PrioritySlru, Priority::DEFAULT);
    for expected in [HELD, CACHED, UNCACHED] {
        assert_eq!(pool.take(Priority::DEFAULT).map(|taken| taken.page), Some(expected));
    }
    pool.publish(CACHED, NodeLink(7), Step(1));
    pool.release(CACHED, Step(1));
    pool.release(UNCACHED, Step(1));
    pool.verify().unwrap();
    pool
}

fn after(damage: impl FnOnce(&mut Pool)) -> PageFault {
    let mut pool = sound();
    damage(&mut pool);
    pool.verify().unwrap_err()
}

#[test]
fn a_reference_to_an_evictable_page_is_found() {
    let fault = after(|pool| pool.pages[UNCACHED.index()].refs += 1);
    assert_eq!(fault, PageFault::new(UNCACHED, "both held and evictable"));
}

#[test]
fn a_pin_of_an_evictable_page_is_found() {
    let fault = after(|pool| pool.cold[CACHED.index()].pins += 1);
    assert_eq!(fault, PageFault::new(CACHED, "both held and evictable"));
}

#[test]
fn a_reference_that_went_without_a_release_is_found() {
    let fault = after(|pool| pool.pages[HELD.index()].refs = 0);
    assert_eq!(fault, PageFault::new(HELD, "lost: neither held nor evictable"));
}

#[test]
fn a_page_that_left_its_list_for_nobody_is_found() {
    let fault = after(|pool| pool.queues.remove(&mut pool.pages, UNCACHED));
    assert_eq!(fault, PageFault::new(UNCACHED, "lost: neither held nor evictable"));
}

#[test]
fn a_cached_page_among_the_uncached_is_found() {
    let fault = after(|pool| {
        pool.queues.remove(&mut pool.pages, CACHED);
        pool.queues.push_back(&mut pool.pages, CACHED, QueueId::UNCACHED);
    });
    assert_eq!(fault, PageFault::new(CACHED, "queued as uncached, belongs at priority 35"));
}

#[test]
fn an_uncached_page_among_the_cached_is_found() {
    let fault = after(|pool| {
        pool.queues.remove(&mut pool.pages, UNCACHED);
        pool.queues.push_back(&mut pool.pages, UNCACHED, QueueId::of(Priority::DEFAULT, false));
    });
    assert_eq!(fault, PageFault::new(UNCACHED, "queued at priority 35, belongs as uncached"));
}

#[test]
fn a_page_on_another_level_than_its_priority_is_found() {
    let fault = after(|pool| pool.pages[CACHED.index()].priority = Priority::new(36).unwrap());
    assert_eq!(fault, PageFault::new(CACHED, "queued at priority 35, belongs at priority 36"));
}

#[test]
fn more_pages_in_use_than_there_are_are_found() {
    let fault = after(|pool| {
        for page in [4, 5].map(PageId) {
            pool.pages.push(pool.pages[HELD.index()]);
            pool.cold.push(ColdPage::default());
            assert_eq!(pool.refs(page), 1);
        }
    });
    assert_eq!(fault, PageFault::new(PageId(5), "more pages than the pool has"));
}

#[test]
fn a_reference_to_the_null_page_is_found() {
    let fault = after(|pool| pool.pages[PageId::NULL.index()].refs = 1);
    assert_eq!(fault, PageFault::new(PageId::NULL, "the null page is in use"));
}

#[test]
fn a_null_page_that_counts_as_queued_is_found() {
    let fault = after(|pool| pool.pages[0].queue = QueueId::UNCACHED);
    assert_eq!(fault, PageFault::new(PageId::NULL, "the null page is in use"));
}

#[test]
fn a_page_in_flight_that_is_not_counted_is_found() {
    let fault = after(|pool| {
        pool.pages[HELD.index()].refs = 0;
        pool.pages[HELD.index()].flags.set(Flags::PINNED, true);
        pool.cold[HELD.index()].pins = 1;
    });
    assert_eq!(fault, PageFault::new(PageId::NULL, "1 pages are in flight, 0 are counted"));
}

#[test]
fn a_page_in_another_segment_than_its_use_says_is_found() {
    let fault = after(|pool| pool.pages[CACHED.index()].flags.set(Flags::REUSED, true));
    assert_eq!(fault, PageFault::new(CACHED, "queued at priority 35, belongs at priority 35, protected"));
}

#[test]
fn a_transfer_that_is_not_marked_is_found() {
    let fault = after(|pool| pool.cold[HELD.index()].pins = 1);
    assert_eq!(fault, PageFault::new(HELD, "its mark of being pinned is wrong"));
}

#[test]
fn a_mark_of_a_retention_that_does_not_end_is_found() {
    let fault = after(|pool| pool.pages[HELD.index()].flags.set(Flags::TIMED, true));
    assert_eq!(fault, PageFault::new(HELD, "its mark of a retention that ends is wrong"));
}

#[test]
fn a_retention_of_a_page_that_was_never_used_is_found() {
    let limit = Retention::new(Priority::DEFAULT, None, Some(1.0)).unwrap().limit();
    let fault = after(|pool| pool.limits.set(PageId(4), limit, None));
    let what = "0 pages have a retention that ends, 1 are counted";
    assert_eq!(fault, PageFault::new(PageId::NULL, what));
}

#[test]
fn a_duration_that_runs_while_the_page_is_referenced_is_found() {
    let retention = Retention::new(Priority::DEFAULT, Some(1.0), None).unwrap();
    let fault = after(|pool| {
        pool.retain(HELD, retention);
        pool.limits.released(HELD, Some(0.0));
    });
    assert_eq!(fault, PageFault::new(HELD, "the end of its retention is noted wrongly"));
}

#[test]
fn a_duration_that_does_not_run_after_the_release_is_found() {
    let retention = Retention::new(Priority::DEFAULT, Some(1.0), None).unwrap();
    let fault = after(|pool| {
        pool.retain(CACHED, retention);
        pool.limits.released(CACHED, None);
    });
    assert_eq!(fault, PageFault::new(CACHED, "the end of its retention is noted wrongly"));
}

#[test]
fn a_wrong_number_of_pristine_pages_is_found() {
    let fault = after(|pool| {
        pool.add_pages(1);
        pool.pages[4].refs = 1;
    });
    assert_eq!(fault, PageFault::new(PageId(4), "1 pages are pristine, 4 were used"));
}
