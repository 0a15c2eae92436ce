//! Forgetting stored blocks: all of them, or those below a prefix; sleep, which needs no memory.

use crate::blocks::BlockReader;
use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::probe::PrefixQuery;
use crate::sequence::Sequence;
use radix_tree::{NodeId, ParentId};

impl Ledger {
    /// Forgets every cached block, and refuses the offloads that nobody has taken yet. Blocks in use are not published when they are computed or released:
    /// requests that hold pages neither read nor store from now on, until preempted. The cost does not
    /// grow with the cache.
    pub fn reset_prefix_cache(&mut self) {
        self.refuse_offloads();
        self.counters.reset_blocks += self.cached_blocks() as u64;
        self.forget_device(Sequence::holds_nothing);
        self.events.cleared(self.config.group_ids());
        self.counters.resets += 1;
    }

    /// Forgets what is cached on the device and takes no page until [`Ledger::wake`]: the memory behind the pages may
    /// go. What is elsewhere stays known: blocks in other tiers, and the KV of suspended requests, which is as good as
    /// before.
    ///
    /// # Errors
    /// A cache that is asleep; a page that is held. Nothing is changed then.
    pub fn sleep(&mut self) -> Result<(), LedgerError> {
        self.check_unused()?;
        if !self.copies.in_flight.is_empty() {
            return Err(self.in_use());
        }
        for group in self.config.group_ids() {
            drop(self.take_page_copies(group)); // whoever they were planned for has let go
        }
        let epoch = self.epoch;
        // Nothing of these is on the device. One that has placeholders alone goes on by itself: no token to come reads
        // what they stand for, and the blocks that its next would follow are forgotten.
        self.forget_device(|sequence| {
            sequence.holds_no_page() && (sequence.epoch == epoch || sequence.holds_nothing())
        });
        self.events.device_cleared(self.config.group_ids());
        self.asleep = true;
        Ok(())
    }

    /// Refuses while pages are held by more than copies, which end by themselves: [`Ledger::sleep`] would be
    /// refused too.
    ///
    /// # Errors
    /// Who holds pages; a cache that is asleep.
    pub fn check_unused(&self) -> Result<(), LedgerError> {
        self.check_awake()?;
        let held = |group| self.pools[group].held() > self.pools[group].in_flight();
        if self.config.group_ids().any(held) { Err(self.in_use()) } else { Ok(()) }
    }

    fn in_use(&self) -> LedgerError {
        let holds = |sequence: &Sequence| {
            let returning = sequence.suspension.as_ref().is_some_and(|it| it.pages().next().is_some());
            returning || !sequence.holds_no_page() || sequence.load.is_some()
        };
        LedgerError::InUse {
            pages: self.config.group_ids().map(|group| self.pools[group].held()).sum(),
            requests: self.slots.iter().filter(|(_, sequence)| holds(sequence)).count(),
            pins: self.pins.pages.len(),
            copies: self.copies.in_flight.len(),
        }
    }

    /// There is memory behind the pages again; nothing is cached in it.
    ///
    /// # Errors
    /// A cache that is awake.
    pub fn wake(&mut self) -> Result<(), LedgerError> {
        if !self.asleep {
            return Err(LedgerError::Awake);
        }
        self.asleep = false;
        Ok(())
    }

    /// Whether [`Ledger::sleep`] was called and [`Ledger::wake`] was not.
    pub fn is_asleep(&self) -> bool {
        self.asleep
    }

    pub(crate) fn check_awake(&self) -> Result<(), LedgerError> {
        if self.asleep { Err(LedgerError::Asleep) } else { Ok(()) }
    }

    /// Forgets every cached block. Requests for which `goes_on` may read and store what is cached from now on.
    fn forget_device(&mut self, goes_on: impl Fn(&Sequence) -> bool) {
        self.tree.clear();
        self.evicted.clear();
        for group in self.config.group_ids() {
            self.pools[group].forget_all();
        }
        self.epoch += 1;
        for sequence in self.slots.iter_mut().filter(|sequence| goes_on(sequence)) {
            sequence.join_epoch(&mut self.tree, self.epoch);
        }
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
        let mut unused = vec![Vec::new(); self.config.groups.len()];
        for node in below {
            if self.tree.is_tail(node) {
                if self.is_idle(node) {
                    self.drop_tail(node);
                }
                continue;
            }
            let mut is_unused = false;
            for group in self.config.group_ids() {
                let page = self.tree.page(node, group).filter(|&page| self.pools[group].is_evictable(page));
                unused[group.index()].extend(page.map(|page| (node, page)));
                is_unused |= page.is_some();
            }
            forgotten += usize::from(is_unused);
        }
        for (group, unused) in self.config.group_ids().zip(unused) {
            for (node, page) in unused {
                if let Some(key) = self.tree.key(node) {
                    self.events.removed(group, key);
                }
                self.pools[group].withdraw(page);
                self.tree.clear_page(node, group);
            }
        }
        self.counters.truncated_blocks += forgotten as u64;
        forgotten
    }
}
