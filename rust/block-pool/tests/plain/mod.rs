//! What a pool should hold, as a plain list of pages.

use block_pool::{EvictionPolicy, Lapsed, NodeLink, PageId, PageState, Pool, Priority, Retention, Step};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Priorities that pages have, the default among them.
const PRIORITIES: [i64; 4] = [0, 34, 35, 100];

/// One call; a page is chosen among those that the call is legal for.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    Take(Priority),
    TakeMany(u32, Priority),
    Acquire(usize),
    ReuseAll(Vec<usize>),
    Release(usize, Step),
    ReleaseAll(Vec<usize>, Step),
    Pin(usize),
    Unpin(usize),
    UnpinInPlace(usize),
    CountHit(usize),
    Publish(usize, Step),
    Withdraw(usize),
    Retain(usize, Retention),
    MarkReused(usize),
    /// So much time goes by (or back).
    TellTime(f64),
    Refresh(usize),
    ForgetAll,
}

pub(crate) fn any_priority() -> impl Strategy<Value = Priority> {
    prop::sample::select(&PRIORITIES).prop_map(|level| Priority::new(level).unwrap())
}

/// For ever, for 0 to 3 seconds or until second 0 to 19.
fn any_retention() -> impl Strategy<Value = Retention> {
    let limit = prop_oneof![
        Just((None, None)),
        (0..7).prop_map(|halves| (Some(f64::from(halves) / 2.0), None)),
        (0..20).prop_map(|second| (None, Some(f64::from(second)))),
    ];
    (any_priority(), limit)
        .prop_map(|(priority, (duration, end))| Retention::new(priority, duration, end).unwrap())
}

/// Some pages; those that are legal are counted around.
fn any_pages() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(any::<usize>(), 0..8)
}

pub(crate) fn any_call() -> impl Strategy<Value = Call> {
    let step = || (0..20_u32).prop_map(Step);
    prop_oneof![
        6 => any_priority().prop_map(Call::Take),
        2 => (0..6_u32, any_priority()).prop_map(|(count, priority)| Call::TakeMany(count, priority)),
        5 => any::<usize>().prop_map(Call::Acquire),
        3 => any_pages().prop_map(Call::ReuseAll),
        12 => (any::<usize>(), step()).prop_map(|(page, step)| Call::Release(page, step)),
        4 => (any_pages(), step()).prop_map(|(pages, step)| Call::ReleaseAll(pages, step)),
        3 => any::<usize>().prop_map(Call::Pin),
        4 => any::<usize>().prop_map(Call::Unpin),
        3 => any::<usize>().prop_map(Call::UnpinInPlace),
        2 => any::<usize>().prop_map(Call::CountHit),
        9 => (any::<usize>(), step()).prop_map(|(page, step)| Call::Publish(page, step)),
        1 => any::<usize>().prop_map(Call::Withdraw),
        6 => (any::<usize>(), any_retention()).prop_map(|(page, to)| Call::Retain(page, to)),
        5 => any::<usize>().prop_map(Call::MarkReused),
        4 => (-1..4).prop_map(|halves| Call::TellTime(f64::from(halves) / 2.0)),
        2 => any::<usize>().prop_map(Call::Refresh),
        1 => Just(Call::ForgetAll),
    ]
}

#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub(crate) used: bool,
    pub(crate) refs: u32,
    pub(crate) pins: u32,
    pub(crate) node: Option<NodeLink>,
    pub(crate) last_use: Step,
    pub(crate) retention: Retention,
    /// When the last reference ended.
    pub(crate) released: f64,
    pub(crate) reused: bool,
    /// Number of the call that queued it.
    pub(crate) queued: Option<u64>,
    /// Number of the call that queued or released it last, or published what it stands for since.
    pub(crate) stamp: u64,
    pub(crate) hits: u32,
}

impl Page {
    pub(crate) fn new() -> Page {
        Page {
            used: false,
            refs: 0,
            pins: 0,
            node: None,
            last_use: Step(0),
            retention: Priority::DEFAULT.into(),
            released: 0.0,
            reused: false,
            queued: None,
            stamp: 0,
            hits: 0,
        }
    }

