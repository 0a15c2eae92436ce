//! The tier index: which block lies in which unit of the host tier, and which unit goes next.
//!
//! A unit is free, being written, holding a block, or being read; or it is private. Only a block whose store has
//! ended well is found. What is being written or read is never evicted. A reset forgets every block at once: stores
//! on their way then end unseen.

use crate::job::{Direction, Job, JobId, Offer, Outcome, TierKey, UnitId};
use crate::reports::{Reporter, What};
use block_pool::{EvictionPolicy, Next, NodeLink, PageId, Pool, Priority, Step};
use memory::{AHEAD, Array, KeyTable};
use std::collections::{HashMap, HashSet};

mod exchange;
mod keep;
mod private;
mod verify;
pub use private::TooFew;
pub use verify::IndexFault;

#[cfg(test)]
mod tests;

/// What the index has counted; numbers never fall.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct IndexCounters {
    /// Blocks whose store ended well.
    pub stored: u64,
    /// Blocks that were read, to the end.
    pub loaded: u64,
    /// Blocks that came from another tier.
    pub filled: u64,
    /// Blocks that gave up their unit to others.
    pub evicted: u64,
    /// Blocks offered that were here, or on their way.
    pub known: u64,
    /// Blocks offered that found no unit: all were in use, or kept for blocks of a higher priority.
    pub no_unit: u64,
    /// Blocks whose hash was another block's: not stored, or not found.
    pub collisions: u64,
    /// Blocks of stores that failed, were cancelled, or ended after a reset or a loss.
    pub unstored: u64,
    /// Blocks of loads that failed or were cancelled.
    pub unloaded: u64,
    /// Blocks that went with the memory they were in.
    pub lost: u64,
}

/// What a job does with its units.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    /// They are written from the device.
    Store,
    /// They are written from another tier.
    Fill,
    /// They are read into the device.
    Load,
    /// They are read by another tier.
    Hold,
}

impl Use {
    fn writes(self) -> bool {
        matches!(self, Use::Store | Use::Fill)
    }
}

impl From<Direction> for Use {
    fn from(direction: Direction) -> Use {
        match direction {
            Direction::Store => Use::Store,
            Direction::Load => Use::Load,
        }
    }
}

/// What a job in flight holds.
#[derive(Clone, Debug)]
struct InFlight {
    does: Use,
    units: Vec<UnitId>,
    /// That of its blocks; `None` when its units are private.
    epoch: Option<u32>,
}

/// The index of one host tier.
pub struct TierIndex {
    /// Units as pages: unit `n` is page `n + 1`.
    pool: Pool,
    /// The block that each unit was last given to.
    keys: Array<TierKey>,
    /// Units that hold a block or are being written, by the block's hash.
    table: KeyTable,
    private: HashSet<UnitId>,
    /// Those of them whose bytes are gone.
    lost_private: HashSet<UnitId>,
    jobs: HashMap<JobId, InFlight>,
    next_job: u64,
    epoch: u32,
    counters: IndexCounters,
    /// Told which blocks come and go.
    reporter: Option<Reporter>,
}

impl TierIndex {
    /// An empty tier of `units` units, at most [`Pool::MAX_PAGES`].
    pub fn new(units: u32, policy: EvictionPolicy) -> TierIndex {
        TierIndex {
            pool: Pool::new(units, policy, Priority::DEFAULT),
            keys: Array::with_capacity(units as usize),
            table: KeyTable::with_capacity(units as usize),
            private: HashSet::new(),
            lost_private: HashSet::new(),
            jobs: HashMap::new(),
            next_job: 0,
            epoch: 0,
            counters: IndexCounters::default(),
            reporter: None,
        }
    }

    /// Units in all.
    pub fn total(&self) -> u32 {
        self.pool.total()
    }

    /// Units that are free, or whose block can give way.
    pub fn available(&self) -> u32 {
        self.pool.available()
    }

    /// Blocks that can be found.
    pub fn blocks(&self) -> u32 {
        let writing: usize = self.current_stores().map(|job| job.units.len()).sum();
        (self.table.len() - writing) as u32
    }

    /// What was counted.
    pub fn counters(&self) -> IndexCounters {
        self.counters
    }

    /// Jobs in flight that touch the device.
    pub fn in_flight(&self) -> usize {
        self.jobs.values().filter(|job| matches!(job.does, Use::Store | Use::Load)).count()
    }

