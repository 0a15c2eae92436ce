//! Stored tails: when the last block of a request stays, what takes its place, and who hears of it.

use crate::common::{claim, computed, config, forward, hit, prompt, row};
use crate::partial::{partly, stored};
use block_hash::{Chain, ExtraKeys};
use block_pool::{GroupId, PageId, Priority};
use cache_manager::{
    BlockRetention, EventKind, Group, GroupKind, Ledger, LedgerConfig, NewSequence, PrefixQuery, SessionHint,
    TokenRange,
};
use std::sync::Arc;

#[test]
fn release_gives_the_page_of_a_last_block_that_stays() {
    let mut ledger = Ledger::new(partly(8));
    let slots = [computed(&mut ledger, &[1, 2, 3, 4, 5, 6]), computed(&mut ledger, &[9, 8, 7, 6])];
    let released = ledger.release(&slots).unwrap();
    assert_eq!(released.iter().map(|it| it.tail).collect::<Vec<_>>(), [Some(PageId(2)), None]);
    assert_eq!((ledger.tails(), ledger.cached_blocks()), (1, 2));
    ledger.verify().unwrap();
}

#[test]
fn the_token_that_has_no_kv_is_not_stored() {
    let mut ledger = Ledger::new(partly(8));
    let slot = computed(&mut ledger, &[1, 2, 3, 4]);
    ledger.update(slot, 5).unwrap();
    assert_eq!(ledger.release(&[slot]).unwrap()[0].tail, None);
    let slot = computed(&mut ledger, &[1, 2, 3, 4, 5]);
    ledger.update(slot, 6).unwrap();
    assert_eq!(ledger.release(&[slot]).unwrap()[0].tail, Some(PageId(2)));
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 7])), 5);
}

#[test]
fn a_longer_tail_takes_the_place_of_a_shorter_one_and_never_the_other_way_round() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2]);
    let slot = claim(&mut ledger, NewSequence { no_read: true, ..prompt(&[1, 2, 3]) });
    forward(&mut ledger, slot);
    assert_eq!(ledger.release(&[slot]).unwrap()[0].tail, Some(PageId(2)));
    assert_eq!(ledger.tails(), 1);
    let slot = claim(&mut ledger, NewSequence { no_read: true, ..prompt(&[1, 2]) });
    forward(&mut ledger, slot);
    assert_eq!(ledger.release(&[slot]).unwrap()[0].tail, None);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4])), 3);
}

#[test]
fn a_full_block_takes_the_place_of_its_tail() {
    for groups in [1, 2] {
        let groups = vec![Group { kind: GroupKind::Full, pages: 8 }; groups];
        let mut ledger = Ledger::new(LedgerConfig { groups, ..partly(8) });
        stored(&mut ledger, &[1, 2, 3, 4, 5, 6]);
        let slot = claim(&mut ledger, NewSequence { no_read: true, ..prompt(&[1, 2, 3, 4, 5, 6, 7, 8]) });
        forward(&mut ledger, slot);
        ledger.verify().unwrap();
        assert_eq!((ledger.tails(), ledger.cached_blocks()), (0, 2));
    }
}

#[test]
fn tails_that_differ_lie_beside_each_other() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3]);
    stored(&mut ledger, &[1, 2, 4]);
    assert_eq!(ledger.tails(), 2);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 4, 5])), 3);
}

#[test]
fn what_is_covered_by_a_block_is_not_stored() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4]);
    stored(&mut ledger, &[1, 2, 3]);
    assert_eq!(ledger.tails(), 0);
    assert_eq!(ledger.counters().stored_tails, 0);
}

#[test]
fn no_tail_stays_of_requests_that_store_nothing_or_whose_session_is_over() {
    let mut ledger = Ledger::new(partly(8));
    let silent = claim(&mut ledger, NewSequence { no_store: true, ..prompt(&[1, 2, 3]) });
    forward(&mut ledger, silent);
    let done = computed(&mut ledger, &[4, 5, 6]);
    ledger.hint_sessions(&[done], SessionHint::Done).unwrap();
    let old = computed(&mut ledger, &[7, 8, 9]);
    ledger.reset_prefix_cache();
    ledger.release(&[silent, done, old]).unwrap();
    assert_eq!(ledger.tails(), 0);
    ledger.verify().unwrap();
}

#[test]
fn no_tail_stays_where_they_are_not_stored_or_not_found() {
    for config in [LedgerConfig { store_partial_tails: false, ..partly(8) }, config(8)] {
        let mut ledger = Ledger::new(config);
        stored(&mut ledger, &[1, 2, 3]);
        assert_eq!(ledger.tails(), 0);
    }
}

