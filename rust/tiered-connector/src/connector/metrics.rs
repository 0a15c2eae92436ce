//! What a connector counted, and how full its tiers are.

use super::TieredConnector;
use super::below::Below;
use crate::index::IndexCounters;
use crate::vault::VaultCounters;

/// Counters and gauges of the tier below the host.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct BelowMetrics {
    /// What its index counted.
    pub index: IndexCounters,
    /// What moves its blocks.
    pub vault: VaultCounters,
    /// Blocks that were not written because too many waited.
    pub dropped_busy: u64,
    /// Blocks that can be found.
    pub blocks: u32,
    /// Slots in all.
    pub slots: u32,
    /// Blocks that are being written or wait for it.
    pub writing: usize,
}

/// Counters and gauges.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierMetrics {
    /// What the index counted.
    pub index: IndexCounters,
    /// Blocks offered that were dropped because the lanes had fallen behind.
    pub dropped_busy: u64,
    /// Blocks offered that were dropped because the memory was out of reach.
    pub dropped_lost: u64,
    /// Times that the memory went out of reach.
    pub losses: u64,
    /// Blocks that can be found.
    pub blocks: u32,
    /// Private units.
    pub private_units: u32,
    /// Units in all.
    pub units: u32,
    /// Jobs in flight.
    pub jobs: usize,
    /// Those of the tier below, if there is one.
    pub below: Option<BelowMetrics>,
}

impl TieredConnector {
    /// Counters and gauges.
    pub fn metrics(&self) -> TierMetrics {
        self.enter().map_or_else(
            |_| TierMetrics::default(),
            |inner| TierMetrics {
                index: inner.index.counters(),
                dropped_busy: inner.dropped_busy,
                dropped_lost: inner.dropped_lost,
                losses: inner.losses,
                blocks: if inner.lost { 0 } else { inner.index.blocks() },
                private_units: inner.index.private_units().len() as u32,
                units: inner.index.total(),
                jobs: inner.index.in_flight(),
                below: inner.below.as_ref().map(Below::metrics),
            },
        )
    }

    /// Bytes of host memory that hold no block and are not private, and in all.
    pub fn host_bytes(&self) -> (u64, u64) {
        let TierMetrics { blocks, private_units, units, .. } = self.metrics();
        let bytes = |units: u32| u64::from(units) * self.unit_bytes as u64;
        (bytes(units - blocks - private_units), bytes(units))
    }

    /// Bytes of the tier below that hold no block, and in all.
    pub fn below_bytes(&self) -> (u64, u64) {
        let BelowMetrics { blocks, slots, .. } = self.metrics().below.unwrap_or_default();
        let bytes = |slots: u32| u64::from(slots) * self.unit_bytes as u64;
        (bytes(slots - blocks), bytes(slots))
    }
}
