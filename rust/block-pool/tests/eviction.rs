//! Which page goes next.

use block_pool::{EvictionPolicy, NodeLink, PageId, Pool, Priority, Retention, Step};

fn level(level: i64) -> Priority {
    Priority::new(level).expect("a level from 0 to 100")
}

fn lru(pages: u32) -> Pool {
    Pool::new(pages, EvictionPolicy::PriorityLru, Priority::DEFAULT)
}

/// A pool all of whose pages are held: page `i + 1` at `levels[i]`, standing for node `i + 1`.
fn held(levels: &[i64]) -> Pool {
    let mut pool = lru(levels.len() as u32);
    for &given in levels {
        let page = pool.take(level(given)).expect("the pool is large enough").page;
        pool.publish(page, NodeLink(page.0), Step(1));
    }
    pool
}

fn release(pool: &mut Pool, pages: &[u32]) {
    for &page in pages {
        pool.release(PageId(page), Step(1));
    }
}

/// Takes every free page; their ids in the order in which they were handed out.
fn drain(pool: &mut Pool) -> Vec<u32> {
    pool.verify().unwrap();
    std::iter::from_fn(|| pool.take(Priority::DEFAULT)).map(|taken| taken.page.0).collect()
}

#[test]
fn the_lowest_level_goes_first_whatever_the_order_of_release() {
    let mut pool = held(&[35, 0, 100, 80, 20]);
    release(&mut pool, &[3, 4, 1, 5, 2]);
    assert_eq!(drain(&mut pool), [2, 5, 1, 4, 3]);
}

#[test]
fn within_a_level_the_page_released_longest_ago_goes_first() {
    let mut pool = held(&[35; 4]);
    release(&mut pool, &[2, 4, 1, 3]);
    assert_eq!(drain(&mut pool), [2, 4, 1, 3]);
}

#[test]
fn a_page_used_again_goes_to_the_end_of_its_level() {
    let mut pool = held(&[35; 3]);
    release(&mut pool, &[1, 2, 3]);
    pool.acquire(PageId(1));
    release(&mut pool, &[1]);
    assert_eq!(drain(&mut pool), [2, 3, 1]);
}

#[test]
fn uncached_pages_go_before_pristine_ones_and_these_before_cached_ones() {
    let mut pool = lru(4);
    for _ in 0..2 {
        pool.take(level(0));
    }
    pool.publish(PageId(1), NodeLink(1), Step(1));
    release(&mut pool, &[1, 2]);
    assert_eq!(drain(&mut pool), [2, 3, 4, 1]);
}

#[test]
fn an_uncached_page_goes_first_also_at_the_highest_level() {
    let mut pool = lru(2);
    pool.take(level(0));
    pool.take(level(100));
    pool.publish(PageId(1), NodeLink(1), Step(1));
    release(&mut pool, &[1, 2]);
    assert_eq!(drain(&mut pool), [2, 1]);
}

#[test]
fn a_withdrawn_page_goes_before_every_cached_one() {
    let mut pool = held(&[0, 100, 100]);
    release(&mut pool, &[1, 2, 3]);
    pool.withdraw(PageId(3));
    assert_eq!(pool.node(PageId(3)), None);
    assert_eq!(drain(&mut pool), [3, 1, 2]);
}

#[test]
fn a_page_withdrawn_in_use_is_uncached_when_it_is_released() {
    let mut pool = held(&[0, 100]);
    pool.withdraw(PageId(2));
    release(&mut pool, &[1, 2]);
    assert_eq!(drain(&mut pool), [2, 1]);
}

#[test]
fn a_change_of_priority_while_queued_keeps_the_order_of_release() {
    let mut pool = held(&[20, 20, 20, 80, 80, 80]);
    release(&mut pool, &[4, 1, 5, 2, 6, 3]);
    pool.retain(PageId(3), level(80).into()); // released last
    pool.retain(PageId(2), level(80).into()); // between 5 and 6
    pool.retain(PageId(4), level(20).into()); // before all
    assert_eq!(drain(&mut pool), [4, 1, 5, 2, 6, 3]);
}

