//! What stays of the blocks when memory was out of reach and comes back.

use super::{TierIndex, page};
use crate::job::UnitId;
use crate::reports::What;
use crate::units::UnitSet;

#[cfg(test)]
mod tests;

impl TierIndex {
    /// Forgets the blocks whose units are not among `held`, and notes which private units have lost their bytes.
    /// Stores on their way end unseen: whoever wrote their bytes may have lost them since.
    pub fn keep(&mut self, held: &UnitSet) {
        let writing: Vec<UnitId> = self.current_stores().flat_map(|job| job.units.iter().copied()).collect();
        for unit in writing {
            self.table.remove(self.keys[unit.0 as usize].hash, unit.0);
            self.report(What::Lost, unit);
        }
        self.epoch += 1;
        let storing = self.jobs.values().filter(|job| job.epoch.is_none() && job.does.writes());
        self.lost_private.extend(storing.flat_map(|job| &job.units));
        self.lost_private.extend(self.private.iter().filter(|&&unit| !held.contains(unit)));
        for unit in (0..self.pool.used()).map(UnitId) {
            if self.pool.node(page(unit)).is_some() && !held.contains(unit) {
                self.table.remove(self.keys[unit.0 as usize].hash, unit.0);
                self.pool.withdraw(page(unit));
                self.report(What::Lost, unit);
                self.counters.lost += 1;
            }
        }
    }
}
