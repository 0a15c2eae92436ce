//! Groups that share a slab: who may have which huge page, and what goes first.

use block_pool::{
    Evicted, EvictionPolicy, GroupId, Member, NodeLink, PageId, Pools, Priority, Retention, ShapeError,
    SlabShape, Step,
};
use std::hash::{DefaultHasher, Hasher};

const A: GroupId = GroupId(0);
const B: GroupId = GroupId(1);
const C: GroupId = GroupId(2);

/// One slab for groups with these ratios.
fn shape(huge_pages: u32, ratios: &[u32]) -> SlabShape {
    let member = |(group, &ratio)| Member { group, ratio, policy: EvictionPolicy::PriorityLru };
    SlabShape { huge_pages, members: (0..).map(GroupId).zip(ratios).map(member).collect() }
}

fn pools(huge_pages: u32, ratios: &[u32]) -> Pools {
    Pools::new(&[shape(huge_pages, ratios)], Priority::DEFAULT).unwrap()
}

/// The pages taken, and the nodes that other groups lost.
fn take_beside(
    pools: &mut Pools,
    group: GroupId,
    count: u32,
    left: &[u32],
) -> (Vec<u32>, Vec<(GroupId, u32)>) {
    let (mut taken, mut lost) = (Vec::new(), Vec::new());
    assert!(pools.take_many(group, count, Priority::DEFAULT, left, &mut taken, &mut lost));
    pools.verify().unwrap();
    let lost = lost.iter().map(|&Evicted { group, node, .. }| (group, node.0)).collect();
    (taken.iter().map(|taken| taken.page.0).collect(), lost)
}

fn take(pools: &mut Pools, group: GroupId, count: u32) -> Vec<u32> {
    let (taken, lost) = take_beside(pools, group, count, &[]);
    assert_eq!(lost, []);
    taken
}

fn refused(pools: &mut Pools, group: GroupId, count: u32) -> bool {
    let (mut taken, mut lost) = (Vec::new(), Vec::new());
    let fits = pools.take_many(group, count, Priority::DEFAULT, &[], &mut taken, &mut lost);
    assert_eq!((taken.is_empty(), lost.is_empty()), (!fits, true));
    !fits
}

fn release(pools: &mut Pools, group: GroupId, pages: &[u32]) {
    pools[group].release_all(pages.iter().map(|&page| PageId(page)), Step(1));
    pools.verify().unwrap();
}

/// The pages stand for nodes of the same numbers, with a priority, and are released in their order.
fn cache(pools: &mut Pools, group: GroupId, pages: &[u32], priority: i64) {
    for &page in pages {
        pools[group].publish(PageId(page), NodeLink(page), Step(1));
        pools[group].retain(PageId(page), level(priority).into());
    }
    release(pools, group, pages);
}

fn level(priority: i64) -> Priority {
    Priority::new(priority).unwrap()
}

fn fingerprint(pools: &Pools) -> u64 {
    let mut hasher = DefaultHasher::new();
    pools.fingerprint(&mut hasher);
    hasher.finish()
}

#[test]
fn pages_are_numbered_by_where_they_lie_behind_the_null_huge_page() {
    let mut pools = pools(3, &[3, 2]);
    assert_eq!(take(&mut pools, A, 1), [3]);
    assert_eq!(take(&mut pools, B, 3), [4, 5, 6]);
    assert_eq!(take(&mut pools, A, 2), [4, 5]);
    assert_eq!((pools[A].total(), pools[B].total()), (9, 6));
    assert!(refused(&mut pools, A, 1));
}

#[test]
fn an_own_blank_page_goes_before_a_pristine_huge_page() {
    let mut pools = pools(2, &[3, 1]);
    assert_eq!(take(&mut pools, A, 2), [3, 4]);
    release(&mut pools, A, &[3]);
    assert_eq!(take(&mut pools, A, 2), [5, 3]);
    assert_eq!(pools.free_huge_pages(&pools.slabs()[0]), 1);
}

#[test]
fn a_pristine_huge_page_goes_before_what_another_group_left() {
    let mut pools = pools(2, &[1, 1]);
    take(&mut pools, B, 1);
    release(&mut pools, B, &[1]);
    assert_eq!(take(&mut pools, A, 1), [2]);
}

