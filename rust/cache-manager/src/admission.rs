//! `alloc`: prefix hits and pages for the next forward, for a whole batch or not at all.

use crate::config::Reserve;
use crate::error::LedgerError;
use crate::hits::{Found, Hit};
use crate::ledger::{Ledger, check_length};
use crate::loads::LoadJob;
use crate::misses::{Miss, MissReason};
use crate::page_copies::Leaving;
use crate::sequence::{Sequence, StepOut};
use crate::slots::SlotId;
use crate::tiers::{Loads, OuterTier};
use block_pool::{GroupId, Step};
use smallvec::{SmallVec, smallvec};

/// What `alloc` will do for one request.
struct Plan {
    slot: SlotId,
    hit: Hit,
    /// At first admission: why the first block after the hits was missed, and how many were, up to the
    /// block of the last token.
    missed: Option<(MissReason, u32)>,
    /// Tokens that the forward computes.
    start: u32,
    end: u32,
    /// Whether the last of them is a token that a step out will bring.
    placeholder: bool,
    /// Drafts that it verifies behind them.
    drafts: u32,
    /// Blocks to load before a forward can be planned, and the first of them.
    load: u32,
    first_load: u32,
}

/// Pages that a request takes in a group.
#[derive(Clone, Copy)]
struct NewPages {
    /// For the end of the row.
    new: u32,
    /// Whether the page of the first token is copied, to one more page.
    copies: bool,
}

impl NewPages {
    fn count(self) -> u32 {
        self.new + u32::from(self.copies)
    }
}

/// Buffers that keep their memory from call to call.
#[derive(Default)]
pub(crate) struct Scratch {
    plans: Vec<Plan>,
    /// Pages to take for each plan, in each group.
    pages: Vec<NewPages>,
    found: Found,
    leaving: Leaving,
}

impl Scratch {
    /// Each plan, with the pages that it takes in each of so many groups.
    fn plans(&self, groups: usize) -> impl Iterator<Item = (&Plan, &[NewPages])> {
        self.plans.iter().zip(self.pages.chunks_exact(groups))
    }
}

impl Ledger {
    /// Takes prefix hits and reserves pages for the next forward of every request in `batch`.
    /// `num_tokens[i]` bounds what request `i` computes; one number bounds all; none: no bound.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; a request that cannot be planned now; a bound of 0;
    /// [`LedgerError::InsufficientBlocks`] naming the first request that did not fit, or
    /// [`LedgerError::RequestTooLarge`] when it never will. Nothing is changed then.
    pub fn alloc(&mut self, batch: &[SlotId], num_tokens: &[u32]) -> Result<(), LedgerError> {
        self.alloc_with_loads(batch, num_tokens, &[]).map(drop)
    }

    /// [`Ledger::alloc`], where `loads[i]` blocks of request `i` are to come from another tier, after
    /// those found on the device ([`Ledger::wanted`] says how many these are). For such a request no
    /// forward is planned: it waits until [`Ledger::end_copies`] is told of its load, holding the pages
    /// that the rest of its prompt and the forward after the load need. No `loads`: none.
    ///
    /// # Errors
    /// As there; a load that reaches past the blocks that may be reused, or for a request that may not
    /// load.
    pub fn alloc_with_loads(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        loads: &[u32],
    ) -> Result<Vec<LoadJob>, LedgerError> {
        if !loads.is_empty() && loads.len() != batch.len() {
            return Err(LedgerError::Mismatch(format!(
                "loads has {} entries for {} requests",
                loads.len(),
                batch.len()
            )));
        }
        self.alloc_with(batch, num_tokens, Loads::Given(loads))
    }

    /// [`Ledger::alloc`] with loads from somewhere, one or none a request.
    pub(crate) fn alloc_with(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        mut loads: Loads<'_>,
    ) -> Result<Vec<LoadJob>, LedgerError> {
        if num_tokens.len() > 1 && num_tokens.len() != batch.len() {
            return Err(LedgerError::Mismatch(format!(
                "num_tokens has {} entries for {} requests: give one number, or one a request",
                num_tokens.len(),
                batch.len()
            )));
        }
        if num_tokens.contains(&0) {
            return Err(LedgerError::OutOfRange {
                name: "num_tokens",
                given: 0,
                allowed: "at least 1 token".into(),
            });
        }
        self.check_batch(batch)?;
        self.check_awake()?;
        let mut scratch = std::mem::take(&mut self.admission);
        let outcome = self.plan(batch, num_tokens, &mut loads, &mut scratch);
        if let Err(LedgerError::InsufficientBlocks { .. } | LedgerError::RequestTooLarge { .. }) = &outcome {
            self.counters.failed_allocs += 1;
        }
        let outcome = outcome.map(|()| self.commit_plans(&scratch));
        if let (Ok(_), Loads::From(tier)) = (&outcome, &mut loads) {
            self.touch_hits(&scratch, *tier);
        }
        self.admission = scratch;
        outcome
    }

