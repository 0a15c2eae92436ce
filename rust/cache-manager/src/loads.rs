//! Loads: blocks of a prompt that come from another tier instead of being computed.
//!
//! The caller asks what a request could use ([`Ledger::wanted`]), asks the tiers what they have, and gives
//! `alloc` a number of blocks to load. The request then waits: it holds the pages that the load fills and
//! those of the rest of its tokens and drafts, so that two requests that wait cannot starve each other, and
//! the forward that comes after the load fits however it ends. When the load has landed its blocks are
//! published; when it failed, nothing of it is left.

use crate::blocks::Prefix;
use crate::copies::{CopyEnd, CopyId, CopyJob, let_go};
use crate::error::LedgerError;
use crate::ledger::{Ledger, parent_after};
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_hash::{Chain, Guards, Identity};
use block_pool::{GroupId, PageId, Pool};
use radix_tree::Hits;

/// A load in flight, of blocks `first .. first + pages.len()`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Load {
    pub(crate) copy: CopyId,
    pub(crate) first: u32,
    /// The page that each block is loaded into.
    pub(crate) pages: Vec<PageId>,
    /// Pages for the rest of the request's tokens and drafts.
    pub(crate) rest: Vec<PageId>,
}

impl Load {
    /// Tokens that it brings to a request that stands at `position`.
    pub(crate) fn tokens(&self, position: u32, page_size: u32) -> u32 {
        (self.first + self.pages.len() as u32) * page_size - position
    }
}

/// A block as other tiers know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockKey {
    /// Its hash.
    pub identity: Identity,
    /// Its second identity, which must agree too.
    pub guard: [u8; 16],
}

impl BlockKey {
    /// The key of a block of `chain` with these `guards`.
    pub fn of(chain: &Chain, guards: &Guards, block: usize) -> BlockKey {
        BlockKey { identity: chain.identity(block), guard: guards.guard(chain, block) }
    }
}

/// The blocks of a prompt as other tiers know them.
pub struct Wanted {
    /// All blocks that may be reused, from the first on.
    pub keys: Vec<BlockKey>,
    /// How many of them the request has, or `alloc` would find on the device.
    pub on_device: usize,
}

/// A load that `alloc` began.
pub struct LoadJob {
    /// The request that waits for it.
    pub slot: SlotId,
    /// The first block that is loaded.
    pub first: usize,
    /// The copy into the pages of the blocks, in order.
    pub copy: CopyJob,
}

impl Sequence {
    /// Whether the request has a prompt to compute and neither computes nor waits.
    pub(crate) fn may_load(&self) -> bool {
        !self.load_failed
            && self.load.is_none()
            && self.steps_out.is_empty()
            && self.position < self.prompt_end
            && !self.dummy
    }

    /// Why the request is in no batch.
    pub(crate) fn not_planned(&self, slot: SlotId) -> LedgerError {
        let waits = if self.load.is_some() { Err(LedgerError::Loading { slot }) } else { Ok(()) };
        match waits.and_then(|()| self.check_present(slot)) {
            Ok(()) => LedgerError::NotPlanned { slot },
            Err(error) => error,
        }
    }
}

impl Ledger {
    /// What the request could use of other tiers. `None` when it may not ask: it reads no cache, has no
    /// prompt to compute, computes already, had a load that failed, or was claimed without guards.
    ///
    /// # Errors
    /// An unknown slot; a request that waits for a load.
    pub fn wanted(&mut self, slot: SlotId) -> Result<Option<Wanted>, LedgerError> {
        let page_size = self.config.page_size;
        let epoch = self.epoch;
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        if sequence.load.is_some() {
            return Err(LedgerError::Loading { slot });
        }
        sequence.check_present(slot)?;
        let reads = self.config.prefix_caching && !sequence.no_read && sequence.epoch == epoch;
        if !reads || !sequence.may_load() {
            return Ok(None);
        }
        sequence.hash_known(page_size as usize);
        let limit = ((sequence.known() - 1) / page_size) as usize;
        let published = sequence.nodes.len();
        let prefix = Prefix {
            log: &sequence.tokens,
            keys: sequence.chain.keys(),
            extras: &sequence.extras,
            page_size: page_size as usize,
        };
        let mut hits = Hits::default();
        let parent = parent_after(sequence, &sequence.nodes);
        prefix.walk(&self.tree, parent, published..limit, &mut self.reader, &mut hits);
        let on_device = (published + hits.len()).max((sequence.position / page_size) as usize);
        let Some(guards) = &sequence.guards else { return Ok(None) };
        let keys = (0..limit).map(|block| BlockKey::of(&sequence.chain, guards, block)).collect();
        Ok(Some(Wanted { keys, on_device }))
    }

