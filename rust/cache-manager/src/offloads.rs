//! Offloads: copies of blocks to other tiers.

use crate::copies::{CopyEnd, CopyJob};
use crate::ledger::Ledger;
use crate::loads::BlockKey;
use block_pool::Priority;
use radix_tree::NamespaceId;

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// How many blocks are before it in its prefix.
    pub position: u32,
    /// The namespace of its prefix.
    pub namespace: NamespaceId,
}

/// Blocks to copy to another tier, with the pages that hold them.
pub struct OffloadJob {
    /// What the blocks are, in the order of the copy's pages: group by group.
    pub keys: Vec<BlockKey>,
    /// Where each lies in its prefix.
    pub places: Vec<Place>,
    /// How long to keep each.
    pub priorities: Vec<Priority>,
    /// The copy; the pages stay pinned until it has ended.
    pub copy: CopyJob,
}

impl Ledger {
    /// What is to be copied to other tiers since the last call: blocks of requests that were claimed with
    /// guards, as the write policy says.
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
}
