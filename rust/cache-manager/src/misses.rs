//! Why a look-up found no more blocks.

use crate::config::LedgerConfig;
use crate::groups::GroupKind;
use crate::ledger::Ledger;
use crate::probe::{PrefixQuery, PrefixReuse};
use block_hash::Chain;
use block_pool::{GroupId, Step};
use memory::Array;
use radix_tree::PrefixTree;
use std::hash::{Hash, Hasher};

/// The first full block that was not found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Miss {
    /// Why not.
    pub reason: MissReason,
    /// When it was evicted, if that is still known.
    pub evicted_at: Option<Step>,
}

/// Why a block was not found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MissReason {
    /// It was never stored, or that was forgotten: evictions are remembered for a while, and until the
    /// reset of the cache.
    NeverStored,
    /// It was evicted.
    Evicted,
    /// Another block owns its hash.
    Collision,
    /// It is stored under another salt or adapter.
    OtherNamespace,
    /// It is stored, but blocks that a window or a chunk reads at its end are not.
    Window,
    /// It is stored, but the state at its end is not.
    NoSnapshot,
}

impl Miss {
    /// Why the block of hash `key` was not found, if the look-up itself did not say it.
    pub(crate) fn of(tree: &PrefixTree, evicted: &EvictedKeys, key: u64, known: Option<MissReason>) -> Miss {
        let may_be_evicted = known.is_none_or(|reason| reason == MissReason::Evicted);
        let evicted_at = if may_be_evicted { evicted.step_of(key) } else { None };
        let reason = known.unwrap_or(if evicted_at.is_some() || tree.owner_of(key).is_some() {
            MissReason::Evicted // a node without a page is an evicted block, too
        } else {
            MissReason::NeverStored
        });
        Miss { reason, evicted_at }
    }
}

impl MissReason {
    /// Why a prefix of blocks, all known to the tree, ends before block `end` for some group; `present` is whether a
    /// group has a block.
    pub(crate) fn of_known(
        config: &LedgerConfig,
        end: usize,
        present: impl Fn(GroupId, usize) -> bool,
    ) -> MissReason {
        let page_size = config.page_size;
        let lacks = |group: GroupId| {
            let kind = config.kind(group);
            let needed = kind.needed((end as u32 + 1) * page_size, page_size);
            // What comes before is there for a group that keeps everything.
            let from = if kind.forgets() { needed.from as usize } else { end };
            let sinks = needed.sinks.min(needed.from) as usize;
            (0..sinks).chain(from..=end).any(|block| !present(group, block))
        };
        let lacking = |chosen: fn(GroupKind) -> bool| {
            config.group_ids().any(|group| chosen(config.kind(group)) && lacks(group))
        };
        if lacking(|kind| !kind.forgets()) {
            MissReason::Evicted
        } else if lacking(|kind| kind.has_blocks()) {
            MissReason::Window
        } else {
            MissReason::NoSnapshot
        }
    }
}

/// Most cells: address space for the evictions of any real pool.
const MOST_CELLS: usize = 1 << 24;

/// Hashes of evicted blocks, with the step of each eviction. A cell holds one, by its hash, and the later
/// eviction takes it: what is remembered is about as many evictions as there are pages.
pub(crate) struct EvictedKeys {
    /// The upper half of the hash above the step; 0 is empty, since no block is evicted before step 1.
    cells: Array<u64>,
}

impl EvictedKeys {
    /// Memory for the evictions of a pool of `pages`.
    pub(crate) fn new(pages: usize) -> EvictedKeys {
        EvictedKeys { cells: Array::zeros(pages.min(MOST_CELLS)) }
    }

    /// `key` is added or forgotten soon.
    #[inline]
    pub(crate) fn prefetch(&self, key: u64) {
        if let Some(cell) = self.cells.first() {
            memory::prefetch(cell, self.place(key));
        }
    }

    /// The block of hash `key` is evicted in `step`.
    #[inline]
    pub(crate) fn add(&mut self, key: u64, step: Step) {
        let place = self.place(key);
        if let Some(cell) = self.cells.get_mut(place) {
            *cell = key >> 32 << 32 | u64::from(step.0);
        }
    }

    /// The block of hash `key` is stored again: what happens to it next is what counts.
    #[inline]
    pub(crate) fn forget(&mut self, key: u64) {
        let place = self.place(key);
        if let Some(cell) = self.cells.get_mut(place).filter(|cell| **cell >> 32 == key >> 32) {
            *cell = 0;
        }
    }

    /// The step in which the block of hash `key` was evicted, if that is remembered and it was not stored since.
    pub(crate) fn step_of(&self, key: u64) -> Option<Step> {
        let cell = *self.cells.get(self.place(key))?;
        (cell != 0 && cell >> 32 == key >> 32).then_some(Step(cell as u32))
    }

    /// Forgets every eviction. The cost does not grow with the number of cells.
    pub(crate) fn clear(&mut self) {
        *self = EvictedKeys::new(self.cells.len());
    }

    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        self.cells.hash(hasher);
    }

    #[inline]
    fn place(&self, key: u64) -> usize {
        ((u64::from(key as u32) * self.cells.len() as u64) >> 32) as usize
    }
}

/// Most namespaces that [`Ledger::probe_namespaces`] looks into.
const MOST_NAMESPACES: usize = 64;

impl Ledger {
    /// [`Ledger::probe`], which also looks for a block that was never stored under other salts and
    /// adapters, at most 64. It tells whether one has it, never which. Each is hashed as far as it agrees.
    pub fn probe_namespaces(&self, query: &PrefixQuery) -> PrefixReuse {
        let mut reuse = self.probe(query);
        if let Some(Miss { reason: reason @ MissReason::NeverStored, .. }) = &mut reuse.miss
            && self.is_stored_elsewhere(query, reuse.present as usize + 1)
        {
            *reason = MissReason::OtherNamespace;
        }
        reuse
    }

    /// Whether another namespace has all of the prompt's first `blocks` blocks.
    fn is_stored_elsewhere(&self, query: &PrefixQuery, blocks: usize) -> bool {
        let page_size = self.config.page_size as usize;
        let lead = self.config.lead();
        let own = self.tree.find_namespace(&query.namespace);
        let others = self.tree.namespaces().filter(|&namespace| Some(namespace) != own);
        others.take(MOST_NAMESPACES).any(|namespace| {
            let root = self.tree.namespace_key(namespace).root(self.config.seed.as_ref());
            let mut chain = Chain::new(self.config.algo, &root);
            (1..=blocks).all(|block| {
                chain.extend(&query.tokens[..block * page_size], page_size, &query.extras);
                self.tree
                    .owner_of(chain.keys()[block - 1])
                    .is_some_and(|node| self.tree.page(node, lead).is_some())
            })
        })
    }
}
