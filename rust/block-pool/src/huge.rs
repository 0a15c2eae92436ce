//! The huge pages of a shared slab, as one of its groups sees them.
//!
//! A huge page is booked as a page whose holders are those of its little pages that are not idle. One that
//! has none is *parked*: it waits in eviction queues of its own, at the highest priority and with the newest
//! stamp of the cached pages inside, until another group takes the bytes. It gets its place there only when
//! somebody asks for a victim, so that references come and go at the price of a counter.

use crate::ids::{PageId, Priority};
use crate::page::{Flags, NO_NODE, Page};
use crate::queue::{EvictionQueues, QueueId};
use memory::Array;
use std::hash::{Hash, Hasher};
use std::ops::Range;

#[cfg(test)]
mod tests;

/// The group claimed the huge page.
const OWNED: Flags = Flags(1);
/// The huge page is on the list of those that may have been parked without a place in the queues.
const UNRANKED: Flags = Flags(2);

/// When a cached page, or the best of a huge page's, goes: the lower priority first, then the older stamp.
pub(crate) type Rank = (Priority, u64);

/// What a group knows of the huge pages of its slab.
pub(crate) struct HugeBook {
    /// Little pages in a huge page.
    ratio: u32,
    /// By number, the null huge page first; as many as it takes to have all that the group ever claimed.
    records: Array<Page>,
    /// The parked huge pages that have a place; those without a cached page are the uncached ones.
    queues: EvictionQueues,
    /// The others, and some that are not parked any more.
    unranked: Vec<PageId>,
    parked: u32,
    /// Idle pages in huge pages that are not parked.
    idle: u32,
    /// Huge pages that the group has.
    owned: u32,
}

impl HugeBook {
    /// The book of a group that has claimed none of `huge_pages`.
    pub(crate) fn new(huge_pages: u32, ratio: u32) -> HugeBook {
        HugeBook {
            ratio,
            records: Array::with_capacity((huge_pages as usize + 1).min(1 << 24)),
            queues: EvictionQueues::new(),
            unranked: Vec::new(),
            parked: 0,
            idle: 0,
            owned: 0,
        }
    }

    /// Little pages in a huge page.
    pub(crate) fn ratio(&self) -> u32 {
        self.ratio
    }

    /// Huge pages of the group in which every page is idle.
    pub(crate) fn parked(&self) -> u32 {
        self.parked
    }

    /// Pages in the group's huge pages.
    pub(crate) fn there(&self) -> u32 {
        self.owned * self.ratio
    }

    /// The last huge page that the group ever claimed; the null one if it claimed none.
    pub(crate) fn last(&self) -> PageId {
        PageId((self.records.len() as u32).saturating_sub(1))
    }

    /// Idle pages in the group's other huge pages: nobody else can have them.
    pub(crate) fn idle(&self) -> u32 {
        self.idle
    }

    /// The huge page that `page` lies in.
    #[inline]
    pub(crate) fn huge_of(&self, page: PageId) -> PageId {
        PageId(page.0 / self.ratio)
    }

    /// The pages in `huge`.
    pub(crate) fn little(&self, huge: PageId) -> impl Iterator<Item = PageId> + use<> {
        self.numbers(huge).map(PageId)
    }

    fn numbers(&self, huge: PageId) -> Range<u32> {
        huge.0 * self.ratio..(huge.0 + 1) * self.ratio
    }

    /// Pages in `huge` that are not idle: all of them while another group has it.
    pub(crate) fn held(&self, huge: PageId) -> u32 {
        self.records.get(huge.index()).map_or(self.ratio, |record| record.refs)
    }

    /// Whether the group claimed `huge`.
    pub(crate) fn owns(&self, huge: PageId) -> bool {
        self.records.get(huge.index()).is_some_and(|record| record.flags.has(OWNED))
    }

    /// The group has `huge` now, and all of its pages are idle. The caller takes one at once: it gets no place.
    pub(crate) fn claim(&mut self, huge: PageId) {
        let missing = (huge.index() + 1).saturating_sub(self.records.len());
        self.records.extend_by(missing, Page { refs: self.ratio, ..Page::new(Priority::LOWEST) });
        let record = &mut self.records[huge.index()];
        record.flags.set(OWNED, true);
        record.refs = 0;
        self.parked += 1;
        self.owned += 1;
    }

    /// The group has the parked `huge` no more: its pages are others'.
    pub(crate) fn give_up(&mut self, huge: PageId) {
        self.left(huge, self.ratio);
        self.records[huge.index()].flags.set(OWNED, false);
        self.owned -= 1;
    }

    /// `page` is idle no more. Not inlined, like [`HugeBook::enter`]: who shares nothing goes past with a jump.
    #[inline(never)]
    pub(crate) fn leave(&mut self, page: PageId) {
        self.left(self.huge_of(page), 1);
    }

    /// `page` is idle now.
    #[inline(never)]
    pub(crate) fn enter(&mut self, page: PageId) {
        self.entered(self.huge_of(page), 1);
    }

    /// [`HugeBook::leave`] of pages, of which neighbours often lie in one huge page.
    #[inline(never)]
    pub(crate) fn leave_all(&mut self, pages: impl Iterator<Item = PageId>) {
        self.runs(pages, HugeBook::left);
    }

    /// [`HugeBook::enter`] of pages.
    #[inline(never)]
    pub(crate) fn enter_all(&mut self, pages: impl Iterator<Item = PageId>) {
        self.runs(pages, HugeBook::entered);
    }

    fn runs(&mut self, pages: impl Iterator<Item = PageId>, note: impl Fn(&mut HugeBook, PageId, u32)) {
        let (mut huge, mut inside, mut count) = (PageId::NULL, 0..0, 0);
        for page in pages {
            if !inside.contains(&page.0) {
                note(self, huge, count);
                huge = self.huge_of(page);
                (inside, count) = (self.numbers(huge), 0);
            }
            count += 1;
        }
        note(self, huge, count);
    }

