//! `alloc`: prefix hits and pages for the next forward, for a whole batch or not at all.

use crate::blocks::Prefix;
use crate::config::Reserve;
use crate::copies::let_go;
use crate::error::{LedgerError, NoRoom};
use crate::ledger::{Ledger, check_length, parent_after};
use crate::loads::LoadJob;
use crate::misses::{Miss, MissReason};
use crate::page_copies::Leaving;
use crate::sequence::{Sequence, StepOut};
use crate::slots::SlotId;
use crate::tiers::{Loads, OuterTier};
use block_pool::{GroupId, Step};
use memory::AHEAD;
use radix_tree::{Hits, NodeId};
use std::ops::Range;

/// What `alloc` will do for one request.
struct Plan {
    slot: SlotId,
    /// Hit blocks, as a range of [`Scratch::hits`]; they follow the request's own published blocks.
    hits: Range<usize>,
    /// At first admission: why the first block after the hits was missed, and how many were, up to the
    /// block of the last token.
    missed: Option<(MissReason, u32)>,
    /// Blocks of the request's row that hits replace.
    replaced: Range<usize>,
    /// Tokens that the forward computes.
    start: u32,
    end: u32,
    /// Whether the last of them is a token that a step out will bring.
    placeholder: bool,
    /// Drafts that it verifies behind them.
    drafts: u32,
    /// Pages to take for the end of the row.
    new_pages: u32,
    /// Blocks to load before a forward can be planned, and the first of them.
    load: u32,
    first_load: u32,
    /// Whether the page of the first token is copied, to one more page.
    copies: bool,
}

impl Plan {
    /// Pages to take.
    fn pages(&self) -> u32 {
        self.new_pages + u32::from(self.copies)
    }
}

