//! One tier on several shards: a unit has the same number on each, and a job is done when it is done on all.

use crate::job::{Job, Outcome};
use crate::mover::{Memory, Mover, Task};
use crate::transfer::Countdown;
use crate::units::UnitSet;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// The movers of all shards, as one. A job ends with the last shard, and fails with any.
pub struct Shards {
    shards: Vec<Box<dyn Mover>>,
    memory: Mutex<Known>,
}

/// What is known of the shards' memory.
#[derive(Default)]
struct Known {
    /// Whether each shard's is out of reach.
    lost: Vec<bool>,
    /// What all that came back hold, since somebody was told.
    held: Option<UnitSet>,
}

impl Shards {
    /// # Panics
    /// Without any shard.
    pub fn new(shards: Vec<Box<dyn Mover>>) -> Shards {
        assert!(!shards.is_empty(), "there is at least one shard");
        let memory = Known { lost: vec![false; shards.len()], held: None };
        Shards { shards, memory: Mutex::new(memory) }
    }
}

impl Mover for Shards {
    fn has_room(&self, jobs: usize) -> bool {
        self.shards.iter().all(|shard| shard.has_room(jobs))
    }

    fn submit(&self, tasks: Vec<Arc<dyn Task>>) {
        let mut of_shards = vec![Vec::with_capacity(tasks.len()); self.shards.len()];
        for task in tasks {
            of_shards
                .iter_mut()
                .zip(parts(task, self.shards.len()))
                .for_each(|(tasks, part)| tasks.push(part));
        }
        self.shards.iter().zip(of_shards).for_each(|(shard, tasks)| shard.submit(tasks));
    }

    fn drain(&self, timeout: Duration) -> bool {
        let left = time_left(timeout);
        self.shards.iter().all(|shard| shard.drain(left()))
    }

    fn stop(&self, timeout: Duration) {
        let left = time_left(timeout);
        self.shards.iter().for_each(|shard| shard.stop(left()));
    }

    fn take_memory(&self) -> Option<Memory> {
        let mut known = self.memory.lock();
        let mut news = false;
        for (number, shard) in self.shards.iter().enumerate() {
            let Some(memory) = shard.take_memory() else { continue };
            news = true;
            known.lost[number] = memory == Memory::Lost;
            if let Memory::Holds(units) = memory {
                match &mut known.held {
                    Some(held) => held.intersect(&units),
                    held => *held = Some(units),
                }
            }
        }
        match news {
            false => None,
            true if known.lost.contains(&true) => Some(Memory::Lost),
            true => Some(Memory::Holds(known.held.take().unwrap_or_default())),
        }
    }
}

/// What each shard does of a task.
pub(crate) fn parts(task: Arc<dyn Task>, shards: usize) -> impl Iterator<Item = Arc<dyn Task>> {
    let part: Arc<dyn Task> = Arc::new(OnShards { left: Countdown::from(shards), task });
    std::iter::repeat_n(part, shards)
}

struct OnShards {
    task: Arc<dyn Task>,
    left: Countdown,
}

impl Task for OnShards {
    fn job(&self) -> &Job {
        self.task.job()
    }

    fn is_cancelled(&self) -> bool {
        self.task.is_cancelled()
    }

    fn end(&self, outcome: Outcome) {
        if let Some(whole) = self.left.end(&outcome) {
            self.task.end(whole);
        }
    }
}

/// How much of `timeout` is left when it is asked.
pub(crate) fn time_left(timeout: Duration) -> impl Fn() -> Duration {
    let deadline = Instant::now().checked_add(timeout);
    move || deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()))
}
