//! How a page moves between its states, and when references and pins end.

use block_pool::{EvictionPolicy, NodeLink, PageId, PageState, Pool, Priority, PriorityError, Step, Taken};

fn pool(pages: u32) -> Pool {
    Pool::new(pages, EvictionPolicy::PriorityLru, Priority::DEFAULT)
}

fn take(pool: &mut Pool) -> PageId {
    pool.take(Priority::DEFAULT).expect("a page is free").page
}

/// A page that stands for `node`, released in step 1.
fn cached(pool: &mut Pool, node: u32) -> PageId {
    let page = take(pool);
    pool.publish(page, NodeLink(node), Step(1));
    pool.release(page, Step(1));
    page
}

fn level(level: i64) -> Priority {
    Priority::new(level).expect("a level from 0 to 100")
}

#[test]
fn pristine_pages_are_handed_out_lowest_id_first_and_never_the_null_page() {
    let mut pool = pool(3);
    assert_eq!(pool.state(PageId(1)), PageState::Pristine);
    let pages: Vec<_> = std::iter::from_fn(|| pool.take(Priority::DEFAULT)).collect();
    let expected = [1, 2, 3].map(|id| Taken { page: PageId(id), evicted: None, pristine: true });
    assert_eq!(pages, expected);
    assert_eq!((pool.total(), pool.available(), pool.pristine()), (3, 0, 0));
    pool.verify().unwrap();
}

#[test]
fn a_slab_without_usable_pages_hands_out_none() {
    let mut pool = pool(0);
    assert_eq!(pool.take(Priority::DEFAULT), None);
    assert_eq!(pool.total(), 0);
    pool.verify().unwrap();
}

#[test]
fn a_page_is_referenced_until_its_last_reference_ends() {
    let mut pool = pool(2);
    let page = take(&mut pool);
    pool.acquire(page);
    pool.release(page, Step(1));
    assert_eq!((pool.state(page), pool.refs(page)), (PageState::Referenced, 1));
    pool.release(page, Step(1));
    assert_eq!((pool.state(page), pool.refs(page)), (PageState::Evictable, 0));
    assert_eq!((pool.available(), pool.evictable(), pool.pristine()), (2, 1, 1));
    pool.verify().unwrap();
}

#[test]
fn a_hit_takes_an_evictable_page_out_of_its_queue_with_what_it_stands_for() {
    let mut pool = pool(2);
    let page = cached(&mut pool, 7);
    pool.acquire(page);
    assert_eq!(pool.state(page), PageState::Referenced);
    assert_eq!(pool.node(page), Some(NodeLink(7)));
    assert_eq!(pool.evictable(), 0);
    pool.verify().unwrap();
}

#[test]
fn a_page_released_during_a_transfer_is_in_flight_until_the_transfer_ends() {
    let mut pool = pool(1);
    let page = take(&mut pool);
    pool.pin(page);
    pool.release(page, Step(1));
    assert_eq!(pool.state(page), PageState::InFlight);
    assert_eq!((pool.in_flight(), pool.available()), (1, 0));
    assert_eq!(pool.take(Priority::DEFAULT), None);
    assert!(pool.unpin(page));
    assert_eq!(pool.state(page), PageState::Evictable);
    assert_eq!((pool.in_flight(), pool.available()), (0, 1));
    pool.verify().unwrap();
}

#[test]
fn a_transfer_that_ends_first_leaves_the_page_referenced() {
    let mut pool = pool(1);
    let page = take(&mut pool);
    pool.pin(page);
    assert!(!pool.unpin(page));
    assert_eq!((pool.state(page), pool.pins(page)), (PageState::Referenced, 0));
    pool.release(page, Step(1));
    assert_eq!(pool.state(page), PageState::Evictable);
    pool.verify().unwrap();
}

#[test]
fn a_transfer_of_an_evictable_page_takes_it_out_of_its_queue() {
    let mut pool = pool(1);
    let page = cached(&mut pool, 7);
    pool.pin(page);
    assert_eq!((pool.state(page), pool.available()), (PageState::InFlight, 0));
    assert!(pool.unpin(page));
    assert_eq!((pool.state(page), pool.node(page)), (PageState::Evictable, Some(NodeLink(7))));
    pool.verify().unwrap();
}

#[test]
fn only_the_last_of_several_transfers_makes_a_page_evictable() {
    let mut pool = pool(1);
    let page = cached(&mut pool, 7);
    pool.pin(page);
    pool.pin(page);
    assert!(!pool.unpin(page));
    assert_eq!((pool.state(page), pool.in_flight()), (PageState::InFlight, 1));
    assert!(pool.unpin(page));
    assert_eq!(pool.in_flight(), 0);
    pool.verify().unwrap();
}

#[test]
fn a_hit_on_a_page_in_flight_makes_it_referenced_and_keeps_the_pin() {
    let mut pool = pool(1);
    let page = cached(&mut pool, 7);
    pool.pin(page);
    pool.acquire(page);
    assert_eq!((pool.state(page), pool.in_flight()), (PageState::Referenced, 0));
    assert!(!pool.unpin(page));
    pool.release(page, Step(2));
    assert_eq!(pool.state(page), PageState::Evictable);
    pool.verify().unwrap();
}

