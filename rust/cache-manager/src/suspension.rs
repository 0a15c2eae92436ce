//! Suspension: a request lets go of its pages, and its KV waits in private units of a tier until it comes back
//! (`returning`).
//!
//! A suspended request is leaving while its pages are copied out, away, or returning while they are copied in. It
//! keeps its tokens and holds nothing on the device, so its blocks stay in the tree like those of a request
//! that was preempted. It comes back to where it stood, or further, on other pages, and its blocks are published
//! again. When a copy failed its KV is lost: it computes all its tokens again, as after [`Ledger::preempt`].

use crate::config::LedgerConfig;
use crate::copies::{CopyEnd, CopyId, CopyJob, CopyPages, let_go};
use crate::error::{LedgerError, NoRoom};
use crate::ledger::Ledger;
use crate::page_copies::PageCopy;
use crate::row::Row;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Pools};
use completion::Completion;
use radix_tree::PrefixTree;
use smallvec::SmallVec;
use std::fmt;
use tiered_connector::connector::{Closed, NoUnits};
use tiered_connector::job::UnitId;

/// A tier that keeps pages of one request apart from all blocks. No call waits, and none calls the ledger.
pub trait PrivateTier {
    /// Whether copies can be made.
    ///
    /// # Errors
    /// Why not.
    fn check_open(&mut self) -> Result<(), Closed>;

    /// Takes `count` units for a group's pages, or none.
    ///
    /// # Errors
    /// Too few are left.
    fn reserve(&mut self, group: GroupId, count: usize) -> Result<Vec<UnitId>, NoUnits>;

    /// Begins to copy the pages of `job` into units, one for each; [`take_ended`](crate::OuterTier::take_ended) tells
    /// of the end.
    ///
    /// # Errors
    /// Nothing is copied, and nothing will be told.
    fn store_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed>;

    /// Begins to copy units into the pages of `job`, likewise.
    ///
    /// # Errors
    /// As there.
    fn load_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed>;

    /// Gives units of a group back; copies may use them still.
    fn free_private(&mut self, group: GroupId, units: &[UnitId]);
}

/// Blocks of a request with their pages, of each group.
type Held = SmallVec<[Vec<(usize, PageId)>; 1]>;

/// What a suspended request has.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Suspension {
    /// Tokens with KV.
    pub(crate) processed: u32,
    /// What it had in each group.
    pub(crate) rows: SmallVec<[Shelved; 1]>,
    pub(crate) stage: Stage,
}

/// What a suspended request had in a group.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Shelved {
    /// The unit of each block with computed tokens that the group needs, of those that had a page.
    pub(crate) units: Vec<UnitId>,
    /// Its row then; on the way back, as it will be.
    pub(crate) shape: Shape,
}

/// Which blocks of a row have a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Shape {
    /// The first blocks that do, and the first of the rest that does.
    pub(crate) sinks: u32,
    pub(crate) from: u32,
    /// Blocks of the row.
    pub(crate) blocks: u32,
}

impl Shape {
    fn of(row: &Row) -> Shape {
        let sinks = row.pages.iter().take_while(|&&page| page != PageId::NULL).count() as u32;
        let gap = row.pages[sinks as usize..].iter().take_while(|&&page| page == PageId::NULL).count() as u32;
        Shape { sinks, from: sinks + gap, blocks: row.pages.len() as u32 }
    }

    /// How many do.
    pub(crate) fn pages(&self) -> u32 {
        self.blocks - (self.from - self.sinks)
    }

    /// Those that do.
    pub(crate) fn held(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.sinks as usize).chain(self.from as usize..self.blocks as usize)
    }

    /// Which of them a block is.
    pub(crate) fn index(&self, block: u32) -> Option<usize> {
        let behind = (self.from..self.blocks).contains(&block).then(|| self.sinks + block - self.from);
        (block < self.sinks).then_some(block).or(behind).map(|index| index as usize)
    }
}

/// Where its KV is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Stage {
    Leaving(CopyId),
    Away,
    /// On the way to the first of these pages of each group, which are the request's.
    Returning(CopyId, SmallVec<[Vec<PageId>; 1]>),
}

impl Suspension {
    /// The copy that the request waits for.
    pub(crate) fn copy(&self) -> Option<CopyId> {
        match self.stage {
            Stage::Leaving(copy) | Stage::Returning(copy, _) => Some(copy),
            Stage::Away => None,
        }
    }

    /// The pages that the request holds, with their groups.
    pub(crate) fn pages(&self) -> impl DoubleEndedIterator<Item = (GroupId, PageId)> {
        let rows: &[Vec<PageId>] = if let Stage::Returning(_, rows) = &self.stage { rows } else { &[] };
        let groups = (0..rows.len()).map(|group| GroupId(group as u8));
        groups.zip(rows).flat_map(|(group, pages)| pages.iter().map(move |&page| (group, page)))
    }

    /// Those of a group, with their blocks.
    pub(crate) fn blocks_returning(&self, group: GroupId) -> impl Iterator<Item = (usize, PageId)> {
        let pages = if let Stage::Returning(_, rows) = &self.stage { &rows[group.index()][..] } else { &[] };
        self.rows[group.index()].shape.held().zip(pages.iter().copied())
    }

    /// Its units, with their groups.
    pub(crate) fn units(&self) -> impl Iterator<Item = (GroupId, UnitId)> {
        let groups = (0..self.rows.len()).map(|group| GroupId(group as u8));
        groups.zip(&self.rows).flat_map(|(group, row)| row.units.iter().map(move |&unit| (group, unit)))
    }
}

