//! The connector: the index of a process and a mover, joined.
//!
//! Calls do bookkeeping and return; the mover moves the bytes. Calls first tell the index what has ended, those that
//! look up or offer blocks only if it matters to them.

use crate::copy::CopyEngine;
use crate::index::{IndexFault, TierIndex};
use crate::job::{Job, Offer, Origin, Outcome, TierKey};
use crate::lanes::Lanes;
use crate::mover::{Memory, Mover};
use crate::reports::Reporter;
use crate::shards::time_left;
use crate::transfer::{Ended, Handoff};
use crate::vault::Vault;
use block_pool::{EvictionPolicy, PageId, Step};
use completion::{Completion, pending};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

mod account;
mod below;
mod metrics;
mod private;
#[cfg(test)]
mod tests;
use below::Below;
pub use metrics::{BelowMetrics, TierMetrics};
pub use private::NoUnits;

/// Bytes of one job: a long copy is many jobs, so that lanes share it and blocks are found as they land.
const JOB_BYTES: usize = 16 << 20;
/// Most blocks of one job.
pub(crate) const JOB_BLOCKS: usize = 1 << 16;

/// Why a connector takes no copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Closed {
    /// It was shut down.
    #[error("the connector was shut down")]
    ShutDown,
    /// This process was forked off the one that has the lanes.
    #[error(
        "the connector was made before this process was forked: its threads are in the other process; make a manager here"
    )]
    Forked,
}

/// Why a load was declined before anything moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Refused {
    /// A block is not here any more, or there is no unit to bring it up by.
    #[error("a block is not in host memory any more")]
    NotHere,
    /// The connector takes no copies.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// What came of an offer of blocks.
#[derive(Debug)]
pub enum Offered {
    /// Those that are not here yet, and for which there are units, are on their way; perhaps none.
    Storing(Completion),
    /// The lanes have fallen behind, or the memory is out of reach: the blocks were dropped.
    Dropped,
}

/// A host tier and its mover.
pub struct TieredConnector {
    inner: Mutex<Inner>,
    mover: Arc<dyn Mover>,
    handoff: Arc<Handoff>,
    unit_bytes: usize,
    blocks_a_job: usize,
    process: u32,
}

struct Inner {
    index: TierIndex,
    below: Option<Below>,
    /// Transfers that have ended and were asked for by nobody yet.
    transfers: Vec<(u64, Outcome)>,
    /// Tags of copies that were begun and not asked for.
    copying: HashSet<u64>,
    /// Whether the memory is out of reach: nothing is found then.
    lost: bool,
    losses: u64,
    dropped_busy: u64,
    dropped_lost: u64,
    closed: bool,
    reporter: Option<Reporter>,
}

impl Inner {
    fn finds(&self, key: &TierKey) -> bool {
        !self.lost && (self.index.contains(key) || self.comes_from_below(key))
    }

    fn comes_from_below(&self, key: &TierKey) -> bool {
        self.below.as_ref().is_some_and(|below| below.finds(&self.index, key))
    }
}

impl TieredConnector {
    /// A tier of `units` units of `unit_bytes` bytes, between which and the device `engine` copies in `lanes`
    /// threads.
    ///
    /// # Errors
    /// The system starts no more threads.
    pub fn new(
        units: u32,
        unit_bytes: usize,
        policy: EvictionPolicy,
        lanes: usize,
        engine: Box<dyn CopyEngine>,
    ) -> std::io::Result<TieredConnector> {
        Ok(Self::with_mover(units, unit_bytes, policy, Box::new(Lanes::start(lanes, engine)?)))
    }

    /// The same with a tier below: blocks go to `vault` too, and come back from there when the host has lost them.
    /// `index` knows what the vault holds.
    #[must_use]
    pub fn above(self, index: TierIndex, vault: Arc<dyn Vault>) -> TieredConnector {
        let mut inner = self.inner.lock();
        inner.below = Some(Below::new(index, vault, inner.index.total(), self.unit_bytes));
        drop(inner);
        self
    }

