//! A mover in a process of its own: the worker's side. The other is a [`RemoteMover`](crate::remote::RemoteMover).

use crate::job::{Direction, Job, JobId, Outcome};
use crate::lanes::Lanes;
use crate::mover::{Mover, Task};
use crate::units::UnitSet;
use crate::wire::{Deadline, Frames, Hello, INVENTORY_WORDS, LinkError, Message, greet, now, send};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// Lanes, and what is known of the memory behind them.
pub struct Worker {
    hello: Hello,
    lanes: Lanes,
    /// Units that hold what was last stored in them.
    held: Arc<Mutex<UnitSet>>,
}

/// How a connection ended that nothing was wrong with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Served {
    /// The scheduler is done.
    ShutDown,
    /// The scheduler hung up, or its process ended: another may connect.
    Left,
}

impl Worker {
    /// How long the scheduler may take to say hello.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// A worker that holds nothing yet. `hello` says what the engine of `lanes` copies between.
    pub fn new(hello: Hello, lanes: Lanes) -> Worker {
        Worker { hello, lanes, held: Arc::default() }
    }

    /// Does what the scheduler at the other end of `stream` says, until it hangs up or says that it is done. Nothing
    /// is copied any more afterwards, and the scheduler is told of no end before it is one.
    ///
    /// # Errors
    /// A scheduler that does not agree with this worker's hello, or talks nonsense; the stream's own errors.
    pub fn serve(&mut self, stream: UnixStream) -> Result<Served, LinkError> {
        let mut frames = greet(&stream, &self.hello, Deadline::after(Self::PATIENCE))?;
        stream.set_read_timeout(None)?;
        self.send_inventory(&stream)?;
        let orders = Arc::new(Orders {
            held: Arc::clone(&self.held),
            until: AtomicU64::new(0),
            over: AtomicBool::new(false),
            on_their_way: Mutex::default(),
            said: Mutex::default(),
            changed: Condvar::new(),
        });
        let stream = Arc::new(stream);
        let (writing, writer) = (Arc::clone(&stream), Arc::clone(&orders));
        let writer =
            std::thread::Builder::new().name("pk-worker".into()).spawn(move || writer.write(&writing))?;
        let served = self.hear(&stream, &mut frames, &orders);
        orders.over.store(true, Ordering::Relaxed);
        self.lanes.drain(Duration::MAX);
        orders.said.lock().over = true;
        orders.changed.notify_all();
        _ = writer.join(); // nothing in it panics
        drop(stream); // the last: hangs up
        served
    }

    /// Ends the lanes.
    pub fn stop(&self) {
        self.lanes.stop(Duration::ZERO);
    }

    fn send_inventory(&self, stream: &UnixStream) -> Result<(), LinkError> {
        let held = self.held.lock().clone();
        let parts = (0..).step_by(INVENTORY_WORDS * 64).zip(held.words().chunks(INVENTORY_WORDS));
        for (first, words) in parts.filter(|(_, words)| words.iter().any(|&word| word != 0)) {
            send(stream, &Message::Inventory { first, words: words.to_vec() })?;
        }
        Ok(send(stream, &Message::Ready)?)
    }

    /// Carries out what the scheduler says.
    fn hear(
        &self,
        stream: &UnixStream,
        frames: &mut Frames,
        orders: &Arc<Orders>,
    ) -> Result<Served, LinkError> {
        loop {
            match frames.next(stream) {
                Ok(Some(Message::Job(job))) => self.begin(job, orders)?,
                Ok(Some(Message::Cancel(id))) => orders.cancel(id),
                Ok(Some(Message::Ping { until })) => orders.answer(until),
                Ok(Some(Message::Shutdown)) => {
                    orders.cancel_all();
                    return Ok(Served::ShutDown);
                }
                Ok(Some(other)) => return Err(LinkError::Unexpected(format!("{other:?}"))),
                Ok(None) => {}
                Err(LinkError::Closed) => return Ok(Served::Left),
                Err(error) => return Err(error),
            }
        }
    }

