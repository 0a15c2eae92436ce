//! What a prefix would reuse, without changing anything.

use crate::blocks::{BlockReader, Prefix};
use crate::groups::{Needed, joint_hit};
use crate::hits::stored_prefix;
use crate::ledger::Ledger;
use crate::loads::Presence;
use crate::misses::{Miss, MissReason};
use crate::sequence::Sequence;
use block_hash::{Chain, ExtraKeys, Identity, Token};
use block_pool::PageState;
use radix_tree::{NamespaceKey, NodeId, ParentId, PrefixTree};

/// A prompt to look for, hashed by the caller.
pub struct PrefixQuery {
    /// The prompt.
    pub tokens: Vec<Token>,
    /// Salt and adapter.
    pub namespace: NamespaceKey,
    /// What besides tokens enters its blocks.
    pub extras: ExtraKeys,
    /// The hashes of its full blocks.
    pub chain: Chain,
}

/// What a prompt would reuse, in blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PrefixReuse {
    /// Reusable blocks that a request or a transfer holds now, in the group whose blocks are the cache's: taking them
    /// costs no free page there.
    pub allocated: u32,
    /// The same in each group, of the blocks that the group needs to go on behind all reusable ones.
    pub allocated_by_group: Vec<u32>,
    /// Reusable blocks.
    pub all: u32,
    /// Leading full blocks that are stored, reusable or not.
    pub present: u32,
    /// The first full block that is not stored.
    pub first_new_block: Option<Identity>,
    /// Why it is not; `None` when all are.
    pub miss: Option<Miss>,
    /// Where those that are stored were found.
    pub walk: PrefixWalk,
}

/// Where the leading blocks of a prompt are in the tree, so that a request with that prompt need not look for
/// them again. It is of use to the ledger that gave it, until that drops a block of any prompt.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PrefixWalk {
    nodes: Vec<NodeId>,
    /// What [`PrefixTree::dropped`] was.
    dropped: u64,
}

impl PrefixWalk {
    /// The request's blocks behind its own published ones, up to block `limit`, as far as they are known.
    /// None if the walk was along another prompt, as the hash of the last block tells, or is of no use any
    /// more.
    pub(crate) fn of(&self, sequence: &Sequence, tree: &PrefixTree, limit: usize) -> &[NodeId] {
        let known = self.nodes.get(sequence.nodes.len()..limit.min(self.nodes.len())).unwrap_or_default();
        let Some(&last) = known.last().filter(|_| self.dropped == tree.dropped()) else { return &[] };
        let hash = sequence.chain.keys().get(sequence.nodes.len() + known.len() - 1);
        if tree.key(last) == hash.copied() { known } else { &[] }
    }
}

impl Ledger {
    /// How many blocks of the prompt could be reused, and how many full ones are there at all, in leading blocks, if
    /// `there` says which ones other tiers have beside the device.
    pub fn probe_with(&self, query: &PrefixQuery, there: &Presence) -> (u32, u32) {
        let (full, page_size) = (query.chain.len(), self.config.page_size);
        if !self.config.prefix_caching || full == 0 {
            return (0, 0);
        }
        let mut nodes = Vec::new();
        if let Some(namespace) = self.tree.find_namespace(&query.namespace) {
            let prefix = Prefix {
                log: &query.tokens,
                keys: query.chain.keys(),
                extras: &query.extras,
                page_size: page_size as usize,
            };
            let root = ParentId::Root(namespace);
            prefix.walk_nodes(&self.tree, root, 0..full, &mut BlockReader::default(), &mut nodes);
        }
        let (kinds, reusable) = (self.config.kinds(), (query.tokens.len() as u32 - 1) / page_size);
        let stored = |group, block: u32| {
            nodes.get(block as usize).is_some_and(|&node| self.tree.page(node, group).is_some())
        };
        // What a hit on the device needs of the blocks before its end is there.
        let longest = |most: u32| {
            let first = stored_prefix(&self.config, &self.tree, &nodes, most as usize) as u32;
            let present = |group, block| block < first || stored(group, block) || there.has(group, block);
            joint_hit(&kinds, page_size, first, most, present).unwrap_or(first)
        };
        (longest(reusable), longest(full as u32))
    }

    /// What the prompt would reuse. The last token of a prompt must be computed, so that a block that
    /// holds it is never reusable.
    pub fn probe(&self, query: &PrefixQuery) -> PrefixReuse {
        let allocated_by_group = vec![0; self.config.groups.len()];
        let mut reuse = PrefixReuse { allocated_by_group, ..PrefixReuse::default() };
        let full = query.chain.len();
        if !self.config.prefix_caching || full == 0 {
            return reuse;
        }
        let reusable = (query.tokens.len() - 1) / self.config.page_size as usize;
        let prefix = Prefix {
            log: &query.tokens,
            keys: query.chain.keys(),
            extras: &query.extras,
            page_size: self.config.page_size as usize,
        };
        let (mut nodes, mut collided) = (Vec::new(), false);
        if let Some(namespace) = self.tree.find_namespace(&query.namespace) {
            let root = ParentId::Root(namespace);
            let mut reader = BlockReader::default();
            collided = prefix.walk_nodes(&self.tree, root, 0..full, &mut reader, &mut nodes);
        }
        let present = stored_prefix(&self.config, &self.tree, &nodes, full);
        let hit = stored_prefix(&self.config, &self.tree, &nodes, reusable);
        reuse.all = hit as u32;
        let is_held = |node, group| {
            let page = self.tree.page(node, group);
            page.is_some_and(|page| self.pools[group].state(page) != PageState::Evictable)
        };
        let held = |group, needed: Needed| {
            let blocks =
                (0..).zip(&nodes[..hit]).filter(|&(block, &node)| needed.has(block) && is_held(node, group));
            blocks.count() as u32
        };
        let lead = self.config.lead();
        reuse.allocated = held(lead, Needed { sinks: 0, from: 0 });
        for group in self.config.group_ids().filter(|_| hit > 0) {
            let kind = self.config.kind(group);
            reuse.allocated_by_group[group.index()] = if group == lead && !kind.forgets() {
                reuse.allocated
            } else {
                held(group, kind.needed(reuse.all * self.config.page_size, self.config.page_size))
            };
        }
        reuse.present = present as u32;
        if present < full {
            reuse.first_new_block = Some(query.chain.identity(present));
            let why = if present < nodes.len() {
                let is_there = |group, block: usize| self.tree.page(nodes[block], group).is_some();
                Some(MissReason::of_known(&self.config, present, is_there))
            } else {
                collided.then_some(MissReason::Collision)
            };
            reuse.miss = Some(Miss::of(&self.tree, &self.evicted, query.chain.keys()[present], why));
        }
        reuse.walk = PrefixWalk { nodes, dropped: self.tree.dropped() };
        reuse
    }
}
