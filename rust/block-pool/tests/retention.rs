//! Priorities that end, and pages that change their level while they wait.

use block_pool::{EvictionPolicy, Lapsed, NodeLink, PageId, Pool, Priority, Retention, RetentionError, Step};

fn level(level: i64) -> Priority {
    Priority::new(level).expect("a level from 0 to 100")
}

fn lasting(priority: i64, duration: f64) -> Retention {
    Retention::new(level(priority), Some(duration), None).expect("a duration")
}

fn until(priority: i64, expires_at: f64) -> Retention {
    Retention::new(level(priority), None, Some(expires_at)).expect("a time")
}

/// A pool all of whose pages are held, page `i + 1` at `retentions[i]`, standing for node `i + 1`.
fn held(retentions: &[Retention]) -> Pool {
    let mut pool = Pool::new(retentions.len() as u32, EvictionPolicy::PriorityLru, Priority::DEFAULT);
    for &retention in retentions {
        let page = pool.take(Priority::DEFAULT).expect("the pool is large enough").page;
        pool.publish(page, NodeLink(page.0), Step(1));
        pool.retain(page, retention);
    }
    pool
}

fn release(pool: &mut Pool, pages: &[u32]) {
    for &page in pages {
        pool.release(PageId(page), Step(1));
    }
}

/// Tells the time; the pages that fell back.
fn tell(pool: &mut Pool, now: f64) -> Vec<u32> {
    let lapsed = pool.tell_time(now);
    pool.verify().unwrap();
    lapsed.iter().map(|lapsed| lapsed.page.0).collect()
}

fn order(pool: &Pool) -> Vec<u32> {
    pool.eviction_order().map(|page| page.0).collect()
}

const NORMAL: i64 = 35;

#[test]
fn a_page_kept_for_a_time_is_spared_until_it_is_over() {
    let mut pool = held(&[lasting(90, 0.100), level(NORMAL).into()]);
    release(&mut pool, &[1, 2]);
    assert_eq!(tell(&mut pool, 0.050), []);
    assert_eq!(order(&pool), [2, 1]);
    assert_eq!(tell(&mut pool, 0.150), [1]);
    assert_eq!(order(&pool), [1, 2]);
}

#[test]
fn a_page_that_fell_back_has_the_default_priority_for_ever() {
    let mut pool = held(&[lasting(90, 0.1)]);
    release(&mut pool, &[1]);
    assert_eq!(pool.tell_time(0.1), [Lapsed { page: PageId(1), from: level(90) }]);
    assert_eq!(pool.retention(PageId(1)), Priority::DEFAULT.into());
    pool.acquire(PageId(1));
    release(&mut pool, &[1]);
    assert_eq!(tell(&mut pool, 9.0), []);
}

#[test]
fn the_default_priority_is_the_slabs() {
    let mut pool = Pool::new(1, EvictionPolicy::PriorityLru, level(20));
    let page = pool.take(level(50)).unwrap().page;
    pool.retain(page, until(90, 1.0));
    pool.tell_time(1.0);
    assert_eq!(pool.priority(page), level(20));
}

#[test]
fn a_priority_below_the_default_ends_as_well() {
    let mut pool = held(&[level(NORMAL).into(), until(0, 1.0)]);
    release(&mut pool, &[1, 2]);
    assert_eq!(order(&pool), [2, 1]);
    assert_eq!(tell(&mut pool, 1.0), [2]);
    assert_eq!(order(&pool), [1, 2]);
}

#[test]
fn a_time_told_twice_lets_a_page_fall_back_once() {
    let mut pool = held(&[until(90, 1.0)]);
    assert_eq!(tell(&mut pool, 1.0), [1]);
    assert_eq!(tell(&mut pool, 1.0), []);
}

