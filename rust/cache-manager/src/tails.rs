//! Stored tails: blocks that a request left partly filled, which a later prompt goes on from.
//!
//! A tail is stored when its request gives its pages back. It is found by its tokens alone, has no hash, and nobody is
//! told of it: no event, no other tier. Its pages wait with the cached ones to be handed out, and it lasts as long as
//! all of them do. A block or a longer tail that begins with its tokens takes its place.

use crate::config::LedgerConfig;
use crate::ledger::{Ledger, parent_after};
use crate::slots::SlotId;
use block_pool::{GroupId, NodeLink, PageId, Pools};
use radix_tree::{NodeId, PrefixTree};
use smallvec::SmallVec;

impl Ledger {
    /// Stores the block that the request has computed a part of, if nothing that begins with its tokens is stored.
    /// Gives its page in the first group of blocks. The request gives the page back next.
    pub(crate) fn store_tail(&mut self, slot: SlotId) -> Option<PageId> {
        let page_size = self.config.page_size as usize;
        let sequence = self.slots.get(slot)?;
        let computed = sequence.processed.min(sequence.known()) as usize;
        let block = computed / page_size;
        let start = block * page_size;
        if start == computed || sequence.nodes.len() != block || sequence.over {
            return None;
        }
        let stores = self.config.store_partial_tails && self.config.reuses_partly();
        if !stores || !self.publishes(sequence) || sequence.extras.touches(start, computed) {
            return None;
        }
        let own = |group: GroupId| {
            let pool = &self.pools[group];
            if !self.config.kind(group).has_blocks() {
                return Some(PageId::NULL);
            }
            sequence.row(group).page(block).filter(|&page| pool.refs(page) == 1 && pool.node(page).is_none())
        };
        let pages: SmallVec<[PageId; 1]> = self.config.group_ids().map(own).collect::<Option<_>>()?;
        let parent = parent_after(sequence, &sequence.nodes);
        let tokens = &sequence.tokens[start..computed];
        let shorter = self.tree.contained_tail(parent, tokens, &[]);
        let node = self.tree.insert_tail(parent, tokens, &[], &pages)?;
        let retention = sequence.retention_of(block, page_size);
        for (group, &page) in self.config.group_ids().zip(&pages).filter(|&(_, &page)| page != PageId::NULL) {
            let pool = &mut self.pools[group];
            pool.publish(page, NodeLink(node.0), sequence.last_step);
            if let Some(retention) = retention {
                pool.retain(page, retention);
            }
            self.demotion.published(group, page, None);
        }
        self.counters.stored_tails += 1;
        if let Some(shorter) = shorter {
            self.drop_tail(shorter);
        }
        Some(pages[self.config.first_of_blocks().index()])
    }

    /// Forgets a tail; its pages stand for nothing from now on.
    pub(crate) fn drop_tail(&mut self, node: NodeId) {
        drop_tail(&mut self.tree, &mut self.pools, &self.config, node);
    }

    /// Whether nobody uses any page of the node's block.
    pub(crate) fn is_idle(&self, node: NodeId) -> bool {
        let page = |group| self.tree.page(node, group).map(|page| (group, page));
        self.config.group_ids().filter_map(page).all(|(group, page)| self.pools[group].is_evictable(page))
    }

    /// Partly filled blocks that are stored.
    pub fn tails(&self) -> usize {
        self.tree.tails()
    }
}

/// Whether every group of blocks has the node's.
pub(crate) fn is_whole(tree: &PrefixTree, config: &LedgerConfig, node: NodeId) -> bool {
    config.of_blocks().all(|group| tree.page(node, group).is_some())
}

/// The block of `node`, which every group has now, takes the place of the tail that it begins with.
pub(crate) fn replace_tail(tree: &mut PrefixTree, pools: &mut Pools, config: &LedgerConfig, node: NodeId) {
    if tree.tails() > 0
        && let Some(tail) = tree.contained_tail(tree.parent(node), tree.tokens(node), tree.extra_keys(node))
    {
        drop_tail(tree, pools, config, tail);
    }
}

fn drop_tail(tree: &mut PrefixTree, pools: &mut Pools, config: &LedgerConfig, node: NodeId) {
    // The page last by which a tail is found. A page that was taken from the pool in the same call
    // is its taker's to clear.
    for group in config.group_ids().rev() {
        if let Some(page) = tree.page(node, group)
            && pools[group].node(page) == Some(NodeLink(node.0))
        {
            pools[group].withdraw(page);
            tree.clear_page(node, group);
        }
    }
}
