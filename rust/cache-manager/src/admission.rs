//! `alloc`: prefix hits and pages for the next forward, for a whole batch or not at all.

use crate::config::Reserve;
use crate::error::{LedgerError, NoRoom};
use crate::hits::{Found, Hit};
use crate::ledger::{Ledger, check_length};
use crate::loads::LoadJob;
use crate::misses::{Miss, MissReason};
use crate::page_copies::Leaving;
use crate::sequence::{Sequence, StepOut};
use crate::slots::SlotId;
use crate::tiers::{Loads, OuterTier};
use block_pool::{GroupId, Step};
use memory::AHEAD;
use radix_tree::NodeId;
use smallvec::SmallVec;

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
    /// Pages to take in each group.
    pages: SmallVec<[NewPages; 1]>,
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
    found: Found,
    leaving: Leaving,
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
        scratch.found.clear(&self.config);
        scratch.leaving.clear();
        for (index, &slot) in batch.iter().enumerate() {
            let bound = num_tokens.get(index).or(num_tokens.last()).copied();
            let mut plan = self.plan_one(index, slot, bound, loads, scratch)?;
            for (group, pages) in self.config.group_ids().zip(&mut plan.pages) {
                if pages.copies {
                    let sequence = self.sequence(slot)?;
                    pages.copies = self.must_copy(sequence, group, plan.start, &mut scratch.leaving);
                }
            }
            scratch.plans.push(plan);
        }
        let mut refused = None;
        for group in self.config.group_ids() {
            let needed = scratch.plans.iter().map(|plan| u64::from(plan.pages[group.index()].count()));
            // With room for every hit beside the new pages, no hit need be looked at.
            let most = needed.sum::<u64>() + scratch.found.all(group).len() as u64;
            if most > u64::from(self.pools[group].available())
                && let Some((index, room)) = self.lacking(scratch, group)?
                && refused.as_ref().is_none_or(|&(before, _)| index < before)
            {
                refused = Some((index, room));
            }
        }
        match refused {
            Some((index, room)) => Err(LedgerError::InsufficientBlocks { slot: batch[index], room }),
            None => Ok(()),
        }
    }

    /// The first request of the planned batch that does not fit into a group, to the page.
    fn lacking(&mut self, scratch: &Scratch, group: GroupId) -> Result<Option<(usize, NoRoom)>, LedgerError> {
        let config = &self.config;
        let pool = &mut self.pools[group];
        pool.open_marks();
        for &page in scratch.found.all(group) {
            if !pool.is_evictable(page) {
                pool.mark(page); // held, and hit: nobody who lets it go makes room
            }
        }
        let available = i64::from(pool.available());
        let (mut needed, mut own_hits, mut given_back) = (0i64, 0i64, 0i64);
        let mut lacking = None;
        for (index, plan) in scratch.plans.iter().enumerate() {
            for &page in scratch.found.pages(&plan.hit, group) {
                if pool.is_evictable(page) && pool.mark(page) {
                    own_hits += 1;
                }
            }
            let sequence = self.slots.get(plan.slot).ok_or(LedgerError::UnknownSlot(plan.slot))?;
            for page in sequence.let_go_for(&plan.hit, plan.start, group, config) {
                // Of several that let it go, the first counts.
                let alone = pool.refs(page) == 1 && pool.pins(page) == 0;
                given_back += i64::from(alone && pool.mark(page));
            }
            let left = available + given_back - own_hits - needed;
            let pages = plan.pages[group.index()].count();
            needed += i64::from(pages);
            if left < i64::from(pages) && lacking.is_none() {
                lacking = Some((index, pages, u32::try_from(left).unwrap_or(0)));
            }
        }
        // A later request's hits may give back pages that an earlier one lacked: the sum decides.
        let lacking = lacking.filter(|_| needed > available + given_back - own_hits);
        Ok(lacking.map(|(index, pages, free)| (index, self.room(group, pages, free))))
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
            let lead = self.config.lead();
            let room = self.room(lead, most.div_ceil(page_size), self.pools[lead].available());
            return Err(LedgerError::RequestTooLarge { slot, tokens: u64::from(most), limit, room });
        }
        let mut pages = SmallVec::new();
        for group in self.config.group_ids() {
            let held = (sequence.row(group).pages.len() as u32).max(hit_end);
            let covered = match self.config.reserve {
                Reserve::Prompt if !self.config.kind(group).forgets() => reserved.max(sequence.prompt_end),
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
            if self.config.kind(group).forgets() {
                let needed = self.config.kind(group).needed(start, page_size);
                let at_once = needed.sinks.min(needed.from) + covered.div_ceil(page_size) - needed.from;
                let total = self.pools[group].total();
                if at_once > total && !sequence.dummy {
                    let room = self.room(group, at_once, self.pools[group].available());
                    return Err(LedgerError::RequestTooLarge {
                        slot,
                        tokens: covered.into(),
                        limit: total,
                        room,
                    });
                }
            }
            pages.push(NewPages { new, copies: sequence.exposed && load == 0 });
        }
        let drafts = sequence.drafts_of(start, end, len);
        Ok(Plan { slot, hit, missed, start, end, placeholder, drafts, pages, load, first_load })
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
        let mut taken = 0;
        for plan in &scratch.plans {
            taken += plan.pages.iter().map(|pages| pages.count()).sum::<u32>();
            if plan.load > 0 {
                self.admit(plan);
                let rest = plan.pages[0].new - plan.load;
                jobs.extend(self.begin_load(plan.slot, plan.first_load, plan.load, rest));
                continue;
            }
            for (group, pages) in self.config.group_ids().zip(&plan.pages) {
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

    /// Takes pages that the plan left room for; [`Ledger::taken`] lists them.
    pub(crate) fn take(&mut self, group: GroupId, count: u32) {
        self.taken.clear();
        let complete = self.pools[group].take_many(count, self.config.priority, &mut self.taken);
        assert!(complete, "the plan left room for every page");
        let lead = self.config.lead();
        for (index, taken) in self.taken.iter().enumerate() {
            if let Some(later) = self.taken.get(index + AHEAD).and_then(|later| later.evicted) {
                self.tree.prefetch(NodeId(later.0));
            }
            if let Some(node) = taken.evicted {
                let key = self.tree.key(NodeId(node.0));
                self.tree.clear_page(NodeId(node.0), group);
                if group == lead
                    && let Some(key) = key
                {
                    self.events.removed(key);
                    self.evicted.add(key, self.step);
                }
                self.counters.evictions += 1;
                let published = self.pools[group].published(taken.page);
                self.counters.residency.add(self.step.0 - published.0);
            }
            self.counters.pages_allocated_new += u64::from(taken.pristine);
        }
        self.counters.pages_allocated += u64::from(count);
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

    /// A group's pool for an error: `free` pages can be had beside the hits of the batch.
    pub(crate) fn room(&self, group: GroupId, needed: u32, free: u32) -> NoRoom {
        let pool = &self.pools[group];
        let total = pool.total();
        NoRoom {
            needed,
            free,
            evictable: free.saturating_sub(pool.pristine()),
            pinned: total - pool.available(),
            total,
        }
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
