//! What lies around the ledger: a device, a tier, and time. In virtual time every moment is drawn (`tier`); in real
//! threads only the device's is (`threads`).

use crate::device::{Device, Forward};
use block_pool::PageId;
use cache_manager::{CopyEnd, Ledger, OuterTier, PrivateTier};
use tiered_connector::job::{Direction, TierKey, UnitId};

pub(crate) trait World: OuterTier + PrivateTier {
    fn now(&self) -> u64;

    fn device(&self) -> &Device;

    fn launch(&mut self, forward: Forward);

    /// Lets time pass: forwards run and copies go on; with `u64::MAX` until nothing does any more.
    fn pass(&mut self, time: u64) -> Result<(), String>;

    /// Forgets every block.
    fn reset(&mut self);

    /// Takes no more copies, and cancels those in flight, wherever they are.
    fn shut_down(&mut self);

    /// What a block must hold.
    fn learn(&mut self, key: TierKey, block: &[u64]);

    /// Copies that the ledger was told of since somebody looked.
    fn take_told(&mut self) -> Vec<(u64, CopyEnd)>;

    /// Pages that copies read or write now, once for each copy.
    fn copied_pages(&self) -> Vec<(Direction, PageId)>;

    /// Private units in the order of their numbers.
    fn private_units(&self) -> Vec<UnitId>;

    /// What the copy of this number, a suspension that has ended well, left in private units.
    fn check_away(&self, copy: u64, kv: &[u64]) -> Result<(), String>;

    /// The books of the tier, and those of the ledger about the pages that are being copied.
    fn check(&mut self, ledger: &Ledger) -> Result<(), String>;

    /// No copy is in flight, and what was counted adds up.
    fn check_end(&self) -> Result<(), String>;
}

/// What holds of a page while it is copied, however the copy ends.
pub(crate) fn check_copied(ledger: &Ledger, pages: &[(Direction, PageId)]) -> Result<(), String> {
    let pool = ledger.pool();
    for &(direction, page) in pages {
        let copies = pages.iter().filter(|&&(_, other)| other == page).count();
        if (pool.pins(page) as usize) < copies {
            return Err(format!("{page} is not pinned while {copies} copies touch it"));
        }
        if direction == Direction::Load && pool.node(page).is_some() {
            return Err(format!("{page} is published while a copy writes it"));
        }
    }
    Ok(())
}
