//! Any order of calls on groups that share a slab, compared with dictionaries after each.

mod plain;

use block_pool::{
    Evicted, EvictionPolicy, GroupId, Member, NodeLink, PageId, Pools, Priority, SlabShape, Step, Taken,
};
use plain::{Call, Model, Page, any_call, any_policy, any_priority};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// One call; the group is counted around.
#[derive(Clone, Debug)]
enum SlabCall {
    One(usize, Call),
    /// Stores so many pages of the group and lets all go.
    Finish(usize, usize),
    TakeMany {
        group: usize,
        count: u32,
        left: Vec<u32>,
        priority: Priority,
    },
    /// Takes all that is demanded of each group, group after group.
    TakeAll {
        demand: Vec<u32>,
        priority: Priority,
    },
    /// Counts pages that are claimed and given back, then does so.
    Plan {
        claim: Vec<(usize, usize)>,
        give_back: Vec<(usize, usize)>,
    },
}

fn any_demand(most: u32) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..=most, 0..5)
}

fn any_slab_call() -> impl Strategy<Value = SlabCall> {
    let pages = || prop::collection::vec(any::<(usize, usize)>(), 0..8);
    prop_oneof![
        12 => (any::<usize>(), any_call()).prop_map(|(group, call)| SlabCall::One(group, call)),
        6 => (any::<usize>(), 0..9_usize).prop_map(|(group, stored)| SlabCall::Finish(group, stored)),
        6 => (any::<usize>(), 0..9_u32, any_demand(4), any_priority()).prop_map(
            |(group, count, left, priority)| SlabCall::TakeMany { group, count, left, priority }
        ),
        2 => (any_demand(9), any_priority()).prop_map(|(demand, priority)| SlabCall::TakeAll { demand, priority }),
        1 => (pages(), pages()).prop_map(|(claim, give_back)| SlabCall::Plan { claim, give_back }),
    ]
}

/// Who has which huge page, and what each group holds in those it has.
struct Shared {
    groups: Vec<Model>,
    ratios: Vec<u32>,
    huge_pages: u32,
    owner: BTreeMap<u32, usize>,
    calls: Rc<Cell<u64>>,
}

impl Shared {
    fn new(huge_pages: u32, members: &[(u32, EvictionPolicy)]) -> Shared {
        let calls = Rc::new(Cell::new(0));
        let groups = members.iter().map(|&(_, policy)| Model::new(0, policy, Rc::clone(&calls))).collect();
        let ratios = members.iter().map(|&(ratio, _)| ratio).collect();
        Shared { groups, ratios, huge_pages, owner: BTreeMap::new(), calls }
    }

    fn pages_in(&self, group: usize, huge: u32) -> Vec<PageId> {
        (huge * self.ratios[group]..(huge + 1) * self.ratios[group]).map(PageId).collect()
    }

    fn page(&self, group: usize, page: PageId) -> &Page {
        &self.groups[group].pages[&page]
    }

    fn is_parked(&self, group: usize, huge: u32) -> bool {
        self.pages_in(group, huge).iter().all(|&page| self.page(group, page).queued.is_some())
    }

    fn parked(&self, group: usize) -> Vec<u32> {
        let owned = self.owner.iter().filter(|&(_, &owner)| owner == group);
        owned.map(|(&huge, _)| huge).filter(|&huge| self.is_parked(group, huge)).collect()
    }

    fn huge_of(&self, group: usize, page: PageId) -> u32 {
        page.0 / self.ratios[group]
    }

    /// Idle pages in huge pages that are not parked.
    fn open(&self, group: usize) -> u32 {
        let in_use = |page: &PageId| !self.is_parked(group, self.huge_of(group, *page));
        self.groups[group].order().iter().filter(|page| in_use(page)).count() as u32
    }

    /// Huge pages to open for `demand` pages.
    fn needed(&self, group: usize, demand: u32) -> u32 {
        let open = self.open(group);
        (0..=demand).find(|huge| open + huge * self.ratios[group] >= demand).unwrap()
    }

    fn free(&self) -> u32 {
        let parked: usize = (0..self.groups.len()).map(|group| self.parked(group).len()).sum();
        self.huge_pages - self.owner.len() as u32 + parked as u32
    }

    /// Huge pages that are free and that nothing of `demand` needs.
    fn spare(&self, demand: &[u32]) -> Option<u32> {
        let demand = demand.iter().take(self.groups.len());
        let needed: u32 = demand.enumerate().map(|(group, &demand)| self.needed(group, demand)).sum();
        self.free().checked_sub(needed)
    }

