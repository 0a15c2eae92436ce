//! What forwards take in groups whose pages hold states, or last, as schedulers ask.

use crate::groups::{GroupKind, last_boundary, state_block};
use crate::hits::Found;
use crate::ledger::Ledger;
use crate::needs::Next;
use crate::page_copies::Leaving;
use crate::planning::Change;
use crate::returning::Return;
use crate::sequence::Sequence;
use crate::to_completion::Share;
use block_pool::GroupId;

impl Ledger {
    /// Pages that the next forward of a request takes from what is free, or the next two.
    pub(crate) fn needed_states(
        &mut self,
        next: &Next,
        found: &Found,
        group: GroupId,
        two_steps: bool,
        leaving: &mut Leaving,
    ) -> u32 {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else { return 0 };
        let beams = sequence.beams.max(1) - 1;
        let copies = if sequence.suspension.is_some() {
            self.keeps_state(next, group)
        } else {
            let from_hit = !next.hit.is_empty();
            // Who waits for a load has the page for the copy.
            sequence.load.is_none()
                && self.goes_on_from_copy(sequence, group, forward.start, from_hit, leaving)
        };
        let again = two_steps && self.is_snapshot(sequence, group, forward.end);
        let mut pages = i64::from(Ledger::new_state(forward.start) + u32::from(copies) + u32::from(again));
        let change = Change { sequence, hit: &next.hit, start: forward.start, part: None };
        change.pages(&self.config, &mut self.pools, found, group, |_, _, gains| {
            pages += if gains { 1 } else { -1 };
        });
        beams + u32::try_from(pages).unwrap_or(0)
    }

    /// Whether the state that the next forward of a request goes on from stays while that is out.
    pub(crate) fn keeps_state(&self, next: &Next, group: GroupId) -> bool {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else { return false };
        let start = forward.start;
        let page = sequence.row(group).page(state_block(start, self.config.page_size) as usize);
        let found = |back: &Return| back.rows[group.index()].stored().next().is_some();
        let known = page.is_some_and(|page| self.pools[group].node(page).is_some())
            || next.back.as_deref().is_some_and(found);
        start > 0 && (!next.hit.is_empty() || known || self.is_snapshot(sequence, group, start))
    }

    /// The most states that a request will have at one time while a forward to come is out, without those it has with
    /// others and with them: the live one, and those that the forwards out go on from, if they are kept.
    pub(crate) fn state_peaks(
        &self,
        next: &Next,
        group: GroupId,
        two_steps: bool,
        share: &Share,
    ) -> (u32, u32) {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else {
            return (0, 0);
        };
        let (page_size, start) = (self.config.page_size, forward.start);
        let with_others = |start: u32| share.with_others.contains(&state_block(start, page_size));
        let (mut most, mut peak) = (0, 0);
        let mut at = |kept: u32, shared: u32| {
            most = most.max(sequence.beams.max(1) + kept - shared);
            peak = peak.max(sequence.beams.max(1) + kept);
        };
        let first = u32::from(self.keeps_state(next, group));
        let first_shared = first * u32::from(with_others(start));
        // The newest forward that is out now may be still; where the request moves to a hit, none is.
        let before = sequence.steps_out.last().filter(|_| two_steps && next.hit.is_empty());
        let before = before.map(|out| out.start).filter(|&start| {
            start > 0
                && start.is_multiple_of(page_size)
                && sequence.row(group).page(state_block(start, page_size) as usize).is_some()
        });
        let before_shared = u32::from(before.is_some_and(with_others));
        at(u32::from(before.is_some()) + first, before_shared + first_shared);

        let Some(kept) = self.kept_states(sequence, group) else { return (most, peak) };
        let later = kept.next(start + 1);
        at(u32::from(later.is_some()), 0);
        if !two_steps {
            return (most, peak);
        }
        // A forward goes from one kept state to the next: of several tokens only as far as they are given.
        let given = sequence.prompt_end.max(sequence.len());
        let reaches = |from: u32, to: u32| to == from + 1 || to - from <= next.most && to <= given;
        if later.is_some_and(|later| reaches(start, later)) {
            at(first + 1, first_shared);
        }
        // They lie as near to each other as the first ones, or as those around the end of the prompt.
        let around_end = kept.boundary.saturating_sub(kept.interval).max(start + 1);
        for from in [start + 1, around_end] {
            let mut state = kept.next(from);
            for _ in 0..2 {
                let following = state.and_then(|state| kept.next(state + 1));
                if state.zip(following).is_some_and(|(from, to)| reaches(from, to)) {
                    at(2, 0);
                }
                state = following;
            }
        }
        (most, peak)
    }

    /// After which tokens states of a request are kept for others, if any are.
    fn kept_states(&self, sequence: &Sequence, group: GroupId) -> Option<KeptStates> {
        let GroupKind::Recurrent(snapshots) = self.config.kind(group) else { return None };
        self.publishes(sequence).then(|| KeptStates {
            interval: snapshots.interval,
            boundary: if snapshots.last {
                last_boundary(sequence.prompt_end, self.config.page_size)
            } else {
                0
            },
            end: sequence.most_tokens(&self.config),
        })
    }

    /// Pages that a request takes once, if it has not. To work in each of its beams has some; what an encoder made is for
    /// all of them.
    pub(crate) fn needed_to_last(&self, sequence: &Sequence, group: GroupId) -> u32 {
        let kind = self.config.kind(group);
        let has_some = sequence.all_pages(group).next().is_some();
        let own = if has_some { 0 } else { kind.lasting(sequence.encoder, self.config.page_size) };
        let beams = if kind == GroupKind::Scratch { sequence.beams.max(1) - 1 } else { 0 };
        own + beams
    }
}

/// After which tokens states are kept: multiples of `interval`, and `boundary`, where these are not 0, before the token
/// `end`.
struct KeptStates {
    interval: u32,
    boundary: u32,
    end: u32,
}

impl KeptStates {
    /// The first that is kept after at least `from` tokens, of which there is one.
    fn next(&self, from: u32) -> Option<u32> {
        let multiple = from.div_ceil(self.interval.max(1)).saturating_mul(self.interval);
        let kept = [multiple, self.boundary].into_iter().filter(|at| (from..self.end).contains(at));
        kept.min()
    }
}
