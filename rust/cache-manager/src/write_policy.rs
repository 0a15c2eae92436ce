//! Which blocks are copied to other tiers, and when: as they are published, as they are hit, or before they are
//! evicted.
//!
//! Under [`WritePolicy::OnEvict`] nobody waits for a copy: the blocks that would go next are copied ahead of
//! their eviction, about as many as calls took pages lately. They stay where they are, in the order in which they
//! are evicted, and may be hit; while its copy is in flight a page is in use, and others are taken. A block that
//! had to go before its turn is lost.

use crate::copies::CopyPages;
use crate::ledger::Ledger;
use crate::loads::BlockKey;
use crate::offloads::{OffloadJob, Place};
use crate::row::Row;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Priority, Step};
use smallvec::{SmallVec, smallvec};
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

/// The block that each page of a group was last published with, as other tiers know it.
type Blocks = Vec<Option<(BlockKey, Place)>>;

/// What copying ahead of eviction remembers.
#[derive(Default, Debug)]
pub(crate) struct Demotion {
    /// Of each group.
    blocks: SmallVec<[Blocks; 1]>,
    /// About as many pages of each group as a call takes.
    pub(crate) ahead: SmallVec<[u32; 1]>,
}

impl Demotion {
    pub(crate) fn new(groups: usize) -> Demotion {
        Demotion { blocks: smallvec![Vec::new(); groups], ahead: smallvec![0; groups] }
    }

    /// `page` of a group now holds this block; none, what no other tier is to have.
    pub(crate) fn published(&mut self, group: GroupId, page: PageId, block: Option<(BlockKey, Place)>) {
        let blocks = &mut self.blocks[group.index()];
        if blocks.len() <= page.index() {
            if block.is_none() {
                return;
            }
            blocks.resize(page.index() + 1, None);
        }
        blocks[page.index()] = block;
    }

    fn block(&self, group: GroupId, page: PageId) -> Option<(BlockKey, Place)> {
        self.blocks[group.index()].get(page.index()).copied().flatten()
    }
}

impl Ledger {
    /// What is new in the cache, of a request that was claimed with guards.
    pub(crate) fn offload_published(&mut self, slot: SlotId) {
        let least = match self.config.write_policy {
            WritePolicy::WriteThrough => Priority::LOWEST,
            WritePolicy::Selective { min_priority: Some(least), .. } => least,
            WritePolicy::Selective { min_priority: None, .. } | WritePolicy::OnEvict { .. } => return,
        };
        let published = std::mem::take(&mut self.published);
        self.offload_blocks(slot, |group, ledger, row| {
            let pool = &ledger.pools[group];
            let held = published[group.index()].iter().filter_map(|&block| Some((block, row.page(block)?)));
            held.filter(|&(_, page)| pool.priority(page) >= least).collect()
        });
        self.published = published;
    }

    /// What is new in the cache may have to be named when nobody knows its tokens any more.
    pub(crate) fn remember_published(&mut self, slot: SlotId) {
        let WritePolicy::OnEvict { .. } = self.config.write_policy else { return };
        let Some(sequence) = self.slots.get(slot) else { return };
        for group in self.config.group_ids() {
            for &block in &self.published[group.index()] {
                let Some(page) = sequence.row(group).page(block) else { continue };
                let key = sequence.guards.as_ref().map(|guards| BlockKey::of(&sequence.chain, guards, block));
                let published = key.map(|key| (key, sequence.place(block)));
                self.demotion.published(group, page, published);
            }
        }
    }

    /// Blocks of the request were hit.
    pub(crate) fn offload_hit(&mut self, slot: SlotId, blocks: Range<usize>) {
        let WritePolicy::Selective { min_hits, .. } = self.config.write_policy else { return };
        if self.slots.get(slot).is_none_or(|sequence| sequence.guards.is_none()) {
            return;
        }
        let mut due: SmallVec<[Vec<(usize, PageId)>; 1]> = SmallVec::new();
        for group in self.config.group_ids() {
            let Some(sequence) = self.slots.get(slot) else { return };
            let (row, pool) = (sequence.row(group), &mut self.pools[group]);
            let found = if self.config.kind(group).lasts() { 0..0 } else { blocks.clone() };
            let held = found.filter_map(|block| row.page(block).map(|page| (block, page)));
            due.push(held.filter(|&(_, page)| pool.count_hit(page) == min_hits).collect());
        }
        self.offload_blocks(slot, |group, _, _| std::mem::take(&mut due[group.index()]));
    }

    /// A call took pages, so many of each group: those that go next are copied, so that they may.
    pub(crate) fn demote_ahead(&mut self, taken: &[u32]) {
        let WritePolicy::OnEvict { min_priority } = self.config.write_policy else { return };
        for (group, &taken) in self.config.group_ids().zip(taken).filter(|&(_, &taken)| taken > 0) {
            let ahead = &mut self.demotion.ahead[group.index()];
            *ahead = taken.max(*ahead - *ahead / FORGOTTEN);
            let ahead = *ahead;
            let pool = &mut self.pools[group];
            if pool.pristine() >= ahead {
                continue;
            }
            let most = (pool.evictable() / SPARED).saturating_sub(self.copies.demoted(group));
            let mut pages = pool.victims(ahead.min(most) as usize);
            pages.retain(|&page| {
                self.demotion.block(group, page).is_some()
                    && pool.priority(page) >= min_priority
                    && !pool.set_offered(page, true)
            });
            if pages.is_empty() {
                continue;
            }
            pages.reverse(); // what goes last here goes last there: a head after its tail
            let blocks = pages.iter().filter_map(|&page| self.demotion.block(group, page));
            let (keys, places) = blocks.unzip();
            let priorities = pages.iter().map(|&page| self.pools[group].priority(page)).collect();
            let pages = CopyPages::of(group, self.config.groups.len(), pages, 0);
            let copy = self.begin_copy(pages, Step(0), None);
            self.copies.is_demotion(copy.id);
            self.offloads.push(OffloadJob { keys, places, priorities, copy });
        }
    }

    /// Begins to copy blocks that the request holds: those that `blocks` gives for each group and the group's row.
    fn offload_blocks(
        &mut self,
        slot: SlotId,
        mut blocks: impl FnMut(GroupId, &Ledger, &Row) -> Vec<(usize, PageId)>,
    ) {
        let Some(sequence) = self.slots.get(slot) else { return };
        let Some(guards) = &sequence.guards else { return };
        let (mut pages, mut keys) = (CopyPages::default(), Vec::new());
        let (mut places, mut priorities) = (Vec::new(), Vec::new());
        for group in self.config.group_ids() {
            let blocks = blocks(group, self, sequence.row(group));
            keys.extend(blocks.iter().map(|&(block, _)| BlockKey::of(&sequence.chain, guards, block)));
            places.extend(blocks.iter().map(|&(block, _)| sequence.place(block)));
            priorities.extend(blocks.iter().map(|&(_, page)| self.pools[group].priority(page)));
            pages.add_group(blocks, self.config.kind(group).needed(0, self.config.page_size).sinks);
        }
        if !pages.is_empty() {
            let copy = self.begin_copy(pages, sequence.last_step, None);
            self.offloads.push(OffloadJob { keys, places, priorities, copy });
        }
    }
}

impl Sequence {
    fn place(&self, block: usize) -> Place {
        Place { position: block as u32, namespace: self.namespace }
    }
}
