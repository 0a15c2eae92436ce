//! What requests take next, for schedulers: counted by the rules that `alloc` follows, before it is called.
//!
//! The requests of a batch are counted in order, and each for what it adds to those before it: a stored block that
//! two of them will find is needed once. So the sums are those of the batch, and a batch of one tells of a request
//! alone.

use crate::config::LedgerConfig;
use crate::error::LedgerError;
use crate::groups::GroupKind;
use crate::hits::{Found, Hit};
use crate::ledger::Ledger;
use crate::page_copies::Leaving;
use crate::partial::{Partial, TakenOver};
use crate::planning::{Change, Forward, blocks_behind};
use crate::probe::PrefixWalk;
use crate::returning::Return;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::suspension::Stage;
use block_pool::GroupId;
use radix_tree::NodeId;
use smallvec::{SmallVec, smallvec};

/// How requests are going to be served, as far as it matters to what they need.
#[derive(Clone, Copy, Default, Debug)]
pub struct Outlook<'a> {
    /// Most tokens of a forward, as [`Ledger::alloc`] takes them: one for each request, one for all, or none.
    pub num_tokens: &'a [u32],
    /// Whether a forward is planned before the results of the one before are known: two are looked at together.
    pub two_steps: bool,
    /// What [`Ledger::probe`] found of the requests' prompts, in their order. The answer is the same without.
    pub walks: &'a [Option<&'a PrefixWalk>],
}

/// Where a request stands, and what comes next.
pub(crate) struct Next {
    pub(crate) slot: SlotId,
    /// The stored blocks that it goes on from.
    pub(crate) hit: Hit,
    /// Where that ends, in blocks; 0 without one.
    pub(crate) hit_end: u32,
    /// The block behind the hit that it goes on from a part of.
    pub(crate) part: Option<Partial>,
    /// How it comes back, if it is set aside.
    pub(crate) back: Option<Box<Return>>,
    /// Its next forward; `None`: it computes nothing more.
    pub(crate) forward: Option<Forward>,
    /// Most tokens of a forward.
    pub(crate) most: u32,
}

impl Next {
    /// Whether it goes on from something that is stored.
    fn reuses(&self) -> bool {
        !self.hit.is_empty() || self.part.is_some()
    }
}

/// Whether a page that one of them takes over is a hit of another.
fn take_over_a_hit(nexts: &[Next], found: &Found) -> bool {
    let taken_over = nexts.iter().filter_map(|next| next.part.filter(|part| part.takes_over));
    let is_hit = |node: NodeId| nexts.iter().any(|next| found.nodes(&next.hit).contains(&node));
    taken_over.into_iter().any(|part| is_hit(part.node))
}

impl Ledger {
    /// Pages of each group that the next forward of each request takes from what is free: one number for each group
    /// of each request, request after request. Blocks that others hold cost nothing; stored blocks that nobody holds
    /// do. A suspended request needs what [`Ledger::resume`] takes. Changes nothing.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; numbers of tokens that do not match the batch, or 0.
    pub fn needed_blocks_one_step(
        &mut self,
        batch: &[SlotId],
        outlook: Outlook<'_>,
    ) -> Result<Vec<u32>, LedgerError> {
        self.forecast(batch, outlook, |ledger, nexts, found| {
            let mut leaving = Leaving::new();
            let mut needs = Vec::with_capacity(nexts.len() * ledger.config.groups.len());
            for next in nexts {
                for group in ledger.config.group_ids() {
                    let covered = ledger.covered_next(next, group, outlook.two_steps);
                    needs.push(ledger.needed(next, found, group, covered, &mut leaving));
                }
            }
            needs
        })
    }

    /// Tokens that the next forward of each request would not have to compute, because they are stored on the device.
    /// None once its prompt is computed.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch.
    pub fn reusable_tokens(&mut self, batch: &[SlotId]) -> Result<Vec<u32>, LedgerError> {
        self.forecast(batch, Outlook::default(), |ledger, nexts, _| {
            let tokens = |next: &Next| {
                let position = ledger.slots.get(next.slot).map_or(0, |sequence| sequence.position);
                let start = next.forward.filter(|_| next.reuses()).map_or(0, |forward| forward.start);
                start.saturating_sub(position)
            };
            nexts.iter().map(tokens).collect()
        })
    }