    /// Whether the block can be read now.
    pub fn contains(&self, key: &TierKey) -> bool {
        self.find(key).is_some()
    }

    /// How many leading blocks can be read now, and the first that cannot.
    pub fn leading(&mut self, keys: &mut impl Iterator<Item = TierKey>) -> (usize, Option<TierKey>) {
        let mut found = 0;
        for key in keys {
            if !self.contains(&key) {
                let collides = |unit: UnitId| self.keys[unit.0 as usize].guard != key.guard;
                self.counters.collisions += u64::from(self.owner(key.hash).is_some_and(collides));
                return (found, Some(key));
            }
            found += 1;
        }
        (found, None)
    }

    /// Whether the block is on its way here.
    pub fn is_being_stored(&self, key: &TierKey) -> bool {
        let own = |unit: UnitId| self.keys[unit.0 as usize].guard == key.guard;
        !self.contains(key) && self.owner(key.hash).is_some_and(own)
    }

    /// Plans to store blocks, in the order of their prefix. Those that are here or on their way are left out, and
    /// so are those for which there is no unit; `None` if no block is left.
    pub fn store(&mut self, blocks: &[Offer], after: Step) -> Option<Job> {
        let (mut units, mut pages) = (Vec::new(), Vec::new());
        for (number, Offer { key, page, priority }) in blocks.iter().enumerate() {
            if let Some(later) = blocks.get(number + AHEAD) {
                self.table.prefetch(later.key.hash);
            }
            if let Some(unit) = self.owner(key.hash) {
                let own = self.keys[unit.0 as usize].guard == key.guard;
                self.counters.known += u64::from(own);
                self.counters.collisions += u64::from(!own);
                continue;
            }
            let Some(unit) = self.take(*priority) else {
                self.counters.no_unit += 1;
                continue;
            };
            self.keys[unit.0 as usize] = *key;
            self.table.insert(key.hash, unit.0);
            self.report(What::Coming, unit);
            units.push(unit);
            pages.push(*page);
        }
        (!units.is_empty()).then(|| self.job(Direction::Store, units, pages, after))
    }

    /// Plans to read blocks into pages, all or none: `None` when one is not here. They stay until the job ends.
    pub fn load(&mut self, blocks: &[(TierKey, PageId)], after: Step) -> Option<Job> {
        let units: Option<Vec<UnitId>> = blocks.iter().map(|(key, _)| self.find(key)).collect();
        Some(self.load_units(units?, blocks.iter().map(|&(_, page)| page).collect(), after))
    }

    fn load_units(&mut self, units: Vec<UnitId>, pages: Vec<PageId>, after: Step) -> Job {
        for &unit in &units {
            if self.holds(unit) {
                self.pool.mark_reused(page(unit)); // one that is being filled is new
            }
            self.pool.pin(page(unit));
        }
        self.job(Direction::Load, units, pages, after)
    }

    /// A job has ended. Gives whether it was in flight.
    pub fn apply(&mut self, id: JobId, outcome: &Outcome) -> bool {
        let Some(InFlight { does, units, epoch }) = self.jobs.remove(&id) else { return false };
        let done = *outcome == Outcome::Done;
        let count = units.len() as u64;
        // Deepest first: a prefix goes from its tail to its head.
        match does {
            _ if epoch.is_none() => {
                for &unit in &units {
                    self.pool.unpin(page(unit));
                }
            }
            Use::Hold => {
                for &unit in &units {
                    self.pool.unpin_in_place(page(unit)); // nobody used them
                }
            }
            Use::Load => {
                for &unit in units.iter().rev() {
                    self.pool.unpin(page(unit));
                }
                *(if done { &mut self.counters.loaded } else { &mut self.counters.unloaded }) += count;
            }
            Use::Store | Use::Fill if done && epoch == Some(self.epoch) => {
                for &unit in units.iter().rev() {
                    self.pool.publish(page(unit), NodeLink(unit.0), Step(0));
                    self.pool.release(page(unit), Step(0));
                    self.report(What::Got, unit);
                }
                let counted =
                    if does == Use::Store { &mut self.counters.stored } else { &mut self.counters.filled };
                *counted += count;
            }
            Use::Store | Use::Fill => {
                for &unit in units.iter().rev() {
                    if epoch == Some(self.epoch) {
                        self.table.remove(self.keys[unit.0 as usize].hash, unit.0);
                        self.report(What::Lost, unit);
                    }
                    self.pool.release(page(unit), Step(0));
                }
                self.counters.unstored += if does == Use::Store { count } else { 0 };
            }
        }
        true
    }

