//! What carries jobs out, wherever that is: in threads of this process, on several shards, in another process.

use crate::job::{Job, Outcome};
use crate::units::UnitSet;
use std::sync::Arc;
use std::time::Duration;

/// A job on its way, as a mover sees it.
pub trait Task: Send + Sync {
    /// What is to be done.
    fn job(&self) -> &Job;

    /// Whether somebody asked that it be given up.
    fn is_cancelled(&self) -> bool;

    /// It has ended: nothing more is read or written. To be called once.
    fn end(&self, outcome: Outcome);
}

/// What became of the memory behind a mover.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Memory {
    /// It is out of reach.
    Lost,
    /// It is back, and in these units is still what was last stored in them.
    Holds(UnitSet),
}

/// Carries jobs out. No call but `drain` and `stop` waits.
pub trait Mover: Send + Sync {
    /// Whether so many more stores may be submitted.
    fn has_room(&self, jobs: usize) -> bool;

    /// Takes tasks. Each is ended once, at the latest when the mover is stopped; at once those that it cannot take.
    fn submit(&self, tasks: Vec<Arc<dyn Task>>);

    /// Waits until no task is on its way; false when `timeout` passes first.
    fn drain(&self, timeout: Duration) -> bool;

    /// Takes no more tasks, gives those on their way `timeout` to end, and cancels the rest. Calling it again does
    /// nothing.
    fn stop(&self, timeout: Duration);

    /// What became of the memory, if anything did since the last call. Until it is asked, every task fails: whoever
    /// planned it may have taken for stored what no longer is.
    fn take_memory(&self) -> Option<Memory> {
        None
    }
}