#[test]
fn a_change_of_priority_in_use_counts_at_the_release() {
    let mut pool = held(&[20, 35]);
    pool.retain(PageId(1), level(80).into());
    release(&mut pool, &[1, 2]);
    assert_eq!(drain(&mut pool), [2, 1]);
}

#[test]
fn a_change_of_priority_does_not_move_an_uncached_page() {
    let mut pool = held(&[35, 35]);
    pool.withdraw(PageId(1));
    pool.withdraw(PageId(2));
    release(&mut pool, &[1, 2]);
    pool.retain(PageId(1), level(100).into());
    assert_eq!(drain(&mut pool), [1, 2]);
}

#[test]
fn a_refreshed_page_counts_as_released_just_now() {
    let mut pool = held(&[35; 3]);
    release(&mut pool, &[1, 2, 3]);
    pool.refresh(PageId(1));
    assert_eq!(drain(&mut pool), [2, 3, 1]);
}

#[test]
fn refreshing_a_page_in_use_does_nothing() {
    let mut pool = held(&[35; 2]);
    pool.refresh(PageId(1));
    assert_eq!((pool.evictable(), pool.refs(PageId(1))), (0, 1));
    pool.verify().unwrap();
}

#[test]
fn a_page_in_flight_queues_when_its_transfer_ends() {
    let mut pool = held(&[35; 3]);
    pool.pin(PageId(1));
    release(&mut pool, &[1, 2, 3]);
    pool.unpin(PageId(1));
    assert_eq!(drain(&mut pool), [2, 3, 1]);
}

#[test]
fn forgetting_everything_joins_the_levels_in_order_behind_the_uncached_pages() {
    // One list after another, each as it was: what splicing 102 lists gives, whatever their lengths.
    let mut pool = held(&[80, 20, 80, 35, 20, 0]);
    release(&mut pool, &[3, 5, 1, 4, 2]);
    pool.withdraw(PageId(6));
    release(&mut pool, &[6]);
    pool.forget_all();
    assert_eq!(pool.eviction_order().map(|page| page.0).collect::<Vec<_>>(), [6, 5, 2, 4, 3, 1]);
    assert!((1..=6).all(|page| pool.node(PageId(page)).is_none()));
    assert_eq!(drain(&mut pool), [6, 5, 2, 4, 3, 1]);
}

#[test]
fn forgotten_pages_are_handed_out_as_evicting_nothing() {
    let mut pool = held(&[35]);
    release(&mut pool, &[1]);
    pool.forget_all();
    assert_eq!(pool.take(Priority::DEFAULT).map(|taken| taken.evicted), Some(None));
}

#[test]
fn pages_cached_after_a_forgetting_queue_at_their_level_again() {
    let mut pool = held(&[35, 35, 0]);
    release(&mut pool, &[1]);
    pool.forget_all();
    pool.publish(PageId(2), NodeLink(2), Step(2));
    pool.publish(PageId(3), NodeLink(3), Step(2));
    release(&mut pool, &[2, 3]);
    assert_eq!(drain(&mut pool), [1, 3, 2]);
}

#[test]
fn a_page_whose_retention_ends_is_taken_out_of_the_middle_of_what_is_hit_like_any_other() {
    let mut pool = Pool::new(4, EvictionPolicy::PriorityLru, Priority::DEFAULT);
    let mut taken = Vec::new();
    assert!(pool.take_many(3, Priority::DEFAULT, &mut taken));
    let pages: Vec<PageId> = taken.iter().map(|taken| taken.page).collect();
    for (number, &page) in (0..).zip(&pages) {
        pool.publish(page, NodeLink(number), Step(1));
    }
    // Of the default priority, so that all lie in one list.
    pool.retain(pages[1], Retention::new(Priority::DEFAULT, Some(1.0), None).unwrap());
    pool.release_all(pages.iter().rev().copied(), Step(1));
    pool.reuse_all(&pages, |_| ());
    assert_eq!(pool.tell_time(5.0), [], "its time does not run while it is in use");
    assert_eq!(pool.verify(), Ok(()));
}
