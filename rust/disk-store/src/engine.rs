//! Engines: what moves bytes between memory and a file, many operations at once.

use crate::file::{BlockFile, is_refusal};
use crate::operation::Io;
pub use crate::operation::Operation;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

mod ring;
mod workers;
pub use ring::Ring;
pub use workers::Workers;

/// Moves bytes. No call but `wait` and `stop` waits.
pub trait Engine: Send + Sync {
    /// Takes an operation, which is ended once, in a thread of the engine's; reads go before writes, and writes leave
    /// them room. A stopped engine gives it up.
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

/// Reads or writes in the calling thread, from byte `from` of the operation's on; through the page cache where the
/// system refuses to go around it.
pub(crate) fn carry_out(file: &dyn BlockFile, io: &Io, from: usize) -> io::Result<()> {
    let was_direct = file.is_direct();
    match try_once(file, io, from) {
        Err(error) if was_direct && is_refusal(&error) => {
            file.give_up_direct();
            try_once(file, io, from)
        }
        done => done,
    }
}

fn try_once(file: &dyn BlockFile, io: &Io, from: usize) -> io::Result<()> {
    let (len, offset) = (io.len - from, io.offset + from as u64);
    // SAFETY: the operation's memory, which is its own to read or to write until it ends.
    unsafe {
        let start = io.start.as_ptr().add(from);
        if io.write {
            file.write(std::slice::from_raw_parts(start, len), offset)
        } else {
            file.read(std::slice::from_raw_parts_mut(start, len), offset)
        }
    }
}

/// Operations that run at once in an engine of such a depth: where writes fill it, reads have a quarter more.
pub(crate) fn places(depth: usize) -> usize {
    depth + depth.div_ceil(4)
}

/// Operations that wait for a thread, and how many are on their way.
pub(crate) struct Queue {
    state: Mutex<State>,
    /// There is one more, or there will be none.
    more: Condvar,
    /// Nothing is on its way.
    idle: Condvar,
    /// Where its threads are. In a forked process the lock may be held by one that is not there.
    process: u32,
}

struct State {
    reads: VecDeque<Operation>,
    writes: VecDeque<Operation>,
    running_reads: usize,
    running_writes: usize,
    /// Most reads, and most writes.
    depth: usize,
    closed: bool,
}

impl State {
    fn is_idle(&self) -> bool {
        self.running_reads + self.running_writes == 0 && self.reads.is_empty() && self.writes.is_empty()
    }

    /// Reads first. Writes leave places for them: a disk that answers no write goes on reading.
    fn pop(&mut self) -> Option<Operation> {
        if self.running_reads + self.running_writes == places(self.depth) {
            return None;
        }
        let (reads, writes) = (self.running_reads < self.depth, self.running_writes < self.depth);
        let read = if reads { self.reads.pop_front() } else { None };
        let next = read.or_else(|| if writes { self.writes.pop_front() } else { None })?;
        *self.running(next.write) += 1;
        Some(next)
    }

    fn running(&mut self, write: bool) -> &mut usize {
        if write { &mut self.running_writes } else { &mut self.running_reads }
    }
}

impl Queue {
    /// A queue of which up to `depth` reads or `depth` writes run at once, and both in `places(depth)`.
    pub(crate) fn new(depth: usize) -> Arc<Queue> {
        let state = State {
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            running_reads: 0,
            running_writes: 0,
            depth,
            closed: false,
        };
        Arc::new(Queue {
            state: Mutex::new(state),
            more: Condvar::new(),
            idle: Condvar::new(),
            process: std::process::id(),
        })
    }

    pub(crate) fn push(&self, operation: Operation) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return drop(operation); // it is given up
        }
        let queue = if operation.write { &mut state.writes } else { &mut state.reads };
        queue.push_back(operation);
        drop(state);
        self.more.notify_one();
    }

    /// The next operation, once there is one; `None` when there will be none.
    pub(crate) fn next(&self) -> Option<Operation> {
        let mut state = self.state.lock();
        loop {
            match state.pop() {
                None if !state.closed => self.more.wait(&mut state),
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
        *state.running(write) -= 1;
        if state.is_idle() {
            self.idle.notify_all();
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
                None => self.idle.wait(&mut state),
                Some(deadline) => {
                    if self.idle.wait_until(&mut state, deadline).timed_out() && !state.is_idle() {
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
        self.more.notify_all();
        self.wait(deadline);
        let mut state = self.state.lock();
        let State { reads, writes, .. } = &mut *state;
        let rest: Vec<Operation> = reads.drain(..).chain(writes.drain(..)).collect();
        let idle = state.is_idle();
        drop(state);
        self.idle.notify_all();
        drop(rest); // they are given up
        idle
    }
}
