use super::*;
use crate::connector::{Offered, Refused, TieredConnector};
use crate::job::{Direction, JobId, Offer, TierKey, UnitId};
use crate::transfer::Handoff;
use block_pool::{EvictionPolicy, PageId, Step};

/// A mover that keeps what it is given, and says what it is told to say.
#[derive(Clone, Default)]
struct Keeping {
    tasks: Arc<Mutex<Vec<Arc<dyn Task>>>>,
    memory: Arc<Mutex<Option<Memory>>>,
    full: Arc<Mutex<bool>>,
}

impl Keeping {
    fn end(&self, outcome: Outcome) {
        self.tasks.lock().remove(0).end(outcome);
    }

    fn says(&self, memory: Memory) {
        *self.memory.lock() = Some(memory);
    }
}

impl Mover for Keeping {
    fn has_room(&self, _: usize) -> bool {
        !*self.full.lock()
    }

    fn submit(&self, tasks: Vec<Arc<dyn Task>>) {
        self.tasks.lock().extend(tasks);
    }

    fn drain(&self, _: Duration) -> bool {
        self.tasks.lock().is_empty()
    }

    fn stop(&self, _: Duration) {
        self.tasks.lock().drain(..).for_each(|task| task.end(Outcome::Cancelled));
    }

    fn take_memory(&self) -> Option<Memory> {
        self.memory.lock().take()
    }
}

fn two() -> ([Keeping; 2], Shards) {
    let movers = [Keeping::default(), Keeping::default()];
    let shards = Shards::new(movers.iter().map(|mover| Box::new(mover.clone()) as Box<dyn Mover>).collect());
    (movers, shards)
}

fn jobs(ids: &[u64]) -> Vec<Job> {
    let job = |&id| Job {
        id: JobId(id),
        direction: Direction::Store,
        units: vec![UnitId(0)],
        pages: vec![PageId(1)],
        after: Step(0),
    };
    ids.iter().map(job).collect()
}

fn holds(units: &[u32]) -> Memory {
    Memory::Holds(units.iter().copied().map(UnitId).collect())
}

#[test]
fn a_job_ends_with_the_last_shard_and_a_transfer_with_the_last_job() {
    let ([one, other], shards) = two();
    let handoff = Handoff::new();
    let (tasks, completion) = handoff.transfer(jobs(&[1, 2]), None);
    shards.submit(tasks);
    assert_eq!(one.tasks.lock().iter().map(|task| task.job().id.0).collect::<Vec<_>>(), [1, 2]);
    one.end(Outcome::Done);
    one.end(Outcome::Done);
    assert!(handoff.take().jobs.is_empty());
    other.end(Outcome::Done);
    assert_eq!(handoff.take().jobs, [(JobId(1), Outcome::Done)]);
    assert!(!completion.is_complete() && !shards.drain(Duration::ZERO));
    other.end(Outcome::Done);
    assert_eq!(handoff.take().jobs, [(JobId(2), Outcome::Done)]);
    assert_eq!(completion.outcome(), Some(completion::Outcome::Done));
    assert!(shards.drain(Duration::ZERO));
}

#[test]
fn a_failure_on_one_shard_fails_the_job_when_all_have_ended_it() {
    for failing in 0..2 {
        let (movers, shards) = two();
        let handoff = Handoff::new();
        let (tasks, completion) = handoff.transfer(jobs(&[1]), None);
        shards.submit(tasks);
        movers[failing].end(Outcome::Failed("a fault".into()));
        assert!(!completion.is_complete() && handoff.take().jobs.is_empty());
        movers[1 - failing].end(Outcome::Done);
        assert_eq!(handoff.take().jobs, [(JobId(1), Outcome::Failed("a fault".into()))]);
        assert_eq!(completion.outcome(), Some(completion::Outcome::Failed("a fault".into())));
    }
}

#[test]
fn there_is_room_where_every_shard_has_some() {
    let ([_, other], shards) = two();
    assert!(shards.has_room(1));
    *other.full.lock() = true;
    assert!(!shards.has_room(1));
}

#[test]
fn memory_is_lost_with_one_shard_and_back_with_the_last() {
    let ([one, other], shards) = two();
    assert_eq!(shards.take_memory(), None);
    one.says(Memory::Lost);
    assert_eq!(shards.take_memory(), Some(Memory::Lost));
    assert_eq!(shards.take_memory(), None);
    other.says(Memory::Lost);
    one.says(holds(&[1, 2, 3]));
    assert_eq!(shards.take_memory(), Some(Memory::Lost));
    other.says(holds(&[2, 3, 70]));
    assert_eq!(shards.take_memory(), Some(holds(&[2, 3])), "what both hold");
    // Came back before anybody asked.
    one.says(holds(&[5]));
    assert_eq!(shards.take_memory(), Some(holds(&[5])));
}

#[test]
fn a_prefix_is_found_as_far_as_every_shard_holds_it() {
    let ([one, other], shards) = two();
    let tier = TieredConnector::with_mover(8, 32, EvictionPolicy::PriorityLru, Box::new(shards));
    let blocks: Vec<(TierKey, PageId)> =
        (0..8).map(|n| (TierKey { hash: n, guard: [n as u8; 16] }, PageId(n as u32 + 1))).collect();
    let end = || [&one, &other].iter().for_each(|shard| shard.end(Outcome::Done));
    let offers: Vec<Offer> = blocks.iter().copied().map(Offer::from).collect();
    assert!(matches!(tier.offload(&offers, Step(0), None), Ok(Offered::Storing(_))));
    end();
    let keys = || blocks.iter().map(|&(key, _)| key);
    assert_eq!(tier.leading(keys()), Ok((8, 0)));
    // Block 5 lay in unit 5. The first shard has all that it had, and says nothing.
    other.says(holds(&[0, 1, 2, 3, 4, 6, 7]));
    assert_eq!(tier.leading(keys()), Ok((5, 0)));
    assert_eq!(tier.metrics().index.lost, 1);
    assert_eq!(tier.load(&blocks, Step(0), None).unwrap_err(), Refused::NotHere);
    let loaded = tier.load(&blocks[..5], Step(0), None).unwrap();
    let asked = [&one, &other].map(|shard| shard.tasks.lock()[0].job().units.clone());
    assert_eq!(asked, [0, 1].map(|_| (0..5).map(UnitId).collect::<Vec<_>>()), "the same of both");
    end();
    assert_eq!(loaded.outcome(), Some(completion::Outcome::Done));
    assert_eq!(tier.reserve(8).map(|units| units.len()).ok(), Some(8), "none is held by a copy");
    tier.verify().unwrap();
}
