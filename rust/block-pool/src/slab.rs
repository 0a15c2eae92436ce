//! The slab: pages, their references and pins, and the verbs that move them between states.

use crate::ids::{NodeLink, PageId, Priority, Step};
use crate::queue::{EvictionQueues, QueueId};

const NO_NODE: u32 = u32::MAX;

/// What is known of one page. The list links are in [`EvictionQueues`], under the same index.
#[derive(Clone, Copy)]
pub(crate) struct Page {
    /// Sequences (and user pins) that hold the page.
    pub(crate) refs: u32,
    /// Transfers that touch the page.
    pub(crate) pins: u32,
    /// What the page stands for in the prefix tree, valid while `epoch` is the slab's.
    node: u32,
    epoch: u32,
    /// Last step whose forward may read or write the page, as far as its former holders knew.
    pub(crate) last_use: Step,
    /// Step whose forward wrote the block that was published last.
    pub(crate) published: Step,
    /// Scratch of a planning pass, see [`Slab::mark`].
    mark: u32,
    pub(crate) priority: Priority,
}

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

/// A page that [`Slab::take`] hands out, referenced once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// The page.
    pub page: PageId,
    /// What it stood for until now: the caller must drop this record.
    pub evicted: Option<NodeLink>,
    /// Whether it had never been handed out before.
    pub pristine: bool,
}

/// One device allocation, cut into pages of one size. Page 0 is the null page.
///
/// The plain paged pool: every page belongs to the one group that tiles the slab.
pub struct Slab {
    /// The null page and every page that was ever handed out: memory follows use.
    pub(crate) pages: Vec<Page>,
    pub(crate) queues: EvictionQueues,
    total: u32,
    epoch: u32,
    marks: u32,
    in_flight: u32,
}

impl Slab {
    /// Largest number of usable pages: ids fit an int32.
    pub const MAX_PAGES: u32 = i32::MAX.cast_unsigned();

    /// A slab of `usable` pages (ids `1 ..= usable`) and the null page.
    ///
    /// # Panics
    /// If `usable` is over [`Slab::MAX_PAGES`].
    pub fn new(usable: u32) -> Slab {
        assert!(usable <= Self::MAX_PAGES, "{usable} pages are more than a slab can number");
        // Address space for the pages of any real pool: records do not move while it fills.
        let capacity = (usable as usize + 1).min(1 << 24);
        let mut slab = Slab {
            pages: Vec::with_capacity(capacity),
            queues: EvictionQueues::new(capacity),
            total: usable,
            epoch: 0,
            marks: 0,
            in_flight: 0,
        };
        slab.add_page();
        slab
    }

    fn add_page(&mut self) -> PageId {
        let page = PageId(self.pages.len() as u32);
        let priority = Priority::DEFAULT;
        self.pages.push(Page {
            refs: 0,
            pins: 0,
            node: NO_NODE,
            epoch: 0,
            last_use: Step(0),
            published: Step(0),
            mark: 0,
            priority,
        });
        self.queues.add_page();
        page
    }

    /// Usable pages, the null page not counted.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Pages that [`Slab::take`] can hand out now: never used or evictable.
    pub fn available(&self) -> u32 {
        self.pristine() + self.queues.len()
    }

    /// Pages never handed out: those with the greatest ids.
    pub fn pristine(&self) -> u32 {
        self.total + 1 - self.pages.len() as u32
    }

    /// Pages that were ever handed out: ids `1 ..= used`.
    pub fn used(&self) -> u32 {
        self.pages.len() as u32 - 1
    }

    /// Pages waiting in an eviction list, cached or not.
    pub fn evictable(&self) -> u32 {
        self.queues.len()
    }

