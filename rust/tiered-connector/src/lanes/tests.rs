use super::*;
use crate::job::{Job, JobId, UnitId};
use crate::transfer::Handoff;
use block_pool::{PageId, Step};
use completion::Completion;
use std::sync::mpsc::{Receiver, Sender, channel};

/// An engine whose copies begin when a test says so, and tell it that they did.
struct Gated {
    begun: Sender<JobId>,
    go: Mutex<Receiver<Outcome>>,
}

impl CopyEngine for Gated {
    fn copy(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        self.begun.send(job.id).unwrap();
        let told = self.go.lock().recv();
        match told {
            Ok(Outcome::Failed(why)) if why == "panic" => panic!("on purpose"),
            Ok(outcome) => outcome,
            Err(_) => {
                while !give_up() {
                    std::thread::yield_now();
                }
                Outcome::Cancelled
            }
        }
    }
}

struct Scene {
    lanes: Lanes,
    handoff: Arc<Handoff>,
    begun: Receiver<JobId>,
    go: Option<Sender<Outcome>>,
}

fn scene() -> Scene {
    let ((begun_in, begun), (go, go_in)) = (channel(), channel());
    let engine = Gated { begun: begun_in, go: Mutex::new(go_in) };
    let lanes = Lanes::start(1, Box::new(engine)).unwrap();
    Scene { lanes, handoff: Handoff::new(), begun, go: Some(go) }
}

fn job(id: u64, direction: Direction) -> Job {
    Job { id: JobId(id), direction, units: vec![UnitId(0)], pages: vec![PageId(1)], after: Step(0) }
}

impl Scene {
    fn submit(&self, direction: Direction, ids: &[u64], tag: Option<u64>) -> Completion {
        let jobs = ids.iter().map(|&id| job(id, direction)).collect();
        let (tasks, completion) = self.handoff.transfer(jobs, tag);
        self.lanes.submit(tasks);
        completion
    }

    /// Waits for the next copy to begin: which.
    fn begins(&self) -> u64 {
        self.begun.recv_timeout(Duration::from_secs(10)).expect("a copy begins").0
    }

    fn go(&self, outcome: Outcome) {
        self.go.as_ref().unwrap().send(outcome).unwrap();
    }
}

const LIMIT: Option<Duration> = Some(Duration::from_secs(10));

#[test]
fn loads_go_before_stores_that_wait() {
    let scene = scene();
    let first = scene.submit(Direction::Store, &[1], None);
    assert_eq!(scene.begins(), 1);
    scene.submit(Direction::Store, &[2], None);
    scene.submit(Direction::Load, &[3, 4], None);
    let order: Vec<u64> = (0..3)
        .map(|_| {
            scene.go(Outcome::Done);
            scene.begins()
        })
        .collect();
    assert_eq!(order, [3, 4, 2]);
    scene.go(Outcome::Done);
    assert!(scene.lanes.drain(Duration::from_secs(10)));
    assert_eq!(first.wait(LIMIT), Some(completion::Outcome::Done));
    assert_eq!(scene.handoff.take().jobs.len(), 4);
    assert!(scene.handoff.take().jobs.is_empty());
}

#[test]
fn a_copy_that_panics_has_failed_and_the_lane_goes_on() {
    let scene = scene();
    let broken = scene.submit(Direction::Load, &[1], None);
    scene.begins();
    scene.go(Outcome::Failed("panic".into()));
    assert!(matches!(broken.wait(LIMIT), Some(completion::Outcome::Failed(_))));
    let next = scene.submit(Direction::Load, &[2], None);
    assert_eq!(scene.begins(), 2);
    scene.go(Outcome::Done);
    assert_eq!(next.wait(LIMIT), Some(completion::Outcome::Done));
}

#[test]
fn a_cancelled_transfer_that_waits_never_begins() {
    let scene = scene();
    scene.submit(Direction::Load, &[1], None);
    scene.begins();
    let cancelled = scene.submit(Direction::Load, &[2], None);
    assert!(cancelled.cancel());
    scene.go(Outcome::Done);
    assert_eq!(cancelled.wait(LIMIT), Some(completion::Outcome::Cancelled));
    assert!(scene.begun.try_recv().is_err());
}

#[test]
fn stopping_cancels_what_runs_and_what_waits_and_ends_the_threads() {
    let mut scene = scene();
    let running = scene.submit(Direction::Store, &[1], None);
    let waiting = scene.submit(Direction::Store, &[2], Some(7));
    scene.begins();
    scene.go = None; // the copy ends only when it is told to give up
    let began = Instant::now();
    scene.lanes.stop(Duration::from_millis(50));
    assert!((50..5_000).contains(&began.elapsed().as_millis()));
    assert_eq!(running.outcome(), Some(completion::Outcome::Cancelled));
    assert_eq!(waiting.outcome(), Some(completion::Outcome::Cancelled));
    assert_eq!(scene.handoff.take().transfers, [(7, Outcome::Cancelled)]);
    let late = scene.submit(Direction::Load, &[3], None);
    assert_eq!(late.outcome(), Some(completion::Outcome::Cancelled));
    assert!(!scene.lanes.has_room(0));
    scene.lanes.stop(Duration::ZERO);
}

#[test]
fn there_is_no_room_for_stores_when_lanes_have_fallen_behind() {
    let mut scene = scene();
    let jobs: Vec<u64> = (0..=Lanes::MOST_STORES as u64).collect();
    scene.submit(Direction::Store, &jobs[..1], None);
    scene.begins();
    assert!(scene.lanes.has_room(Lanes::MOST_STORES));
    scene.submit(Direction::Store, &jobs[1..], None);
    assert!(!scene.lanes.has_room(1));
    scene.go = None;
    scene.lanes.stop(Duration::ZERO);
}
