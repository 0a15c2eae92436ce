//! Room that is kept for what is there to run to its end, where groups share a slab.
//!
//! Pages of a group that lie spread over many huge pages keep the other groups out of all of these, though
//! most of each may be idle. Pages come to be spread in three ways: they are taken in huge pages that nobody
//! uses, while there are idle ones in others; a hit claims them where they lie; a request goes over to the
//! pages of a twin. So while all requests can run to their ends, pages are taken as if the rest of what they
//! need were taken next ([`block_pool::Pools::take_many`]), and a request goes on from a shorter hit, or
//! none, rather than change that. A twin's pages are left alone where that would open a huge page.
//!
//! The promise is for the requests that the slab was planned for as well, come or not. Of more requests than
//! fit, some have to wait or to be preempted, wherever pages lie. Then it is kept for those that are there,
//! or that hold something already; and if these are too many, pages and hits are taken as they come.

use crate::config::Expected;
use crate::error::LedgerError;
use crate::groups::GroupKind;
use crate::hits::Hit;
use crate::ledger::Ledger;
use crate::needs::Next;
use crate::page_copies::Leaving;
use crate::planning::{Plan, Scratch};
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::tiers::Loads;
use crate::to_completion::Share;
use block_pool::GroupId;
use smallvec::{SmallVec, smallvec};

/// Pages of each group.
type Pages = SmallVec<[u32; 4]>;

/// Whom the promise is for.
#[derive(Clone, Copy)]
struct Circle {
    /// Those as well that the slab was planned for, and that have not come yet.
    expected: bool,
    /// Those as well that hold nothing yet.
    all: bool,
    /// Whether forwards compute as much as they may, rather than what they were last bounded to.
    unbounded: bool,
}

/// From the widest to the narrowest.
const CIRCLES: [Circle; 4] = [
    Circle { expected: true, all: true, unbounded: true },
    Circle { expected: false, all: true, unbounded: true },
    Circle { expected: false, all: false, unbounded: true },
    Circle { expected: false, all: false, unbounded: false },
];

impl Ledger {
    /// [`Ledger::plan`], where requests go on from less than was found if the promise cannot be kept
    /// otherwise. Notes what there is to be room for when the batch takes its pages.
    pub(crate) fn plan_room(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), LedgerError> {
        scratch.halvings = 0;
        let planned = self.plan(batch, num_tokens, loads, scratch);
        if self.config.huge_pages.is_none() || !self.spreads(&planned, scratch) {
            return planned;
        }
        while scratch.has_hits() {
            scratch.halvings += 1;
            let with_less = self.plan(batch, num_tokens, loads, scratch);
            if with_less.is_ok() && !self.spreads(&with_less, scratch) {
                return with_less;
            }
        }
        scratch.halvings = 0;
        let planned = self.plan(batch, num_tokens, loads, scratch);
        self.spreads(&planned, scratch);
        planned
    }

    /// Whether the promise cannot be kept, and could be if nothing were spread. Notes [`Scratch::left`].
    fn spreads(&mut self, planned: &Result<(), LedgerError>, scratch: &mut Scratch) -> bool {
        let (Ok(()) | Err(LedgerError::InsufficientBlocks { .. })) = planned else { return false };
        let demand = self.demand(scratch);
        if demand.iter().all(|&pages| pages == 0) && !scratch.has_hits() {
            return false; // as in most steps of few requests
        }
        let (left, spread) = self.room_to_end(scratch, &demand);
        scratch.left = left;
        spread
    }

    /// What there is to be room for when requests that hold nothing take `demand` pages of each group.
    pub(crate) fn left_beside(&mut self, demand: &[u32]) -> Pages {
        self.room_to_end(&Scratch::default(), demand).0
    }

    /// What can be promised once a planned batch has claimed its hits and takes `demand` pages of each group;
    /// and whether more could be, if nothing were spread.
    fn room_to_end(&mut self, scratch: &Scratch, demand: &[u32]) -> (Pages, bool) {
        let (room, claimed) = self.room_after(scratch);
        self.look_at_rests();
        let capacity = self.pools.capacity();
        let mut spread = false;
        for circle in CIRCLES {
            let mut left = self.to_come(scratch, &claimed, circle);
            left.iter_mut().zip(demand).for_each(|(left, &demand)| *left = demand.max(*left));
            if room.can_satisfy(&left) {
                return (left, spread);
            }
            let held = |group: GroupId| i64::from(self.pools[group].held()) + claimed[group.index()];
            let in_all = self.config.group_ids().zip(&left);
            let in_all: Pages = in_all.map(|(group, &left)| whole(i64::from(left) + held(group))).collect();
            spread |= capacity.can_satisfy(&in_all);
        }
        (demand.iter().copied().collect(), spread)
    }

    /// Pages of each group that requests take until they end, at most, once the planned batch has `claimed`
    /// its hits.
    fn to_come(&self, scratch: &Scratch, claimed: &[i64], circle: Circle) -> Pages {
        let mut sums: SmallVec<[i64; 4]> = smallvec![0; self.config.groups.len()];
        let mut add = |times: i64, pages: &[u32]| {
            sums.iter_mut().zip(pages).for_each(|(sum, &pages)| *sum += times * i64::from(pages));
        };
        let included = |sequence: &Sequence| circle.all || !sequence.holds_nothing();
        for (slot, sequence) in self.slots.iter().filter(|(_, sequence)| included(sequence)) {
            add(1, &self.rest_of(slot, sequence, None, circle));
        }
        for plan in &scratch.plans {
            let Some(sequence) = self.slots.get(plan.slot) else { continue };
            let is_ahead = plan.start > sequence.position;
            if included(sequence) && is_ahead {
                add(-1, &self.rest_of(plan.slot, sequence, None, circle));
            }
            if !included(sequence) || is_ahead {
                add(1, &self.rest_of(plan.slot, sequence, Some(plan), circle));
            }
        }
        if circle.expected {
            let Expected { requests, pages } = &self.config.expected;
            add((i64::from(*requests) - self.slots.len() as i64).max(0), pages);
        }
        for (group, (sum, claimed)) in self.config.group_ids().zip(sums.iter_mut().zip(claimed)) {
            if self.config.kind(group).gives_back() {
                let pool = &self.pools[group];
                *sum -= i64::from(pool.held() - pool.in_flight()) + claimed;
            }
        }
        sums.into_iter().map(whole).collect()
    }