#[test]
fn the_last_use_is_the_newest_step_of_all_holders_and_publishers() {
    let mut pool = pool(1);
    let page = take(&mut pool);
    pool.acquire(page);
    pool.publish(page, NodeLink(1), Step(4));
    assert_eq!(pool.last_use(page), Step(4));
    pool.release(page, Step(9));
    pool.release(page, Step(6));
    assert_eq!(pool.last_use(page), Step(9));
}

#[test]
fn the_last_use_outlives_the_next_holder() {
    let mut pool = pool(1);
    let page = take(&mut pool);
    pool.release(page, Step(9));
    assert_eq!(take(&mut pool), page);
    assert_eq!(pool.last_use(page), Step(9));
}

#[test]
fn a_page_handed_out_again_stands_for_nothing() {
    let mut pool = pool(1);
    let page = cached(&mut pool, 7);
    let taken = pool.take(level(80)).expect("the page is evictable");
    assert_eq!(taken, Taken { page, evicted: Some(NodeLink(7)), pristine: false });
    assert_eq!((pool.node(page), pool.priority(page)), (None, level(80)));
    pool.verify().unwrap();
}

#[test]
fn pages_in_use_stand_for_nothing_after_everything_is_forgotten() {
    let mut pool = pool(2);
    let page = take(&mut pool);
    pool.publish(page, NodeLink(7), Step(1));
    pool.forget_all();
    assert_eq!((pool.state(page), pool.node(page)), (PageState::Referenced, None));
    pool.publish(page, NodeLink(8), Step(1));
    assert_eq!(pool.node(page), Some(NodeLink(8)));
    pool.verify().unwrap();
}

#[test]
fn a_page_is_marked_once_a_planning_pass() {
    let mut pool = pool(2);
    for _ in 0..2 {
        pool.take(Priority::DEFAULT);
    }
    pool.open_marks();
    assert_eq!([1, 1, 2].map(|id| pool.mark(PageId(id))), [true, false, true]);
    pool.open_marks();
    assert!(pool.mark(PageId(1)));
}

#[test]
fn priorities_are_0_to_100_and_an_error_says_so() {
    assert_eq!([0, 100].map(|given| level(given).level()), [0, 100]);
    for given in [-1, 101, 256, i64::MIN] {
        assert_eq!(Priority::new(given), Err(PriorityError(given)));
    }
    let message = PriorityError(101).to_string();
    assert_eq!(message, "priority 101: must be 0 (evicted first) to 100 (evicted last)");
}

#[test]
fn many_pages_are_taken_as_one_by_one() {
    let (mut one_by_one, mut at_once) = (pool(6), pool(6));
    for pool in [&mut one_by_one, &mut at_once] {
        let pages = [1, 2, 3, 4].map(|_| take(pool));
        pool.publish(pages[0], NodeLink(7), Step(1));
        for page in pages {
            pool.release(page, Step(1));
        }
    }
    let mut taken = Vec::new();
    assert!(at_once.take_many(6, level(80), &mut taken));
    let expected: Vec<Taken> = (0..6).map(|_| one_by_one.take(level(80)).unwrap()).collect();
    assert_eq!(taken, expected);
    assert_eq!(taken.iter().map(|taken| taken.page.0).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 1]);
    at_once.verify().unwrap();
}

#[test]
fn more_pages_than_are_available_are_not_taken_at_all() {
    let mut pool = pool(3);
    let held = take(&mut pool);
    let mut taken = Vec::new();
    assert!(!pool.take_many(3, Priority::DEFAULT, &mut taken));
    assert_eq!((taken.len(), pool.available(), pool.refs(held)), (0, 2, 1));
    assert!(pool.take_many(2, Priority::DEFAULT, &mut taken));
    assert_eq!((taken.len(), pool.available()), (2, 0));
}

#[test]
fn a_policy_is_known_by_its_name() {
    assert_eq!("priority_lru".parse(), Ok(EvictionPolicy::PriorityLru));
    assert_eq!("priority_slru".parse(), Ok(EvictionPolicy::PrioritySlru));
    let message = "lru".parse::<EvictionPolicy>().unwrap_err().to_string();
    assert_eq!(message, "eviction policy \"lru\": must be 'priority_lru' or 'priority_slru'");
}

#[test]
fn the_fingerprint_sees_the_order_of_a_queue() {
    let print = |order: [u32; 2]| {
        let mut pool = pool(2);
        for _ in order {
            take(&mut pool);
        }
        for id in order {
            pool.release(PageId(id), Step(1));
        }
        let mut hasher = std::hash::DefaultHasher::new();
        pool.fingerprint(&mut hasher);
        std::hash::Hasher::finish(&hasher)
    };
    assert_eq!(print([1, 2]), print([1, 2]));
    assert_ne!(print([1, 2]), print([2, 1]));
}
