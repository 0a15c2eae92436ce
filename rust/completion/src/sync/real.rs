//! Atomics of the standard library, locks of `parking_lot`.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Set once; what was written before is visible to whoever sees it set.
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) fn new() -> Flag {
        Flag(AtomicBool::new(false))
    }

    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A locked value whose changes can be waited for.
pub(crate) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(value: T) -> Monitor<T> {
        Monitor { value: Mutex::new(value), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock()
    }

    /// Gives the lock up until [`Monitor::notify_all`] or `deadline`, and takes it again.
    pub(crate) fn wait<'a>(
        &self,
        mut guard: MutexGuard<'a, T>,
        deadline: Option<Instant>,
    ) -> MutexGuard<'a, T> {
        match deadline {
            Some(deadline) => _ = self.changed.wait_until(&mut guard, deadline),
            None => self.changed.wait(&mut guard),
        }
        guard
    }

    pub(crate) fn notify_all(&self) {
        self.changed.notify_all();
    }
}
