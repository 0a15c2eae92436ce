//! Suspension: a request lets go of its pages, and its KV waits in private units of a tier until it comes back.
//!
//! A suspended request is leaving while its pages are copied out, away, or returning while they are copied in. It
//! keeps its tokens and holds nothing on the device, so its blocks stay in the tree like those of a request
//! that was preempted. It comes back to where it stood, on other pages, and its blocks are published again. When
//! a copy failed its KV is lost: it computes all its tokens again, as after [`Ledger::preempt`].

use crate::copies::{CopyEnd, CopyId, CopyJob};
use crate::error::{LedgerError, NoRoom};
use crate::ledger::Ledger;
use crate::letting_go::start_over;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Pool, Step};
use completion::Completion;
use std::fmt;
use tiered_connector::connector::{Closed, NoUnits, TieredConnector};
use tiered_connector::job::UnitId;

/// A tier that keeps pages of one request apart from all blocks. No call waits, and none calls the ledger.
pub trait PrivateTier {
    /// Whether copies can be made.
    ///
    /// # Errors
    /// Why not.
    fn check_open(&mut self) -> Result<(), Closed>;

    /// Takes `count` units, or none.
    ///
    /// # Errors
    /// Too few are left.
    fn reserve(&mut self, count: usize) -> Result<Vec<UnitId>, NoUnits>;

    /// Begins to copy the pages of `job` into units; [`take_ended`](crate::OuterTier::take_ended) tells of the end.
    ///
    /// # Errors
    /// Nothing is copied, and nothing will be told.
    fn store_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed>;

    /// Begins to copy units into the pages of `job`, likewise.
    ///
    /// # Errors
    /// As there.
    fn load_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed>;

    /// Gives units back; copies may use them still.
    fn free_private(&mut self, units: &[UnitId]);
}

impl PrivateTier for &TieredConnector {
    fn check_open(&mut self) -> Result<(), Closed> {
        TieredConnector::check_open(self)
    }

    fn reserve(&mut self, count: usize) -> Result<Vec<UnitId>, NoUnits> {
        TieredConnector::reserve(self, count)
    }

    fn store_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        TieredConnector::store_private(self, units, &job.pages, job.after, job.id.0)
    }

    fn load_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        TieredConnector::load_private(self, units, &job.pages, job.after, job.id.0)
    }

    fn free_private(&mut self, units: &[UnitId]) {
        TieredConnector::free_private(self, units);
    }
}

/// What a suspended request has.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Suspension {
    /// A unit for each block with computed tokens.
    pub(crate) units: Vec<UnitId>,
    /// Tokens with KV.
    pub(crate) processed: u32,
    /// Pages that the request held.
    pub(crate) pages: u32,
    pub(crate) stage: Stage,
}

/// Where its KV is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Stage {
    Leaving(CopyId),
    Away,
    /// On the way to the first of these pages, which are the request's.
    Returning(CopyId, Vec<PageId>),
}

impl Suspension {
    /// The copy that the request waits for.
    pub(crate) fn copy(&self) -> Option<CopyId> {
        match self.stage {
            Stage::Leaving(copy) | Stage::Returning(copy, _) => Some(copy),
            Stage::Away => None,
        }
    }

    /// The pages that the request holds.
    pub(crate) fn pages(&self) -> &[PageId] {
        if let Stage::Returning(_, pages) = &self.stage { pages } else { &[] }
    }
}

impl fmt::Display for Suspension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Suspension { units, processed, pages, stage } = self;
        let units: Vec<u32> = units.iter().map(|unit| unit.0).collect();
        write!(
            f,
            "suspended with {processed} processed tokens, had {pages} pages, units {units:?}, {stage:?}"
        )
    }
}

/// A copy that a request waits for.
pub struct BegunCopy {
    /// The request.
    pub slot: SlotId,
    /// The copy.
    pub job: CopyJob,
    /// Its handle.
    pub completion: Completion,
}

impl Sequence {
    /// Whether it has nothing on the device.
    pub(crate) fn is_set_aside(&self) -> bool {
        let held = self.nodes.len() + self.anchored.len() + self.steps_out.len();
        held == 0 && self.holds_no_page() && self.load.is_none() && self.position == 0
    }

    /// Refuses what a suspended request cannot do.
    pub(crate) fn check_present(&self, slot: SlotId) -> Result<(), LedgerError> {
        match self.suspension.as_ref().map(|suspension| &suspension.stage) {
            None => Ok(()),
            Some(Stage::Leaving(_)) => Err(LedgerError::Leaving { slot }),
            Some(Stage::Away) => Err(LedgerError::Suspended { slot }),
            Some(Stage::Returning(..)) => Err(LedgerError::Loading { slot }),
        }
    }
}

