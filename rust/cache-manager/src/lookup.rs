//! What there is of a prompt that is still to be computed: on the device, in a part of a block, and in other tiers.

use crate::config::LedgerConfig;
use crate::error::LedgerError;
use crate::hits::Hit;
use crate::ledger::Ledger;
use crate::loads::LoadPlan;
use crate::misses::{Miss, MissReason};
use crate::partial::Partial;
use crate::planning::Scratch;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::tiers::Loads;

/// What there is of a prompt that is still to be computed.
pub(crate) struct Lookup {
    pub(crate) hit: Hit,
    /// The block behind the hit that the request goes on from a part of.
    pub(crate) partial: Option<Partial>,
    /// At first admission: why the first block after the hits was missed, and how many were, up to the
    /// block of the last token.
    pub(crate) missed: Option<(MissReason, u32)>,
    /// What has to be loaded before a forward can be planned.
    pub(crate) load: Option<LoadPlan>,
}

impl Lookup {
    /// Blocks of the request before the end of the hit; 0 without one.
    pub(crate) fn blocks_with_hit(&self, sequence: &Sequence) -> u32 {
        if self.hit.is_empty() { 0 } else { (sequence.nodes.len() + self.hit.blocks()) as u32 }
    }
}

impl Sequence {
    /// Whether the request looks for stored blocks.
    #[inline]
    pub(crate) fn reads(&self, config: &LedgerConfig, epoch: u32) -> bool {
        config.prefix_caching && !self.no_read && !self.dummy && self.epoch == epoch
    }

    /// Hashes what is known; gives how many blocks may be reused at most, since the last token is computed.
    #[inline]
    pub(crate) fn hash_reusable(&mut self, page_size: u32) -> usize {
        self.hash_known(page_size as usize);
        ((self.known() - 1) / page_size) as usize
    }
}

/// One past the last block that a request with `held` blocks may find, of those before `limit`.
#[inline]
fn most_found(held: usize, limit: usize, halvings: u32) -> usize {
    held + limit.saturating_sub(held).checked_shr(halvings).unwrap_or(0)
}

impl Ledger {
    /// What there is of a request's prompt, on the device and in other tiers.
    pub(crate) fn look_for(
        &mut self,
        index: usize,
        slot: SlotId,
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
    ) -> Result<Box<Lookup>, LedgerError> {
        let page_size = self.config.page_size;
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        let mut lookup = Box::new(Lookup { hit: Hit::NONE, partial: None, missed: None, load: None });
        if !sequence.reads(&self.config, self.epoch) {
            loads.none(index, slot)?;
            return Ok(lookup);
        }
        let limit = sequence.hash_reusable(page_size);
        let published = sequence.nodes.len();
        let (hit, on_device, why) = scratch.found.look_up(
            &self.config,
            &self.tree,
            sequence,
            &[],
            most_found(published, limit, scratch.halvings),
            &mut self.reader,
        );
        scratch.found.collisions += u64::from(why == Some(MissReason::Collision));
        if !sequence.admitted && on_device < limit {
            let miss = Miss::of(&self.tree, &self.evicted, sequence.chain.keys()[on_device], why);
            lookup.missed = Some((miss.reason, (limit - on_device) as u32));
        }
        lookup.hit = hit;
        let start = sequence.position.max(lookup.blocks_with_hit(sequence) * page_size);
        // What the request has computed and not stored is not loaded either.
        let first_load = (on_device as u32).max(start / page_size);
        let limit = limit as u32;
        lookup.load = if first_load < limit && sequence.may_load() {
            let blocks = (first_load, limit);
            loads.of(index, (slot, sequence), blocks, &self.config, &self.tree, &mut self.reader)?
        } else {
            loads.none(index, slot)?
        };
        if scratch.partly && lookup.load.is_none() {
            let nodes = scratch.found.nodes(&lookup.hit);
            let (tree, pools) = (&self.tree, &self.pools);
            lookup.partial =
                Partial::find(&self.config, tree, pools, sequence, nodes, start, &scratch.taken_over);
        }
        Ok(lookup)
    }
}
