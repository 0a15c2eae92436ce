//! A tier beyond the device in virtual time: the product's index, a mover, and what the index must hold.

use crate::broken::Broken;
use crate::device::{Device, Forward};
use crate::kv::tier_key;
use crate::mover::{Habits, Mover, Moving};
use crate::random::Random;
use crate::world::{World, check_copied};
use block_pool::{EvictionPolicy, GroupId, PageId, Priority};
use cache_manager::{BlockKey, CopyEnd, CopyJob, Ledger, LedgerConfig, OffloadJob, OuterTier, WritePolicy};
use completion::{Completer, Completion, pending};
use std::collections::{BTreeMap, HashMap, HashSet};
use tiered_connector::index::TierIndex;
use tiered_connector::job::{Direction, Job, Offer, Origin, Outcome, TierKey, UnitId};

/// A copy that the ledger began, of one job or several.
struct Transfer {
    left: usize,
    end: CopyEnd,
    completer: Completer,
}

pub(crate) struct Tier {
    now: u64,
    device: Device,
    pub(crate) mover: Mover,
    pub(crate) index: TierIndex,
    /// What the ledger offers.
    write_policy: WritePolicy,
    pub(crate) broken: Option<Broken>,
    /// The right content of every block that a request had.
    truth: HashMap<TierKey, Vec<u64>>,
    /// What was told by [`OuterTier::take_ended`] since somebody looked.
    told: Vec<(u64, CopyEnd)>,
    /// The first rule that was broken in a call.
    fault: Option<String>,
    /// Blocks of jobs begun: stored and loaded.
    blocks_begun: (u64, u64),
    /// Private units that each suspension was copied to.
    pub(crate) away: HashMap<u64, Vec<UnitId>>,
    /// Blocks whose store ended well after the last reset, until their unit is given away.
    held: BTreeMap<UnitId, TierKey>,
    /// The reset before which each job in flight was begun.
    resets: u32,
    begun_at: HashMap<u64, u32>,
    transfers: HashMap<u64, Transfer>,
    /// Jobs and copies that have ended, which the index and the ledger were not told of.
    ended_jobs: Vec<(Moving, Outcome)>,
    ended: Vec<(u64, CopyEnd)>,
    /// Jobs that a broken variant told the index of when they began.
    told_early: HashSet<u64>,
    pub(crate) closed: bool,
    /// The index was called since it was checked.
    entered: bool,
    random: Random,
}

impl Tier {
    pub(crate) fn new(config: &LedgerConfig, broken: Option<Broken>, random: &mut Random) -> Tier {
        let policies = [EvictionPolicy::PriorityLru, EvictionPolicy::PrioritySlru];
        let habits = Habits::draw(random);
        let units = 3 + random.below(20) as u32;
        let mut mover = Mover::new(units, config.page_size, habits, Random(random.next()));
        mover.waits_for_fences = broken != Some(Broken::IgnoresFences);
        Tier {
            now: 0,
            device: Device::new(config.groups[0].pages, config.page_size),
            mover,
            index: TierIndex::new(units, policies[random.below(2)]),
            write_policy: config.write_policy,
            broken,
            truth: HashMap::new(),
            told: Vec::new(),
            fault: None,
            blocks_begun: (0, 0),
            away: HashMap::new(),
            held: BTreeMap::new(),
            resets: 0,
            begun_at: HashMap::new(),
            transfers: HashMap::new(),
            ended_jobs: Vec::new(),
            ended: Vec::new(),
            told_early: HashSet::new(),
            closed: false,
            entered: false,
            random: Random(random.next()),
        }
    }

    fn note(&mut self, fault: String) {
        self.fault.get_or_insert(fault);
    }

    /// A job has ended; nobody knows yet, but whoever has the handle of its copy if it was the last.
    fn end_job(&mut self, moving: Moving, outcome: Outcome) {
        let direction = moving.job.direction;
        let well = outcome == Outcome::Done
            || (direction == Direction::Load && self.broken == Some(Broken::TrustsFailedLoads));
        let copy = moving.copy;
        self.ended_jobs.push((moving, outcome));
        let Some(transfer) = self.transfers.get_mut(&copy) else { return };
        transfer.left -= 1;
        if !well {
            transfer.end = CopyEnd::Failed;
        }
        if transfer.left == 0 || self.broken == Some(Broken::EndsWithFirstJob) {
            self.end_transfer(copy);
        }
    }

    fn end_transfer(&mut self, copy: u64) {
        let Some(Transfer { end, completer, .. }) = self.transfers.remove(&copy) else { return };
        if end == CopyEnd::Done {
            completer.finish()
        } else {
            completer.fail("on purpose")
        };
        self.ended.push((copy, end));
    }

