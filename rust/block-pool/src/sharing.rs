//! What a pool does for the other groups of its slab, and what it asks of them.

use crate::huge::Rank;
use crate::ids::{NodeLink, PageId, Priority, Step};
use crate::page::{Flags, Page};
use crate::pool::{Pool, Taken};
use crate::queue::{Piece, QueueId};

impl Pool {
    /// Whether other groups have pages in the slab.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.book.is_some()
    }

    /// Pages in a huge page.
    pub(crate) fn ratio(&self) -> u32 {
        self.book.as_ref().map_or(1, |book| book.ratio())
    }

    /// Huge pages that any group of the slab may claim; none of a pool that shares with nobody.
    pub(crate) fn parked(&self) -> u32 {
        self.book.as_ref().map_or(0, |book| book.parked())
    }

    /// Pages that can be had by nobody else.
    pub(crate) fn own_room(&self) -> u32 {
        self.book.as_ref().map_or(self.available(), |book| book.idle())
    }

    /// Whether no other group could have the huge page of `page` any more if somebody held it.
    pub fn would_open(&self, page: PageId) -> bool {
        self.book.as_ref().is_some_and(|book| book.held(book.huge_of(page)) == 0)
    }

    /// Whether `huge` is the group's.
    pub(crate) fn owns(&self, huge: PageId) -> bool {
        self.book.as_ref().is_some_and(|book| book.owns(huge))
    }

    /// Takes over `huge`, and hands out up to `count` of its pages, at least one, which are all blank then. `last_use`
    /// is the last step whose forward may touch the bytes; `pristine`: nobody had it before. The group has no blank
    /// page besides.
    pub(crate) fn claim_huge(
        &mut self,
        huge: PageId,
        (last_use, pristine): (Step, bool),
        count: u32,
        priority: Priority,
        taken: &mut Vec<Taken>,
    ) {
        let Some(book) = &mut self.book else { return };
        debug_assert!(!self.queues.has_uncached(), "claimed {huge}, and blank pages are left");
        book.claim(huge);
        let inside = book.little(huge);
        let (first, len) = (PageId(huge.0 * book.ratio()), book.ratio());
        let missing = ((first.0 + len) as usize).saturating_sub(self.pages.len());
        self.add_pages(missing);
        let mut before = PageId::NULL;
        for page in inside {
            let stamp = self.queues.tick();
            let record = &mut self.pages[page.index()];
            (record.stamp, record.queue) = (stamp, QueueId::UNCACHED);
            (record.prev, record.next) = (before, PageId(page.0 + 1));
            record.last_use = last_use;
            record.flags.set(Flags::FRESH, pristine);
            before = page;
        }
        let piece = Piece { queue: QueueId::UNCACHED, first, len, ..Piece::NONE };
        self.queues.append(&mut self.pages, &piece, before);
        self.take_blank(count, priority, taken);
    }

    /// Gives up the parked `huge` and what its pages stand for. Gives the last step whose forward may touch the
    /// bytes.
    pub(crate) fn give_up_huge(&mut self, huge: PageId, mut lost: impl FnMut(PageId, NodeLink)) -> Step {
        let mut last_use = Step(0);
        let Some(book) = &mut self.book else { return last_use };
        book.give_up(huge);
        for page in book.little(huge) {
            self.queues.remove(&mut self.pages, page);
            if let Some(node) = self.node(page) {
                lost(page, node);
            }
            let record = &mut self.pages[page.index()];
            if record.flags.has(Flags::TIMED) {
                self.limits.set(page, None, None);
            }
            last_use = last_use.max(record.last_use);
            *record = Page::new(self.default_priority);
        }
        last_use
    }

    /// The parked huge page that goes first and when that is; without a time: it holds nothing cached.
    pub(crate) fn first_parked(&mut self) -> Option<(PageId, Option<Rank>)> {
        let book = self.book.as_mut()?;
        book.rank(&self.pages, &self.queues);
        book.first()
    }

    /// Hands out up to `count` pages that stand for nothing.
    pub(crate) fn take_blank(&mut self, count: u32, priority: Priority, taken: &mut Vec<Taken>) {
        if self.queues.has_uncached() {
            self.take_front(QueueId::UNCACHED, count as usize, priority, taken);
        }
    }

    /// Hands out up to `count` cached pages, as long as they go before `bound`.
    pub(crate) fn take_before(
        &mut self,
        bound: Option<Rank>,
        count: u32,
        priority: Priority,
        taken: &mut Vec<Taken>,
    ) {
        let Some(bound) = bound else {
            self.take_many(count.min(self.queues.len()), priority, taken);
            return;
        };
        let end = taken.len() + count as usize;
        while taken.len() < end {
            let Some(first) = self.queues.first(&self.pages) else { return };
            let rank = |page: PageId| (self.pages[page.index()].priority, self.pages[page.index()].stamp);
            if rank(first) > bound {
                return;
            }
            if let Some(queue) = self.queues.only_list() {
                let order = self.queues.iter(&self.pages, queue).take(end - taken.len());
                let before = order.take_while(|&page| rank(page) < bound).count();
                self.take_front(queue, before, priority, taken);
            } else {
                let page = self.take_page(first, priority);
                taken.push(page);
            }
        }
    }

    /// Hands out `count` pages of huge pages that are not parked, in the order of eviction; there are as many.
    pub(crate) fn take_in_use(&mut self, count: u32, priority: Priority, taken: &mut Vec<Taken>) {
        let Some(book) = &self.book else { return };
        if book.parked() == 0 {
            self.take_many(count, priority, taken);
            return;
        }
        // No more than the pages of the parked ones are passed over.
        let most = (count + book.parked() * book.ratio()) as usize;
        let blank = self.queues.iter(&self.pages, QueueId::UNCACHED).take(most);
        let order = blank.chain(self.queues.next_cached(&self.pages, most));
        let in_use = |page: &PageId| book.held(book.huge_of(*page)) > 0;
        let victims: Vec<PageId> = order.filter(in_use).take(count as usize).collect();
        for page in victims {
            let page = self.take_page(page, priority);
            taken.push(page);
        }
    }
}
