//! Pages leave the pools: what they stood for is forgotten.

use crate::error::NoRoom;
use crate::ledger::Ledger;
use block_pool::{Evicted, GroupId, NodeLink, PageId, Taken};
use memory::AHEAD;
use radix_tree::NodeId;

impl Ledger {
    /// Takes pages that the plan left room for; [`Ledger::taken`] lists them. Those of [`Ledger::left`] are taken
    /// afterwards.
    pub(crate) fn take(&mut self, group: GroupId, count: u32) {
        self.taken.clear();
        let (priority, taken) = (self.config.priority, &mut self.taken);
        let complete = if self.config.huge_pages.is_none() {
            self.pools[group].take_many(count, priority, taken)
        } else {
            self.take_from_slab(group, count)
        };
        assert!(complete, "the plan left room for every page");
        let leads = group == self.config.lead();
        let taken = std::mem::take(&mut self.taken);
        let evicted = |index: usize| taken.get(index).and_then(|later| later.evicted);
        for (index, &Taken { page, evicted: node, pristine }) in taken.iter().enumerate() {
            if let Some(later) = evicted(index + 2 * AHEAD) {
                self.tree.prefetch(NodeId(later.0));
            }
            if let Some(later) = evicted(index + AHEAD) {
                self.tree.prefetch_key(NodeId(later.0));
            }
            if let Some(node) = node {
                self.evict(group, page, node, leads);
            }
            self.counters.pages_allocated_new += u64::from(pristine);
        }
        self.taken = taken;
        self.counters.pages_allocated += u64::from(count);
    }

    /// Takes pages of a slab that groups share: other groups may lose what they have cached.
    fn take_from_slab(&mut self, group: GroupId, count: u32) -> bool {
        if let Some(left) = self.left.get_mut(group.index()) {
            *left = left.saturating_sub(count);
        }
        let mut lost = Vec::new();
        let (priority, taken) = (self.config.priority, &mut self.taken);
        let complete = self.pools.take_many(group, count, priority, &self.left, taken, &mut lost);
        for taken in &self.taken {
            self.fills.taken(group, taken.page);
        }
        for Evicted { group, page, node } in lost {
            self.evict(group, page, node, group == self.config.lead());
        }
        complete
    }

    /// The block of `node` is no longer on the page that a group had it on.
    #[expect(clippy::inline_always, reason = "of two calls, one is made for each page")]
    #[inline(always)]
    fn evict(&mut self, group: GroupId, page: PageId, node: NodeLink, leads: bool) {
        let node = NodeId(node.0);
        let key = self.tree.key(node);
        self.tree.clear_page(node, group);
        if let Some(key) = key {
            self.events.removed(group, key);
            if leads {
                self.evicted.add(key, self.step);
            }
        } else {
            self.drop_tail(node); // of no use without one of its pages
        }
        self.counters.evictions += 1;
        self.counters.residency.add(self.step.0 - self.pools[group].published(page).0);
    }

    /// A group's pool for an error: `free` pages can be had beside the hits of the batch.
    pub(crate) fn room(&self, group: GroupId, needed: u32, free: u32) -> NoRoom {
        let total = self.pools[group].total();
        NoRoom {
            needed,
            free,
            evictable: free.saturating_sub(self.pools[group].pristine()),
            pinned: total - self.pools.available(group),
            total,
        }
    }

    /// The slab that groups share, in huge pages, for an error: `demand` pages of each group do not fit together.
    pub(crate) fn huge_room(&self, demand: &[u32]) -> NoRoom {
        let slab = self.pools.slab_of(GroupId::FIRST);
        let free = self.pools.free_huge_pages(slab);
        let needed = self.config.groups.iter().zip(demand).map(|(group, &pages)| pages.div_ceil(group.pages));
        let total = slab.huge_pages();
        NoRoom { needed: needed.sum(), free, evictable: free, pinned: total - free, total }
    }
}
