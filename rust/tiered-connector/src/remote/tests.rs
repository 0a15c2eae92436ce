use super::*;
use crate::job::{Job, UnitId};
use crate::transfer::Handoff;
use crate::wire::{VERSION, send};
use block_pool::{PageId, Step};
use completion::Completion;
use std::io::Write;
use std::net::Shutdown;

const PATIENCE: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_secs(10);
const HELLO: Hello = Hello { shard: 1, units: 100, unit_bytes: 64, pages: 9 };

/// A worker whose part the test plays.
struct Played {
    stream: UnixStream,
    frames: Frames,
}

impl Played {
    /// Joins by `join`, and says that it holds `units`.
    fn joining<T>(join: impl FnOnce(UnixStream) -> T, words: &[u64]) -> (Played, T) {
        let (stream, theirs) = UnixStream::pair().unwrap();
        send(&stream, &Message::Hello(VERSION, HELLO)).unwrap();
        send(&stream, &Message::Inventory { first: 0, words: words.to_vec() }).unwrap();
        send(&stream, &Message::Ready).unwrap();
        let joined = join(theirs);
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut played = Played { stream, frames: Frames::default() };
        assert_eq!(played.hears(), Message::Hello(VERSION, HELLO));
        (played, joined)
    }

    /// The next message that is no ping. Answers pings.
    fn hears(&mut self) -> Message {
        loop {
            match self.frames.next(&self.stream).unwrap() {
                Some(Message::Ping { .. }) => self.says(&Message::Pong),
                Some(message) => return message,
                None => {}
            }
        }
    }

    fn hears_jobs(&mut self, count: usize) -> Vec<u64> {
        let job = |_| match self.hears() {
            Message::Job(job) => job.id.0,
            other => panic!("{other:?}"),
        };
        (0..count).map(job).collect()
    }

    fn says(&self, message: &Message) {
        send(&self.stream, message).unwrap();
    }
}

fn joined() -> (Played, RemoteMover) {
    let (played, mover) = Played::joining(|stream| RemoteMover::join(stream, HELLO, PATIENCE).unwrap(), &[]);
    assert_eq!(mover.take_memory(), Some(Memory::Holds(UnitSet::default())));
    (played, mover)
}

fn submit(mover: &RemoteMover, direction: Direction, ids: &[u64]) -> Completion {
    let job = |&id| Job {
        id: JobId(id),
        direction,
        units: vec![UnitId(3)],
        pages: vec![PageId(1)],
        after: Step(0),
    };
    let (tasks, completion) = Handoff::new().transfer(ids.iter().map(job).collect(), None);
    mover.submit(tasks);
    completion
}