    /// The huge page is the group's now, and blank; gives what it held.
    fn claim(&mut self, group: usize, huge: u32) -> Vec<(GroupId, PageId, NodeLink)> {
        let mut lost = Vec::new();
        let mut last_use = Step(0);
        if let Some(former) = self.owner.insert(huge, group) {
            for page in self.pages_in(former, huge) {
                let record = self.groups[former].pages.remove(&page).unwrap();
                last_use = last_use.max(record.last_use);
                lost.extend(record.node.map(|node| (GroupId(former as u8), page, node)));
            }
        }
        for page in self.pages_in(group, huge) {
            let queued = Some(self.groups[group].tick());
            let blank = Page { used: true, queued, last_use, ..Page::new() };
            self.groups[group].pages.insert(page, blank);
        }
        lost
    }

    /// When the huge page would go: highest priority and newest stamp of what is cached there.
    fn rank(&self, group: usize, huge: u32) -> Option<(Priority, u64)> {
        let pages = self.pages_in(group, huge);
        let cached = pages.iter().map(|&page| self.page(group, page)).filter(|page| page.node.is_some());
        let ranks: Vec<_> = cached.map(|page| (page.retention.priority(), page.queued.unwrap())).collect();
        let priority = ranks.iter().map(|rank| rank.0).max()?;
        ranks.iter().map(|rank| rank.1).max().map(|newest| (priority, newest))
    }

    /// Takes what the pools took, page by page, if that was right.
    fn take_many(
        &mut self,
        (group, priority): (usize, Priority),
        demand: &mut [u32],
        taken: &[Taken],
    ) -> Vec<(GroupId, PageId, NodeLink)> {
        let mut lost = Vec::new();
        for (index, &real) in taken.iter().enumerate() {
            if self.needed(group, demand[group]) == 0 && self.spare(demand) == Some(0) {
                let parked = self.parked(group);
                let in_use = |page: &PageId| !parked.contains(&self.huge_of(group, *page));
                let order: Vec<_> = self.groups[group].order().into_iter().filter(in_use).collect();
                for (page, real) in order.into_iter().zip(&taken[index..]) {
                    let evicted = self.groups[group].hand_out(page, priority);
                    assert_eq!((real.page, real.evicted), (page, evicted));
                    demand[group] -= 1;
                }
                return lost;
            }
            let page = self.choose(group, real.page, &mut lost);
            let evicted = self.groups[group].hand_out(page, priority);
            assert_eq!((real.page, real.evicted), (page, evicted));
            demand[group] -= 1;
        }
        lost
    }

    /// The next page in the order of taking; `real` is what the pools took.
    fn choose(&mut self, group: usize, real: PageId, lost: &mut Vec<(GroupId, PageId, NodeLink)>) -> PageId {
        if let Some(&blank) = self.groups[group].uncached().first() {
            return blank;
        }
        if (self.owner.len() as u32) < self.huge_pages {
            lost.extend(self.claim(group, self.owner.len() as u32 + 1));
            return self.groups[group].uncached()[0];
        }
        let others: Vec<usize> = (0..self.groups.len()).filter(|&other| other != group).collect();
        for &other in &others {
            let parked = self.parked(other).into_iter();
            let junk: Vec<u32> = parked.filter(|&huge| self.rank(other, huge).is_none()).collect();
            if !junk.is_empty() {
                let huge = self.huge_of(group, real);
                assert!(junk.contains(&huge), "{huge} is none of {junk:?}");
                lost.extend(self.claim(group, huge));
                return self.groups[group].uncached()[0];
            }
        }
        let parked = |&other: &usize| {
            let ranked = self.parked(other).into_iter();
            ranked.map(|huge| (self.rank(other, huge).unwrap(), huge)).min()
        };
        let best = others.iter().filter_map(parked).min();
        let own = self.groups[group].order().first().copied();
        let own_rank = own.map(|page| {
            let page = self.page(group, page);
            (page.retention.priority(), page.queued.unwrap())
        });
        match (best, own_rank) {
            (Some((rank, huge)), own_rank) if own_rank.is_none_or(|own_rank| rank < own_rank) => {
                lost.extend(self.claim(group, huge));
                self.groups[group].uncached()[0]
            }
            _ => own.unwrap(),
        }
    }

    fn call(&mut self, pools: &mut Pools, call: &SlabCall) {
        match call {
            SlabCall::One(group, call) => {
                let group = group % self.groups.len();
                self.groups[group].call(&mut pools[GroupId(group as u8)], call);
            }
            SlabCall::Finish(group, stored) => {
                let group = group % self.groups.len();
                let (model, pool) = (&mut self.groups[group], &mut pools[GroupId(group as u8)]);
                for _ in 0..*stored {
                    model.call(pool, &Call::Publish(0, Step(1)));
                }
                while model.call(pool, &Call::Release(0, Step(2))).is_some() {}
            }
            SlabCall::TakeMany { group, count, left, priority } => {
                let mut left = left.clone();
                left.resize(self.groups.len(), 0);
                self.take(pools, (group % self.groups.len(), *count, *priority), &left);
            }
            SlabCall::TakeAll { demand, priority } => {
                let mut left = demand.clone();
                left.resize(self.groups.len(), 0);
                let fits = pools.can_satisfy(demand);
                for group in 0..self.groups.len() {
                    let count = std::mem::take(&mut left[group]);
                    let (first, second) = (count / 2, count - count / 2); // as for two requests
                    left[group] = second;
                    if !self.take(pools, (group, first, *priority), &left) {
                        assert!(!fits);
                        return;
                    }
                    left[group] = 0;
                    assert!(self.take(pools, (group, second, *priority), &left));
                }
                assert!(fits);
            }
            SlabCall::Plan { claim, give_back } => self.plan(pools, claim, give_back),
        }
    }

