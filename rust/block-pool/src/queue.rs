//! Eviction order: for each priority level the pages that were never hit (on probation) and those that were
//! (protected), each in the order of release; before all levels the pages that stand for nothing.
//!
//! The order of release is kept by stamps. A released page has the newest stamp and is appended to its
//! list. A page that changes its level or segment while it is queued keeps its stamp and goes into the
//! *moved* list beside, where an index finds its place; the older of both lists' first pages goes next.
//! A page remembers the list it was put into, so that it leaves that one whatever its priority is by then.

use crate::ids::{PageId, Priority};
use crate::page::Page;
use std::collections::BTreeMap;

#[cfg(test)]
mod tests;

/// Which list a page is in: four a level, in the order probation, moved to probation, protected, moved to
/// protected. The first level is that of uncached pages, of which only the first list is used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub(crate) struct QueueId(u16);

impl QueueId {
    /// Not queued.
    pub(crate) const NONE: QueueId = QueueId(u16::MAX);
    /// Pages that are not in the prefix tree; they go before every cached page.
    pub(crate) const UNCACHED: QueueId = QueueId(0);
    const COUNT: usize = 4 * LEVELS;

    /// Where released pages of `priority` go.
    #[inline]
    pub(crate) fn of(priority: Priority, protected: bool) -> QueueId {
        QueueId(4 * (1 + u16::from(priority.level())) + 2 * u16::from(protected))
    }

    fn all() -> impl Iterator<Item = QueueId> {
        (0..Self::COUNT as u16).map(QueueId)
    }

    /// The list beside, for pages that come with an older stamp.
    fn moved(self) -> QueueId {
        QueueId(self.0 | 1)
    }

    #[inline]
    pub(crate) fn is_moved(self) -> bool {
        self.0 & 1 == 1
    }

    /// The list of the same segment that released pages go to.
    pub(crate) fn segment(self) -> QueueId {
        QueueId(self.0 & !1)
    }

    /// The priority level; `None` for the list of uncached pages.
    pub(crate) fn level(self) -> Option<u8> {
        (self.0 / 4).checked_sub(1).map(|level| level as u8)
    }

    pub(crate) fn is_protected(self) -> bool {
        self.0 & 2 == 2
    }

    fn bit(self) -> u128 {
        1 << (self.0 / 4)
    }
}

/// Uncached pages, then one a priority.
const LEVELS: usize = 1 + Priority::LEVELS;
/// So many pages on probation stand beside each protected one before that goes like them: protected pages
/// are a third of the level. On real traces of conversations a third is better than LRU at every size of the
/// pool; four fifths are worse, since most blocks that were hit once are not hit again.
const PROBATION_TO_PROTECTED: u64 = 2;
/// Neighbour of the first and of the last page of a list.
const END: PageId = PageId::NULL;

#[derive(Clone, Copy)]
struct List {
    first: PageId,
    last: PageId,
    len: u32,
}

/// Neighbours in a list.
pub(crate) struct Piece {
    pub(crate) queue: QueueId,
    pub(crate) first: PageId,
    /// What stands before the first and behind the last.
    pub(crate) prev: PageId,
    pub(crate) next: PageId,
    pub(crate) len: u32,
}

impl Piece {
    /// No page.
    pub(crate) const NONE: Piece = Piece { queue: QueueId::NONE, first: END, prev: END, next: END, len: 0 };
}

const EMPTY: List = List { first: END, last: END, len: 0 };

/// The lists over the pages of one pool.
pub(crate) struct EvictionQueues {
    lists: Box<[List; QueueId::COUNT]>,
    /// A bit a level: set when one of its lists holds a page.
    occupied: u128,
    queued: u32,
    /// The pages of the *moved* lists, in their order.
    moved: BTreeMap<(QueueId, u64), PageId>,
    /// Newest stamp.
    clock: u64,
    /// Pages stamped up to here stand for nothing, and are uncached if they are queued.
    forgotten: u64,
}

impl EvictionQueues {
    pub(crate) fn new() -> EvictionQueues {
        EvictionQueues {
            lists: Box::new([EMPTY; QueueId::COUNT]),
            occupied: 0,
            queued: 0,
            moved: BTreeMap::new(),
            clock: 0,
            forgotten: 0,
        }
    }

