//! A pool: pages, their references and pins, and the verbs that move them between states.

use crate::huge::HugeBook;
use crate::ids::{NodeLink, PageId, Priority, Step};
use crate::page::{ColdPage, Flags, NO_NODE, Page};
use crate::policy::EvictionPolicy;
use crate::queue::{EvictionQueues, QueueId};
use crate::retention::Limits;
use memory::Array;

/// Where a page is in its life; see the crate's diagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageState {
    /// Never handed out.
    Pristine,
    /// Held by a sequence or a pin.
    Referenced,
    /// Held by nobody, waiting in an eviction list.
    Evictable,
    /// Held by a transfer and nothing else.
    InFlight,
}

/// A page that [`Pool::take`] hands out, referenced once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// The page.
    pub page: PageId,
    /// What it stood for until now: the caller must drop this record.
    pub evicted: Option<NodeLink>,
    /// Whether it had never been handed out before.
    pub pristine: bool,
}

/// What there is to hand out, see [`Pool::next`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// A page that stands for nothing.
    Free,
    /// A cached page of this priority, the lowest there is.
    Cached(Priority),
}

/// The pages of one group, all of one size. Page 0 is the null page.
pub struct Pool {
    /// The null page and every page that was ever handed out: memory follows use.
    pub(crate) pages: Array<Page>,
    pub(crate) cold: Array<ColdPage>,
    pub(crate) queues: EvictionQueues,
    pub(crate) limits: Limits,
    /// The huge pages, where groups share a slab.
    pub(crate) book: Option<Box<HugeBook>>,
    policy: EvictionPolicy,
    pub(crate) default_priority: Priority,
    total: u32,
    pristine: u32,
    marks: u32,
    in_flight: u32,
    /// Latest time that was told, in seconds.
    pub(crate) now: f64,
}

impl Pool {
    /// Largest number of usable pages: ids fit an int32.
    pub const MAX_PAGES: u32 = i32::MAX.cast_unsigned();

    /// A pool of `usable` pages (ids `1 ..= usable`) and the null page. Pages whose retention ends fall
    /// back to `default_priority`.
    ///
    /// # Panics
    /// If `usable` is over [`Pool::MAX_PAGES`].
    pub fn new(usable: u32, policy: EvictionPolicy, default_priority: Priority) -> Pool {
        let mut pool = Pool::with(usable, policy, default_priority, None);
        pool.pristine = usable;
        pool
    }

    /// The pool of one of the groups of a shared slab: it can hand out what lies in huge pages that the group
    /// has claimed. The pages of the null huge page, and the null page first, have the least ids.
    pub(crate) fn shared(
        huge_pages: u32,
        ratio: u32,
        policy: EvictionPolicy,
        default_priority: Priority,
    ) -> Pool {
        let book = Box::new(HugeBook::new(huge_pages, ratio));
        Pool::with(huge_pages * ratio, policy, default_priority, Some(book))
    }

    fn with(
        total: u32,
        policy: EvictionPolicy,
        default_priority: Priority,
        book: Option<Box<HugeBook>>,
    ) -> Pool {
        assert!(total <= Self::MAX_PAGES, "{total} pages are more than a pool can number");
        // Address space for the pages of any real pool: records do not move while it fills.
        let capacity = (total as usize + 1).min(1 << 24);
        let mut pool = Pool {
            pages: Array::with_capacity(capacity),
            cold: Array::with_capacity(capacity),
            queues: EvictionQueues::new(),
            limits: Limits::default(),
            book,
            policy,
            default_priority,
            total,
            pristine: 0,
            marks: 0,
            in_flight: 0,
            now: 0.0,
        };
        pool.add_pages(1);
        pool
    }

    /// Adds records; gives the first page.
    #[inline]
    pub(crate) fn add_pages(&mut self, count: usize) -> PageId {
        let page = PageId(self.pages.len() as u32);
        self.pages.extend_by(count, Page::new(self.default_priority));
        self.cold.extend_by(count, ColdPage::default());
        page
    }

    /// Usable pages, the null page not counted; of a shared slab, those there are if no other group has any.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Pages that [`Pool::take`] can hand out now: never used or evictable. Of a shared slab there may be more
    /// to be had ([`Pools::available`](crate::Pools::available)).
    pub fn available(&self) -> u32 {
        self.pristine + self.queues.len()
    }

