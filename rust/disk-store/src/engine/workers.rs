//! Threads that read and write, one operation each at a time.

use super::{Engine, Operation, Queue, carry_out, places};
use crate::file::BlockFile;
use parking_lot::Mutex;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Threads that call the file.
pub struct Workers {
    queue: Arc<Queue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// Starts threads for up to `depth` reads, or writes, and a quarter more of both together.
    ///
    /// # Errors
    /// The system starts no more.
    pub fn start(file: &Arc<dyn BlockFile>, depth: usize) -> io::Result<Workers> {
        let workers = Workers { queue: Queue::new(depth), threads: Mutex::default() };
        for number in 0..places(depth) {
            let (queue, file) = (Arc::clone(&workers.queue), Arc::clone(file));
            let thread = std::thread::Builder::new().name(format!("pk-disk-{number}"));
            match thread.spawn(move || work(&queue, &*file)) {
                Ok(thread) => workers.threads.lock().push(thread),
                Err(error) => {
                    workers.stop(None);
                    return Err(error);
                }
            }
        }
        Ok(workers)
    }
}

/// A worker's life.
fn work(queue: &Queue, file: &dyn BlockFile) {
    while let Some(mut operation) = queue.next() {
        let write = operation.write;
        // Where a file panics the operation is given up.
        _ = catch_unwind(AssertUnwindSafe(|| {
            let moved = operation.begin().and_then(|io| Ok(carry_out(file, &io, 0)?));
            operation.end(moved);
        }));
        queue.ended(write);
    }
}

impl Engine for Workers {
    fn submit(&self, operation: Operation) {
        self.queue.push(operation);
    }

    fn writes(&self) -> usize {
        self.queue.writes()
    }

    fn wait(&self, deadline: Option<Instant>) -> bool {
        self.queue.wait(deadline)
    }

    fn stop(&self, deadline: Option<Instant>) {
        let idle = self.queue.close(deadline);
        for thread in std::mem::take(&mut *self.threads.lock()) {
            if idle || thread.is_finished() {
                _ = thread.join(); // a worker catches its panics
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop(Some(Instant::now()));
    }
}
