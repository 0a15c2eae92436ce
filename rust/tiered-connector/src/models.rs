//! Every interleaving, by loom, of jobs that end in two lanes and of a connector that is told; and the same with a
//! fault, which loom must find.

use crate::index::TierIndex;
use crate::job::{Direction, Job, Outcome, TierKey};
use crate::mover::Task;
use crate::transfer::{Countdown, Handoff};
use block_pool::{EvictionPolicy, PageId, Step};
use completion::Completion;
use loom::thread;
use std::sync::Arc;

const KEYS: [TierKey; 2] = [TierKey { hash: 1, guard: [1; 16] }, TierKey { hash: 2, guard: [2; 16] }];

/// An index that stores a block by each of two jobs of one transfer.
struct Scene {
    index: TierIndex,
    handoff: Arc<Handoff>,
    tasks: Vec<Arc<dyn Task>>,
    completion: Completion,
}

fn scene() -> Scene {
    let mut index = TierIndex::new(2, EvictionPolicy::PriorityLru);
    let store = |key| index.store(&[(key, PageId(1)).into()], Step(0)).unwrap();
    let handoff = Handoff::new();
    let (tasks, completion) = handoff.transfer(KEYS.map(store).into(), Some(7));
    Scene { index, handoff, tasks, completion }
}

impl Scene {
    /// What every call on a connector begins with. Gives the transfers that have ended.
    fn enter(&mut self) -> usize {
        let ended = self.handoff.take();
        for (id, outcome) in &ended.jobs {
            assert!(self.index.apply(*id, outcome), "a job ends once");
        }
        ended.transfers.len()
    }

    fn blocks_that_are_found(&self) -> usize {
        KEYS.iter().filter(|key| self.index.contains(key)).count()
    }

    /// Lanes that end a job each.
    fn lanes(&mut self) -> Vec<thread::JoinHandle<()>> {
        self.tasks.drain(..).map(|task| thread::spawn(move || task.end(Outcome::Done))).collect()
    }
}

#[test]
fn who_sees_a_transfer_settled_finds_its_jobs_among_those_that_ended() {
    loom::model(|| {
        let mut scene = scene();
        let lanes = scene.lanes();
        assert_eq!(scene.completion.wait(None), Some(completion::Outcome::Done));
        assert_eq!(scene.enter(), 1);
        assert_eq!(scene.blocks_that_are_found(), 2, "a settled store is found");
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        scene.index.verify().unwrap();
    });
}

#[test]
fn a_transfer_is_told_of_once_and_with_all_its_jobs() {
    loom::model(|| {
        let mut scene = scene();
        let lanes = scene.lanes();
        let told = scene.enter();
        if told > 0 {
            assert_eq!(scene.blocks_that_are_found(), 2);
        }
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        assert_eq!(told + scene.enter(), 1);
        assert_eq!(scene.blocks_that_are_found(), 2);
    });
}

/// A job that counts down before it stands in the list: another may settle the transfer in between.
struct CountsFirst {
    task: Arc<dyn Task>,
    counted: Arc<Countdown>,
    settled: Arc<completion::Completer>,
}

impl Task for CountsFirst {
    fn job(&self) -> &Job {
        self.task.job()
    }

    fn is_cancelled(&self) -> bool {
        false
    }

    fn end(&self, outcome: Outcome) {
        let last = self.counted.end(&outcome).is_some();
        self.task.end(outcome);
        if last {
            self.settled.finish();
        }
    }
}

#[test]
#[should_panic(expected = "a settled store is found")]
fn loom_finds_a_job_that_counts_before_it_stands_in_the_list() {
    loom::model(|| {
        let mut scene = scene();
        let (completer, completion) = completion::pending();
        let (counted, settled) = (Arc::new(Countdown::from(2)), Arc::new(completer));
        let broken =
            |task| CountsFirst { task, counted: Arc::clone(&counted), settled: Arc::clone(&settled) };
        let tasks: Vec<CountsFirst> = scene.tasks.drain(..).map(broken).collect();
        let lanes: Vec<_> =
            tasks.into_iter().map(|task| thread::spawn(move || task.end(Outcome::Done))).collect();
        completion.wait(None);
        scene.enter();
        assert_eq!(scene.blocks_that_are_found(), 2, "a settled store is found");
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn of_two_shards_the_last_ends_the_job_and_any_failure_fails_it() {
    loom::model(|| {
        let mut index = TierIndex::new(1, EvictionPolicy::PriorityLru);
        let job = index.store(&[(KEYS[0], PageId(1)).into()], Step(0)).unwrap();
        assert_eq!(job.direction, Direction::Store);
        let handoff = Handoff::new();
        let (tasks, completion) = handoff.transfer(vec![job], None);
        let mut shards = crate::shards::parts(Arc::clone(&tasks[0]), 2);
        let (one, other) = (shards.next().unwrap(), shards.next().unwrap());
        let failing = thread::spawn(move || one.end(Outcome::Failed("a fault".into())));
        other.end(Outcome::Done);
        assert_eq!(completion.wait(None), Some(completion::Outcome::Failed("a fault".into())));
        failing.join().unwrap();
        for (id, outcome) in handoff.take().jobs {
            assert!(index.apply(id, &outcome));
        }
        assert_eq!(index.in_flight(), 0);
        assert!(!index.contains(&KEYS[0]));
        index.verify().unwrap();
    });
}
