//! The ledger and the tiers beyond the device, joined: who calls whom, in which order.

use crate::blocks::BlockReader;
use crate::config::LedgerConfig;
use crate::copies::{CopyEnd, CopyJob};
use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::loads::{BlockKey, LoadJob, LoadPlan, Presence};
use crate::offloads::OffloadJob;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::suspension::PrivateTier;
use block_pool::GroupId;
use completion::Completion;
use radix_tree::PrefixTree;
use tiered_connector::connector::{Closed, NoUnits, Offered};
use tiered_connector::groups::TieredGroups;
use tiered_connector::job::{Offer, Origin, Outcome, TierKey, UnitId};

/// What lies beyond the device, as the ledger asks it. No call waits, and none calls the ledger.
pub trait OuterTier {
    /// How many leading blocks of the only group, which needs all, can be loaded now. The keys are made as they are
    /// asked for.
    fn leading(&mut self, keys: &mut dyn Iterator<Item = BlockKey>) -> usize;

    /// Whether a block of a group can be loaded now.
    fn has(&mut self, group: GroupId, key: &BlockKey) -> bool;

    /// How many of these blocks of a group, which can all be loaded, one load can bring, from the first on.
    fn fitting(&mut self, group: GroupId, keys: &mut dyn ExactSizeIterator<Item = BlockKey>) -> usize {
        _ = group;
        keys.len()
    }

    /// Begins to load blocks into the pages of `job`, in their order, and gives a handle for whoever waits;
    /// [`OuterTier::take_ended`] tells of the end. `None` when nothing was moved and nothing will be.
    fn load(&mut self, keys: &[BlockKey], job: &CopyJob) -> Option<Completion>;

    /// Begins to copy pages out, as far as there is room; [`OuterTier::take_ended`] tells of the end.
    /// False when nothing was moved and nothing will be. `origin` tells where a block of the job comes from.
    fn offload(&mut self, job: &OffloadJob, origin: &dyn Fn(usize) -> Origin) -> bool;

    /// The blocks of these hashes, from the first of their prefix on, were used on the device.
    fn touch(&mut self, hashes: &[u64]);

    /// Copies that have ended since the last call, and how.
    fn take_ended(&mut self) -> Vec<(u64, CopyEnd)>;
}

/// A load that a request waits for.
pub struct BegunLoad {
    /// The request.
    pub slot: SlotId,
    /// The copy.
    pub copy: CopyJob,
    /// Its handle.
    pub completion: Completion,
}

/// The tiers of one process.
impl OuterTier for &TieredGroups {
    fn leading(&mut self, keys: &mut dyn Iterator<Item = BlockKey>) -> usize {
        self.group(GroupId::FIRST).loadable(keys.map(|key| tier_key(&key))).unwrap_or(0)
    }

    fn has(&mut self, group: GroupId, key: &BlockKey) -> bool {
        self.group(group).leading([tier_key(key)]).is_ok_and(|(here, below)| here + below > 0)
    }

    fn fitting(&mut self, group: GroupId, keys: &mut dyn ExactSizeIterator<Item = BlockKey>) -> usize {
        self.group(group).loadable(keys.map(|key| tier_key(&key))).unwrap_or(0)
    }

    fn load(&mut self, keys: &[BlockKey], job: &CopyJob) -> Option<Completion> {
        let blocks: Vec<_> = keys.iter().map(tier_key).zip(job.pages.iter().copied()).collect();
        TieredGroups::load(self, &blocks, job.parts(), job.after, Some(job.id.0)).ok()
    }

    fn offload(&mut self, job: &OffloadJob, origin: &dyn Fn(usize) -> Origin) -> bool {
        let OffloadJob { keys, priorities, copy, .. } = job;
        let blocks = keys.iter().zip(&copy.pages).zip(priorities);
        let offer = |((key, &page), &priority)| Offer { key: tier_key(key), page, priority };
        let offers: Vec<Offer> = blocks.map(offer).collect();
        let offered = TieredGroups::offload(self, &offers, copy.parts(), origin, copy.after, Some(copy.id.0));
        !matches!(offered, Ok(Offered::Dropped) | Err(_))
    }

    fn touch(&mut self, hashes: &[u64]) {
        TieredGroups::touch(self, hashes);
    }

    fn take_ended(&mut self) -> Vec<(u64, CopyEnd)> {
        let ended = self.take_finished().into_iter();
        let end = |outcome| if outcome == Outcome::Done { CopyEnd::Done } else { CopyEnd::Failed };
        ended.map(|(copy, outcome)| (copy, end(outcome))).collect()
    }
}

impl PrivateTier for &TieredGroups {
    fn check_open(&mut self) -> Result<(), Closed> {
        TieredGroups::check_open(self)
    }

