//! What forwards take in groups whose pages hold states, or last, as schedulers ask.

use crate::groups::{GroupKind, last_boundary};
use crate::hits::Found;
use crate::ledger::Ledger;
use crate::needs::Next;
use crate::page_copies::Leaving;
use crate::planning::Change;
use crate::sequence::Sequence;
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
        if self.config.kind(group).lasts() {
            return self.needed_to_last(sequence, group);
        }
        let copies = self.goes_on_from_copy(sequence, group, forward.start, !next.hit.is_empty(), leaving);
        let again = two_steps && self.is_snapshot(sequence, group, forward.end);
        let mut pages = i64::from(Ledger::new_state(forward.start) + u32::from(copies) + u32::from(again));
        let change = Change { sequence, hit: &next.hit, start: forward.start, part: None };
        change.pages(&self.config, &mut self.pools, found, group, |_, _, gains| {
            pages += if gains { 1 } else { -1 };
        });
        beams + u32::try_from(pages).unwrap_or(0)
    }

    /// Pages that a request takes from what is free until it ends, beside those that only it has: at one time it has the
    /// live page, and the state that each step out went on from, if that is kept.
    pub(crate) fn states_to_completion(&self, next: &Next, group: GroupId, two_steps: bool) -> u32 {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else { return 0 };
        if self.config.kind(group).lasts() {
            return self.needed_to_last(sequence, group);
        }
        // Two steps in a row both go on from kept states only in the prompt: others are of a token.
        let oldest = sequence.steps_out.first().map_or(forward.start, |out| out.start);
        let in_a_row = oldest < sequence.prompt_end || self.config.page_size == 1;
        let steps =
            if in_a_row { (1 + u32::from(two_steps)).max(sequence.steps_out.len() as u32) } else { 1 };
        let keeps = !next.hit.is_empty() || self.will_keep(sequence, group, forward.start);
        let pool = &self.pools[group];
        let held = sequence.row(group).held();
        let own = held.clone().filter(|&(_, page)| pool.refs(page) == 1 && pool.pins(page) == 0);
        // What is kept now stays until the results of those that are out.
        let most = (1 + u32::from(keeps) * steps).max(held.clone().count() as u32);
        (sequence.beams.max(1) - 1 + most).saturating_sub(own.count() as u32)
    }

    /// Whether a forward from token `start` on, or a later one, goes on from a state that is kept for others.
    fn will_keep(&self, sequence: &Sequence, group: GroupId, start: u32) -> bool {
        let GroupKind::Recurrent(snapshots) = self.config.kind(group) else { return false };
        let last_start = sequence.most_tokens(&self.config) - 1;
        let multiple = last_start.checked_div(snapshots.interval).map(|count| count * snapshots.interval);
        let boundary = snapshots.last.then(|| last_boundary(sequence.prompt_end, self.config.page_size));
        self.publishes(sequence)
            && [multiple, boundary]
                .into_iter()
                .flatten()
                .any(|at| at > 0 && (start..=last_start).contains(&at))
    }

    /// Pages that a request takes once, if it has not. To work in each of its beams has some; what an encoder made is for
    /// all of them.
    pub(crate) fn needed_to_last(&self, sequence: &Sequence, group: GroupId) -> u32 {
        let kind = self.config.kind(group);
        let own = if sequence.row(group).pages.is_empty() {
            kind.lasting(sequence.encoder, self.config.page_size)
        } else {
            0
        };
        let beams = if kind == GroupKind::Scratch { sequence.beams.max(1) - 1 } else { 0 };
        own + beams
    }
}
