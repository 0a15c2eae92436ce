//! Hits: which stored blocks a request goes on from, and how they come into its rows.

use crate::blocks::{BlockReader, Prefix};
use crate::config::LedgerConfig;
use crate::copies::let_go;
use crate::groups::joint_hit;
use crate::ledger::{Ledger, parent_after};
use crate::misses::MissReason;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId};
use radix_tree::{Hits, NodeId, PrefixTree};
use smallvec::SmallVec;
use std::ops::Range;

/// Hits of a batch, one request's behind the other's.
#[derive(Default)]
pub(crate) struct Found {
    /// The blocks' nodes, and their pages in the first group as far as a request needs them.
    first: Hits,
    /// The same pages of the other groups.
    others: Vec<Vec<PageId>>,
    /// Where the pages of each hit are: a range for each group.
    ranges: Vec<Range<usize>>,
    /// Hashes that belonged to another block.
    pub(crate) collisions: u64,
}

/// A request's part of [`Found`].
#[derive(Clone)]
pub(crate) struct Hit {
    /// The blocks; they follow the request's own published blocks.
    pub(crate) nodes: Range<usize>,
    /// The first of its ranges in [`Found::ranges`].
    ranges: usize,
}

impl Hit {
    /// No blocks.
    pub(crate) const NONE: Hit = Hit { nodes: 0..0, ranges: 0 };

    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Blocks that were found.
    pub(crate) fn blocks(&self) -> usize {
        self.nodes.len()
    }
}

impl Found {
    /// Before a batch.
    pub(crate) fn clear(&mut self, config: &LedgerConfig) {
        self.first.truncate(0);
        self.others.resize(config.groups.len() - 1, Vec::new());
        self.others.iter_mut().for_each(Vec::clear);
        self.ranges.clear();
        self.collisions = 0;
    }

    pub(crate) fn nodes(&self, hit: &Hit) -> &[NodeId] {
        &self.first.nodes[hit.nodes.clone()]
    }

    /// The pages that a hit needs in a group, in the order of their blocks.
    pub(crate) fn pages(&self, hit: &Hit, group: GroupId) -> &[PageId] {
        if hit.is_empty() { &[] } else { &self.all(group)[self.ranges[hit.ranges + group.index()].clone()] }
    }

    /// Pages of a group that the batch hits; one may be there more than once.
    pub(crate) fn all(&self, group: GroupId) -> &[PageId] {
        match group.index().checked_sub(1) {
            None => &self.first.pages,
            Some(other) => &self.others[other],
        }
    }

    /// Adds pages of a group that are no hit, but are taken with the batch.
    pub(crate) fn add(&mut self, group: GroupId, pages: impl Iterator<Item = PageId>) {
        self.all_mut(group).extend(pages);
    }

    fn all_mut(&mut self, group: GroupId) -> &mut Vec<PageId> {
        match group.index().checked_sub(1) {
            None => &mut self.first.pages,
            Some(other) => &mut self.others[other],
        }
    }

    /// Looks for the request's blocks up to block `limit`. Gives the hit, the length of the prefix that is
    /// there, in blocks, and, as far as the look-up sees it, why there is no more. A hit that ends at or
    /// before the request's position saves nothing, and is none. The first blocks behind those that the
    /// request has published are `known`.
    pub(crate) fn look_up(
        &mut self,
        config: &LedgerConfig,
        tree: &PrefixTree,
        sequence: &Sequence,
        known: &[NodeId],
        limit: usize,
        reader: &mut BlockReader,
    ) -> (Hit, usize, Option<MissReason>) {
        let page_size = config.page_size;
        let published = sequence.nodes.len();
        let prefix = Prefix {
            log: &sequence.tokens,
            keys: sequence.chain.keys(),
            extras: &sequence.extras,
            page_size: page_size as usize,
        };
        let first = self.first.nodes.len();
        let is_plain = config.is_plain();
        if is_plain {
            let with_page = |&node| tree.page(node, GroupId::FIRST).map(|page| (node, page));
            known.iter().map_while(with_page).for_each(|(node, page)| self.first.push(node, page));
        } else {
            self.first.nodes.extend_from_slice(known);
        }
        let known = &self.first.nodes[first..];
        let parent = parent_after(sequence, if known.is_empty() { &sequence.nodes } else { known });
        let rest = published + known.len()..limit;
        if is_plain {
            let collided = prefix.walk(tree, parent, rest, reader, &mut self.first);
            let there = published + self.first.nodes.len() - first;
            if there as u32 * page_size <= sequence.position {
                self.first.truncate(first);
            }
            let nodes = first..self.first.nodes.len();
            let ranges = self.ranges.len();
            self.ranges.push(nodes.clone());
            return (Hit { nodes, ranges }, there, collided.then_some(MissReason::Collision));
        }
        let collided = prefix.walk_nodes(tree, parent, rest, reader, &mut self.first.nodes);
        let nodes = &self.first.nodes[first..];
        let kinds: SmallVec<[_; 4]> = config.groups.iter().map(|group| group.kind).collect();
        let most = (published + nodes.len()) as u32;
        let present = |group, block: u32| match (block as usize).checked_sub(published) {
            None => sequence.row(group).page(block as usize).is_some(),
            Some(found) => tree.page(nodes[found], group).is_some(),
        };
        let hit = joint_hit(&kinds, page_size, sequence.position / page_size, most, present);
        let there = hit.map_or(published.max((sequence.position / page_size) as usize), |end| end as usize);
        let why = if there < most as usize {
            Some(MissReason::of_known(config, there, |group, block| present(group, block as u32)))
        } else {
            collided.then_some(MissReason::Collision)
        };
        let Some(end) = hit.map(|end| end as usize) else {
            self.first.nodes.truncate(first);
            return (Hit::NONE, there, why);
        };
        self.first.nodes.truncate(first + end.saturating_sub(published));
        let nodes = first..self.first.nodes.len();
        let hit = Hit { nodes: nodes.clone(), ranges: self.ranges.len() };
        for group in config.group_ids() {
            let needed = config.kind(group).needed(end as u32 * page_size, page_size);
            let begin = self.all(group).len();
            for (block, index) in (published..end).zip(nodes.clone()) {
                if needed.has(block as u32) {
                    let page = tree.page(self.first.nodes[index], group);
                    self.all_mut(group).extend(page);
                }
            }
            let end = self.all(group).len();
            self.ranges.push(begin..end);
        }
        (hit, end, why)
    }
}