    /// Takes on both sides.
    fn take(
        &mut self,
        pools: &mut Pools,
        (group, count, priority): (usize, u32, Priority),
        left: &[u32],
    ) -> bool {
        let mut demand = left.to_vec();
        demand[group] += count;
        let fits = self.spare(&demand).is_some();
        assert_eq!(pools.can_satisfy(&demand), fits);
        let (mut taken, mut lost) = (Vec::new(), Vec::new());
        let id = GroupId(group as u8);
        assert_eq!(pools.take_many(id, count, priority, left, &mut taken, &mut lost), fits);
        assert_eq!(taken.len() as u32, if fits { count } else { 0 });
        let expected = self.take_many((group, priority), &mut demand, &taken);
        let lost: Vec<_> = lost.iter().map(|&Evicted { group, page, node }| (group, page, node)).collect();
        assert_eq!(lost, expected);
        fits
    }

    fn plan(&mut self, pools: &mut Pools, claim: &[(usize, usize)], give_back: &[(usize, usize)]) {
        let choose = |choices: &[(usize, usize)], legal: fn(&Page) -> bool| -> BTreeSet<(usize, PageId)> {
            let choose = |&(group, choice): &(usize, usize)| {
                let group = group % self.groups.len();
                Some((group, self.groups[group].choose(choice, legal)?))
            };
            choices.iter().filter_map(choose).collect()
        };
        let claimed = choose(claim, |page| page.queued.is_some() && page.node.is_some());
        let given = choose(give_back, |page| page.refs == 1 && page.pins == 0);
        let mut room = pools.room();
        for &(group, page) in &claimed {
            room.claim(pools, GroupId(group as u8), page);
        }
        for &(group, page) in &given {
            room.give_back(pools, GroupId(group as u8), page);
        }
        for &(group, page) in &claimed {
            pools[GroupId(group as u8)].acquire(page);
            self.groups[group].page(page).refs += 1;
            self.groups[group].page(page).queued = None;
        }
        for &(group, page) in &given {
            pools[GroupId(group as u8)].release(page, Step(3));
            self.groups[group].release(page, Step(3));
        }
        for group in pools.groups() {
            assert_eq!(room.available(group), pools.available(group));
        }
        for huge in 0..=self.huge_pages + 1 {
            let demand: Vec<u32> = self.ratios.iter().map(|ratio| huge * ratio / 2).collect();
            assert_eq!(room.can_satisfy(&demand), pools.can_satisfy(&demand));
        }
    }

    fn compare(&self, pools: &Pools) {
        pools.verify().unwrap();
        let slab = &pools.slabs()[0];
        assert_eq!(pools.free_huge_pages(slab), self.free());
        for (group, model) in self.groups.iter().enumerate() {
            let id = GroupId(group as u8);
            model.compare(&pools[id]);
            assert_eq!(pools.available(id), self.open(group) + self.free() * self.ratios[group]);
            for huge in 0..=self.huge_pages {
                for page in self.pages_in(group, huge) {
                    let owned = self.owner.get(&huge) == Some(&group);
                    assert_eq!(model.pages.contains_key(&page), owned);
                    if !owned {
                        let pool = &pools[id];
                        assert_eq!((pool.refs(page), pool.pins(page), pool.node(page)), (0, 0, None));
                        assert!(!pool.is_evictable(page));
                    }
                }
            }
        }
        assert!(self.calls.get() < u64::from(u32::MAX));
    }
}

fn any_member() -> impl Strategy<Value = (u32, EvictionPolicy)> {
    (prop::sample::select(&[1_u32, 2, 3, 7][..]), any_policy())
}

proptest! {
    #[test]
    fn any_order_of_calls_on_a_shared_slab_leaves_what_dictionaries_say(
        huge_pages in 0..6_u32,
        members in prop::collection::vec(any_member(), 2..5),
        calls in prop::collection::vec(any_slab_call(), 1..80),
    ) {
        let listed = (0..).map(GroupId).zip(&members);
        let listed = listed.map(|(group, &(ratio, policy))| Member { group, ratio, policy });
        let shape = SlabShape { huge_pages, members: listed.collect() };
        let mut pools = Pools::new(&[shape], Priority::DEFAULT).unwrap();
        let mut model = Shared::new(huge_pages, &members);
        for call in &calls {
            model.call(&mut pools, call);
            model.compare(&pools);
        }
    }
}
