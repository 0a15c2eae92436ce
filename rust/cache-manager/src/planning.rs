//! What `alloc` will do: hits, pages and loads of a whole batch, planned before anything is changed.

use crate::config::{LedgerConfig, Reserve};
use crate::error::LedgerError;
use crate::groups::{Group, GroupKind};
use crate::hits::{Found, Hit};
use crate::ledger::{Ledger, check_length};
use crate::loads::LoadPlan;
use crate::lookup::Lookup;
use crate::page_copies::Leaving;
use crate::partial::{Partial, TakenOver};
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::tiers::Loads;
use crate::write_policy::WritePolicy;
use block_pool::{GroupId, PageId, Pools, Step};
use smallvec::{SmallVec, smallvec};

/// What `alloc` will do for one request.
pub(crate) struct Plan {
    pub(crate) slot: SlotId,
    /// What was found, if the request has a prompt to compute.
    pub(crate) lookup: Option<Box<Lookup>>,
    /// Tokens that the forward computes.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Whether the last of them is a token that a step out will bring.
    pub(crate) placeholder: bool,
    /// Drafts that it verifies behind them.
    pub(crate) drafts: u32,
    /// Most tokens that it may compute, by the caller's word.
    pub(crate) bound: u32,
}

impl Plan {
    pub(crate) fn hit(&self) -> &Hit {
        self.lookup.as_ref().map_or(&Hit::NONE, |lookup| &lookup.hit)
    }

    pub(crate) fn partial(&self) -> Option<Partial> {
        self.lookup.as_ref().and_then(|lookup| lookup.partial)
    }

    pub(crate) fn load(&self) -> Option<&LoadPlan> {
        self.lookup.as_ref().and_then(|lookup| lookup.load.as_ref())
    }

    /// Whether the request goes on from something that is stored.
    pub(crate) fn reuses(&self) -> bool {
        !self.hit().is_empty() || self.partial().is_some() || self.load().is_some()
    }

    /// Where the full blocks end that the request goes on from, in tokens, if there is a hit.
    pub(crate) fn hit_end(&self, config: &LedgerConfig) -> u32 {
        self.start / config.page_size * config.page_size
    }
}

/// Pages that a request takes in a group.
#[derive(Clone, Copy)]
pub(crate) struct NewPages {
    /// For the end of the row.
    pub(crate) new: u32,
    /// Whether the page of the first token is copied, to one more page.
    pub(crate) copies: bool,
}

impl NewPages {
    pub(crate) fn count(self) -> u32 {
        self.new + u32::from(self.copies)
    }
}

/// Buffers that keep their memory from call to call.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) plans: Vec<Plan>,
    /// Whether some of them reuse something.
    reuses: bool,
    /// Pages to take for each plan, in each group.
    pub(crate) pages: Vec<NewPages>,
    pub(crate) found: Found,
    /// How often what a request may find is halved.
    pub(crate) halvings: u32,
    /// Pages of each group to keep room for when the batch begins to take its own, those among them.
    pub(crate) left: SmallVec<[u32; 4]>,
    pub(crate) leaving: Leaving,
    pub(crate) taken_over: TakenOver,
    /// Whether parts of blocks are looked for.
    pub(crate) partly: bool,
}

impl Scratch {
    /// Whether a request goes on from something that is stored on the device.
    pub(crate) fn has_hits(&self) -> bool {
        self.reusing().any(|plan| !plan.hit().is_empty() || plan.partial().is_some())
    }

    /// The plans of requests that go on from something that is stored: none in most steps.
    pub(crate) fn reusing(&self) -> impl Iterator<Item = &Plan> {
        let plans = if self.reuses { &self.plans[..] } else { &[] };
        plans.iter().filter(|plan| plan.reuses())
    }

    /// Each plan, with the pages that it takes in each of so many groups.
    pub(crate) fn plans(&self, groups: usize) -> impl Iterator<Item = (&Plan, &[NewPages])> {
        self.plans.iter().zip(self.pages.chunks_exact(groups))
    }
}

