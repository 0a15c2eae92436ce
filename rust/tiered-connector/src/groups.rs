//! The tiers of a cache with several groups of layers: a connector for each group, whose units are as large as the
//! group's pages, called as one. A copy of pages of several groups ends when it has ended in all of them.

use crate::connector::{Closed, NoUnits, Offered, Refused, TieredConnector};
use crate::job::{Offer, Origin, Outcome, TierKey, UnitId};
use crate::shards::time_left;
use block_pool::{GroupId, PageId, Step};
use completion::{Completion, all_of};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

/// The connectors of all groups, in the order of the groups.
pub struct TieredGroups {
    groups: Vec<TieredConnector>,
    /// Copies that more than one of them makes.
    joint: Mutex<HashMap<u64, Joint>>,
}

/// A copy that some connectors make together.
struct Joint {
    /// How many of them have not told of their end.
    left: usize,
    outcome: Outcome,
}

/// A group, and which of the blocks of a call are its.
type Part = (GroupId, Range<usize>);

impl TieredGroups {
    /// The tiers of groups in their order; at least one.
    ///
    /// # Panics
    /// Without a group.
    pub fn new(groups: Vec<TieredConnector>) -> TieredGroups {
        assert!(!groups.is_empty(), "a cache has a group");
        TieredGroups { groups, joint: Mutex::default() }
    }

    /// The connector of a group.
    pub fn group(&self, group: GroupId) -> &TieredConnector {
        &self.groups[group.index()]
    }

    /// All of them, in the order of the groups.
    pub fn groups(&self) -> &[TieredConnector] {
        &self.groups
    }

    /// Begins to read blocks of groups into pages, all or none; see [`TieredConnector::load`].
    ///
    /// # Errors
    /// As there.
    pub fn load(
        &self,
        blocks: &[(TierKey, PageId)],
        parts: impl Iterator<Item = Part>,
        after: Step,
        tag: Option<u64>,
    ) -> Result<Completion, Refused> {
        let parts: Vec<Part> = parts.filter(|(_, part)| !part.is_empty()).collect();
        if parts.len() > 1 {
            for (group, part) in &parts {
                let keys = blocks[part.clone()].iter().map(|&(key, _)| key);
                if self.group(*group).loadable(keys)? < part.len() {
                    return Err(Refused::NotHere);
                }
            }
        }
        self.copy(parts.into_iter(), tag, |group, part| group.load(&blocks[part], after, tag))
    }

    /// Offers blocks of groups; see [`TieredConnector::offload_with`]. Dropped are those of a group, or of all.
    ///
    /// # Errors
    /// As there.
    pub fn offload(
        &self,
        blocks: &[Offer],
        parts: impl Iterator<Item = Part>,
        origin: &dyn Fn(usize) -> Origin,
        after: Step,
        tag: Option<u64>,
    ) -> Result<Offered, Closed> {
        let (mut begun, mut dropped) = (Vec::new(), false);
        for (group, part) in parts.filter(|(_, part)| !part.is_empty()) {
            let first = part.start;
            let origin = |block: usize| origin(first + block);
            match self.group(group).offload_with(&blocks[part], &origin, after, tag) {
                Ok(Offered::Storing(completion)) => begun.push(completion),
                Ok(Offered::Dropped) => dropped = true,
                Err(closed) if begun.is_empty() => return Err(closed),
                Err(_) => {}
            }
        }
        if begun.is_empty() && dropped {
            return Ok(Offered::Dropped);
        }
        Ok(Offered::Storing(self.joined(begun, tag, false)))
    }

    /// Begins to copy pages of groups into private units; see [`TieredConnector::store_private`].
    ///
    /// # Errors
    /// As there.
    pub fn store_private(
        &self,
        units: &[UnitId],
        pages: &[PageId],
        parts: impl Iterator<Item = Part>,
        after: Step,
        tag: u64,
    ) -> Result<Completion, Closed> {
        self.copy(parts, Some(tag), |group, part| {
            group.store_private(&units[part.clone()], &pages[part], after, tag)
        })
    }

    /// Begins to copy private units into pages of groups, likewise.
    ///
    /// # Errors
    /// As there.
    pub fn load_private(
        &self,
        units: &[UnitId],
        pages: &[PageId],
        parts: impl Iterator<Item = Part>,
        after: Step,
        tag: u64,
    ) -> Result<Completion, Closed> {
        self.copy(parts, Some(tag), |group, part| {
            group.load_private(&units[part.clone()], &pages[part], after, tag)
        })
    }

