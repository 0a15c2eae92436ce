//! How large the host arena is.

use super::limits::Usable;
use thiserror::Error;

/// A size was asked for that does not fit.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error(
    "host_offload_max_gb asks for {} GiB ({asked} bytes), but {} bytes may still be used ({}): {}",
    gib(nearest(*.asked)), .usable.bytes, .usable.by, what_fits(.usable.bytes)
)]
pub struct TooLarge {
    /// What was asked for, in bytes.
    pub asked: u64,
    /// What fits.
    pub usable: Usable,
}

/// The arena has no room for one unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error(
    "the host arena has {bytes} bytes, but one unit takes {unit_bytes}: give host_offload_max_gb={} or more",
    gib(up(*.unit_bytes))
)]
pub struct NoUnitFits {
    /// The size of the arena, in bytes.
    pub bytes: u64,
    /// The size of a unit, in bytes.
    pub unit_bytes: u64,
}

/// The size of the host arena, in bytes: `explicit` if given, else one and a half times the device pool, at most
/// half of what is usable. `device_bytes` is of all replicas, replicated shards once.
///
/// # Errors
///
/// [`TooLarge`] if `explicit` is more than what is usable.
pub fn host_bytes(explicit: Option<u64>, device_bytes: u64, usable: &Usable) -> Result<u64, TooLarge> {
    match explicit {
        Some(asked) if asked > usable.bytes => Err(TooLarge { asked, usable: usable.clone() }),
        Some(asked) => Ok(asked),
        None => Ok(device_bytes.saturating_add(device_bytes / 2).min(usable.bytes / 2)),
    }
}

/// How many units of `unit_bytes` an arena of `bytes` has; not more than a `u32` counts.
///
/// # Errors
///
/// [`NoUnitFits`] if it has none.
///
/// # Panics
///
/// If `unit_bytes` is 0.
pub fn units(bytes: u64, unit_bytes: u64) -> Result<u32, NoUnitFits> {
    match bytes / unit_bytes {
        0 => Err(NoUnitFits { bytes, unit_bytes }),
        units => Ok(u32::try_from(units).unwrap_or(u32::MAX)),
    }
}

/// Units of the arena of each group of layers, whose pages have so many bytes and are so many on the device each: the
/// groups share the arenas' bytes as they share those of the device.
///
/// # Errors
///
/// Why there is no such arena.
pub fn group_units(
    explicit: Option<u64>,
    groups: &[(u64, u64)],
    usable: &Usable,
) -> Result<Vec<u32>, String> {
    let on_device = |&(page, pages): &(u64, u64)| page.saturating_mul(pages);
    let device_bytes = groups.iter().map(on_device).fold(0, u64::saturating_add);
    let bytes = host_bytes(explicit, device_bytes, usable).map_err(|error| error.to_string())?;
    let share = |group: &(u64, u64)| {
        let (own, all) = (u128::from(on_device(group)), u128::from(device_bytes));
        let share = (u128::from(bytes) * own / all) as u64;
        units(share, group.0).map_err(|NoUnitFits { .. }| {
            let needed = (u128::from(group.0) * all).div_ceil(own).try_into().unwrap_or(u64::MAX);
            NoUnitFits { bytes, unit_bytes: needed }.to_string()
        })
    };
    groups.iter().map(share).collect()
}

fn what_fits(usable: u64) -> String {
    match down(usable) {
        0 => "not even host_offload_max_gb=0.01 fits, so raise that limit or free memory".to_owned(),
        fits => format!("give at most host_offload_max_gb={}, or raise that limit", gib(fits)),
    }
}

/// Hundredths of a GiB that are not more than `bytes`.
fn down(bytes: u64) -> u128 {
    (u128::from(bytes) * 100) >> 30
}

/// Hundredths of a GiB that are not less than `bytes`.
fn up(bytes: u64) -> u128 {
    (u128::from(bytes) * 100).div_ceil(1 << 30)
}

/// Hundredths of a GiB that are closest to `bytes`.
fn nearest(bytes: u64) -> u128 {
    (u128::from(bytes) * 100 + (1 << 29)) >> 30
}