fn failed(completion: &Completion) -> String {
    match completion.wait(Some(SOON)) {
        Some(completion::Outcome::Failed(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn mismatch(other: Hello) -> String {
    let (stream, theirs) = UnixStream::pair().unwrap();
    send(&stream, &Message::Hello(VERSION, other)).unwrap();
    RemoteMover::join(theirs, HELLO, PATIENCE).err().unwrap().to_string()
}

#[test]
fn jobs_are_done_elsewhere_and_end_here() {
    let (mut played, mover) = joined();
    let completion = submit(&mover, Direction::Load, &[4, 5]);
    assert_eq!(played.hears_jobs(2), [4, 5]);
    played.says(&Message::Ended(JobId(5), Outcome::Done));
    assert!(!mover.drain(Duration::from_millis(1)) && !completion.is_complete());
    played.says(&Message::Ended(JobId(4), Outcome::Failed("a fault".into())));
    assert_eq!(failed(&completion), "a fault");
    assert!(mover.drain(SOON));
}

#[test]
fn a_worker_of_another_tier_is_refused_with_both_sides_numbers() {
    assert_eq!(
        mismatch(Hello { units: 99, ..HELLO }),
        "units: this side has 100, the other 99; both must be the same"
    );
    assert!(mismatch(Hello { unit_bytes: 65, ..HELLO }).starts_with("bytes of a unit"));
    assert!(mismatch(Hello { shard: 0, ..HELLO }).starts_with("shard"));
    assert!(mismatch(Hello { pages: 8, ..HELLO }).starts_with("pages"));
}

#[test]
fn another_version_and_strangers_are_refused() {
    let refused = |bytes: &[u8]| {
        let (mut stream, theirs) = UnixStream::pair().unwrap();
        stream.write_all(bytes).unwrap();
        RemoteMover::join(theirs, HELLO, PATIENCE).err().unwrap().to_string()
    };
    let mut newer = Vec::new();
    Message::Hello(VERSION + 1, HELLO).encode(&mut newer);
    assert!(refused(&newer).starts_with("version of the messages"));
    assert!(refused(b"GET / HTTP/1.1\r\n").contains("a frame of"));
    assert!(refused(&[]).contains("nothing was heard"));
    let mut pong = Vec::new();
    Message::Pong.encode(&mut pong);
    assert!(refused(&pong).contains("before a hello"));
}

#[test]
fn a_worker_that_hangs_up_is_lost_and_its_jobs_fail() {
    let (mut played, mover) = joined();
    let completion = submit(&mover, Direction::Store, &[1]);
    played.hears_jobs(1);
    drop(played);
    assert_eq!(failed(&completion), "the worker of shard 1 is lost: the other side hung up");
    assert!(mover.drain(SOON));
    assert!(!mover.is_joined() && !mover.has_room(1));
    assert_eq!(mover.take_memory(), Some(Memory::Lost));
    assert_eq!(failed(&submit(&mover, Direction::Load, &[2])), "the worker of shard 1 is lost");
}

#[test]
fn a_silent_worker_is_lost_when_patience_ends_and_not_before() {
    let (mut played, mover) = joined();
    let completion = submit(&mover, Direction::Store, &[1]);
    played.hears_jobs(1);
    played.says(&Message::Pong);
    let began = Instant::now();
    assert!(failed(&completion).contains("nothing was heard of the other side for 1s"));
    let waited = began.elapsed();
    assert!(waited > PATIENCE / 2 && waited < SOON, "{waited:?}");
}

#[test]
fn a_worker_that_answers_pings_is_not_lost() {
    let (mut played, mover) = joined();
    let began = Instant::now();
    while began.elapsed() < 2 * PATIENCE {
        if let Some(Message::Ping { .. }) = played.frames.next(&played.stream).unwrap() {
            played.says(&Message::Pong);
        }
    }
    assert!(mover.is_joined() && mover.has_room(1));
}

#[test]
fn a_worker_may_copy_until_a_time_before_it_is_taken_for_dead() {
    let (mut played, mover) = joined();
    let heard = loop {
        if let Some(Message::Ping { until }) = played.frames.next(&played.stream).unwrap() {
            break until;
        }
    };
    let completion = submit(&mover, Direction::Store, &[1]);
    failed(&completion); // nothing was answered
    assert!(crate::wire::now() > heard);
}

#[test]
fn nonsense_is_no_answer_and_its_worker_is_lost_once_it_hangs_up() {
    for nonsense in [Message::Ended(JobId(7), Outcome::Done), Message::Shutdown] {
        let (mut played, mover) = joined();
        let completion = submit(&mover, Direction::Store, &[1]);
        played.hears_jobs(1);
        played.says(&nonsense);
        // Told that it is given up; until it hangs up it may copy still.
        while played.frames.next(&played.stream).is_ok() {}
        assert!(!completion.is_complete());
        drop(played);
        assert!(failed(&completion).contains("has no place here"));
    }
}

#[test]
fn a_worker_that_joins_again_says_what_it_holds_and_takes_no_job_before_that_was_heard() {
    let (played, mover) = joined();
    drop(played);
    let (mut played, rejoined) = Played::joining(|stream| mover.rejoin(stream), &[0, 1 << 5]);
    rejoined.unwrap();
    assert!(!mover.has_room(1));
    failed(&submit(&mover, Direction::Load, &[1]));
    assert_eq!(mover.take_memory(), Some(Memory::Holds([UnitId(69)].into_iter().collect())));
    let completion = submit(&mover, Direction::Load, &[2]);
    assert_eq!(played.hears_jobs(1), [2]);
    played.says(&Message::Ended(JobId(2), Outcome::Done));
    assert_eq!(completion.wait(Some(SOON)), Some(completion::Outcome::Done));
}

#[test]
fn two_workers_of_one_shard_are_one_too_many() {
    let (mut played, mover) = joined();
    let other = mover.clone();
    let second = std::thread::spawn(move || Played::joining(|stream| other.rejoin(stream), &[]).1);
    let began = Instant::now();
    while began.elapsed() < 2 * PATIENCE {
        if let Some(Message::Ping { .. }) = played.frames.next(&played.stream).unwrap() {
            played.says(&Message::Pong);
        }
    }
    assert_eq!(second.join().unwrap().unwrap_err().to_string(), "shard 1 has a worker already");
}

#[test]
fn an_inventory_of_units_that_there_are_not_is_refused() {
    let (_, joined) = Played::joining(|stream| RemoteMover::join(stream, HELLO, PATIENCE), &[0, 0, 1]);
    assert!(joined.is_err());
}

#[test]
fn a_request_to_cancel_is_passed_on() {
    let (mut played, mover) = joined();
    let completion = submit(&mover, Direction::Load, &[1]);
    played.hears_jobs(1);
    assert!(completion.cancel());
    assert_eq!(played.hears(), Message::Cancel(JobId(1)));
    played.says(&Message::Ended(JobId(1), Outcome::Cancelled));
    assert_eq!(completion.wait(Some(SOON)), Some(completion::Outcome::Cancelled));
}

#[test]
fn stores_that_are_not_done_take_up_the_room_and_a_caller_never_waits() {
    let (played, mover) = joined();
    let ids: Vec<u64> = (0..Lanes::MOST_STORES as u64).collect();
    assert!(mover.has_room(ids.len()));
    submit(&mover, Direction::Store, &ids);
    assert!(!mover.has_room(1));
    // More loads than a socket takes, to a worker that reads none.
    let loads: Vec<u64> = (1000..20_000).collect();
    let began = Instant::now();
    let completion = submit(&mover, Direction::Load, &loads);
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    failed(&completion);
    drop(played);
}

#[test]
fn stopping_tells_the_worker_and_waits_for_it_to_hang_up() {
    let (mut played, mover) = joined();
    let completion = submit(&mover, Direction::Store, &[1]);
    played.hears_jobs(1);
    let stopping = std::thread::spawn(move || mover.stop(Duration::from_millis(20)));
    assert_eq!(played.hears(), Message::Shutdown);
    played.says(&Message::Ended(JobId(1), Outcome::Cancelled));
    drop(played);
    stopping.join().unwrap();
    assert_eq!(completion.outcome(), Some(completion::Outcome::Cancelled));
}

#[test]
fn stopping_ends_within_its_bound_when_nobody_answers() {
    let (played, mover) = joined();
    let completion = submit(&mover, Direction::Store, &[1]);
    let began = Instant::now();
    mover.stop(Duration::from_millis(20));
    assert!(began.elapsed() < PATIENCE * 3);
    assert_eq!(completion.outcome(), Some(completion::Outcome::Cancelled));
    let late = submit(&mover, Direction::Store, &[2]);
    assert_eq!(late.outcome(), Some(completion::Outcome::Cancelled));
    mover.stop(SOON);
    let (_, late) = Played::joining(|stream| mover.rejoin(stream), &[]);
    assert!(matches!(late, Err(LinkError::Stopped)));
    _ = played.stream.shutdown(Shutdown::Both);
}
