//! The slab's books, checked and hashed.

use crate::ids::PageId;
use crate::queue::QueueId;
use crate::slab::{PageState, Slab};
use std::hash::{Hash, Hasher};
use thiserror::Error;

#[cfg(test)]
mod tests;

/// The first page that breaks the slab's books.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{page}: {what}")]
pub struct PageFault {
    /// The page.
    pub page: PageId,
    /// What is wrong with it.
    pub what: String,
}

impl PageFault {
    /// A fault of `page`.
    pub fn new(page: PageId, what: impl Into<String>) -> PageFault {
        PageFault { page, what: what.into() }
    }
}

impl Slab {
    /// Checks that every page is in exactly one state, in the list where it belongs, and that the counts
    /// add up.
    ///
    /// # Errors
    /// The first page that breaks the books.
    pub fn verify(&self) -> Result<(), PageFault> {
        if let Some((page, what)) = self.queues.first_broken() {
            return Err(PageFault::new(page, what));
        }
        for queue in QueueId::all() {
            for page in self.queues.iter(queue) {
                let expected = self.node(page).map(|_| self.priority(page).level());
                if queue.level() != expected {
                    let what = format!("queued at {:?}, belongs at {expected:?}", queue.level());
                    return Err(PageFault::new(page, what));
                }
            }
        }
        let mut in_flight = 0;
        for page in (0..self.pages.len() as u32).map(PageId) {
            let record = &self.pages[page.index()];
            let queued = self.queues.contains(page);
            let held = record.refs > 0 || record.pins > 0;
            let fault = match () {
                () if page == PageId::NULL && (held || queued) => "the null page is in use",
                () if page == PageId::NULL => continue,
                () if queued && held => "both held and evictable",
                () if !queued && !held => "lost: neither held nor evictable",
                () => {
                    in_flight += u32::from(self.state(page) == PageState::InFlight);
                    continue;
                }
            };
            return Err(PageFault::new(page, fault));
        }
        if self.pages.len() > self.total() as usize + 1 {
            return Err(PageFault::new(PageId(self.total() + 1), "more pages than the slab has"));
        }
        if in_flight != self.in_flight() {
            let what = format!("{in_flight} pages are in flight, {} are counted", self.in_flight());
            return Err(PageFault::new(PageId::NULL, what));
        }
        Ok(())
    }

    /// Feeds the whole state, list orders included, to `hasher`; planning marks are left out.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        for page in (0..self.pages.len() as u32).map(PageId) {
            let record = &self.pages[page.index()];
            (record.refs, record.pins, self.node(page), record.last_use).hash(hasher);
            (record.published, record.priority).hash(hasher);
        }
        for queue in QueueId::all() {
            queue.hash(hasher);
            self.queues.iter(queue).for_each(|page| page.hash(hasher));
        }
    }

    /// The evictable pages in the order in which [`Slab::take`] would choose them (uncached ones first;
    /// pristine pages are taken between these and the cached ones).
    pub fn eviction_order(&self) -> impl Iterator<Item = PageId> + '_ {
        QueueId::all().flat_map(|queue| self.queues.iter(queue))
    }
}
