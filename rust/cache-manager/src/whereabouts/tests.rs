//! The log and the tiers' reports alone.

use super::*;
use crate::events::Event;

const FIRST: GroupId = GroupId::FIRST;
const SECOND: GroupId = GroupId(1);

/// The log of two groups with host memory and disk, and what reports to it.
fn log() -> (EventLog, Arc<Reports>) {
    let reports = Arc::new(Reports::default());
    let mut log = EventLog::new(100, []);
    log.beyond = Some(Box::new(Whereabouts::new(Arc::clone(&reports), vec![vec![4, 8]; 2])));
    (log, reports)
}

/// Blocks of two tokens, each of which is its block's hash.
fn stored(parent: Option<u64>, first: u32, keys: &[u64], tier: Tier) -> Stored {
    Stored {
        parent,
        first,
        keys: keys.to_vec(),
        tokens: keys.iter().flat_map(|&key| [key as i32; 2]).collect(),
        extra_keys: Vec::new(),
        priority: Priority::DEFAULT,
        tier,
        adapter: None,
    }
}

fn moved(key: u64, from: u8, to: u8) -> EventKind {
    EventKind::Updated { key, change: Change::Tier(Tier(from), Tier(to)) }
}

fn told(log: &mut EventLog) -> Vec<(GroupId, EventKind)> {
    log.verify(2).unwrap();
    log.take(None).into_iter().map(|Event { group, kind, .. }| (group, kind)).collect()
}

#[test]
fn only_moves_of_the_nearest_copy_are_told() {
    let (mut log, reports) = log();
    log.stored(FIRST, || stored(None, 0, &[1], Tier::DEVICE));
    for what in [What::Coming(1), What::Got(1)] {
        reports.tell(FIRST, HOST, what);
        reports.tell(FIRST, BELOW, what);
    }
    assert_eq!(told(&mut log), [(FIRST, EventKind::Stored(stored(None, 0, &[1], Tier::DEVICE)))]);
    log.removed(FIRST, 1);
    reports.tell(FIRST, HOST, What::Lost(1));
    reports.tell(FIRST, HOST, What::Got(1));
    reports.tell(FIRST, BELOW, What::Lost(1));
    log.stored(FIRST, || stored(None, 0, &[1], Tier::DEVICE));
    let moves = [moved(1, 0, 1), moved(1, 1, 2), moved(1, 2, 1), moved(1, 1, 0)];
    assert_eq!(told(&mut log), moves.map(|kind| (FIRST, kind)));
}

#[test]
fn a_block_that_the_device_loses_while_it_is_copied_is_stored_again_where_it_comes() {
    let (mut log, reports) = log();
    log.stored(FIRST, || stored(Some(7), 3, &[1, 2], Tier::DEVICE));
    reports.tell(FIRST, HOST, What::Coming(2));
    reports.tell(FIRST, HOST, What::Coming(1));
    log.removed(FIRST, 2);
    log.removed(FIRST, 1);
    reports.tell(FIRST, HOST, What::Got(2));
    reports.tell(FIRST, HOST, What::Lost(1)); // its copy failed
    let told = told(&mut log).split_off(1);
    let removed = EventKind::Removed { keys: vec![2, 1] };
    assert_eq!(told, [(FIRST, removed), (FIRST, EventKind::Stored(stored(Some(1), 4, &[2], Tier(HOST))))]);
}

#[test]
fn each_group_moves_by_itself() {
    let (mut log, reports) = log();
    for group in [FIRST, SECOND] {
        log.stored(group, || stored(None, 0, &[1, 2], Tier::DEVICE));
    }
    reports.tell(SECOND, HOST, What::Got(2));
    drop(told(&mut log));
    log.removed(FIRST, 2);
    log.removed(SECOND, 2);
    assert_eq!(told(&mut log), [(FIRST, EventKind::Removed { keys: vec![2] }), (SECOND, moved(2, 0, 1))]);
    assert_eq!([FIRST, SECOND].map(|group| log.knows(group, 2)), [false, true]);
}

