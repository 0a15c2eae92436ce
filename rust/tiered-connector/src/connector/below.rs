//! The tier below the host: blocks go on to it when they have come to the host, and come up through host units.
//!
//! Both are planned when a call asks for the first copy, and go on without another call: the thread that ends the first
//! copy begins the second.

use super::BelowMetrics;
use crate::index::TierIndex;
use crate::job::{Job, JobId, Offer, Origin, Outcome, TierKey, UnitId};
use crate::mover::{Mover, Task};
use crate::vault::{Move, Unmoved, Vault};
use block_pool::{PageId, Priority, Step};
use disk_store::store::Failure;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(test)]
mod tests;

/// Bytes of one list of moves: blocks are found as they land.
const MOVE_BYTES: usize = 1 << 20;

/// Most blocks that were used and that the index below is not told of.
const MOST_TOUCHED: usize = 1 << 16;

/// What is known of the tier below.
pub(super) struct Below {
    /// Its slots, as units.
    pub(super) index: TierIndex,
    pub(super) vault: Arc<dyn Vault>,
    /// Host units that are being filled.
    fills: HashMap<UnitId, Arc<Fill>>,
    ended: Arc<EndedMoves>,
    blocks_a_move: usize,
    /// Blocks that are being written or wait for it: the host keeps their units.
    writing: usize,
    /// Most of them.
    most_writing: usize,
    /// Blocks that were not written because so many waited.
    dropped_busy: u64,
    /// Hashes of blocks that were used on the device, the least recently used first; the index is told when there is
    /// time.
    touched: Vec<u64>,
}

/// Lists of moves that have ended and that the index has not been told of.
#[derive(Default)]
struct EndedMoves {
    list: Mutex<Vec<(Moves, Unmoved)>>,
    any: AtomicBool,
}

/// Moves that were begun together.
struct Moves {
    /// The job of the index below.
    below: JobId,
    /// The job of the host's index.
    host: JobId,
    /// The slot and the unit of each.
    places: Vec<(UnitId, UnitId)>,
    /// What is filled, if they go up.
    fill: Option<Arc<Fill>>,
}

impl EndedMoves {
    fn push(&self, moves: Moves, unmoved: Unmoved) {
        self.list.lock().push((moves, unmoved));
        self.any.store(true, Ordering::Release);
    }

    /// Those that have ended, in the order in which they were planned.
    fn take(&self) -> Vec<(Moves, Unmoved)> {
        if !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        let mut ended = std::mem::take(&mut *self.list.lock());
        ended.sort_unstable_by_key(|(moves, _)| moves.below);
        ended
    }
}

/// Units that are being filled together, and the copies from them that wait for that.
struct Fill {
    waiting: Mutex<Waiting>,
}

enum Waiting {
    Tasks(Vec<Arc<dyn Task>>),
    /// Whether and why it failed.
    Ended(Option<String>),
}

impl Fill {
    /// Hands `task` to `mover` once the units are filled; ends it if they are not.
    fn then(&self, task: Arc<dyn Task>, mover: &dyn Mover) {
        let failed = match &mut *self.waiting.lock() {
            Waiting::Tasks(tasks) => return tasks.push(task),
            Waiting::Ended(failed) => failed.clone(),
        };
        go_on(vec![task], failed.as_deref(), mover);
    }

    fn end(&self, failed: Option<&str>, mover: &dyn Mover) {
        let waiting = std::mem::replace(&mut *self.waiting.lock(), Waiting::Ended(failed.map(String::from)));
        if let Waiting::Tasks(tasks) = waiting {
            go_on(tasks, failed, mover);
        }
    }
}

fn go_on(tasks: Vec<Arc<dyn Task>>, failed: Option<&str>, mover: &dyn Mover) {
    match failed {
        None => mover.submit(tasks),
        Some(why) => tasks.into_iter().for_each(|task| task.end(Outcome::Failed(why.into()))),
    }
}