/// What one forward of a request computes.
#[derive(Clone, Copy)]
pub(crate) struct Forward {
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Tokens of the request, with the placeholder that it gets if all that it has are computed or on the way.
    pub(crate) len: u32,
    pub(crate) placeholder: bool,
    pub(crate) drafts: u32,
    /// One past the last token that the forward, its drafts and the drafter may write.
    pub(crate) reach: u32,
}

impl Sequence {
    /// The next forward, from token `start` on, of at most `most` tokens.
    #[inline]
    pub(crate) fn forward(&self, start: u32, most: u32) -> Forward {
        let placeholder = start == self.len();
        let len = self.len() + u32::from(placeholder);
        let end = len.min(start.saturating_add(most));
        let reach = end + self.draft_room(self.steps_out.iter());
        Forward { start, end, len, placeholder, drafts: self.drafts_of(start, end, len), reach }
    }
}

impl LedgerConfig {
    /// Most tokens that one forward of a request computes, if the caller bounds it so.
    #[inline]
    pub(crate) fn most_tokens(&self, bound: Option<u32>) -> u32 {
        bound.unwrap_or(u32::MAX).min(self.max_num_input_tokens.unwrap_or(u32::MAX))
    }

    /// Tokens that a group has pages for when a forward may write up to token `reach`.
    #[inline]
    pub(crate) fn covered(&self, kind: GroupKind, sequence: &Sequence, reach: u32) -> u32 {
        match self.reserve {
            Reserve::Prompt if !kind.forgets() => reach.max(sequence.prompt_end),
            Reserve::Prompt | Reserve::Chunk => reach,
        }
    }
}

/// Blocks with the tokens before `tokens` that come after the `held` first ones.
#[inline]
pub(crate) fn blocks_behind(held: u32, tokens: u32, page_size: u32) -> u32 {
    if u64::from(tokens) <= u64::from(held) * u64::from(page_size) {
        0 // as in most decode steps
    } else {
        tokens.div_ceil(page_size) - held
    }
}

/// A request that goes on from token `start`, where a hit ends and perhaps a part of a block behind it.
pub(crate) struct Change<'a> {
    pub(crate) sequence: &'a Sequence,
    pub(crate) hit: &'a Hit,
    pub(crate) start: u32,
    /// The page of that block in the group at hand.
    pub(crate) part: Option<PageId>,
}

impl Change<'_> {
    /// Tells of the pages of a group that nobody held before (true), and of those that nobody holds afterwards; each
    /// page once in a pass of marks.
    pub(crate) fn pages(
        &self,
        config: &LedgerConfig,
        pools: &mut Pools,
        found: &Found,
        group: GroupId,
        mut each: impl FnMut(&Pools, PageId, bool),
    ) {
        let (kind, page_size) = (config.kind(group), config.page_size);
        let end = self.start / page_size;
        // What is needed where the full blocks end may not be at the end of the part.
        let (needed, at_start) =
            (kind.needed(end * page_size, page_size), kind.needed(self.start, page_size));
        let mut blocks = (self.sequence.nodes.len() as u32..end).filter(|&block| needed.has(block));
        let hit = found.pages(self.hit, group).iter().copied();
        // One that is let go at once is free, unless its hit sends it to the tier: it is in flight then.
        let offloads =
            matches!(config.write_policy, WritePolicy::Selective { .. }) && self.sequence.guards.is_some();
        let stays = self.part.is_none() || offloads;
        let hit = hit.filter(|_| stays || blocks.next().is_none_or(|block| at_start.has(block)));
        for page in hit.chain(self.part) {
            if pools[group].is_evictable(page) && pools[group].mark(page) {
                each(pools, page, true);
            }
        }
        let moves = !self.hit.is_empty() || self.part.is_some();
        for page in self.sequence.let_go_for(moves, self.start, group, config) {
            let pool = &mut pools[group];
            if pool.is_unshared(page) && pool.mark(page) {
                each(pools, page, false);
            }
        }
    }
}

impl Ledger {
    /// The joint plan of the batch. Reads only, but for hashes not computed yet and planning marks.
    pub(crate) fn plan(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), LedgerError> {
        scratch.partly = self.config.reuses_partly() && scratch.halvings == 0;
        let planned = self.plan_batch(batch, num_tokens, loads, scratch);
        let spoiled = match planned {
            // A copy needs its source and a page more: the request may have room without.
            Err(LedgerError::InsufficientBlocks { .. }) => scratch.has_partial(),
            Err(_) => false,
            Ok(()) => scratch.takes_over_a_hit(),
        };
        if !spoiled {
            return planned;
        }
        scratch.partly = false;
        self.plan_batch(batch, num_tokens, loads, scratch)
    }