#[test]
fn a_time_before_the_latest_changes_nothing() {
    let mut pool = held(&[lasting(90, 1.0)]);
    tell(&mut pool, 5.0);
    tell(&mut pool, 2.0);
    release(&mut pool, &[1]);
    assert_eq!(tell(&mut pool, 5.5), []);
    assert_eq!(tell(&mut pool, 6.0), [1]);
}

#[test]
fn the_time_counts_only_when_it_is_told() {
    let mut pool = held(&[until(90, 1.0)]);
    tell(&mut pool, 3.0);
    pool.retain(PageId(1), until(80, 2.0));
    release(&mut pool, &[1]);
    assert_eq!(pool.priority(PageId(1)), level(80));
    assert_eq!(tell(&mut pool, 3.0), [1]);
}

#[test]
fn a_duration_counts_from_the_last_release() {
    let mut pool = held(&[lasting(90, 1.0)]);
    assert_eq!(tell(&mut pool, 7.0), []); // in use all the time
    release(&mut pool, &[1]);
    tell(&mut pool, 7.5);
    pool.acquire(PageId(1));
    assert_eq!(tell(&mut pool, 9.0), []); // in use again when it would have been over
    release(&mut pool, &[1]);
    assert_eq!(tell(&mut pool, 9.9), []);
    assert_eq!(tell(&mut pool, 10.0), [1]);
}

#[test]
fn a_time_of_expiry_counts_also_for_a_page_in_use() {
    let mut pool = held(&[until(90, 1.0), level(NORMAL).into()]);
    assert_eq!(tell(&mut pool, 1.0), [1]);
    release(&mut pool, &[1, 2]);
    assert_eq!(order(&pool), [1, 2]);
}

#[test]
fn a_duration_runs_on_while_a_transfer_holds_the_page() {
    let mut pool = held(&[lasting(90, 1.0), level(NORMAL).into()]);
    release(&mut pool, &[1, 2]);
    tell(&mut pool, 0.5);
    pool.pin(PageId(1));
    assert_eq!(tell(&mut pool, 1.0), [1]);
    pool.unpin(PageId(1));
    assert_eq!(order(&pool), [2, 1]);
}

#[test]
fn a_duration_given_to_a_page_that_waits_counts_from_then() {
    let mut pool = held(&[level(NORMAL).into()]);
    release(&mut pool, &[1]);
    tell(&mut pool, 5.0);
    pool.retain(PageId(1), lasting(90, 1.0));
    assert_eq!(tell(&mut pool, 5.5), []);
    assert_eq!(tell(&mut pool, 6.0), [1]);
}

#[test]
fn a_refreshed_page_counts_its_duration_anew() {
    let mut pool = held(&[lasting(90, 1.0)]);
    release(&mut pool, &[1]);
    tell(&mut pool, 0.5);
    pool.refresh(PageId(1));
    assert_eq!(tell(&mut pool, 1.0), []);
    assert_eq!(tell(&mut pool, 1.5), [1]);
}

#[test]
fn another_retention_replaces_the_one_before() {
    let mut pool = held(&[until(90, 1.0), lasting(90, 1.0)]);
    release(&mut pool, &[1, 2]);
    pool.retain(PageId(1), level(80).into());
    pool.retain(PageId(2), until(70, 3.0));
    assert_eq!(tell(&mut pool, 2.0), []);
    assert_eq!(pool.retention(PageId(1)), level(80).into());
    assert_eq!(pool.retention(PageId(2)), until(70, 3.0));
    assert_eq!(tell(&mut pool, 3.0), [2]);
}

#[test]
fn a_page_handed_out_again_keeps_nothing_of_its_retention() {
    let mut pool = held(&[until(0, 1.0)]);
    release(&mut pool, &[1]);
    pool.take(level(80));
    assert_eq!(pool.retention(PageId(1)), level(80).into());
    assert_eq!(tell(&mut pool, 1.0), []);
    assert_eq!(pool.priority(PageId(1)), level(80));
}