    /// Begins a job, of which nothing is taken on trust: the engine does not look twice.
    fn begin(&self, job: Job, orders: &Arc<Orders>) -> Result<(), LinkError> {
        let Hello { units, pages, .. } = self.hello;
        let wrong = |what, number, of| LinkError::Unexpected(format!("a job for {what} {number} of {of}"));
        if let Some(unit) = job.units.iter().find(|unit| unit.0 >= units) {
            return Err(wrong("unit", unit.0, units));
        }
        if let Some(page) = job.pages.iter().find(|page| page.0 >= pages) {
            return Err(wrong("page", page.0, pages));
        }
        if job.direction == Direction::Store {
            let mut held = self.held.lock();
            job.units.iter().for_each(|&unit| held.remove(unit));
        }
        let id = job.id;
        let order = Arc::new(Order { job, cancelled: AtomicBool::new(false), orders: Arc::clone(orders) });
        if orders.on_their_way.lock().insert(id, Arc::clone(&order)).is_some() {
            return Err(LinkError::Unexpected(format!("job {} twice", id.0)));
        }
        self.lanes.submit(vec![order]);
        Ok(())
    }
}

/// What one scheduler has ordered.
struct Orders {
    held: Arc<Mutex<UnitSet>>,
    /// When copies end that the scheduler may have given up by then, by [`now`].
    until: AtomicU64,
    /// The scheduler has gone.
    over: AtomicBool,
    on_their_way: Mutex<HashMap<JobId, Arc<Order>>>,
    said: Mutex<Said>,
    changed: Condvar,
}

/// What is to be said to the scheduler.
#[derive(Default)]
struct Said {
    ended: Vec<(JobId, Outcome)>,
    pong: bool,
    over: bool,
}

impl Orders {
    fn answer(&self, until: u64) {
        self.until.fetch_max(until, Ordering::Relaxed);
        self.said.lock().pong = true;
        self.changed.notify_one();
    }

    /// Nothing to do for a job that has ended meanwhile.
    fn cancel(&self, id: JobId) {
        if let Some(order) = self.on_their_way.lock().get(&id) {
            order.cancelled.store(true, Ordering::Relaxed);
        }
    }

    fn cancel_all(&self) {
        self.on_their_way.lock().values().for_each(|order| order.cancelled.store(true, Ordering::Relaxed));
    }

    /// The writer's life.
    fn write(&self, mut stream: &UnixStream) {
        let mut frames = Vec::new();
        loop {
            let mut said = self.said.lock();
            while said.ended.is_empty() && !said.pong && !said.over {
                self.changed.wait(&mut said);
            }
            for (id, outcome) in said.ended.drain(..) {
                Message::Ended(id, outcome).encode(&mut frames);
            }
            if std::mem::take(&mut said.pong) {
                Message::Pong.encode(&mut frames);
            }
            let over = said.over;
            drop(said);
            if stream.write_all(&frames).is_err() {
                // Ends this side's reading; the scheduler hears of nothing before the copies have ended.
                _ = stream.shutdown(Shutdown::Read);
                return;
            }
            if over {
                return;
            }
            frames.clear();
        }
    }
}

/// A job of the scheduler's.
struct Order {
    job: Job,
    cancelled: AtomicBool,
    orders: Arc<Orders>,
}

impl Order {
    fn is_late(&self) -> bool {
        now() >= self.orders.until.load(Ordering::Relaxed)
    }
}

impl Task for Order {
    fn job(&self) -> &Job {
        &self.job
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.orders.over.load(Ordering::Relaxed) || self.is_late()
    }

    fn end(&self, outcome: Outcome) {
        let Order { job, orders, .. } = self;
        let outcome = match outcome {
            Outcome::Cancelled if !self.cancelled.load(Ordering::Relaxed) => {
                Outcome::Failed("the worker heard no more of the scheduler".into())
            }
            outcome => outcome,
        };
        if job.direction == Direction::Store && outcome == Outcome::Done {
            let mut held = orders.held.lock();
            job.units.iter().for_each(|&unit| held.insert(unit));
        }
        orders.on_their_way.lock().remove(&job.id);
        orders.said.lock().ended.push((job.id, outcome));
        orders.changed.notify_one();
    }
}
