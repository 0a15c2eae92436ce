use super::*;
use crate::job::{Direction, UnitId};
use block_pool::{PageId, Step};

fn jobs(ids: &[u64]) -> Vec<Job> {
    let job = |&id| Job {
        id: JobId(id),
        direction: Direction::Load,
        units: vec![UnitId(0)],
        pages: vec![PageId(1)],
        after: Step(0),
    };
    ids.iter().map(job).collect()
}

#[test]
fn a_transfer_ends_with_its_last_job_and_fails_with_any() {
    let handoff = Handoff::new();
    let (tasks, completion) = handoff.transfer(jobs(&[1, 2, 3]), Some(9));
    let outcomes = [Outcome::Done, Outcome::Failed("a fault".into()), Outcome::Cancelled];
    for (task, outcome) in tasks.iter().zip(&outcomes) {
        assert!(!completion.is_complete());
        assert!(handoff.take().transfers.is_empty());
        task.end(outcome.clone());
    }
    assert_eq!(completion.outcome(), Some(completion::Outcome::Failed("a fault".into())));
    let ended = handoff.take();
    assert_eq!(ended.jobs, [(JobId(3), Outcome::Cancelled)]);
    assert_eq!(ended.transfers, [(9, Outcome::Failed("a fault".into()))]);
}

#[test]
fn jobs_that_have_ended_are_told_of_in_the_order_in_which_they_were_planned() {
    let handoff = Handoff::new();
    let (tasks, _) = handoff.transfer(jobs(&[1, 2, 3]), None);
    for which in [2, 0, 1] {
        tasks[which].end(Outcome::Done);
    }
    assert_eq!(handoff.take().jobs, [1, 2, 3].map(|id| (JobId(id), Outcome::Done)));
}

#[test]
fn a_transfer_of_nothing_is_done_at_once() {
    let handoff = Handoff::new();
    let (tasks, completion) = handoff.transfer(Vec::new(), Some(4));
    assert!(tasks.is_empty());
    assert_eq!(completion.outcome(), Some(completion::Outcome::Done));
    assert_eq!(handoff.take().transfers, [(4, Outcome::Done)]);
    assert!(handoff.take().transfers.is_empty());
}

#[test]
fn a_request_to_cancel_reaches_every_job() {
    let (tasks, completion) = Handoff::new().transfer(jobs(&[1, 2]), None);
    assert!(tasks.iter().all(|task| !task.is_cancelled()));
    assert!(completion.cancel());
    assert!(tasks.iter().all(|task| task.is_cancelled()));
}
