//! What threads meet at where copies end: a lock, a flag, a counter. loom's in models (`cfg(loom)`), else
//! `parking_lot`'s and the standard library's.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
#[cfg(loom)]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
use parking_lot::{Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    #[cfg(not(loom))]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }

    #[cfg(loom)]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no lock is poisoned")
    }
}

/// Set by many, taken down by one, who sees what was written before it was set.
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) fn new() -> Flag {
        Flag(AtomicBool::new(false))
    }

    pub(crate) fn set(&self) {
        // A swap, because loom lets a store beside the swap below come before it though it was not seen.
        self.0.swap(true, Ordering::Release);
    }

    /// A load where it is not set.
    pub(crate) fn take(&self) -> bool {
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Acquire)
    }
}

/// Counts down to zero.
pub(crate) struct Counter(AtomicUsize);

impl Counter {
    pub(crate) fn new(count: usize) -> Counter {
        Counter(AtomicUsize::new(count))
    }

    /// One less. True for whoever takes the last; he sees what the others wrote before.
    pub(crate) fn down(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
