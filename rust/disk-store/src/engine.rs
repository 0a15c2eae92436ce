//! Engines: what moves bytes between memory and a file, many operations at once.

use crate::entry::Entry;
use crate::file::{BlockFile, Pages};
use crate::store::{Core, Done, Failure, Memory};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

mod ring;
mod workers;
pub use ring::Ring;
pub use workers::Workers;

/// A block on its way.
pub struct Operation {
    pub(crate) core: Arc<Core>,
    pub(crate) write: bool,
    pub(crate) entry: Entry,
    pub(crate) memory: Memory,
    /// Where its bytes are while direct I/O moves them, if it cannot take those of the memory.
    pub(crate) bounce: Option<Pages>,
    pub(crate) done: Option<Done>,
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err(Failure::GivenUp));
        }
    }
}

/// What an operation reads or writes.
pub(crate) struct Io {
    pub(crate) write: bool,
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) offset: u64,
}

/// Moves bytes. No call but `wait` and `stop` waits.
pub trait Engine: Send + Sync {
    /// Takes an operation, which is ended once, in a thread of the engine's; reads go before writes. A stopped engine
    /// gives it up.
    fn submit(&self, operation: Operation);

    /// Writes that have not ended.
    fn writes(&self) -> usize;

    /// Waits until nothing is on its way; false when `deadline` passes first.
    fn wait(&self, deadline: Option<Instant>) -> bool;

    /// Takes no more, waits as `wait`, gives up what was not begun, and ends the threads but for those that the system
    /// does not answer.
    fn stop(&self, deadline: Option<Instant>);
}

/// The engine that this system has: a ring where it may be had, threads otherwise.
///
/// # Errors
/// The system starts no threads.
pub fn best(file: &Arc<dyn BlockFile>, depth: usize) -> io::Result<Box<dyn Engine>> {
    match Ring::start(Arc::clone(file), depth) {
        Ok(ring) => Ok(Box::new(ring)),
        Err(_) => Ok(Box::new(Workers::start(file, depth)?)),
    }
}

/// Operations that wait for a thread, and how many are on their way.
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Where its threads are. In a forked process the lock may be held by one that is not there.
    process: u32,
}

impl Default for Queue {
    fn default() -> Queue {
        Queue { state: Mutex::default(), changed: Condvar::default(), process: std::process::id() }
    }
}

#[derive(Default)]
struct State {
    reads: VecDeque<Operation>,
    writes: VecDeque<Operation>,
    running_writes: usize,
    running: usize,
    closed: bool,
}

impl State {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.reads.is_empty() && self.writes.is_empty()
    }

    fn pop(&mut self) -> Option<Operation> {
        let next = self.reads.pop_front().or_else(|| self.writes.pop_front())?;
        self.running += 1;
        self.running_writes += usize::from(next.write);
        Some(next)
    }
}

impl Queue {
    pub(crate) fn push(&self, operation: Operation) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return drop(operation); // it is given up
        }
        let queue = if operation.write { &mut state.writes } else { &mut state.reads };
        queue.push_back(operation);
        drop(state);
        self.changed.notify_all();
    }

    /// The next operation, once there is one; `None` when there will be none.
    pub(crate) fn next(&self) -> Option<Operation> {
        let mut state = self.state.lock();
        loop {
            match state.pop() {
                None if !state.closed => self.changed.wait(&mut state),
                next => return next,
            }
        }
    }

    /// The next operation if there is one now.
    pub(crate) fn try_next(&self) -> Option<Operation> {
        self.state.lock().pop()
    }

    /// An operation that was taken has ended.
    pub(crate) fn ended(&self, write: bool) {
        let mut state = self.state.lock();
        state.running -= 1;
        state.running_writes -= usize::from(write);
        if state.is_idle() {
            self.changed.notify_all();
        }
    }

    pub(crate) fn writes(&self) -> usize {
        let state = self.state.lock();
        state.writes.len() + state.running_writes
    }

    pub(crate) fn wait(&self, deadline: Option<Instant>) -> bool {
        let mut state = self.state.lock();
        while !state.is_idle() {
            match deadline {
                None => self.changed.wait(&mut state),
                Some(deadline) => {
                    if self.changed.wait_until(&mut state, deadline).timed_out() && !state.is_idle() {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Takes no more, waits, and gives up what was not begun. Gives whether nothing is on its way any more.
    pub(crate) fn close(&self, deadline: Option<Instant>) -> bool {
        if self.process != std::process::id() {
            return false;
        }
        self.state.lock().closed = true;
        self.changed.notify_all();
        self.wait(deadline);
        let rest: Vec<Operation> = {
            let mut state = self.state.lock();
            let State { reads, writes, .. } = &mut *state;
            reads.drain(..).chain(writes.drain(..)).collect()
        };
        drop(rest); // they are given up
        self.changed.notify_all();
        self.state.lock().is_idle()
    }
}
