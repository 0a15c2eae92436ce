use super::*;
use crate::copy::CopyEngine;
use crate::job::UnitId;
use crate::wire::VERSION;
use block_pool::{PageId, Step};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

const HELLO: Hello = Hello { shard: 0, units: 100, unit_bytes: 64, pages: 9 };
const SOON: Duration = Duration::from_secs(10);

/// An engine that ends a copy as it is told, or when it is given up.
struct Told(Mutex<Receiver<Outcome>>);

impl CopyEngine for Told {
    fn copy(&self, _: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        loop {
            if give_up() {
                return Outcome::Cancelled;
            }
            if let Ok(outcome) = self.0.lock().recv_timeout(Duration::from_millis(1)) {
                return outcome;
            }
        }
    }
}

/// A scheduler whose part the test plays.
struct Played {
    stream: UnixStream,
    frames: Frames,
    serving: JoinHandle<(Worker, Result<Served, LinkError>)>,
}

fn worker() -> (Worker, Sender<Outcome>) {
    let (go, told) = channel();
    let lanes = Lanes::start(1, Box::new(Told(Mutex::new(told)))).unwrap();
    (Worker::new(HELLO, lanes), go)
}

/// Greets a worker. Gives what it says that it holds.
fn serve(mut worker: Worker) -> (Played, Vec<u32>) {
    let (stream, theirs) = UnixStream::pair().unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let serving = std::thread::spawn(move || {
        let served = worker.serve(theirs);
        (worker, served)
    });
    let mut played = Played { stream, frames: Frames::default(), serving };
    played.says(&Message::Hello(VERSION, HELLO));
    assert_eq!(played.hears(), Message::Hello(VERSION, HELLO));
    let mut held = UnitSet::default();
    loop {
        match played.hears() {
            Message::Inventory { first, words } => held.insert_words(first, &words),
            other => break assert_eq!(other, Message::Ready),
        }
    }
    (played, held.iter().map(|unit| unit.0).collect())
}

fn job(id: u64, direction: Direction, unit: u32) -> Message {
    Message::Job(Job {
        id: JobId(id),
        direction,
        units: vec![UnitId(unit)],
        pages: vec![PageId(8)],
        after: Step(0),
    })
}

impl Played {
    fn hears(&mut self) -> Message {
        loop {
            if let Some(message) = self.frames.next(&self.stream).unwrap() {
                return message;
            }
        }
    }

    fn says(&self, message: &Message) {
        send(&self.stream, message).unwrap();
    }

    fn pings(&mut self, patience: Duration) {
        self.says(&Message::Ping { until: now() + patience.as_nanos() as u64 });
        assert_eq!(self.hears(), Message::Pong);
    }

    fn hangs_up(self) -> (Worker, Result<Served, LinkError>) {
        drop(self.stream);
        self.serving.join().unwrap()
    }
}

#[test]
fn jobs_end_as_the_engine_says() {
    let (worker, go) = worker();
    let (mut played, held) = serve(worker);
    assert!(held.is_empty());
    played.pings(SOON);
    let outcomes = [Outcome::Done, Outcome::Failed("a fault".into()), Outcome::Cancelled];
    for (id, outcome) in outcomes.into_iter().enumerate() {
        played.says(&job(id as u64, Direction::Store, 1));
        go.send(outcome.clone()).unwrap();
        let expected = match outcome {
            // Nobody asked for that.
            Outcome::Cancelled => Outcome::Failed("the worker heard no more of the scheduler".into()),
            outcome => outcome,
        };
        assert_eq!(played.hears(), Message::Ended(JobId(id as u64), expected));
    }
    played.says(&Message::Shutdown);
    let (worker, served) = played.hangs_up();
    assert_eq!(served.unwrap(), Served::ShutDown);
    worker.stop();
}

#[test]
fn a_cancelled_job_is_given_up() {
    let (worker, _go) = worker();
    let (mut played, _) = serve(worker);
    played.pings(SOON);
    played.says(&job(1, Direction::Load, 1));
    played.says(&Message::Cancel(JobId(1)));
    assert_eq!(played.hears(), Message::Ended(JobId(1), Outcome::Cancelled));
    played.says(&Message::Cancel(JobId(1)));
    played.pings(SOON);
    played.hangs_up().0.stop();
}

