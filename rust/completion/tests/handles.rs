//! What a handle says, and to whom.

use completion::{Completer, Completion, Outcome, pending};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_millis(20);
/// Longer than any wait that ends.
const LONG: Duration = Duration::from_secs(30);

fn failed(message: &str) -> Outcome {
    Outcome::Failed(message.into())
}

/// A copy that `end` has ended.
fn ended(end: impl FnOnce(&Completer) -> bool) -> Completion {
    let (completer, completion) = pending();
    assert!(end(&completer));
    completion
}

#[test]
fn a_copy_in_flight_is_neither_complete_nor_has_it_an_outcome() {
    let (_completer, completion) = pending();
    assert!(!completion.is_complete());
    assert_eq!(completion.outcome(), None);
}

#[test]
fn every_clone_of_a_handle_tells_how_the_copy_ended() {
    let copies = [
        (ended(Completer::finish), Outcome::Done),
        (ended(|completer| completer.fail("disk full")), failed("disk full")),
        (ended(Completer::abandon), Outcome::Cancelled),
    ];
    for (completion, outcome) in copies {
        assert!(completion.clone().is_complete());
        assert_eq!(completion.clone().outcome(), Some(outcome.clone()));
        assert_eq!(completion.wait(None), Some(outcome));
    }
}

#[test]
fn the_first_result_stands() {
    let (completer, completion) = pending();
    assert!(completer.fail("lost"));
    assert!(!completer.finish());
    assert!(!completer.abandon());
    drop(completer);
    assert_eq!(completion.outcome(), Some(failed("lost")));
}

#[test]
fn a_copy_dropped_without_a_result_has_failed() {
    let (completer, completion) = pending();
    drop(completer);
    assert_eq!(completion.wait(None), Some(failed("the copy was dropped without a result")));
}

#[test]
fn a_copy_whose_thread_panics_has_failed() {
    let (completer, completion) = pending();
    let copy = thread::spawn(move || {
        let _held = completer;
        std::panic::resume_unwind(Box::new("no message"));
    });
    assert!(copy.join().is_err());
    assert_eq!(completion.outcome(), Some(failed("the copy was dropped without a result")));
}

#[test]
fn waiting_for_a_copy_in_flight_ends_with_the_timeout_and_not_before() {
    let (_completer, completion) = pending();
    let start = Instant::now();
    assert_eq!(completion.wait(Some(SOON)), None);
    assert!(start.elapsed() >= SOON);
}

#[test]
fn a_timeout_of_zero_does_not_wait() {
    let (_completer, completion) = pending();
    assert_eq!(completion.wait(Some(Duration::ZERO)), None);
    assert_eq!(ended(Completer::finish).wait(Some(Duration::ZERO)), Some(Outcome::Done));
}

#[test]
fn a_timeout_beyond_the_clock_is_no_limit() {
    let (completer, completion) = pending();
    let waiter = thread::spawn(move || completion.wait(Some(Duration::MAX)));
    completer.finish();
    assert_eq!(waiter.join().unwrap(), Some(Outcome::Done));
}

#[test]
fn all_who_wait_are_woken_long_before_their_timeout() {
    let (completer, completion) = pending();
    let start = Instant::now();
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..4).map(|_| scope.spawn(|| completion.wait(Some(LONG)))).collect();
        thread::sleep(SOON);
        completer.finish();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Some(Outcome::Done));
        }
    });
    assert!(start.elapsed() < LONG / 2);
}

#[test]
fn whoever_copies_hears_of_a_request_to_cancel() {
    let (completer, completion) = pending();
    assert!(!completer.is_cancel_requested());
    assert!(completion.cancel());
    assert!(completion.cancel());
    assert!(completer.is_cancel_requested());
    assert!(!completion.is_complete());
}

#[test]
fn a_request_to_cancel_may_be_honoured_or_come_too_late() {
    for end in [Completer::finish, Completer::abandon] {
        let (completer, completion) = pending();
        assert!(completion.cancel());
        assert!(end(&completer));
        assert!(!completion.cancel());
    }
}

#[test]
fn a_call_for_the_end_is_made_when_the_copy_ends() {
    let (completer, completion) = pending();
    let calls = Arc::new(AtomicUsize::new(0));
    for _ in 0..2 {
        let calls = Arc::clone(&calls);
        completion.when_complete(move || _ = calls.fetch_add(1, Ordering::Relaxed));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    drop(completer);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[test]
fn a_call_for_the_end_finds_the_copy_complete() {
    let (completer, completion) = pending();
    let (told, seen) = std::sync::mpsc::channel();
    let asked = completion.clone();
    completion.when_complete(move || told.send(asked.outcome()).unwrap());
    completer.finish();
    assert_eq!(seen.recv().unwrap(), Some(Outcome::Done));
}

#[test]
fn a_call_for_the_end_of_a_copy_that_has_ended_is_made_at_once() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    ended(Completer::finish).when_complete(move || _ = counted.fetch_add(1, Ordering::Relaxed));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}
