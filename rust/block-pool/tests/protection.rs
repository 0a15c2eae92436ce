//! The policy that spares pages that were hit.

use block_pool::{EvictionPolicy, NodeLink, PageId, Priority, Slab, Step};

/// A slab all of whose pages are cached and evictable, released in the order of their ids; those in
/// `reused` were hit.
fn cached(policy: EvictionPolicy, pages: u32, reused: &[u32]) -> Slab {
    let mut slab = Slab::new(pages, policy, Priority::DEFAULT);
    while let Some(taken) = slab.take(Priority::DEFAULT) {
        slab.publish(taken.page, NodeLink(taken.page.0), Step(1));
    }
    for &page in reused {
        assert!(slab.mark_reused(PageId(page)));
    }
    (1..=pages).for_each(|page| slab.release(PageId(page), Step(1)));
    slab.verify().unwrap();
    slab
}

/// Takes every page; what `eviction_order` foretold, too.
fn drain(slab: &mut Slab) -> Vec<u32> {
    let order: Vec<u32> = slab.eviction_order().map(|page| page.0).collect();
    let taken: Vec<u32> =
        std::iter::from_fn(|| slab.take(Priority::DEFAULT)).map(|taken| taken.page.0).collect();
    assert_eq!(order, taken);
    taken
}

#[test]
fn pages_that_were_hit_go_after_those_that_were_not() {
    // Until one of two is protected, which is over a third.
    let mut slab = cached(EvictionPolicy::PrioritySlru, 9, &[1]);
    assert_eq!(drain(&mut slab), [2, 3, 4, 5, 6, 7, 8, 1, 9]);
}

#[test]
fn priority_lru_does_not_ask_whether_a_page_was_hit() {
    let mut slab = cached(EvictionPolicy::PriorityLru, 5, &[1, 3]);
    assert!(slab.is_reused(PageId(1)));
    assert_eq!(drain(&mut slab), [1, 2, 3, 4, 5]);
}

#[test]
fn over_a_third_of_a_level_hit_pages_go_by_release_alone() {
    // Protected of all: 4/10, so 1 goes by age; 3/9, so 5 goes; 3/8: 2; 2/7, 2/6: 6, 7; 2/5: 3; 1/4, 1/3: 8, 9;
    // 1/2: 4.
    let mut slab = cached(EvictionPolicy::PrioritySlru, 10, &[1, 2, 3, 4]);
    assert_eq!(drain(&mut slab), [1, 5, 2, 6, 7, 3, 8, 9, 4, 10]);
}

#[test]
fn a_page_on_probation_that_is_older_goes_also_when_protected_pages_are_many() {
    let mut slab = cached(EvictionPolicy::PrioritySlru, 6, &[2, 3, 4, 5, 6]);
    assert_eq!(drain(&mut slab), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_page_of_a_lower_level_goes_first_though_it_was_hit() {
    let mut slab = cached(EvictionPolicy::PrioritySlru, 3, &[3]);
    slab.retain(PageId(3), Priority::new(0).unwrap().into());
    assert_eq!(drain(&mut slab), [3, 1, 2]);
}

#[test]
fn a_page_marked_while_it_waits_keeps_the_order_of_release_among_the_protected() {
    let mut slab = cached(EvictionPolicy::PrioritySlru, 8, &[2, 4]);
    for page in [3, 1, 5] {
        assert!(slab.mark_reused(PageId(page)));
        slab.verify().unwrap();
    }
    // Five of eight are over a third: the oldest go, until one of four is left.
    assert_eq!(drain(&mut slab), [1, 2, 3, 4, 6, 7, 5, 8]);
}

#[test]
fn only_the_first_mark_is_news() {
    let mut slab = cached(EvictionPolicy::PrioritySlru, 1, &[]);
    assert!(!slab.is_reused(PageId(1)));
    assert!(slab.mark_reused(PageId(1)));
    assert!(!slab.mark_reused(PageId(1)));
    assert!(slab.is_reused(PageId(1)));
}

#[test]
fn the_mark_outlives_hits_and_releases_and_ends_with_the_node() {
    let mut slab = cached(EvictionPolicy::PrioritySlru, 2, &[1, 2]);
    slab.acquire(PageId(1));
    slab.release(PageId(1), Step(2));
    assert!(slab.is_reused(PageId(1)));
    slab.acquire(PageId(1));
    slab.withdraw(PageId(1));
    assert!(!slab.is_reused(PageId(1)));
    slab.publish(PageId(1), NodeLink(9), Step(2));
    assert!(!slab.is_reused(PageId(1)));
    assert_eq!(slab.take(Priority::DEFAULT).map(|taken| taken.page), Some(PageId(2)));
    slab.publish(PageId(2), NodeLink(8), Step(2));
    assert!(!slab.is_reused(PageId(2)));
}

#[test]
fn the_mark_ends_when_everything_is_forgotten() {
    let mut slab = cached(EvictionPolicy::PrioritySlru, 2, &[1, 2]);
    slab.acquire(PageId(1));
    slab.forget_all();
    assert!(!slab.is_reused(PageId(1)));
    slab.publish(PageId(1), NodeLink(9), Step(2));
    assert!(!slab.is_reused(PageId(1)));
    slab.verify().unwrap();
}

/// The hot pages are hit a thousand times, in turn with pages that come once and are never hit.
fn hot_pages_left(policy: EvictionPolicy) -> usize {
    let mut slab = cached(policy, 2048, &[]);
    let hot: Vec<PageId> = (1..=64).map(PageId).collect();
    for _ in 0..1000 {
        for &page in &hot {
            slab.acquire(page);
        }
        for &page in &hot {
            slab.mark_reused(page);
            slab.release(page, Step(1));
        }
    }
    for prompt in 0..64 {
        let mut taken = Vec::new();
        assert!(slab.take_many(64, Priority::DEFAULT, &mut taken));
        for (taken, node) in taken.iter().zip(10_000 * prompt..) {
            slab.publish(taken.page, NodeLink(node), Step(2));
            slab.release(taken.page, Step(2));
        }
    }
    slab.verify().unwrap();
    hot.iter().filter(|page| slab.node(**page) == Some(NodeLink(page.0))).count()
}

#[test]
fn a_scan_of_twice_the_pool_leaves_hot_pages_alone() {
    assert_eq!(hot_pages_left(EvictionPolicy::PrioritySlru), 64);
    assert_eq!(hot_pages_left(EvictionPolicy::PriorityLru), 0);
}