#[test]
fn pages_fall_back_in_the_order_of_their_ends_and_keep_the_order_of_release() {
    let mut pool = held(&[until(90, 3.0), until(80, 1.0), level(NORMAL).into(), until(70, 2.0)]);
    release(&mut pool, &[4, 3, 1, 2]);
    assert_eq!(order(&pool), [3, 4, 2, 1]);
    assert_eq!(tell(&mut pool, 9.0), [2, 4, 1]);
    assert_eq!(order(&pool), [4, 3, 1, 2]);
}

#[test]
fn a_page_moved_between_levels_and_back_keeps_its_place() {
    let mut pool = held(&[level(NORMAL).into(); 3]);
    release(&mut pool, &[2, 1, 3]);
    for priority in [80, 20, NORMAL] {
        pool.retain(PageId(1), level(priority).into());
        pool.verify().unwrap();
    }
    assert_eq!(order(&pool), [2, 1, 3]);
}

#[test]
fn a_page_moved_to_another_level_is_hit_and_queued_there_alone() {
    let mut pool = held(&[level(NORMAL).into(); 3]);
    release(&mut pool, &[1, 2, 3]);
    pool.retain(PageId(2), level(0).into());
    pool.acquire(PageId(2));
    pool.verify().unwrap();
    assert_eq!(order(&pool), [1, 3]);
    release(&mut pool, &[2]);
    pool.verify().unwrap();
    assert_eq!(order(&pool), [2, 1, 3]);
    let taken = pool.take(Priority::DEFAULT).unwrap();
    assert_eq!((taken.page, taken.evicted), (PageId(2), Some(NodeLink(2))));
    pool.verify().unwrap();
    assert_eq!(order(&pool), [1, 3]);
}

#[test]
fn pages_that_were_moved_are_forgotten_with_all_others() {
    let mut pool = held(&[lasting(80, 1.0), level(NORMAL).into(), level(NORMAL).into()]);
    release(&mut pool, &[1, 2, 3]);
    pool.retain(PageId(1), lasting(NORMAL, 1.0));
    pool.forget_all();
    pool.verify().unwrap();
    assert_eq!(order(&pool), [2, 3, 1]); // list after list; pages that were moved are in one of their own
    assert_eq!(tell(&mut pool, 1.0), [1]);
    pool.acquire(PageId(1));
    pool.verify().unwrap();
    assert_eq!(order(&pool), [2, 3]);
}

#[test]
fn a_retention_has_at_most_one_limit_and_this_is_a_time() {
    let new = |duration, expires_at| Retention::new(Priority::DEFAULT, duration, expires_at);
    let both = RetentionError::Both { duration: 1.0, expires_at: 2.0 };
    assert_eq!(new(Some(1.0), Some(2.0)), Err(both));
    assert_eq!(new(Some(-1.0), None), Err(RetentionError::Duration(-1.0)));
    assert_eq!(new(Some(f64::INFINITY), None), Err(RetentionError::Duration(f64::INFINITY)));
    assert_eq!(new(None, Some(f64::INFINITY)), Err(RetentionError::ExpiresAt(f64::INFINITY)));
    assert!(matches!(new(Some(f64::NAN), None), Err(RetentionError::Duration(time)) if time.is_nan()));
    assert!(matches!(new(None, Some(f64::NAN)), Err(RetentionError::ExpiresAt(time)) if time.is_nan()));
    assert_eq!(both.to_string(), "a retention has a duration (1 s) or a time of expiry (2 s), not both");
    assert_eq!(
        RetentionError::Duration(-1.0).to_string(),
        "duration -1 s: must be a finite number of seconds, at least 0"
    );
}

#[test]
fn a_retention_says_what_it_was_made_of() {
    let (first, second) = (lasting(90, 1.5), until(80, 2.5));
    assert_eq!((first.priority(), first.duration(), first.expires_at()), (level(90), Some(1.5), None));
    assert_eq!((second.priority(), second.duration(), second.expires_at()), (level(80), None, Some(2.5)));
}
