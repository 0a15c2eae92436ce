//! The index's books, checked.

use super::{TierIndex, page};
use crate::job::UnitId;
use block_pool::PageFault;
use std::collections::HashMap;
use thiserror::Error;

/// What is wrong with the books.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum IndexFault {
    /// The units' own books.
    #[error("units: {0}")]
    Units(PageFault),
    /// A unit that breaks a rule.
    #[error("unit {unit}: {1}", unit = .0.0)]
    Unit(UnitId, &'static str),
    /// The table holds more or fewer units than hold blocks or are being written.
    #[error("the table holds {given} units, must be {expected}")]
    Table {
        /// Units in the table.
        given: usize,
        /// Units that belong there.
        expected: usize,
    },
}

impl TierIndex {
    /// Checks every rule that the index keeps; for tests and after a panic.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn verify(&self) -> Result<(), IndexFault> {
        let (mut writing, mut dying, mut pinned) = (HashMap::new(), HashMap::new(), HashMap::new());
        for job in self.jobs.values() {
            let holders = match job.epoch {
                Some(epoch) if job.does.writes() && epoch == self.epoch => &mut writing,
                Some(_) if job.does.writes() => &mut dying,
                _ => &mut pinned,
            };
            for &unit in &job.units {
                *holders.entry(unit).or_insert(0u32) += 1;
            }
        }
        let mut blocks = 0;
        for unit in (0..self.pool.used()).map(UnitId) {
            let stores = writing.get(&unit).unwrap_or(&0) + dying.get(&unit).unwrap_or(&0);
            let holders = stores + u32::from(self.private.contains(&unit));
            if self.pool.refs(page(unit)) != holders {
                return Err(IndexFault::Unit(
                    unit,
                    "it is held by others than a store or who has it to himself",
                ));
            }
            if self.pool.pins(page(unit)) != *pinned.get(&unit).unwrap_or(&0) {
                return Err(IndexFault::Unit(unit, "it is pinned by another number of copies than use it"));
            }
            let holds = self.pool.node(page(unit)).is_some();
            if holds && holders > 0 {
                return Err(IndexFault::Unit(unit, "it is written or private while it holds a block"));
            }
            if holds || writing.contains_key(&unit) {
                blocks += 1;
                if self.owner(self.keys[unit.0 as usize].hash) != Some(unit) {
                    return Err(IndexFault::Unit(unit, "its block is not found under its hash"));
                }
            }
        }
        if self.table.len() != blocks {
            return Err(IndexFault::Table { given: self.table.len(), expected: blocks });
        }
        self.pool.verify().map_err(IndexFault::Units)
    }
}
