//! Copy on write: a page that somebody else reads is not written to.
//!
//! A step writes from its first token on, so that only the block of that token can lie on such a page. The
//! request then gets a fresh page, and a copy of the old one is planned. The engine carries copies out, in
//! order, before the forward that they were planned with; until it takes them their pages are pinned.

use crate::copies::let_go;
use crate::ledger::Ledger;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Step, Taken};
use std::collections::HashMap;

/// A page that is copied to another of its group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PageCopy {
    /// Whose pages they are.
    pub group: GroupId,
    /// The page that is read.
    pub source: PageId,
    /// The page that is written.
    pub destination: PageId,
    /// The forwards of this step and of later ones read it.
    pub before: Step,
}

/// How many requests of a batch get a copy of a page, and leave it, by page.
pub(crate) type Leaving = HashMap<(GroupId, PageId), u32>;

impl Ledger {
    /// The page copies of a group that must be carried out in this order before the next forward. They are given
    /// once; their pages are no longer pinned then.
    pub fn take_page_copies(&mut self, group: GroupId) -> Vec<PageCopy> {
        let copies: Vec<PageCopy> = self.page_copies.extract_if(.., |copy| copy.group == group).collect();
        for &PageCopy { source, destination, .. } in &copies {
            for page in [source, destination] {
                // By way of a reference, which notes the step whose fence a mover must wait for.
                self.pools[group].acquire(page);
                self.pools[group].unpin(page);
                let_go(&mut self.pools, &self.tree, &self.config, group, page, self.step);
            }
        }
        copies
    }

    /// Page copies of a group that wait to be taken, in order. Until they are, they may be carried out again
    /// from the first on: none writes to a page that one before it reads.
    pub fn planned_page_copies(&self, group: GroupId) -> impl Iterator<Item = &PageCopy> {
        self.page_copies.iter().filter(move |copy| copy.group == group)
    }

    /// Whether pages of any group wait to be copied or zeroed before the next forward.
    pub fn has_planned_page_work(&self) -> bool {
        self.config.group_ids().any(|group| {
            self.planned_page_copies(group).next().is_some()
                || self.planned_page_fills(group).next().is_some()
        })
    }

    /// All of that is done. If `launches` the open step's forward is about to run.
    pub fn page_work_done(&mut self, launches: bool) {
        for group in self.config.group_ids() {
            drop(self.take_page_fills(group));
            drop(self.take_page_copies(group));
        }
        if launches {
            self.close_step();
        }
    }

    /// The first step whose forward reads what page copies bring that nobody has taken.
    #[inline]
    pub(crate) fn first_uncopied(&self) -> Option<Step> {
        self.page_copies.first().map(|copy| copy.before)
    }

    /// Whether a step of a request that is exposed, from token `start` on, needs a copy of the page of a group that
    /// it first writes to: another request holds the page, the tree knows it, or a mover reads it. The last of
    /// several holders in one batch keeps it.
    pub(crate) fn must_copy(
        &self,
        sequence: &Sequence,
        group: GroupId,
        start: u32,
        leaving: &mut Leaving,
    ) -> bool {
        let block = (start / self.config.page_size) as usize;
        let Some(page) = sequence.row(group).page(block) else { return false };
        self.is_shared(group, page, leaving)
    }

    /// Whether a page that a request holds and is going to write to is not its alone. If so, it leaves the page.
    pub(crate) fn is_shared(&self, group: GroupId, page: PageId, leaving: &mut Leaving) -> bool {
        let pool = &self.pools[group];
        let (refs, pins) = (pool.refs(page), pool.pins(page));
        let known = pool.node(page).is_some();
        if refs == 1 && pins == 0 && !known {
            return false;
        }
        let left = leaving.get(&(group, page)).copied().unwrap_or(0);
        let copies = known || refs - left > 1 || pins > self.planned_pins(group, page);
        if copies {
            leaving.insert((group, page), left + 1);
        }
        copies
    }

    /// Pins of planned copies: the forward that may write to the page runs after these.
    pub(crate) fn planned_pins(&self, group: GroupId, page: PageId) -> u32 {
        let copies = self.planned_page_copies(group);
        copies.map(|copy| u32::from(copy.source == page) + u32::from(copy.destination == page)).sum()
    }

    /// Puts the page that was just taken in the place of the page of `block`, and plans its copy.
    pub(crate) fn copy_on_write(&mut self, slot: SlotId, group: GroupId, block: usize) {
        let Some(sequence) = self.slots.get_mut(slot) else { return };
        let [Taken { page: destination, .. }] = self.taken[..] else { return };
        let source = sequence.row_mut(group).replace(block, destination);
        let pool = &mut self.pools[group];
        pool.pin(source);
        pool.pin(destination);
        pool.release(source, self.step);
        self.page_copies.push(PageCopy { group, source, destination, before: self.step });
        self.counters.page_copies += 1;
    }
}