impl Ledger {
    /// Copies the KV of every request in `batch` into private units of `tier` and lets its pages go: they are in
    /// flight until [`Ledger::end_copies`] is told of the copy, and stored blocks stay stored. Until
    /// [`Ledger::resume`] the requests may be given tokens, released or preempted, nothing else.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; a request without KV, with a step out, that waits for a load,
    /// is suspended already or is padding, or to whose pages a planned page copy leads; a tier that takes no copies;
    /// [`LedgerError::InsufficientUnits`] naming the first request that did not fit. Nothing is changed then.
    pub fn suspend(
        &mut self,
        tier: &mut dyn PrivateTier,
        batch: &[SlotId],
    ) -> Result<Vec<BegunCopy>, LedgerError> {
        self.check_batch(batch)?;
        let blocks = batch.iter().map(|&slot| self.suspendable(slot)).collect::<Result<Vec<usize>, _>>()?;
        let mut units = match tier.reserve(blocks.iter().sum()) {
            Ok(units) => units.into_iter(),
            Err(NoUnits::Closed(why)) => return Err(LedgerError::NoTier(why.to_string())),
            Err(NoUnits::TooFew(room)) => {
                let (mut free, mut first) = (room.free, 0);
                while first + 1 < batch.len() && blocks[first] as u32 <= free {
                    free -= blocks[first] as u32;
                    first += 1;
                }
                let room = NoRoom {
                    needed: blocks[first] as u32,
                    free,
                    evictable: room.evictable.min(free),
                    pinned: room.total - room.free,
                    total: room.total,
                };
                return Err(LedgerError::InsufficientUnits { slot: batch[first], room });
            }
        };
        let mut begun = Vec::with_capacity(batch.len());
        for (&slot, blocks) in batch.iter().zip(blocks) {
            let units: Vec<UnitId> = units.by_ref().take(blocks).collect();
            let Some(sequence) = self.slots.get(slot) else { continue };
            let (pages, last_step) =
                (sequence.row(GroupId::FIRST).pages[..blocks].to_vec(), sequence.last_step);
            let job = self.begin_copy(pages, last_step, Some(slot));
            let completion = tier.store_private(&units, &job);
            self.set_aside(slot, units, job.id);
            self.counters.suspensions += 1;
            match completion {
                Ok(completion) => begun.push(BegunCopy { slot, job, completion }),
                Err(_) => drop(self.end_copies(&[(job.id.0, CopyEnd::Refused)])?),
            }
        }
        Ok(begun)
    }

    /// How many blocks of the request have KV to copy.
    fn suspendable(&self, slot: SlotId) -> Result<usize, LedgerError> {
        let sequence = self.sequence(slot)?;
        sequence.check_present(slot)?;
        if sequence.dummy {
            return Err(LedgerError::Padding(slot));
        }
        if sequence.load.is_some() {
            return Err(LedgerError::Loading { slot });
        }
        if !sequence.steps_out.is_empty() {
            return Err(LedgerError::StepOut { slot });
        }
        if sequence.processed == 0 {
            return Err(LedgerError::NothingToSuspend { slot });
        }
        let blocks = sequence.processed.div_ceil(self.config.page_size) as usize;
        let pages = &sequence.row(GroupId::FIRST).pages[..blocks];
        if self.page_copies.iter().any(|copy| pages.contains(&copy.destination)) {
            return Err(LedgerError::PageCopyPlanned { slot });
        }
        Ok(blocks)
    }

    /// The request's pages are given back; its KV is on the way to `units`.
    fn set_aside(&mut self, slot: SlotId, units: Vec<UnitId>, copy: CopyId) {
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        let (processed, pages) = (sequence.processed, sequence.row(GroupId::FIRST).pages.len() as u32);
        sequence.give_back(0, 0, &self.config, &mut self.pools, &mut self.tree, self.epoch);
        sequence.processed = 0;
        sequence.position = 0;
        sequence.blocked = false;
        sequence.exposed = false;
        let stage = Stage::Leaving(copy);
        sequence.suspension = Some(Box::new(Suspension { units, processed, pages, stage }));
    }

