//! The connection to one worker: a thread that writes to it, and one that reads.

use super::{Shared, State, Worker};
use crate::job::{JobId, Outcome};
use crate::wire::{Frames, LinkError, Message, now};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes that are written at once, about: loads that come meanwhile go before what is left.
const BATCH: usize = 64 << 10;
/// How long a request to cancel may go unseen.
const CANCEL: Duration = Duration::from_millis(5);

/// A connection.
pub(super) struct Link {
    shared: Arc<Shared>,
    /// Which of the mover's it is.
    number: u64,
    /// When the worker was last heard of, by [`now`].
    heard: AtomicU64,
}

impl Link {
    pub(super) fn new(shared: Arc<Shared>, number: u64) -> Link {
        Link { shared, number, heard: AtomicU64::new(now()) }
    }

    /// Before this time the worker is not taken for dead, unless it hangs up.
    fn alive_until(&self) -> u64 {
        self.heard.load(Ordering::Relaxed) + self.shared.patience.as_nanos() as u64
    }

    /// The writer's life.
    pub(super) fn write(&self, mut stream: &UnixStream) {
        let mut frames = Vec::new();
        let mut ping = Instant::now();
        let mut ended = false;
        while !ended && self.gather(&mut frames, &mut ping, &mut ended) {
            if stream.write_all(&frames).is_err() {
                return; // the reader hears of it
            }
            frames.clear();
        }
    }

    /// Waits for something to write. False when the connection is over.
    fn gather(&self, frames: &mut Vec<u8>, ping: &mut Instant, ended: &mut bool) -> bool {
        let mut state = self.shared.state.lock();
        loop {
            if state.worker != Worker::Joined || state.joins != self.number {
                return false;
            }
            let now = Instant::now();
            if now >= *ping {
                *ping = now + self.shared.patience / 8;
                // Sooner than it is taken for dead: what it has begun by then is a page.
                let margin = self.shared.patience.as_nanos() as u64 / 4;
                Message::Ping { until: self.alive_until() - margin }.encode(frames);
            }
            if state.ending {
                Message::Shutdown.encode(frames);
                *ended = true;
            } else {
                state.jobs_to_send(frames);
                state.jobs_to_cancel(frames);
            }
            if !frames.is_empty() {
                return true;
            }
            let wake = if state.jobs.is_empty() { *ping } else { (*ping).min(now + CANCEL) };
            self.shared.changed.wait_until(&mut state, wake);
        }
    }

    /// The reader's life.
    pub(super) fn read(&self, stream: &UnixStream, frames: Frames) {
        let why = self.hear(stream, frames).to_string();
        // A worker that talks nonsense may copy still: it hears that it is given up, and hangs up when it is done.
        _ = stream.shutdown(Shutdown::Write);
        self.await_end(stream);
        _ = stream.shutdown(Shutdown::Both);
        self.shared.lose(&format!("is lost: {why}"));
    }

    /// Hears what the worker says, for as long as it makes sense.
    fn hear(&self, stream: &UnixStream, mut frames: Frames) -> LinkError {
        loop {
            match frames.next(stream) {
                Ok(Some(Message::Pong)) => {}
                Ok(Some(Message::Ended(id, outcome))) => {
                    if !self.shared.ended(id, outcome) {
                        return LinkError::Unexpected(format!(
                            "the end of job {}, which it does not have",
                            id.0
                        ));
                    }
                }
                Ok(Some(other)) => return LinkError::Unexpected(format!("{other:?}")),
                Ok(None) if now() >= self.alive_until() => return LinkError::Silent(self.shared.patience),
                Ok(None) => continue,
                Err(error) => return error,
            }
            self.heard.store(now(), Ordering::Relaxed);
        }
    }

    /// Waits until the worker has hung up or may be taken for dead.
    fn await_end(&self, mut stream: &UnixStream) {
        let mut ignored = [0; 4096];
        while now() < self.alive_until() {
            match stream.read(&mut ignored) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                    _ => return,
                },
            }
        }
    }
}

impl State {
    /// Writes jobs that wait, loads first.
    fn jobs_to_send(&mut self, frames: &mut Vec<u8>) {
        while frames.len() < BATCH {
            let Some(id) = self.loads.pop_front().or_else(|| self.stores.pop_front()) else { return };
            if let Some(job) = self.jobs.get_mut(&id) {
                job.sent = true;
                Message::Job(job.task.job().clone()).encode(frames);
            }
        }
    }

    fn jobs_to_cancel(&mut self, frames: &mut Vec<u8>) {
        for (&id, job) in &mut self.jobs {
            if job.sent && !job.cancelled && job.task.is_cancelled() {
                job.cancelled = true;
                Message::Cancel(id).encode(frames);
            }
        }
    }
}

impl Shared {
    /// The worker says that a job has ended. False when it was given no such job.
    fn ended(&self, id: JobId, outcome: Outcome) -> bool {
        let state = self.state.lock();
        let Some(job) = state.jobs.get(&id).filter(|job| job.sent) else { return false };
        let task = Arc::clone(&job.task);
        drop(state);
        task.end(outcome);
        let mut state = self.state.lock();
        state.forget(id);
        if state.jobs.is_empty() {
            self.changed.notify_all();
        }
        true
    }
}