    /// Takes the pages of a planned load and pins those that it fills.
    pub(crate) fn begin_load(&mut self, slot: SlotId, first: u32, blocks: u32, rest: u32) -> Option<LoadJob> {
        self.take(GroupId::FIRST, blocks + rest);
        let mut pages: Vec<PageId> = self.taken.iter().map(|taken| taken.page).collect();
        let rest = pages.split_off(blocks as usize);
        let last_step = self.slots.get(slot)?.last_step;
        let copy = self.begin_copy(pages.clone(), last_step, Some(slot));
        let page_size = self.config.page_size;
        let sequence = self.slots.get_mut(slot)?;
        let load = Load { copy: copy.id, first, pages, rest };
        sequence.cached += load.tokens(sequence.position, page_size);
        sequence.load = Some(load);
        Some(LoadJob { slot, first: first as usize, copy })
    }

    /// The load of `copy` has ended. False when the request does not wait for it any more.
    pub(crate) fn end_load(&mut self, slot: SlotId, copy: CopyId, end: CopyEnd) -> bool {
        let page_size = self.config.page_size;
        let Some(sequence) = self.slots.get_mut(slot) else { return false };
        let Some(load) = sequence.load.take_if(|load| load.copy == copy) else { return false };
        if end != CopyEnd::Done {
            sequence.load_failed |= end == CopyEnd::Failed;
            undo(sequence, &load, page_size, &mut self.pools[GroupId::FIRST]);
            if sequence.epoch != self.epoch && sequence.holds_nothing() {
                sequence.join_epoch(&mut self.tree, self.epoch);
            }
            return true;
        }
        let end = load.first as usize + load.pages.len();
        let last_step = sequence.last_step;
        let row = sequence.row_mut(GroupId::FIRST);
        let held = end.min(row.pages.len());
        for &page in row.pages[(load.first as usize).min(held)..held].iter().rev() {
            let_go(&mut self.pools, &self.tree, &self.config, GroupId::FIRST, page, last_step);
            row.version += 1;
        }
        let kept = row.pages.split_off(held);
        row.pages.truncate(load.first as usize);
        row.pages.extend(load.pages.iter().chain(&kept).chain(&load.rest));
        self.counters.loaded_blocks += load.pages.len() as u64;
        self.counters.loaded_tokens += u64::from(load.tokens(sequence.position, page_size));
        sequence.processed = end as u32 * page_size;
        sequence.position = sequence.processed;
        self.publish_computed(slot); // the tiers have these blocks: no offload
        self.mark_reused(slot, load.first as usize..end);
        true
    }
}

/// The request no longer waits: pages of the load are in flight until the copy ends, then free.
pub(crate) fn drop_load(sequence: &mut Sequence, page_size: u32, pool: &mut Pool) {
    if let Some(load) = sequence.load.take() {
        undo(sequence, &load, page_size, pool);
    }
}

fn undo(sequence: &mut Sequence, load: &Load, page_size: u32, pool: &mut Pool) {
    sequence.cached -= load.tokens(sequence.position, page_size);
    for &page in load.rest.iter().rev().chain(load.pages.iter().rev()) {
        pool.release(page, sequence.last_step);
    }
}