    /// What the next forward of each request costs, in tokens: the chunk, if more of the prompt follows; what is left of
    /// the prompt but for the tokens that are stored, if none does; after it a token and the drafts.
    ///
    /// # Errors
    /// As for [`Ledger::needed_blocks_one_step`].
    pub fn reuse_adjusted_compute(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
    ) -> Result<Vec<u32>, LedgerError> {
        let outlook = Outlook { num_tokens, ..Outlook::default() };
        self.forecast(batch, outlook, |ledger, nexts, _| {
            let cost = |next: &Next| {
                let (Some(sequence), Some(forward)) = (ledger.slots.get(next.slot), next.forward) else {
                    return 0;
                };
                let from = if next.reuses() { sequence.position } else { forward.start };
                if next.most < forward.len - from {
                    next.most // what is stored moves the chunk and does not shorten it
                } else {
                    forward.len - forward.start + forward.drafts
                }
            };
            nexts.iter().map(cost).collect()
        })
    }

    /// Pages that a request holds in the end, all its beams together, and pages that there are: it can never be served
    /// if the first are more: those of the group that keeps everything, or of what an encoder made if that does not fit. `None` where that is not so simple: with groups that forget within the length of a
    /// sequence, with several that keep everything, and for a request without a limit.
    ///
    /// # Errors
    /// An unknown slot.
    pub fn block_budget(&self, slot: SlotId) -> Result<Option<(u32, u32)>, LedgerError> {
        let sequence = self.sequence(slot)?;
        let (longest, page_size) = (self.config.max_seq_len, self.config.page_size);
        let forgets = |kind: GroupKind| longest.is_none_or(|longest| kind.needed(longest - 1, 1).from > 0);
        let mut whole = self.config.group_ids().filter(|&group| !self.config.kind(group).forgets());
        let (Some(group), None) = (whole.next(), whole.next()) else { return Ok(None) };
        let windows =
            self.config.groups.iter().filter(|group| group.kind.forgets() && group.kind != GroupKind::Cross);
        let tokens = sequence.length_limit(&self.config);
        if tokens >= i32::MAX.cast_unsigned() || windows.into_iter().any(|window| forgets(window.kind)) {
            return Ok(None);
        }
        let covered = tokens + 2 * sequence.drafts;
        let beams = sequence.for_other_beams(GroupKind::Full, 0, covered, page_size);
        let required = covered.div_ceil(page_size).saturating_add(beams);
        let capacity = self.pools.capacity();
        let encoded = self.config.group_ids().filter(|&group| self.config.kind(group) == GroupKind::Cross);
        let encoded = encoded.map(|group| (sequence.encoder.div_ceil(page_size), capacity.available(group)));
        let own = (required, capacity.available(group));
        Ok(Some(encoded.into_iter().find(|(pages, there)| pages > there).unwrap_or(own)))
    }

    /// Looks at what comes next for each request, and counts what it is told to.
    pub(crate) fn forecast<R>(
        &mut self,
        batch: &[SlotId],
        outlook: Outlook<'_>,
        count: impl FnOnce(&mut Ledger, &[Next], &Found) -> R,
    ) -> Result<R, LedgerError> {
        self.check_bounds(batch, outlook.num_tokens)?;
        let mut scratch = self.admission.take().unwrap_or_default();
        let found = &mut scratch.found;
        found.clear(&self.config);
        let bound = |index: usize| outlook.num_tokens.get(index).or(outlook.num_tokens.last()).copied();
        let walk = |index: usize| outlook.walks.get(index).copied().flatten();
        let next = |(index, &slot): (usize, &SlotId)| self.next(slot, bound(index), walk(index), found);
        let nexts: Result<SmallVec<[Next; 4]>, _> = batch.iter().enumerate().map(next).collect();
        let counted = nexts.map(|mut nexts| {
            let parts = nexts.iter().any(|next| next.part.is_some());
            if parts && (take_over_a_hit(&nexts, found) || !self.has_room(&nexts, found)) {
                nexts.iter_mut().for_each(|next| self.without_part(next)); // as `alloc` does
            }
            self.mark(&nexts, found);
            count(self, &nexts, found)
        });
        self.admission = Some(scratch);
        counted
    }

    fn mark(&mut self, nexts: &[Next], found: &Found) {
        let parts: SmallVec<[NodeId; 4]> =
            nexts.iter().filter_map(|next| next.part.map(|part| part.node)).collect();
        self.mark_held(found, &parts);
    }

    /// Whether all of it can be had together.
    fn has_room(&mut self, nexts: &[Next], found: &Found) -> bool {
        self.mark(nexts, found);
        let mut leaving = Leaving::new();
        let mut demand: SmallVec<[u32; 4]> = smallvec![0; self.config.groups.len()];
        for next in nexts {
            for group in self.config.group_ids() {
                let covered = self.covered_next(next, group, false);
                demand[group.index()] += self.needed(next, found, group, covered, &mut leaving);
            }
        }
        self.pools.can_satisfy(&demand)
    }

