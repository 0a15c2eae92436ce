//! Offloads: copies of blocks to other tiers, begun when the blocks are published.

use crate::copies::{CopyEnd, CopyJob};
use crate::ledger::Ledger;
use crate::loads::BlockKey;
use crate::slots::SlotId;
use block_pool::PageId;

/// Blocks to copy to another tier, with the pages that hold them.
pub struct OffloadJob {
    /// What the blocks are, in the order of the pages.
    pub keys: Vec<BlockKey>,
    /// The copy; the pages stay pinned until it has ended.
    pub copy: CopyJob,
}

impl Ledger {
    /// What was published since the last call, to be copied to other tiers: blocks of requests that were
    /// claimed with guards.
    pub fn take_offloads(&mut self) -> Vec<OffloadJob> {
        std::mem::take(&mut self.offloads)
    }

    /// Offloads that nobody has taken yet are not made: what they would copy is forgotten.
    pub(crate) fn refuse_offloads(&mut self) {
        for job in self.take_offloads() {
            let refused = self.end_copies(&[(job.copy.id.0, CopyEnd::Refused)]);
            debug_assert!(refused.is_ok(), "nobody else knows of the copy");
        }
    }

    /// Begins the offload of the request's blocks that were stored just now.
    pub(crate) fn offload_published(&mut self, slot: SlotId) {
        let Some(sequence) = self.slots.get(slot).filter(|_| !self.published.is_empty()) else { return };
        let Some(guards) = &sequence.guards else { return };
        let pages: Vec<PageId> = self.published.iter().map(|&block| sequence.row[block]).collect();
        let key = |&block: &usize| BlockKey::of(&sequence.chain, guards, block);
        let keys = self.published.iter().map(key).collect();
        let copy = self.begin_copy(pages, sequence.last_step, None);
        self.offloads.push(OffloadJob { keys, copy });
    }
}