/// A copy to the host, and the writes that follow it.
struct Behind {
    task: Arc<dyn Task>,
    /// That of the vault when it was planned.
    epoch: u64,
    writes: Mutex<Vec<(Moves, Vec<Move>)>>,
    vault: Arc<dyn Vault>,
    ended: Arc<EndedMoves>,
}

impl Task for Behind {
    fn job(&self) -> &Job {
        self.task.job()
    }

    fn is_cancelled(&self) -> bool {
        self.task.is_cancelled()
    }

    fn end(&self, outcome: Outcome) {
        for (begun, moves) in std::mem::take(&mut *self.writes.lock()) {
            let ended = Arc::clone(&self.ended);
            if outcome == Outcome::Done {
                let told = move |unmoved| ended.push(begun, unmoved);
                self.vault.write(self.epoch, moves, Box::new(told));
            } else {
                let unmoved = moves.into_iter().map(|one| (one.slot, Failure::GivenUp)).collect();
                ended.push(begun, unmoved);
            }
        }
        self.task.end(outcome);
    }
}

/// The jobs of a load, and what has to come before some of them.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) jobs: Vec<Job>,
    /// What each job waits for.
    after: Vec<Option<Arc<Fill>>>,
    reads: Vec<(Moves, Vec<Move>)>,
}

/// Where a block of a load is read.
#[derive(Clone)]
enum Source {
    Host(UnitId),
    Filled(UnitId, Arc<Fill>),
    Below,
}

