//! Copy on write: a page that somebody else reads is not written to.
//!
//! A step writes from its first token on, so that only the block of that token can lie on such a page. The
//! request then gets a fresh page, and a copy of the old one is planned. The engine carries copies out, in
//! order, before the forward that they were planned with; until it takes them their pages are pinned.

use crate::copies::let_go;
use crate::ledger::Ledger;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{PageId, Taken};
use std::collections::HashMap;

/// How many requests of a batch get a copy of a page, and leave it, by page.
pub(crate) type Leaving = HashMap<PageId, u32>;

impl Ledger {
    /// The page copies, (source, destination), that must be carried out in this order before the next
    /// forward. They are given once; their pages are no longer pinned then.
    pub fn take_page_copies(&mut self) -> Vec<(PageId, PageId)> {
        let copies = std::mem::take(&mut self.page_copies);
        for page in copies.iter().flat_map(|&(source, destination)| [source, destination]) {
            // By way of a reference, which notes the step whose fence a mover must wait for.
            self.pool.acquire(page);
            self.pool.unpin(page);
            let_go(&mut self.pool, &self.tree, page, self.step);
        }
        copies
    }

    /// Page copies that wait to be taken.
    pub fn planned_page_copies(&self) -> usize {
        self.page_copies.len()
    }

    /// Whether a step of a request that is exposed, from token `start` on, needs a copy of the page that it
    /// first writes to: another request holds the page, the tree knows it, or a mover reads it. The last of
    /// several holders in one batch keeps it.
    pub(crate) fn must_copy(&self, sequence: &Sequence, start: u32, leaving: &mut Leaving) -> bool {
        let Some(&page) = sequence.row.get((start / self.config.page_size) as usize) else { return false };
        let (refs, pins) = (self.pool.refs(page), self.pool.pins(page));
        let known = self.pool.node(page).is_some();
        if refs == 1 && pins == 0 && !known {
            return false;
        }
        let left = leaving.get(&page).copied().unwrap_or(0);
        let copies = known || refs - left > 1 || pins > self.planned_pins(page);
        if copies {
            leaving.insert(page, left + 1);
        }
        copies
    }

    /// Pins of planned copies: the forward that may write to the page runs after these.
    fn planned_pins(&self, page: PageId) -> u32 {
        let pairs = self.page_copies.iter();
        pairs.map(|&(from, to)| u32::from(from == page) + u32::from(to == page)).sum()
    }

    /// Puts the page that was just taken in the place of the page of `block`, and plans its copy.
    pub(crate) fn copy_on_write(&mut self, slot: SlotId, block: usize) {
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        let [Taken { page: destination, .. }] = self.taken[..] else { return };
        let source = std::mem::replace(&mut sequence.row[block], destination);
        sequence.row_version += 1;
        self.pool.pin(source);
        self.pool.pin(destination);
        self.pool.release(source, self.step);
        self.page_copies.push((source, destination));
        self.counters.page_copies += 1;
    }
}