    fn reserve(&mut self, group: GroupId, count: usize) -> Result<Vec<UnitId>, NoUnits> {
        TieredGroups::reserve(self, group, count)
    }

    fn store_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        TieredGroups::store_private(self, units, &job.pages, job.parts(), job.after, job.id.0)
    }

    fn load_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        TieredGroups::load_private(self, units, &job.pages, job.parts(), job.after, job.id.0)
    }

    fn free_private(&mut self, group: GroupId, units: &[UnitId]) {
        self.group(group).free_private(units);
    }
}

fn tier_key(key: &BlockKey) -> TierKey {
    TierKey { hash: key.identity.key(), guard: key.guard }
}

/// A tier that has nothing to load.
struct Silent<'a>(&'a mut dyn OuterTier);

impl OuterTier for Silent<'_> {
    fn leading(&mut self, _: &mut dyn Iterator<Item = BlockKey>) -> usize {
        0
    }

    fn has(&mut self, _: GroupId, _: &BlockKey) -> bool {
        false
    }

    fn load(&mut self, keys: &[BlockKey], job: &CopyJob) -> Option<Completion> {
        self.0.load(keys, job)
    }

    fn offload(&mut self, job: &OffloadJob, origin: &dyn Fn(usize) -> Origin) -> bool {
        self.0.offload(job, origin)
    }

    fn touch(&mut self, hashes: &[u64]) {
        self.0.touch(hashes);
    }

    fn take_ended(&mut self) -> Vec<(u64, CopyEnd)> {
        self.0.take_ended()
    }
}

