//! The ledger and the tiers beyond the device, joined: who calls whom, in which order.

use crate::copies::{CopyEnd, CopyJob};
use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::loads::{BlockKey, LoadJob};
use crate::offloads::OffloadJob;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::PageId;
use completion::Completion;
use tiered_connector::connector::{Offered, TieredConnector};
use tiered_connector::job::{Offer, Origin, Outcome, TierKey};

/// What lies beyond the device, as the ledger asks it. No call waits, and none calls the ledger.
pub trait OuterTier {
    /// How many leading blocks can be loaded now. The keys are made as they are asked for.
    fn leading(&mut self, keys: &mut dyn Iterator<Item = BlockKey>) -> usize;

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

/// The host tier of one process.
impl OuterTier for &TieredConnector {
    fn leading(&mut self, keys: &mut dyn Iterator<Item = BlockKey>) -> usize {
        self.loadable(keys.map(|key| tier_key(&key))).unwrap_or(0)
    }

    fn load(&mut self, keys: &[BlockKey], job: &CopyJob) -> Option<Completion> {
        TieredConnector::load(self, &blocks(keys, job), job.after, Some(job.id.0)).ok()
    }

    fn offload(&mut self, job: &OffloadJob, origin: &dyn Fn(usize) -> Origin) -> bool {
        let OffloadJob { keys, priorities, copy, .. } = job;
        let blocks = keys.iter().zip(&copy.pages).zip(priorities);
        let offer = |((key, &page), &priority)| Offer { key: tier_key(key), page, priority };
        let offers: Vec<Offer> = blocks.map(offer).collect();
        let offered = self.offload_with(&offers, origin, copy.after, Some(copy.id.0));
        !matches!(offered, Ok(Offered::Dropped) | Err(_))
    }

    fn touch(&mut self, hashes: &[u64]) {
        TieredConnector::touch(self, hashes);
    }

    fn take_ended(&mut self) -> Vec<(u64, CopyEnd)> {
        let ended = self.take_finished().into_iter();
        let end = |outcome| if outcome == Outcome::Done { CopyEnd::Done } else { CopyEnd::Failed };
        ended.map(|(copy, outcome)| (copy, end(outcome))).collect()
    }
}

fn tier_key(key: &BlockKey) -> TierKey {
    TierKey { hash: key.identity.key(), guard: key.guard }
}

fn blocks(keys: &[BlockKey], job: &CopyJob) -> Vec<(TierKey, PageId)> {
    keys.iter().map(tier_key).zip(job.pages.iter().copied()).collect()
}

/// A tier that has nothing to load.
struct Silent<'a>(&'a mut dyn OuterTier);

impl OuterTier for Silent<'_> {
    fn leading(&mut self, _: &mut dyn Iterator<Item = BlockKey>) -> usize {
        0
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

/// How many blocks of each request of a batch are loaded.
pub(crate) enum Loads<'a> {
    /// So many, in the order of the batch; none beyond.
    Given(&'a [u32]),
    /// As many as there are.
    From(&'a mut dyn OuterTier),
}

impl Loads<'_> {
    /// How many blocks of request `index` are loaded from block `first` on, which may be `most`.
    pub(crate) fn of(&mut self, index: usize, sequence: &Sequence, first: u32, most: u32) -> u32 {
        match self {
            Loads::Given(loads) => loads.get(index).copied().unwrap_or(0),
            Loads::From(tier) => match &sequence.guards {
                Some(guards) if most > 0 => {
                    let blocks = (first as usize)..(first + most) as usize;
                    tier.leading(&mut blocks.map(|block| BlockKey::of(&sequence.chain, guards, block))) as u32
                }
                _ => 0,
            },
        }
    }
}

impl Ledger {
    /// [`Ledger::alloc`], where blocks that follow those on the device come from `tier` if it has them. Gives the
    /// load of each request that waits for one.
    ///
    /// # Errors
    /// As for [`Ledger::alloc`].
    pub fn alloc_from(
        &mut self,
        tier: &mut dyn OuterTier,
        batch: &[SlotId],
        num_tokens: &[u32],
    ) -> Result<Vec<BegunLoad>, LedgerError> {
        let jobs = match self.alloc_with(batch, num_tokens, Loads::From(tier)) {
            // A load takes pages beside those that its request may have already, which needs none of it to go on.
            Err(LedgerError::InsufficientBlocks { .. }) if batch.iter().any(|&slot| self.has_pages(slot)) => {
                self.counters.failed_allocs -= 1;
                self.alloc_with(batch, num_tokens, Loads::From(&mut Silent(tier)))?
            }
            planned => planned?,
        };
        let mut begun = Vec::with_capacity(jobs.len());
        for LoadJob { slot, first, copy } in jobs {
            if let Some(completion) = tier.load(&self.keys_of(slot, first, copy.pages.len())?, &copy) {
                begun.push(BegunLoad { slot, copy, completion });
                continue;
            }
            self.end_copies(&[(copy.id.0, CopyEnd::Refused)])?;
            let place = batch.iter().position(|&one| one == slot).unwrap_or_default();
            let bound = num_tokens.get(place).or(num_tokens.last());
            self.alloc(&[slot], bound.map_or(&[], std::slice::from_ref))?; // in the pages of the load
        }
        self.offload_to(tier)?;
        Ok(begun)
    }

    /// Begins to offload what was published since the last call.
    ///
    /// # Errors
    /// None in order.
    pub fn offload_to(&mut self, tier: &mut dyn OuterTier) -> Result<(), LedgerError> {
        for job in self.take_offloads() {
            let origin = |index: usize| self.origin(job.copy.pages[index], job.places[index]);
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

    fn keys_of(&self, slot: SlotId, first: usize, count: usize) -> Result<Vec<BlockKey>, LedgerError> {
        let sequence = self.sequence(slot)?;
        let Some(guards) = &sequence.guards else { return Ok(Vec::new()) };
        Ok((first..first + count).map(|block| BlockKey::of(&sequence.chain, guards, block)).collect())
    }
}
