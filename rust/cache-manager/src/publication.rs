//! Publication: computed blocks of a request enter the prefix tree.

use crate::blocks::BlockReader;
use crate::config::{LedgerConfig, OnDuplicate};
use crate::counters::Counters;
use crate::events::{EventLog, Run};
use crate::ledger::{Ledger, parent_after};
use crate::misses::EvictedKeys;
use crate::retention::retain;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::tails::{is_whole, replace_tail};
use block_pool::{GroupId, NodeLink, Pools};
use memory::AHEAD;
use radix_tree::{Insertion, NodeId, PrefixTree};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

impl Ledger {
    /// Publishes the request's blocks that are full, known and computed, and not published yet; what is
    /// new in the cache is offloaded.
    #[inline]
    pub(crate) fn publish(&mut self, slot: SlotId) {
        if self.publish_computed(slot) {
            self.offload_published(slot);
        }
    }

    /// [`Ledger::publish`] without an offload. False when there was nothing to publish.
    #[inline]
    pub(crate) fn publish_computed(&mut self, slot: SlotId) -> bool {
        let page_size = self.config.page_size;
        let Some(sequence) = self.slots.get(slot) else { return false };
        let computed = sequence.processed.min(sequence.known()) / page_size;
        let publishes = computed as usize > sequence.nodes.len() && self.publishes(sequence);
        if publishes {
            self.publish_up_to(slot, computed as usize);
            self.remember_published(slot);
        }
        publishes
    }

    /// Whether what the request computes is stored.
    pub(crate) fn publishes(&self, sequence: &Sequence) -> bool {
        self.config.prefix_caching && sequence.stores() && sequence.epoch == self.epoch
    }

    fn publish_up_to(&mut self, slot: SlotId, computed: usize) {
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        sequence.hash_known(self.config.page_size as usize);
        self.published.iter_mut().for_each(Vec::clear);
        let first = sequence.nodes.len();
        let mut publication = Publication {
            config: &self.config,
            sequence,
            tree: &mut self.tree,
            pools: &mut self.pools,
            events: &mut self.events,
            evicted: &mut self.evicted,
            counters: &mut self.counters,
            reader: &mut self.reader,
            published: &mut self.published,
            runs: smallvec![Run::default(); self.config.groups.len()],
            reused: first,
        };
        publication.publish_up_to(computed);
        let reused = publication.reused;
        if !self.config.is_plain()
            && let Some(sequence) = self.slots.get_mut(slot)
        {
            sequence.hold_end(&self.config, &mut self.tree);
        }
        if reused > first {
            self.mark_reused(slot, first..reused);
        }
    }
}

/// What publishing one request's blocks reads and changes.
struct Publication<'a> {
    config: &'a LedgerConfig,
    sequence: &'a mut Sequence,
    tree: &'a mut PrefixTree,
    pools: &'a mut Pools,
    events: &'a mut EventLog,
    evicted: &'a mut EvictedKeys,
    counters: &'a mut Counters,
    reader: &'a mut BlockReader,
    /// Blocks that are new in the cache, of each group.
    published: &'a mut [Vec<usize>],
    /// The last that each group has got, not told yet.
    runs: SmallVec<[Run; 1]>,
    /// One past the last block that was stored before, now or by somebody else.
    reused: usize,
}