/// How long a prefix, in blocks, is there for a new request: at most `most`. `nodes` are its blocks in the tree.
pub(crate) fn stored_prefix(
    config: &LedgerConfig,
    tree: &PrefixTree,
    nodes: &[NodeId],
    most: usize,
) -> usize {
    let kinds: SmallVec<[_; 4]> = config.groups.iter().map(|group| group.kind).collect();
    let most = most.min(nodes.len()) as u32;
    let present = |group, block: u32| tree.page(nodes[block as usize], group).is_some();
    joint_hit(&kinds, config.page_size, 0, most, present).unwrap_or(0) as usize
}

impl Sequence {
    /// The pages of a group that the request lets go of when it `moves` to token `start`, where what it found ends.
    pub(crate) fn let_go_for(
        &self,
        moves: bool,
        start: u32,
        group: GroupId,
        config: &LedgerConfig,
    ) -> impl Iterator<Item = PageId> {
        let row = self.row(group);
        let first = self.nodes.len();
        let lasts = config.kind(group).lasts();
        let end = if !moves || lasts { 0 } else { (start / config.page_size) as usize };
        let needed = config.kind(group).needed(start, config.page_size);
        let slid = row.from.max(needed.sinks) as usize..(needed.from as usize).min(first).min(end);
        let replaced = first..end.min(row.pages.len()).max(first);
        slid.chain(replaced).filter_map(|block| row.page(block))
    }
}

impl Ledger {
    /// Puts a hit that ends before token `start` into the request's rows. Its pages are referenced already.
    pub(crate) fn take_hit(&mut self, slot: SlotId, start: u32, hit: &Hit, found: &Found) {
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        let (first, end) = (sequence.nodes.len(), (start / self.config.page_size) as usize);
        for group in self.config.group_ids().filter(|&group| !self.config.kind(group).lasts()) {
            let pages = found.pages(hit, group);
            let needed = self.config.kind(group).needed(start, self.config.page_size);
            let last_step = sequence.last_step;
            let row = sequence.row_mut(group);
            let replaced = first..end.min(row.pages.len()).max(first);
            for block in replaced.clone().rev() {
                if let Some(page) = row.page(block) {
                    let_go(&mut self.pools, &self.tree, &self.config, group, page, last_step);
                }
            }
            if !replaced.is_empty() {
                row.version += 1;
            }
            if pages.len() == end - first {
                let (over, behind) = pages.split_at(replaced.len());
                row.pages[replaced].copy_from_slice(over);
                row.pages.extend_from_slice(behind);
                continue;
            }
            row.pages.resize(row.pages.len().max(end), PageId::NULL);
            let mut pages = pages.iter().copied();
            for block in first..end {
                let page = if needed.has(block as u32) { pages.next() } else { None };
                row.pages[block] = page.unwrap_or(PageId::NULL);
            }
        }
        sequence.nodes.extend_from_slice(found.nodes(hit));
        if !self.config.is_plain() {
            sequence.slide(start, &self.config, &mut self.pools);
            sequence.hold_end(&self.config, &mut self.tree);
        }
        let gained = start - sequence.position;
        sequence.cached += gained;
        if sequence.admitted {
            self.counters.late_reused_tokens += u64::from(gained);
        } else {
            self.counters.reused_tokens += u64::from(gained);
            self.counters.reused_blocks += hit.blocks() as u64;
        }
        self.mark_reused(slot, first..first);
        self.offload_hit(slot, first..end);
        self.use_blocks(slot, first);
    }
}