    /// Takes as many pages for every suspended request in `batch` as it had, and copies its KV into them. The
    /// request waits for the copy; then it stands where it stood, and its blocks are published.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; a request that is not suspended, or whose pages are still
    /// copied out; a tier that takes no copies; [`LedgerError::InsufficientBlocks`] naming the first request
    /// that did not fit. Nothing is changed then.
    pub fn resume(
        &mut self,
        tier: &mut dyn PrivateTier,
        batch: &[SlotId],
    ) -> Result<Vec<BegunCopy>, LedgerError> {
        self.check_batch(batch)?;
        self.check_awake()?;
        let available = self.pools.available(GroupId::FIRST);
        let mut free = available;
        for &slot in batch {
            let sequence = self.sequence(slot)?;
            let Some(suspension) = &sequence.suspension else {
                return Err(LedgerError::NotSuspended { slot });
            };
            if suspension.stage != Stage::Away {
                sequence.check_present(slot)?;
            }
            let Some(rest) = free.checked_sub(suspension.pages) else {
                let room = self.room(GroupId::FIRST, suspension.pages, free);
                return Err(LedgerError::InsufficientBlocks { slot, room });
            };
            free = rest;
        }
        tier.check_open().map_err(|why| LedgerError::NoTier(why.to_string()))?;
        self.events.seal();
        let mut begun = Vec::with_capacity(batch.len());
        for &slot in batch {
            let Some((units, job)) = self.bring_back(slot) else { continue };
            match tier.load_private(&units, &job) {
                Ok(completion) => begun.push(BegunCopy { slot, job, completion }),
                Err(_) => drop(self.end_copies(&[(job.id.0, CopyEnd::Refused)])?),
            }
        }
        Ok(begun)
    }

    /// Takes the pages of a suspended request, for which there is room.
    fn bring_back(&mut self, slot: SlotId) -> Option<(Vec<UnitId>, CopyJob)> {
        let Sequence { suspension, last_step, .. } = self.slots.get(slot)?;
        let (suspension, last_step) = (suspension.as_ref()?, *last_step);
        let units = suspension.units.clone();
        self.take(GroupId::FIRST, suspension.pages);
        let pages: Vec<PageId> = self.taken.iter().map(|taken| taken.page).collect();
        let job = self.begin_copy(pages[..units.len()].to_vec(), last_step, Some(slot));
        let suspension = self.slots.get_mut(slot)?.suspension.as_mut()?;
        suspension.stage = Stage::Returning(job.id, pages);
        Some((units, job))
    }

    /// A copy of a suspended request has ended. True when the request can be planned now.
    pub(crate) fn end_suspension(&mut self, slot: SlotId, copy: CopyId, end: CopyEnd) -> bool {
        let Some(sequence) = self.slots.get_mut(slot) else { return false };
        let Some(suspension) = sequence.suspension.as_mut().filter(|it| it.copy() == Some(copy)) else {
            return false;
        };
        if end != CopyEnd::Done {
            self.units_let_go.extend(drop_suspension(sequence, &mut self.pools[GroupId::FIRST]));
            sequence.drop_steps_out(Step(0)); // none is out, but tokens may be due
            start_over(sequence, &mut self.tree, self.epoch);
            self.counters.suspensions_lost += 1;
            return true;
        }
        let Stage::Returning(_, pages) = std::mem::replace(&mut suspension.stage, Stage::Away) else {
            return false;
        };
        let Some(suspension) = sequence.suspension.take() else { return false };
        let row = sequence.row_mut(GroupId::FIRST);
        row.pages = pages;
        row.version += 1;
        sequence.processed = suspension.processed;
        sequence.position = suspension.processed;
        self.units_let_go.extend(suspension.units);
        self.counters.resumptions += 1;
        self.publish_computed(slot); // the tiers were offered these blocks: no offload
        true
    }

    /// Tells `tier` of units that are used no more. To be called after every call that may give some back: any
    /// that ends copies, and `preempt` and `release`.
    pub fn free_units(&mut self, tier: &mut dyn PrivateTier) {
        if !self.units_let_go.is_empty() {
            tier.free_private(&std::mem::take(&mut self.units_let_go));
        }
    }

    /// Units that suspended requests hold, in the order of their numbers.
    pub fn units_held(&self) -> Vec<UnitId> {
        let suspended = self.slots.iter().filter_map(|(_, sequence)| sequence.suspension.as_deref());
        let mut units: Vec<UnitId> = suspended.flat_map(|suspension| &suspension.units).copied().collect();
        units.extend(&self.units_let_go);
        units.sort_unstable();
        units
    }

    /// Requests suspended.
    pub fn suspended(&self) -> usize {
        self.slots.iter().filter(|(_, sequence)| sequence.suspension.is_some()).count()
    }
}

/// The request is suspended no more and has lost its KV: pages that it would be copied to are in flight until the
/// copy ends. Gives its units.
pub(crate) fn drop_suspension(sequence: &mut Sequence, pool: &mut Pool) -> Vec<UnitId> {
    let Some(suspension) = sequence.suspension.take() else { return Vec::new() };
    for &page in suspension.pages().iter().rev() {
        pool.release(page, sequence.last_step);
    }
    suspension.units
}
