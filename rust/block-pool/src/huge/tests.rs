//! Each test damages one fact about huge pages and asks what is named.

use super::UNRANKED;
use crate::ids::{GroupId, NodeLink, PageId, Priority, Step};
use crate::policy::EvictionPolicy;
use crate::pool::Pool;
use crate::pools::Pools;
use crate::slab::{Member, SlabShape};

const A: GroupId = GroupId(0);
const B: GroupId = GroupId(1);
/// A page of A is cached there, the other is blank; the huge page has its place among the parked ones.
const PARKED: PageId = PageId(1);
/// A has one page in use there.
const OPEN: PageId = PageId(2);

/// B has nothing, and a third huge page is pristine.
fn sound() -> Pools {
    let member = |group, ratio| Member { group, ratio, policy: EvictionPolicy::PriorityLru };
    let shape = SlabShape { huge_pages: 3, members: vec![member(A, 2), member(B, 3)] };
    let mut pools = Pools::new(&[shape], Priority::DEFAULT).unwrap();
    let mut taken = Vec::new();
    assert!(pools.take_many(A, 3, Priority::DEFAULT, &[], &mut taken, &mut Vec::new()));
    assert_eq!(taken.iter().map(|taken| taken.page.0).collect::<Vec<_>>(), [2, 3, 4]);
    pools[A].publish(PageId(2), NodeLink(7), Step(1));
    pools[A].release_all([2, 3].map(PageId), Step(1));
    assert_eq!(pools[A].first_parked().map(|(huge, _)| huge), Some(PARKED));
    pools.verify().unwrap();
    pools
}

fn after(damage: impl FnOnce(&mut Pools)) -> String {
    let mut pools = sound();
    damage(&mut pools);
    pools.verify().unwrap_err().to_string()
}

fn after_in_a(damage: impl FnOnce(&mut Pool)) -> String {
    after(|pools| damage(&mut pools[A]))
}

#[test]
fn a_reference_to_a_page_of_another_groups_huge_page_is_found() {
    let fault = after(|pools| {
        pools[B].add_pages(3);
        pools[B].pages[3].refs = 1;
    });
    assert_eq!(fault, "group 1, page 3: in use, and its huge page is not the group's");
}

#[test]
fn what_is_cached_in_another_groups_huge_page_is_found() {
    let fault = after(|pools| {
        pools[B].add_pages(3);
        pools[B].pages[3].node = 7;
    });
    assert_eq!(fault, "group 1, page 3: it stands for something, and is not the group's");
}

#[test]
fn a_holder_too_many_is_found() {
    let fault = after_in_a(|pool| pool.book.as_mut().unwrap().records[OPEN.index()].refs = 2);
    assert_eq!(fault, "group 0, page 4: huge page 2: 1 of its pages are in use, 2 are counted");
}

#[test]
fn a_wrong_number_of_parked_huge_pages_is_found() {
    let fault = after_in_a(|pool| pool.book.as_mut().unwrap().parked = 2);
    let what = "1 of 2 are parked, 1 pages idle in others; counted are (2, 1, 2)";
    assert_eq!(fault, format!("group 0, page 0: huge page 0: {what}"));
}

#[test]
fn a_wrong_number_of_idle_pages_is_found() {
    let fault = after_in_a(|pool| pool.book.as_mut().unwrap().idle = 0);
    let what = "1 of 2 are parked, 1 pages idle in others; counted are (1, 0, 2)";
    assert_eq!(fault, format!("group 0, page 0: huge page 0: {what}"));
}

#[test]
fn a_wrong_number_of_the_groups_huge_pages_is_found() {
    let fault = after_in_a(|pool| pool.book.as_mut().unwrap().owned = 3);
    let what = "1 of 2 are parked, 1 pages idle in others; counted are (1, 1, 3)";
    assert_eq!(fault, format!("group 0, page 0: huge page 0: {what}"));
}

#[test]
fn a_parked_huge_page_without_a_place_is_found() {
    let fault = after_in_a(|pool| {
        let book = pool.book.as_mut().unwrap();
        book.queues.remove(&mut book.records, PARKED);
    });
    assert_eq!(fault, "group 0, page 2: huge page 1: its place among the parked ones is wrong");
}

#[test]
fn a_place_of_a_huge_page_in_use_is_found() {
    let fault = after_in_a(|pool| {
        let book = pool.book.as_mut().unwrap();
        book.queues.push_uncached(&mut book.records, OPEN);
    });
    assert_eq!(fault, "group 0, page 4: huge page 2: its place among the parked ones is wrong");
}

#[test]
fn a_place_that_is_not_that_of_what_is_cached_is_found() {
    let fault =
        after_in_a(|pool| pool.book.as_mut().unwrap().records[PARKED.index()].priority = Priority::HIGHEST);
    assert_eq!(fault, "group 0, page 2: huge page 1: it is parked at a wrong place");
}

#[test]
fn a_mark_of_a_huge_page_that_is_to_be_ranked_and_is_not_listed_is_found() {
    let fault =
        after_in_a(|pool| pool.book.as_mut().unwrap().records[PARKED.index()].flags.set(UNRANKED, true));
    assert_eq!(fault, "group 0, page 2: huge page 1: it is listed 0 times to be ranked");
}

#[test]
fn a_huge_page_of_two_groups_is_found() {
    let fault = after(|pools| {
        let mut taken = Vec::new();
        pools[B].claim_huge(PARKED, (Step(0), false), 1, Priority::DEFAULT, &mut taken);
    });
    assert_eq!(fault, "group 0, page 2: huge page 1 is claimed by the groups [0, 1]");
}

#[test]
fn a_huge_page_that_nobody_has_any_more_is_found() {
    let fault = after(|pools| {
        pools[A].give_up_huge(PARKED, |_, _| {});
    });
    assert_eq!(fault, "group 0, page 2: huge page 1 is claimed by the groups []");
}

#[test]
fn a_claimed_huge_page_that_counts_as_pristine_is_found() {
    let fault = after(|pools| pools.slab_of_mut(A).claimed = 1);
    assert_eq!(fault, "group 0, page 4: huge page 2 is claimed by the groups [0]");
}
