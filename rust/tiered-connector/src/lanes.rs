//! Lanes: threads of this process that carry jobs out, loads before stores.

use crate::copy::CopyEngine;
use crate::job::{Direction, Outcome};
use crate::mover::{Mover, Task};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// The threads of one connector.
pub struct Lanes {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    engine: Box<dyn CopyEngine>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// What runs is to be given up.
    give_up: AtomicBool,
}

#[derive(Default)]
struct Queue {
    loads: VecDeque<Arc<dyn Task>>,
    stores: VecDeque<Arc<dyn Task>>,
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
}

impl Mover for Lanes {
    fn has_room(&self, jobs: usize) -> bool {
        let queue = self.shared.queue.lock();
        !queue.closed && queue.stores.len() + jobs <= Self::MOST_STORES
    }

    fn submit(&self, tasks: Vec<Arc<dyn Task>>) {
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            drop(queue);
            for task in tasks {
                task.end(Outcome::Cancelled);
            }
            return;
        }
        for task in tasks {
            match task.job().direction {
                Direction::Load => queue.loads.push_back(task),
                Direction::Store => queue.stores.push_back(task),
            }
        }
        drop(queue);
        self.shared.changed.notify_all();
    }

    fn drain(&self, timeout: Duration) -> bool {
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

    /// Ends the threads, too.
    fn stop(&self, timeout: Duration) {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_all();
        self.drain(timeout);
        let rest: Vec<Arc<dyn Task>> = {
            let mut queue = self.shared.queue.lock();
            let Queue { loads, stores, .. } = &mut *queue;
            loads.drain(..).chain(stores.drain(..)).collect()
        };
        self.shared.give_up.store(true, Ordering::Relaxed);
        for task in rest {
            task.end(Outcome::Cancelled);
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
            let give_up = || self.give_up.load(Ordering::Relaxed) || task.is_cancelled();
            let copied = catch_unwind(AssertUnwindSafe(|| {
                if give_up() { Outcome::Cancelled } else { self.engine.copy(task.job(), &give_up) }
            }));
            task.end(copied.unwrap_or_else(|_| Outcome::Failed("the copy panicked".into())));
            self.queue.lock().running -= 1;
            self.changed.notify_all();
        }
    }

    /// The next job; `None` when there is none and none will come.
    fn next(&self) -> Option<Arc<dyn Task>> {
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
}