    /// When the retention ends, as far as this is known.
    fn end(&self) -> Option<f64> {
        let running = self.refs == 0;
        let after = self.retention.duration().filter(|_| running).map(|time| self.released + time);
        after.or(self.retention.expires_at())
    }
}

/// What the pool should hold.
pub(crate) struct Model {
    policy: EvictionPolicy,
    pub(crate) pages: BTreeMap<PageId, Page>,
    /// Calls so far, also those of other pools with the same clock.
    calls: Rc<Cell<u64>>,
    now: f64,
}

impl Model {
    /// A pool with the pages `1 ..= pages`.
    pub(crate) fn new(pages: u32, policy: EvictionPolicy, calls: Rc<Cell<u64>>) -> Model {
        let pages = (1..=pages).map(|id| (PageId(id), Page::new())).collect();
        Model { policy, pages, calls, now: 0.0 }
    }

    pub(crate) fn tick(&self) -> u64 {
        self.calls.set(self.calls.get() + 1);
        self.calls.get()
    }

    pub(crate) fn page(&mut self, page: PageId) -> &mut Page {
        self.pages.get_mut(&page).unwrap()
    }

    /// The `choice`-th page (around) of those that are legal.
    pub(crate) fn choose(&self, choice: usize, legal: impl Fn(&Page) -> bool) -> Option<PageId> {
        let legal: Vec<PageId> =
            self.pages.iter().filter(|(_, page)| legal(page)).map(|(id, _)| *id).collect();
        legal.get(choice.checked_rem(legal.len())?).copied()
    }

    /// Queues the page behind all others if nobody holds it.
    fn queue(&mut self, page: PageId) {
        let stamp = self.tick();
        let record = self.page(page);
        record.queued = (record.refs == 0 && record.pins == 0).then_some(stamp);
        record.stamp = record.queued.unwrap_or(record.stamp);
    }

    /// Queued pages, by the order of queueing.
    fn queued(&self, belongs: impl Fn(&Page) -> bool) -> Vec<PageId> {
        let mut queued: Vec<(u64, PageId)> = (self.pages.iter())
            .filter(|(_, page)| belongs(page))
            .filter_map(|(&id, page)| Some((page.queued?, id)))
            .collect();
        queued.sort_unstable();
        queued.into_iter().map(|(_, id)| id).collect()
    }

    pub(crate) fn uncached(&self) -> Vec<PageId> {
        self.queued(|page| page.node.is_none())
    }

    /// Cached pages of a priority in the order of eviction.
    fn level(&self, priority: Priority) -> Vec<PageId> {
        let mut left = self.queued(|page| page.node.is_some() && page.retention.priority() == priority);
        let mut order = Vec::new();
        let spared = |page: &PageId| self.policy == EvictionPolicy::PrioritySlru && self.pages[page].reused;
        while !left.is_empty() {
            let protected = left.iter().filter(|page| spared(page)).count();
            let crowded = protected * 3 > left.len();
            let at = left.iter().position(|page| crowded || !spared(page)).unwrap_or(0);
            order.push(left.remove(at));
        }
        order
    }

    pub(crate) fn order(&self) -> Vec<PageId> {
        let levels = PRIORITIES.map(|level| Priority::new(level).unwrap()).into_iter();
        self.uncached().into_iter().chain(levels.flat_map(|level| self.level(level))).collect()
    }

    pub(crate) fn release(&mut self, page: PageId, last_use: Step) {
        let now = self.now;
        let record = self.page(page);
        record.refs -= 1;
        record.last_use = record.last_use.max(last_use);
        record.released = now;
        self.queue(page);
        let stamp = self.calls.get();
        if self.pages[&page].refs == 0 {
            self.page(page).stamp = stamp; // also while a transfer holds it
        }
    }

    /// The next victim, with what it stood for.
    fn take(&mut self, priority: Priority) -> Option<(PageId, Option<NodeLink>)> {
        let pristine = self.pages.iter().find(|(_, page)| !page.used).map(|(&id, _)| id);
        let page = self.uncached().first().copied().or(pristine).or_else(|| self.order().first().copied())?;
        Some((page, self.hand_out(page, priority)))
    }