    /// The blocks of these hashes, in the order of their prefix, were used on the device: those that are here
    /// count as used just now. Gives whether another one is on its way.
    pub fn touch(&mut self, hashes: &[u64]) -> bool {
        self.refresh(hashes.iter().rev().copied())
    }

    /// The blocks of these hashes that are here count as used just now, one after the other. Gives whether another one
    /// is on its way.
    pub(crate) fn refresh(&mut self, hashes: impl Iterator<Item = u64>) -> bool {
        let mut coming = false;
        for hash in hashes {
            if let Some(unit) = self.owner(hash) {
                coming |= self.pool.refs(page(unit)) > 0;
                self.pool.refresh(page(unit));
            }
        }
        coming
    }

    /// Forgets every block; private units stay. The cost does not grow with their number.
    pub fn reset(&mut self) {
        self.pool.forget_all();
        self.table = KeyTable::with_capacity(self.pool.total() as usize);
        self.epoch += 1;
        if let Some(reporter) = &self.reporter {
            reporter.tell(What::LostAll);
        }
    }

    /// Tells `reporter` from now on which blocks come and go; nobody, if that is `None`.
    pub(crate) fn report_to(&mut self, reporter: Option<Reporter>) {
        self.reporter = reporter;
    }

    /// Says what happened to the block that a unit was last given to.
    #[inline]
    fn report(&self, what: fn(u64) -> What, unit: UnitId) {
        if let Some(reporter) = &self.reporter {
            reporter.tell(what(self.keys[unit.0 as usize].hash));
        }
    }

    /// The unit of a block that can be read. A hash that belongs to another block is no hit.
    fn find(&self, key: &TierKey) -> Option<UnitId> {
        let unit = self.owner(key.hash)?;
        let readable = self.pool.node(page(unit)).is_some();
        (readable && self.keys[unit.0 as usize].guard == key.guard).then_some(unit)
    }

    /// The unit that holds, or is being given, a block of this hash.
    fn owner(&self, hash: u64) -> Option<UnitId> {
        self.table.find(hash, |unit| self.keys[unit as usize].hash == hash).map(UnitId)
    }

    /// A unit for a block of `priority`: a free one, or that of a block of no higher priority.
    fn take(&mut self, priority: Priority) -> Option<UnitId> {
        match self.pool.next()? {
            Next::Cached(lowest) if lowest > priority => return None,
            Next::Free | Next::Cached(_) => {}
        }
        let taken = self.pool.take(priority)?;
        let unit = UnitId(taken.page.0 - 1);
        if taken.evicted.is_some() {
            self.table.remove(self.keys[unit.0 as usize].hash, unit.0);
            self.report(What::Lost, unit);
            self.counters.evicted += 1;
        }
        if taken.pristine {
            self.keys.push(TierKey { hash: 0, guard: [0; 16] });
        }
        Some(unit)
    }

    /// A job of the current epoch.
    fn job(&mut self, direction: Direction, units: Vec<UnitId>, pages: Vec<PageId>, after: Step) -> Job {
        self.begin(
            InFlight { does: direction.into(), units, epoch: Some(self.epoch) },
            direction,
            pages,
            after,
        )
    }

    fn begin(&mut self, in_flight: InFlight, direction: Direction, pages: Vec<PageId>, after: Step) -> Job {
        let units = in_flight.units.clone();
        Job { id: self.enter(in_flight), direction, units, pages, after }
    }

    fn enter(&mut self, in_flight: InFlight) -> JobId {
        let id = JobId(self.next_job);
        self.next_job += 1;
        self.jobs.insert(id, in_flight);
        id
    }

    /// Stores whose blocks will be found if they end well.
    fn current_stores(&self) -> impl Iterator<Item = &InFlight> {
        let epoch = Some(self.epoch);
        self.jobs.values().filter(move |job| job.does.writes() && job.epoch == epoch)
    }
}

fn page(unit: UnitId) -> PageId {
    PageId(unit.0 + 1)
}
