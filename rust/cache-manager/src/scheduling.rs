//! Scheduling passes: what would be free if some requests went and others took pages.
//!
//! A pass starts from the pools as they are, and costs what it is asked, not what the pools hold: pages carry no count
//! for it until a request that holds them is removed. It is for the time in which no request is planned or let go; it
//! touches neither pages nor tree.

use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Room};
use smallvec::{SmallVec, smallvec};

/// A scheduling pass.
#[derive(Default)]
pub(crate) struct Pass {
    /// Its number; what bears another is of an earlier one.
    number: u64,
    /// What is free without what is reserved.
    room: Option<Room>,
    /// Pages of each group that requests have reserved.
    reserved: SmallVec<[u32; 1]>,
    /// For each group and page: the pass in which requests that hold it were removed, and how many.
    removed: Vec<Vec<(u64, u32)>>,
    /// For each dense index of a slot: the pass, the slot, what it has reserved, and whether it was removed.
    requests: Vec<(u64, SlotId, SmallVec<[u32; 1]>, bool)>,
}

impl Ledger {
    /// Opens a pass, and tells the time in seconds, if there is one. All that is free is free in it.
    ///
    /// # Errors
    /// A time before the last one. Nothing is changed then.
    pub fn start_scheduling(&mut self, now: Option<f64>) -> Result<(), LedgerError> {
        self.check_time(now)?;
        self.tell_time(now);
        let groups = self.config.groups.len();
        let pass = &mut self.pass;
        pass.number += 1;
        pass.room = Some(self.pools.room());
        pass.reserved.clear();
        pass.reserved.resize(groups, 0);
        pass.removed.resize(groups, Vec::new());
        Ok(())
    }

    /// Sets `blocks[g]` pages of each group `g` aside for a request, beside what it has reserved. False when they are not
    /// there together; nothing is set aside then.
    ///
    /// # Errors
    /// An unknown slot; no pass; numbers for more or fewer groups than there are.
    pub fn scheduling_reserve(&mut self, slot: SlotId, blocks: &[u32]) -> Result<bool, LedgerError> {
        self.sequence(slot)?;
        if !self.scheduling_has_free_blocks(blocks)? {
            return Ok(false);
        }
        let reserved = &mut self.pass.request(slot, blocks.len()).2;
        reserved.iter_mut().zip(blocks).for_each(|(reserved, blocks)| *reserved += blocks);
        self.pass.reserved.iter_mut().zip(blocks).for_each(|(reserved, blocks)| *reserved += blocks);
        Ok(true)
    }

    /// Gives back what a request has reserved in the pass, and the pages that it alone holds. What it holds with others
    /// is free once all of them are removed. A request that was removed before has nothing more to give.
    ///
    /// # Errors
    /// An unknown slot; no pass.
    pub fn scheduling_remove(&mut self, slot: SlotId) -> Result<(), LedgerError> {
        let mut pass = std::mem::take(&mut self.pass);
        let removed = self.remove_from(&mut pass, slot);
        self.pass = pass;
        removed
    }

    fn remove_from(&self, pass: &mut Pass, slot: SlotId) -> Result<(), LedgerError> {
        let sequence = self.sequence(slot)?;
        let groups = self.config.groups.len();
        if pass.room.is_none() {
            return Err(LedgerError::NoPass);
        }
        let (_, _, own, removed) = pass.request(slot, groups);
        let own = std::mem::replace(own, smallvec![0; groups]);
        let before = std::mem::replace(removed, true);
        pass.reserved.iter_mut().zip(&own).for_each(|(reserved, own)| *reserved -= own);
        let Some(room) = pass.room.as_mut().filter(|_| !before) else { return Ok(()) };
        for group in self.config.group_ids() {
            let pool = &self.pools[group];
            for page in sequence.all_pages(group) {
                let counts = &mut pass.removed[group.index()];
                counts.resize(counts.len().max(page.index() + 1), (0, 0));
                let (number, removed) = &mut counts[page.index()];
                if *number != pass.number {
                    (*number, *removed) = (pass.number, 0);
                }
                *removed += 1;
                if *removed == pool.refs(page) && pool.pins(page) == 0 {
                    room.give_back(&self.pools, group, page);
                }
            }
        }
        Ok(())
    }

    /// Whether `blocks[g]` pages of each group `g` are free together in the pass, beside those that are reserved.
    ///
    /// # Errors
    /// No pass; numbers for more or fewer groups than there are.
    pub fn scheduling_has_free_blocks(&self, blocks: &[u32]) -> Result<bool, LedgerError> {
        let Some(room) = &self.pass.room else { return Err(LedgerError::NoPass) };
        self.check_demand(blocks)?;
        let demand =
            self.pass.reserved.iter().zip(blocks).map(|(reserved, &blocks)| reserved.saturating_add(blocks));
        Ok(room.can_satisfy(&demand.collect::<SmallVec<[u32; 4]>>()))
    }

    /// Whether `blocks[g]` pages of each group `g` can be had together now, or with `at_capacity` when nothing is in
    /// use.
    ///
    /// # Errors
    /// Numbers for more or fewer groups than there are.
    pub fn can_satisfy(&self, blocks: &[u32], at_capacity: bool) -> Result<bool, LedgerError> {
        self.check_demand(blocks)?;
        let room = if at_capacity { self.pools.capacity() } else { self.pools.room() };
        Ok(room.can_satisfy(blocks))
    }

    fn check_demand(&self, blocks: &[u32]) -> Result<(), LedgerError> {
        let groups = self.config.groups.len();
        if blocks.len() == groups {
            return Ok(());
        }
        Err(LedgerError::Mismatch(format!("blocks has {} entries for {groups} groups", blocks.len())))
    }
}

impl Pass {
    /// What the pass knows of a request.
    fn request(&mut self, slot: SlotId, groups: usize) -> &mut (u64, SlotId, SmallVec<[u32; 1]>, bool) {
        let len = self.requests.len().max(slot.index() + 1);
        self.requests.resize(len, (0, slot, SmallVec::new(), false));
        let request = &mut self.requests[slot.index()];
        if (request.0, request.1) != (self.number, slot) {
            *request = (self.number, slot, smallvec![0; groups], false);
        }
        request
    }
}

impl Sequence {
    /// Every page of a group that the request holds, wherever.
    pub(crate) fn all_pages(&self, group: GroupId) -> impl Iterator<Item = PageId> + '_ {
        let load = self.load.iter().flat_map(move |load| load.rows[group.index()].held());
        let returning = self.suspension.iter().flat_map(|suspension| suspension.pages());
        let returning = returning.filter(move |(of, _)| *of == group).map(|(_, page)| page);
        self.row(group).held().map(|(_, page)| page).chain(load).chain(returning)
    }
}