    fn left(&mut self, huge: PageId, count: u32) {
        if count == 0 {
            return;
        }
        let record = &mut self.records[huge.index()];
        record.refs += count;
        if record.refs > count {
            self.idle -= count;
            return;
        }
        self.parked -= 1;
        self.idle += self.ratio - count;
        if record.queue != QueueId::NONE {
            self.queues.remove(&mut self.records, huge);
        }
    }

    fn entered(&mut self, huge: PageId, count: u32) {
        if count == 0 {
            return;
        }
        let record = &mut self.records[huge.index()];
        record.refs -= count;
        if record.refs > 0 {
            self.idle += count;
            return;
        }
        self.parked += 1;
        self.idle -= self.ratio - count;
        if !record.flags.has(UNRANKED) {
            record.flags.set(UNRANKED, true);
            self.unranked.push(huge);
        }
    }

    /// Gives every parked huge page its place. `pages` are the group's, `queues` theirs.
    pub(crate) fn rank(&mut self, pages: &[Page], queues: &EvictionQueues) {
        if self.unranked.is_empty() {
            return;
        }
        self.queues.advance(queues.clock());
        let mut unranked = std::mem::take(&mut self.unranked);
        unranked.retain(|&huge| {
            let rank = self.rank_of(huge, pages, queues);
            let record = &mut self.records[huge.index()];
            record.flags.set(UNRANKED, false);
            (record.priority, record.stamp) = rank.unwrap_or((Priority::LOWEST, 0));
            record.refs == 0
        });
        // In the order of release, in which places are found without a search.
        unranked.sort_unstable_by_key(|&huge| (self.records[huge.index()].stamp, huge));
        for huge in unranked.drain(..) {
            match self.records[huge.index()] {
                Page { stamp: 0, .. } => self.queues.push_uncached(&mut self.records, huge),
                Page { priority, .. } => {
                    self.queues.insert(&mut self.records, huge, QueueId::of(priority, false));
                }
            }
        }
        self.unranked = unranked;
    }

    /// Highest priority and newest stamp of the cached pages in `huge`.
    fn rank_of(&self, huge: PageId, pages: &[Page], queues: &EvictionQueues) -> Option<Rank> {
        let inside = self.numbers(huge);
        let cached = (pages[inside.start as usize..inside.end as usize].iter())
            .filter(|page| page.node != NO_NODE && queues.is_current(page));
        cached.fold(None, |rank, page| {
            let (priority, stamp) = rank.unwrap_or((page.priority, page.stamp));
            Some((priority.max(page.priority), stamp.max(page.stamp)))
        })
    }

    /// The parked huge page that goes first, and when that is; without a time: it has no cached page. All have
    /// their places ([`HugeBook::rank`]).
    pub(crate) fn first(&self) -> Option<(PageId, Option<Rank>)> {
        let huge = self.queues.first(&self.records)?;
        let record = &self.records[huge.index()];
        let cached = !self.queues.has_uncached();
        Some((huge, cached.then_some((record.priority, record.stamp))))
    }

    /// Forgets what the group's pages stand for; `clock` is the newest stamp of any.
    pub(crate) fn forget_all(&mut self, clock: u64) {
        self.queues.advance(clock);
        self.queues.forget_all(&mut self.records);
    }

    /// First huge page that is booked wrongly, and how. `idle` says whether a page is.
    pub(crate) fn first_broken(
        &self,
        pages: &[Page],
        queues: &EvictionQueues,
        idle: impl Fn(PageId) -> bool,
    ) -> Option<(PageId, String)> {
        if let Some((huge, what)) = self.queues.first_broken(&self.records) {
            return Some((huge, what.to_owned()));
        }
        let mut listed = vec![0; self.records.len()];
        self.unranked.iter().for_each(|huge| listed[huge.index()] += 1);
        let (mut waiting, mut spare, mut owned) = (0, 0, 0);
        for huge in (0..self.records.len() as u32).map(PageId) {
            let record = &self.records[huge.index()];
            let unranked = listed[huge.index()];
            if unranked != u32::from(record.flags.has(UNRANKED)) {
                return Some((huge, format!("it is listed {unranked} times to be ranked")));
            }
            let free = self.little(huge).filter(|&page| idle(page)).count() as u32;
            if record.refs != self.ratio - free {
                let held = self.ratio - free;
                return Some((huge, format!("{held} of its pages are in use, {} are counted", record.refs)));
            }
            let placed = record.queue != QueueId::NONE;
            let parked = record.refs == 0;
            if placed && !parked || parked && placed == (unranked > 0) {
                return Some((huge, "its place among the parked ones is wrong".into()));
            }
            let at = (!self.queues.is_uncached(record)).then_some((record.priority, record.stamp));
            if placed && at != self.rank_of(huge, pages, queues) {
                return Some((huge, "it is parked at a wrong place".into()));
            }
            waiting += u32::from(parked);
            owned += u32::from(record.flags.has(OWNED));
            spare += if parked { 0 } else { free };
        }
        let counted = (self.parked, self.idle, self.owned);
        (counted != (waiting, spare, owned)).then(|| {
            let what = format!(
                "{waiting} of {owned} are parked, {spare} pages idle in others; counted are {counted:?}"
            );
            (PageId::NULL, what)
        })
    }

    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        self.records.iter().for_each(|record| (record.flags.has(OWNED), record.refs).hash(hasher));
        self.unranked.hash(hasher);
        for queue in self.queues.occupied() {
            self.queues.iter(&self.records, queue).for_each(|huge| huge.hash(hasher));
        }
    }
}
