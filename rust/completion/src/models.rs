//! Every interleaving of small programs, by loom; and programs with a fault, which loom must find.

use crate::sync::modelled::Fault;
use crate::{Completion, Outcome, pending};
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use std::sync::Arc;

const RELAXED: Ordering = Ordering::Relaxed;

/// A copy writes its bytes and ends; another thread asks, and reads them if it has ended.
fn polled() {
    let (completer, completion) = pending();
    let bytes = Arc::new(AtomicUsize::new(0));
    let copied = Arc::clone(&bytes);
    let copy = thread::spawn(move || {
        copied.store(7, RELAXED);
        completer.finish();
    });
    if completion.is_complete() {
        assert_eq!(bytes.load(RELAXED), 7);
        assert_eq!(completion.outcome(), Some(Outcome::Done));
    }
    copy.join().unwrap();
    assert!(completion.is_complete());
}

/// Two threads wait for one copy.
fn waited_for() {
    let (completer, completion) = pending();
    let waiter = |completion: Completion| thread::spawn(move || completion.wait(None));
    let waiters = [waiter(completion.clone()), waiter(completion)];
    completer.finish();
    drop(completer);
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), Some(Outcome::Done));
    }
}

#[test]
fn what_a_copy_wrote_is_visible_to_whoever_sees_it_complete() {
    Fault::None.explore(polled);
}

#[test]
#[should_panic(expected = "left: 0")]
fn loom_finds_a_flag_that_is_seen_before_the_bytes() {
    Fault::RelaxedFlag.explore(polled);
}

#[test]
fn every_waiter_is_woken() {
    Fault::None.explore(waited_for);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_a_waiter_that_misses_the_wake_up() {
    Fault::LateWaiter.explore(waited_for);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_a_change_that_wakes_one_waiter_only() {
    Fault::WakesOne.explore(waited_for);
}

#[test]
fn of_two_results_one_stands_and_it_is_the_one_that_was_told_so() {
    Fault::None.explore(|| {
        let (completer, completion) = pending();
        let completer = Arc::new(completer);
        let failing = Arc::clone(&completer);
        let failed = thread::spawn(move || failing.fail("lost"));
        let finished = completer.finish();
        let failed = failed.join().unwrap();
        assert_ne!(finished, failed);
        let expected = if finished { Outcome::Done } else { Outcome::Failed("lost".into()) };
        assert_eq!(completion.wait(None), Some(expected));
    });
}

#[test]
fn a_request_to_cancel_is_heard_or_told_that_it_is_too_late() {
    Fault::None.explore(|| {
        let (completer, completion) = pending();
        let handle = completion.clone();
        let asked = thread::spawn(move || handle.cancel());
        let heard = completer.is_cancel_requested();
        if heard {
            completer.abandon();
        } else {
            completer.finish();
        }
        assert!(asked.join().unwrap() || !heard);
        let expected = if heard { Outcome::Cancelled } else { Outcome::Done };
        assert_eq!(completion.wait(None), Some(expected));
    });
}

#[test]
fn a_waiter_is_woken_by_a_completer_that_is_dropped() {
    Fault::None.explore(|| {
        let (completer, completion) = pending();
        let waiter = thread::spawn(move || completion.wait(None));
        drop(completer);
        assert!(matches!(waiter.join().unwrap(), Some(Outcome::Failed(_))));
    });
}

#[test]
fn a_call_for_the_end_is_made_once_whichever_comes_first() {
    Fault::None.explore(|| {
        let (completer, completion) = pending();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let copy = thread::spawn(move || completer.finish());
        completion.when_complete(move || _ = counted.fetch_add(1, RELAXED));
        copy.join().unwrap();
        assert_eq!(calls.load(RELAXED), 1);
    });
}