    fn without_part(&self, next: &mut Next) {
        let (Some(part), Some(forward)) = (next.part.take(), next.forward) else { return };
        let sequence = self.slots.get(next.slot);
        next.forward = sequence.map(|sequence| sequence.forward(forward.start - part.run, next.most));
    }

    fn next(
        &mut self,
        slot: SlotId,
        bound: Option<u32>,
        walk: Option<&PrefixWalk>,
        found: &mut Found,
    ) -> Result<Next, LedgerError> {
        let (page_size, epoch) = (self.config.page_size, self.epoch);
        let most = self.config.most_tokens(bound);
        let back = self.look_back(slot).map(Box::new);
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        let mut position = back.as_ref().map_or_else(|| sequence.arrival(page_size), |back| back.processed);
        let mut next = Next { slot, hit: Hit::NONE, hit_end: 0, part: None, back, forward: None, most };
        if sequence.is_here() && sequence.reads(&self.config, epoch) && position < sequence.prompt_end {
            let limit = sequence.hash_reusable(page_size);
            let (config, tree) = (&self.config, &self.tree);
            let known = walk.map_or(&[][..], |walk| walk.of(sequence, tree, limit));
            (next.hit, ..) = found.look_up(config, tree, sequence, known, limit, &mut self.reader);
            if !next.hit.is_empty() {
                next.hit_end = (sequence.nodes.len() + next.hit.blocks()) as u32;
                position = position.max(next.hit_end * page_size);
            }
            if self.config.reuses_partly() {
                let (config, nodes, taken) = (&self.config, found.nodes(&next.hit), TakenOver::default());
                next.part = Partial::find(config, &self.tree, &self.pools, sequence, nodes, position, &taken);
                position += next.part.map_or(0, |part| part.run);
            }
        }
        if let Some(back) = &next.back
            && self.config.reuses_partly()
            && position < sequence.prompt_end
            && sequence.reads(&self.config, epoch)
        {
            let (config, block, taken) = (&self.config, position / page_size, TakenOver::default());
            let is_new = config.of_blocks().all(|group| back.rows[group.index()].shape.blocks <= block);
            if is_new {
                next.part =
                    Partial::find(config, &self.tree, &self.pools, sequence, &back.nodes, position, &taken);
                position += next.part.map_or(0, |part| part.run);
            }
        }
        let forward = sequence.forward(position, most);
        let held = u64::from(forward.len + sequence.draft_room([].iter()));
        let room = u64::from(self.config.max_blocks_per_request(sequence.drafts)) * u64::from(page_size);
        let fits = position < sequence.length_limit(&self.config) && held <= room; // as `alloc` sees it
        if !sequence.dummy && (fits || position < sequence.most_tokens(&self.config)) {
            next.forward = Some(forward);
        }
        Ok(next)
    }

    /// Tokens that a group has pages for when the next forward is planned, or the next two.
    pub(crate) fn covered_next(&self, next: &Next, group: GroupId, two_steps: bool) -> u32 {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else { return 0 };
        let mut reach = forward.reach;
        if two_steps {
            let most = sequence.most_tokens(&self.config) + 3 * sequence.drafts;
            reach = reach.max(sequence.reach_of_two(&forward, next.most).min(most));
        }
        self.config.covered(self.config.kind(group), sequence, reach)
    }

    /// Pages of a group that a request takes from what is free until the tokens before `covered` have some.
    pub(crate) fn needed(
        &mut self,
        next: &Next,
        found: &Found,
        group: GroupId,
        covered: u32,
        leaving: &mut Leaving,
    ) -> u32 {
        let returned = self.pages_to_return(next, group);
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else {
            return returned;
        };
        let page_size = self.config.page_size;
        if self.config.kind(group).lasts() {
            return self.needed_to_last(sequence, group);
        }
        if self.config.kind(group).is_recurrent() {
            return returned + self.needed_states(next, found, group, covered > forward.reach, leaving);
        }
        let held = match &next.back {
            Some(back) => back.rows[group.index()].shape.blocks,
            None => sequence.blocks_held(group, page_size).max(next.hit_end),
        };
        let copies = u32::from(self.copies_first(sequence, group, forward.start, leaving));
        let beams = sequence.for_other_beams(self.config.kind(group), forward.start, covered, page_size);
        let (mut claimed, mut given_back, mut taken_over) = (0, 0, 0);
        let part = next.part.and_then(|part| self.tree.page(part.node, group));
        let change = Change { sequence, hit: &next.hit, start: forward.start, part };
        change.pages(&self.config, &mut self.pools, found, group, |_, page, gains| {
            if gains {
                claimed += 1;
                // Of several that would, one does.
                taken_over += u32::from(Some(page) == part && next.part.is_some_and(|part| part.takes_over));
            } else {
                given_back += 1;
            }
        });
        let new = blocks_behind(held + taken_over, covered, page_size) + returned;
        beams.saturating_add(new + copies + claimed).saturating_sub(given_back)
    }

