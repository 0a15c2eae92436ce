//! How long a page keeps its priority.

use crate::ids::{PageId, Priority};
use crate::page::Flags;
use crate::pool::Pool;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use thiserror::Error;

/// A priority, for ever or for a time; afterwards the page has the pool's default priority.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Retention {
    priority: Priority,
    limit: Option<Limit>,
}

/// Numbers that are no time limit of a retention.
#[derive(Clone, Copy, PartialEq, Debug, Error)]
pub enum RetentionError {
    /// Both limits.
    #[error("a retention has a duration ({duration} s) or a time of expiry ({expires_at} s), not both")]
    Both {
        /// The duration given.
        duration: f64,
        /// The time given.
        expires_at: f64,
    },
    /// A duration that is no length of time.
    #[error("duration {0} s: must be a finite number of seconds, at least 0")]
    Duration(f64),
    /// A time that is no time.
    #[error("expires_at {0} s: must be a finite number of seconds")]
    ExpiresAt(f64),
}

impl Retention {
    /// `priority` for `duration` seconds after the last release, or until `expires_at` seconds on the clock
    /// of [`Pool::tell_time`](crate::Pool::tell_time), or for ever.
    ///
    /// # Errors
    /// [`RetentionError`] for both limits at once, and for a limit that is not a time.
    pub fn new(
        priority: Priority,
        duration: Option<f64>,
        expires_at: Option<f64>,
    ) -> Result<Retention, RetentionError> {
        let limit = match (duration, expires_at) {
            (None, None) => None,
            (Some(duration), Some(expires_at)) => return Err(RetentionError::Both { duration, expires_at }),
            (Some(time), None) if !time.is_finite() || time < 0.0 => {
                return Err(RetentionError::Duration(time));
            }
            (None, Some(time)) if !time.is_finite() => return Err(RetentionError::ExpiresAt(time)),
            (Some(time), None) => Some(Limit::For(time)),
            (None, Some(time)) => Some(Limit::Until(time)),
        };
        Ok(Retention { priority, limit })
    }

    /// The priority.
    pub fn priority(self) -> Priority {
        self.priority
    }

    /// Seconds that it lasts after the last release.
    pub fn duration(self) -> Option<f64> {
        match self.limit {
            Some(Limit::For(time)) => Some(time),
            _ => None,
        }
    }

    /// When it ends, in seconds.
    pub fn expires_at(self) -> Option<f64> {
        match self.limit {
            Some(Limit::Until(time)) => Some(time),
            _ => None,
        }
    }

    pub(crate) fn limit(self) -> Option<Limit> {
        self.limit
    }

    pub(crate) fn limited(priority: Priority, limit: Option<Limit>) -> Retention {
        Retention { priority, limit }
    }
}

impl From<Priority> for Retention {
    /// For ever.
    fn from(priority: Priority) -> Retention {
        Retention { priority, limit: None }
    }
}

/// A page whose priority ended, see [`Pool::tell_time`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lapsed {
    /// The page; it has the default priority now.
    pub page: PageId,
    /// The priority that it had.
    pub from: Priority,
}

impl Pool {
    /// Gives `page` another priority and time. An evictable page keeps its place in the order of release;
    /// a duration counts from now then, and from the next release otherwise.
    pub fn retain(&mut self, page: PageId, retention: Retention) {
        let record = &mut self.pages[page.index()];
        record.priority = retention.priority();
        if retention.limit().is_some() || record.flags.has(Flags::TIMED) {
            record.flags.set(Flags::TIMED, retention.limit().is_some());
            let released = (record.refs == 0).then_some(self.now);
            self.limits.set(page, retention.limit(), released);
        }
        self.requeue(page);
    }

    /// What [`Pool::retain`] said of `page`, or what is left of it.
    pub fn retention(&self, page: PageId) -> Retention {
        Retention::limited(self.priority(page), self.limits.get(page))
    }

    /// The first time that is known, in seconds: durations that run already count from it.
    pub fn start_clock(&mut self, now: f64) {
        self.now = now;
        self.limits.restart(now);
    }