    /// Plans a padding request, claimed and not planned yet, for the next forward: tables show the null
    /// page for it, it takes no page, and nothing of it is read or stored.
    ///
    /// # Errors
    /// An unknown slot; a request that was planned before; more tokens than the null page has room for.
    pub fn alloc_dummy(&mut self, slot: SlotId) -> Result<(), LedgerError> {
        let page_size = self.config.page_size;
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        if sequence.admitted || sequence.dummy {
            return Err(LedgerError::PlannedBefore(slot));
        }
        if sequence.len() > page_size {
            return Err(LedgerError::TooLong {
                slot: Some(slot),
                tokens: u64::from(sequence.len()),
                limit: u64::from(page_size),
                what: "one page: padding goes to the null page",
            });
        }
        sequence.dummy = true;
        let planned = self.alloc(&[slot], &[]);
        if let (Err(_), Some(sequence)) = (&planned, self.slots.get_mut(slot)) {
            sequence.dummy = false;
        }
        planned
    }

    /// The joint plan of the batch. Reads only, but for hashes not computed yet and planning marks.
    fn plan(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        loads: &mut Loads<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), LedgerError> {
        scratch.plans.clear();
        scratch.pages.clear();
        scratch.found.clear(&self.config);
        scratch.leaving.clear();
        for (index, &slot) in batch.iter().enumerate() {
            let bound = num_tokens.get(index).or(num_tokens.last()).copied();
            let planned = scratch.pages.len();
            let plan = self.plan_one(index, slot, bound, loads, scratch)?;
            for (group, pages) in self.config.group_ids().zip(&mut scratch.pages[planned..]) {
                if pages.copies {
                    let sequence = self.sequence(slot)?;
                    pages.copies = self.must_copy(sequence, group, plan.start, &mut scratch.leaving);
                }
            }
            scratch.plans.push(plan);
        }
        let mut demand = self.demand(scratch);
        let mut hits = 0;
        for (group, demand) in self.config.group_ids().zip(&mut demand) {
            hits += scratch.found.all(group).len();
            *demand += scratch.found.all(group).len() as u32;
        }
        // With room for every hit beside the new pages, no hit need be looked at, but that one in a huge page which
        // nobody uses takes that page from other groups.
        let simple = hits == 0 || self.config.huge_pages.is_none();
        if simple && self.pools.can_satisfy(&demand) { Ok(()) } else { self.check_room(scratch) }
    }

    /// Pages of each group that the planned batch takes.
    fn demand(&self, scratch: &Scratch) -> SmallVec<[u32; 1]> {
        let groups = self.config.groups.len();
        let mut demand = smallvec![0; groups];
        for pages in scratch.pages.chunks_exact(groups) {
            demand.iter_mut().zip(pages).for_each(|(demand, pages)| *demand += pages.count());
        }
        demand
    }