    /// Pages never handed out: those with the greatest ids. None of a shared slab, where nobody's pages are this
    /// group's yet.
    pub fn pristine(&self) -> u32 {
        self.pristine
    }

    /// No page with a greater id was ever handed out; and unless groups share the slab, all pages `1 ..= used` were.
    pub fn used(&self) -> u32 {
        self.pages.len() as u32 - 1
    }

    /// Pages waiting in an eviction list, cached or not.
    pub fn evictable(&self) -> u32 {
        self.queues.len()
    }

    /// Pages that sequences, pins or transfers hold.
    pub fn held(&self) -> u32 {
        let there = self.book.as_ref().map_or(self.total - self.pristine, |book| book.there());
        there - self.queues.len()
    }

    /// Pages held by transfers alone.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Where `page` is in its life.
    pub fn state(&self, page: PageId) -> PageState {
        match self.pages.get(page.index()) {
            Some(record) if record.refs > 0 => PageState::Referenced,
            Some(record) if record.flags.has(Flags::PINNED) => PageState::InFlight,
            Some(record) if record.queue != QueueId::NONE => PageState::Evictable,
            _ => PageState::Pristine,
        }
    }

    /// Sequences and user pins that hold `page`.
    #[inline]
    pub fn refs(&self, page: PageId) -> u32 {
        self.pages.get(page.index()).map_or(0, |record| record.refs)
    }

    /// Transfers that touch `page`.
    pub fn pins(&self, page: PageId) -> u32 {
        self.cold.get(page.index()).map_or(0, |record| record.pins)
    }

    /// Whether one sequence or pin holds `page`, and no transfer touches it: it can be had when that lets go.
    #[inline]
    pub fn is_unshared(&self, page: PageId) -> bool {
        self.refs(page) == 1 && self.pins(page) == 0
    }

    /// Whether nobody holds `page` and it waits in an eviction list.
    #[inline]
    pub fn is_evictable(&self, page: PageId) -> bool {
        self.pages.get(page.index()).is_some_and(|record| record.queue != QueueId::NONE)
    }

    /// Last step whose forward may touch `page`: a mover waits for its fence.
    pub fn last_use(&self, page: PageId) -> Step {
        self.pages.get(page.index()).map_or(Step(0), |record| record.last_use)
    }

    /// The `last_use` that `page` was last published with; it outlives what the page stood for.
    #[inline]
    pub fn published(&self, page: PageId) -> Step {
        self.cold.get(page.index()).map_or(Step(0), |cold| cold.published)
    }

    /// What `page` stands for in the prefix tree.
    #[inline]
    pub fn node(&self, page: PageId) -> Option<NodeLink> {
        let record = self.pages.get(page.index())?;
        self.is_cached(record).then_some(NodeLink(record.node))
    }

    #[inline]
    fn is_cached(&self, record: &Page) -> bool {
        record.node != NO_NODE && self.queues.is_current(record)
    }

    /// What [`Pool::take`] would hand out; `None` when every page is held.
    pub fn next(&self) -> Option<Next> {
        if self.queues.has_uncached() || self.pristine() > 0 {
            return Some(Next::Free);
        }
        self.queues.first(&self.pages).map(|page| Next::Cached(self.priority(page)))
    }

    /// Hands out a page, referenced once: an uncached one, else a pristine one, else the cached page of
    /// the lowest priority that the policy chooses. `None` when every page is held.
    #[inline]
    pub fn take(&mut self, priority: Priority) -> Option<Taken> {
        if self.pristine > 0 && !self.queues.has_uncached() {
            self.pristine -= 1;
            let page = self.add_pages(1);
            self.pages[page.index()].hand_out(priority);
            return Some(Taken { page, evicted: None, pristine: true });
        }
        let page = self.queues.first(&self.pages)?;
        Some(self.take_page(page, priority))
    }

    /// Hands out an evictable page.
    #[inline]
    pub(crate) fn take_page(&mut self, page: PageId, priority: Priority) -> Taken {
        self.dequeue(page);
        let evicted = self.node(page);
        let record = &mut self.pages[page.index()];
        if record.flags.has(Flags::TIMED) {
            self.limits.set(page, None, None);
        }
        let pristine = record.flags.has(Flags::FRESH);
        record.hand_out(priority);
        Taken { page, evicted, pristine }
    }