    /// A tier of `units` units of `unit_bytes` bytes, all of them behind `mover`.
    pub fn with_mover(
        units: u32,
        unit_bytes: usize,
        policy: EvictionPolicy,
        mover: Box<dyn Mover>,
    ) -> TieredConnector {
        TieredConnector {
            inner: Mutex::new(Inner {
                index: TierIndex::new(units, policy),
                below: None,
                transfers: Vec::new(),
                copying: HashSet::new(),
                lost: false,
                losses: 0,
                dropped_busy: 0,
                dropped_lost: 0,
                closed: false,
                reporter: None,
            }),
            mover: Arc::from(mover),
            handoff: Handoff::new(),
            unit_bytes,
            blocks_a_job: (JOB_BYTES / unit_bytes.max(1)).clamp(1, JOB_BLOCKS),
            process: std::process::id(),
        }
    }

    /// Whether each block can be read now.
    ///
    /// # Errors
    /// In a forked process.
    pub fn lookup(&self, keys: &[TierKey]) -> Result<Vec<bool>, Closed> {
        let inner = self.enter()?;
        Ok(keys.iter().map(|key| inner.finds(key)).collect())
    }

    /// How many leading blocks can be read now: those in host memory, and those that would come from below. The index
    /// is told what has ended only if a block waits for that.
    ///
    /// # Errors
    /// In a forked process.
    pub fn leading(&self, keys: impl IntoIterator<Item = TierKey>) -> Result<(usize, usize), Closed> {
        Ok(self.leading_in(&mut *self.lock()?, keys))
    }

    /// The same, but no more than one load can bring up: a block from below needs a unit, beside those of the others.
    ///
    /// # Errors
    /// In a forked process.
    pub fn loadable(&self, keys: impl IntoIterator<Item = TierKey>) -> Result<usize, Closed> {
        let mut inner = self.lock()?;
        let inner = &mut *inner;
        if inner.below.is_none() {
            return Ok(self.leading_in(inner, keys).0);
        }
        let (mut fit, mut units, mut any_below) = (0, inner.index.available(), false);
        for key in keys {
            let (here, below) = self.leading_in(inner, [key]);
            // What is here is held meanwhile, and makes room for none.
            let takes = u32::from(below > 0 || inner.index.may_go(&key));
            any_below |= below > 0;
            if here + below == 0 || (any_below && takes > units) {
                break;
            }
            units = units.saturating_sub(takes);
            fit += 1;
        }
        Ok(fit)
    }

    fn leading_in(&self, inner: &mut Inner, keys: impl IntoIterator<Item = TierKey>) -> (usize, usize) {
        let (mut here, mut below) = (0, 0);
        let mut keys = keys.into_iter();
        while !inner.lost {
            let (found, stop) = inner.index.leading(&mut keys);
            here += found;
            let Some(key) = stop else { break };
            if inner.index.is_being_stored(&key) {
                self.settle(inner);
            }
            match (inner.index.contains(&key), inner.comes_from_below(&key)) {
                (true, _) => here += 1,
                (_, true) => below += 1,
                _ => break,
            }
        }
        (here, below)
    }

    /// Begins to read blocks into pages, all or none. `tag` names the copy in [`TieredConnector::take_finished`].
    ///
    /// # Errors
    /// A block that is not here; a connector that takes no copies. Nothing moves then.
    pub fn load(
        &self,
        blocks: &[(TierKey, PageId)],
        after: Step,
        tag: Option<u64>,
    ) -> Result<Completion, Refused> {
        let mut inner = self.open()?;
        if !blocks.iter().all(|(key, _)| inner.finds(key)) {
            return Err(Refused::NotHere);
        }
        let Inner { index, below, copying, .. } = &mut *inner;
        let Some(below) = below else {
            let jobs: Option<Vec<Job>> =
                blocks.chunks(self.blocks_a_job).map(|part| index.load(part, after)).collect();
            return Ok(self.begin(&mut inner, jobs.unwrap_or_default(), tag));
        };
        let mut plan = below.plan(index, blocks, after, self.blocks_a_job).ok_or(Refused::NotHere)?;
        copying.extend(tag);
        let (tasks, completion) = self.handoff.transfer(std::mem::take(&mut plan.jobs), tag);
        below.begin(plan, tasks, &self.mover);
        Ok(completion)
    }

