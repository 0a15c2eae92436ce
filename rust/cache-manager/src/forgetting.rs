//! Forgetting stored blocks: all of them, or those below a prefix.

use crate::blocks::BlockReader;
use crate::ledger::Ledger;
use crate::probe::PrefixQuery;
use radix_tree::{NodeId, ParentId};

impl Ledger {
    /// Forgets every cached block, and refuses the offloads that nobody has taken yet. Blocks in use are not published when they are computed or released:
    /// requests that hold pages neither read nor store from now on, until preempted. The cost does not
    /// grow with the cache.
    pub fn reset_prefix_cache(&mut self) {
        self.refuse_offloads();
        self.counters.reset_blocks += self.tree.resident() as u64;
        self.tree.clear();
        self.evicted.clear();
        self.slab.forget_all();
        self.epoch += 1;
        for sequence in self.slots.iter_mut().filter(|sequence| sequence.holds_nothing()) {
            sequence.join_epoch(&mut self.tree, self.epoch);
        }
        self.events.cleared();
        self.counters.resets += 1;
    }

    /// Forgets the stored blocks that follow the prompt's full blocks and that nobody uses; gives their
    /// number. A prompt without a full block: every such block of its namespace.
    pub fn truncate_prefix(&mut self, query: &PrefixQuery) -> usize {
        let Some(namespace) = self.tree.find_namespace(&query.namespace) else { return 0 };
        let page_size = self.config.page_size as usize;
        let mut reader = BlockReader::default();
        let mut parent = ParentId::Root(namespace);
        for (block, &key) in query.chain.keys().iter().enumerate() {
            let (tokens, extra) = reader.read(&query.tokens, &query.extras, page_size, block);
            // A block without a page has descendants all the same.
            let Ok(Some(node)) = self.tree.find(parent, key, tokens, extra) else { return 0 };
            parent = ParentId::Node(node);
        }
        self.events.seal();
        let below: Vec<NodeId> = self.tree.descendants(parent).collect();
        let mut forgotten = 0;
        for node in below {
            let unused = self.tree.page(node).filter(|&page| self.slab.is_evictable(page));
            let Some(page) = unused else { continue };
            self.events.removed(self.tree.key(node));
            self.slab.withdraw(page);
            self.tree.clear_page(node);
            forgotten += 1;
        }
        self.counters.truncated_blocks += forgotten as u64;
        forgotten
    }
}