#[test]
fn a_pristine_huge_page_goes_before_an_own_cached_page() {
    let mut pools = pools(2, &[1, 1]);
    take(&mut pools, A, 1);
    cache(&mut pools, A, &[1], 0);
    assert_eq!(take(&mut pools, A, 1), [2]);
    assert_eq!(pools[A].node(PageId(1)), Some(NodeLink(1)));
}

#[test]
fn what_another_group_left_blank_goes_before_an_own_cached_page() {
    let mut pools = pools(2, &[1, 2]);
    take(&mut pools, A, 1);
    take(&mut pools, B, 2);
    release(&mut pools, B, &[4, 5]);
    cache(&mut pools, A, &[1], 0);
    assert_eq!(take(&mut pools, A, 1), [2]);
    assert_eq!(pools[A].node(PageId(1)), Some(NodeLink(1)));
}

#[test]
fn of_an_own_victim_and_another_groups_huge_page_the_one_of_lower_priority_goes() {
    for (own, other, expected) in [(50, 40, (vec![2], vec![(B, 2)])), (40, 50, (vec![1], vec![]))] {
        let mut pools = pools(2, &[1, 1]);
        take(&mut pools, A, 1);
        take(&mut pools, B, 1);
        cache(&mut pools, A, &[1], own);
        cache(&mut pools, B, &[2], other);
        assert_eq!(take_beside(&mut pools, A, 1, &[]), expected);
    }
}

#[test]
fn a_huge_page_is_worth_its_best_page() {
    let mut pools = pools(2, &[1, 2]);
    take(&mut pools, A, 1);
    take(&mut pools, B, 2);
    cache(&mut pools, B, &[4], 90);
    cache(&mut pools, B, &[5], 0);
    cache(&mut pools, A, &[1], 50);
    assert_eq!(take(&mut pools, A, 1), [1]);
}

#[test]
fn at_equal_priority_a_huge_page_counts_from_its_newest_release() {
    // In the order of release: B's page 4, A's page 1, B's page 5.
    let mut pools = pools(2, &[1, 2]);
    take(&mut pools, A, 1);
    take(&mut pools, B, 2);
    cache(&mut pools, B, &[4], 35);
    cache(&mut pools, A, &[1], 35);
    cache(&mut pools, B, &[5], 35);
    assert_eq!(take(&mut pools, A, 1), [1]);
    // A's page is in use again and newer than both of B's.
    cache(&mut pools, A, &[1], 35);
    assert_eq!(take_beside(&mut pools, A, 1, &[]), (vec![2], vec![(B, 4), (B, 5)]));
}

#[test]
fn of_several_groups_the_one_with_the_oldest_huge_page_loses_it() {
    let mut pools = pools(3, &[1, 1, 1]);
    for (group, page) in [(B, 1), (C, 2), (A, 3)] {
        assert_eq!(take(&mut pools, group, 1), [page]);
    }
    cache(&mut pools, C, &[2], 35);
    cache(&mut pools, B, &[1], 35);
    assert_eq!(take_beside(&mut pools, A, 2, &[]), (vec![2, 1], vec![(C, 2), (B, 1)]));
}

#[test]
fn what_a_claim_takes_away_is_gone_and_given_back_with_its_group() {
    let mut pools = pools(1, &[1, 3]);
    take(&mut pools, B, 3);
    cache(&mut pools, B, &[5, 3], 100);
    release(&mut pools, B, &[4]);
    assert_eq!(take_beside(&mut pools, A, 1, &[]), (vec![1], vec![(B, 3), (B, 5)]));
    assert_eq!([3, 4, 5].map(|page| pools[B].node(PageId(page))), [None; 3]);
    assert_eq!(pools[B].available(), 0);
}

#[test]
fn a_claimed_huge_page_remembers_when_its_bytes_were_last_used() {
    let mut pools = pools(1, &[2, 2]);
    take(&mut pools, A, 2);
    pools[A].release(PageId(2), Step(7));
    pools[A].release(PageId(3), Step(5));
    take(&mut pools, B, 1);
    assert_eq!([2, 3].map(|page| pools[B].last_use(PageId(page))), [Step(7); 2]);
}