#[test]
fn a_shutdown_cancels_everything() {
    let (worker, _go) = worker();
    let (mut played, _) = serve(worker);
    played.pings(SOON);
    played.says(&job(1, Direction::Load, 1));
    played.says(&job(2, Direction::Store, 2));
    played.says(&Message::Shutdown);
    let mut ended = [played.hears(), played.hears()];
    ended.sort_by_key(|message| matches!(message, Message::Ended(JobId(2), _)));
    assert_eq!(ended, [1, 2].map(|id| Message::Ended(JobId(id), Outcome::Cancelled)));
    let (worker, served) = played.hangs_up();
    assert_eq!(served.unwrap(), Served::ShutDown);
    worker.stop();
}

#[test]
fn nothing_is_copied_after_the_time_that_the_scheduler_named() {
    let (worker, _go) = worker();
    let (mut played, _) = serve(worker);
    let late = Outcome::Failed("the worker heard no more of the scheduler".into());
    played.says(&job(1, Direction::Load, 1));
    assert_eq!(played.hears(), Message::Ended(JobId(1), late.clone()), "no time was named yet");
    played.pings(Duration::from_millis(50));
    let named = now();
    played.says(&job(2, Direction::Load, 1));
    assert_eq!(played.hears(), Message::Ended(JobId(2), late));
    assert!(now() - named < SOON.as_nanos() as u64);
    played.hangs_up().0.stop();
}

#[test]
fn the_next_scheduler_is_told_what_was_stored_last_and_ended_well() {
    let (worker, go) = worker();
    let (mut played, _) = serve(worker);
    played.pings(SOON);
    let stores = [(1, 2, Outcome::Done), (2, 70, Outcome::Done), (3, 71, Outcome::Failed("a fault".into()))];
    for (id, unit, outcome) in stores {
        played.says(&job(id, Direction::Store, unit));
        go.send(outcome).unwrap();
        played.hears();
    }
    // A store over an older one, on its way when the scheduler leaves.
    played.says(&job(4, Direction::Store, 2));
    played.pings(SOON);
    let (worker, served) = played.hangs_up();
    assert_eq!(served.unwrap(), Served::Left);
    let (played, held) = serve(worker);
    assert_eq!(held, [70]);
    played.hangs_up().0.stop();
}

#[test]
fn the_scheduler_hears_no_end_of_the_stream_before_the_copies_have_ended() {
    let (worker, _go) = worker();
    let (mut played, _) = serve(worker);
    played.pings(SOON);
    played.says(&job(1, Direction::Load, 1));
    played.stream.shutdown(Shutdown::Write).unwrap();
    let late = Outcome::Failed("the worker heard no more of the scheduler".into());
    assert_eq!(played.hears(), Message::Ended(JobId(1), late));
    assert!(matches!(played.frames.next(&played.stream), Err(LinkError::Closed)));
    played.hangs_up().0.stop();
}

#[test]
fn jobs_for_memory_that_there_is_not_are_refused_and_so_is_nonsense() {
    let far = |unit, page| {
        let job = Job {
            id: JobId(1),
            direction: Direction::Store,
            units: vec![UnitId(unit)],
            pages: vec![PageId(page)],
            after: Step(0),
        };
        Message::Job(job)
    };
    for (nonsense, why) in [
        (far(100, 1), "a job for unit 100 of 100"),
        (far(1, 9), "a job for page 9 of 9"),
        (Message::Ready, "Ready"),
    ] {
        let (worker, _go) = worker();
        let (mut played, _) = serve(worker);
        played.pings(SOON);
        played.says(&nonsense);
        let (worker, served) = played.hangs_up();
        assert!(served.unwrap_err().to_string().contains(why));
        worker.stop();
    }
}

#[test]
fn a_scheduler_of_another_tier_is_refused() {
    let (mut worker, _go) = worker();
    let (stream, theirs) = UnixStream::pair().unwrap();
    send(&stream, &Message::Hello(VERSION, Hello { units: 7, ..HELLO })).unwrap();
    let refused = worker.serve(theirs).unwrap_err();
    assert!(matches!(refused, LinkError::Mismatch { field: "units", own: 100, other: 7 }));
    worker.stop();
}
