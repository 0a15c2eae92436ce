//! A mover whose lanes are in another process: the scheduler's side. The other is a [`Worker`](crate::worker::Worker).
//!
//! Calls put jobs into a queue; a thread writes them, loads first, and another reads how they ended. A worker that
//! hangs up, or is silent for too long, is lost: its jobs fail and its memory is out of reach, until one joins again.
//!
//! What is lost may only be stopped, or slow. So that it never copies into pages that belong to others by now, it
//! copies until a time that it is told by every ping and before which it is not taken for dead.

use crate::job::{Direction, JobId, Outcome};
use crate::lanes::Lanes;
use crate::mover::{Memory, Mover, Task};
use crate::units::UnitSet;
use crate::wire::{Deadline, Frames, Hello, LinkError, Message, greet};
use link::Link;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

mod link;
#[cfg(test)]
mod tests;

/// The mover of a shard in another process. Clones are the same mover: keep one to let a worker join again.
#[derive(Clone)]
pub struct RemoteMover {
    shared: Arc<Shared>,
}

struct Shared {
    hello: Hello,
    /// A worker that is silent for this long is lost.
    patience: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Worker {
    #[default]
    Gone,
    Joined,
    /// It is lost, and what it had is being ended.
    Leaving,
}

#[derive(Default)]
struct State {
    worker: Worker,
    /// How many have joined.
    joins: u64,
    /// On their way: not written yet, or not heard of yet.
    jobs: HashMap<JobId, InFlight>,
    loads: VecDeque<JobId>,
    stores: VecDeque<JobId>,
    /// Stores among the jobs.
    storing: usize,
    /// What nobody was told of yet.
    memory: Option<Memory>,
    stopped: bool,
    /// The worker is to be told to end.
    ending: bool,
    threads: Vec<JoinHandle<()>>,
}

struct InFlight {
    task: Arc<dyn Task>,
    /// The worker was given it.
    sent: bool,
    /// The worker was told to give it up.
    cancelled: bool,
}

impl RemoteMover {
    /// Silence after which a worker is lost, if nothing else is said.
    pub const PATIENCE: Duration = Duration::from_secs(5);

    /// Greets the worker at the other end of `stream`, which must agree with `hello`. Waits for its answer, at most
    /// `patience`, which is also how long it may be silent later: 8 ms to an hour.
    ///
    /// # Errors
    /// No answer, or another than expected.
    pub fn join(stream: UnixStream, hello: Hello, patience: Duration) -> Result<RemoteMover, LinkError> {
        let patience = patience.clamp(Duration::from_millis(8), Duration::from_hours(1));
        let (state, changed) = (Mutex::default(), Condvar::new());
        let mover = RemoteMover { shared: Arc::new(Shared { hello, patience, state, changed }) };
        mover.rejoin(stream)?;
        Ok(mover)
    }

    /// Lets a worker take the place of the one that was lost. If that is not known to be lost yet, waits until it is,
    /// at most as long as it may be silent.
    ///
    /// # Errors
    /// As for [`RemoteMover::join`]; the worker is not lost; the mover was stopped.
    pub fn rejoin(&self, stream: UnixStream) -> Result<(), LinkError> {
        let Shared { hello, patience, .. } = &*self.shared;
        let deadline = Deadline::after(*patience);
        let mut frames = greet(&stream, hello, deadline)?;
        let held = inventory(&mut frames, &stream, hello, deadline)?;
        self.shared.begin(stream, frames, held)
    }

    /// Whether there is a worker.
    pub fn is_joined(&self) -> bool {
        self.shared.state.lock().worker == Worker::Joined
    }
}

impl Mover for RemoteMover {
    fn has_room(&self, jobs: usize) -> bool {
        let state = self.shared.state.lock();
        state.takes_jobs() && state.storing + jobs <= Lanes::MOST_STORES
    }

