//! A tier for pages that requests set aside.

use block_pool::{EvictionPolicy, GroupId};
use cache_manager::{CopyEnd, CopyJob, PrivateTier};
use completion::{Completion, pending};
use std::collections::HashMap;
use tiered_connector::connector::{Closed, NoUnits};
use tiered_connector::index::TierIndex;
use tiered_connector::job::{JobId, Outcome, UnitId};

/// A tier whose copies end when the test says so. What a page holds is the number of the token that it was
/// computed for; the test keeps that.
pub(crate) struct Shelf {
    pub(crate) index: TierIndex,
    copies: HashMap<u64, JobId>,
    pub(crate) closed: bool,
}

impl Shelf {
    pub(crate) fn new(units: u32) -> Shelf {
        let index = TierIndex::new(units, EvictionPolicy::PriorityLru);
        Shelf { index, copies: HashMap::new(), closed: false }
    }

    fn begin(&mut self, job: JobId, copy: &CopyJob) -> Completion {
        self.copies.insert(copy.id.0, job);
        pending().1
    }

    /// A copy has ended.
    pub(crate) fn end(&mut self, copy: &CopyJob, end: CopyEnd) {
        let outcome = if end == CopyEnd::Done { Outcome::Done } else { Outcome::Cancelled };
        assert!(self.index.apply(self.copies[&copy.id.0], &outcome), "the copy was in flight");
    }

    pub(crate) fn private(&self) -> usize {
        self.index.private_units().len()
    }
}

impl PrivateTier for Shelf {
    fn check_open(&mut self) -> Result<(), Closed> {
        if self.closed { Err(Closed::ShutDown) } else { Ok(()) }
    }

    fn reserve(&mut self, _: GroupId, count: usize) -> Result<Vec<UnitId>, NoUnits> {
        self.check_open()?;
        self.index.reserve(count).map_err(NoUnits::TooFew)
    }

    fn store_private(&mut self, units: &[UnitId], copy: &CopyJob) -> Result<Completion, Closed> {
        let job = self.index.store_private(units, &copy.pages, copy.after);
        Ok(self.begin(job.id, copy))
    }

    fn load_private(&mut self, units: &[UnitId], copy: &CopyJob) -> Result<Completion, Closed> {
        let job = self.index.load_private(units, &copy.pages, copy.after);
        Ok(self.begin(job.id, copy))
    }

    fn free_private(&mut self, _: GroupId, units: &[UnitId]) {
        self.index.free_private(units);
    }
}
