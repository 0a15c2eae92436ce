//! Which blocks are copied to other tiers, and when: as they are published, as they are hit, or before they are
//! evicted.
//!
//! Under [`WritePolicy::OnEvict`] nobody waits for a copy: the blocks that would go next are copied ahead of
//! their eviction, about as many as calls took pages lately. They stay where they are, in the order in which they
//! are evicted, and may be hit; while its copy is in flight a page is in use, and others are taken. A block that
//! had to go before its turn is lost.

use crate::ledger::Ledger;
use crate::loads::BlockKey;
use crate::offloads::{OffloadJob, Place};
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Priority, Step};
use std::ops::Range;

/// When a block is copied to other tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritePolicy {
    /// As it is published.
    WriteThrough,
    /// As it is published if its priority is at least so high, else at its hit of this number.
    Selective {
        /// Hits, at least one.
        min_hits: u32,
        /// Priority; `None`: whatever it is, a block has to be hit.
        min_priority: Option<Priority>,
    },
    /// Before it is evicted, if its priority is at least so high.
    OnEvict {
        /// Priority.
        min_priority: Priority,
    },
}

/// One in so many evictable pages may be in a copy ahead of eviction.
const SPARED: u32 = 8;
/// What calls took lately weighs less from call to call by one part in so many.
const FORGOTTEN: u32 = 16;

/// What copying ahead of eviction remembers.
#[derive(Default, Debug)]
pub(crate) struct Demotion {
    /// The block that each page was last published with, as other tiers know it.
    blocks: Vec<Option<(BlockKey, Place)>>,
    /// About as many pages as a call takes.
    pub(crate) ahead: u32,
}

impl Demotion {
    /// `page` now holds this block; none, what no other tier is to have.
    pub(crate) fn published(&mut self, page: PageId, block: Option<(BlockKey, Place)>) {
        if self.blocks.len() <= page.index() {
            if block.is_none() {
                return;
            }
            self.blocks.resize(page.index() + 1, None);
        }
        self.blocks[page.index()] = block;
    }

    fn block(&self, page: PageId) -> Option<(BlockKey, Place)> {
        self.blocks.get(page.index()).copied().flatten()
    }
}

impl Ledger {
    /// What is new in the cache, of a request that was claimed with guards.
    pub(crate) fn offload_published(&mut self, slot: SlotId) {
        match self.config.write_policy {
            WritePolicy::WriteThrough => {
                let blocks = std::mem::take(&mut self.published);
                self.offload_blocks(slot, &blocks);
                self.published = blocks;
            }
            WritePolicy::Selective { min_priority: Some(least), .. } => {
                let Some(sequence) = self.slots.get(slot) else { return };
                let row = sequence.row(GroupId::FIRST);
                let kept =
                    |&block: &usize| row.page(block).is_some_and(|page| self.pool().priority(page) >= least);
                let blocks: Vec<usize> = self.published.iter().copied().filter(kept).collect();
                self.offload_blocks(slot, &blocks);
            }
            WritePolicy::Selective { min_priority: None, .. } | WritePolicy::OnEvict { .. } => {}
        }
    }

    /// What is new in the cache may have to be named when nobody knows its tokens any more.
    pub(crate) fn remember_published(&mut self, slot: SlotId) {
        let WritePolicy::OnEvict { .. } = self.config.write_policy else { return };
        let Some(sequence) = self.slots.get(slot) else { return };
        for &block in &self.published {
            let Some(page) = sequence.row(GroupId::FIRST).page(block) else { continue };
            let key = sequence.guards.as_ref().map(|guards| BlockKey::of(&sequence.chain, guards, block));
            let published = key.map(|key| (key, sequence.place(block)));
            self.demotion.published(page, published);
        }
    }

    /// Blocks of the request were hit.
    pub(crate) fn offload_hit(&mut self, slot: SlotId, blocks: Range<usize>) {
        let WritePolicy::Selective { min_hits, .. } = self.config.write_policy else { return };
        let Some(sequence) = self.slots.get(slot).filter(|sequence| sequence.guards.is_some()) else {
            return;
        };
        let pool = &mut self.pools[GroupId::FIRST];
        let row = sequence.row(GroupId::FIRST);
        let due: Vec<usize> = blocks.filter(|&block| pool.count_hit(row.pages[block]) == min_hits).collect();
        self.offload_blocks(slot, &due);
    }

    /// A call took pages: those that go next are copied, so that they may.
    pub(crate) fn demote_ahead(&mut self, taken: u32) {
        let WritePolicy::OnEvict { min_priority } = self.config.write_policy else { return };
        let ahead = &mut self.demotion.ahead;
        *ahead = taken.max(*ahead - *ahead / FORGOTTEN);
        let pool = &mut self.pools[GroupId::FIRST];
        if pool.pristine() >= *ahead {
            return;
        }
        let most = (pool.evictable() / SPARED).saturating_sub(self.copies.demoted());
        let mut pages = pool.victims((*ahead).min(most) as usize);
        pages.retain(|&page| {
            self.demotion.block(page).is_some()
                && pool.priority(page) >= min_priority
                && !pool.set_offered(page, true)
        });
        if pages.is_empty() {
            return;
        }
        pages.reverse(); // what goes last here goes last there: a head after its tail
        let (keys, places) = pages.iter().filter_map(|&page| self.demotion.block(page)).unzip();
        let priorities = pages.iter().map(|&page| self.pool().priority(page)).collect();
        let copy = self.begin_copy(pages, Step(0), None);
        self.copies.is_demotion(copy.id);
        self.offloads.push(OffloadJob { keys, places, priorities, copy });
    }

    /// Begins to copy blocks that the request holds.
    fn offload_blocks(&mut self, slot: SlotId, blocks: &[usize]) {
        let Some(sequence) = self.slots.get(slot).filter(|_| !blocks.is_empty()) else { return };
        let Some(guards) = &sequence.guards else { return };
        let row = sequence.row(GroupId::FIRST);
        let pages: Vec<PageId> = blocks.iter().map(|&block| row.pages[block]).collect();
        let keys = blocks.iter().map(|&block| BlockKey::of(&sequence.chain, guards, block)).collect();
        let places = blocks.iter().map(|&block| sequence.place(block)).collect();
        let priorities = pages.iter().map(|&page| self.pool().priority(page)).collect();
        let copy = self.begin_copy(pages, sequence.last_step, None);
        self.offloads.push(OffloadJob { keys, places, priorities, copy });
    }
}

impl Sequence {
    fn place(&self, block: usize) -> Place {
        Place { position: block as u32, namespace: self.namespace }
    }
}