    /// One more reference to a page that is referenced, evictable or in flight (a prefix hit).
    #[inline]
    pub fn acquire(&mut self, page: PageId) {
        let record = &mut self.pages[page.index()];
        record.refs += 1;
        if record.refs > 1 {
            return;
        }
        if record.flags.has(Flags::TIMED) {
            self.limits.released(page, None);
        }
        if record.flags.has(Flags::PINNED) {
            self.in_flight -= 1;
        } else {
            self.dequeue(page);
        }
    }

    /// One reference less. The last one leaves the page evictable, or in flight while a transfer touches
    /// it. `last_use` is the last step whose forward the former holder took part in.
    #[inline]
    pub fn release(&mut self, page: PageId, last_use: Step) {
        let record = &mut self.pages[page.index()];
        debug_assert!(record.refs > 0, "{page} is not referenced");
        record.refs -= 1;
        record.last_use = record.last_use.max(last_use);
        if record.refs > 0 {
            return;
        }
        if record.flags.has(Flags::TIMED) {
            self.limits.released(page, Some(self.now));
        }
        if record.flags.has(Flags::PINNED) {
            self.in_flight += 1;
            self.stamp(page);
        } else {
            self.enqueue(page);
        }
    }

    /// A transfer begins to touch `page`, which is referenced, evictable or in flight.
    pub fn pin(&mut self, page: PageId) {
        let cold = &mut self.cold[page.index()];
        cold.pins += 1;
        let record = &mut self.pages[page.index()];
        record.flags.set(Flags::PINNED, true);
        if record.refs == 0 && cold.pins == 1 {
            self.dequeue(page);
            self.in_flight += 1;
        }
    }

    /// A transfer no longer touches `page`. True when this made the page evictable.
    pub fn unpin(&mut self, page: PageId) -> bool {
        let cold = &mut self.cold[page.index()];
        debug_assert!(cold.pins > 0, "{page} is not pinned");
        cold.pins -= 1;
        if cold.pins > 0 {
            return false;
        }
        let record = &mut self.pages[page.index()];
        record.flags.set(Flags::PINNED, false);
        let idle = record.refs == 0;
        if idle {
            self.in_flight -= 1;
            self.enqueue(page);
        }
        idle
    }

    /// [`Pool::unpin`] that leaves the page's place in the order of release as it was.
    pub fn unpin_in_place(&mut self, page: PageId) {
        let stamp = self.pages[page.index()].stamp;
        if self.unpin(page) && self.is_cached(&self.pages[page.index()]) {
            self.queues.remove(&mut self.pages, page);
            self.pages[page.index()].stamp = stamp;
            let home = self.home(&self.pages[page.index()]);
            self.queues.insert(&mut self.pages, page, home);
        }
    }

    /// Counts a hit of what `page` stands for; gives how many were counted.
    pub fn count_hit(&mut self, page: PageId) -> u32 {
        let hits = &mut self.cold[page.index()].hits;
        *hits = hits.saturating_add(1);
        *hits
    }

    /// The cached pages that [`Pool::take`] would hand out next, at most `count`, after all that stand for
    /// nothing.
    pub fn victims(&self, count: usize) -> Vec<PageId> {
        self.queues.next_cached(&self.pages, count)
    }

    /// Whether what `page` stands for was offered to another tier; notes that it is, or is not.
    pub fn set_offered(&mut self, page: PageId, offered: bool) -> bool {
        let flags = &mut self.pages[page.index()].flags;
        let before = flags.has(Flags::OFFERED);
        flags.set(Flags::OFFERED, offered);
        before
    }

    /// The referenced, uncached `page` now stands for `node`. `last_use` is the last step whose forward
    /// may write it: whoever shares the page from now on did not take part in that step.
    #[inline]
    pub fn publish(&mut self, page: PageId, node: NodeLink, last_use: Step) {
        debug_assert!(self.node(page).is_none(), "{page} stands for a node already");
        debug_assert!(!self.is_evictable(page), "{page} is held by nobody");
        let record = &mut self.pages[page.index()];
        record.node = node.0;
        record.stamp = self.queues.tick();
        record.last_use = record.last_use.max(last_use);
        record.flags.set(Flags::REUSED, false);
        record.flags.set(Flags::OFFERED, false);
        let cold = &mut self.cold[page.index()];
        (cold.published, cold.hits) = (last_use, 0);
    }

    /// `page` stands for nothing any more; when it is evictable it goes before every cached page.
    pub fn withdraw(&mut self, page: PageId) {
        self.pages[page.index()].forget();
        if self.is_evictable(page) {
            self.dequeue(page);
            self.enqueue(page);
        }
    }