#[test]
fn only_a_page_that_nobody_ever_had_is_handed_out_as_pristine() {
    let mut pools = pools(1, &[2, 1]);
    let mut pristine = |group, count| {
        let mut taken = Vec::new();
        assert!(pools.take_many(group, count, Priority::DEFAULT, &[], &mut taken, &mut Vec::new()));
        pools[group].release_all(taken.iter().map(|taken| taken.page), Step(1));
        taken.iter().map(|taken| taken.pristine).collect::<Vec<_>>()
    };
    assert_eq!(pristine(A, 1), [true]);
    assert_eq!(pristine(A, 2), [true, false]);
    assert_eq!(pristine(B, 1), [false]);
    assert_eq!(pristine(A, 1), [false]);
}

#[test]
fn a_hit_on_a_page_of_a_parked_huge_page_keeps_all_of_it() {
    let mut pools = pools(1, &[2, 1]);
    take(&mut pools, A, 2);
    cache(&mut pools, A, &[2, 3], 35);
    assert!(pools.can_satisfy(&[0, 1]));
    pools[A].reuse_all(&[PageId(3)], |_| {});
    assert!(!pools.can_satisfy(&[0, 1]));
    assert!(refused(&mut pools, B, 1));
    assert_eq!(pools[A].node(PageId(2)), Some(NodeLink(2)));
}

#[test]
fn a_transfer_of_one_page_keeps_all_of_its_huge_page() {
    let mut pools = pools(1, &[2, 1]);
    take(&mut pools, A, 2);
    pools[A].pin(PageId(3));
    release(&mut pools, A, &[2, 3]);
    assert!(refused(&mut pools, B, 1));
    pools[A].unpin(PageId(3));
    assert_eq!(take(&mut pools, B, 1), [1]);
}

#[test]
fn huge_pages_with_one_page_in_use_each_are_no_room_for_another_group() {
    let mut pools = pools(4, &[4, 1]);
    take(&mut pools, A, 16);
    let left: Vec<u32> = (4..20).filter(|page| page % 4 != 0).collect();
    release(&mut pools, A, &left);
    assert!(!pools.can_satisfy(&[0, 1]));
    assert!(refused(&mut pools, B, 1));
    assert_eq!((pools.available(A), pools.available(B)), (12, 0));
    assert!(pools.can_satisfy(&[12, 0]));
    release(&mut pools, A, &[8]);
    assert!(pools.can_satisfy(&[9, 1]));
    assert!(!pools.can_satisfy(&[10, 1]));
    assert_eq!(take(&mut pools, B, 1), [2]);
}

#[test]
fn demands_that_fit_one_by_one_may_not_fit_together() {
    let pools = pools(2, &[3, 2]);
    assert!(pools.can_satisfy(&[6]) && pools.can_satisfy(&[0, 4]));
    assert!(pools.can_satisfy(&[3, 2]));
    assert!(!pools.can_satisfy(&[4, 1]));
    assert_eq!((pools.available(A), pools.available(B)), (6, 4));
}

#[test]
fn a_demand_that_does_not_fit_now_may_fit_when_nothing_is_in_use() {
    let mut pools = pools(2, &[3, 2]);
    take(&mut pools, A, 4);
    assert!(!pools.can_satisfy(&[3, 1]));
    assert!(pools.capacity().can_satisfy(&[3, 1]));
    assert!(!pools.capacity().can_satisfy(&[4, 1]));
    assert_eq!(pools.capacity().available(B), 4);
}

#[test]
fn hits_that_are_planned_are_no_room() {
    let mut pools = pools(2, &[2, 1]);
    take(&mut pools, A, 2);
    cache(&mut pools, A, &[2, 3], 35);
    let before = fingerprint(&pools);
    let mut room = pools.room();
    assert!(room.can_satisfy(&[0, 2]));
    room.claim(&pools, A, PageId(3));
    assert!(room.can_satisfy(&[1, 1]) && !room.can_satisfy(&[0, 2]) && !room.can_satisfy(&[2, 1]));
    room.claim(&pools, A, PageId(2));
    assert!(room.can_satisfy(&[0, 1]) && !room.can_satisfy(&[1, 1]));
    assert_eq!(fingerprint(&pools), before);
}