    /// Whether all groups take copies.
    ///
    /// # Errors
    /// Why not.
    pub fn check_open(&self) -> Result<(), Closed> {
        self.groups.iter().try_for_each(TieredConnector::check_open)
    }

    /// Takes `count` private units of a group, or none.
    ///
    /// # Errors
    /// As for [`TieredConnector::reserve`].
    pub fn reserve(&self, group: GroupId, count: usize) -> Result<Vec<UnitId>, NoUnits> {
        self.group(group).reserve(count)
    }

    /// The blocks of these hashes, from the first of their prefix on, were used on the device.
    pub fn touch(&self, hashes: &[u64]) {
        self.groups.iter().for_each(|group| group.touch(hashes));
    }

    /// Whether the copy of this tag has not been told of by [`TieredGroups::take_finished`] yet.
    pub fn is_copying(&self, tag: u64) -> bool {
        self.joint.lock().contains_key(&tag) || self.groups.iter().any(|group| group.is_copying(tag))
    }

    /// Copies with a tag that have ended since the last call, in all groups, and how.
    pub fn take_finished(&self) -> Vec<(u64, Outcome)> {
        let mut finished = Vec::new();
        for (tag, outcome) in self.groups.iter().flat_map(TieredConnector::take_finished) {
            let mut joint = self.joint.lock();
            let Some(of_all) = joint.get_mut(&tag) else {
                finished.push((tag, outcome));
                continue;
            };
            of_all.left -= 1;
            if outcome != Outcome::Done && !matches!(of_all.outcome, Outcome::Failed(_)) {
                of_all.outcome = outcome;
            }
            if of_all.left == 0
                && let Some(ended) = joint.remove(&tag)
            {
                finished.push((tag, ended.outcome));
            }
        }
        finished
    }

    /// Forgets every block of every group; see [`TieredConnector::reset`].
    ///
    /// # Errors
    /// As there.
    pub fn reset(&self) -> Result<Completion, Closed> {
        let mut ends: Vec<Completion> =
            self.groups.iter().map(TieredConnector::reset).collect::<Result<_, _>>()?;
        Ok(if ends.len() == 1 { ends.swap_remove(0) } else { all_of(ends) })
    }

    /// Waits until no copy is in flight; false when `timeout` passes first.
    pub fn drain(&self, timeout: Duration) -> bool {
        let left = time_left(timeout);
        self.groups.iter().all(|group| group.drain(left()))
    }

    /// Waits until what was offered survives; see [`TieredConnector::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&self, timeout: Duration) -> Result<bool, Closed> {
        let left = time_left(timeout);
        for group in &self.groups {
            if !group.flush(left())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Shuts every group's connector down; see [`TieredConnector::shutdown`].
    pub fn shutdown(&self, timeout: Duration) {
        let left = time_left(timeout);
        self.groups.iter().for_each(|group| group.shutdown(left()));
    }

    /// Begins the parts of a copy, those without a block left out, in the order of the groups.
    fn copy<E>(
        &self,
        parts: impl Iterator<Item = Part>,
        tag: Option<u64>,
        call: impl Fn(&TieredConnector, Range<usize>) -> Result<Completion, E>,
    ) -> Result<Completion, E> {
        let mut begun = Vec::new();
        for (group, part) in parts.filter(|(_, part)| !part.is_empty()) {
            match call(self.group(group), part) {
                Ok(completion) => begun.push(completion),
                Err(refused) if begun.is_empty() => return Err(refused),
                Err(_) => {
                    for part in &begun {
                        part.cancel();
                    }
                    return Ok(self.joined(begun, tag, true));
                }
            }
        }
        if begun.is_empty() {
            return call(&self.groups[0], 0..0);
        }
        Ok(self.joined(begun, tag, false))
    }

    /// Copies that were begun as one. `failed`: another one of its parts was refused.
    fn joined(&self, mut begun: Vec<Completion>, tag: Option<u64>, failed: bool) -> Completion {
        if let Some(tag) = tag.filter(|_| failed || begun.len() > 1) {
            let outcome = if failed { Outcome::Failed(REFUSED.into()) } else { Outcome::Done };
            self.joint.lock().insert(tag, Joint { left: begun.len(), outcome });
        }
        if failed {
            let (completer, refused) = completion::pending();
            completer.fail(REFUSED);
            begun.push(refused);
        }
        if begun.len() > 1 { all_of(begun) } else { begun.swap_remove(0) }
    }
}

const REFUSED: &str = "a group of layers does not have its blocks any more";
