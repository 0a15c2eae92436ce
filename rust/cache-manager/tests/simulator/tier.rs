//! A tier beyond the device in virtual time: the product's index, a mover, and what the index must hold.

use crate::device::Device;
use crate::kv::tier_key;
use crate::mover::{Habits, Mover, Moving};
use crate::random::Random;
use block_pool::{EvictionPolicy, PageId, Priority};
use cache_manager::{BlockKey, CopyEnd, CopyJob, Ledger, OffloadJob, OuterTier};
use completion::{Completer, Completion, pending};
use std::collections::{BTreeMap, HashMap};
use tiered_connector::index::TierIndex;
use tiered_connector::job::{Direction, Job, Offer, Outcome, TierKey, UnitId};

/// What a broken variant does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Broken {
    /// Blocks are found when their store begins.
    FindsBlocksEarly,
    /// The ledger is told that a load has ended when it begins.
    EndsLoadsEarly,
    /// The ledger is told that an offload has ended when it begins: its pages are used again.
    EndsOffloadsEarly,
    /// Stores and loads wait for no forward.
    IgnoresFences,
    /// A copy of several jobs ends with the first.
    EndsWithFirstJob,
    /// Units count as read when a load begins: they are given to other blocks.
    FreesUnitsEarly,
    /// The index is told that failed stores ended well.
    TrustsFailedStores,
    /// The ledger is told that failed loads ended well.
    TrustsFailedLoads,
    /// A reset forgets nothing here.
    KeepsBlocksAtReset,
}

/// A copy that the ledger began, of one job or several.
struct Transfer {
    left: usize,
    end: CopyEnd,
    completer: Completer,
}

pub(crate) struct Tier {
    pub(crate) now: u64,
    pub(crate) device: Device,
    pub(crate) mover: Mover,
    pub(crate) index: TierIndex,
    pub(crate) broken: Option<Broken>,
    /// The right content of every block that a request had.
    pub(crate) truth: HashMap<TierKey, Vec<u64>>,
    /// What was told by [`OuterTier::take_ended`] since somebody looked.
    pub(crate) told: Vec<(u64, CopyEnd)>,
    /// The first rule that was broken in a call.
    pub(crate) fault: Option<String>,
    /// Blocks of jobs begun: stored and loaded.
    pub(crate) blocks_begun: (u64, u64),
    /// Blocks whose store ended well after the last reset, until their unit is given away.
    held: BTreeMap<UnitId, TierKey>,
    /// The reset before which each job in flight was begun.
    resets: u32,
    begun_at: HashMap<u64, u32>,
    transfers: HashMap<u64, Transfer>,
    /// Jobs and copies that have ended, which the index and the ledger were not told of.
    ended_jobs: Vec<(Moving, Outcome)>,
    ended: Vec<(u64, CopyEnd)>,
    closed: bool,
    /// The index was called since it was checked.
    entered: bool,
    random: Random,
}

impl Tier {
    pub(crate) fn new(pages: u32, units: u32, page_size: u32, random: &mut Random) -> Tier {
        let policies = [EvictionPolicy::PriorityLru, EvictionPolicy::PrioritySlru];
        let habits = Habits::draw(random);
        Tier {
            now: 0,
            device: Device::new(pages, page_size),
            mover: Mover::new(units, page_size, habits, Random(random.next())),
            index: TierIndex::new(units, policies[random.below(2)]),
            broken: None,
            truth: HashMap::new(),
            told: Vec::new(),
            fault: None,
            blocks_begun: (0, 0),
            held: BTreeMap::new(),
            resets: 0,
            begun_at: HashMap::new(),
            transfers: HashMap::new(),
            ended_jobs: Vec::new(),
            ended: Vec::new(),
            closed: false,
            entered: false,
            random: Random(random.next()),
        }
    }