#[test]
fn blocks_that_come_back_divide_those_that_are_new() {
    let (mut log, reports) = log();
    log.stored(FIRST, || stored(None, 0, &[1, 2, 3], Tier::DEVICE));
    reports.tell(FIRST, HOST, What::Got(2));
    for key in [3, 2, 1] {
        log.removed(FIRST, key);
    }
    drop(told(&mut log));
    let high = Priority::new(80).unwrap();
    log.stored(FIRST, || Stored { priority: high, ..stored(None, 0, &[1, 2, 3], Tier::DEVICE) });
    let part = |parent, first, keys: &[u64]| {
        EventKind::Stored(Stored { priority: high, ..stored(parent, first, keys, Tier::DEVICE) })
    };
    let priority = EventKind::Updated { key: 2, change: Change::Priority(Priority::DEFAULT, high) };
    let expected = [part(None, 0, &[1]), moved(2, 1, 0), priority, part(Some(2), 2, &[3])];
    assert_eq!(told(&mut log), expected.map(|kind| (FIRST, kind)));
}

#[test]
fn what_one_call_of_a_tier_evicts_is_one_event() {
    let (mut log, reports) = log();
    log.stored(FIRST, || stored(None, 0, &[1, 2, 3], Tier::DEVICE));
    for key in 1..=3 {
        reports.tell(FIRST, HOST, What::Got(key));
        log.removed(FIRST, key);
    }
    drop(told(&mut log));
    reports.tell(FIRST, HOST, What::Lost(1));
    reports.begin_call();
    reports.tell(FIRST, HOST, What::Lost(2));
    reports.tell(FIRST, HOST, What::Lost(3));
    let removed = |keys: &[u64]| (FIRST, EventKind::Removed { keys: keys.to_vec() });
    assert_eq!(told(&mut log), [removed(&[1]), removed(&[2, 3])]);
}

#[test]
fn what_a_reset_of_all_tiers_forgets_is_told_by_one_event_a_group() {
    let (mut log, reports) = log();
    log.stored(FIRST, || stored(None, 0, &[1, 2], Tier::DEVICE));
    reports.tell(FIRST, HOST, What::Got(1));
    log.removed(FIRST, 1);
    drop(told(&mut log));
    reports.tell(FIRST, HOST, What::LostAll);
    log.cleared([FIRST, SECOND]);
    assert_eq!(told(&mut log), [(FIRST, EventKind::Cleared), (SECOND, EventKind::Cleared)]);
    assert!(log.runs(FIRST).unwrap().is_empty());
}

#[test]
fn a_device_that_sleeps_leaves_what_the_tiers_have() {
    let (mut log, reports) = log();
    log.stored(FIRST, || stored(None, 0, &[1, 2, 3], Tier::DEVICE));
    reports.tell(FIRST, BELOW, What::Got(2));
    drop(told(&mut log));
    log.device_cleared([FIRST, SECOND]);
    let removed = |key| (FIRST, EventKind::Removed { keys: vec![key] });
    assert_eq!(told(&mut log), [removed(1), (FIRST, moved(2, 0, 2)), removed(3)]);
    assert_eq!(log.runs(FIRST), Some(vec![stored(Some(1), 1, &[2], Tier(BELOW))]));
}

#[test]
fn a_snapshot_has_runs_of_blocks_that_are_alike() {
    let (mut log, reports) = log();
    log.stored(FIRST, || stored(None, 0, &[1, 2, 3, 4], Tier::DEVICE));
    log.stored(FIRST, || stored(Some(2), 2, &[5], Tier::DEVICE)); // a branch
    for key in [3, 4] {
        reports.tell(FIRST, HOST, What::Got(key));
        log.removed(FIRST, key);
    }
    let runs = [stored(None, 0, &[1, 2, 5], Tier::DEVICE), stored(Some(2), 2, &[3, 4], Tier(HOST))];
    assert_eq!(log.runs(FIRST), Some(runs.to_vec()));
}
