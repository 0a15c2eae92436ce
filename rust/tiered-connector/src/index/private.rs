//! Private units: pages of one request, under no key. They are never found, never evicted and outlive a reset,
//! until whoever took them lets them go.
//!
//! A private unit is held by one reference; a copy that touches it pins it. So it may be let go at any moment, and
//! is free once no copy uses it.

use super::{InFlight, TierIndex, page};
use crate::job::{Direction, Job, UnitId};
use block_pool::{PageId, Priority, Step};

#[cfg(test)]
mod tests;

/// Units that there are, when there were too few.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooFew {
    /// Units that could be had: never used, free, or of blocks that nobody reads.
    pub free: u32,
    /// Of these, units that were used before.
    pub evictable: u32,
    /// Units in all.
    pub total: u32,
}

impl TierIndex {
    /// Takes `count` private units, or none. Blocks of any priority go for them.
    ///
    /// # Errors
    /// There are fewer: the others are private, or a copy uses them.
    pub fn reserve(&mut self, count: usize) -> Result<Vec<UnitId>, TooFew> {
        let free = self.pool.available();
        if count > free as usize {
            let evictable = free - self.pool.pristine();
            return Err(TooFew { free, evictable, total: self.pool.total() });
        }
        let units: Vec<UnitId> = (0..count).map_while(|_| self.take(Priority::HIGHEST)).collect();
        self.private.extend(&units);
        Ok(units)
    }

    /// Plans to copy pages into private units.
    pub fn store_private(&mut self, units: &[UnitId], pages: &[PageId], after: Step) -> Job {
        self.private_job(Direction::Store, units, pages, after)
    }

    /// Plans to copy private units into pages.
    pub fn load_private(&mut self, units: &[UnitId], pages: &[PageId], after: Step) -> Job {
        self.private_job(Direction::Load, units, pages, after)
    }

    /// Lets private units go. Those that are not private are left alone.
    pub fn free_private(&mut self, units: &[UnitId]) {
        for unit in units {
            self.lost_private.remove(unit);
            if self.private.remove(unit) {
                self.pool.release(page(*unit), Step(0));
            }
        }
    }

    /// Whether the bytes of one of these private units are gone.
    pub fn has_lost(&self, units: &[UnitId]) -> bool {
        units.iter().any(|unit| self.lost_private.contains(unit))
    }

    /// Private units, in no order.
    pub fn private_units(&self) -> impl ExactSizeIterator<Item = UnitId> + '_ {
        self.private.iter().copied()
    }

    fn private_job(&mut self, direction: Direction, units: &[UnitId], pages: &[PageId], after: Step) -> Job {
        for &unit in units {
            self.pool.pin(page(unit));
        }
        let in_flight = InFlight { does: direction.into(), units: units.to_vec(), epoch: None };
        self.begin(in_flight, direction, pages.to_vec(), after)
    }
}