    /// The time is `now`, in seconds; a time before the latest counts as that. Pages whose retention is over
    /// fall back to the default priority, for ever, and are given, those first whose time was over first.
    /// Nothing else judges this. Durations of referenced pages do not run.
    pub fn tell_time(&mut self, now: f64) -> Vec<Lapsed> {
        self.now = self.now.max(now);
        let mut lapsed = Vec::new();
        while let Some(page) = self.limits.pop_over(self.now) {
            let record = &mut self.pages[page.index()];
            record.flags.set(Flags::TIMED, false);
            let from = std::mem::replace(&mut record.priority, self.default_priority);
            self.requeue(page);
            lapsed.push(Lapsed { page, from });
        }
        lapsed
    }
}

/// When a priority ends, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Limit {
    /// So long after the last release.
    For(f64),
    Until(f64),
}

/// The pages whose priority ends some time. All other pages cost nothing here.
#[derive(Default)]
pub(crate) struct Limits {
    pages: BTreeMap<PageId, (Limit, Option<Due>)>,
    /// Ends that are known; a duration has none while the page is referenced.
    due: BTreeSet<(Due, PageId)>,
}

impl Limits {
    pub(crate) fn get(&self, page: PageId) -> Option<Limit> {
        self.pages.get(&page).map(|&(limit, _)| limit)
    }

    /// Gives `page` another limit, or none. A duration counts from `released`, if it is given.
    #[cold]
    pub(crate) fn set(&mut self, page: PageId, limit: Option<Limit>, released: Option<f64>) {
        if let Some((_, Some(due))) = self.pages.remove(&page) {
            self.due.remove(&(due, page));
        }
        let Some(limit) = limit else { return };
        let due = match limit {
            Limit::For(time) => released.map(|released| Due(released + time)),
            Limit::Until(time) => Some(Due(time)),
        };
        self.pages.insert(page, (limit, due));
        self.due.extend(due.map(|due| (due, page)));
    }

    /// `page` was released at `now`, or, without a time, is referenced again.
    #[cold]
    pub(crate) fn released(&mut self, page: PageId, now: Option<f64>) {
        if let Some(limit @ Limit::For(_)) = self.get(page) {
            self.set(page, Some(limit), now);
        }
    }

    /// Durations that run count from `now`.
    pub(crate) fn restart(&mut self, now: f64) {
        let running = |(&page, &(limit, due)): (&PageId, &(Limit, Option<Due>))| {
            (matches!(limit, Limit::For(_)) && due.is_some()).then_some(page)
        };
        for page in self.pages.iter().filter_map(running).collect::<Vec<_>>() {
            self.released(page, Some(now));
        }
    }

    /// Removes and gives a page whose time is over at `now`: the one whose time was over first.
    pub(crate) fn pop_over(&mut self, now: f64) -> Option<PageId> {
        let &(due, page) = self.due.first()?;
        (due <= Due(now)).then(|| {
            self.set(page, None, None);
            page
        })
    }

    /// Pages that have a limit.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// First page whose end is noted otherwise than it has one. `referenced` says whether a page is.
    pub(crate) fn first_broken(&self, referenced: impl Fn(PageId) -> bool) -> Option<PageId> {
        let unknown = |&(due, page): &(Due, PageId)| self.pages.get(&page).is_none_or(|it| it.1 != Some(due));
        let wrong = |(page, (limit, due)): (&PageId, &(Limit, Option<Due>))| {
            let sound = match (*limit, *due) {
                (Limit::For(_), None) => referenced(*page),
                (Limit::For(_), Some(_)) => !referenced(*page),
                (Limit::Until(time), due) => due == Some(Due(time)),
            };
            let noted = due.is_none_or(|due| self.due.contains(&(due, *page)));
            (!sound || !noted).then_some(*page)
        };
        self.pages.iter().find_map(wrong).or(self.due.iter().find(|end| unknown(end)).map(|end| end.1))
    }

    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        for (page, (limit, due)) in &self.pages {
            let (kind, time) = match limit {
                Limit::For(time) => (0, time),
                Limit::Until(time) => (1, time),
            };
            (page, kind, time.to_bits(), due.map(|due| due.0.to_bits())).hash(hasher);
        }
    }
}

/// A time in seconds; the order is that of numbers.
#[derive(Clone, Copy, Debug)]
struct Due(f64);

impl Ord for Due {
    fn cmp(&self, other: &Due) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}
