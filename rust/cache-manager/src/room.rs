//! Whether a planned batch fits.

use crate::error::LedgerError;
use crate::hits::Found;
use crate::ledger::Ledger;
use crate::planning::{Change, Plan, Scratch};
use block_pool::{GroupId, Pools, Room};
use radix_tree::NodeId;
use smallvec::{SmallVec, smallvec};

impl Ledger {
    /// Whether the planned batch fits, to the page.
    pub(crate) fn check_room(&mut self, scratch: &Scratch) -> Result<(), LedgerError> {
        let mut room = self.pools.room();
        self.mark_planned(scratch);
        let mut demand: SmallVec<[u32; 1]> = smallvec![0; self.config.groups.len()];
        let mut lacking = None;
        for (plan, taken) in scratch.plans(self.config.groups.len()) {
            self.change_room(plan, &scratch.found, &mut room, |_, _| {});
            let before = demand.clone();
            for (demand, pages) in demand.iter_mut().zip(taken) {
                *demand += pages.count();
            }
            if lacking.is_none() && !room.can_satisfy(&demand) {
                let short = |&group: &GroupId| demand[group.index()] > room.available(group);
                let no_room = match self.config.group_ids().find(short) {
                    Some(group) => {
                        let free = room.available(group).saturating_sub(before[group.index()]);
                        self.room(group, taken[group.index()].count(), free)
                    }
                    None => self.huge_room(&demand),
                };
                lacking = Some((plan.slot, no_room));
            }
        }
        // A later request's hits may give back pages that an earlier one lacked: the sum decides.
        match lacking {
            Some((slot, no_room)) if !room.can_satisfy(&demand) => {
                Err(LedgerError::InsufficientBlocks { slot, room: no_room })
            }
            _ => Ok(()),
        }
    }

    /// The room once the hits of a planned batch are claimed; and the pages of each group that are claimed,
    /// less those that are given back.
    pub(crate) fn room_after(&mut self, scratch: &Scratch) -> (Room, SmallVec<[i64; 4]>) {
        let mut room = self.pools.room();
        let mut claimed = smallvec![0; self.config.groups.len()];
        let mut reusing = scratch.reusing().peekable();
        if reusing.peek().is_some() {
            self.mark_planned(scratch);
        }
        for plan in reusing {
            self.change_room(plan, &scratch.found, &mut room, |group, gains| {
                claimed[group.index()] += if gains { 1 } else { -1 };
            });
        }
        (room, claimed)
    }

    /// What a plan claims and gives back before it takes pages, in a pass of marks.
    fn change_room(
        &mut self,
        plan: &Plan,
        found: &Found,
        room: &mut Room,
        mut each: impl FnMut(GroupId, bool),
    ) {
        let Some(sequence) = self.slots.get(plan.slot) else { return };
        for group in self.config.group_ids() {
            let mut change = |pools: &Pools, page, gains| {
                let step = if gains { Room::claim } else { Room::give_back };
                step(room, pools, group, page);
                each(group, gains);
            };
            for page in plan.load().into_iter().flat_map(|load| load.stored(group)) {
                if self.pools[group].is_evictable(page) && self.pools[group].mark(page) {
                    change(&self.pools, page, true);
                }
            }
            let part = self.partial_page(plan, group);
            let moved = Change { sequence, hit: plan.hit(), start: plan.start, part };
            moved.pages(&self.config, &mut self.pools, found, group, change);
        }
    }

    fn mark_planned(&mut self, scratch: &Scratch) {
        let parts: SmallVec<[NodeId; 4]> = scratch.partial_nodes().collect();
        self.mark_held(&scratch.found, &parts);
    }

    /// Opens a pass of marks in which the pages that are held, and hit, are marked: nobody who lets one go
    /// makes room. So are those of the blocks of `parts`.
    pub(crate) fn mark_held(&mut self, found: &Found, parts: &[NodeId]) {
        for group in self.config.group_ids() {
            let pool = &mut self.pools[group];
            pool.open_marks();
            let parts = parts.iter().filter_map(|&node| self.tree.page(node, group));
            for page in found.all(group).iter().copied().chain(parts) {
                if !pool.is_evictable(page) {
                    pool.mark(page);
                }
            }
        }
    }
}