/// What is loaded for each request of a batch.
pub(crate) enum Loads<'a> {
    /// So many blocks, in the order of the batch; none beyond.
    Given(&'a [u32]),
    /// What is needed of these blocks; `only`: requests that load nothing are not planned.
    Known { there: &'a [Presence], only: bool },
    /// As much as there is, and as fits; `only`: as there.
    From { tier: &'a mut dyn OuterTier, only: bool },
}

impl Loads<'_> {
    /// What is loaded for request `index`, which may be blocks `first` to `limit`.
    pub(crate) fn of(
        &mut self,
        index: usize,
        (slot, sequence): (SlotId, &Sequence),
        (first, limit): (u32, u32),
        config: &LedgerConfig,
        tree: &PrefixTree,
        reader: &mut BlockReader,
    ) -> Result<Option<LoadPlan>, LedgerError> {
        let key = |guards, block| BlockKey::of(&sequence.chain, guards, block as usize);
        let mut run = |limit, has: &mut dyn FnMut(GroupId, u32) -> bool| {
            Ledger::plan_load(config, tree, reader, sequence, (first, limit), has)
        };
        let blocks = match self {
            Loads::Given(_) => {
                let given = self.given(index);
                if given > limit - first {
                    return Err(LedgerError::BadLoad { slot, given, most: limit - first });
                }
                given
            }
            Loads::Known { there, .. } => {
                let Some(there) = there.get(index) else { return Ok(None) };
                return Ok(run(limit, &mut |group, block| there.has(group, block)));
            }
            Loads::From { tier, .. } => {
                let Some(guards) = &sequence.guards else { return Ok(None) };
                if !config.is_plain() {
                    let mut limit = limit;
                    while let Some(plan) =
                        run(limit, &mut |group, block| tier.has(group, &key(guards, block)))
                    {
                        // A shorter prefix that still needs the first block that does not fit needs those
                        // before it.
                        let surplus = config.group_ids().filter_map(|group| {
                            let blocks = plan.blocks_to_load(group);
                            let fit =
                                tier.fitting(group, &mut blocks.iter().map(|&block| key(guards, block)));
                            blocks.get(fit).copied()
                        });
                        match surplus.min() {
                            Some(block) => limit = block,
                            None => return Ok(Some(plan)),
                        }
                    }
                    return Ok(None);
                }
                tier.leading(&mut (first..limit).map(|block| key(guards, block))) as u32
            }
        };
        Ok((blocks > 0).then(|| LoadPlan::run(first, first + blocks)))
    }

    /// Request `index` may load nothing.
    ///
    /// # Errors
    /// It is to load something all the same.
    pub(crate) fn none(&self, index: usize, slot: SlotId) -> Result<Option<LoadPlan>, LedgerError> {
        match self.given(index) {
            0 => Ok(None),
            given => Err(LedgerError::BadLoad { slot, given, most: 0 }),
        }
    }

    /// Whether requests that load nothing are not planned.
    pub(crate) fn are_all(&self) -> bool {
        matches!(self, Loads::Known { only: true, .. } | Loads::From { only: true, .. })
    }

    fn given(&self, index: usize) -> u32 {
        if let Loads::Given(loads) = self { loads.get(index).copied().unwrap_or(0) } else { 0 }
    }
}

impl Ledger {
    /// [`Ledger::alloc`], where blocks that follow those on the device come from `tier` if it has them. Gives the
    /// load of each request that waits for one. With `only`, requests that load nothing are not planned.
    ///
    /// # Errors
    /// As for [`Ledger::alloc`].
    pub fn alloc_from(
        &mut self,
        tier: &mut dyn OuterTier,
        batch: &[SlotId],
        num_tokens: &[u32],
        only: bool,
    ) -> Result<Vec<BegunLoad>, LedgerError> {
        let jobs = match self.alloc_with(batch, num_tokens, Loads::From { tier, only }) {
            // A load takes pages beside those that its request may have already, which needs none of it to go on.
            Err(LedgerError::InsufficientBlocks { .. })
                if !only && batch.iter().any(|&slot| self.has_pages(slot)) =>
            {
                self.counters.failed_allocs -= 1;
                self.alloc_with(batch, num_tokens, Loads::From { tier: &mut Silent(tier), only })?
            }
            planned => planned?,
        };
        let mut begun = Vec::with_capacity(jobs.len());
        for job in jobs {
            let slot = job.slot;
            if self.begin_from(tier, job, &mut begun)? {
                continue;
            }
            // Loads that were begun before it took what it needs; a shorter one may fit.
            let place = batch.iter().position(|&one| one == slot).unwrap_or_default();
            let bound = num_tokens.get(place).or(num_tokens.last()).map_or(&[][..], std::slice::from_ref);
            let shorter = match self.alloc_with(&[slot], bound, Loads::From { tier, only: true }) {
                Err(LedgerError::InsufficientBlocks { .. }) => {
                    self.counters.failed_allocs -= 1;
                    Vec::new()
                }
                planned => planned?,
            };
            let mut loads = false;
            for job in shorter {
                loads |= self.begin_from(tier, job, &mut begun)?;
            }
            if !loads && !only {
                self.alloc(&[slot], bound)?; // in the pages of the first load
            }
        }
        self.offload_to(tier)?;
        Ok(begun)
    }

    /// Begins a planned load. False if it is refused: its request waits no more.
    fn begin_from(
        &mut self,
        tier: &mut dyn OuterTier,
        LoadJob { slot, blocks, copy }: LoadJob,
        begun: &mut Vec<BegunLoad>,
    ) -> Result<bool, LedgerError> {
        if let Some(completion) = tier.load(&self.keys_of(slot, &blocks)?, &copy) {
            begun.push(BegunLoad { slot, copy, completion });
            return Ok(true);
        }
        self.end_copies(&[(copy.id.0, CopyEnd::Refused)])?;
        Ok(false)
    }

    /// Begins to offload what was published since the last call.
    ///
    /// # Errors
    /// None in order.
    pub fn offload_to(&mut self, tier: &mut dyn OuterTier) -> Result<(), LedgerError> {
        for job in self.take_offloads() {
            let origin = |index: usize| {
                let part = job.copy.parts().find(|(_, part)| part.contains(&index));
                let group = part.map_or(GroupId::FIRST, |(group, _)| group);
                self.origin(group, job.copy.pages[index], job.places[index])
            };
            if !tier.offload(&job, &origin) {
                self.end_copies(&[(job.copy.id.0, CopyEnd::Refused)])?;
            }
        }
        Ok(())
    }

    /// The requests of `batch` are going to be released: what they stored and found counts as used just now, all of
    /// it, so that the head of a prefix does not leave the tier before what follows it.
    pub fn touch_all(&self, tier: &mut dyn OuterTier, batch: &[SlotId]) {
        for sequence in batch.iter().filter_map(|&slot| self.slots.get(slot)) {
            if sequence.guards.is_some() && sequence.epoch == self.epoch && !sequence.nodes.is_empty() {
                tier.touch(&sequence.chain.keys()[..sequence.nodes.len()]);
            }
        }
    }

    /// Ends the copies that have ended. Gives the requests that waited for them.
    ///
    /// # Errors
    /// A copy that is not in flight: the tier named one twice, or another's.
    pub fn settle_from(&mut self, tier: &mut dyn OuterTier) -> Result<Vec<SlotId>, LedgerError> {
        self.end_copies(&tier.take_ended())
    }

    fn has_pages(&self, slot: SlotId) -> bool {
        self.slots.get(slot).is_some_and(|sequence| !sequence.holds_no_page())
    }

    fn keys_of(&self, slot: SlotId, blocks: &[usize]) -> Result<Vec<BlockKey>, LedgerError> {
        let sequence = self.sequence(slot)?;
        let Some(guards) = &sequence.guards else { return Ok(Vec::new()) };
        Ok(blocks.iter().map(|&block| BlockKey::of(&sequence.chain, guards, block)).collect())
    }
}