fn gib(hundredths: u128) -> String {
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::limits::Limit;

    const GIB: u64 = 1 << 30;

    fn usable(bytes: u64) -> Usable {
        Usable { bytes, by: Limit::Machine { available: bytes } }
    }

    #[test]
    fn a_size_that_is_given_is_taken_up_to_all_that_is_usable() {
        assert_eq!(host_bytes(Some(12345), 64 * GIB, &usable(8 * GIB)), Ok(12345));
        assert_eq!(host_bytes(Some(8 * GIB), 0, &usable(8 * GIB)), Ok(8 * GIB));
    }

    #[test]
    fn a_size_of_one_byte_too_much_is_refused() {
        let refused = TooLarge { asked: 8 * GIB + 1, usable: usable(8 * GIB) };
        assert_eq!(host_bytes(Some(8 * GIB + 1), 0, &usable(8 * GIB)), Err(refused));
    }

    #[test]
    fn a_refusal_says_what_was_asked_what_is_usable_by_which_limit_and_what_fits() {
        // 5 GiB - 1 GiB = 4 GiB = 4294967296; one byte less is 3.99… GiB.
        let by = Limit::Cgroup { path: "/a/b".to_owned(), file: "memory.max", bytes: 5 * GIB, used: GIB + 1 };
        let refused = host_bytes(Some(8 * GIB), 0, &Usable { bytes: 4 * GIB - 1, by }).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "host_offload_max_gb asks for 8.00 GiB (8589934592 bytes), but 4294967295 bytes may still be used \
             (cgroup /a/b: memory.max is 5368709120 and 1073741825 are in use): \
             give at most host_offload_max_gb=3.99, or raise that limit"
        );
    }

    #[test]
    fn a_refusal_names_no_size_where_none_fits() {
        // A hundredth of a GiB is 10737418.24 bytes.
        let message = |bytes| TooLarge { asked: GIB, usable: usable(bytes) }.to_string();
        assert!(
            message(10_737_418)
                .ends_with("not even host_offload_max_gb=0.01 fits, so raise that limit or free memory")
        );
        assert!(message(10_737_419).ends_with("give at most host_offload_max_gb=0.01, or raise that limit"));
    }

    #[test]
    fn without_a_size_it_is_one_and_a_half_times_the_device_pool() {
        assert_eq!(host_bytes(None, 4 * GIB, &usable(64 * GIB)), Ok(6 * GIB));
    }

    #[test]
    fn without_a_size_it_is_at_most_half_of_what_is_usable() {
        assert_eq!(host_bytes(None, 8 * GIB, &usable(24 * GIB)), Ok(12 * GIB));
        assert_eq!(host_bytes(None, 8 * GIB, &usable(24 * GIB - 1)), Ok(12 * GIB - 1));
    }

    #[test]
    fn a_device_pool_of_any_size_has_a_default() {
        assert_eq!(host_bytes(None, u64::MAX, &usable(u64::MAX)), Ok(u64::MAX / 2));
    }

    #[test]
    fn groups_share_the_arenas_as_they_share_the_device() {
        // 300 pages of 1 KiB and 100 of 9 KiB: a quarter and three quarters.
        let groups = [(1024, 300), (9216, 100)];
        assert_eq!(group_units(Some(48 << 10), &groups, &usable(GIB)), Ok(vec![12, 4]));
        // One and a half times the device.
        assert_eq!(group_units(None, &groups, &usable(GIB)), Ok(vec![450, 150]));
        assert_eq!(group_units(None, &groups[..1], &usable(GIB)), Ok(vec![450]));
    }

    #[test]
    fn a_group_without_room_for_a_unit_refuses_the_size_and_says_what_is_enough() {
        let refused = group_units(Some(11 << 10), &[(1024, 300), (9216, 100)], &usable(GIB)).unwrap_err();
        assert_eq!(refused, NoUnitFits { bytes: 11 << 10, unit_bytes: 12 << 10 }.to_string());
    }

    #[test]
    fn units_that_do_not_fit_whole_do_not_count() {
        assert_eq!(units(4095, 1024), Ok(3));
        assert_eq!(units(4096, 1024), Ok(4));
    }

    #[test]
    fn there_are_not_more_units_than_a_u32_counts() {
        assert_eq!(units(u64::MAX, 1), Ok(u32::MAX));
    }

    #[test]
    fn an_arena_without_room_for_a_unit_is_refused_with_both_sizes() {
        let refused = units(GIB, 3 * GIB / 2 + 1).unwrap_err();
        assert_eq!(refused, NoUnitFits { bytes: 1_073_741_824, unit_bytes: 1_610_612_737 });
        assert_eq!(
            refused.to_string(),
            "the host arena has 1073741824 bytes, but one unit takes 1610612737: \
             give host_offload_max_gb=1.51 or more"
        );
    }
}
