//! Partial reuse: a request goes on from the tokens that a stored block begins with, where its prompt has not all of
//! the block's.
//!
//! The request writes behind these tokens, so that it must have the page to itself. It gets a copy of the block; or, if
//! the block is a tail with no other tokens and nobody uses it, the block's own page, and the tail is no more. Where
//! blocks are not copied, the page of any block is taken over that nobody uses and nothing follows.

use crate::config::LedgerConfig;
use crate::hits::Found;
use crate::ledger::{Ledger, parent_after};
use crate::page_copies::PageCopy;
use crate::planning::{NewPages, Plan, Scratch};
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::tails::is_whole;
use block_pool::{GroupId, PageId, Pools, Retention};
use radix_tree::{NodeId, PrefixTree};
use std::collections::HashMap;

/// A block that a request goes on from a part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Partial {
    pub(crate) node: NodeId,
    /// Tokens of that part, fewer than a page.
    pub(crate) run: u32,
    /// Whether the request takes over the block's pages; else it gets copies of them.
    pub(crate) takes_over: bool,
}

/// What a batch plans to take over: the number of the plan that does, by block.
pub(crate) type TakenOver = HashMap<NodeId, usize>;

impl Partial {
    /// The block that has the most of the request's tokens from `start` on, where no full block was found. `hit` is
    /// what was found before it; of `taken` blocks, others of the batch have the pages.
    pub(crate) fn find(
        config: &LedgerConfig,
        tree: &PrefixTree,
        pools: &Pools,
        sequence: &Sequence,
        hit: &[NodeId],
        start: u32,
        taken: &TakenOver,
    ) -> Option<Partial> {
        let page_size = config.page_size as usize;
        let (start, known) = (start as usize, sequence.known() as usize);
        let block = start / page_size;
        let next = block * page_size..(block + 1) * page_size;
        // What the request has of the block already, or computes of those before it, it keeps.
        let follows = start == next.start && block == sequence.nodes.len() + hit.len();
        if !follows || config.of_blocks().any(|group| sequence.row(group).pages.len() > block) {
            return None;
        }
        if sequence.extras.touches(next.start, next.end) {
            return None;
        }
        // The last token of the prompt must be computed.
        let tokens = &sequence.tokens[next.start..(next.end - 1).min(known - 1)];
        let is_idle = |node| {
            let page = |group| tree.page(node, group).is_some_and(|page| pools[group].is_evictable(page));
            config.of_blocks().all(page)
        };
        let usable = |node| {
            if config.copy_on_partial_reuse {
                is_whole(tree, config, node)
            } else {
                tree.is_leaf(node) && is_idle(node) && !taken.contains_key(&node)
            }
        };
        let nodes = if hit.is_empty() { &sequence.nodes } else { hit };
        let found = tree.longest_partial(parent_after(sequence, nodes), tokens, &[], usable)?;
        let takes_over = !config.copy_on_partial_reuse || {
            let whole = tree.is_tail(found.node) && tree.tokens(found.node).len() == found.run;
            // Whoever stores nothing would not give it back.
            whole && !sequence.no_store && is_idle(found.node)
        };
        Some(Partial { node: found.node, run: found.run as u32, takes_over })
    }

    /// The plan of number `index` has this part: of several that take over one block, the last does, and the others
    /// get copies. `pages` are those of all plans.
    pub(crate) fn enter(
        &self,
        index: usize,
        config: &LedgerConfig,
        plans: &mut [Plan],
        pages: &mut [NewPages],
        taken: &mut TakenOver,
    ) {
        if !self.takes_over {
            return;
        }
        let Some(before) = taken.insert(self.node, index) else { return };
        if let Some(partial) = plans[before].lookup.as_mut().and_then(|lookup| lookup.partial.as_mut()) {
            partial.takes_over = false;
        }
        let first = before * config.groups.len();
        config.of_blocks().for_each(|group| pages[first + group.index()].new += 1);
    }
}

impl Scratch {
    /// Whether what is planned to be taken over is a hit of another request in the batch.
    pub(crate) fn takes_over_a_hit(&self) -> bool {
        let hit = |found: &Found, plan: &Plan| {
            found.nodes(plan.hit()).iter().any(|node| self.taken_over.contains_key(node))
        };
        !self.taken_over.is_empty() && self.reusing().any(|plan| hit(&self.found, plan))
    }

    /// Whether a request goes on from a part of a block.
    pub(crate) fn has_partial(&self) -> bool {
        self.reusing().any(|plan| plan.partial().is_some())
    }

    /// The blocks that parts are of, one for each request that goes on from one.
    pub(crate) fn partial_nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.reusing().filter_map(|plan| plan.partial().map(|partial| partial.node))
    }
}

impl Ledger {
    /// The page of a group that the request goes on from a part of.
    pub(crate) fn partial_page(&self, plan: &Plan, group: GroupId) -> Option<PageId> {
        plan.partial().and_then(|partial| self.tree.page(partial.node, group))
    }

    /// Claims the pages of all parts, before any page is handed out. Gives those to copy, in the order of the plans
    /// and of their groups; the copies' destinations are not known yet.
    pub(crate) fn claim_partials(&mut self, scratch: &Scratch) -> std::vec::IntoIter<PageCopy> {
        let mut copies = Vec::new();
        for plan in scratch.reusing() {
            for group in self.config.group_ids() {
                if plan.partial().is_some_and(|partial| !partial.takes_over)
                    && let Some(source) = self.partial_page(plan, group)
                {
                    self.pools[group].pin(source);
                    copies.push(PageCopy { group, source, destination: PageId::NULL, before: self.step });
                }
            }
        }
        for plan in scratch.reusing() {
            let Some(Partial { node, run, takes_over }) = plan.partial() else { continue };
            if takes_over {
                self.take_over(plan.slot, node);
            }
            self.counters.partial_hits += 1;
            self.counters.partial_tokens += u64::from(run);
            let Some(sequence) = self.slots.get_mut(plan.slot) else { continue };
            sequence.cached += run;
            if sequence.admitted {
                self.counters.late_reused_tokens += u64::from(run);
            } else {
                self.counters.reused_tokens += u64::from(run);
            }
            sequence.slide(plan.start, &self.config, &mut self.pools);
        }
        copies.into_iter()
    }

    /// The pages of a block become the request's, and the block is no more.
    fn take_over(&mut self, slot: SlotId, node: NodeId) {
        let key = self.tree.key(node);
        let retention = Retention::from(self.config.priority);
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        // As for tails, the page last by which it is found.
        for group in self.config.group_ids().rev() {
            let Some(page) = self.tree.page(node, group) else { continue };
            let pool = &mut self.pools[group];
            pool.acquire(page);
            pool.retain(page, retention);
            pool.withdraw(page);
            self.tree.clear_page(node, group);
            sequence.row_mut(group).pages.push(page);
            sequence.exposed |= self.pools[group].pins(page) > 0; // others get copies of it
            if let Some(key) = key {
                self.events.removed(group, key);
            }
        }
    }

    /// The request got its page for a part in the place of `block`: a copy of the source, which is claimed.
    pub(crate) fn copy_part(&mut self, slot: SlotId, block: usize, copy: PageCopy) {
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        let destination = sequence.row(copy.group).pages[block];
        sequence.exposed = true;
        self.pools[copy.group].pin(destination);
        self.page_copies.push(PageCopy { destination, ..copy });
        self.counters.page_copies += 1;
    }
}
