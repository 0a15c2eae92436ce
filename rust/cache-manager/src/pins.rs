//! Pins: stored blocks that are kept whatever happens, until they are let go.

use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Step};
use std::collections::BTreeMap;

/// Pages of every pin, by its number; a number is never used twice.
#[derive(Default, Hash)]
pub(crate) struct Pins {
    /// Of each pin, what is let go last comes first.
    pub(crate) pages: BTreeMap<u64, Vec<(GroupId, PageId)>>,
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
        let stored = |group, &node| self.tree.page(node, group).map(|page| (group, page));
        let mut pages = Vec::with_capacity(nodes.len());
        for group in self.config.group_ids() {
            let kind = self.config.kind(group);
            if kind.forgets() {
                let blocks = kind.release_order(nodes.len(), self.config.page_size).rev();
                pages.extend(blocks.filter_map(|block| stored(group, &nodes[block])));
            } else {
                pages.extend(nodes.iter().map_while(|node| stored(group, node)));
            }
        }
        for &(group, page) in &pages {
            self.pools[group].acquire(page);
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
        for &(group, page) in pages.iter().rev() {
            self.pools[group].release(page, Step(0));
        }
        Ok(())
    }
}
