//! Copies in virtual time: each waits for its fence, then spoils its destination, then copies one half of every
//! block, then the other, then ends; at moments that are drawn, beside all other copies. Some do not get there.

use crate::device::Device;
use crate::kv::POISON;
use crate::random::Random;
use block_pool::Step;
use tiered_connector::job::{Direction, Job, Outcome, TierKey, UnitId};

/// How a seed's copies behave. A number `n` means once in `n` times; 0 means never.
pub(crate) struct Habits {
    pub(crate) fails: usize,
    pub(crate) is_cancelled: usize,
    pub(crate) never_ends: usize,
    pub(crate) is_refused: usize,
    /// Longest time between two moments of one copy.
    pub(crate) slowness: usize,
    pub(crate) blocks_a_job: usize,
    /// A copy waits for the fence of the step that it was told, or for all that was launched before it was asked for.
    pub(crate) knows_steps: bool,
    pub(crate) knows_priorities: bool,
}

impl Habits {
    pub(crate) fn draw(random: &mut Random) -> Habits {
        let mut often = |choices: &[usize]| choices[random.below(choices.len())];
        Habits {
            fails: often(&[0, 0, 4, 12]),
            is_cancelled: often(&[0, 0, 6, 12]),
            never_ends: often(&[0, 0, 0, 50]),
            is_refused: often(&[0, 0, 4, 12]),
            slowness: often(&[2, 6, 6, 20]),
            blocks_a_job: often(&[1, 2, 3, 100]),
            knows_steps: often(&[0, 1]) == 1,
            knows_priorities: often(&[0, 0, 1]) == 1,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Done,
    Failed,
    Cancelled,
    Stuck,
}

#[derive(Clone, Copy, PartialEq)]
enum Next {
    Begin,
    FirstHalf,
    SecondHalf,
    End,
}

/// A job that a mover has.
pub(crate) struct Moving {
    pub(crate) job: Job,
    /// What each unit holds, or is about to.
    pub(crate) keys: Vec<TierKey>,
    /// The ledger's number of the copy that it is part of.
    pub(crate) copy: u64,
    fence: Step,
    fate: Fate,
    next: Next,
    at: u64,
}

pub(crate) struct Mover {
    pub(crate) habits: Habits,
    pub(crate) jobs: Vec<Moving>,
    pub(crate) waits_for_fences: bool,
    random: Random,
    page_size: usize,
    units: Vec<u64>,
}

impl Mover {
    pub(crate) fn new(units: u32, page_size: u32, habits: Habits, random: Random) -> Mover {
        let page_size = page_size as usize;
        let units = vec![POISON; units as usize * page_size];
        Mover { habits, jobs: Vec::new(), waits_for_fences: true, random, page_size, units }
    }

    /// Takes a job that is asked for now.
    pub(crate) fn ask(&mut self, job: Job, keys: Vec<TierKey>, copy: u64, now: u64, device: &Device) {
        let Habits { fails, is_cancelled, never_ends, .. } = self.habits;
        let fate = if self.random.one_in(never_ends) {
            Fate::Stuck
        } else if self.random.one_in(fails) {
            Fate::Failed
        } else if self.random.one_in(is_cancelled) {
            Fate::Cancelled
        } else {
            Fate::Done
        };
        let fence = if self.habits.knows_steps { job.after } else { device.launched() };
        let at = now + self.pause();
        self.jobs.push(Moving { job, keys, copy, fence, fate, next: Next::Begin, at });
    }

    /// When something happens next, and to which job.
    pub(crate) fn next(&self, device: &Device) -> Option<(u64, usize)> {
        let goes_on = |moving: &Moving| match moving.next {
            Next::Begin => !self.waits_for_fences || device.has_run(moving.fence),
            Next::SecondHalf => moving.fate != Fate::Stuck,
            Next::FirstHalf | Next::End => true,
        };
        let jobs = self.jobs.iter().enumerate().filter(|(_, moving)| goes_on(moving));
        jobs.map(|(number, moving)| (moving.at, number)).min()
    }

    /// Does what comes next for a job. Gives it, and how it ended, when that was the last.
    pub(crate) fn go_on(
        &mut self,
        number: usize,
        now: u64,
        device: &mut Device,
        cancelled: bool,
    ) -> Option<(Moving, Outcome)> {
        let pause = self.pause();
        let Mover { jobs, units, page_size, .. } = self;
        let moving = &mut jobs[number];
        let half = page_size.div_ceil(2);
        let mut copy = |cells: std::ops::Range<usize>, spoil: bool| {
            for (&unit, &page) in moving.job.units.iter().zip(&moving.job.pages) {
                let unit = &mut units[unit.0 as usize * *page_size..][cells.clone()];
                let page = &mut device.page_mut(page)[cells.clone()];
                match moving.job.direction {
                    Direction::Store if spoil => unit.fill(POISON),
                    Direction::Load if spoil => page.fill(POISON),
                    Direction::Store => unit.copy_from_slice(page),
                    Direction::Load => page.copy_from_slice(unit),
                }
            }
        };
        let given_up = cancelled || (moving.fate == Fate::Cancelled && moving.next == Next::SecondHalf);
        if given_up {
            return Some((self.jobs.swap_remove(number), Outcome::Cancelled));
        }
        match moving.next {
            Next::Begin => copy(0..*page_size, true),
            Next::FirstHalf => copy(0..half, false),
            Next::SecondHalf => copy(half..*page_size, moving.fate == Fate::Failed),
            Next::End => {
                let failed = moving.fate == Fate::Failed;
                let outcome = if failed { Outcome::Failed("on purpose".into()) } else { Outcome::Done };
                return Some((self.jobs.swap_remove(number), outcome));
            }
        }
        moving.at = now + pause;
        moving.next = match moving.next {
            Next::Begin => Next::FirstHalf,
            Next::FirstHalf => Next::SecondHalf,
            Next::SecondHalf | Next::End => Next::End,
        };
        None
    }

    pub(crate) fn unit(&self, unit: UnitId) -> &[u64] {
        &self.units[unit.0 as usize * self.page_size..][..self.page_size]
    }

    /// Whether a job reads or writes the unit.
    pub(crate) fn touches(&self, unit: UnitId) -> bool {
        self.jobs.iter().any(|moving| moving.job.units.contains(&unit))
    }

    /// A short time, now and then a long one.
    fn pause(&mut self) -> u64 {
        let longer = if self.random.one_in(20) { 10 } else { 1 };
        (1 + self.random.below(self.habits.slowness * longer)) as u64
    }
}