    fn submit(&self, tasks: Vec<Arc<dyn Task>>) {
        let mut state = self.shared.state.lock();
        if !state.takes_jobs() {
            let outcome = if state.stopped { Outcome::Cancelled } else { self.shared.failed("is lost") };
            drop(state);
            end_all(&tasks, &outcome);
            return;
        }
        for task in tasks {
            let (id, direction) = (task.job().id, task.job().direction);
            match direction {
                Direction::Load => state.loads.push_back(id),
                Direction::Store => state.stores.push_back(id),
            }
            state.storing += usize::from(direction == Direction::Store);
            state.jobs.insert(id, InFlight { task, sent: false, cancelled: false });
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    fn drain(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.state.lock();
        while !state.jobs.is_empty() {
            match deadline {
                Some(deadline) if Instant::now() >= deadline => return false,
                Some(deadline) => _ = self.shared.changed.wait_until(&mut state, deadline),
                None => self.shared.changed.wait(&mut state),
            }
        }
        true
    }

    /// Takes as long as the worker may be silent longer, if it does not hang up.
    fn stop(&self, timeout: Duration) {
        self.shared.state.lock().stopped = true;
        self.drain(timeout);
        self.shared.state.lock().ending = true;
        self.shared.changed.notify_all();
        let threads = std::mem::take(&mut self.shared.state.lock().threads);
        join(threads);
    }

    fn take_memory(&self) -> Option<Memory> {
        self.shared.state.lock().memory.take()
    }
}

impl State {
    fn takes_jobs(&self) -> bool {
        self.worker == Worker::Joined && !self.stopped && self.memory.is_none()
    }

    fn forget(&mut self, id: JobId) {
        let job = self.jobs.remove(&id);
        let stored = job.is_some_and(|job| job.task.job().direction == Direction::Store);
        self.storing -= usize::from(stored);
    }
}

impl Shared {
    /// A worker has joined.
    fn begin(self: &Arc<Shared>, stream: UnixStream, frames: Frames, held: UnitSet) -> Result<(), LinkError> {
        let stream = Arc::new(stream);
        let writing = Arc::clone(&stream);
        let patience = Instant::now() + self.patience;
        let mut state = self.state.lock();
        while state.worker != Worker::Gone && Instant::now() < patience {
            self.changed.wait_until(&mut state, patience);
        }
        if state.worker != Worker::Gone {
            return Err(LinkError::Taken(self.hello.shard));
        }
        if state.stopped {
            return Err(LinkError::Stopped);
        }
        state.joins += 1;
        let reading = Arc::new(Link::new(Arc::clone(self), state.joins));
        let link = Arc::clone(&reading);
        let thread = |what| std::thread::Builder::new().name(format!("pk-{what}-{}", self.hello.shard));
        // Both wait for the lock, and the writer ends if there is no worker then.
        let writer = thread("write").spawn(move || link.write(&writing))?;
        let reader = thread("read").spawn(move || reading.read(&stream, frames))?;
        let former = std::mem::replace(&mut state.threads, vec![writer, reader]);
        state.worker = Worker::Joined;
        state.memory = Some(Memory::Holds(held));
        drop(state);
        join(former);
        Ok(())
    }

    /// The worker is lost; `why` says how.
    fn lose(&self, why: &str) {
        let mut state = self.state.lock();
        state.worker = Worker::Leaving;
        state.memory = Some(Memory::Lost);
        state.loads.clear();
        state.stores.clear();
        let outcome = if state.ending { Outcome::Cancelled } else { self.failed(why) };
        let tasks: Vec<Arc<dyn Task>> = state.jobs.values().map(|job| Arc::clone(&job.task)).collect();
        drop(state);
        end_all(&tasks, &outcome);
        let mut state = self.state.lock();
        state.jobs.clear();
        state.storing = 0;
        state.worker = Worker::Gone;
        drop(state);
        self.changed.notify_all();
    }

    fn failed(&self, why: &str) -> Outcome {
        Outcome::Failed(format!("the worker of shard {} {why}", self.hello.shard))
    }
}

fn end_all(tasks: &[Arc<dyn Task>], outcome: &Outcome) {
    for task in tasks {
        task.end(outcome.clone());
    }
}

fn join(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        _ = thread.join(); // nothing in it panics
    }
}

/// What a worker that joins says that it holds.
fn inventory(
    frames: &mut Frames,
    stream: &UnixStream,
    hello: &Hello,
    deadline: Deadline,
) -> Result<UnitSet, LinkError> {
    let mut held = UnitSet::default();
    loop {
        match frames.expect(stream, deadline)? {
            Message::Inventory { first, words } => {
                let end = u64::from(first) + words.len() as u64 * 64;
                if end > u64::from(hello.units).next_multiple_of(64) {
                    return Err(LinkError::Unexpected(format!("an inventory of {end} units")));
                }
                held.insert_words(first, &words);
            }
            Message::Ready => return Ok(held),
            other => return Err(LinkError::Unexpected(format!("{other:?} in an inventory"))),
        }
    }
}
