//! What a prefix would reuse, without changing anything.

use crate::blocks::{BlockReader, Prefix};
use crate::ledger::Ledger;
use crate::misses::Miss;
use block_hash::{Chain, ExtraKeys, Identity, Token};
use block_pool::PageState;
use radix_tree::{Hits, NamespaceKey, ParentId};

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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefixReuse {
    /// Reusable blocks that a request or a transfer holds now: taking them costs no free page.
    pub allocated: u32,
    /// Reusable blocks.
    pub all: u32,
    /// Leading full blocks that are stored, reusable or not.
    pub present: u32,
    /// The first full block that is not stored.
    pub first_new_block: Option<Identity>,
    /// Why it is not; `None` when all are.
    pub miss: Option<Miss>,
}

impl Ledger {
    /// What the prompt would reuse. The last token of a prompt must be computed, so that a block that
    /// holds it is never reusable.
    pub fn probe(&self, query: &PrefixQuery) -> PrefixReuse {
        let mut reuse = PrefixReuse::default();
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
        let (mut hits, mut collided) = (Hits::default(), false);
        if let Some(namespace) = self.tree.find_namespace(&query.namespace) {
            let root = ParentId::Root(namespace);
            collided = prefix.walk(&self.tree, root, 0, full, &mut BlockReader::default(), &mut hits);
        }
        let present = hits.len();
        for &page in hits.pages.iter().take(reusable) {
            reuse.all += 1;
            reuse.allocated += u32::from(self.pool.state(page) != PageState::Evictable);
        }
        reuse.present = present as u32;
        if present < full {
            reuse.first_new_block = Some(query.chain.identity(present));
            reuse.miss = Some(Miss::of(&self.tree, &self.evicted, query.chain.keys()[present], collided));
        }
        reuse
    }
}