    /// Pages of a group that a request takes from what is free to come back from where it was set aside.
    pub(crate) fn pages_to_return(&mut self, next: &Next, group: GroupId) -> u32 {
        let Some(row) = next.back.as_ref().map(|back| &back.rows[group.index()]) else { return 0 };
        let pool = &mut self.pools[group];
        let idle = row.stored().filter(|&(_, page)| pool.is_evictable(page) && pool.mark(page));
        idle.count() as u32 + row.taken()
    }

    /// Whether the request gets a copy of the page that its next forward first writes to.
    pub(crate) fn copies_first(
        &self,
        sequence: &Sequence,
        group: GroupId,
        start: u32,
        leaving: &mut Leaving,
    ) -> bool {
        sequence.exposed && sequence.is_here() && self.must_copy(sequence, group, start, leaving)
    }
}

impl Sequence {
    /// Most tokens that the request may have, by what is said of it and of all.
    fn length_limit(&self, config: &LedgerConfig) -> u32 {
        let output = self.max_new_tokens.map_or(u32::MAX, |new| self.prompt.saturating_add(new));
        self.max_length.min(config.max_seq_len.unwrap_or(u32::MAX)).min(output).max(self.len())
    }

    /// Most tokens that the request will have: no more than can be held.
    pub(crate) fn most_tokens(&self, config: &LedgerConfig) -> u32 {
        let room = u64::from(config.max_blocks_per_request(self.drafts)) * u64::from(config.page_size);
        let room = room.saturating_sub(u64::from(3 * self.drafts)).try_into().unwrap_or(u32::MAX);
        self.length_limit(config).min(room).max(self.len())
    }

    /// One past the last token that is written by `forward`, or by the next one if that is planned before anything of
    /// the first is known.
    fn reach_of_two(&self, forward: &Forward, most: u32) -> u32 {
        let len = forward.len + u32::from(forward.end == forward.len);
        let end = len.min(forward.end.saturating_add(most));
        end + self.draft_room(self.steps_out.iter()) + forward.drafts
    }

    /// Whether its pages are here, and no more are on their way.
    pub(crate) fn is_here(&self) -> bool {
        self.load.is_none() && self.suspension.is_none()
    }

    /// Where it stands once what is on its way, or set aside, is here: the tokens with KV.
    pub(crate) fn arrival(&self, page_size: u32) -> u32 {
        match (&self.suspension, &self.load) {
            (Some(suspension), _) => suspension.processed,
            (None, Some(load)) => load.end * page_size,
            (None, None) => self.position,
        }
    }

    /// Blocks that it has pages for in a group then.
    pub(crate) fn blocks_held(&self, group: GroupId, page_size: u32) -> u32 {
        let held = self.row(group).pages.len() as u32;
        match (&self.suspension, &self.load) {
            (Some(suspension), _) => suspension.rows[group.index()].shape.blocks,
            (None, Some(load)) => {
                held.max(self.arrival(page_size) / page_size) + load.rows[group.index()].rest.len() as u32
            }
            (None, None) => held,
        }
    }

    /// Pages of a group that it takes to come back from where it was set aside.
    pub(crate) fn pages_set_aside(&self, group: GroupId) -> u32 {
        match &self.suspension {
            Some(suspension) if !matches!(suspension.stage, Stage::Returning(..)) => {
                suspension.rows[group.index()].shape.pages()
            }
            _ => 0,
        }
    }

    /// Blocks that the beams beside this one will have for themselves: those behind the full blocks of the prompt.
    pub(crate) fn for_other_beams(&self, kind: GroupKind, start: u32, covered: u32, page_size: u32) -> u32 {
        match self.beams {
            0 | 1 => 0,
            beams => {
                let own = kind.held_from(self.prompt_end / page_size, start, covered, page_size);
                own.saturating_mul(beams - 1)
            }
        }
    }
}
