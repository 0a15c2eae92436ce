//! The tier in virtual time keeps pages of one request apart from all blocks.

use crate::broken::Broken;
use crate::tier::Tier;
use block_pool::GroupId;
use cache_manager::{CopyJob, PrivateTier};
use completion::Completion;
use tiered_connector::connector::{Closed, NoUnits};
use tiered_connector::job::UnitId;

impl PrivateTier for Tier {
    fn check_open(&mut self) -> Result<(), Closed> {
        if self.closed { Err(Closed::ShutDown) } else { Ok(()) }
    }

    fn reserve(&mut self, _: GroupId, count: usize) -> Result<Vec<UnitId>, NoUnits> {
        self.check_open()?;
        self.enter();
        let units = self.index.reserve(count).map_err(NoUnits::TooFew)?;
        self.give_away(&units);
        if self.broken == Some(Broken::GivesHeldUnitsAway) {
            self.index.free_private(&units);
        }
        Ok(units)
    }

    fn store_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        self.away.insert(job.id.0, units.to_vec());
        let completion = self.begin(job.id.0, 1, Broken::EndsSuspensionsEarly);
        let part = self.index.store_private(units, &job.pages, job.after);
        self.begin_job(part, Vec::new(), job.id.0, Broken::FreesPrivateUnitsEarly);
        Ok(completion)
    }

    fn load_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        let mut units = units.to_vec();
        if self.broken == Some(Broken::MixesPrivateUnits) {
            units.rotate_left(1);
        }
        let completion = self.begin(job.id.0, 1, Broken::EndsLoadsEarly);
        let part = self.index.load_private(&units, &job.pages, job.after);
        self.begin_job(part, Vec::new(), job.id.0, Broken::FreesPrivateUnitsEarly);
        Ok(completion)
    }

    fn free_private(&mut self, _: GroupId, units: &[UnitId]) {
        self.enter();
        self.index.free_private(units);
    }
}