    fn plan_batch(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), LedgerError> {
        scratch.plans.clear();
        scratch.reuses = false;
        scratch.pages.clear();
        scratch.found.clear(&self.config);
        scratch.leaving.clear();
        scratch.taken_over.clear();
        for (index, &slot) in batch.iter().enumerate() {
            let bound = num_tokens.get(index).or(num_tokens.last()).copied();
            let planned = scratch.pages.len();
            let plan = self.plan_one(index, slot, bound, loads, scratch)?;
            if loads.are_all() && plan.load().is_none() {
                scratch.pages.truncate(planned);
                continue;
            }
            for (group, pages) in self.config.group_ids().zip(&mut scratch.pages[planned..]) {
                if plan.load().is_some() {
                    // Nothing is computed, and nothing copied.
                } else if self.config.kind(group).is_recurrent() {
                    let sequence = self.sequence(slot)?;
                    pages.copies = self.must_copy_state(sequence, group, &plan, &mut scratch.leaving);
                } else if pages.copies {
                    let sequence = self.sequence(slot)?;
                    pages.copies = self.must_copy(sequence, group, plan.start, &mut scratch.leaving);
                }
            }
            if let Some(partial) = plan.partial() {
                let Scratch { plans, pages, taken_over, .. } = &mut *scratch;
                partial.enter(index, &self.config, plans, pages, taken_over);
            }
            scratch.reuses |= plan.reuses();
            scratch.plans.push(plan);
        }
        let mut demand = self.demand(scratch);
        let (mut hits, parts) = (0, scratch.partial_nodes().count());
        for (group, demand) in self.config.group_ids().zip(&mut demand) {
            let claimed = scratch.found.all(group).len() + parts;
            hits += claimed;
            *demand += claimed as u32;
        }
        // With room for every hit beside the new pages, no hit need be looked at, but that one in a huge page which
        // nobody uses takes that page from other groups.
        let simple = hits == 0 || self.config.huge_pages.is_none();
        if simple && self.pools.can_satisfy(&demand) { Ok(()) } else { self.check_room(scratch) }
    }

    /// Pages of each group that the planned batch takes.
    pub(crate) fn demand(&self, scratch: &Scratch) -> SmallVec<[u32; 1]> {
        let groups = self.config.groups.len();
        let mut demand = smallvec![0; groups];
        for pages in scratch.pages.chunks_exact(groups) {
            demand.iter_mut().zip(pages).for_each(|(demand, pages)| *demand += pages.count());
        }
        demand
    }

