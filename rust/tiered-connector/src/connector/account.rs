//! What is told of the blocks that come to both tiers and go.

use super::{Inner, TieredConnector};
use crate::reports::{BELOW, HOST, Reporter, Reports, What};
use crate::vault::Restored;
use block_pool::GroupId;
use std::sync::Arc;

impl Inner {
    /// Tells `reporter` from now on, and whoever was told before that nothing can be had any more.
    pub(super) fn report_to(&mut self, reporter: Option<Reporter>) {
        let below = self.below.iter_mut().map(|below| (&mut below.index, BELOW));
        for (index, tier) in [(&mut self.index, HOST)].into_iter().chain(below) {
            let of = |reporter: &Reporter| Reporter { tier, ..reporter.clone() };
            if let Some(former) = &self.reporter {
                of(former).tell(What::LostAll);
            }
            index.report_to(reporter.as_ref().map(of));
        }
        self.reporter = reporter;
    }
}

impl TieredConnector {
    /// Tells `reports` from now on which blocks come and go; `group` is whose tier this is. Gives how many
    /// blocks each tier has room for.
    pub fn report_to(&self, reports: &Arc<Reports>, group: GroupId) -> Vec<u32> {
        let Ok(mut inner) = self.enter() else { return Vec::new() };
        inner.report_to(Some(Reporter { to: Arc::clone(reports), group, tier: HOST }));
        let below = inner.below.iter().map(|below| below.index.total());
        std::iter::once(inner.index.total()).chain(below).collect()
    }

    /// The blocks that the tier below has had from the start and still has; to be asked once, for they take
    /// memory.
    pub fn take_restored(&self) -> Vec<Restored> {
        let Ok(inner) = self.enter() else { return Vec::new() };
        let Some(below) = &inner.below else { return Vec::new() };
        let mut restored = below.vault.take_restored();
        restored.retain(|block| below.index.contains(&block.key));
        restored
    }

    /// Whether host and tier below have the block of each hash, as far as they have told.
    pub fn has(&self, hashes: impl Iterator<Item = u64>) -> Vec<(bool, bool)> {
        let Ok(inner) = self.lock() else { return Vec::new() };
        let below = |hash| inner.below.as_ref().is_some_and(|below| below.index.has_hash(hash));
        hashes.map(|hash| (inner.index.has_hash(hash), below(hash))).collect()
    }
}
