//! Many pages at once: what a request hits, takes and gives back usually lies in one piece of a list, and is
//! cut out of it or put into it as one.

use crate::ids::{PageId, Priority, Step};
use crate::page::Flags;
use crate::pool::{Pool, Taken};
use crate::queue::{Piece, QueueId};
use memory::AHEAD;

impl Pool {
    /// Hands out `count` pages as [`Pool::take`] does and appends them to `taken`, or none at all when
    /// fewer are available: false then. The caller looks at what they stood for afterwards: these memory
    /// accesses do not wait for each other, as they would between one take and the next.
    pub fn take_many(&mut self, count: u32, priority: Priority, taken: &mut Vec<Taken>) -> bool {
        if count > self.available() {
            return false;
        }
        taken.reserve(count as usize);
        let all = taken.len() + count as usize;
        while taken.len() < all {
            match self.queues.only_list() {
                Some(queue) if queue == QueueId::UNCACHED || self.pristine() == 0 => {
                    self.take_front(queue, all - taken.len(), priority, taken);
                }
                _ => match self.take(priority) {
                    Some(page) => taken.push(page),
                    None => return false, // the counts are wrong
                },
            }
        }
        true
    }

    /// Takes up to `count` pages from the front of `queue`, whose pages all go before any other.
    pub(crate) fn take_front(
        &mut self,
        queue: QueueId,
        count: usize,
        priority: Priority,
        taken: &mut Vec<Taken>,
    ) {
        let mut piece = self.queues.front(queue);
        let mut page = piece.first;
        let count = count.min(self.queues.list_len(queue) as usize);
        let before = taken.len();
        for _ in 0..count {
            let evicted = self.node(page);
            let record = &mut self.pages[page.index()];
            taken.push(Taken { page, evicted, pristine: record.flags.has(Flags::FRESH) });
            if record.flags.has(Flags::TIMED) {
                self.limits.set(page, None, None);
            }
            record.hand_out(priority);
            record.queue = QueueId::NONE;
            page = record.next;
        }
        piece.len = count as u32;
        piece.next = page;
        self.queues.cut(&mut self.pages, &piece);
        if let Some(book) = &mut self.book {
            book.leave_all(taken[before..].iter().map(|taken| taken.page));
        }
    }

    /// [`Pool::acquire`] of pages that a request found, in the order of its blocks: they count as reused.
    /// Gives the last use of each that nobody held to `waited`.
    pub fn reuse_all(&mut self, mut pages: &[PageId], mut waited: impl FnMut(Step)) {
        while let Some((&page, rest)) = pages.split_first() {
            let record = &self.pages[page.index()];
            let plain = record.refs == 0
                && !record.flags.any(Flags::TIMED, Flags::PINNED)
                && !record.queue.is_moved();
            if plain {
                pages = self.reuse_piece(pages, &mut waited);
                continue;
            }
            if record.refs == 0 {
                waited(record.last_use);
            }
            self.acquire(page);
            self.pages[page.index()].flags.set(Flags::REUSED, true);
            pages = rest;
        }
    }

    /// Cuts the first of `pages` out of its list, and those that stand before each other there: released from
    /// the tail to the head, blocks lie in their list in reverse. Gives the rest.
    fn reuse_piece<'a>(&mut self, pages: &'a [PageId], waited: &mut impl FnMut(Step)) -> &'a [PageId] {
        let last = &self.pages[pages[0].index()];
        let (queue, next) = (last.queue, last.next);
        let (mut first, mut prev) = (next, pages[0]);
        let mut len = 0;
        for &page in pages {
            if let Some(later) = pages.get(len + AHEAD) {
                memory::prefetch(&self.pages[0], later.index());
            }
            let record = &mut self.pages[page.index()];
            if page != prev || record.flags.has(Flags::TIMED) {
                break;
            }
            debug_assert!(record.queue == queue && record.refs == 0, "{page} is not in its list");
            waited(record.last_use);
            (first, prev) = (page, record.prev);
            len += 1;
            record.refs = 1;
            record.queue = QueueId::NONE;
            record.flags.set(Flags::REUSED, true);
        }
        self.queues.cut(&mut self.pages, &Piece { queue, first, prev, next, len: len as u32 });
        if let Some(book) = &mut self.book {
            book.leave_all(pages[..len].iter().copied());
        }
        &pages[len..]
    }

    /// [`Pool::release`] of pages, in the order in which they are to go.
    pub fn release_all(&mut self, pages: impl IntoIterator<Item = PageId>, last_use: Step) {
        let mut piece = Piece::NONE;
        let mut last = PageId::NULL;
        for page in pages {
            let record = &self.pages[page.index()];
            debug_assert!(record.refs > 0, "{page} is not referenced");
            let plain = record.refs == 1 && !record.flags.any(Flags::TIMED, Flags::PINNED);
            let queue = if plain { self.home(record) } else { QueueId::NONE };
            if queue != piece.queue {
                self.append(&piece, last);
                piece = Piece::NONE;
            }
            if !plain {
                self.release(page, last_use);
                continue;
            }
            let stamp = self.queues.tick();
            let prev = if piece.len == 0 {
                piece = Piece { queue, first: page, ..Piece::NONE };
                PageId::NULL // linked when the piece is appended
            } else {
                self.pages[last.index()].next = page;
                last
            };
            let record = &mut self.pages[page.index()];
            record.refs = 0;
            record.last_use = record.last_use.max(last_use);
            if queue == QueueId::UNCACHED {
                record.forget();
            }
            (record.stamp, record.queue, record.prev) = (stamp, queue, prev);
            piece.len += 1;
            last = page;
        }
        self.append(&piece, last);
    }

    /// Puts a piece of released pages behind its list.
    #[inline]
    fn append(&mut self, piece: &Piece, last: PageId) {
        self.queues.append(&mut self.pages, piece, last);
        if let Some(book) = &mut self.book {
            let next = |page: &PageId| Some(self.pages[page.index()].next);
            book.enter_all(std::iter::successors(Some(piece.first), next).take(piece.len as usize));
        }
    }
}