    /// Gives what the page stood for.
    pub(crate) fn hand_out(&mut self, page: PageId, priority: Priority) -> Option<NodeLink> {
        let last_use = self.pages[&page].last_use;
        let taken = Page { used: true, refs: 1, retention: priority.into(), last_use, ..Page::new() };
        std::mem::replace(self.page(page), taken).node
    }

    fn tell_time(&mut self, now: f64) -> Vec<Lapsed> {
        self.now = self.now.max(now);
        let mut over: Vec<(f64, PageId)> = (self.pages.iter())
            .filter_map(|(&id, page)| Some((page.end().filter(|&end| end <= self.now)?, id)))
            .collect();
        over.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        over.into_iter()
            .map(|(_, page)| {
                let before = std::mem::replace(&mut self.page(page).retention, Priority::DEFAULT.into());
                Lapsed { page, from: before.priority() }
            })
            .collect()
    }

    fn unpin_in_place(&mut self, page: PageId) {
        let before = self.pages[&page].stamp;
        self.page(page).pins -= 1;
        self.queue(page);
        let record = self.page(page);
        if record.node.is_some() && record.queued.is_some() {
            (record.queued, record.stamp) = (Some(before), before);
        }
    }

    fn reuse_all(&mut self, pool: &mut Pool, choices: &[usize]) {
        let pages: Vec<PageId> =
            (choices.iter()).filter_map(|&choice| self.choose(choice, |page| page.node.is_some())).collect();
        let mut waited = Vec::new();
        pool.reuse_all(&pages, |last_use| waited.push(last_use));
        let mut expected = Vec::new();
        for &page in &pages {
            let record = self.page(page);
            expected.extend((record.refs == 0).then_some(record.last_use));
            record.refs += 1;
            (record.queued, record.reused) = (None, true);
        }
        assert_eq!(waited, expected);
    }

    fn release_all(&mut self, pool: &mut Pool, choices: &[usize], step: Step) {
        let mut pages = Vec::new();
        for &choice in choices {
            let Some(page) = self.choose(choice, |page| page.refs > 0) else { continue };
            self.release(page, step);
            pages.push(page);
        }
        pool.release_all(pages.iter().copied(), step);
    }

    /// Makes the call on both sides, if there is a page that it is legal for.
    pub(crate) fn call(&mut self, pool: &mut Pool, call: &Call) -> Option<()> {
        match *call {
            Call::Take(priority) => {
                let taken = pool.take(priority).map(|taken| (taken.page, taken.evicted));
                assert_eq!(taken, self.take(priority));
            }
            Call::TakeMany(count, priority) => {
                let room = self.pages.values().filter(|page| !page.used || page.queued.is_some()).count();
                let mut taken = Vec::new();
                assert_eq!(pool.take_many(count, priority, &mut taken), count as usize <= room);
                let expected: Vec<_> = taken.iter().filter_map(|_| self.take(priority)).collect();
                let taken: Vec<_> = taken.iter().map(|taken| (taken.page, taken.evicted)).collect();
                assert_eq!(taken, expected);
                assert!(taken.len() == count as usize || taken.is_empty());
            }
            Call::Acquire(choice) => {
                let page = self.choose(choice, |page| page.used)?;
                pool.acquire(page);
                self.page(page).refs += 1;
                self.page(page).queued = None;
            }
            Call::ReuseAll(ref choices) => self.reuse_all(pool, choices),
            Call::Release(choice, step) => {
                let page = self.choose(choice, |page| page.refs > 0)?;
                pool.release(page, step);
                self.release(page, step);
            }
            Call::ReleaseAll(ref choices, step) => self.release_all(pool, choices, step),
            Call::Pin(choice) => {
                let page = self.choose(choice, |page| page.used)?;
                pool.pin(page);
                self.page(page).pins += 1;
                self.page(page).queued = None;
            }
            Call::Unpin(choice) => {
                let page = self.choose(choice, |page| page.pins > 0)?;
                let freed = pool.unpin(page);
                self.page(page).pins -= 1;
                self.queue(page);
                assert_eq!(freed, self.pages[&page].queued.is_some());
            }
            Call::UnpinInPlace(choice) => {
                let page = self.choose(choice, |page| page.pins > 0)?;
                pool.unpin_in_place(page);
                self.unpin_in_place(page);
            }
            Call::CountHit(choice) => {
                let page = self.choose(choice, |page| page.node.is_some())?;
                self.page(page).hits += 1;
                assert_eq!(pool.count_hit(page), self.pages[&page].hits);
            }
            Call::Publish(choice, step) => {
                let page = self.choose(choice, |page| page.refs > 0 && page.node.is_none())?;
                let node = NodeLink(self.tick() as u32);
                pool.publish(page, node, step);
                let record = self.page(page);
                (record.node, record.reused, record.hits) = (Some(node), false, 0);
                record.stamp = node.0.into();
                record.last_use = record.last_use.max(step);
            }
            Call::Withdraw(choice) => {
                let page = self.choose(choice, |page| page.node.is_some())?;
                pool.withdraw(page);
                self.page(page).node = None;
                self.queue(page);
            }
            Call::Retain(choice, retention) => {
                let page = self.choose(choice, |page| page.used)?;
                pool.retain(page, retention);
                let now = self.now;
                let record = self.page(page);
                (record.retention, record.released) = (retention, now);
            }
            Call::MarkReused(choice) => {
                let page = self.choose(choice, |page| page.node.is_some())?;
                assert_eq!(pool.mark_reused(page), !self.pages[&page].reused);
                self.page(page).reused = true;
            }
            Call::TellTime(passed) => {
                let now = self.now + passed;
                assert_eq!(pool.tell_time(now), self.tell_time(now));
            }
            Call::Refresh(choice) => {
                let page = self.choose(choice, |page| page.used)?;
                pool.refresh(page);
                if self.pages[&page].refs == 0 {
                    self.page(page).released = self.now;
                    self.queue(page);
                    let stamp = self.calls.get();
                    self.page(page).stamp = stamp; // also while a transfer holds it
                }
            }
            Call::ForgetAll => {
                pool.forget_all();
                self.forget_all(&pool.eviction_order().collect::<Vec<_>>());
            }
        }
        Some(())
    }

