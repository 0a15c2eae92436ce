//! A copy engine for real threads: it waits for the forwards that a copy comes after, is slow between pages, and
//! does not always get to the end. It knows what is being copied, whatever the books say.

use crate::device::{Cells, Device};
use crate::random::Random;
use block_pool::{PageId, Step};
use parking_lot::Mutex;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;
use tiered_connector::copy::{CopyEngine, CpuEngine, Piece, Region};
use tiered_connector::host::Arena;
use tiered_connector::job::{Direction, Job, Outcome};

/// What a broken variant does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Faulty {
    /// Says that it has copied, and does so later.
    EndsBeforeItCopies,
    /// Leaves out the last page of a job.
    SkipsLastPages,
    /// Says that copies which failed ended well.
    TrustsFailures,
}

/// How a run's copies behave. A number `n` means once in `n` times; 0 means never.
struct Habits {
    fails: usize,
    is_cancelled: usize,
    /// Longest pause before a page, in microseconds.
    slowness: usize,
}

/// What threads tell each other.
struct Shared {
    random: Random,
    running: Vec<Job>,
    /// Jobs that were said to have ended and have not.
    late: Vec<Job>,
    fault: Option<String>,
}

pub(crate) struct Slow {
    inner: CpuEngine,
    faulty: Option<Faulty>,
    habits: Habits,
    /// The newest step whose forward has run.
    has_run: AtomicU32,
    shared: Mutex<Shared>,
    /// The memory that is copied from and to.
    _cells: Cells,
}

impl Slow {
    /// Between the pages of `device` and `units` units.
    pub(crate) fn new(
        device: &Device,
        pages: u32,
        units: u32,
        faulty: Option<Faulty>,
        random: &mut Random,
    ) -> Slow {
        let len = device.bytes() / (pages as usize + 1);
        let arena = Arc::new(Arena::new(units, len).expect("it is small"));
        let (cells, pieces) = (device.cells().clone(), vec![Piece { offset: 0, len }]);
        let start: NonNull<u8> = cells.start().cast();
        // SAFETY: the memory of `cells`, which the engine keeps; it is not moved.
        let region = unsafe { Region::new(start, device.bytes(), pages as usize + 1, len, pieces) };
        let mut often = |choices: &[usize]| choices[random.below(choices.len())];
        let habits = Habits {
            fails: often(&[0, 4, 12]),
            is_cancelled: often(&[0, 6, 12]),
            slowness: often(&[5, 50, 300, 300, 3000]),
        };
        let random = Random(random.next());
        let shared = Shared { random, running: Vec::new(), late: Vec::new(), fault: None };
        Slow {
            inner: CpuEngine::new(vec![region.expect("pages lie apart")], arena),
            faulty,
            habits,
            has_run: AtomicU32::new(0),
            shared: Mutex::new(shared),
            _cells: cells,
        }
    }

    /// Forwards up to this one have run.
    pub(crate) fn pass_fence(&self, step: Step) {
        self.has_run.store(step.0, Ordering::Release);
    }

    pub(crate) fn take_fault(&self) -> Option<String> {
        self.shared.lock().fault.take()
    }

    /// Pages that are read or written now, once for each copy.
    pub(crate) fn copied_pages(&self) -> Vec<(Direction, PageId)> {
        let shared = self.shared.lock();
        shared.running.iter().flat_map(|job| job.pages.iter().map(|&page| (job.direction, page))).collect()
    }

    /// A broken variant makes up for copies in the thread that calls, so that no two threads use a page at once.
    pub(crate) fn catch_up(&self) {
        let late = std::mem::take(&mut self.shared.lock().late);
        for job in late {
            self.inner.copy(&job, &|| false);
            self.end(&job);
        }
    }

    /// Takes note that a job begins. Jobs at one time share pages and units only where all of them read.
    fn begin(&self, job: &Job) {
        let mut shared = self.shared.lock();
        for other in &shared.running {
            let store = |job: &Job| job.direction == Direction::Store;
            let both_read_units = !store(job) && !store(other);
            let both_read_pages = store(job) && store(other);
            let fault = if !both_read_units && job.units.iter().any(|unit| other.units.contains(unit)) {
                Some(format!("a unit of {job:?} is used by {other:?}"))
            } else if !both_read_pages && job.pages.iter().any(|page| other.pages.contains(page)) {
                Some(format!("a page of {job:?} is used by {other:?}"))
            } else {
                None
            };
            if fault.is_some() {
                shared.fault = fault;
                break;
            }
        }
        shared.running.push(job.clone());
    }

    fn end(&self, job: &Job) {
        self.shared.lock().running.retain(|running| running.id != job.id);
    }

    /// Waits for its fence, then copies page by page.
    fn carry_out(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        while self.has_run.load(Ordering::Acquire) < job.after.0 {
            if give_up() {
                return Outcome::Cancelled;
            }
            sleep(Duration::from_micros(20));
        }
        let (stops_at, how) = self.fate(job);
        for (number, (&unit, &page)) in job.units.iter().zip(&job.pages).enumerate() {
            let pause = self.shared.lock().random.below(self.habits.slowness);
            sleep(Duration::from_micros(pause as u64));
            if number == stops_at {
                return how;
            }
            if number + 1 == job.pages.len() && self.faulty == Some(Faulty::SkipsLastPages) {
                break;
            }
            let part = Job { units: vec![unit], pages: vec![page], ..job.clone() };
            match self.inner.copy(&part, give_up) {
                Outcome::Done => {}
                other => return other,
            }
        }
        Outcome::Done
    }

    /// Before which page a job ends, if it does not get through, and how.
    fn fate(&self, job: &Job) -> (usize, Outcome) {
        let random = &mut self.shared.lock().random;
        let (fails, is_cancelled) =
            (random.one_in(self.habits.fails), random.one_in(self.habits.is_cancelled));
        let stops_at = if fails || is_cancelled { random.below(job.pages.len()) } else { usize::MAX };
        match self.faulty {
            Some(Faulty::TrustsFailures) => (stops_at, Outcome::Done),
            _ if fails => (stops_at, Outcome::Failed("on purpose".into())),
            _ => (stops_at, Outcome::Cancelled),
        }
    }
}

impl CopyEngine for Slow {
    fn copy(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        self.begin(job);
        if self.faulty == Some(Faulty::EndsBeforeItCopies) {
            self.shared.lock().late.push(job.clone());
            return Outcome::Done;
        }
        let outcome = self.carry_out(job, give_up);
        self.end(job);
        outcome
    }
}