    /// Notes that a request hit `page` while it stands for its node; true if none had before.
    #[inline]
    pub fn mark_reused(&mut self, page: PageId) -> bool {
        debug_assert!(self.node(page).is_some(), "{page} stands for nothing");
        let first = !self.pages[page.index()].flags.has(Flags::REUSED);
        if first {
            self.pages[page.index()].flags.set(Flags::REUSED, true);
            self.requeue(page);
        }
        first
    }

    /// Whether a request hit `page` since it stands for its node: for tests.
    pub fn is_reused(&self, page: PageId) -> bool {
        self.pages.get(page.index()).is_some_and(|it| self.is_cached(it) && it.flags.has(Flags::REUSED))
    }

    /// Retention priority of `page`.
    pub fn priority(&self, page: PageId) -> Priority {
        self.pages.get(page.index()).map_or(self.default_priority, |record| record.priority)
    }

    /// Counts `page`, if nobody holds it but transfers, as released just now.
    pub fn refresh(&mut self, page: PageId) {
        let Some(record) = self.pages.get(page.index()).filter(|record| record.refs == 0) else { return };
        if record.queue != QueueId::NONE {
            self.dequeue(page);
            self.limits.released(page, Some(self.now));
            self.enqueue(page);
        } else if record.flags.has(Flags::PINNED) {
            self.limits.released(page, Some(self.now));
            self.stamp(page);
        }
    }

    /// Forgets what every page stands for; evictable pages are all uncached afterwards. Cost does not
    /// grow with the number of pages, but for those that changed their level while they waited: the index
    /// of their places is freed.
    pub fn forget_all(&mut self) {
        self.queues.forget_all(&mut self.pages);
        if let Some(book) = &mut self.book {
            book.forget_all(self.queues.clock());
        }
    }

    /// Opens a planning pass: no page is marked in it.
    pub fn open_marks(&mut self) {
        self.marks = self.marks.wrapping_add(1);
        if self.marks == 0 {
            self.cold.iter_mut().for_each(|page| page.mark = 0);
            self.marks = 1;
        }
    }

    /// Marks `page` in the open planning pass; true the first time.
    #[inline]
    pub fn mark(&mut self, page: PageId) -> bool {
        let record = &mut self.cold[page.index()];
        let first = record.mark != self.marks;
        record.mark = self.marks;
        first
    }

    /// Whether `page` was marked in the open planning pass.
    #[inline]
    pub fn is_marked(&self, page: PageId) -> bool {
        self.cold[page.index()].mark == self.marks
    }

    /// Counts a page that a transfer holds as released just now.
    fn stamp(&mut self, page: PageId) {
        if !self.is_cached(&self.pages[page.index()]) {
            self.pages[page.index()].forget();
        }
        self.pages[page.index()].stamp = self.queues.tick();
    }

    #[inline]
    pub(crate) fn enqueue(&mut self, page: PageId) {
        let queue = self.home(&self.pages[page.index()]);
        if queue == QueueId::UNCACHED {
            self.pages[page.index()].forget();
        }
        self.queues.push_back(&mut self.pages, page, queue);
        if let Some(book) = &mut self.book {
            book.enter(page);
        }
    }

    /// Takes `page` out of the list it is in.
    #[inline]
    pub(crate) fn dequeue(&mut self, page: PageId) {
        self.queues.remove(&mut self.pages, page);
        if let Some(book) = &mut self.book {
            book.leave(page);
        }
    }

    /// Moves `page`, if evictable, to the list where it belongs now.
    pub(crate) fn requeue(&mut self, page: PageId) {
        let record = &self.pages[page.index()];
        let (queue, home) = (self.queues.queue_of(record), self.home(record));
        if queue != QueueId::NONE && queue.segment() != home {
            self.dequeue(page);
            self.queues.insert(&mut self.pages, page, home);
            if let Some(book) = &mut self.book {
                book.enter(page);
            }
        }
    }

    /// The list that the page belongs to when nobody holds it.
    #[inline]
    pub(crate) fn home(&self, record: &Page) -> QueueId {
        if self.is_cached(record) {
            let protected = self.policy == EvictionPolicy::PrioritySlru && record.flags.has(Flags::REUSED);
            QueueId::of(record.priority, protected)
        } else {
            QueueId::UNCACHED
        }
    }
}