    /// Offers blocks, in the order of their prefix. Their pages must not change until the copy has ended. The index is
    /// told what has ended only if units are short: which blocks give way does not depend on how far a load is that
    /// was begun just before.
    ///
    /// # Errors
    /// A connector that takes no copies.
    pub fn offload(&self, blocks: &[Offer], after: Step, tag: Option<u64>) -> Result<Offered, Closed> {
        self.offload_with(blocks, &|_| Origin::default(), after, tag)
    }

    /// The same, where `origin` tells of a block by its place among `blocks` where it comes from; a tier below keeps that.
    ///
    /// # Errors
    /// As there.
    pub fn offload_with(
        &self,
        blocks: &[Offer],
        origin: &dyn Fn(usize) -> Origin,
        after: Step,
        tag: Option<u64>,
    ) -> Result<Offered, Closed> {
        let mut inner = unless_shut_down(self.lock()?)?;
        if (inner.index.available() as usize) < blocks.len() {
            self.settle(&mut inner);
        }
        let room = !inner.lost && self.mover.has_room(blocks.len().div_ceil(self.blocks_a_job));
        if !room {
            let dropped = if inner.lost { &mut inner.dropped_lost } else { &mut inner.dropped_busy };
            *dropped += blocks.len() as u64;
            return Ok(Offered::Dropped);
        }
        let Inner { index, below, copying, .. } = &mut *inner;
        let known_below = below.as_mut().map(|below| below.hold_known(index, blocks));
        let known = index.hold_known(blocks);
        let parts = blocks.chunks(self.blocks_a_job);
        let jobs: Vec<Job> = parts.filter_map(|part| index.store(part, after)).collect();
        copying.extend(tag);
        let (mut tasks, completion) = self.handoff.transfer(jobs, tag);
        if let Some((below, known)) = below.as_mut().zip(known_below) {
            let mut offered = blocks.iter().enumerate();
            let mut origin = |page| {
                let place = offered.find(|(_, offer)| offer.page == page); // both are in order
                place.map(|(place, _)| origin(place)).unwrap_or_default()
            };
            tasks = tasks.into_iter().map(|task| below.behind(index, task, &mut origin)).collect();
            below.index.apply(known, &Outcome::Done);
        }
        index.apply(known, &Outcome::Done);
        self.mover.submit(tasks);
        Ok(Offered::Storing(completion))
    }

    /// The blocks of these hashes, from the first of their prefix on, were used on the device. The index is told what
    /// has ended only if one of them is on its way: it would count as used later than those that lead to it.
    pub fn touch(&self, hashes: &[u64]) {
        if let Ok(mut inner) = self.lock() {
            if inner.index.touch(hashes) {
                self.settle(&mut inner);
                inner.index.touch(hashes);
            }
            if let Some(below) = &mut inner.below {
                below.touch(hashes);
            }
        }
    }

    /// Whether the copy of this tag has not been told of by [`TieredConnector::take_finished`] yet.
    pub fn is_copying(&self, tag: u64) -> bool {
        self.enter().is_ok_and(|inner| inner.copying.contains(&tag))
    }

    /// Copies with a tag that have ended since the last call, and how.
    pub fn take_finished(&self) -> Vec<(u64, Outcome)> {
        let Ok(mut inner) = self.enter() else { return Vec::new() };
        let finished = std::mem::take(&mut inner.transfers);
        for (tag, _) in &finished {
            inner.copying.remove(tag);
        }
        finished
    }

    /// Forgets every block at once, those on their way included; private units stay. The cost does not grow with their
    /// number. That ends when nothing comes back however the process ends; if it fails, what the tier below held may
    /// come back when it is opened again, and until then does not.
    ///
    /// # Errors
    /// In a forked process.
    pub fn reset(&self) -> Result<Completion, Closed> {
        let mut inner = self.enter()?;
        inner.index.reset();
        Ok(match &mut inner.below {
            None => {
                let (completer, completion) = pending();
                completer.finish();
                completion
            }
            Some(below) => {
                below.forget_all();
                below.vault.reset()
            }
        })
    }

