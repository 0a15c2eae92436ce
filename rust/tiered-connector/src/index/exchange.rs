//! Blocks that pass between this tier and another: units that are read for it, and units that are filled from it.

use super::{InFlight, TierIndex, Use, page};
use crate::job::{Job, JobId, Offer, Outcome, TierKey, UnitId};
use crate::reports::What;
use block_pool::{NodeLink, PageId, Priority, Step};
use std::collections::HashSet;

#[cfg(test)]
mod tests;

impl TierIndex {
    /// Blocks in these units, each offered as it lies there: page `n + 1` is unit `n`.
    pub(crate) fn offers(&self, units: &[UnitId]) -> Vec<Offer> {
        let offer = |&unit: &UnitId| Offer {
            key: self.keys[unit.0 as usize],
            page: page(unit),
            priority: self.pool.priority(page(unit)),
        };
        units.iter().map(offer).collect()
    }

    /// Keeps units as they are until the job has ended, for somebody who reads them. That is no use of their blocks.
    pub(crate) fn hold(&mut self, units: &[UnitId]) -> JobId {
        for &unit in units {
            self.pool.pin(page(unit));
        }
        self.enter(InFlight { does: Use::Hold, units: units.to_vec(), epoch: Some(self.epoch) })
    }

    /// Keeps the blocks of these that are here or on their way until the job has ended, so that none gives
    /// way to another of them.
    pub(crate) fn hold_known(&mut self, offers: &[Offer]) -> JobId {
        let known: Vec<UnitId> = offers.iter().filter_map(|offer| self.place_of(&offer.key)).collect();
        self.hold(&known)
    }

    /// Units for blocks that somebody writes; all or none: `None` when there are too few, or a block (or another of
    /// its hash) is here, on its way, or named twice. Blocks of any priority go for them.
    pub(crate) fn fill(&mut self, blocks: &[(TierKey, Priority)]) -> Option<(JobId, Vec<UnitId>)> {
        let mut hashes = HashSet::with_capacity(blocks.len());
        let new = |&(key, _): &(TierKey, Priority)| hashes.insert(key.hash) && !self.knows(key.hash);
        if blocks.len() > self.pool.available() as usize || !blocks.iter().all(new) {
            return None;
        }
        let mut units = Vec::with_capacity(blocks.len());
        for &(key, priority) in blocks {
            let unit = self.take(Priority::HIGHEST)?; // there is one
            self.set_priority(unit, priority);
            self.keys[unit.0 as usize] = key;
            self.table.insert(key.hash, unit.0);
            self.report(What::Coming, unit);
            units.push(unit);
        }
        Some((self.enter(InFlight { does: Use::Fill, units: units.clone(), epoch: Some(self.epoch) }), units))
    }

    /// Plans to read units that hold blocks, or will once they are filled, into pages.
    pub(crate) fn load_from(&mut self, units: Vec<UnitId>, pages: Vec<PageId>, after: Step) -> Job {
        self.load_units(units, pages, after)
    }

    /// Some units of a job have failed. It goes on without them.
    pub(crate) fn fail(&mut self, id: JobId, failed: &HashSet<UnitId>) {
        let Some(job) = self.jobs.get_mut(&id).filter(|_| !failed.is_empty()) else { return };
        let (units, rest) = job.units.iter().partition(|unit| failed.contains(unit));
        job.units = rest;
        let part = InFlight { does: job.does, units, epoch: job.epoch };
        let part = self.enter(part);
        self.apply(part, &Outcome::Failed(String::new()));
    }

    /// A job that was planned is not carried out, and never was.
    pub(crate) fn withdraw(&mut self, id: JobId) {
        if let Some(InFlight { units, .. }) = self.jobs.remove(&id) {
            for &unit in units.iter().rev() {
                self.pool.unpin_in_place(page(unit));
            }
        }
    }

    /// The unit of a block that can be read.
    pub(crate) fn unit_of(&self, key: &TierKey) -> Option<UnitId> {
        self.find(key)
    }

    /// The unit of a block that can be read or is on its way.
    pub(crate) fn place_of(&self, key: &TierKey) -> Option<UnitId> {
        self.owner(key.hash).filter(|&unit| self.keys[unit.0 as usize].guard == key.guard)
    }

    /// Whether a block can be read, and its unit would be given to another.
    pub(crate) fn may_go(&self, key: &TierKey) -> bool {
        self.find(key).is_some_and(|unit| self.pool.is_evictable(page(unit)))
    }

    /// Whether the block of this hash can be read.
    pub(crate) fn has_hash(&self, hash: u64) -> bool {
        self.owner(hash).is_some_and(|unit| self.holds(unit))
    }

    /// Whether a unit holds a block that can be read.
    pub(crate) fn holds(&self, unit: UnitId) -> bool {
        self.pool.node(page(unit)).is_some()
    }

    /// Whether a block of this hash, perhaps another one, is here or on its way.
    pub(crate) fn knows(&self, hash: u64) -> bool {
        self.owner(hash).is_some()
    }

    /// How long the block in a unit is to be kept.
    pub(crate) fn priority(&self, unit: UnitId) -> Priority {
        self.pool.priority(page(unit))
    }

    /// The block in a unit is none: forgets it.
    pub(crate) fn forget(&mut self, unit: UnitId) {
        if self.pool.node(page(unit)).is_some() {
            self.table.remove(self.keys[unit.0 as usize].hash, unit.0);
            self.pool.withdraw(page(unit));
            self.report(What::Lost, unit);
            self.counters.lost += 1;
        }
    }

    /// Blocks that lay in these units before this index was made, in the order of their last use; each in a unit of
    /// its own, all different; where two have one hash the older is found. For an index that is new.
    pub(crate) fn restore(&mut self, blocks: impl Iterator<Item = (UnitId, TierKey, Priority)> + Clone) {
        let used = blocks.clone().map(|(unit, ..)| unit.0 + 1).max().unwrap_or(0);
        for _ in 0..used {
            self.take(Priority::DEFAULT);
        }
        let mut held = vec![false; used as usize];
        for (unit, key, priority) in blocks {
            if self.knows(key.hash) {
                self.counters.collisions += 1;
                continue;
            }
            held[unit.0 as usize] = true;
            self.set_priority(unit, priority);
            self.keys[unit.0 as usize] = key;
            self.table.insert(key.hash, unit.0);
            self.pool.publish(page(unit), NodeLink(unit.0), Step(0));
            self.pool.release(page(unit), Step(0));
        }
        for unit in (0..used).filter(|&unit| !held[unit as usize]) {
            self.pool.release(page(UnitId(unit)), Step(0));
        }
    }

    fn set_priority(&mut self, unit: UnitId, priority: Priority) {
        self.pool.retain(page(unit), priority.into());
    }
}
