//! Drivers that refuse some of what they are asked, and the kernel's own lock.

use super::{PageLock, Pin, PinRefused, Pinning, Progress};
use crate::connector::{Offered, TieredConnector};
use crate::copy::{CpuEngine, Piece, Region};
use crate::host::Arena;
use crate::job::{Offer, TierKey};
use block_pool::{EvictionPolicy, PageId, Step};
use parking_lot::Mutex;
use rustix::param::page_size;
use std::cell::UnsafeCell;
use std::fs;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

const KIB: usize = 1 << 10;
const LIMIT: Duration = Duration::from_secs(10);

/// A driver that pins memory for which there is room, and keeps its last error until somebody asks.
struct Driver {
    /// Most bytes a call.
    a_call: usize,
    /// Most bytes in all.
    in_all: usize,
    /// How long a call takes.
    takes: Duration,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// Where each chunk that is pinned begins, and its bytes, in the order of the calls.
    pinned: Vec<(usize, usize)>,
    unpinned: Vec<(usize, usize)>,
    refused: usize,
    last_error: Option<&'static str>,
}

impl Driver {
    fn new(a_call: usize, in_all: usize) -> Arc<Driver> {
        Arc::new(Driver { a_call, in_all, takes: Duration::ZERO, seen: Mutex::default() })
    }

    /// One that refuses nothing.
    fn slow(takes: Duration) -> Arc<Driver> {
        Arc::new(Driver { a_call: usize::MAX, in_all: usize::MAX, takes, seen: Mutex::default() })
    }
}

fn place(memory: &[UnsafeCell<u8>]) -> (usize, usize) {
    (memory.as_ptr().addr(), memory.len())
}

impl Pin for Arc<Driver> {
    fn pin(&self, memory: &[UnsafeCell<u8>]) -> Result<(), PinRefused> {
        std::thread::sleep(self.takes);
        let mut seen = self.seen.lock();
        assert_eq!(seen.last_error, None, "an error of another call");
        let (_, bytes) = place(memory);
        let sum: usize = seen.pinned.iter().map(|&(_, bytes)| bytes).sum();
        if bytes > self.a_call || sum + bytes > self.in_all {
            seen.refused += 1;
            seen.last_error = Some("out of memory");
            return Err(PinRefused("there is no room".to_owned()));
        }
        seen.pinned.push(place(memory));
        Ok(())
    }

    fn unpin(&self, memory: &[UnsafeCell<u8>]) {
        // SAFETY: read as who is pinned for would; fails where there is no memory any more.
        memory.iter().step_by(page_size()).for_each(|byte| _ = unsafe { byte.get().read_volatile() });
        self.seen.lock().unpinned.push(place(memory));
    }

    fn clear_error(&self) {
        assert!(self.seen.lock().last_error.take().is_some(), "there is one after each refusal");
    }
}

fn arena(units: u32, unit_bytes: usize) -> Arc<Arena> {
    Arc::new(Arena::new(units, unit_bytes).unwrap())
}

/// Pins an arena of 64 units of 16 KiB, 1 MiB, which a chunk may have, too.
fn pinning(driver: &Arc<Driver>) -> Pinning {
    Pinning::start(arena(64, 16 * KIB), Box::new(Arc::clone(driver)), 1024 * KIB).unwrap()
}

