//! The policy that spares pages that were hit.

use block_pool::{EvictionPolicy, NodeLink, PageId, Pool, Priority, Step};

/// A pool all of whose pages are cached and evictable, released in the order of their ids; those in
/// `reused` were hit.
fn cached(policy: EvictionPolicy, pages: u32, reused: &[u32]) -> Pool {
    let mut pool = Pool::new(pages, policy, Priority::DEFAULT);
    while let Some(taken) = pool.take(Priority::DEFAULT) {
        pool.publish(taken.page, NodeLink(taken.page.0), Step(1));
    }
    for &page in reused {
        assert!(pool.mark_reused(PageId(page)));
    }
    (1..=pages).for_each(|page| pool.release(PageId(page), Step(1)));
    pool.verify().unwrap();
    pool
}

/// Takes every page; what `eviction_order` foretold, too.
fn drain(pool: &mut Pool) -> Vec<u32> {
    let order: Vec<u32> = pool.eviction_order().map(|page| page.0).collect();
    let taken: Vec<u32> =
        std::iter::from_fn(|| pool.take(Priority::DEFAULT)).map(|taken| taken.page.0).collect();
    assert_eq!(order, taken);
    taken
}

#[test]
fn pages_that_were_hit_go_after_those_that_were_not() {
    // Until one of two is protected, which is over a third.
    let mut pool = cached(EvictionPolicy::PrioritySlru, 9, &[1]);
    assert_eq!(drain(&mut pool), [2, 3, 4, 5, 6, 7, 8, 1, 9]);
}

#[test]
fn priority_lru_does_not_ask_whether_a_page_was_hit() {
    let mut pool = cached(EvictionPolicy::PriorityLru, 5, &[1, 3]);
    assert!(pool.is_reused(PageId(1)));
    assert_eq!(drain(&mut pool), [1, 2, 3, 4, 5]);
}

#[test]
fn over_a_third_of_a_level_hit_pages_go_by_release_alone() {
    // Protected of all: 4/10, so 1 goes by age; 3/9, so 5 goes; 3/8: 2; 2/7, 2/6: 6, 7; 2/5: 3; 1/4, 1/3: 8, 9;
    // 1/2: 4.
    let mut pool = cached(EvictionPolicy::PrioritySlru, 10, &[1, 2, 3, 4]);
    assert_eq!(drain(&mut pool), [1, 5, 2, 6, 7, 3, 8, 9, 4, 10]);
}

#[test]
fn a_page_on_probation_that_is_older_goes_also_when_protected_pages_are_many() {
    let mut pool = cached(EvictionPolicy::PrioritySlru, 6, &[2, 3, 4, 5, 6]);
    assert_eq!(drain(&mut pool), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_page_of_a_lower_level_goes_first_though_it_was_hit() {
    let mut pool = cached(EvictionPolicy::PrioritySlru, 3, &[3]);
    pool.retain(PageId(3), Priority::new(0).unwrap().into());
    assert_eq!(drain(&mut pool), [3, 1, 2]);
}

#[test]
fn a_page_marked_while_it_waits_keeps_the_order_of_release_among_the_protected() {
    let mut pool = cached(EvictionPolicy::PrioritySlru, 8, &[2, 4]);
    for page in [3, 1, 5] {
        assert!(pool.mark_reused(PageId(page)));
        pool.verify().unwrap();
    }
    // Five of eight are over a third: the oldest go, until one of four is left.
    assert_eq!(drain(&mut pool), [1, 2, 3, 4, 6, 7, 5, 8]);
}

#[test]
fn only_the_first_mark_is_news() {
    let mut pool = cached(EvictionPolicy::PrioritySlru, 1, &[]);
    assert!(!pool.is_reused(PageId(1)));
    assert!(pool.mark_reused(PageId(1)));
    assert!(!pool.mark_reused(PageId(1)));
    assert!(pool.is_reused(PageId(1)));
}

#[test]
fn the_mark_outlives_hits_and_releases_and_ends_with_the_node() {
    let mut pool = cached(EvictionPolicy::PrioritySlru, 2, &[1, 2]);
    pool.acquire(PageId(1));
    pool.release(PageId(1), Step(2));
    assert!(pool.is_reused(PageId(1)));
    pool.acquire(PageId(1));
    pool.withdraw(PageId(1));
    assert!(!pool.is_reused(PageId(1)));
    pool.publish(PageId(1), NodeLink(9), Step(2));
    assert!(!pool.is_reused(PageId(1)));
    assert_eq!(pool.take(Priority::DEFAULT).map(|taken| taken.page), Some(PageId(2)));
    pool.publish(PageId(2), NodeLink(8), Step(2));
    assert!(!pool.is_reused(PageId(2)));
}

#[test]
fn the_mark_ends_when_everything_is_forgotten() {
    let mut pool = cached(EvictionPolicy::PrioritySlru, 2, &[1, 2]);
    pool.acquire(PageId(1));
    pool.forget_all();
    assert!(!pool.is_reused(PageId(1)));
    pool.publish(PageId(1), NodeLink(9), Step(2));
    assert!(!pool.is_reused(PageId(1)));
    pool.verify().unwrap();
}

/// The hot pages are hit a thousand times, in turn with pages that come once and are never hit.
fn hot_pages_left(policy: EvictionPolicy) -> usize {
    let mut pool = cached(policy, 2048, &[]);
    let hot: Vec<PageId> = (1..=64).map(PageId).collect();
    for _ in 0..1000 {
        for &page in &hot {
            pool.acquire(page);
        }
        for &page in &hot {
            pool.mark_reused(page);
            pool.release(page, Step(1));
        }
    }
    for prompt in 0..64 {
        let mut taken = Vec::new();
        assert!(pool.take_many(64, Priority::DEFAULT, &mut taken));
        for (taken, node) in taken.iter().zip(10_000 * prompt..) {
            pool.publish(taken.page, NodeLink(node), Step(2));
            pool.release(taken.page, Step(2));
        }
    }
    pool.verify().unwrap();
    hot.iter().filter(|page| pool.node(**page) == Some(NodeLink(page.0))).count()
}

#[test]
fn a_scan_of_twice_the_pool_leaves_hot_pages_alone() {
    assert_eq!(hot_pages_left(EvictionPolicy::PrioritySlru), 64);
    assert_eq!(hot_pages_left(EvictionPolicy::PriorityLru), 0);
}