#[test]
fn the_last_page_of_a_huge_page_that_is_given_back_makes_room_for_all() {
    let mut pools = pools(1, &[2, 1]);
    take(&mut pools, A, 2);
    let mut room = pools.room();
    room.give_back(&pools, A, PageId(2));
    assert!(room.can_satisfy(&[1, 0]) && !room.can_satisfy(&[0, 1]));
    room.give_back(&pools, A, PageId(3));
    assert!(room.can_satisfy(&[2, 0]) && room.can_satisfy(&[0, 1]));
    assert_eq!(room.available(A), 2);
}

#[test]
fn a_group_takes_from_its_open_huge_pages_when_another_will_need_the_rest() {
    // A has pages 2 (in use) and 3 (cached); huge page 2 is pristine.
    let open = || {
        let mut pools = pools(2, &[2, 1]);
        take(&mut pools, A, 2);
        cache(&mut pools, A, &[3], 100);
        pools
    };
    assert_eq!(take(&mut open(), A, 1), [4]);
    let mut pools = open();
    assert_eq!(take_beside(&mut pools, A, 1, &[0, 1]).0, [3]);
    assert_eq!(take(&mut pools, B, 1), [2]);
}

#[test]
fn a_group_opens_a_huge_page_for_what_it_will_take_itself() {
    let mut pools = pools(3, &[2, 1]);
    take(&mut pools, A, 2);
    cache(&mut pools, A, &[3], 100);
    // Of the three pages one lies in what is open, two in a pristine huge page; the other is B's.
    assert_eq!(take_beside(&mut pools, A, 1, &[2, 1]).0, [4]);
    assert_eq!(take_beside(&mut pools, A, 2, &[0, 1]).0, [5, 3]);
    assert_eq!(take(&mut pools, B, 1), [3]);
}

#[test]
fn a_group_opens_no_more_huge_pages_than_it_needs_when_another_will_need_the_rest() {
    let mut pools = pools(2, &[2, 1]);
    take(&mut pools, A, 4);
    release(&mut pools, A, &[2, 4, 3, 5]);
    assert_eq!(take_beside(&mut pools, A, 2, &[0, 1]).0, [2, 3]);
    assert_eq!(take(&mut pools, B, 1), [2]);
}

#[test]
fn what_cannot_be_had_with_the_rest_is_not_taken() {
    let mut pools = pools(2, &[1, 1]);
    let (mut taken, mut lost) = (Vec::new(), Vec::new());
    assert!(!pools.take_many(A, 1, Priority::DEFAULT, &[1, 1], &mut taken, &mut lost));
    assert!(!pools.take_many(A, 1, Priority::DEFAULT, &[0, 2], &mut taken, &mut lost));
    assert!(pools.take_many(A, 1, Priority::DEFAULT, &[0, 1], &mut taken, &mut lost));
}

#[test]
fn a_priority_that_is_over_makes_the_huge_page_go_first() {
    let mut pools = pools(2, &[1, 1]);
    take(&mut pools, A, 1);
    take(&mut pools, B, 1);
    cache(&mut pools, B, &[2], 90);
    cache(&mut pools, A, &[1], 50);
    let short = Retention::new(level(90), Some(1.0), None).unwrap();
    pools[B].retain(PageId(2), short);
    // It has its place by now.
    assert_eq!(take(&mut pools, A, 1), [1]);
    cache(&mut pools, A, &[1], 50);
    assert_eq!(pools[B].tell_time(1.0).len(), 1);
    assert_eq!(take_beside(&mut pools, A, 1, &[]), (vec![2], vec![(B, 2)]));
}