    /// Every call first tells the index what has ended, as the connector does.
    pub(crate) fn enter(&mut self) {
        self.entered = true;
        self.random.shuffle(&mut self.ended_jobs);
        for (Moving { job, keys, .. }, outcome) in std::mem::take(&mut self.ended_jobs) {
            let trusted = self.broken == Some(Broken::TrustsFailedStores);
            let outcome = if trusted { Outcome::Done } else { outcome };
            let current = self.begun_at.remove(&job.id.0) == Some(self.resets);
            if !self.told_early.remove(&job.id.0) && !self.index.apply(job.id, &outcome) {
                self.note(format!("job {} was not in flight", job.id.0));
            }
            if job.direction == Direction::Store && outcome == Outcome::Done && current {
                self.held.extend(job.units.into_iter().zip(keys));
            }
        }
    }

    /// Takes note of a job for blocks that the index planned, and gives it to the mover.
    fn begin_block_job(&mut self, job: Job, blocks: &[(TierKey, PageId)], copy: u64) {
        let key = |page| blocks.iter().find(|&&(_, of)| of == page).map(|&(key, _)| key);
        let keys: Vec<TierKey> = job.pages.iter().copied().filter_map(key).collect();
        let count = job.units.len() as u64;
        if job.direction == Direction::Store {
            self.blocks_begun.0 += count;
            self.give_away(&job.units);
        } else {
            self.blocks_begun.1 += count;
        }
        let early = match job.direction {
            Direction::Store => Broken::FindsBlocksEarly,
            Direction::Load => Broken::FreesUnitsEarly,
        };
        self.begin_job(job, keys, copy, early);
    }

    /// Units are given to other blocks, or to a request.
    pub(crate) fn give_away(&mut self, units: &[UnitId]) {
        if let Some(unit) = units.iter().find(|&&unit| self.mover.touches(unit)) {
            self.note(format!("unit {} is given away while it is read or written", unit.0));
        }
        self.held.retain(|unit, _| !units.contains(unit));
    }

    /// Gives a job to the mover. The broken variant `early` tells the index at once that it has ended.
    pub(crate) fn begin_job(&mut self, job: Job, keys: Vec<TierKey>, copy: u64, early: Broken) {
        if self.broken == Some(early) {
            self.index.apply(job.id, &Outcome::Done);
            self.told_early.insert(job.id.0);
        }
        self.begun_at.insert(job.id.0, self.resets);
        self.mover.ask(job, keys, copy, self.now, &self.device);
    }

    /// Begins a copy of so many jobs. The broken variant `early` tells the ledger at once that it has ended.
    pub(crate) fn begin(&mut self, copy: u64, jobs: usize, early: Broken) -> Completion {
        let (completer, completion) = pending();
        self.transfers.insert(copy, Transfer { left: jobs, end: CopyEnd::Done, completer });
        if jobs == 0 || self.broken == Some(early) {
            self.end_transfer(copy);
        }
        completion
    }

    /// Whether copies are declined now.
    fn declines(&mut self) -> bool {
        self.closed || self.random.one_in(self.mover.habits.is_refused)
    }
}

impl OuterTier for Tier {
    fn leading(&mut self, keys: &mut dyn Iterator<Item = BlockKey>) -> usize {
        self.enter();
        let keys: Vec<TierKey> = keys.map(|key| tier_key(&key)).collect();
        let found = self.index.leading(&mut keys.iter().copied()).0;
        let held = keys.iter().take_while(|key| self.held.values().any(|held| held == *key)).count();
        if found != held {
            self.note(format!("{found} leading blocks are found, {held} are here"));
        }
        found
    }

    fn has(&mut self, _: GroupId, key: &BlockKey) -> bool {
        self.leading(&mut [*key].into_iter()) > 0
    }

    fn load(&mut self, keys: &[BlockKey], job: &CopyJob) -> Option<Completion> {
        self.enter();
        if self.declines() {
            return None;
        }
        let blocks = blocks(keys, job);
        let parts = blocks.chunks(self.mover.habits.blocks_a_job);
        let jobs: Option<Vec<Job>> = parts.map(|part| self.index.load(part, job.after)).collect();
        if jobs.is_none() {
            self.note("a block is asked for that is not here".into());
        }
        let jobs = jobs?;
        let completion = self.begin(job.id.0, jobs.len(), Broken::EndsLoadsEarly);
        for part in jobs {
            self.begin_block_job(part, &blocks, job.id.0);
        }
        Some(completion)
    }

    fn offload(&mut self, job: &OffloadJob, _origin: &dyn Fn(usize) -> Origin) -> bool {
        let OffloadJob { keys, priorities, copy: job, .. } = job;
        self.enter();
        let (demotes, least) = match self.write_policy {
            WritePolicy::OnEvict { min_priority } => (true, min_priority),
            WritePolicy::WriteThrough | WritePolicy::Selective { .. } => (false, Priority::LOWEST),
        };
        if priorities.iter().any(|&priority| priority < least) {
            self.note("a block of too low a priority is offered".into());
        }
        if self.declines() {
            return false;
        }
        let blocks = blocks(keys, job);
        let known = self.mover.habits.knows_priorities;
        let priorities = priorities.iter().map(|&it| if known { it } else { Priority::DEFAULT });
        let offer = |(&(key, page), priority)| Offer { key, page, priority };
        let offers: Vec<Offer> = blocks.iter().zip(priorities).map(offer).collect();
        let parts = offers.chunks(self.mover.habits.blocks_a_job);
        let jobs: Vec<Job> = parts.filter_map(|part| self.index.store(part, job.after)).collect();
        let early = if demotes { Broken::EndsDemotionsEarly } else { Broken::EndsOffloadsEarly };
        self.begin(job.id.0, jobs.len(), early);
        for part in jobs {
            self.begin_block_job(part, &blocks, job.id.0);
        }
        true
    }

