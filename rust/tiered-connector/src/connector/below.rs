//! The tier below the host: blocks are written to it behind the host's back, and come up through host units.

use super::BelowMetrics;
use crate::index::TierIndex;
use crate::job::{Job, JobId, Origin, Outcome, TierKey, UnitId};
use crate::mover::{Mover, Task};
use crate::vault::{Move, Unmoved, Vault};
use block_pool::{PageId, Priority, Step};
use disk_store::store::Failure;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of one list of moves: blocks are found as they land.
const MOVE_BYTES: usize = 1 << 20;

/// What is known of the tier below.
pub(super) struct Below {
    /// Its slots, as units.
    pub(super) index: TierIndex,
    pub(super) vault: Arc<dyn Vault>,
    /// Where blocks come from that are on their way to the host.
    origins: HashMap<UnitId, Origin>,
    /// Host units that are being filled.
    fills: HashMap<UnitId, Arc<Fill>>,
    ended: Arc<EndedMoves>,
    blocks_a_move: usize,
    /// Most blocks that may wait to be written: the host keeps their units.
    most_writes: usize,
    /// Blocks that were not written because so many waited.
    dropped_busy: u64,
}

/// Lists of moves that have ended and that the index has not been told of.
#[derive(Default)]
struct EndedMoves {
    list: Mutex<Vec<EndedMove>>,
    any: AtomicBool,
}

struct EndedMove {
    /// The job of the index below.
    below: JobId,
    /// The job of the host's index.
    host: JobId,
    unmoved: Unmoved,
    /// What was filled, if the moves went up.
    fill: Option<Arc<Fill>>,
}

impl EndedMoves {
    fn push(&self, ended: EndedMove) {
        self.list.lock().push(ended);
        self.any.store(true, Ordering::Release);
    }

    fn take(&self) -> Vec<EndedMove> {
        if self.any.swap(false, Ordering::Acquire) {
            std::mem::take(&mut *self.list.lock())
        } else {
            Vec::new()
        }
    }
}

/// Units that are being filled together, and the copies from them that wait for that.
struct Fill {
    units: Vec<UnitId>,
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

/// The jobs of a load, and what has to come before some of them.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) jobs: Vec<Job>,
    /// What each job waits for.
    after: Vec<Option<Arc<Fill>>>,
    reads: Vec<Read>,
}

/// Moves that fill units.
struct Read {
    below: JobId,
    host: JobId,
    moves: Vec<Move>,
    fill: Arc<Fill>,
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
            origins: HashMap::new(),
            fills: HashMap::new(),
            ended: Arc::default(),
            blocks_a_move: (MOVE_BYTES / unit_bytes.max(1)).clamp(1, super::JOB_BLOCKS),
            most_writes: (host_units as usize / 2).max(1),
            dropped_busy: 0,
        }
    }

    pub(super) fn metrics(&self) -> BelowMetrics {
        BelowMetrics {
            index: self.index.counters(),
            vault: self.vault.counters(),
            dropped_busy: self.dropped_busy,
            blocks: self.index.blocks(),
            slots: self.index.total(),
            writes: self.vault.writes(),
        }
    }

    /// Tells both indices of moves that have ended.
    pub(super) fn settle(&mut self, host: &mut TierIndex) {
        for EndedMove { below, host: of_host, unmoved, fill } in self.ended.take() {
            let failed = unmoved.first().map(|(_, why)| Outcome::Failed(why.to_string()));
            let outcome = failed.unwrap_or(Outcome::Done);
            self.index.apply(below, &outcome);
            host.apply(of_host, &outcome);
            let Some(fill) = fill else { continue };
            for (slot, why) in &unmoved {
                if *why != Failure::GivenUp {
                    self.index.forget(*slot);
                }
            }
            for unit in &fill.units {
                self.fills.remove(unit);
            }
        }
    }

    /// A block from there is on its way to a unit of the host.
    pub(super) fn note(&mut self, unit: UnitId, origin: Origin) {
        self.origins.insert(unit, origin);
    }

    /// Blocks have come to these units of the host from the device, or have not: those that have are written to the
    /// tier below, too.
    pub(super) fn stored(&mut self, host: &mut TierIndex, units: &[UnitId], done: bool) {
        if done {
            self.write_behind(host, units);
        }
        for unit in units {
            self.origins.remove(unit);
        }
    }

    fn write_behind(&mut self, host: &mut TierIndex, units: &[UnitId]) {
        let room = self.most_writes.saturating_sub(self.vault.writes());
        let (units, rest) = units.split_at(units.len().min(room));
        self.dropped_busy += rest.len() as u64;
        for part in host.offers(units).chunks(self.blocks_a_move) {
            let Some(Job { id, units: slots, pages, .. }) = self.index.store(part, Step(0)) else { continue };
            let units: Vec<UnitId> = pages.iter().map(|page| UnitId(page.0 - 1)).collect();
            let mut moves = moves(host, &slots, &units);
            for one in &mut moves {
                one.origin = self.origins.remove(&one.unit).unwrap_or_default();
            }
            let (held, ended) = (host.hold(&units), Arc::clone(&self.ended));
            let told = move |unmoved| ended.push(EndedMove { below: id, host: held, unmoved, fill: None });
            self.vault.write(moves, Box::new(told));
        }
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
        for blocks in from_below {
            if !self.plan_fill(host, blocks, after, &mut plan) {
                self.withdraw(host, plan);
                return None;
            }
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
        let fill = Arc::new(Fill { units: units.clone(), waiting: Mutex::new(Waiting::Tasks(Vec::new())) });
        self.fills.extend(units.iter().map(|&unit| (unit, Arc::clone(&fill))));
        let moves = moves(host, &slots, &units);
        plan.jobs.push(host.load_from(units, pages_of(blocks), after));
        plan.after.push(Some(Arc::clone(&fill)));
        plan.reads.push(Read { below, host: filling, moves, fill });
        true
    }

    /// What was planned is not done.
    fn withdraw(&mut self, host: &mut TierIndex, plan: Plan) {
        for job in plan.jobs.into_iter().rev() {
            host.withdraw(job.id);
        }
        for Read { below, host: filling, fill, .. } in plan.reads {
            self.index.withdraw(below);
            host.apply(filling, &Outcome::Cancelled);
            for unit in &fill.units {
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
        for Read { below, host, moves, fill } in plan.reads {
            let (ended, mover) = (Arc::clone(&self.ended), Arc::clone(mover));
            let told = move |unmoved: Unmoved| {
                let failed = unmoved.first().map(|(_, why)| why.to_string());
                ended.push(EndedMove { below, host, unmoved, fill: Some(Arc::clone(&fill)) });
                fill.end(failed.as_deref(), &*mover); // after the books can be told: who waits may ask at once
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