/// Buffers that keep their memory from call to call.
#[derive(Default)]
pub(crate) struct Scratch {
    plans: Vec<Plan>,
    hits: Hits,
    leaving: Leaving,
    /// Collisions met while planning.
    collisions: u64,
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
        scratch.hits.truncate(0);
        scratch.leaving.clear();
        scratch.collisions = 0;
        let mut needed = 0u64;
        for (index, &slot) in batch.iter().enumerate() {
            let bound = num_tokens.get(index).or(num_tokens.last()).copied();
            let mut plan = self.plan_one(index, slot, bound, loads, scratch)?;
            if plan.copies {
                plan.copies = self.must_copy(self.sequence(slot)?, plan.start, &mut scratch.leaving);
            }
            needed += u64::from(plan.pages());
            scratch.plans.push(plan);
        }
        // With room for every hit beside the new pages, no hit need be looked at.
        if needed + scratch.hits.len() as u64 <= u64::from(self.pool.available()) {
            return Ok(());
        }
        self.check_room(scratch)
    }

    /// Whether the planned batch fits, to the page.
    fn check_room(&mut self, scratch: &Scratch) -> Result<(), LedgerError> {
        self.pool.open_marks();
        let available = i64::from(self.pool.available());
        let (mut needed, mut own_hits, mut given_back) = (0i64, 0i64, 0i64);
        let mut refused = None;
        for plan in &scratch.plans {
            for &page in &scratch.hits.pages[plan.hits.clone()] {
                if self.pool.is_evictable(page) && self.pool.mark(page) {
                    own_hits += 1;
                }
            }
            for &page in &self.sequence(plan.slot)?.row[plan.replaced.clone()] {
                // A page that the tree knows, by way of a fork, may be a hit of this batch.
                let alone = self.pool.refs(page) == 1 && self.pool.pins(page) == 0;
                given_back += i64::from(alone && self.pool.node(page).is_none());
            }
            let left = available + given_back - own_hits - needed;
            let pages = plan.pages();
            needed += i64::from(pages);
            if left < i64::from(pages) && refused.is_none() {
                let free = u32::try_from(left).unwrap_or(0);
                refused = Some((plan.slot, self.room(pages, free)));
            }
        }
        // A later request's hits may give back pages that an earlier one lacked: the sum decides.
        match refused {
            Some((slot, room)) if needed > available + given_back - own_hits => {
                Err(LedgerError::InsufficientBlocks { slot, room })
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

        let first_hit = scratch.hits.len();
        let mut missed = None;
        let published = sequence.nodes.len();
        let mut on_device = published;
        let reads =
            self.config.prefix_caching && !sequence.no_read && !sequence.dummy && sequence.epoch == epoch;
        if reads && sequence.position < sequence.prompt_end {
            sequence.hash_known(page_size as usize);
            let limit = ((sequence.known() - 1) / page_size) as usize;
            let prefix = Prefix {
                log: &sequence.tokens,
                keys: sequence.chain.keys(),
                extras: &sequence.extras,
                page_size: page_size as usize,
            };
            let parent = parent_after(sequence, &sequence.nodes);
            let hits = &mut scratch.hits;
            let collided = prefix.walk(&self.tree, parent, published, limit, &mut self.reader, hits);
            scratch.collisions += u64::from(collided);
            on_device += hits.len() - first_hit;
            if !sequence.admitted && on_device < limit {
                let miss = Miss::of(&self.tree, &self.evicted, sequence.chain.keys()[on_device], collided);
                missed = Some((miss.reason, (limit - on_device) as u32));
            }
            // A hit that ends at or before the position saves nothing.
            if ((published + hits.len() - first_hit) as u32) * page_size <= sequence.position {
                hits.truncate(first_hit);
            }
        }
        let hits = first_hit..scratch.hits.len();
        let hit_end = published + hits.len();
        let (start, replaced) = if hits.is_empty() {
            (sequence.position, 0..0)
        } else {
            (hit_end as u32 * page_size, published..hit_end.min(sequence.row.len()).max(published))
        };
        // What the request has computed and not stored is not loaded either.
        let first_load = (on_device as u32).max(start / page_size);
        let most_load = if reads && sequence.may_load() {
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
        let covered = match self.config.reserve {
            Reserve::Prompt => reserved.max(sequence.prompt_end),
            Reserve::Chunk => reserved,
        };
        let limit = self.config.max_pages_per_request(sequence.drafts);
        let most = len + sequence.draft_room([].iter());
        if u64::from(most) > u64::from(limit) * u64::from(page_size) {
            let room = self.room(most.div_ceil(page_size), self.pool.available());
            return Err(LedgerError::RequestTooLarge { slot, tokens: u64::from(most), limit, room });
        }
        let held = sequence.row.len().max(if hits.is_empty() { 0 } else { hit_end }) as u32;
        let new_pages = if sequence.dummy {
            0
        } else if load > 0 {
            load + most.div_ceil(page_size).saturating_sub(held.max(first_load + load))
        } else if u64::from(covered) <= u64::from(held) * u64::from(page_size) {
            0 // as in most decode steps
        } else {
            covered.div_ceil(page_size) - held
        };
        let drafts = sequence.drafts_of(start, end, len);
        Ok(Plan {
            slot,
            hits,
            missed,
            replaced,
            start,
            end,
            placeholder,
            drafts,
            new_pages,
            copies: sequence.exposed && load == 0,
            load,
            first_load,
        })
    }

    /// Carries out the plans; nothing here can fail. All hits of all requests are claimed first, so that
    /// no page taken for one request is a hit of another.
    fn commit_plans(&mut self, scratch: &Scratch) -> Vec<LoadJob> {
        self.counters.collisions += scratch.collisions;
        let mut jobs = Vec::new();
        if scratch.plans.is_empty() {
            return jobs;
        }
        if !self.step_open {
            self.open_step();
        }
        self.step_joined |= scratch.plans.iter().any(|plan| plan.load == 0);
        self.events.seal();
        let mut gaps = self.counters.reuse_gap.runs();
        let step = self.step.0;
        for plan in scratch.plans.iter().filter(|plan| !plan.hits.is_empty()) {
            let pages = &scratch.hits.pages[plan.hits.clone()];
            self.pool.reuse_all(pages, |last_use| gaps.add(step - last_use.0));
        }
        drop(gaps);
        for plan in scratch.plans.iter().filter(|plan| !plan.hits.is_empty()) {
            self.take_hits(plan, &scratch.hits);
        }
        let mut taken = 0;
        for plan in &scratch.plans {
            taken += plan.pages();
            if plan.load > 0 {
                self.admit(plan);
                let rest = plan.new_pages - plan.load;
                jobs.extend(self.begin_load(plan.slot, plan.first_load, plan.load, rest));
                continue;
            }
            if plan.copies {
                self.take(1);
                self.copy_on_write(plan.slot, (plan.start / self.config.page_size) as usize);
            }
            if plan.new_pages > 0 {
                self.take(plan.new_pages);
                let Some(sequence) = self.slots.get_mut(plan.slot) else { continue };
                sequence.row.extend(self.taken.iter().map(|taken| taken.page));
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
        for plan in scratch.plans.iter().filter(|plan| !plan.hits.is_empty()) {
            if let Some(sequence) = self.slots.get(plan.slot).filter(|sequence| sequence.guards.is_some()) {
                tier.touch(&sequence.chain.keys()[..(plan.start / self.config.page_size) as usize]);
            }
        }
    }

    fn take_hits(&mut self, plan: &Plan, hits: &Hits) {
        let (nodes, pages) = (&hits.nodes[plan.hits.clone()], &hits.pages[plan.hits.clone()]);
        let Some(sequence) = self.slots.get_mut(plan.slot) else { return };
        for block in plan.replaced.clone().rev() {
            let_go(&mut self.pool, &self.tree, sequence.row[block], sequence.last_step);
        }
        if !plan.replaced.is_empty() {
            sequence.row_version += 1;
        }
        let first = sequence.nodes.len();
        let (over, behind) = pages.split_at(plan.replaced.len());
        sequence.row[plan.replaced.clone()].copy_from_slice(over);
        sequence.row.extend_from_slice(behind);
        sequence.nodes.extend_from_slice(nodes);
        let gained = plan.start - sequence.position;
        sequence.cached += gained;
        if sequence.admitted {
            self.counters.late_reused_tokens += u64::from(gained);
        } else {
            self.counters.reused_tokens += u64::from(gained);
            self.counters.reused_blocks += nodes.len() as u64;
        }
        let hit = first..first + nodes.len();
        self.mark_reused(plan.slot, first..first);
        self.offload_hit(plan.slot, hit);
        self.use_blocks(plan.slot, first);
    }

    /// Takes pages that the plan left room for; [`Ledger::taken`] lists them.
    pub(crate) fn take(&mut self, count: u32) {
        self.taken.clear();
        let complete = self.pool.take_many(count, self.config.priority, &mut self.taken);
        assert!(complete, "the plan left room for every page");
        for (index, taken) in self.taken.iter().enumerate() {
            if let Some(later) = self.taken.get(index + AHEAD).and_then(|later| later.evicted) {
                self.tree.prefetch(NodeId(later.0));
            }
            if let Some(node) = taken.evicted {
                let key = self.tree.key(NodeId(node.0));
                self.tree.clear_page(NodeId(node.0), GroupId::FIRST);
                if let Some(key) = key {
                    self.events.removed(key);
                    self.evicted.add(key, self.step);
                }
                self.counters.evictions += 1;
                self.counters.residency.add(self.step.0 - self.pool.published(taken.page).0);
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
        if !plan.hits.is_empty() {
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

    /// The pool for an error: `free` pages can be had beside the hits of the batch.
    pub(crate) fn room(&self, needed: u32, free: u32) -> NoRoom {
        let total = self.pool.total();
        NoRoom {
            needed,
            free,
            evictable: free.saturating_sub(self.pool.pristine()),
            pinned: total - self.pool.available(),
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