    /// `order` is what the pool makes of it: the uncached pages as they were, then level after level. In
    /// a level it may choose.
    fn forget_all(&mut self, order: &[PageId]) {
        let uncached = self.uncached();
        assert!(order.starts_with(&uncached));
        let priorities = order[uncached.len()..].iter().map(|page| self.pages[page].retention.priority());
        assert!(priorities.is_sorted());
        let mut pages = (order.to_vec(), self.order());
        pages.0.sort_unstable();
        pages.1.sort_unstable();
        assert_eq!(pages.0, pages.1);
        self.pages.values_mut().for_each(|page| page.node = None);
        for &page in order {
            self.queue(page);
        }
    }

    pub(crate) fn compare(&self, pool: &Pool) {
        pool.verify().unwrap();
        let cached = self.order()[self.uncached().len()..].to_vec();
        for count in [0, 2, cached.len(), cached.len() + 3] {
            assert_eq!(pool.victims(count), cached[..count.min(cached.len())]);
        }
        assert_eq!(pool.eviction_order().collect::<Vec<_>>(), self.order());
        for (&id, page) in &self.pages {
            let state = match page {
                Page { used: false, .. } => PageState::Pristine,
                Page { refs: 1.., .. } => PageState::Referenced,
                Page { pins: 1.., .. } => PageState::InFlight,
                _ => PageState::Evictable,
            };
            assert_eq!(pool.state(id), state, "{id}");
            assert_eq!((pool.refs(id), pool.pins(id)), (page.refs, page.pins), "{id}");
            assert_eq!(pool.node(id), page.node, "{id}");
            assert_eq!(pool.retention(id), page.retention, "{id}");
            assert_eq!(pool.is_reused(id), page.reused && page.node.is_some(), "{id}");
            if page.used {
                assert_eq!(pool.last_use(id), page.last_use, "{id}");
            }
        }
        let count = |state| self.pages.keys().filter(|&&page| pool.state(page) == state).count() as u32;
        assert_eq!(pool.in_flight(), count(PageState::InFlight));
        assert_eq!(pool.available(), count(PageState::Pristine) + count(PageState::Evictable));
    }
}

pub(crate) fn any_policy() -> impl Strategy<Value = EvictionPolicy> {
    prop_oneof![Just(EvictionPolicy::PriorityLru), Just(EvictionPolicy::PrioritySlru)]
}
