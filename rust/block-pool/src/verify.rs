//! The pool's books, checked and hashed.

use crate::ids::{GroupId, PageId};
use crate::page::{Flags, NO_NODE};
use crate::pool::{PageState, Pool};
use crate::queue::QueueId;
use std::fmt;
use std::hash::{Hash, Hasher};
use thiserror::Error;

#[cfg(test)]
mod tests;

/// The first page that breaks the pool's books.
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

/// A fault in one of several pools.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("group {}, {fault}", .group.0)]
pub struct GroupFault {
    /// The group.
    pub group: GroupId,
    /// What is wrong there.
    pub fault: PageFault,
}

impl Pool {
    /// Checks that every page is in exactly one state, in the list where it belongs, and that the counts
    /// add up.
    ///
    /// # Errors
    /// The first page that breaks the books.
    pub fn verify(&self) -> Result<(), PageFault> {
        if let Some((page, what)) = self.queues.first_broken(&self.pages) {
            return Err(PageFault::new(page, what));
        }
        let (mut in_flight, mut timed) = (0, 0);
        for page in (0..self.pages.len() as u32).map(PageId) {
            let (record, pins) = (&self.pages[page.index()], self.cold[page.index()].pins);
            let queue = self.queues.queue_of(record);
            let queued = queue != QueueId::NONE;
            let held = record.refs > 0 || pins > 0;
            let owned = self.book.as_ref().is_none_or(|book| book.owns(book.huge_of(page)));
            let fault = match () {
                () if page == PageId::NULL && (held || queued) => "the null page is in use",
                () if page == PageId::NULL => continue,
                () if !owned && (held || queued) => "in use, and its huge page is not the group's",
                () if !owned && record.node != NO_NODE => "it stands for something, and is not the group's",
                () if queued && held => "both held and evictable",
                () if owned && !queued && !held => "lost: neither held nor evictable",
                () if record.flags.has(Flags::PINNED) != (pins > 0) => "its mark of being pinned is wrong",
                () if record.flags.has(Flags::TIMED) != self.limits.get(page).is_some() => {
                    "its mark of a retention that ends is wrong"
                }
                () if queued && queue.segment() != self.home(record) => {
                    let (found, home) = (QueueName(queue), QueueName(self.home(record)));
                    return Err(PageFault::new(page, format!("queued {found}, belongs {home}")));
                }
                () => {
                    in_flight += u32::from(self.state(page) == PageState::InFlight);
                    timed += usize::from(record.flags.has(Flags::TIMED));
                    continue;
                }
            };
            return Err(PageFault::new(page, fault));
        }
        if let Some(page) = self.limits.first_broken(|page| self.refs(page) > 0) {
            return Err(PageFault::new(page, "the end of its retention is noted wrongly"));
        }
        if timed != self.limits.len() {
            let what = format!("{timed} pages have a retention that ends, {} are counted", self.limits.len());
            return Err(PageFault::new(PageId::NULL, what));
        }
        let end = self.total() + self.ratio();
        if self.pages.len() > end as usize {
            return Err(PageFault::new(PageId(end), "more pages than the pool has"));
        }
        if !self.is_shared() && self.pristine() != self.total() - self.used() {
            let what = format!("{} pages are pristine, {} were used", self.pristine(), self.used());
            return Err(PageFault::new(PageId(self.used()), what));
        }
        if in_flight != self.in_flight() {
            let what = format!("{in_flight} pages are in flight, {} are counted", self.in_flight());
            return Err(PageFault::new(PageId::NULL, what));
        }
        let Some(book) = &self.book else { return Ok(()) };
        match book.first_broken(&self.pages, &self.queues, |page| self.is_evictable(page)) {
            Some((huge, what)) => {
                let page = PageId(huge.0 * book.ratio());
                Err(PageFault::new(page, format!("huge page {}: {what}", huge.0)))
            }
            None => Ok(()),
        }
    }

    /// Feeds the whole state, list orders included, to `hasher`; planning marks are left out.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        for (record, cold) in self.pages.iter().zip(self.cold.iter()) {
            let node = self.queues.is_current(record).then_some(record.node);
            (record.stamp, record.refs, cold.pins, node, record.last_use, record.priority).hash(hasher);
            (record.flags.has(Flags::REUSED), cold.published).hash(hasher);
        }
        for queue in self.queues.occupied() {
            queue.hash(hasher);
            self.queues.iter(&self.pages, queue).for_each(|page| page.hash(hasher));
        }
        self.limits.fingerprint(hasher);
        self.now.to_bits().hash(hasher);
        match &self.book {
            Some(book) => book.fingerprint(hasher),
            None => self.queues.clock().hash(hasher), // of a slab, the clock is one
        }
    }

    /// The evictable pages in the order in which [`Pool::take`] would choose them if nothing else happened
    /// (uncached ones first; pristine pages are taken between these and the cached ones).
    pub fn eviction_order(&self) -> impl Iterator<Item = PageId> + use<> {
        self.queues.order(&self.pages).into_iter()
    }
}

/// A list as a fault names it.
struct QueueName(QueueId);

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.level() {
            None => f.write_str("as uncached"),
            Some(level) if self.0.is_protected() => write!(f, "at priority {level}, protected"),
            Some(level) => write!(f, "at priority {level}"),
        }
    }
}