impl fmt::Display for Suspension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Suspension { processed, rows, stage } = self;
        let units = |row: &Shelved| row.units.iter().map(|unit| unit.0).collect::<Vec<u32>>();
        let units: Vec<String> = rows.iter().map(|row| format!("{:?}", units(row))).collect();
        let pages: Vec<String> = rows.iter().map(|row| row.shape.pages().to_string()).collect();
        write!(
            f,
            "suspended with {processed} processed tokens, had {} pages, units {}, {stage:?}",
            pages.join(", "),
            units.join(", ")
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
        let pages = batch.iter().map(|&slot| self.suspendable(slot)).collect::<Result<Vec<_>, _>>()?;
        let mut units = Vec::with_capacity(self.config.groups.len());
        for group in self.config.group_ids() {
            let wanted = pages.iter().map(|pages: &Held| pages[group.index()].len()).sum();
            match tier.reserve(group, wanted) {
                Ok(reserved) => units.push(reserved.into_iter()),
                Err(refused) => {
                    for (group, reserved) in self.config.group_ids().zip(units) {
                        tier.free_private(group, reserved.as_slice());
                    }
                    let room = match refused {
                        NoUnits::Closed(why) => return Err(LedgerError::NoTier(why.to_string())),
                        NoUnits::TooFew(room) => room,
                    };
                    let wanted: Vec<u32> =
                        pages.iter().map(|pages| pages[group.index()].len() as u32).collect();
                    let (mut free, mut first) = (room.free, 0);
                    while first + 1 < batch.len() && wanted[first] <= free {
                        free -= wanted[first];
                        first += 1;
                    }
                    let room = NoRoom {
                        needed: wanted[first],
                        free,
                        evictable: room.evictable.min(free),
                        pinned: room.total - room.free,
                        total: room.total,
                    };
                    return Err(LedgerError::InsufficientUnits { slot: batch[first], room });
                }
            }
        }
        let mut begun = Vec::with_capacity(batch.len());
        for (&slot, held) in batch.iter().zip(pages) {
            let (mut copied, mut shelved) = (CopyPages::default(), SmallVec::new());
            let Some(sequence) = self.slots.get(slot) else { continue };
            let last_step = sequence.last_step;
            for ((group, held), units) in self.config.group_ids().zip(held).zip(&mut units) {
                let units = units.take(held.len()).collect();
                shelved.push(Shelved { units, shape: Shape::of(sequence.row(group)) });
                copied.add_group(held, self.config.kind(group).needed(0, self.config.page_size).sinks);
            }
            let job = self.begin_copy(copied, last_step, Some(slot));
            let units: Vec<UnitId> = shelved.iter().flat_map(|row: &Shelved| &row.units).copied().collect();
            let completion = tier.store_private(&units, &job);
            self.set_aside(slot, shelved, job.id);
            self.counters.suspensions += 1;
            match completion {
                Ok(completion) => begun.push(BegunCopy { slot, job, completion }),
                Err(_) => drop(self.end_copies(&[(job.id.0, CopyEnd::Refused)])?),
            }
        }
        Ok(begun)
    }

    /// The pages of the request that have KV to copy, with their blocks.
    fn suspendable(&self, slot: SlotId) -> Result<Held, LedgerError> {
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
        let held = |group| {
            let lasts = self.config.kind(group).lasts();
            sequence.row(group).held().filter(|&(block, _)| lasts || block < blocks).collect()
        };
        let held: Held = self.config.group_ids().map(held).collect();
        let awaited =
            |copy: &PageCopy| held[copy.group.index()].iter().any(|&(_, page)| page == copy.destination);
        if self.page_copies.iter().any(awaited) {
            return Err(LedgerError::PageCopyPlanned { slot });
        }
        Ok(held)
    }

    /// The request's pages are given back; its KV is on the way to `units`.
    fn set_aside(&mut self, slot: SlotId, rows: SmallVec<[Shelved; 1]>, copy: CopyId) {
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        let processed = sequence.processed;
        sequence.give_back(0, 0, &self.config, &mut self.pools, &mut self.tree, self.epoch);
        sequence.processed = 0;
        sequence.position = 0;
        sequence.blocked = false;
        sequence.exposed = false;
        let stage = Stage::Leaving(copy);
        sequence.suspension = Some(Box::new(Suspension { processed, rows, stage }));
    }

    /// Tells `tier` of units that are used no more. To be called after every call that may give some back: any
    /// that ends copies, and `preempt` and `release`.
    pub fn free_units(&mut self, tier: &mut dyn PrivateTier) {
        if self.units_let_go.is_empty() {
            return;
        }
        let let_go = std::mem::take(&mut self.units_let_go);
        for group in self.config.group_ids() {
            let units = let_go.iter().filter(|(of, _)| *of == group).map(|&(_, unit)| unit);
            tier.free_private(group, &units.collect::<Vec<_>>());
        }
    }

    /// Units that suspended requests hold, in the order of groups and their numbers.
    pub fn units_held(&self) -> Vec<(GroupId, UnitId)> {
        let suspended = self.slots.iter().filter_map(|(_, sequence)| sequence.suspension.as_deref());
        let mut units: Vec<_> = suspended.flat_map(Suspension::units).collect();
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
pub(crate) fn drop_suspension(
    sequence: &mut Sequence,
    config: &LedgerConfig,
    pools: &mut Pools,
    tree: &PrefixTree,
) -> Vec<(GroupId, UnitId)> {
    let Some(suspension) = sequence.suspension.take() else { return Vec::new() };
    for (group, page) in suspension.pages().rev() {
        let_go(pools, tree, config, group, page, sequence.last_step); // some are stored
    }
    suspension.units().collect()
}
