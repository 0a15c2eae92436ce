//! Where copies end: jobs count down to the transfer they are part of, and all is handed to whoever keeps the books.
//!
//! No mover takes the index's lock or calls anybody: how a job ended stands in a list, where the next call on the
//! connector finds it, and before the transfer is seen settled.

use crate::job::{Job, JobId, Outcome};
use crate::mover::Task;
use crate::sync::{Counter, Flag, Lock};
use completion::{Completer, Completion, pending};
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// What has ended and nobody was told of yet.
#[derive(Default, Debug)]
pub struct Ended {
    /// Jobs, in the order in which they were planned.
    pub jobs: Vec<(JobId, Outcome)>,
    /// Transfers that have a tag.
    pub transfers: Vec<(u64, Outcome)>,
}

/// The list of what has ended.
pub struct Handoff {
    ended: Lock<Ended>,
    /// Whether there is something, for those who only ask.
    any: Flag,
}

impl Handoff {
    /// An empty list.
    pub fn new() -> Arc<Handoff> {
        Arc::new(Handoff { ended: Lock::new(Ended::default()), any: Flag::new() })
    }

    /// Takes what has ended since the last call. Costs one atomic load when that is nothing.
    pub fn take(&self) -> Ended {
        if !self.any.take() {
            return Ended::default();
        }
        let mut ended = std::mem::take(&mut *self.ended.lock());
        ended.jobs.sort_unstable_by_key(|(id, _)| *id);
        ended
    }

    /// Begins a transfer of these jobs: a task for each, and the handle of the whole. It is settled when the last job
    /// has ended, at once if there is none. `tag` names it in [`Ended::transfers`].
    pub fn transfer(
        self: &Arc<Handoff>,
        jobs: Vec<Job>,
        tag: Option<u64>,
    ) -> (Vec<Arc<dyn Task>>, Completion) {
        let (completer, completion) = pending();
        if jobs.is_empty() {
            self.ended.lock().transfers.extend(tag.map(|tag| (tag, Outcome::Done)));
            self.any.set();
            completer.finish();
        }
        let left = Countdown::from(jobs.len());
        let transfer = Arc::new(Transfer { left, completer, tag, handoff: Arc::clone(self) });
        let part = |job| Arc::new(Part { job, transfer: Arc::clone(&transfer) }) as Arc<dyn Task>;
        (jobs.into_iter().map(part).collect(), completion)
    }
}

/// One copy as whoever asked for it sees it.
struct Transfer {
    left: Countdown,
    completer: Completer,
    tag: Option<u64>,
    handoff: Arc<Handoff>,
}

impl Transfer {
    fn settle(&self, outcome: Outcome) {
        _ = match outcome {
            Outcome::Done => self.completer.finish(),
            Outcome::Failed(why) => self.completer.fail(why),
            Outcome::Cancelled => self.completer.abandon(),
        };
    }
}

/// A job of a transfer.
struct Part {
    job: Job,
    transfer: Arc<Transfer>,
}

impl Task for Part {
    fn job(&self) -> &Job {
        &self.job
    }

    fn is_cancelled(&self) -> bool {
        self.transfer.completer.is_cancel_requested()
    }

    fn end(&self, outcome: Outcome) {
        let Transfer { left, tag, handoff, .. } = &*self.transfer;
        let mut ended = handoff.ended.lock();
        // Counted with the list locked: when the last job is, all others stand in the list.
        let whole = left.end(&outcome);
        ended.jobs.push((self.job.id, outcome));
        if let (&Some(tag), Some(whole)) = (tag, &whole) {
            ended.transfers.push((tag, whole.clone()));
        }
        drop(ended);
        handoff.any.set();
        if let Some(whole) = whole {
            self.transfer.settle(whole);
        }
    }
}

/// Ends that make one end: that of the last, as bad as the worst.
pub(crate) struct Countdown {
    left: Counter,
    worst: Lock<Outcome>,
}

impl Countdown {
    pub(crate) fn from(ends: usize) -> Countdown {
        Countdown { left: Counter::new(ends), worst: Lock::new(Outcome::Done) }
    }

    /// One more has ended. Gives how all did if it was the last.
    pub(crate) fn end(&self, outcome: &Outcome) -> Option<Outcome> {
        if *outcome != Outcome::Done {
            let mut worst = self.worst.lock();
            if !matches!(*worst, Outcome::Failed(_)) {
                worst.clone_from(outcome);
            }
        }
        // What the others wrote is visible to whoever ends the last.
        self.left.down().then(|| self.worst.lock().clone())
    }
}