    /// Whether the planned batch fits, to the page.
    fn check_room(&mut self, scratch: &Scratch) -> Result<(), LedgerError> {
        let mut room = self.pools.room();
        for group in self.config.group_ids() {
            let pool = &mut self.pools[group];
            pool.open_marks();
            for &page in scratch.found.all(group) {
                if !pool.is_evictable(page) {
                    pool.mark(page); // held, and hit: nobody who lets it go makes room
                }
            }
        }
        let mut demand: SmallVec<[u32; 1]> = smallvec![0; self.config.groups.len()];
        let mut lacking = None;
        for (plan, taken) in scratch.plans(self.config.groups.len()) {
            let sequence = self.slots.get(plan.slot).ok_or(LedgerError::UnknownSlot(plan.slot))?;
            for group in self.config.group_ids() {
                for &page in scratch.found.pages(&plan.hit, group) {
                    if self.pools[group].is_evictable(page) && self.pools[group].mark(page) {
                        room.claim(&self.pools, group, page);
                    }
                }
                for page in sequence.let_go_for(&plan.hit, plan.start, group, &self.config) {
                    let pool = &mut self.pools[group];
                    if pool.refs(page) == 1 && pool.pins(page) == 0 && pool.mark(page) {
                        room.give_back(&self.pools, group, page);
                    }
                }
            }
            let before = demand.clone();
            for (demand, pages) in demand.iter_mut().zip(taken) {
                *demand += pages.count();
            }
            if lacking.is_none() && !room.can_satisfy(&demand) {
                let short = |&group: &GroupId| demand[group.index()] > room.available(group);
                let no_room = match self.config.group_ids().find(short) {
                    Some(group) => {
                        let free = room.available(group).saturating_sub(before[group.index()]);
                        self.room(group, taken[group.index()].count(), free)
                    }
                    None => self.huge_room(&demand),
                };
                lacking = Some((plan.slot, no_room));
            }
        }
        // A later request's hits may give back pages that an earlier one lacked: the sum decides.
        match lacking {
            Some((slot, no_room)) if !room.can_satisfy(&demand) => {
                Err(LedgerError::InsufficientBlocks { slot, room: no_room })
            }
            _ => Ok(()),
        }
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
        let (step, open, epoch) = (self.step, self.step_open, self.epoch);
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        check_plannable(sequence, slot, step, open)?;
        let placeholder = sequence.position == sequence.len();
        if placeholder {
            check_length(sequence, slot, 1, self.config.max_seq_len)?;
        }
        let len = sequence.len() + u32::from(placeholder);

        let mut missed = None;
        let (mut hit, mut on_device) = (Hit::default(), sequence.nodes.len());
        let reads =
            self.config.prefix_caching && !sequence.no_read && !sequence.dummy && sequence.epoch == epoch;
        if reads && sequence.position < sequence.prompt_end {
            sequence.hash_known(page_size as usize);
            let limit = ((sequence.known() - 1) / page_size) as usize;
            let found = &mut scratch.found;
            let collided;
            (hit, on_device, collided) =
                found.look_up(&self.config, &self.tree, sequence, limit, &mut self.reader);
            found.collisions += u64::from(collided);
            if !sequence.admitted && on_device < limit {
                let miss = Miss::of(&self.tree, &self.evicted, sequence.chain.keys()[on_device], collided);
                missed = Some((miss.reason, (limit - on_device) as u32));
            }
        }
        let hit_end = if hit.is_empty() { 0 } else { (sequence.nodes.len() + hit.blocks()) as u32 };
        let start = sequence.position.max(hit_end * page_size);
        // What the request has computed and not stored is not loaded either.
        let first_load = (on_device as u32).max(start / page_size);
        let most_load = if reads && sequence.may_load() && self.config.is_plain() {
            ((sequence.known() - 1) / page_size).saturating_sub(first_load)
        } else {
            0
        };
        let load = loads.of(index, sequence, first_load, most_load);
        if load > most_load {
            return Err(LedgerError::BadLoad { slot, given: load, most: most_load });
        }
        let most = bound.unwrap_or(u32::MAX).min(self.config.max_num_input_tokens.unwrap_or(u32::MAX));
        let end = len.min(start.saturating_add(most));
        let reserved = end + sequence.draft_room(sequence.steps_out.iter());
        let limit = self.config.max_blocks_per_request(sequence.drafts);
        let most = len + sequence.draft_room([].iter());
        if u64::from(most) > u64::from(limit) * u64::from(page_size) {
            let group = self.config.lead();
            let room = self.room(group, most.div_ceil(page_size), self.pools.available(group));
            return Err(LedgerError::RequestTooLarge { slot, tokens: u64::from(most), limit, room });
        }
        let plain = self.config.is_plain() || sequence.dummy;
        let mut at_most: SmallVec<[u32; 1]> = SmallVec::new();
        for (row, group) in sequence.rows.iter().zip(&self.config.groups) {
            let (held, kind) = ((row.pages.len() as u32).max(hit_end), group.kind);
            let covered = match self.config.reserve {
                Reserve::Prompt if !kind.forgets() => reserved.max(sequence.prompt_end),
                Reserve::Prompt | Reserve::Chunk => reserved,
            };
            let new = if sequence.dummy {
                0
            } else if load > 0 {
                load + most.div_ceil(page_size).saturating_sub(held.max(first_load + load))
            } else if u64::from(covered) <= u64::from(held) * u64::from(page_size) {
                0 // as in most decode steps
            } else {
                covered.div_ceil(page_size) - held
            };
            if !plain {
                // Now, and when the last token is computed.
                let (now, last) =
                    (kind.held(start, covered, page_size), kind.held(most - 1, most, page_size));
                at_most.push(if kind.forgets() { now.max(last) } else { last });
            }
            scratch.pages.push(NewPages { new, copies: sequence.exposed && load == 0 });
        }
        let drafts = sequence.drafts_of(start, end, len);
        if !plain {
            self.check_capacity(slot, most, &at_most)?;
        }
        Ok(Plan { slot, hit, missed, start, end, placeholder, drafts, load, first_load })
    }

    /// Refuses a request that would not fit if it were alone: with so many tokens it holds `pages` of each group.
    fn check_capacity(&self, slot: SlotId, tokens: u32, pages: &[u32]) -> Result<(), LedgerError> {
        let capacity = self.pools.capacity();
        if capacity.can_satisfy(pages) {
            return Ok(());
        }
        let short = |&group: &GroupId| pages[group.index()] > capacity.available(group);
        let (room, limit) = if let Some(group) = self.config.group_ids().find(short) {
            let free = self.pools.available(group);
            (self.room(group, pages[group.index()], free), capacity.available(group))
        } else {
            let room = self.huge_room(pages);
            (room, room.total)
        };
        Err(LedgerError::RequestTooLarge { slot, tokens: tokens.into(), limit, room })
    }

