//! Pages leave the pools: what they stood for is forgotten.

use crate::error::NoRoom;
use crate::ledger::Ledger;
use block_pool::{Evicted, GroupId, Taken};
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
        let taken = std::mem::take(&mut self.taken);
        self.evict(group, &taken);
        self.counters.pages_allocated_new += taken.iter().filter(|taken| taken.pristine).count() as u64;
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
            self.evict(group, &[Taken { page, evicted: Some(node), pristine: false }]);
        }
        complete
    }

    /// The blocks of pages that left a group's hands are no longer on them.
    fn evict(&mut self, group: GroupId, taken: &[Taken]) {
        let leads = group == self.config.lead();
        let Ledger { tree, pools, events, evicted, counters, step, .. } = self;
        let pool = &pools[group];
        let node = |index: usize| taken.get(index).and_then(|taken| taken.evicted).map(|node| NodeId(node.0));
        let (mut blocks, mut tails) = (0, Vec::new());
        let mut residency = counters.residency.runs();
        for (index, taken) in taken.iter().enumerate() {
            if let Some(later) = node(index + 2 * AHEAD) {
                tree.prefetch(later);
            }
            if let Some(later) = node(index + AHEAD) {
                tree.prefetch_key(later);
            }
            let Some(node) = node(index) else { continue };
            let key = tree.key(node);
            tree.clear_page(node, group);
            if let Some(key) = key {
                events.removed(group, key);
                if leads {
                    evicted.add(key, *step);
                }
            } else {
                tails.push(node);
            }
            blocks += 1;
            residency.add(step.0 - pool.published(taken.page).0);
        }
        drop(residency);
        counters.evictions += blocks;
        for tail in tails {
            self.drop_tail(tail); // of no use without one of its pages
        }
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
