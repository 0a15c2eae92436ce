//! Eviction order as intrusive lists: one for pages that stand for nothing, one a priority level.
//!
//! Each list is circular around a sentinel, so that a page leaves whatever list it is in without knowing
//! which: a priority that changes while a page is queued cannot unlink it from the wrong list.

use crate::ids::{PageId, Priority};

/// Marks a page that is in no list.
const UNLINKED: u32 = u32::MAX;

/// Which list a page is in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub(crate) struct QueueId(u8);

impl QueueId {
    /// Pages that are not in the prefix tree; they go before every cached page.
    pub(crate) const UNCACHED: QueueId = QueueId(0);

    pub(crate) const COUNT: usize = 1 + Priority::LEVELS;

    pub(crate) fn of(priority: Priority) -> QueueId {
        QueueId(1 + priority.level())
    }

    pub(crate) fn all() -> impl Iterator<Item = QueueId> {
        (0..Self::COUNT).map(|i| QueueId(i as u8))
    }

    /// `None` for the list of uncached pages.
    pub(crate) fn level(self) -> Option<u8> {
        self.0.checked_sub(1)
    }
}

#[derive(Clone, Copy)]
struct Links {
    prev: u32,
    next: u32,
}

/// The lists over the pages of one slab.
pub(crate) struct EvictionQueues {
    /// One entry a page, then one sentinel a list.
    links: Vec<Links>,
    pages: u32,
    /// Bit `q` is set when list `q` holds a page; the lowest set bit is where the next victim is.
    occupied: u128,
    queued: u32,
}

impl EvictionQueues {
    /// Empty lists over page ids `0 .. pages`.
    pub(crate) fn new(pages: u32) -> Self {
        let mut links = vec![Links { prev: UNLINKED, next: UNLINKED }; pages as usize];
        links.extend((0..QueueId::COUNT as u32).map(|q| Links { prev: pages + q, next: pages + q }));
        Self { links, pages, occupied: 0, queued: 0 }
    }

    /// Pages in all lists.
    pub(crate) fn len(&self) -> u32 {
        self.queued
    }

    #[inline]
    pub(crate) fn contains(&self, page: PageId) -> bool {
        self.links[page.index()].next != UNLINKED
    }

    /// Appends `page` to list `queue`: everything in the list goes before it.
    pub(crate) fn push_back(&mut self, page: PageId, queue: QueueId) {
        debug_assert!(!self.contains(page), "{page} is queued already");
        let sentinel = self.sentinel(queue);
        let last = self.links[sentinel as usize].prev;
        self.links[page.index()] = Links { prev: last, next: sentinel };
        self.links[last as usize].next = page.0;
        self.links[sentinel as usize].prev = page.0;
        self.occupied |= 1 << queue.0;
        self.queued += 1;
    }

    /// Takes `page` out of the list it is in.
    pub(crate) fn remove(&mut self, page: PageId) {
        debug_assert!(self.contains(page), "{page} is not queued");
        let Links { prev, next } = self.links[page.index()];
        self.links[page.index()] = Links { prev: UNLINKED, next: UNLINKED };
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        if prev == next {
            self.occupied &= !(1 << (prev - self.pages)); // only a sentinel is its own neighbour
        }
        self.queued -= 1;
    }

    /// First page of the first non-empty list that is at or after `from`, with its list.
    pub(crate) fn first_from(&self, from: QueueId) -> Option<(PageId, QueueId)> {
        let rest = self.occupied >> from.0;
        if rest == 0 {
            return None;
        }
        let queue = QueueId(from.0 + rest.trailing_zeros() as u8);
        Some((PageId(self.links[self.sentinel(queue) as usize].next), queue))
    }

    /// First page of `queue`.
    pub(crate) fn front(&self, queue: QueueId) -> Option<PageId> {
        let first = self.links[self.sentinel(queue) as usize].next;
        (first < self.pages).then_some(PageId(first))
    }

    /// Moves every page to the list of uncached pages, keeping the order; costs O(lists).
    pub(crate) fn merge_into_uncached(&mut self) {
        let target = self.sentinel(QueueId::UNCACHED);
        for queue in QueueId::all().skip(1).filter(|q| self.occupied & (1 << q.0) != 0).collect::<Vec<_>>() {
            let sentinel = self.sentinel(queue);
            let Links { prev: last, next: first } = self.links[sentinel as usize];
            let tail = self.links[target as usize].prev;
            self.links[tail as usize].next = first;
            self.links[first as usize].prev = tail;
            self.links[last as usize].next = target;
            self.links[target as usize].prev = last;
            self.links[sentinel as usize] = Links { prev: sentinel, next: sentinel };
        }
        self.occupied = u128::from(self.queued > 0);
    }

    /// The pages of `queue`, next victim first.
    pub(crate) fn iter(&self, queue: QueueId) -> impl Iterator<Item = PageId> + '_ {
        let sentinel = self.sentinel(queue);
        let mut at = sentinel;
        // Bounded, so that broken links end the walk instead of hanging it.
        (0..=self.pages).map_while(move |_| {
            at = self.links[at as usize].next;
            (at != sentinel && at < self.pages).then_some(PageId(at))
        })
    }

    /// First page whose links disagree with its neighbours', or whose list bit is wrong.
    pub(crate) fn first_broken(&self) -> Option<(PageId, &'static str)> {
        let mut seen = 0;
        for queue in QueueId::all() {
            let mut before = self.sentinel(queue);
            for page in self.iter(queue) {
                if self.links[page.index()].prev != before {
                    return Some((page, "its list links disagree"));
                }
                before = page.0;
                seen += 1;
            }
            if self.links[self.sentinel(queue) as usize].prev != before {
                return Some((PageId(before.min(self.pages - 1)), "the end of its list is wrong"));
            }
            if (self.occupied & (1 << queue.0) != 0) != (before != self.sentinel(queue)) {
                return Some((PageId(before.min(self.pages - 1)), "its list's occupied bit is wrong"));
            }
        }
        (seen != self.queued).then_some((PageId::NULL, "the number of queued pages is wrong"))
    }

    fn sentinel(&self, queue: QueueId) -> u32 {
        self.pages + u32::from(queue.0)
    }
}