    /// The pages that one request counts for, as it is or as it is planned.
    fn rest_of(&self, slot: SlotId, sequence: &Sequence, plan: Option<&Plan>, circle: Circle) -> Pages {
        let in_prompt = sequence.position < sequence.prompt_end;
        let next = (plan.is_some() || !circle.unbounded && in_prompt).then(|| {
            let bound = plan.map_or(sequence.bound, |plan| plan.bound);
            self.next_of(slot, sequence, plan, (!circle.unbounded).then_some(bound))
        });
        let pages = self.config.group_ids().map(|group| match &next {
            None => self.beside_held(sequence, group, sequence.rest.most[group.index()], 0),
            Some(next) => self.beside_held(sequence, group, self.most_pages(next, group), next.hit_end),
        });
        pages.collect()
    }

    /// Of the `most` pages that a request will hold of a group at one time, those that it has not, where this
    /// is simple: of a group that gives pages back, all.
    fn beside_held(&self, sequence: &Sequence, group: GroupId, most: u32, hit_end: u32) -> u32 {
        let kind = self.config.kind(group);
        if kind.gives_back() {
            most
        } else if kind.lasts() {
            self.needed_to_last(sequence, group)
        } else {
            let held = sequence.blocks_held(group, self.config.page_size).max(hit_end);
            let copies = self.copies_first(sequence, group, sequence.position, &mut Leaving::new());
            most.saturating_sub(held) + sequence.pages_set_aside(group) + u32::from(copies)
        }
    }

    /// Most pages of a group that a request holds at one time from now to its end.
    fn most_pages(&self, next: &Next, group: GroupId) -> u32 {
        let Some(sequence) = self.slots.get(next.slot) else { return 0 };
        let (kind, page_size) = (self.config.kind(group), self.config.page_size);
        let Some(forward) = &next.forward else { return sequence.all_pages(group).count() as u32 };
        if kind.lasts() {
            0 // taken once, and counted as such
        } else if kind.is_recurrent() {
            sequence.beams.max(1) - 1 + kind.most_states()
        } else if kind.forgets() {
            self.peaks(next, group, true, &Share::default()).0
        } else {
            let covered = self.covered_at_end(next, true);
            let beams = sequence.for_other_beams(kind, forward.start, covered, page_size);
            // If it has no limit, it comes as far as one can that is alone.
            covered.div_ceil(page_size).saturating_add(beams).min(self.most_blocks_alone)
        }
    }

    /// What comes next for a request, as it is or as it is planned, if forwards compute no more than `bound`.
    fn next_of(&self, slot: SlotId, sequence: &Sequence, plan: Option<&Plan>, bound: Option<u32>) -> Next {
        let page_size = self.config.page_size;
        let start = plan.map_or(sequence.arrival(page_size), |plan| plan.start);
        let most = self.config.most_tokens(bound);
        let goes_on = !sequence.dummy && start < sequence.most_tokens(&self.config);
        Next {
            slot,
            hit: Hit::NONE,
            hit_end: plan.filter(|plan| !plan.hit().is_empty()).map_or(0, |plan| plan.start / page_size),
            part: None,
            back: None,
            forward: goes_on.then(|| sequence.forward(start, most)),
            most,
        }
    }

    /// Looks again at requests that have moved on in a way that counts.
    fn look_at_rests(&mut self) {
        let moved = |(slot, sequence): (SlotId, &Sequence)| {
            (sequence.rest.key != Some(sequence.rest_key())).then_some(slot)
        };
        for slot in self.slots.iter().filter_map(moved).collect::<SmallVec<[SlotId; 16]>>() {
            let Some(sequence) = self.slots.get(slot) else { continue };
            let next = self.next_of(slot, sequence, None, None);
            let most = self.config.group_ids().map(|group| self.most_pages(&next, group)).collect();
            let key = Some(sequence.rest_key());
            if let Some(sequence) = self.slots.get_mut(slot) {
                sequence.rest = Rest { key, most };
            }
        }
    }
}

/// A number of pages that is none below 0.
fn whole(pages: i64) -> u32 {
    u32::try_from(pages.max(0)).unwrap_or(u32::MAX)
}

/// What a request holds at most from now to its end.
#[derive(Default)]
pub(crate) struct Rest {
    key: Option<[u32; 4]>,
    /// Pages of each group.
    most: SmallVec<[u32; 2]>,
}

impl Sequence {
    /// Changes when the request may hold less, or more, at one time than before.
    fn rest_key(&self) -> [u32; 4] {
        let in_prompt = self.processed < self.prompt_end;
        let at = if in_prompt { [self.processed, self.position] } else { [u32::MAX; 2] };
        [at[0], at[1], self.prompt_end, self.beams]
    }
}

impl GroupKind {
    /// Whether requests give pages of the group back before they end: what all of them hold is counted as
    /// one.
    fn gives_back(self) -> bool {
        self.forgets() && !self.lasts()
    }
}
