//! What could be had, if some pages were claimed and others given back first.

use crate::ids::{GroupId, PageId};
use crate::pools::Pools;
use std::collections::BTreeMap;

/// Room in all groups at some time: as it is ([`Pools::room`]), or with nothing in use ([`Pools::capacity`]). The
/// plan of a batch counts in it what the batch will claim and give back before it takes pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Room {
    groups: Vec<GroupRoom>,
    /// Huge pages that any group can have, for each slab.
    huge: Vec<u32>,
    /// How many pages of a huge page are not idle, where this is not as it was.
    held: BTreeMap<(GroupId, PageId), u32>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GroupRoom {
    pub(crate) slab: usize,
    pub(crate) ratio: u32,
    /// Pages that nobody else can have.
    pub(crate) own: u32,
}

impl Room {
    pub(crate) fn new(groups: Vec<GroupRoom>, huge: Vec<u32>) -> Room {
        Room { groups, huge, held: BTreeMap::new() }
    }

    /// Whether `demand[g]` pages of each group `g` can be had together, counted to the page. A group that it does
    /// not name demands none.
    pub fn can_satisfy(&self, demand: &[u32]) -> bool {
        let needed = |slab: usize| -> u64 {
            let groups = self.groups.iter().zip(demand).filter(|(group, _)| group.slab == slab);
            groups.map(|(group, &demand)| huge_needed(demand.into(), group.own, group.ratio)).sum()
        };
        self.huge.iter().enumerate().all(|(slab, &huge)| needed(slab) <= huge.into())
    }

    /// Pages that `group` can have if no other takes any.
    pub fn available(&self, group: GroupId) -> u32 {
        let GroupRoom { slab, ratio, own } = self.groups[usize::from(group.0)];
        own + self.huge[slab] * ratio
    }

    /// An evictable page will be claimed; each page once.
    pub fn claim(&mut self, pools: &Pools, group: GroupId, page: PageId) {
        let room = &mut self.groups[usize::from(group.0)];
        let Some(book) = &pools[group].book else {
            room.own -= 1;
            return;
        };
        let huge = book.huge_of(page);
        let held = self.held.entry((group, huge)).or_insert_with(|| book.held(huge));
        *held += 1;
        if *held == 1 {
            self.huge[room.slab] -= 1;
            room.own += room.ratio - 1;
        } else {
            room.own -= 1;
        }
    }

    /// The last holder of a page will give it back; each page once.
    pub fn give_back(&mut self, pools: &Pools, group: GroupId, page: PageId) {
        let room = &mut self.groups[usize::from(group.0)];
        let Some(book) = &pools[group].book else {
            room.own += 1;
            return;
        };
        let huge = book.huge_of(page);
        let held = self.held.entry((group, huge)).or_insert_with(|| book.held(huge));
        *held -= 1;
        if *held == 0 {
            self.huge[room.slab] += 1;
            room.own -= room.ratio - 1;
        } else {
            room.own += 1;
        }
    }
}

/// Huge pages that a group needs for `demand` pages, of which it has `own` already.
#[inline]
pub(crate) fn huge_needed(demand: u64, own: u32, ratio: u32) -> u64 {
    demand.saturating_sub(own.into()).div_ceil(ratio.into())
}