    fn plan_one(
        &mut self,
        index: usize,
        slot: SlotId,
        bound: Option<u32>,
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
    ) -> Result<Plan, LedgerError> {
        let page_size = self.config.page_size;
        let sequence = self.slots.get(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        check_plannable(sequence, slot, self.step, self.step_open)?;
        if sequence.position == sequence.len() {
            check_length(sequence, slot, 1, self.config.max_seq_len)?;
        }
        let mut lookup = None;
        if sequence.position < sequence.prompt_end {
            lookup = Some(self.look_for(index, slot, loads, scratch)?);
        } else {
            loads.none(index, slot)?;
        }
        let sequence = self.sequence(slot)?;
        let (mut start, mut hit_end, mut taken_over) = (sequence.position, 0, 0);
        if let Some(lookup) = &lookup {
            hit_end = lookup.blocks_with_hit(sequence);
            start = start.max(hit_end * page_size) + lookup.partial.map_or(0, |partial| partial.run);
            taken_over = u32::from(lookup.partial.is_some_and(|partial| partial.takes_over));
        }
        let forward = sequence.forward(start, self.config.most_tokens(bound));
        let loads_some = lookup.as_ref().is_some_and(|lookup| lookup.load.is_some());
        let counts = loads_some || !loads.are_all(); // else it is not planned
        let limit = self.config.max_blocks_per_request(sequence.drafts);
        let most = forward.len + sequence.draft_room([].iter());
        if counts && u64::from(most) > u64::from(limit) * u64::from(page_size) {
            let group = self.config.lead();
            let room = self.room(group, most.div_ceil(page_size), self.pools.available(group));
            return Err(LedgerError::RequestTooLarge { slot, tokens: u64::from(most), limit, room });
        }
        let mut takes = false;
        for (row, group) in sequence.rows.iter().zip(&self.config.groups) {
            let (held, kind) = ((row.pages.len() as u32).max(hit_end) + taken_over, group.kind);
            let covered = self.config.covered(kind, sequence, forward.reach);
            let new = if sequence.dummy {
                0
            } else if kind.is_recurrent() {
                Ledger::new_state(start)
            } else if kind.lasts() {
                if row.pages.is_empty() { kind.lasting(sequence.encoder, page_size) } else { 0 }
            } else {
                blocks_behind(held, covered, page_size)
            };
            takes |= new > 0;
            scratch.pages.push(NewPages { new, copies: sequence.exposed && !kind.lasts() });
        }
        // With all tokens in the pages that it has, as in most decode steps, it needs no more than these.
        let grows = takes || forward.end < forward.len;
        if counts && grows && !self.config.is_plain() && !sequence.dummy {
            self.check_capacity(sequence, slot, start, forward.reach, most)?;
        }
        if let Some(lookup) = &mut lookup
            && let Some(load) = &mut lookup.load
            && !self.plan_load_pages(load, slot, start, bound, hit_end, scratch)
        {
            lookup.load = None;
        }
        let Forward { end, placeholder, drafts, .. } = forward;
        let bound = bound.unwrap_or(u32::MAX);
        Ok(Plan { slot, lookup, start, end, placeholder, drafts, bound })
    }

    /// Refuses a request that would not fit if it were alone: now, with the tokens from `start` up to `reach`, or when
    /// the last of its `tokens` is computed.
    fn check_capacity(
        &self,
        sequence: &Sequence,
        slot: SlotId,
        start: u32,
        reach: u32,
        tokens: u32,
    ) -> Result<(), LedgerError> {
        let page_size = self.config.page_size;
        // What the groups have at one time counts together.
        let held = |group: &Group, (start, reach, end): (u32, u32, u32)| {
            let kind = group.kind;
            if kind.lasts() {
                kind.lasting(sequence.encoder, page_size)
            } else if kind.forgets() {
                kind.held(start, self.config.covered(kind, sequence, reach), page_size)
            } else {
                kind.held(end - 1, end, page_size)
            }
        };
        let capacity = self.pools.capacity();
        let at_last = (tokens - 1, tokens, tokens);
        let at =
            |when| self.config.groups.iter().map(|group| held(group, when)).collect::<SmallVec<[u32; 4]>>();
        let lacking = [at((start, reach, tokens)), at(at_last)];
        let lacking = lacking.into_iter().filter(|pages| !capacity.can_satisfy(pages));
        let Some(pages) = lacking.max_by_key(|pages| pages.iter().sum::<u32>()) else { return Ok(()) };
        let short = |&group: &GroupId| pages[group.index()] > capacity.available(group);
        let (room, limit) = if let Some(group) = self.config.group_ids().find(short) {
            let free = self.pools.available(group);
            (self.room(group, pages[group.index()], free), capacity.available(group))
        } else {
            let room = self.huge_room(&pages);
            (room, room.total)
        };
        Err(LedgerError::RequestTooLarge { slot, tokens: tokens.into(), limit, room })
    }
}

fn check_plannable(sequence: &Sequence, slot: SlotId, step: Step, open: bool) -> Result<(), LedgerError> {
    if sequence.load.is_some() {
        return Err(LedgerError::Loading { slot });
    }
    sequence.check_present(slot)?;
    if let Some(newest) = sequence.steps_out.last() {
        if open && newest.step == step {
            return Err(LedgerError::AlreadyPlanned { slot, step: step.0 });
        }
        if sequence.steps_out.len() == 2 {
            return Err(LedgerError::TwoStepsOut { slot });
        }
    } else if sequence.position == sequence.len() {
        return Err(LedgerError::NothingToCompute { slot });
    }
    Ok(())
}
