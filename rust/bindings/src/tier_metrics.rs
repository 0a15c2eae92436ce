//! What a group's tier counts, by the names under which Python gets it.

use tiered_connector::connector::TierMetrics;
use tiered_connector::host::pin::Progress;

/// All names, with a group's numbers; those of the disk only if there is one.
pub(crate) fn named(metrics: &TierMetrics, pinned: &Progress) -> Vec<(&'static str, u64)> {
    let counted = metrics.index;
    let mut named = vec![
        ("host_stored_blocks", counted.stored),
        ("host_loaded_blocks", counted.loaded),
        ("host_evicted_blocks", counted.evicted),
        ("host_known_blocks", counted.known),
        ("host_dropped_no_unit", counted.no_unit),
        ("host_dropped_busy", metrics.dropped_busy),
        ("host_dropped_lost", metrics.dropped_lost),
        ("host_collisions", counted.collisions),
        ("host_unstored_blocks", counted.unstored),
        ("host_unloaded_blocks", counted.unloaded),
        ("host_lost_blocks", counted.lost),
        ("host_losses", metrics.losses),
        ("host_blocks", metrics.blocks.into()),
        ("host_private_units", metrics.private_units.into()),
        ("host_units", metrics.units.into()),
        ("host_jobs", metrics.jobs as u64),
        ("host_pin_asked_bytes", pinned.asked),
        ("host_pinned_bytes", pinned.pinned),
        ("host_pin_refused_bytes", pinned.refused),
    ];
    if let Some(below) = metrics.below {
        let (counted, vault) = (below.index, below.vault);
        named.extend([
            ("disk_stored_blocks", counted.stored),
            ("disk_loaded_blocks", counted.loaded),
            ("disk_evicted_blocks", counted.evicted),
            ("disk_known_blocks", counted.known),
            ("disk_dropped_no_unit", counted.no_unit),
            ("disk_dropped_busy", below.dropped_busy),
            ("disk_collisions", counted.collisions),
            ("disk_unstored_blocks", counted.unstored),
            ("disk_unloaded_blocks", counted.unloaded),
            ("disk_lost_blocks", counted.lost),
            ("disk_durable_blocks", vault.durable),
            ("disk_undurable_blocks", vault.undurable),
            ("disk_damaged_blocks", vault.damaged),
            ("disk_read_errors", vault.read_errors),
            ("disk_write_errors", vault.write_errors),
            ("disk_direct", vault.direct.into()),
            ("disk_blocks", below.blocks.into()),
            ("disk_units", below.slots.into()),
            ("disk_writes", below.writing as u64),
            ("host_filled_blocks", metrics.index.filled),
        ]);
    }
    named
}
