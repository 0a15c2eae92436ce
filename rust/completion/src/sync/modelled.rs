//! The same on loom's types, in good order or with one fault that the models must find.

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Condvar, Mutex, MutexGuard};
use std::cell::Cell;
use std::time::Instant;

/// What is wrong with the primitives made from now on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// A flag that is seen before what was written ahead of it.
    RelaxedFlag,
    /// A waiter that gives the lock up before it can be woken.
    LateWaiter,
    /// A change that wakes one waiter only.
    WakesOne,
}

thread_local! {
    // All threads of a model run in the thread of its test.
    static FAULT: Cell<Fault> = const { Cell::new(Fault::None) };
}

#[cfg(test)]
impl Fault {
    /// Explores `model` with this fault in place.
    pub(crate) fn explore(self, model: impl Fn() + Send + Sync + 'static) {
        FAULT.set(self);
        loom::model(model);
        FAULT.set(Fault::None);
    }
}

pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) fn new() -> Flag {
        Flag(AtomicBool::new(false))
    }

    pub(crate) fn set(&self) {
        let order = if FAULT.get() == Fault::RelaxedFlag { Ordering::Relaxed } else { Ordering::Release };
        self.0.store(true, order);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

pub(crate) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(value: T) -> Monitor<T> {
        Monitor { value: Mutex::new(value), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().expect("no lock is poisoned")
    }

    /// Models have no clock: nothing is waited for with a deadline.
    pub(crate) fn wait<'a>(
        &'a self,
        mut guard: MutexGuard<'a, T>,
        deadline: Option<Instant>,
    ) -> MutexGuard<'a, T> {
        assert!(deadline.is_none(), "a model waited with a deadline");
        if FAULT.get() == Fault::LateWaiter {
            drop(guard);
            guard = self.lock();
        }
        self.changed.wait(guard).expect("no lock is poisoned")
    }

    pub(crate) fn notify_all(&self) {
        if FAULT.get() == Fault::WakesOne {
            self.changed.notify_one();
        } else {
            self.changed.notify_all();
        }
    }
}
