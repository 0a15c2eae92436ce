//! Lanes: threads that carry jobs out, loads before stores.
//!
//! A lane never takes the index's lock or calls anybody: it says how a job ended in a list, where the next call on
//! the connector finds it, and settles the transfer that the job was part of.

use crate::copy::CopyEngine;
use crate::job::{Direction, Job, JobId, Outcome};
use completion::{Completer, Completion, pending};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// One copy as whoever asked for it sees it: several jobs, settled when the last has ended.
pub struct Transfer {
    left: AtomicUsize,
    worst: Mutex<Outcome>,
    completer: Completer,
    /// Named among the finished transfers.
    tag: Option<u64>,
}

impl Transfer {
    /// A transfer of `jobs` jobs.
    pub fn of(jobs: usize, tag: Option<u64>) -> (Arc<Transfer>, Completion) {
        let (completer, completion) = pending();
        let (left, worst) = (AtomicUsize::new(jobs), Mutex::new(Outcome::Done));
        (Arc::new(Transfer { left, worst, completer, tag }), completion)
    }

    /// One of its jobs has ended. Gives how the whole ended if it was the last.
    fn end(&self, outcome: &Outcome) -> Option<Outcome> {
        if *outcome != Outcome::Done {
            let mut worst = self.worst.lock();
            if !matches!(*worst, Outcome::Failed(_)) {
                worst.clone_from(outcome);
            }
        }
        // What the other jobs wrote is visible to whoever ends the last.
        (self.left.fetch_sub(1, Ordering::AcqRel) == 1).then(|| self.worst.lock().clone())
    }

    pub(crate) fn settle(&self, outcome: Outcome) {
        _ = match outcome {
            Outcome::Done => self.completer.finish(),
            Outcome::Failed(why) => self.completer.fail(why),
            Outcome::Cancelled => self.completer.abandon(),
        };
    }
}

/// What has ended and nobody was told of yet.
#[derive(Default, Debug)]
pub struct Ended {
    /// Jobs, in the order in which they ended.
    pub jobs: Vec<(JobId, Outcome)>,
    /// Transfers that have a tag.
    pub transfers: Vec<(u64, Outcome)>,
}

/// The threads of one connector.
pub struct Lanes {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    engine: Box<dyn CopyEngine>,
    queue: Mutex<Queue>,
    changed: Condvar,
    ended: Mutex<Ended>,
    /// Whether `ended` has something, for those who only ask.
    has_ended: AtomicBool,
    /// What runs is to be given up.
    give_up: AtomicBool,
}

struct Task {
    job: Job,
    transfer: Arc<Transfer>,
}

#[derive(Default)]
struct Queue {
    loads: VecDeque<Task>,
    stores: VecDeque<Task>,
    running: usize,
    closed: bool,
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.loads.is_empty() && self.stores.is_empty() && self.running == 0
    }
}

impl Lanes {
    /// Most stores that wait for a lane. When there are more, the lanes have fallen behind.
    pub const MOST_STORES: usize = 256;

    /// Starts `lanes` threads.
    ///
    /// # Errors
    /// The system starts no more threads.
    pub fn start(lanes: usize, engine: Box<dyn CopyEngine>) -> std::io::Result<Lanes> {
        let shared = Arc::new(Shared {
            engine,
            queue: Mutex::default(),
            changed: Condvar::new(),
            ended: Mutex::default(),
            has_ended: AtomicBool::new(false),
            give_up: AtomicBool::new(false),
        });
        let started = Lanes { shared, threads: Mutex::default() };
        for number in 0..lanes {
            let shared = Arc::clone(&started.shared);
            let thread = std::thread::Builder::new().name(format!("pk-lane-{number}"));
            match thread.spawn(move || shared.work()) {
                Ok(thread) => started.threads.lock().push(thread),
                Err(error) => {
                    started.stop(Duration::ZERO);
                    return Err(error);
                }
            }
        }
        Ok(started)
    }

