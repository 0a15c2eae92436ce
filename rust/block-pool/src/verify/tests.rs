//! Each test damages one field and asks which page is named.

use crate::ids::{NodeLink, PageId, Priority, Step};
use crate::queue::QueueId;
use crate::slab::Slab;
use crate::verify::PageFault;

const HELD: PageId = PageId(1);
const CACHED: PageId = PageId(2);
const UNCACHED: PageId = PageId(3);

/// [`CACHED`] and [`UNCACHED`] are evictable, a fourth page is pristine.
fn sound() -> Slab {
    let mut slab = Slab::new(4);
    for expected in [HELD, CACHED, UNCACHED] {
        assert_eq!(slab.take(Priority::DEFAULT).map(|taken| taken.page), Some(expected));
    }
    slab.publish(CACHED, NodeLink(7), Step(1));
    slab.release(CACHED, Step(1));
    slab.release(UNCACHED, Step(1));
    slab.verify().unwrap();
    slab
}

fn after(damage: impl FnOnce(&mut Slab)) -> PageFault {
    let mut slab = sound();
    damage(&mut slab);
    slab.verify().unwrap_err()
}

#[test]
fn a_reference_to_an_evictable_page_is_found() {
    let fault = after(|slab| slab.pages[UNCACHED.index()].refs += 1);
    assert_eq!(fault, PageFault::new(UNCACHED, "both held and evictable"));
}

#[test]
fn a_pin_of_an_evictable_page_is_found() {
    let fault = after(|slab| slab.pages[CACHED.index()].pins += 1);
    assert_eq!(fault, PageFault::new(CACHED, "both held and evictable"));
}

#[test]
fn a_reference_that_went_without_a_release_is_found() {
    let fault = after(|slab| slab.pages[HELD.index()].refs = 0);
    assert_eq!(fault, PageFault::new(HELD, "lost: neither held nor evictable"));
}

#[test]
fn a_page_that_left_its_list_for_nobody_is_found() {
    let fault = after(|slab| slab.queues.remove(UNCACHED));
    assert_eq!(fault, PageFault::new(UNCACHED, "lost: neither held nor evictable"));
}

#[test]
fn a_cached_page_among_the_uncached_is_found() {
    let fault = after(|slab| {
        slab.queues.remove(CACHED);
        slab.queues.push_back(CACHED, QueueId::UNCACHED);
    });
    assert_eq!(fault, PageFault::new(CACHED, "queued at None, belongs at Some(35)"));
}

#[test]
fn an_uncached_page_among_the_cached_is_found() {
    let fault = after(|slab| {
        slab.queues.remove(UNCACHED);
        slab.queues.push_back(UNCACHED, QueueId::of(Priority::DEFAULT));
    });
    assert_eq!(fault, PageFault::new(UNCACHED, "queued at Some(35), belongs at None"));
}

#[test]
fn a_page_on_another_level_than_its_priority_is_found() {
    let fault = after(|slab| slab.pages[CACHED.index()].priority = Priority::new(36).unwrap());
    assert_eq!(fault, PageFault::new(CACHED, "queued at Some(35), belongs at Some(36)"));
}

#[test]
fn more_pages_in_use_than_there_are_are_found() {
    let fault = after(|slab| {
        for page in [4, 5].map(PageId) {
            slab.pages.push(slab.pages[HELD.index()]);
            slab.queues.add_page();
            assert_eq!(slab.refs(page), 1);
        }
    });
    assert_eq!(fault, PageFault::new(PageId(5), "more pages than the slab has"));
}

#[test]
fn a_reference_to_the_null_page_is_found() {
    let fault = after(|slab| slab.pages[PageId::NULL.index()].refs = 1);
    assert_eq!(fault, PageFault::new(PageId::NULL, "the null page is in use"));
}

#[test]
fn the_null_page_in_a_list_is_found() {
    let fault = after(|slab| slab.queues.push_back(PageId::NULL, QueueId::UNCACHED));
    assert_eq!(fault, PageFault::new(PageId::NULL, "the null page is in use"));
}

#[test]
fn a_page_in_flight_that_is_not_counted_is_found() {
    let fault = after(|slab| {
        let page = &mut slab.pages[HELD.index()];
        (page.refs, page.pins) = (0, 1);
    });
    assert_eq!(fault, PageFault::new(PageId::NULL, "1 pages are in flight, 0 are counted"));
}
