//! `alloc`: prefix hits and pages for the next forward, for a whole batch or not at all.

use crate::error::LedgerError;
use crate::groups::GroupKind;
use crate::ledger::Ledger;
use crate::loads::{LoadJob, Presence};
use crate::lookup::Lookup;
use crate::planning::{Plan, Scratch};
use crate::sequence::StepOut;
use crate::slots::SlotId;
use crate::tiers::{Loads, OuterTier};
use crate::write_policy::WritePolicy;

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

    /// The same with several groups or windows, where `there[i]` says which blocks the tiers have for request `i`: as
    /// many are loaded as make the longest prefix that all groups can go on from. Nothing of blocks before those that
    /// [`Ledger::wanted`] found on the device is asked. Empty: nothing is there. With `only`, requests that load nothing
    /// are not planned.
    ///
    /// # Errors
    /// As there.
    pub fn alloc_with_blocks(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        there: &[Presence],
        only: bool,
    ) -> Result<Vec<LoadJob>, LedgerError> {
        if !there.is_empty() && there.len() != batch.len() {
            return Err(LedgerError::Mismatch(format!(
                "there has {} entries for {} requests",
                there.len(),
                batch.len()
            )));
        }
        self.alloc_with(batch, num_tokens, Loads::Known { there, only })
    }

    /// [`Ledger::alloc`] with loads from somewhere, one or none a request.
    pub(crate) fn alloc_with(
        &mut self,
        batch: &[SlotId],
        num_tokens: &[u32],
        mut loads: Loads<'_>,
    ) -> Result<Vec<LoadJob>, LedgerError> {
        self.check_bounds(batch, num_tokens)?;
        self.check_awake()?;
        let mut scratch = self.admission.take().unwrap_or_default();
        let outcome = self.plan_room(batch, num_tokens, &mut loads, &mut scratch);
        if let Err(LedgerError::InsufficientBlocks { .. } | LedgerError::RequestTooLarge { .. }) = &outcome {
            self.counters.failed_allocs += 1;
        }
        let outcome = outcome.map(|()| self.commit_plans(&scratch));
        if let (Ok(_), Loads::From { tier, .. }) = (&outcome, &mut loads) {
            self.touch_hits(&scratch, *tier);
        }
        self.admission = Some(scratch);
        outcome
    }

    /// Checks a batch, and what bounds its forwards.
    pub(crate) fn check_bounds(&mut self, batch: &[SlotId], num_tokens: &[u32]) -> Result<(), LedgerError> {
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
        self.check_batch(batch)
    }

    /// Whether [`Ledger::alloc`] would find room for the batch, to the page and over all groups.
    ///
    /// # Errors
    /// Those of `alloc` but for the want of room now. Nothing is changed.
    pub fn can_alloc(&mut self, batch: &[SlotId], num_tokens: &[u32]) -> Result<bool, LedgerError> {
        self.check_bounds(batch, num_tokens)?;
        self.check_awake()?;
        let mut scratch = self.admission.take().unwrap_or_default();
        let planned = self.plan_room(batch, num_tokens, &mut Loads::Given(&[]), &mut scratch);
        self.admission = Some(scratch);
        match planned {
            Ok(()) => Ok(true),
            Err(LedgerError::InsufficientBlocks { .. }) => Ok(false),
            Err(error) => Err(error),
        }
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
        self.step_joined |= scratch.plans.iter().any(|plan| plan.load().is_none());
        self.events.seal();
        let lead = self.config.lead();
        let step = self.step.0;
        for group in self.config.group_ids() {
            let mut gaps = self.counters.reuse_gap.runs();
            for plan in scratch.reusing().filter(|plan| !plan.hit().is_empty()) {
                let pages = scratch.found.pages(plan.hit(), group);
                self.pools[group].reuse_all(pages, |last_use| {
                    if group == lead {
                        gaps.add(step - last_use.0);
                    }
                });
            }
            for load in scratch.reusing().filter_map(Plan::load) {
                let stored: Vec<_> = load.stored(group).collect();
                self.pools[group].reuse_all(&stored, |_| {});
            }
        }
        for plan in scratch.reusing().filter(|plan| !plan.hit().is_empty()) {
            self.take_hit(plan.slot, plan.hit_end(&self.config), plan.hit(), &scratch.found);
        }
        let mut copies =
            if scratch.has_partial() { self.claim_partials(scratch) } else { Vec::new().into_iter() };
        if self.config.huge_pages.is_some() {
            self.left.clone_from(&scratch.left);
        }
        for (plan, pages) in scratch.plans(self.config.groups.len()) {
            if let Some(lookup) = &plan.lookup {
                self.admit(plan, lookup);
            }
            if let Some(load) = plan.load() {
                jobs.extend(self.begin_load(plan.slot, load, pages));
                continue;
            }
            for (group, &pages) in self.config.group_ids().zip(pages) {
                if self.config.kind(group).is_recurrent() {
                    self.move_state(plan, group, pages);
                    continue;
                }
                if pages.copies {
                    self.take(group, 1);
                    self.copy_on_write(plan.slot, group, (plan.start / self.config.page_size) as usize);
                }
                if pages.new > 0 {
                    self.take(group, pages.new);
                    let Some(sequence) = self.slots.get_mut(plan.slot) else { continue };
                    sequence.row_mut(group).pages.extend(self.taken.iter().map(|taken| taken.page));
                    if self.config.kind(group) == GroupKind::Scratch {
                        self.taken.iter().for_each(|taken| self.fills.plan(group, taken.page));
                    }
                }
                if plan.partial().is_some_and(|partial| !partial.takes_over)
                    && self.config.kind(group).has_blocks()
                    && let Some(copy) = copies.next()
                {
                    self.copy_part(plan.slot, (plan.start / self.config.page_size) as usize, copy);
                }
            }
            self.plan_step(plan);
        }
        if let WritePolicy::OnEvict { .. } = self.config.write_policy {
            self.demote_ahead(&self.demand(scratch));
        }
        jobs
    }

    /// The tier hears of prefixes that were hit on the device, so that they do not age out of it.
    fn touch_hits(&self, scratch: &Scratch, tier: &mut dyn OuterTier) {
        for plan in scratch.reusing().filter(|plan| !plan.hit().is_empty()) {
            if let Some(sequence) = self.slots.get(plan.slot).filter(|sequence| sequence.guards.is_some()) {
                tier.touch(&sequence.chain.keys()[..(plan.start / self.config.page_size) as usize]);
            }
        }
    }

    /// Moves the request to where its hits end, and counts its first admission.
    fn admit(&mut self, plan: &Plan, lookup: &Lookup) {
        let page_size = self.config.page_size;
        let Some(sequence) = self.slots.get_mut(plan.slot) else { return };
        if plan.start > sequence.position {
            sequence.processed = plan.start;
            sequence.position = plan.start;
        }
        if !sequence.admitted && !sequence.dummy {
            sequence.admitted = true;
            self.counters.admissions += 1;
            self.counters.prompt_tokens += u64::from(sequence.prompt_end);
            self.counters.context_blocks += u64::from(sequence.prompt_end.div_ceil(page_size));
            if let Some((reason, blocks)) = lookup.missed {
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
        sequence.bound = plan.bound;
        sequence.last_step = step;
        sequence.interrupted = false;
        let Plan { start, end, drafts, .. } = *plan;
        sequence.steps_out.push(StepOut { step, start, end, drafts });
    }
}
