//! Pins: stored blocks that are kept whatever happens, until they are let go.

use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Step};
use std::collections::BTreeMap;

/// Pages of every pin, by its number; a number is never used twice.
#[derive(Default, Hash)]
pub(crate) struct Pins {
    pub(crate) pages: BTreeMap<u64, Vec<PageId>>,
    next: u64,
}

impl Ledger {
    /// Keeps the request's stored blocks, from the first of its prefix on, until [`Ledger::unpin`]: also
    /// after its release.
    ///
    /// # Errors
    /// An unknown slot; a padding request; a suspended one.
    pub fn pin(&mut self, slot: SlotId) -> Result<u64, LedgerError> {
        let sequence = self.sequence(slot)?;
        if sequence.dummy {
            return Err(LedgerError::Padding(slot));
        }
        sequence.check_present(slot)?;
        let nodes = if sequence.epoch == self.epoch { &sequence.nodes[..] } else { &[] };
        let pages: Vec<PageId> =
            nodes.iter().map_while(|&node| self.tree.page(node, GroupId::FIRST)).collect();
        for &page in &pages {
            self.pool.acquire(page);
        }
        let id = self.pins.next;
        self.pins.next += 1;
        self.pins.pages.insert(id, pages);
        Ok(id)
    }

    /// Ends a pin.
    ///
    /// # Errors
    /// A pin that ended before, or never was.
    pub fn unpin(&mut self, pin: u64) -> Result<(), LedgerError> {
        let pages = self.pins.pages.remove(&pin).ok_or(LedgerError::UnknownPin(pin))?;
        for &page in pages.iter().rev() {
            self.pool.release(page, Step(0));
        }
        Ok(())
    }
}