    /// Carries out the plans; nothing here can fail. All hits of all requests are claimed first, so that
    /// no page taken for one request is a hit of another.
    fn commit_plans(&mut self, scratch: &Scratch) -> Vec<LoadJob> {
        self.counters.collisions += scratch.found.collisions;
        let mut jobs = Vec::new();
        if scratch.plans.is_empty() {
            return jobs;
        }
        if !self.step_open {
            self.open_step();
        }
        self.step_joined |= scratch.plans.iter().any(|plan| plan.load == 0);
        self.events.seal();
        let lead = self.config.lead();
        let step = self.step.0;
        for group in self.config.group_ids() {
            let mut gaps = self.counters.reuse_gap.runs();
            for plan in scratch.plans.iter().filter(|plan| !plan.hit.is_empty()) {
                let pages = scratch.found.pages(&plan.hit, group);
                self.pools[group].reuse_all(pages, |last_use| {
                    if group == lead {
                        gaps.add(step - last_use.0);
                    }
                });
            }
        }
        for plan in scratch.plans.iter().filter(|plan| !plan.hit.is_empty()) {
            self.take_hit(plan.slot, plan.start, &plan.hit, &scratch.found);
        }
        if self.config.huge_pages.is_some() {
            self.left = self.demand(scratch);
        }
        let mut taken = 0;
        for (plan, pages) in scratch.plans(self.config.groups.len()) {
            taken += pages.iter().map(|pages| pages.count()).sum::<u32>();
            if plan.load > 0 {
                self.admit(plan);
                let rest = pages[0].new - plan.load;
                jobs.extend(self.begin_load(plan.slot, plan.first_load, plan.load, rest));
                continue;
            }
            for (group, pages) in self.config.group_ids().zip(pages) {
                if pages.copies {
                    self.take(group, 1);
                    self.copy_on_write(plan.slot, group, (plan.start / self.config.page_size) as usize);
                }
                if pages.new > 0 {
                    self.take(group, pages.new);
                    let Some(sequence) = self.slots.get_mut(plan.slot) else { continue };
                    sequence.row_mut(group).pages.extend(self.taken.iter().map(|taken| taken.page));
                }
            }
            self.admit(plan);
            self.plan_step(plan);
        }
        if taken > 0 {
            self.demote_ahead(taken);
        }
        jobs
    }

    /// The tier hears of prefixes that were hit on the device, so that they do not age out of it.
    fn touch_hits(&self, scratch: &Scratch, tier: &mut dyn OuterTier) {
        for plan in scratch.plans.iter().filter(|plan| !plan.hit.is_empty()) {
            if let Some(sequence) = self.slots.get(plan.slot).filter(|sequence| sequence.guards.is_some()) {
                tier.touch(&sequence.chain.keys()[..(plan.start / self.config.page_size) as usize]);
            }
        }
    }

    /// Moves the request to where its hits end, and counts its first admission.
    #[inline]
    fn admit(&mut self, plan: &Plan) {
        let page_size = self.config.page_size;
        let Some(sequence) = self.slots.get_mut(plan.slot) else { return };
        if !plan.hit.is_empty() {
            sequence.processed = plan.start;
            sequence.position = plan.start;
        }
        if !sequence.admitted && !sequence.dummy {
            sequence.admitted = true;
            self.counters.admissions += 1;
            self.counters.prompt_tokens += u64::from(sequence.prompt_end);
            self.counters.context_blocks += u64::from(sequence.prompt_end.div_ceil(page_size));
            if let Some((reason, blocks)) = plan.missed {
                self.counters.missed(reason, blocks);
            }
        }
    }

    #[inline]
    fn plan_step(&mut self, plan: &Plan) {
        let step = self.step;
        let Some(sequence) = self.slots.get_mut(plan.slot) else { return };
        if plan.placeholder {
            sequence.tokens.push(0);
            sequence.unknown += 1;
        }
        sequence.position = plan.end;
        sequence.last_step = step;
        sequence.interrupted = false;
        let Plan { start, end, drafts, .. } = *plan;
        sequence.steps_out.push_back(StepOut { step, start, end, drafts });
    }
}

fn check_plannable(sequence: &Sequence, slot: SlotId, step: Step, open: bool) -> Result<(), LedgerError> {
    if sequence.load.is_some() {
        return Err(LedgerError::Loading { slot });
    }
    sequence.check_present(slot)?;
    if let Some(newest) = sequence.steps_out.back() {
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