impl Publication<'_> {
    fn publish_up_to(&mut self, computed: usize) {
        while self.sequence.nodes.len() < computed && !self.sequence.blocked {
            self.publish_new(computed);
            if self.sequence.nodes.len() < computed {
                self.publish_one();
            }
        }
        for group in self.config.group_ids() {
            if let Some(last) = std::mem::take(&mut self.runs[group.index()]).into_some() {
                self.tell(group, &last);
            }
        }
    }

    /// Tells of blocks that a group has got.
    fn tell(&mut self, group: GroupId, run: &Run) {
        let (config, tree, sequence) = (self.config, &*self.tree, &*self.sequence);
        self.events.heed();
        let before = &sequence.nodes[..run.start()];
        let parent = if config.kind(group).is_recurrent() {
            let keys = before.iter().zip(sequence.chain.keys());
            let told = |(&node, &key)| tree.page(node, group).is_some() || self.events.knows(group, key);
            keys.rev().position(told).map(|back| before.len() - 1 - back)
        } else {
            before.len().checked_sub(1)
        };
        self.events.stored(group, || run.of(sequence, config.page_size as usize, parent));
    }

    /// Stores the next blocks, up to one that extra keys touch or whose hash is stored already.
    fn publish_new(&mut self, computed: usize) {
        if !self.config.is_plain() {
            return; // one by one: not every block has a page in every group
        }
        let page_size = self.config.page_size as usize;
        let first = self.sequence.nodes.len();
        let touched = self.sequence.extras.next_touched(first * page_size);
        let end = touched.map_or(computed, |token| computed.min(token / page_size));
        let parent = parent_after(self.sequence, &self.sequence.nodes);
        let Sequence { chain, tokens, rows, nodes, .. } = &mut *self.sequence;
        let keys = &chain.keys()[first..end];
        let pages = &rows[0].pages[first..end];
        self.tree.extend(parent, keys, &tokens[first * page_size..end * page_size], pages, nodes);
        let end = nodes.len();
        if end > first {
            replace_tail(self.tree, self.pools, self.config, nodes[first]); // what follows the others is as new
        }
        self.store(first..end, GroupId::FIRST);
    }

    /// Publishes the next block, whatever it is.
    fn publish_one(&mut self) {
        let page_size = self.config.page_size as usize;
        let sequence = &mut *self.sequence;
        let block = sequence.nodes.len();
        let parent = parent_after(sequence, &sequence.nodes);
        let (tokens, extra) = self.reader.read(&sequence.tokens, &sequence.extras, page_size, block);
        let node = match self.tree.insert(parent, sequence.chain.keys()[block], tokens, extra) {
            Insertion::Collision => {
                sequence.blocked = true;
                self.counters.collisions += 1;
                return;
            }
            Insertion::New(node) => node,
            Insertion::Existing(node) => {
                self.reused = block + 1;
                node
            }
        };
        sequence.nodes.push(node);
        let was_whole = is_whole(self.tree, self.config, node);
        for group in self.config.group_ids() {
            if self.sequence.offers(block, group, self.config) {
                self.publish_page(block, node, group);
            }
        }
        if !was_whole && is_whole(self.tree, self.config, node) {
            replace_tail(self.tree, self.pools, self.config, node);
        }
    }

    /// The request's page of a block in a group, if it has one, goes into the block's slot, or meets the one there.
    fn publish_page(&mut self, block: usize, node: NodeId, group: GroupId) {
        let sequence = &mut *self.sequence;
        let Some(own) = sequence.row(group).page(block) else { return };
        let Some(stored) = self.tree.page(node, group) else {
            self.tree.set_page(node, group, own);
            return self.store(block..block + 1, group);
        };
        let retention = sequence.retention_of(block, self.config.page_size as usize);
        retain(self.pools, self.tree, self.events, group, stored, retention);
        if stored == own {
            return; // published by a request that shares the page with this one
        }
        let pool = &self.pools[group];
        let opens = pool.would_open(stored); // and keep other groups out
        // A page would be taken, and none given back for it: forecasts count on neither.
        let takes = pool.is_evictable(stored) && !pool.is_unshared(own);
        if !opens && !takes && self.config.on_duplicate == OnDuplicate::Adopt {
            self.pools[group].acquire(stored);
            self.pools[group].release(own, sequence.last_step);
            sequence.row_mut(group).replace(block, stored);
            self.counters.adopted_blocks += 1;
            return;
        }
        if sequence.anchored.last() != Some(&(block as u32)) {
            self.tree.anchor(node);
            sequence.anchored.push(block as u32);
        }
        self.counters.private_blocks += 1;
    }

    /// The blocks' nodes have got their pages of a group: the pages stand for them.
    fn store(&mut self, blocks: Range<usize>, group: GroupId) {
        let page_size = self.config.page_size as usize;
        let sequence = &*self.sequence;
        let pages = &sequence.row(group).pages;
        let pool = &mut self.pools[group];
        for block in blocks.clone() {
            pool.publish(pages[block], NodeLink(sequence.nodes[block].0), sequence.last_step);
            if let Some(retention) = sequence.retention_of(block, page_size) {
                pool.retain(pages[block], retention);
            }
        }
        self.published[group.index()].extend(blocks.clone());
        if group == self.config.lead() {
            let keys = sequence.chain.keys();
            for block in blocks.clone() {
                if let Some(&later) = keys.get(block + AHEAD) {
                    self.evicted.prefetch(later);
                }
                self.evicted.forget(keys[block]);
            }
            self.counters.published_blocks += blocks.len() as u64;
        }
        if self.events.is_on() {
            for block in blocks {
                let priority = self.pools[group].priority(self.sequence.row(group).pages[block]);
                if let Some(before) = self.runs[group.index()].add(block, priority) {
                    self.tell(group, &before);
                }
            }
        }
    }
}
