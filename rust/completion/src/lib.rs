//! The handle of a copy in flight: pending, then settled once, for good.
//!
//! Whoever copies holds the [`Completer`]; whoever waits holds clones of the [`Completion`].
//!
//! ```
//! use completion::{Outcome, pending};
//!
//! let (completer, completion) = pending();
//! let copy = std::thread::spawn(move || completer.finish());
//! assert_eq!(completion.wait(None), Some(Outcome::Done));
//! assert!(completion.is_complete());
//! copy.join().unwrap();
//! ```
#![forbid(unsafe_code)]

#[cfg(all(loom, test))]
mod models;
mod sync;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sync::{Flag, Monitor};

/// How a copy ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Every byte is where it belongs.
    Done,
    /// The copy failed, as the message says; what it wrote to is not to be used.
    Failed(String),
    /// The copy was given up on request; what it wrote to is not to be used.
    Cancelled,
}

/// A copy that is in flight: the end of whoever carries it out, and the handle of whoever waits for it.
pub fn pending() -> (Completer, Completion) {
    pending_of(Vec::new())
}

/// The handle of several copies as one: it ends when all of them have, well if all did; else as one did that failed,
/// or was given up if none failed. To give it up is to give them all up.
///
/// ```
/// use completion::{Outcome, all_of, pending};
///
/// let ((first, one), (second, other)) = (pending(), pending());
/// let both = all_of(vec![one, other]);
/// second.fail("no room");
/// assert!(!both.is_complete());
/// first.finish();
/// assert_eq!(both.outcome(), Some(Outcome::Failed("no room".into())));
/// ```
pub fn all_of(parts: Vec<Completion>) -> Completion {
    let (completer, whole) = pending_of(parts.clone());
    let end = Arc::new(End { parts: parts.clone(), completer });
    for part in parts {
        let end = Arc::clone(&end);
        part.when_complete(move || drop(end)); // the last of them ends the whole
    }
    whole
}

/// Ends a copy of several parts when nobody waits for one of them any more.
struct End {
    parts: Vec<Completion>,
    completer: Completer,
}

impl Drop for End {
    fn drop(&mut self) {
        let mut given_up = false;
        for part in &self.parts {
            match part.outcome() {
                Some(Outcome::Done) => {}
                Some(Outcome::Cancelled) => given_up = true,
                Some(Outcome::Failed(why)) => {
                    self.completer.fail(why);
                    return;
                }
                None => return, // the completer fails it
            }
        }
        if given_up {
            self.completer.abandon()
        } else {
            self.completer.finish()
        };
    }
}

fn pending_of(parts: Vec<Completion>) -> (Completer, Completion) {
    let shared = Arc::new(Shared {
        settled: Flag::new(),
        cancel_requested: Flag::new(),
        parts,
        state: Monitor::new(State::Pending(Vec::new())),
    });
    (Completer { shared: Arc::clone(&shared) }, Completion { shared })
}

/// The waiting end. Clones are the same handle.
#[derive(Clone)]
pub struct Completion {
    shared: Arc<Shared>,
}

impl Completion {
    /// Whether the copy has ended, well or not: one atomic load. What the copy wrote is visible after it.
    #[inline]
    pub fn is_complete(&self) -> bool {
        self.shared.settled.is_set()
    }

    /// How the copy ended; None while it is in flight.
    pub fn outcome(&self) -> Option<Outcome> {
        if !self.is_complete() {
            return None;
        }
        self.shared.state.lock().outcome()
    }

    /// Blocks until the copy has ended; None when `timeout` passes first.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        // A time beyond what the clock can say is no limit.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.shared.state.lock();
        loop {
            if let Some(outcome) = state.outcome() {
                return Some(outcome);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            state = self.shared.state.wait(state, deadline);
        }
    }

    /// Asks that the copy be given up. It may end in any way all the same, and until it has ended it may
    /// still write. False when it has ended already.
    pub fn cancel(&self) -> bool {
        let state = self.shared.state.lock();
        let pending = state.outcome().is_none();
        drop(state);
        if pending {
            self.shared.cancel_requested.set();
            for part in &self.shared.parts {
                part.cancel();
            }
        }
        pending
    }

    /// Makes `call` once the copy has ended: at once if it has, else in the thread that ends it, after
    /// those who wait were woken. `call` must neither block nor panic.
    pub fn when_complete(&self, call: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        if let State::Pending(calls) = &mut *state {
            calls.push(Box::new(call));
            return;
        }
        drop(state);
        call();
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Completion").field(&self.outcome()).finish()
    }
}

/// The end of whoever carries the copy out. The first result stands. Dropped without one, the copy has
/// failed: nobody waits for ever.
pub struct Completer {
    shared: Arc<Shared>,
}

impl Completer {
    /// Every byte is where it belongs. False when the copy had ended already.
    pub fn finish(&self) -> bool {
        self.shared.settle(Outcome::Done)
    }

    /// The copy failed. False when it had ended already.
    pub fn fail(&self, message: impl Into<String>) -> bool {
        self.shared.settle(Outcome::Failed(message.into()))
    }

    /// The copy was given up: it writes nothing more. False when it had ended already.
    pub fn abandon(&self) -> bool {
        self.shared.settle(Outcome::Cancelled)
    }

    /// Whether somebody asked that the copy be given up: one atomic load.
    #[inline]
    pub fn is_cancel_requested(&self) -> bool {
        self.shared.cancel_requested.is_set()
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        if !self.shared.settled.is_set() {
            self.fail("the copy was dropped without a result");
        }
    }
}

struct Shared {
    /// Set after the state, for those who only ask.
    settled: Flag,
    cancel_requested: Flag,
    /// The copies that this one is made of, if it is none of its own.
    parts: Vec<Completion>,
    state: Monitor<State>,
}

impl Shared {
    fn settle(&self, outcome: Outcome) -> bool {
        let mut state = self.state.lock();
        let State::Pending(calls) = &mut *state else { return false };
        let calls = std::mem::take(calls);
        *state = State::Settled(outcome);
        self.settled.set();
        drop(state);
        self.state.notify_all();
        for call in calls {
            call();
        }
        true
    }
}

enum State {
    /// What is to be called once the copy has ended.
    Pending(Vec<Box<dyn FnOnce() + Send>>),
    Settled(Outcome),
}

impl State {
    fn outcome(&self) -> Option<Outcome> {
        match self {
            State::Pending(_) => None,
            State::Settled(outcome) => Some(outcome.clone()),
        }
    }
}