/// How it ends.
fn ended(pinning: &Pinning) -> Progress {
    let began = Instant::now();
    loop {
        let progress = pinning.progress();
        if progress.pinned + progress.refused == progress.asked {
            return progress;
        }
        assert!(began.elapsed() < LIMIT, "{progress:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn progress(asked: usize, pinned: usize) -> Progress {
    Progress { asked: asked as u64, pinned: pinned as u64, refused: (asked - pinned) as u64 }
}

#[test]
fn where_a_call_may_have_64_kib_all_is_pinned_in_such_chunks_without_a_warning() {
    let driver = Driver::new(64 * KIB, usize::MAX);
    let pinning = pinning(&driver);
    assert_eq!(ended(&pinning), progress(1024 * KIB, 1024 * KIB));
    let seen = driver.seen.lock();
    assert_eq!(seen.refused, 4, "1024, 512, 256 and 128 KiB");
    assert_eq!(seen.pinned.len(), 16);
    let first = seen.pinned[0].0;
    assert!((0..16).all(|chunk| seen.pinned[chunk] == (first + chunk * 64 * KIB, 64 * KIB)));
    drop(seen);
    assert_eq!(pinning.take_warning(), None);
}

#[test]
fn where_there_is_room_for_some_that_is_pinned_and_one_warning_says_how_much_and_why() {
    let driver = Driver::new(usize::MAX, 600 * KIB);
    let pinning = pinning(&driver);
    assert_eq!(ended(&pinning), progress(1024 * KIB, 592 * KIB), "37 units of 16 KiB");
    assert_eq!(
        pinning.take_warning().unwrap(),
        "606208 of 1048576 bytes of host memory are pinned, the rest is used unpinned: there is no room"
    );
    assert_eq!(pinning.take_warning(), None);
}

#[test]
fn what_is_refused_down_to_one_unit_is_not_asked_for_again() {
    let driver = Driver::new(0, 0);
    let pinning = pinning(&driver);
    assert_eq!(ended(&pinning), progress(1024 * KIB, 0));
    assert_eq!(driver.seen.lock().refused, 7, "64, 32, 16, 8, 4, 2 and 1 units");
    assert!(pinning.take_warning().unwrap().starts_with("0 of 1048576 bytes"));
}

#[test]
fn no_error_of_a_refused_call_is_left_for_others() {
    for driver in [Driver::new(64 * KIB, usize::MAX), Driver::new(usize::MAX, 600 * KIB), Driver::new(0, 0)] {
        ended(&pinning(&driver));
        let seen = driver.seen.lock();
        assert!(seen.refused > 0 && seen.last_error.is_none());
    }
}

#[test]
fn chunks_meet_at_the_pages_behind_the_borders_of_units_and_share_none() {
    // Units of 5000 bytes lie 5056 apart; those of 100 bytes share pages.
    for (unit_bytes, stride) in [(5000, 5056), (100, 100), (4 * KIB, 4 * KIB)] {
        let driver = Driver::new(usize::MAX, usize::MAX);
        let by = Box::new(Arc::clone(&driver));
        let pinning = Pinning::start(arena(1000, unit_bytes), by, 10 * unit_bytes).unwrap();
        let pinned = ended(&pinning).pinned as usize;
        assert_eq!(pinned, (1000 * stride).next_multiple_of(page_size()), "no byte of a unit is left out");
        let chunks = driver.seen.lock().pinned.clone();
        let first = chunks[0].0;
        assert_eq!(first % page_size(), 0);
        let borders: Vec<usize> =
            (0..=100).map(|chunk| (chunk * 10 * stride).next_multiple_of(page_size())).collect();
        let expected = borders.windows(2).filter(|ends| ends[0] < ends[1]);
        let expected: Vec<_> = expected.map(|ends| (first + ends[0], ends[1] - ends[0])).collect();
        assert_eq!(chunks, expected);
    }
}

#[test]
fn each_chunk_is_unpinned_once_before_the_memory_goes() {
    let driver = Driver::new(64 * KIB, 600 * KIB);
    let pinning = pinning(&driver); // it has the arena alone
    ended(&pinning);
    pinning.stop();
    assert_eq!(pinning.progress().pinned, 0);
    drop(pinning);
    let seen = driver.seen.lock();
    assert!(!seen.pinned.is_empty());
    assert_eq!(seen.unpinned, seen.pinned);
}

#[test]
fn a_stop_waits_for_one_chunk_at_most() {
    let driver = Driver::slow(Duration::from_millis(100));
    let by = Box::new(Arc::clone(&driver));
    let pinning = Pinning::start(arena(64, 16 * KIB), by, 16 * KIB).unwrap(); // 6.4 s
    let began = Instant::now();
    while pinning.progress().pinned == 0 {
        assert!(began.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
    let began = Instant::now();
    drop(pinning);
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let seen = driver.seen.lock();
    assert!(seen.pinned.len() < 64 && seen.unpinned == seen.pinned);
}

const PAGE: usize = 32;

/// A tier over a pool of two pages: a block goes from the first to host memory, is found, and comes back to the second.
fn assert_serves(arena: Arc<Arena>) {
    let pool: &'static mut [u8] = Box::leak(vec![7; PAGE].into_iter().chain(vec![0; PAGE]).collect());
    let pool = NonNull::from(pool).cast::<u8>();
    let page = Piece { offset: 0, len: PAGE };
    // SAFETY: leaked, and read below while nothing is copied.
    let region = unsafe { Region::new(pool, 2 * PAGE, 2, PAGE, vec![page]) };
    let units = arena.units();
    let engine = Box::new(CpuEngine::new(vec![region.unwrap()], arena));
    let tier = TieredConnector::new(units, PAGE, EvictionPolicy::PriorityLru, 1, engine).unwrap();
    let key = TierKey { hash: 1, guard: [1; 16] };
    let stored = tier.offload(&[Offer::from((key, PageId(0)))], Step(0), None).unwrap();
    let Offered::Storing(stored) = stored else { panic!("there is room") };
    assert_eq!(stored.wait(Some(LIMIT)), Some(completion::Outcome::Done));
    assert_eq!(tier.lookup(&[key]), Ok(vec![true]));
    let loaded = tier.load(&[(key, PageId(1))], Step(0), None).unwrap();
    assert_eq!(loaded.wait(Some(LIMIT)), Some(completion::Outcome::Done));
    // SAFETY: inside the pool.
    assert!((PAGE..2 * PAGE).all(|byte| unsafe { pool.add(byte).read() } == 7));
}

#[test]
fn look_ups_and_copies_do_not_wait_for_pinning() {
    let arena = arena(4096, PAGE);
    let by = Box::new(Driver::slow(Duration::from_millis(500)));
    let pinning = Pinning::start(Arc::clone(&arena), by, 1024 * PAGE).unwrap(); // four chunks, 2 s
    assert_serves(arena);
    let Progress { asked, pinned, refused } = pinning.progress();
    assert!(pinned + refused < asked, "it is on its way");
}

#[test]
fn a_tier_whose_memory_cannot_be_pinned_serves() {
    let arena = arena(4096, PAGE);
    let pinning = Pinning::start(Arc::clone(&arena), Box::new(Driver::new(0, 0)), 1 << 20).unwrap();
    ended(&pinning);
    assert_serves(arena);
}

/// What the system says of the memory at an address: the value of a line.
fn of_mapping(address: usize, line: &str) -> String {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let begins = |text: &str| {
        let (start, rest) = text.split_once('-')?;
        let (end, _) = rest.split_once(' ')?;
        let bounds = [start, end].map(|bound| usize::from_str_radix(bound, 16).ok());
        Some((bounds[0]?..bounds[1]?).contains(&address))
    };
    let mut lines = maps.lines().skip_while(|text| begins(text) != Some(true));
    lines.find_map(|text| text.strip_prefix(line)).unwrap().trim().to_owned()
}

#[test]
fn the_kernel_locks_memory_that_it_still_gives_lazily_and_lets_it_go() {
    let arena = arena(4, 16 * KIB);
    let place = arena.pages_of(0..4).as_ptr().addr();
    let pinning = Pinning::start(Arc::clone(&arena), Box::new(PageLock), Pinning::CHUNK_BYTES).unwrap();
    assert_eq!(ended(&pinning), progress(64 * KIB, 64 * KIB));
    assert!(of_mapping(place, "VmFlags:").split(' ').any(|flag| flag == "lo"));
    assert_eq!(of_mapping(place, "Rss:"), "0 kB", "nothing was touched");
    drop(pinning);
    assert!(!of_mapping(place, "VmFlags:").split(' ').any(|flag| flag == "lo"));
}
