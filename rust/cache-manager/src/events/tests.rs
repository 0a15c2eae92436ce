//! The log alone.

use super::*;

const FIRST: GroupId = GroupId::FIRST;

fn log(capacity: usize) -> EventLog {
    EventLog::new(capacity, [(FIRST, EventKind::Created { page_size: 2, pages: vec![8] })])
}

fn one_block(key: u64) -> Stored {
    Stored {
        parent: None,
        first: 0,
        keys: vec![key],
        tokens: vec![1, 2],
        extra_keys: Vec::new(),
        priority: Priority::DEFAULT,
        tier: Tier::DEVICE,
        adapter: None,
    }
}

fn ids(events: &VecDeque<Event>) -> Vec<u64> {
    events.iter().map(|event| event.id).collect()
}

fn removals(events: &VecDeque<Event>) -> Vec<Vec<u64>> {
    let keys = events.iter().filter_map(|event| match &event.kind {
        EventKind::Removed { keys } => Some(keys.clone()),
        _ => None,
    });
    keys.collect()
}

#[test]
fn ids_go_on_from_one_taking_to_the_next() {
    let mut log = log(8);
    log.stored(FIRST, || one_block(5));
    assert_eq!(ids(&log.take(None)), [0, 1]);
    log.removed(FIRST, 5);
    log.cleared([FIRST]);
    assert_eq!(ids(&log.take(None)), [2, 3]);
}

#[test]
fn a_full_log_drops_and_counts_the_oldest() {
    let mut log = log(2);
    (1..=3).for_each(|key| log.stored(FIRST, || one_block(key)));
    assert_eq!(log.dropped(), 2);
    assert_eq!(ids(&log.take(None)), [2, 3]);
}

#[test]
fn blocks_that_groups_lose_in_turn_share_no_event() {
    let mut log = log(8);
    for (group, key) in [(0, 1), (0, 2), (1, 1), (0, 3)] {
        log.removed(GroupId(group), key);
    }
    let told = log.take(None);
    assert_eq!(removals(&told), [vec![1, 2], vec![1], vec![3]]);
    assert_eq!(told.iter().skip(1).map(|event| event.group.0).collect::<Vec<_>>(), [0, 1, 0]);
}

#[test]
fn a_log_of_no_events_asks_for_none() {
    let mut log = log(0);
    log.stored(FIRST, || unreachable!("nobody reads it"));
    log.removed(FIRST, 5);
    log.updated(FIRST, 5, Change::Tier(Tier(0), Tier(1)));
    log.cleared([FIRST]);
    assert_eq!((log.next_id(), log.dropped(), log.take(None).len()), (0, 0, 0));
}

#[test]
fn blocks_that_go_one_after_the_other_share_an_event() {
    let mut log = log(8);
    (1..=2).for_each(|key| log.removed(FIRST, key));
    log.stored(FIRST, || one_block(1));
    log.removed(FIRST, 1);
    assert_eq!(removals(&log.take(None)), [vec![1, 2], vec![1]]);
}

#[test]
fn one_event_tells_of_1024_removals_at_most() {
    let mut log = log(8);
    (0..1025).for_each(|key| log.removed(FIRST, key));
    assert_eq!(removals(&log.take(None)).iter().map(Vec::len).collect::<Vec<_>>(), [1024, 1]);
}

#[test]
fn nothing_is_added_to_an_event_that_is_sealed() {
    let mut log = log(8);
    log.removed(FIRST, 1);
    log.seal();
    log.removed(FIRST, 2);
    assert_eq!(removals(&log.take(None)), [vec![1], vec![2]]);
}

#[test]
fn an_update_tells_old_and_new() {
    let mut log = log(8);
    let high = Priority::new(80).expect("a priority");
    log.updated(FIRST, 5, Change::Priority(Priority::DEFAULT, high));
    let update = EventKind::Updated { key: 5, change: Change::Priority(Priority::DEFAULT, high) };
    assert_eq!(log.take(None).pop_back(), Some(Event { id: 1, group: FIRST, kind: update }));
}

#[test]
fn the_next_event_wakes_the_thread_that_waits() {
    let log = std::sync::Mutex::new(log(8));
    let take = || log.lock().unwrap().take(Some(std::thread::current()));
    take();
    let (ready, wait) = std::sync::mpsc::channel();
    let woken = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            assert!(take().is_empty());
            ready.send(()).unwrap();
            loop {
                std::thread::park();
                let events = take();
                if !events.is_empty() {
                    return ids(&events);
                }
            }
        });
        wait.recv().unwrap();
        log.lock().unwrap().cleared([FIRST]);
        waiter.join().unwrap()
    });
    assert_eq!(woken, [1]);
}

#[test]
fn a_gap_in_the_ids_is_found() {
    let mut log = log(8);
    log.cleared([FIRST]);
    log.events[0].id = 7;
    assert_eq!(log.verify(2), Err((7, "does not follow the one before it")));
}

#[test]
fn stored_blocks_without_their_tokens_are_found() {
    let mut log = log(8);
    log.stored(FIRST, || one_block(1));
    assert_eq!(log.verify(2), Ok(()));
    assert_eq!(log.verify(4), Err((1, "does not add up")));
}

#[test]
fn more_events_than_the_log_may_hold_are_found() {
    let mut log = log(1);
    log.capacity = 0;
    assert_eq!(log.verify(2), Err((1, "more events are kept than the log may hold")));
}

#[test]
fn a_look_without_waiting_leaves_the_waiter_in_its_place() {
    let mut log = log(8);
    log.take(None);
    log.take(Some(std::thread::current()));
    log.take(None);
    assert_eq!(log.waiter.as_ref().map(Thread::id), Some(std::thread::current().id()));
}