#[test]
fn a_huge_page_whose_pages_are_withdrawn_or_forgotten_goes_before_all_that_is_cached() {
    let withdraw: fn(&mut Pools) = |pools| pools[B].withdraw(PageId(2));
    for forget in [withdraw, |pools| pools[B].forget_all()] {
        let mut pools = pools(2, &[1, 1]);
        take(&mut pools, A, 1);
        take(&mut pools, B, 1);
        cache(&mut pools, B, &[2], 90);
        cache(&mut pools, A, &[1], 0);
        assert_eq!(take(&mut pools, A, 1), [1]); // B's huge page has its place now
        cache(&mut pools, A, &[1], 0);
        forget(&mut pools);
        pools.verify().unwrap();
        assert_eq!(take(&mut pools, A, 1), [2]);
    }
}

#[test]
fn free_huge_pages_are_those_without_a_page_in_use() {
    let mut pools = pools(4, &[2, 1]);
    let free = |pools: &Pools| pools.free_huge_pages(&pools.slabs()[0]);
    assert_eq!((pools.slabs()[0].huge_pages(), free(&pools)), (4, 4));
    take(&mut pools, A, 2);
    take(&mut pools, B, 1);
    assert_eq!(free(&pools), 2);
    cache(&mut pools, A, &[2, 3], 35);
    assert_eq!(free(&pools), 3);
}

#[test]
fn a_group_alone_in_its_slab_has_a_plain_pool() {
    let member = |group, ratio| Member { group, ratio, policy: EvictionPolicy::PriorityLru };
    let alone = |group| SlabShape { huge_pages: 3, members: vec![member(group, 2)] };
    let shared = SlabShape { huge_pages: 2, members: vec![member(A, 1), member(C, 1)] };
    let mut pools = Pools::new(&[alone(B), shared], Priority::DEFAULT).unwrap();
    assert_eq!(take(&mut pools, B, 2), [1, 2]);
    assert_eq!((pools.available(B), pools[B].pristine()), (4, 4));
    assert_eq!(pools.slab_of(B).groups(), [B]);
    assert_eq!(pools.slab_of(C).groups(), [A, C]);
    assert_eq!(pools.free_huge_pages(pools.slab_of(B)), 4);
    assert!(pools.can_satisfy(&[1, 4, 1]) && pools.capacity().can_satisfy(&[2, 6]));
    assert!(!pools.can_satisfy(&[1, 5, 1]) && !pools.can_satisfy(&[2, 0, 1]));
}

#[test]
fn a_refusal_changes_nothing() {
    let mut pools = pools(2, &[2, 1]);
    take(&mut pools, A, 2);
    cache(&mut pools, A, &[2, 3], 35);
    let before = fingerprint(&pools);
    assert!(refused(&mut pools, A, 5) && refused(&mut pools, B, 3));
    assert_eq!(fingerprint(&pools), before);
}

#[test]
fn the_fingerprint_sees_who_has_a_huge_page() {
    let claimed_by = |group| {
        let mut pools = pools(1, &[1, 1]);
        take(&mut pools, group, 1);
        release(&mut pools, group, &[1]);
        fingerprint(&pools)
    };
    assert_eq!(claimed_by(A), claimed_by(A));
    assert_ne!(claimed_by(A), claimed_by(B));
}

#[test]
fn groups_are_numbered_without_a_gap_and_each_is_in_one_slab() {
    let error = |shapes: &[SlabShape]| Pools::new(shapes, Priority::DEFAULT).err();
    let given = vec![0, 0, 1];
    let both = [shape(1, &[1, 1]), shape(1, &[1])];
    assert_eq!(error(&both), Some(ShapeError::Groups { given }));
    assert_eq!(error(&[shape(1, &[1, 0])]), Some(ShapeError::Ratio { group: 1 }));
}

#[test]
fn page_ids_fit_an_int32() {
    // 2^31 ids, the null page among them, and then one huge page more.
    assert!(Pools::new(&[shape((1 << 21) - 1, &[1024, 1])], Priority::DEFAULT).is_ok());
    let error = Pools::new(&[shape(1 << 21, &[1024, 1])], Priority::DEFAULT).err().unwrap();
    assert_eq!(error, ShapeError::TooMany { group: 0, huge_pages: 1 << 21, ratio: 1024 });
    let said = "group 0: 2097152 huge pages of 1024 pages are more than an int32 can number";
    assert_eq!(error.to_string(), said);
}