    /// Pages in all lists.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.queued
    }

    /// A stamp newer than all before.
    #[inline]
    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Newest stamp.
    pub(crate) fn clock(&self) -> u64 {
        self.clock
    }

    /// Stamps from now on are newer than `clock`.
    pub(crate) fn advance(&mut self, clock: u64) {
        self.clock = self.clock.max(clock);
    }

    /// Whether what the page stood for at its stamp was not forgotten since.
    #[inline]
    pub(crate) fn is_current(&self, page: &Page) -> bool {
        page.stamp > self.forgotten
    }

    /// Where `page` is queued.
    #[inline]
    pub(crate) fn queue_of(&self, page: &Page) -> QueueId {
        match page.queue {
            QueueId::NONE => QueueId::NONE,
            queue if self.is_current(page) => queue,
            _ => QueueId::UNCACHED,
        }
    }

    /// Appends `page` to `queue` with a new stamp: everything in the list goes before it.
    #[inline]
    pub(crate) fn push_back(&mut self, pages: &mut [Page], page: PageId, queue: QueueId) {
        pages[page.index()].stamp = self.tick();
        self.link(pages, page, queue, self.lists[usize::from(queue.0)].last, END);
    }

    /// Appends `page`, whatever its stamp, to those that stand for nothing.
    pub(crate) fn push_uncached(&mut self, pages: &mut [Page], page: PageId) {
        let queue = QueueId::UNCACHED;
        self.link(pages, page, queue, self.lists[usize::from(queue.0)].last, END);
    }

    /// Puts `page` into the level and segment of `queue`, where its stamp belongs.
    pub(crate) fn insert(&mut self, pages: &mut [Page], page: PageId, queue: QueueId) {
        let stamp = pages[page.index()].stamp;
        let last = self.lists[usize::from(queue.0)].last;
        if last == END || pages[last.index()].stamp < stamp {
            return self.link(pages, page, queue, last, END);
        }
        let queue = queue.moved();
        let before = self.moved.range((queue, 0)..(queue, stamp)).next_back();
        let prev = before.map_or(END, |(_, &page)| page);
        let next = match prev {
            END => self.lists[usize::from(queue.0)].first,
            prev => pages[prev.index()].next,
        };
        self.moved.insert((queue, stamp), page);
        self.link(pages, page, queue, prev, next);
    }

    #[inline]
    fn link(&mut self, pages: &mut [Page], page: PageId, queue: QueueId, prev: PageId, next: PageId) {
        let record = &mut pages[page.index()];
        debug_assert!(record.queue == QueueId::NONE, "{page} is queued already");
        (record.queue, record.prev, record.next) = (queue, prev, next);
        let list = &mut self.lists[usize::from(queue.0)];
        list.len += 1;
        if list.len == 1 {
            self.occupied |= queue.bit();
        }
        match prev {
            END => list.first = page,
            prev => pages[prev.index()].next = page,
        }
        match next {
            END => list.last = page,
            next => pages[next.index()].prev = page,
        }
        self.queued += 1;
    }

    /// Takes `page` out of the list it is in.
    #[inline]
    pub(crate) fn remove(&mut self, pages: &mut [Page], page: PageId) {
        let record = &mut pages[page.index()];
        let queue = self.queue_of(record);
        debug_assert!(queue != QueueId::NONE, "{page} is not queued");
        let Page { stamp, prev, next, .. } = *record;
        record.queue = QueueId::NONE;
        let list = &mut self.lists[usize::from(queue.0)];
        list.len -= 1;
        match prev {
            END => list.first = next,
            prev => pages[prev.index()].next = next,
        }
        match next {
            END => list.last = prev,
            next => pages[next.index()].prev = prev,
        }
        self.queued -= 1;
        self.note_if_empty(queue);
        if queue.is_moved() {
            self.moved.remove(&(queue, stamp));
        }
    }

    #[inline]
    fn note_if_empty(&mut self, queue: QueueId) {
        if self.lists[usize::from(queue.0)].len == 0 && self.level(queue).iter().all(|list| list.len == 0) {
            self.occupied &= !queue.bit();
        }
    }

    /// Takes a piece out of its list; its pages have forgotten the list already.
    #[inline]
    pub(crate) fn cut(&mut self, pages: &mut [Page], piece: &Piece) {
        if piece.len == 0 {
            return;
        }
        let Piece { queue, prev, next, len, .. } = *piece;
        let list = &mut self.lists[usize::from(queue.0)];
        list.len -= len;
        match prev {
            END => list.first = next,
            prev => pages[prev.index()].next = next,
        }
        match next {
            END => list.last = prev,
            next => pages[next.index()].prev = prev,
        }
        self.queued -= len;
        self.note_if_empty(queue);
    }

    /// Puts a piece whose pages, up to `last`, are stamped and linked to each other behind its list.
    #[inline]
    pub(crate) fn append(&mut self, pages: &mut [Page], piece: &Piece, last: PageId) {
        if piece.len == 0 {
            return;
        }
        let queue = &mut self.lists[usize::from(piece.queue.0)];
        match queue.last {
            END => queue.first = piece.first,
            before => pages[before.index()].next = piece.first,
        }
        pages[piece.first.index()].prev = queue.last;
        pages[last.index()].next = END;
        queue.last = last;
        queue.len += piece.len;
        self.queued += piece.len;
        self.occupied |= piece.queue.bit();
    }

    /// The list that all pages of the lowest occupied level are in, if they are in one.
    #[inline]
    pub(crate) fn only_list(&self) -> Option<QueueId> {
        let level = QueueId(4 * self.occupied.trailing_zeros().min(LEVELS as u32) as u16);
        let lists = (self.occupied != 0).then(|| self.level(level))?;
        let mut occupied = (0..4).filter(|&list| lists[usize::from(list)].len > 0);
        let only = QueueId(level.0 + occupied.next()?);
        occupied.next().is_none().then_some(only).filter(|only| !only.is_moved())
    }

    /// Pages in a list.
    pub(crate) fn list_len(&self, queue: QueueId) -> u32 {
        self.lists[usize::from(queue.0)].len
    }

    /// The empty piece at the front of a list.
    pub(crate) fn front(&self, queue: QueueId) -> Piece {
        Piece { queue, first: self.lists[usize::from(queue.0)].first, ..Piece::NONE }
    }

    /// Whether a page is queued that stands for nothing.
    #[inline]
    pub(crate) fn has_uncached(&self) -> bool {
        self.occupied & QueueId::UNCACHED.bit() != 0
    }

    /// Whether `page` is queued among those that stand for nothing.
    pub(crate) fn is_uncached(&self, page: &Page) -> bool {
        self.queue_of(page) == QueueId::UNCACHED
    }

    /// The page that goes next.
    #[inline]
    pub(crate) fn first(&self, pages: &[Page]) -> Option<PageId> {
        if self.occupied == 0 {
            return None;
        }
        let level = QueueId(4 * self.occupied.trailing_zeros() as u16);
        let [probation, moved_probation, protected, moved_protected] = self.level(level);
        let kept = protected.len + moved_protected.len;
        let waiting = probation.len + moved_probation.len;
        let next = older(pages, probation.first, moved_probation.first);
        if protected_are_few(kept, waiting) {
            return Some(next);
        }
        Some(older(pages, next, older(pages, protected.first, moved_protected.first)))
    }

    /// The cached pages that go next, at most `count`, without a change to any list.
    pub(crate) fn next_cached(&self, pages: &[Page], count: usize) -> Vec<PageId> {
        let mut next = Vec::with_capacity(count);
        let after = |page: PageId| pages[page.index()].next;
        let levels = (1..LEVELS as u16).map(|level| QueueId(4 * level));
        for level in levels.filter(|level| self.occupied & level.bit() != 0) {
            let lists = self.level(level);
            let mut heads = lists.map(|list| list.first);
            let [mut waiting, mut kept] = [lists[0].len + lists[1].len, lists[2].len + lists[3].len];
            while next.len() < count && waiting + kept > 0 {
                let [probation, protected] = [0, 2].map(|list| older(pages, heads[list], heads[list + 1]));
                let few = protected_are_few(kept, waiting);
                let victim = if few { probation } else { older(pages, probation, protected) };
                *(if victim == probation { &mut waiting } else { &mut kept }) -= 1;
                if let Some(head) = heads.iter_mut().find(|head| **head == victim) {
                    *head = after(victim);
                }
                next.push(victim);
            }
        }
        next
    }

    /// The four lists of a level.
    #[inline]
    fn level(&self, queue: QueueId) -> &[List; 4] {
        let (levels, _) = self.lists.as_chunks();
        &levels[usize::from(queue.0 / 4)]
    }

    /// Makes every page uncached, and what they stand for forgotten, keeping the order of lists and in
    /// them; costs O(lists), and the release of the index's memory.
    pub(crate) fn forget_all(&mut self, pages: &mut [Page]) {
        let mut all = EMPTY;
        for list in self.lists.iter_mut().filter(|list| list.len > 0) {
            let part = std::mem::replace(list, EMPTY);
            if all.len == 0 {
                all.first = part.first;
            } else {
                pages[all.last.index()].next = part.first;
                pages[part.first.index()].prev = all.last;
            }
            (all.last, all.len) = (part.last, all.len + part.len);
        }
        self.lists[usize::from(QueueId::UNCACHED.0)] = all;
        self.occupied = if all.len > 0 { QueueId::UNCACHED.bit() } else { 0 };
        self.moved.clear();
        self.forgotten = self.clock;
    }

    /// The lists that hold a page.
    pub(crate) fn occupied(&self) -> impl Iterator<Item = QueueId> {
        QueueId::all().filter(|queue| self.lists[usize::from(queue.0)].len > 0)
    }

    /// The pages of `queue`, next victim first.
    pub(crate) fn iter<'a>(
        &'a self,
        pages: &'a [Page],
        queue: QueueId,
    ) -> impl Iterator<Item = PageId> + use<'a> {
        let mut at = self.lists[usize::from(queue.0)].first;
        // Bounded, so that broken links end the walk instead of hanging it.
        (0..pages.len()).map_while(move |_| {
            let page = at;
            at = pages.get(page.index())?.next;
            (page != END).then_some(page)
        })
    }

    /// All queued pages, next victim first.
    pub(crate) fn order(&self, pages: &[Page]) -> Vec<PageId> {
        let mut order: Vec<PageId> = self.iter(pages, QueueId::UNCACHED).collect();
        let segment = |queue: QueueId| {
            let mut segment: Vec<PageId> = self.iter(pages, queue).collect();
            segment.extend(self.iter(pages, queue.moved()));
            segment.sort_by_key(|page| pages[page.index()].stamp);
            segment
        };
        let levels = (1..LEVELS as u16).map(|level| QueueId(4 * level));
        for level in levels.filter(|level| self.occupied & level.bit() != 0) {
            let (waiting, kept) = (segment(level), segment(QueueId(level.0 | 2)));
            let (mut waiting, mut kept) = (&waiting[..], &kept[..]);
            while let Some(&next) = waiting.first().or(kept.first()) {
                let few = protected_are_few(kept.len() as u32, waiting.len() as u32);
                let victim = if few { next } else { older(pages, next, kept[0]) };
                let side = if waiting.first() == Some(&victim) { &mut waiting } else { &mut kept };
                *side = &side[1..];
                order.push(victim);
            }
        }
        order
    }

    /// First page whose links disagree with its neighbours', that is out of order, or whose list is
    /// counted or indexed wrongly.
    pub(crate) fn first_broken(&self, pages: &[Page]) -> Option<(PageId, &'static str)> {
        let (mut seen, mut indexed) = (0, 0);
        for queue in QueueId::all() {
            let list = self.lists[usize::from(queue.0)];
            if list.first == END && list.last == END && list.len == 0 {
                continue; // most are
            }
            let (mut before, mut len, mut stamp) = (END, 0, 0);
            for page in self.iter(pages, queue) {
                let record = &pages[page.index()];
                if record.prev != before {
                    return Some((page, "its list links disagree"));
                }
                if self.queue_of(record) != queue {
                    return Some((page, "it is in another list than it remembers"));
                }
                if queue != QueueId::UNCACHED && record.stamp <= stamp || record.stamp > self.clock {
                    return Some((page, "it is out of the order of release"));
                }
                if queue.is_moved() && self.moved.get(&(queue, record.stamp)) != Some(&page) {
                    return Some((page, "its place in its list is not indexed"));
                }
                (before, stamp) = (page, record.stamp);
                len += 1;
                indexed += usize::from(queue.is_moved());
            }
            if list.last != before {
                return Some((before, "the end of its list is wrong"));
            }
            if list.len != len {
                return Some((before, "the length of its list is wrong"));
            }
            if len > 0 && self.occupied & queue.bit() == 0 {
                return Some((before, "its level's occupied bit is wrong"));
            }
            seen += len;
        }
        let occupied = |queue: QueueId| self.occupied & queue.bit() != 0;
        if QueueId::all().any(|queue| occupied(queue) && self.level(queue).iter().all(|list| list.len == 0)) {
            return Some((END, "the occupied bit of an empty level is wrong"));
        }
        if self.moved.len() != indexed {
            return Some((END, "the number of indexed pages is wrong"));
        }
        (seen != self.queued).then_some((END, "the number of queued pages is wrong"))
    }
}

/// Whether the next victim is on probation, with `kept` protected pages beside `waiting` ones.
#[inline]
fn protected_are_few(kept: u32, waiting: u32) -> bool {
    PROBATION_TO_PROTECTED * u64::from(kept) <= u64::from(waiting)
}

/// Whichever of two pages has the older stamp; [`END`] is no page.
#[inline]
fn older(pages: &[Page], one: PageId, other: PageId) -> PageId {
    match (one, other) {
        (one, END) => one,
        (END, other) => other,
        _ if pages[one.index()].stamp < pages[other.index()].stamp => one,
        _ => other,
    }
}
