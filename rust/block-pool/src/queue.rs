//! Eviction order as intrusive lists: one for pages that stand for nothing, one a priority level.
//!
//! Each list is circular around a sentinel, so that a page leaves whatever list it is in without knowing
//! which: a priority that changes while a page is queued cannot unlink it from the wrong list.

use crate::ids::{PageId, Priority};

#[cfg(test)]
mod tests;

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
    /// One sentinel a list, then one entry a page: page `p` is at `COUNT + p`.
    links: Vec<Links>,
    /// Bit `q` is set when list `q` holds a page; the lowest set bit is where the next victim is.
    occupied: u128,
    queued: u32,
}

/// Where sentinels end and pages begin.
const PAGES: u32 = QueueId::COUNT as u32;

impl EvictionQueues {
    /// Empty lists, with memory set aside for `capacity` pages.
    pub(crate) fn new(capacity: usize) -> Self {
        let mut links = Vec::with_capacity(QueueId::COUNT + capacity);
        links.extend((0..PAGES).map(|queue| Links { prev: queue, next: queue }));
        Self { links, occupied: 0, queued: 0 }
    }

    /// Knows one page more, in no list: the one after the last.
    pub(crate) fn add_page(&mut self) {
        self.links.push(Links { prev: UNLINKED, next: UNLINKED });
    }

    /// Pages in all lists.
    pub(crate) fn len(&self) -> u32 {
        self.queued
    }

    #[inline]
    pub(crate) fn contains(&self, page: PageId) -> bool {
        self.links.get(place(page) as usize).is_some_and(|links| links.next != UNLINKED)
    }

    /// Appends `page` to list `queue`: everything in the list goes before it.
    pub(crate) fn push_back(&mut self, page: PageId, queue: QueueId) {
        debug_assert!(!self.contains(page), "{page} is queued already");
        let (own, sentinel) = (place(page), u32::from(queue.0));
        let last = self.links[sentinel as usize].prev;
        self.links[own as usize] = Links { prev: last, next: sentinel };
        self.links[last as usize].next = own;
        self.links[sentinel as usize].prev = own;
        self.occupied |= 1 << queue.0;
        self.queued += 1;
    }

    /// Takes `page` out of the list it is in.
    pub(crate) fn remove(&mut self, page: PageId) {
        debug_assert!(self.contains(page), "{page} is not queued");
        let own = place(page) as usize;
        let Links { prev, next } = self.links[own];
        self.links[own] = Links { prev: UNLINKED, next: UNLINKED };
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        if prev == next {
            self.occupied &= !(1 << prev); // only a sentinel is its own neighbour
        }
        self.queued -= 1;
    }

    /// First page of the first list that is not empty.
    pub(crate) fn first(&self) -> Option<PageId> {
        (self.occupied != 0).then(|| self.links[self.occupied.trailing_zeros() as usize].next).map(page_at)
    }

    /// First page of `queue`.
    pub(crate) fn front(&self, queue: QueueId) -> Option<PageId> {
        let first = self.links[usize::from(queue.0)].next;
        (first >= PAGES).then(|| page_at(first))
    }

    /// Moves every page to the list of uncached pages, keeping the order; costs O(lists).
    pub(crate) fn merge_into_uncached(&mut self) {
        let target = u32::from(QueueId::UNCACHED.0);
        for queue in
            QueueId::all().skip(1).filter(|queue| self.occupied & (1 << queue.0) != 0).collect::<Vec<_>>()
        {
            let sentinel = u32::from(queue.0);
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
        let mut at = u32::from(queue.0);
        // Bounded, so that broken links end the walk instead of hanging it.
        (0..self.links.len()).map_while(move |_| {
            at = self.links.get(at as usize)?.next;
            (PAGES..UNLINKED).contains(&at).then(|| page_at(at))
        })
    }

    /// First page whose links disagree with its neighbours', or whose list bit is wrong.
    pub(crate) fn first_broken(&self) -> Option<(PageId, &'static str)> {
        let mut seen = 0;
        for queue in QueueId::all() {
            let sentinel = u32::from(queue.0);
            let mut before = sentinel;
            for page in self.iter(queue) {
                if self.links[place(page) as usize].prev != before {
                    return Some((page, "its list links disagree"));
                }
                before = place(page);
                seen += 1;
            }
            let last = page_at(before.max(PAGES));
            if self.links[sentinel as usize].prev != before {
                return Some((last, "the end of its list is wrong"));
            }
            if (self.occupied & (1 << queue.0) != 0) != (before != sentinel) {
                return Some((last, "its list's occupied bit is wrong"));
            }
        }
        (seen != self.queued).then_some((PageId::NULL, "the number of queued pages is wrong"))
    }
}

fn place(page: PageId) -> u32 {
    PAGES + page.0
}

fn page_at(place: u32) -> PageId {
    PageId(place - PAGES)
}