impl Source {
    /// Whether blocks from both can be one job.
    fn goes_with(&self, other: &Source) -> bool {
        match (self, other) {
            (Source::Host(_), Source::Host(_)) | (Source::Below, Source::Below) => true,
            (Source::Filled(_, one), Source::Filled(_, other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Below {
    pub(super) fn new(index: TierIndex, vault: Arc<dyn Vault>, host_units: u32, unit_bytes: usize) -> Below {
        Below {
            index,
            vault,
            fills: HashMap::new(),
            ended: Arc::default(),
            blocks_a_move: (MOVE_BYTES / unit_bytes.max(1)).clamp(1, super::JOB_BLOCKS),
            writing: 0,
            most_writing: (host_units as usize / 2).max(1),
            dropped_busy: 0,
            touched: Vec::new(),
        }
    }

    pub(super) fn metrics(&self) -> BelowMetrics {
        BelowMetrics {
            index: self.index.counters(),
            vault: self.vault.counters(),
            dropped_busy: self.dropped_busy,
            blocks: self.index.blocks(),
            slots: self.index.total(),
            writing: self.writing,
        }
    }

    /// The blocks of these hashes, from the first of their prefix on, were used on the device.
    pub(super) fn touch(&mut self, hashes: &[u64]) {
        self.touched.extend(hashes.iter().rev());
        if self.touched.len() > MOST_TOUCHED {
            self.index.refresh(self.touched.drain(..));
        }
    }

    /// Forgets every block, those on their way included.
    pub(super) fn forget_all(&mut self) {
        self.index.reset();
        self.touched.clear();
    }

    /// Tells both indices of moves that have ended. Each block ends by itself: what was moved is found.
    pub(super) fn settle(&mut self, host: &mut TierIndex) {
        for (Moves { below, host: of_host, places, fill }, unmoved) in self.ended.take() {
            let failed: HashSet<UnitId> = unmoved.iter().map(|&(slot, _)| slot).collect();
            self.index.fail(below, &failed);
            self.index.apply(below, &Outcome::Done);
            if fill.is_none() {
                self.writing -= places.len();
                host.apply(of_host, &Outcome::Done);
                continue;
            }
            let units = places.iter().filter(|(slot, _)| failed.contains(slot)).map(|&(_, unit)| unit);
            host.fail(of_host, &units.collect());
            host.apply(of_host, &Outcome::Done);
            for (_, unit) in &places {
                self.fills.remove(unit);
            }
            for (slot, why) in &unmoved {
                if *why != Failure::GivenUp {
                    self.index.forget(*slot);
                }
            }
        }
        self.index.refresh(self.touched.drain(..)); // after that: what has come may be among it
    }

    /// Keeps the blocks of these that are here until the job has ended, before some are written.
    pub(super) fn hold_known(&mut self, host: &mut TierIndex, offers: &[Offer]) -> JobId {
        if self.writing + offers.len() > self.most_writing {
            self.settle(host);
        }
        self.index.refresh(self.touched.drain(..)); // before any of them gives way
        self.index.hold_known(offers)
    }

    /// Plans to write the blocks, too, that `task` brings to the host. Gives a task that does both. `origin` tells of a
    /// page where its block comes from.
    pub(super) fn behind(
        &mut self,
        host: &mut TierIndex,
        task: Arc<dyn Task>,
        mut origin: impl FnMut(PageId) -> Origin,
    ) -> Arc<dyn Task> {
        let Job { units, pages, .. } = task.job();
        let (units, rest) = units.split_at(units.len().min(self.most_writing - self.writing));
        self.dropped_busy += rest.len() as u64;
        let page_of: HashMap<UnitId, PageId> = units.iter().copied().zip(pages.iter().copied()).collect();
        let mut writes = Vec::new();
        for part in host.offers(units).chunks(self.blocks_a_move) {
            let Some(Job { id, units: slots, pages, .. }) = self.index.store(part, Step(0)) else { continue };
            let units: Vec<UnitId> = pages.iter().map(|page| UnitId(page.0 - 1)).collect();
            self.writing += units.len();
            let mut moves = moves(host, &slots, &units);
            for one in &mut moves {
                one.origin = origin(page_of[&one.unit]);
            }
            let places = slots.into_iter().zip(units.iter().copied()).collect();
            writes.push((Moves { below: id, host: host.hold(&units), places, fill: None }, moves));
        }
        if writes.is_empty() {
            return task;
        }
        let (vault, ended) = (Arc::clone(&self.vault), Arc::clone(&self.ended));
        Arc::new(Behind { task, epoch: vault.epoch(), writes: Mutex::new(writes), vault, ended })
    }

    /// Where a block would be read; `None` if it is nowhere.
    fn source(&self, host: &TierIndex, key: &TierKey) -> Option<Source> {
        match host.place_of(key) {
            Some(unit) if host.holds(unit) => Some(Source::Host(unit)),
            Some(unit) => self.fills.get(&unit).map(|fill| Source::Filled(unit, Arc::clone(fill))),
            None => (self.index.contains(key) && !host.knows(key.hash)).then_some(Source::Below),
        }
    }

    /// Whether a block that the host does not have will be read from below.
    pub(super) fn finds(&self, host: &TierIndex, key: &TierKey) -> bool {
        self.source(host, key).is_some()
    }

    /// Plans to read blocks into pages, all or none: `None` when one is nowhere, or there are no units to read it by.
    pub(super) fn plan(
        &mut self,
        host: &mut TierIndex,
        blocks: &[(TierKey, PageId)],
        after: Step,
        blocks_a_job: usize,
    ) -> Option<Plan> {
        let sources: Option<Vec<Source>> = blocks.iter().map(|(key, _)| self.source(host, key)).collect();
        let mut plan = Plan::default();
        let mut from_below = Vec::new();
        let mut first = 0;
        // What is in the host is held before units are taken for the rest.
        for run in sources?.chunk_by(Source::goes_with) {
            let blocks = &blocks[first..first + run.len()];
            first += run.len();
            if matches!(run[0], Source::Below) {
                from_below.extend(blocks.chunks(self.blocks_a_move));
                continue;
            }
            let (mut units, mut fill) = (Vec::with_capacity(run.len()), None);
            for source in run {
                match source {
                    Source::Host(unit) => units.push(*unit),
                    Source::Filled(unit, by) => {
                        units.push(*unit);
                        fill = Some(Arc::clone(by));
                    }
                    Source::Below => {}
                }
            }
            for (units, blocks) in units.chunks(blocks_a_job).zip(blocks.chunks(blocks_a_job)) {
                plan.jobs.push(host.load_from(units.to_vec(), pages_of(blocks), after));
                plan.after.push(fill.clone());
            }
        }
        let wanted: usize = from_below.iter().map(|blocks| blocks.len()).sum();
        let filled = wanted <= host.available() as usize
            && from_below.into_iter().all(|blocks| self.plan_fill(host, blocks, after, &mut plan));
        if !filled {
            self.withdraw(host, plan);
            return None;
        }
        Some(plan)
    }

    /// Plans to fill units with blocks from below, and to read them into pages. Gives whether there are units.
    fn plan_fill(
        &mut self,
        host: &mut TierIndex,
        blocks: &[(TierKey, PageId)],
        after: Step,
        plan: &mut Plan,
    ) -> bool {
        let slots: Vec<UnitId> = blocks.iter().filter_map(|(key, _)| self.index.unit_of(key)).collect();
        let wanted: Vec<(TierKey, Priority)> =
            blocks.iter().zip(&slots).map(|(&(key, _), &slot)| (key, self.index.priority(slot))).collect();
        let Some((filling, units)) = host.fill(&wanted) else { return false };
        let below = self.index.load_from(slots.clone(), Vec::new(), Step(0)).id;
        let fill = Arc::new(Fill { waiting: Mutex::new(Waiting::Tasks(Vec::new())) });
        self.fills.extend(units.iter().map(|&unit| (unit, Arc::clone(&fill))));
        let moves = moves(host, &slots, &units);
        let places = slots.into_iter().zip(units.iter().copied()).collect();
        plan.jobs.push(host.load_from(units, pages_of(blocks), after));
        plan.after.push(Some(Arc::clone(&fill)));
        plan.reads.push((Moves { below, host: filling, places, fill: Some(fill) }, moves));
        true
    }

    /// What was planned is not done.
    fn withdraw(&mut self, host: &mut TierIndex, plan: Plan) {
        for job in plan.jobs.into_iter().rev() {
            host.withdraw(job.id);
        }
        for (Moves { below, host: filling, places, .. }, _) in plan.reads {
            self.index.withdraw(below);
            host.apply(filling, &Outcome::Cancelled);
            for (_, unit) in &places {
                self.fills.remove(unit);
            }
        }
    }

    /// Hands the tasks of a plan's jobs to `mover`, those that wait for a fill once it has ended.
    pub(super) fn begin(&self, plan: Plan, tasks: Vec<Arc<dyn Task>>, mover: &Arc<dyn Mover>) {
        let mut now = Vec::new();
        for (task, fill) in tasks.into_iter().zip(plan.after) {
            match fill {
                None => now.push(task),
                Some(fill) => fill.then(task, &**mover),
            }
        }
        mover.submit(now);
        for (begun, moves) in plan.reads {
            let (ended, mover) = (Arc::clone(&self.ended), Arc::clone(mover));
            let told = move |unmoved: Unmoved| {
                let failed = unmoved.first().map(|(_, why)| why.to_string());
                let fill = begun.fill.clone();
                ended.push(begun, unmoved); // first: who waits may ask at once
                if let Some(fill) = fill {
                    fill.end(failed.as_deref(), &*mover);
                }
            };
            self.vault.read(moves, Box::new(told));
        }
    }
}

fn pages_of(blocks: &[(TierKey, PageId)]) -> Vec<PageId> {
    blocks.iter().map(|&(_, page)| page).collect()
}

fn moves(host: &TierIndex, slots: &[UnitId], units: &[UnitId]) -> Vec<Move> {
    let offers = host.offers(units).into_iter();
    let one = |((offer, &slot), &unit): ((crate::job::Offer, &UnitId), &UnitId)| Move {
        key: offer.key,
        slot,
        unit,
        priority: offer.priority.level(),
        origin: Origin::default(),
    };
    offers.zip(slots).zip(units).map(one).collect()
}
