//! Any order of calls, compared with plain lists after each.

use block_pool::{NodeLink, PageId, PageState, Priority, Slab, Step};
use proptest::prelude::*;
use std::collections::BTreeMap;

const PAGES: u32 = 7;

/// One call; a page is chosen among those that the call is legal for.
#[derive(Clone, Debug)]
enum Call {
    Take(Priority),
    Acquire(usize),
    Release(usize, Step),
    Pin(usize),
    Unpin(usize),
    Publish(usize, Step),
    Withdraw(usize),
    SetPriority(usize, Priority),
    Refresh(usize),
    ForgetAll,
}

fn any_priority() -> impl Strategy<Value = Priority> {
    prop_oneof![Just(0), Just(34), Just(35), Just(100)].prop_map(|level| Priority::new(level).unwrap())
}

fn any_call() -> impl Strategy<Value = Call> {
    let step = || (0..20_u32).prop_map(Step);
    prop_oneof![
        6 => any_priority().prop_map(Call::Take),
        3 => any::<usize>().prop_map(Call::Acquire),
        8 => (any::<usize>(), step()).prop_map(|(page, step)| Call::Release(page, step)),
        3 => any::<usize>().prop_map(Call::Pin),
        4 => any::<usize>().prop_map(Call::Unpin),
        5 => (any::<usize>(), step()).prop_map(|(page, step)| Call::Publish(page, step)),
        1 => any::<usize>().prop_map(Call::Withdraw),
        2 => (any::<usize>(), any_priority()).prop_map(|(page, to)| Call::SetPriority(page, to)),
        2 => any::<usize>().prop_map(Call::Refresh),
        1 => Just(Call::ForgetAll),
    ]
}

#[derive(Clone, Debug, Default)]
struct Page {
    used: bool,
    refs: u32,
    pins: u32,
    node: Option<NodeLink>,
    last_use: Step,
    priority: Priority,
}

/// What the slab should hold: pages by id, and plain lists in the order of eviction.
struct Model {
    pages: BTreeMap<PageId, Page>,
    uncached: Vec<PageId>,
    levels: BTreeMap<Priority, Vec<PageId>>,
    next_node: u32,
}

impl Model {
    fn new() -> Model {
        let pages = (1..=PAGES).map(|id| (PageId(id), Page::default())).collect();
        Model { pages, uncached: Vec::new(), levels: BTreeMap::new(), next_node: 0 }
    }

    fn page(&mut self, page: PageId) -> &mut Page {
        self.pages.get_mut(&page).unwrap()
    }

    /// The `choice`-th page (around) of those that are legal.
    fn choose(&self, choice: usize, legal: impl Fn(&Page) -> bool) -> Option<PageId> {
        let legal: Vec<PageId> =
            self.pages.iter().filter(|(_, page)| legal(page)).map(|(id, _)| *id).collect();
        legal.get(choice.checked_rem(legal.len())?).copied()
    }

    fn unlink(&mut self, page: PageId) {
        self.uncached.retain(|&queued| queued != page);
        self.levels.values_mut().for_each(|level| level.retain(|&queued| queued != page));
    }

    fn requeue(&mut self, page: PageId) {
        self.unlink(page);
        let Page { node, priority, .. } = self.pages[&page];
        match node {
            None => self.uncached.push(page),
            Some(_) => self.levels.entry(priority).or_default().push(page),
        }
    }

    fn requeue_if_free(&mut self, page: PageId) {
        if self.pages[&page].refs == 0 && self.pages[&page].pins == 0 {
            self.requeue(page);
        }
    }

    fn order(&self) -> Vec<PageId> {
        self.uncached.iter().chain(self.levels.values().flatten()).copied().collect()
    }

    /// The next victim, with what it stood for.
    fn take(&mut self, priority: Priority) -> Option<(PageId, Option<NodeLink>)> {
        let pristine = self.pages.iter().find(|(_, page)| !page.used).map(|(&id, _)| id);
        let page = self.uncached.first().copied().or(pristine).or_else(|| self.order().first().copied())?;
        self.unlink(page);
        let last_use = self.pages[&page].last_use;
        let taken = Page { used: true, refs: 1, priority, last_use, ..Page::default() };
        let before = std::mem::replace(self.page(page), taken);
        Some((page, before.node))
    }