    /// Whether `jobs` more stores may be put in.
    pub fn has_room(&self, jobs: usize) -> bool {
        let queue = self.shared.queue.lock();
        !queue.closed && queue.stores.len() + jobs <= Self::MOST_STORES
    }

    /// Puts jobs of one transfer in. False, and nothing is done, when the lanes are closed.
    pub fn submit(&self, jobs: Vec<Job>, transfer: &Arc<Transfer>) -> bool {
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            return false;
        }
        for job in jobs {
            let task = Task { transfer: Arc::clone(transfer), job };
            match task.job.direction {
                Direction::Load => queue.loads.push_back(task),
                Direction::Store => queue.stores.push_back(task),
            }
        }
        drop(queue);
        self.shared.changed.notify_all();
        true
    }

    /// Takes what has ended since the last call. Costs one atomic load when that is nothing.
    pub fn take_ended(&self) -> Ended {
        if !self.shared.has_ended.swap(false, Ordering::Acquire) {
            return Ended::default();
        }
        std::mem::take(&mut *self.shared.ended.lock())
    }

    /// Jobs that wait or run.
    pub fn busy(&self) -> usize {
        let queue = self.shared.queue.lock();
        queue.loads.len() + queue.stores.len() + queue.running
    }

    /// Waits until nothing waits or runs; false when `timeout` passes first.
    pub fn drain(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let mut queue = self.shared.queue.lock();
        while !queue.is_idle() {
            match deadline {
                Some(deadline) if Instant::now() >= deadline => return false,
                Some(deadline) => _ = self.shared.changed.wait_until(&mut queue, deadline),
                None => self.shared.changed.wait(&mut queue),
            }
        }
        true
    }

    /// Takes no more jobs, gives those in flight `timeout` to end, cancels what is left, and ends the threads.
    /// Calling it again does nothing.
    pub fn stop(&self, timeout: Duration) {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_all();
        self.drain(timeout);
        let rest: Vec<Task> = {
            let mut queue = self.shared.queue.lock();
            let Queue { loads, stores, .. } = &mut *queue;
            loads.drain(..).chain(stores.drain(..)).collect()
        };
        self.shared.give_up.store(true, Ordering::Relaxed);
        for task in rest {
            self.shared.end(&task, Outcome::Cancelled);
        }
        for thread in std::mem::take(&mut *self.threads.lock()) {
            _ = thread.join(); // a lane catches its panics
        }
    }
}

impl Shared {
    /// A lane's life.
    fn work(&self) {
        while let Some(task) = self.next() {
            let give_up =
                || self.give_up.load(Ordering::Relaxed) || task.transfer.completer.is_cancel_requested();
            let copied = catch_unwind(AssertUnwindSafe(|| {
                if give_up() { Outcome::Cancelled } else { self.engine.copy(&task.job, &give_up) }
            }));
            self.end(&task, copied.unwrap_or_else(|_| Outcome::Failed("the copy panicked".into())));
            self.queue.lock().running -= 1;
            self.changed.notify_all();
        }
    }

    /// The next job; `None` when there is none and none will come.
    fn next(&self) -> Option<Task> {
        let mut queue = self.queue.lock();
        loop {
            let next = queue.loads.pop_front();
            if let Some(task) = next.or_else(|| queue.stores.pop_front()) {
                queue.running += 1;
                return Some(task);
            }
            if queue.closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    /// The job has ended. Whoever sees the transfer settled finds the job among those that have ended.
    fn end(&self, task: &Task, outcome: Outcome) {
        let whole = task.transfer.end(&outcome);
        let mut ended = self.ended.lock();
        ended.jobs.push((task.job.id, outcome));
        if let (Some(tag), Some(whole)) = (task.transfer.tag, &whole) {
            ended.transfers.push((tag, whole.clone()));
        }
        drop(ended);
        self.has_ended.store(true, Ordering::Release);
        if let Some(whole) = whole {
            task.transfer.settle(whole);
        }
    }
}