    /// Waits until no copy is in flight; false when `timeout` passes first.
    pub fn drain(&self, timeout: Duration) -> bool {
        let left = time_left(timeout);
        let Ok(vault) = self.vault() else { return false };
        vault.is_none_or(|vault| vault.wait(left())) && self.mover.drain(left())
    }

    /// Waits until every block that was offered is where it will be found after a restart, or was dropped; false when
    /// `timeout` passes first. True at once where nothing survives.
    ///
    /// # Errors
    /// In a forked process.
    pub fn flush(&self, timeout: Duration) -> Result<bool, Closed> {
        let left = time_left(timeout);
        let Some(vault) = self.vault()? else { return Ok(true) };
        Ok(self.drain(left()) && vault.flush(left()))
    }

    fn vault(&self) -> Result<Option<Arc<dyn Vault>>, Closed> {
        Ok(self.lock()?.below.as_ref().map(|below| Arc::clone(&below.vault)))
    }

    /// Takes no more copies, gives those in flight `timeout` to end, cancels the rest and ends the threads. Calling it
    /// again does nothing.
    pub fn shutdown(&self, timeout: Duration) {
        let left = time_left(timeout);
        if let Ok(mut inner) = self.enter() {
            inner.closed = true;
            inner.report_to(None);
            drop(inner);
            self.mover.stop(left());
        }
        // Stores that were cut short are dropped; what has landed goes on.
        if let Ok(Some(vault)) = self.vault() {
            vault.stop(left());
        }
    }

    /// Checks the books; for tests and after a panic.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn verify(&self) -> Result<(), IndexFault> {
        self.enter().map_or(Ok(()), |inner| {
            inner.index.verify()?;
            inner.below.as_ref().map_or(Ok(()), |below| below.index.verify())
        })
    }

    fn begin(&self, inner: &mut Inner, jobs: Vec<Job>, tag: Option<u64>) -> Completion {
        inner.copying.extend(tag);
        let (tasks, completion) = self.handoff.transfer(jobs, tag);
        self.mover.submit(tasks);
        completion
    }

    /// The books, after they were told what has ended.
    fn enter(&self) -> Result<MutexGuard<'_, Inner>, Closed> {
        let mut inner = self.lock()?;
        self.settle(&mut inner);
        Ok(inner)
    }

    /// Tells the index what has ended, in the order in which it was planned: threads do not say what was used last.
    fn settle(&self, inner: &mut Inner) {
        let Ended { jobs, transfers } = self.handoff.take();
        let Inner { index, below, .. } = inner;
        if let Some(below) = below {
            below.settle(index);
        }
        for (id, outcome) in jobs {
            index.apply(id, &outcome);
        }
        inner.transfers.extend(transfers);
    }

    /// The books, after they were told of the memory.
    fn lock(&self) -> Result<MutexGuard<'_, Inner>, Closed> {
        // In a forked process the lock may be held by a thread that is not there.
        if self.process != std::process::id() {
            return Err(Closed::Forked);
        }
        let mut inner = self.inner.lock();
        if let Some(reporter) = &inner.reporter {
            reporter.to.begin_call();
        }
        match self.mover.take_memory() {
            None => {}
            Some(Memory::Lost) => {
                inner.losses += u64::from(!inner.lost);
                inner.lost = true;
            }
            Some(Memory::Holds(units)) => {
                inner.index.keep(&units);
                inner.lost = false;
            }
        }
        Ok(inner)
    }

    fn open(&self) -> Result<MutexGuard<'_, Inner>, Closed> {
        unless_shut_down(self.enter()?)
    }
}

fn unless_shut_down(inner: MutexGuard<'_, Inner>) -> Result<MutexGuard<'_, Inner>, Closed> {
    if inner.closed { Err(Closed::ShutDown) } else { Ok(inner) }
}

impl Drop for TieredConnector {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}
