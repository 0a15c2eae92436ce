//! Offloads: copies of blocks to other tiers.

use crate::copies::CopyJob;
use crate::ledger::Ledger;
use crate::loads::BlockKey;
use block_pool::Priority;

/// Blocks to copy to another tier, with the pages that hold them.
pub struct OffloadJob {
    /// What the blocks are, in the order of the pages.
    pub keys: Vec<BlockKey>,
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
}