    /// Lets time pass: forwards run and copies go on, each in its moment.
    pub(crate) fn pass(&mut self, time: u64) -> Result<(), String> {
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

    /// Forgets every block.
    pub(crate) fn reset(&mut self) {
        self.enter();
        self.truth.clear();
        if self.broken != Some(Broken::KeepsBlocksAtReset) {
            self.index.reset();
            self.held.clear();
            self.resets += 1;
        }
    }

    /// Takes no more copies, and cancels those in flight, wherever they are.
    pub(crate) fn shut_down(&mut self) {
        self.closed = true;
        while let Some(moving) = self.mover.jobs.pop() {
            self.end_job(moving, Outcome::Cancelled);
        }
        self.enter();
    }

    /// The index's books, what it says is here, and the pins of pages that are being copied.
    pub(crate) fn check(&mut self, ledger: &Ledger) -> Result<(), String> {
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
        let slab = ledger.slab();
        for Moving { job, copy, .. } in &self.mover.jobs {
            for &page in &job.pages {
                if (slab.pins(page) as usize) < self.mover.on_page(page) {
                    return Err(format!("{page} is not pinned while copy {copy} touches it"));
                }
                if job.direction == Direction::Load && slab.node(page).is_some() {
                    return Err(format!("{page} is published while copy {copy} writes it"));
                }
            }
        }
        Ok(())
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
    fn enter(&mut self) {
        self.entered = true;
        self.random.shuffle(&mut self.ended_jobs);
        for (Moving { job, keys, .. }, outcome) in std::mem::take(&mut self.ended_jobs) {
            let trusted = self.broken == Some(Broken::TrustsFailedStores);
            let outcome = if trusted { Outcome::Done } else { outcome };
            let current = self.begun_at.remove(&job.id.0) == Some(self.resets);
            if !self.is_told_early(job.direction) && !self.index.apply(job.id, &outcome) {
                self.note(format!("job {} was not in flight", job.id.0));
            }
            if job.direction == Direction::Store && outcome == Outcome::Done && current {
                self.held.extend(job.units.into_iter().zip(keys));
            }
        }
    }

    /// Takes note of a job that the index planned, and gives it to the mover.
    fn begin_job(&mut self, job: Job, blocks: &[(TierKey, PageId)], copy: u64) {
        let key = |page| blocks.iter().find(|&&(_, of)| of == page).map(|&(key, _)| key);
        let keys: Vec<TierKey> = job.pages.iter().copied().filter_map(key).collect();
        let count = job.units.len() as u64;
        if job.direction == Direction::Store {
            if let Some(unit) = job.units.iter().find(|&&unit| self.mover.touches(unit)) {
                self.note(format!("unit {} is given away while it is read or written", unit.0));
            }
            self.held.retain(|unit, _| !job.units.contains(unit));
            self.blocks_begun.0 += count;
        } else {
            self.blocks_begun.1 += count;
        }
        if self.is_told_early(job.direction) {
            self.index.apply(job.id, &Outcome::Done);
        }
        self.begun_at.insert(job.id.0, self.resets);
        self.mover.ask(job, keys, copy, self.now, &self.device);
    }

    fn begin(
        &mut self,
        copy: u64,
        jobs: Vec<Job>,
        blocks: &[(TierKey, PageId)],
        early: Broken,
    ) -> Completion {
        let (completer, completion) = pending();
        self.transfers.insert(copy, Transfer { left: jobs.len(), end: CopyEnd::Done, completer });
        if jobs.is_empty() || self.broken == Some(early) {
            self.end_transfer(copy);
        }
        for job in jobs {
            self.begin_job(job, blocks, copy);
        }
        completion
    }

    /// Whether the index is told of a job's end when it begins.
    fn is_told_early(&self, direction: Direction) -> bool {
        match direction {
            Direction::Store => self.broken == Some(Broken::FindsBlocksEarly),
            Direction::Load => self.broken == Some(Broken::FreesUnitsEarly),
        }
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
        Some(self.begin(job.id.0, jobs?, &blocks, Broken::EndsLoadsEarly))
    }

    fn offload(&mut self, job: &OffloadJob) -> bool {
        let OffloadJob { keys, copy: job, .. } = job;
        self.enter();
        if self.declines() {
            return false;
        }
        let blocks = blocks(keys, job);
        let mut priority = Priority::DEFAULT;
        if self.mover.habits.knows_priorities {
            priority = Priority::new(30 + self.random.below(10) as i64).expect("it is in range");
        }
        let offers: Vec<Offer> = blocks.iter().map(|&(key, page)| Offer { key, page, priority }).collect();
        let parts = offers.chunks(self.mover.habits.blocks_a_job);
        let jobs = parts.filter_map(|part| self.index.store(part, job.after)).collect();
        self.begin(job.id.0, jobs, &blocks, Broken::EndsOffloadsEarly);
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

fn blocks(keys: &[BlockKey], job: &CopyJob) -> Vec<(TierKey, PageId)> {
    keys.iter().map(tier_key).zip(job.pages.iter().copied()).collect()
}
