//! Private units through the connector: what one request set aside, under no key.

use super::{Closed, TieredConnector};
use crate::index::{TierIndex, TooFew};
use crate::job::{Direction, Job, Outcome, UnitId};
use block_pool::{PageId, Step};
use completion::Completion;
use thiserror::Error;

/// Why private units cannot be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NoUnits {
    /// There are too few.
    #[error("{} of {} units of host memory are free", .0.free, .0.total)]
    TooFew(TooFew),
    /// The connector takes no copies.
    #[error(transparent)]
    Closed(#[from] Closed),
}

/// Plans to copy between units and pages.
type Plan = fn(&mut TierIndex, &[UnitId], &[PageId], Step) -> Job;

impl TieredConnector {
    /// Takes `count` private units, or none. Blocks of any priority go for them.
    ///
    /// # Errors
    /// Too few that are neither private nor used by a copy; a connector that takes no copies.
    pub fn reserve(&self, count: usize) -> Result<Vec<UnitId>, NoUnits> {
        self.open()?.index.reserve(count).map_err(NoUnits::TooFew)
    }

    /// Begins to copy pages into private units, however far the lanes have fallen behind. The pages must not change
    /// until the copy has ended; `tag` names it in [`TieredConnector::take_finished`].
    ///
    /// # Errors
    /// In a forked process. After a shutdown the copy is cancelled.
    pub fn store_private(
        &self,
        units: &[UnitId],
        pages: &[PageId],
        after: Step,
        tag: u64,
    ) -> Result<Completion, Closed> {
        self.copy_private(TierIndex::store_private, units, pages, after, tag)
    }

    /// Begins to copy private units into pages, likewise.
    ///
    /// # Errors
    /// As there.
    pub fn load_private(
        &self,
        units: &[UnitId],
        pages: &[PageId],
        after: Step,
        tag: u64,
    ) -> Result<Completion, Closed> {
        self.copy_private(TierIndex::load_private, units, pages, after, tag)
    }

    /// Lets private units go: each is free once no copy uses it.
    pub fn free_private(&self, units: &[UnitId]) {
        if let Ok(mut inner) = self.enter() {
            inner.index.free_private(units);
        }
    }

    /// Private units in the order of their numbers; `None` in a forked process.
    pub fn private_units(&self) -> Option<Vec<UnitId>> {
        let mut units: Vec<UnitId> = self.enter().ok()?.index.private_units().collect();
        units.sort_unstable();
        Some(units)
    }

    /// Whether the connector takes copies.
    ///
    /// # Errors
    /// Why it does not.
    pub fn check_open(&self) -> Result<(), Closed> {
        self.open().map(drop)
    }

    fn copy_private(
        &self,
        plan: Plan,
        units: &[UnitId],
        pages: &[PageId],
        after: Step,
        tag: u64,
    ) -> Result<Completion, Closed> {
        let mut inner = self.enter()?;
        let parts = units.chunks(self.blocks_a_job).zip(pages.chunks(self.blocks_a_job));
        let jobs: Vec<Job> =
            parts.map(|(units, pages)| plan(&mut inner.index, units, pages, after)).collect();
        let reads = jobs.first().is_some_and(|job| job.direction == Direction::Load);
        if reads && inner.index.has_lost(units) {
            inner.copying.insert(tag);
            let (tasks, completion) = self.handoff.transfer(jobs, Some(tag));
            for task in tasks {
                task.end(Outcome::Failed("the memory of a unit was lost".into()));
            }
            return Ok(completion);
        }
        Ok(self.begin(&mut inner, jobs, Some(tag)))
    }
}