    fn touch(&mut self, hashes: &[u64]) {
        self.enter();
        self.index.touch(hashes);
    }

    fn take_ended(&mut self) -> Vec<(u64, CopyEnd)> {
        self.enter();
        self.random.shuffle(&mut self.ended);
        // Some are told of later.
        let later = self.random.below(self.ended.len().min(2) + 1);
        let later = if self.closed { 0 } else { later };
        let told = self.ended.split_off(later);
        self.told.extend_from_slice(&told);
        told
    }
}

impl World for Tier {
    fn now(&self) -> u64 {
        self.now
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn launch(&mut self, forward: Forward) {
        self.device.launch(forward);
    }

    fn pass(&mut self, time: u64) -> Result<(), String> {
        let until = self.now.saturating_add(time);
        loop {
            let forward = self.device.next_at().unwrap_or(u64::MAX);
            let (at, number) = self.mover.next(&self.device).unwrap_or((u64::MAX, 0));
            let next = forward.min(at);
            if next > until || next == u64::MAX {
                break;
            }
            self.now = self.now.max(next);
            if forward <= at {
                self.device.run_one()?;
            } else {
                let copy = self.mover.jobs[number].copy;
                let transfer = self.transfers.get(&copy);
                let cancelled = transfer.is_some_and(|transfer| transfer.completer.is_cancel_requested());
                if let Some((moving, outcome)) =
                    self.mover.go_on(number, self.now, &mut self.device, cancelled)
                {
                    self.end_job(moving, outcome);
                }
            }
        }
        self.now = if until == u64::MAX { self.now } else { until };
        Ok(())
    }

    fn reset(&mut self) {
        self.enter();
        self.truth.clear();
        if self.broken != Some(Broken::KeepsBlocksAtReset) {
            self.index.reset();
            self.held.clear();
            self.resets += 1;
        }
    }

    fn shut_down(&mut self) {
        self.closed = true;
        while let Some(moving) = self.mover.jobs.pop() {
            self.end_job(moving, Outcome::Cancelled);
        }
        self.enter();
    }

    fn learn(&mut self, key: TierKey, block: &[u64]) {
        self.truth.insert(key, block.to_vec());
    }

    fn take_told(&mut self) -> Vec<(u64, CopyEnd)> {
        std::mem::take(&mut self.told)
    }

    fn copied_pages(&self) -> Vec<(Direction, PageId)> {
        let jobs = self.mover.jobs.iter().map(|moving| &moving.job);
        jobs.flat_map(|job| job.pages.iter().map(|&page| (job.direction, page))).collect()
    }

    fn private_units(&self) -> Vec<UnitId> {
        let mut units: Vec<UnitId> = self.index.private_units().collect();
        units.sort_unstable();
        units
    }

    fn check_away(&self, copy: u64, kv: &[u64]) -> Result<(), String> {
        let mut cells = self.away[&copy].iter().flat_map(|&unit| self.mover.unit(unit));
        let right = kv.iter().all(|right| cells.next() == Some(right));
        if right {
            Ok(())
        } else {
            Err(format!("copy {copy} left other bytes than its request's in its units"))
        }
    }

    fn check(&mut self, ledger: &Ledger) -> Result<(), String> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        if std::mem::take(&mut self.entered) {
            self.index.verify().map_err(|fault| format!("index: {fault}"))?;
        }
        if self.index.blocks() as usize != self.held.len() {
            return Err(format!("the index finds {} blocks of {}", self.index.blocks(), self.held.len()));
        }
        for (&unit, key) in &self.held {
            if !self.index.contains(key) {
                return Err(format!("the index does not find a block that is in unit {}", unit.0));
            }
            if self.truth.get(key).is_none_or(|right| right != self.mover.unit(unit)) {
                return Err(format!("unit {} holds other bytes than its block's", unit.0));
            }
        }
        check_copied(ledger, &self.copied_pages())
    }

    fn check_end(&self) -> Result<(), String> {
        if self.index.in_flight() > 0 {
            return Err(format!("{} jobs are in flight at the end", self.index.in_flight()));
        }
        let index = self.index.counters();
        let counted = (index.stored + index.unstored, index.loaded + index.unloaded);
        if counted != self.blocks_begun {
            return Err(format!("{counted:?} blocks were counted, of {:?}", self.blocks_begun));
        }
        Ok(())
    }
}

fn blocks(keys: &[BlockKey], job: &CopyJob) -> Vec<(TierKey, PageId)> {
    keys.iter().map(tier_key).zip(job.pages.iter().copied()).collect()
}