#[test]
fn a_page_that_another_request_holds_is_no_tail() {
    let mut ledger = Ledger::new(partly(8));
    let parent = computed(&mut ledger, &[1, 2, 3]);
    let child = ledger.fork(parent).unwrap();
    assert_eq!(ledger.release(&[child]).unwrap()[0].tail, None);
    assert_eq!(ledger.release(&[parent]).unwrap()[0].tail, Some(PageId(1)));
}

#[test]
fn a_preempted_request_goes_on_from_its_tail() {
    let mut ledger = Ledger::new(partly(8));
    let slot = computed(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    ledger.update(slot, 7).unwrap();
    ledger.preempt(&[slot]).unwrap();
    assert_eq!(ledger.tails(), 1);
    ledger.alloc(&[slot], &[]).unwrap();
    assert_eq!(ledger.position(slot).unwrap().cached, 6);
    assert_eq!(row(&ledger, slot), [1, 2]);
    ledger.verify().unwrap();
}

#[test]
fn tails_are_evicted_like_blocks_and_before_what_they_follow() {
    let mut ledger = Ledger::new(partly(3));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6]);
    computed(&mut ledger, &[9, 9, 9, 9, 9]);
    assert_eq!((ledger.tails(), ledger.cached_blocks()), (0, 2));
    assert_eq!(ledger.counters().evictions, 1);
    ledger.verify().unwrap();
}

#[test]
fn a_tail_that_loses_a_page_in_one_group_is_gone_from_all() {
    let groups = vec![Group { kind: GroupKind::Full, pages: 8 }, Group { kind: GroupKind::Full, pages: 3 }];
    let mut ledger = Ledger::new(LedgerConfig { groups, ..partly(8) });
    stored(&mut ledger, &[1, 2]);
    let slot = computed(&mut ledger, &[9; 9]);
    ledger.verify().unwrap();
    assert_eq!(ledger.tails(), 0);
    assert_eq!(ledger.pools()[GroupId(0)].evictable(), 1);
    ledger.release(&[slot]).unwrap();
}

#[test]
fn a_tail_is_kept_as_its_first_token_says() {
    let mut ledger = Ledger::new(partly(8));
    let range = TokenRange { start: 4, end: None, retention: Priority::HIGHEST.into() };
    let retention = BlockRetention::new(vec![range], Priority::LOWEST.into(), 6).unwrap();
    let request = NewSequence { retention: Some(Arc::new(retention)), ..prompt(&[1, 2, 3, 4, 5, 6]) };
    let slot = claim(&mut ledger, request);
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    assert_eq!(ledger.pool().priority(PageId(2)), Priority::HIGHEST);
    // Whoever takes it over starts anew.
    let slot = computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(row(&ledger, slot), [1, 2]);
    assert_eq!(ledger.pool().priority(PageId(2)), Priority::DEFAULT);
}

#[test]
fn nobody_is_told_of_tails() {
    let mut ledger = Ledger::new(LedgerConfig { event_buffer_max_size: 100, ..partly(2) });
    stored(&mut ledger, &[1, 2, 3]);
    assert_eq!(ledger.event_snapshot().events.len(), 1); // of the cache itself
    stored(&mut ledger, &[9, 9, 9, 9, 9, 9, 9, 9]); // evicts it
    let events = ledger.take_events(None);
    assert!(events.iter().all(|event| !matches!(event.kind, EventKind::Removed { .. })));
}

#[test]
fn forgetting_below_a_prefix_forgets_tails_and_counts_blocks() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let first = prompt(&[1, 2, 3, 4]);
    let NewSequence { tokens, namespace, chain, .. } = first;
    let query = PrefixQuery { tokens, namespace, extras: ExtraKeys::default(), chain: Chain::clone(&chain) };
    assert_eq!(ledger.truncate_prefix(&query), 1);
    assert_eq!((ledger.tails(), ledger.cached_blocks()), (0, 1));
    ledger.verify().unwrap();
}

#[test]
fn a_reset_forgets_tails() {
    let mut ledger = Ledger::new(partly(8));
    stored(&mut ledger, &[1, 2, 3, 4, 5]);
    ledger.reset_prefix_cache();
    assert_eq!(ledger.tails(), 0);
    assert_eq!(ledger.counters().reset_blocks, 1);
    ledger.verify().unwrap();
}