    /// Pages held by transfers alone.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Where `page` is in its life.
    pub fn state(&self, page: PageId) -> PageState {
        match self.pages.get(page.index()) {
            Some(record) if record.refs > 0 => PageState::Referenced,
            Some(record) if record.pins > 0 => PageState::InFlight,
            _ if self.queues.contains(page) => PageState::Evictable,
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
        self.pages.get(page.index()).map_or(0, |record| record.pins)
    }

    /// Whether nobody holds `page` and it waits in an eviction list.
    #[inline]
    pub fn is_evictable(&self, page: PageId) -> bool {
        self.queues.contains(page)
    }

    /// Last step whose forward may touch `page`: a mover waits for its fence.
    pub fn last_use(&self, page: PageId) -> Step {
        self.pages.get(page.index()).map_or(Step(0), |record| record.last_use)
    }

    /// The `last_use` that `page` was last published with; it outlives what the page stood for.
    #[inline]
    pub fn published(&self, page: PageId) -> Step {
        self.pages.get(page.index()).map_or(Step(0), |record| record.published)
    }

    /// What `page` stands for in the prefix tree.
    #[inline]
    pub fn node(&self, page: PageId) -> Option<NodeLink> {
        let record = self.pages.get(page.index())?;
        (record.node != NO_NODE && record.epoch == self.epoch).then_some(NodeLink(record.node))
    }

    /// Hands out a page, referenced once: an uncached one, else a pristine one, else the cached page of
    /// the lowest priority that was released longest ago. `None` when every page is held.
    pub fn take(&mut self, priority: Priority) -> Option<Taken> {
        let taken = if let Some(page) = self.queues.front(QueueId::UNCACHED) {
            self.queues.remove(page);
            Taken { page, evicted: None, pristine: false }
        } else if self.pristine() > 0 {
            Taken { page: self.add_page(), evicted: None, pristine: true }
        } else {
            let page = self.queues.first()?;
            self.queues.remove(page);
            Taken { page, evicted: self.node(page), pristine: false }
        };
        let record = &mut self.pages[taken.page.index()];
        record.refs = 1;
        record.node = NO_NODE;
        record.priority = priority;
        Some(taken)
    }

    /// One more reference to a page that is referenced, evictable or in flight (a prefix hit).
    #[inline]
    pub fn acquire(&mut self, page: PageId) {
        let record = &mut self.pages[page.index()];
        record.refs += 1;
        if record.refs == 1 {
            if record.pins > 0 {
                self.in_flight -= 1;
            } else {
                self.queues.remove(page);
            }
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
        if record.refs == 0 {
            if record.pins > 0 {
                self.in_flight += 1;
            } else {
                self.enqueue(page);
            }
        }
    }

    /// A transfer begins to touch `page`, which is referenced, evictable or in flight.
    pub fn pin(&mut self, page: PageId) {
        let record = &mut self.pages[page.index()];
        record.pins += 1;
        if record.refs == 0 && record.pins == 1 {
            self.queues.remove(page);
            self.in_flight += 1;
        }
    }

    /// A transfer no longer touches `page`. True when this made the page evictable.
    pub fn unpin(&mut self, page: PageId) -> bool {
        let record = &mut self.pages[page.index()];
        debug_assert!(record.pins > 0, "{page} is not pinned");
        record.pins -= 1;
        let idle = record.refs == 0 && record.pins == 0;
        if idle {
            self.in_flight -= 1;
            self.enqueue(page);
        }
        idle
    }

    /// The referenced, uncached `page` now stands for `node`. `last_use` is the last step whose forward
    /// may write it: whoever shares the page from now on did not take part in that step.
    #[inline]
    pub fn publish(&mut self, page: PageId, node: NodeLink, last_use: Step) {
        debug_assert!(self.node(page).is_none(), "{page} stands for a node already");
        let record = &mut self.pages[page.index()];
        record.node = node.0;
        record.epoch = self.epoch;
        record.last_use = record.last_use.max(last_use);
        record.published = last_use;
    }

    /// `page` stands for nothing any more; when it is evictable it goes before every cached page.
    pub fn withdraw(&mut self, page: PageId) {
        self.pages[page.index()].node = NO_NODE;
        if self.queues.contains(page) {
            self.queues.remove(page);
            self.queues.push_back(page, QueueId::UNCACHED);
        }
    }

    /// Gives `page` another retention priority; an evictable cached page moves to the end of that level.
    pub fn set_priority(&mut self, page: PageId, priority: Priority) {
        self.pages[page.index()].priority = priority;
        if self.queues.contains(page) && self.node(page).is_some() {
            self.queues.remove(page);
            self.enqueue(page);
        }
    }

    /// Retention priority of `page`.
    pub fn priority(&self, page: PageId) -> Priority {
        self.pages[page.index()].priority
    }

    /// Counts `page`, if evictable, as released just now.
    pub fn refresh(&mut self, page: PageId) {
        if self.queues.contains(page) {
            self.queues.remove(page);
            self.enqueue(page);
        }
    }

    /// Forgets what every page stands for; evictable pages are all uncached afterwards. Cost does not
    /// grow with the number of pages.
    pub fn forget_all(&mut self) {
        self.epoch += 1;
        self.queues.merge_into_uncached();
    }

    /// Opens a planning pass: no page is marked in it.
    pub fn open_marks(&mut self) {
        self.marks = self.marks.wrapping_add(1);
        if self.marks == 0 {
            self.pages.iter_mut().for_each(|page| page.mark = 0);
            self.marks = 1;
        }
    }

    /// Marks `page` in the open planning pass; true the first time.
    #[inline]
    pub fn mark(&mut self, page: PageId) -> bool {
        let record = &mut self.pages[page.index()];
        let first = record.mark != self.marks;
        record.mark = self.marks;
        first
    }

    #[inline]
    fn enqueue(&mut self, page: PageId) {
        let queue = match self.node(page) {
            Some(_) => QueueId::of(self.pages[page.index()].priority),
            None => QueueId::UNCACHED,
        };
        self.queues.push_back(page, queue);
    }
}