    /// Makes the call on both sides, if there is a page that it is legal for.
    fn call(&mut self, slab: &mut Slab, call: &Call) -> Option<()> {
        match *call {
            Call::Take(priority) => {
                let taken = slab.take(priority).map(|taken| (taken.page, taken.evicted));
                assert_eq!(taken, self.take(priority));
            }
            Call::Acquire(choice) => {
                let page = self.choose(choice, |page| page.used)?;
                slab.acquire(page);
                self.page(page).refs += 1;
                self.unlink(page);
            }
            Call::Release(choice, step) => {
                let page = self.choose(choice, |page| page.refs > 0)?;
                slab.release(page, step);
                let record = self.page(page);
                record.refs -= 1;
                record.last_use = record.last_use.max(step);
                self.requeue_if_free(page);
            }
            Call::Pin(choice) => {
                let page = self.choose(choice, |page| page.used)?;
                slab.pin(page);
                self.page(page).pins += 1;
                self.unlink(page);
            }
            Call::Unpin(choice) => {
                let page = self.choose(choice, |page| page.pins > 0)?;
                let freed = slab.unpin(page);
                self.page(page).pins -= 1;
                self.requeue_if_free(page);
                assert_eq!(freed, self.order().contains(&page));
            }
            Call::Publish(choice, step) => {
                let page = self.choose(choice, |page| page.refs > 0 && page.node.is_none())?;
                self.next_node += 1;
                let node = NodeLink(self.next_node);
                slab.publish(page, node, step);
                let record = self.page(page);
                record.node = Some(node);
                record.last_use = record.last_use.max(step);
            }
            Call::Withdraw(choice) => {
                let page = self.choose(choice, |page| page.node.is_some())?;
                slab.withdraw(page);
                self.page(page).node = None;
                self.requeue_if_free(page);
            }
            Call::SetPriority(choice, priority) => {
                let page = self.choose(choice, |page| page.used)?;
                slab.set_priority(page, priority);
                self.page(page).priority = priority;
                if self.pages[&page].node.is_some() {
                    self.requeue_if_free(page);
                }
            }
            Call::Refresh(choice) => {
                let page = self.choose(choice, |page| page.used)?;
                slab.refresh(page);
                self.requeue_if_free(page);
            }
            Call::ForgetAll => {
                slab.forget_all();
                self.pages.values_mut().for_each(|page| page.node = None);
                let cached: Vec<PageId> = self.levels.values_mut().flat_map(std::mem::take).collect();
                self.uncached.extend(cached);
            }
        }
        Some(())
    }

    fn compare(&self, slab: &Slab) {
        slab.verify().unwrap();
        assert_eq!(slab.eviction_order().collect::<Vec<_>>(), self.order());
        for (&id, page) in &self.pages {
            let state = match page {
                Page { used: false, .. } => PageState::Pristine,
                Page { refs: 1.., .. } => PageState::Referenced,
                Page { pins: 1.., .. } => PageState::InFlight,
                _ => PageState::Evictable,
            };
            assert_eq!(slab.state(id), state, "{id}");
            assert_eq!((slab.refs(id), slab.pins(id)), (page.refs, page.pins), "{id}");
            assert_eq!(slab.node(id), page.node, "{id}");
            if page.used {
                assert_eq!(slab.last_use(id), page.last_use, "{id}");
            }
        }
        let count = |state| self.pages.keys().filter(|&&page| slab.state(page) == state).count() as u32;
        assert_eq!(slab.in_flight(), count(PageState::InFlight));
        assert_eq!(slab.available(), count(PageState::Pristine) + count(PageState::Evictable));
    }
}

proptest! {
    #[test]
    fn any_order_of_calls_leaves_what_plain_lists_say(calls in prop::collection::vec(any_call(), 1..120)) {
        let (mut slab, mut model) = (Slab::new(PAGES), Model::new());
        for call in &calls {
            model.call(&mut slab, call);
            model.compare(&slab);
        }
    }
}
