//! The ledger behind its lock, and what happens when something inside panics.

use crate::errors;
use cache_manager::Ledger;
use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// A ledger that contexts and the manager share.
pub(crate) struct Shared {
    ledger: Mutex<Ledger>,
    /// A panic left the books in disorder: nothing is hit or handed out any more.
    broken: AtomicBool,
}

impl Shared {
    pub(crate) fn new(ledger: Ledger) -> Shared {
        Shared { ledger: Mutex::new(ledger), broken: AtomicBool::new(false) }
    }

    /// Fails when the ledger is broken.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.broken.load(Ordering::Acquire) {
            let message = "an internal error left the ledger's books in disorder; only verify, release, \
                           shutdown and debug_dump answer";
            return Err(errors::named(py, "LedgerCorruptError", message.into()));
        }
        Ok(())
    }

    /// Runs `call` on the locked ledger.
    pub(crate) fn with<R>(&self, py: Python<'_>, call: impl FnOnce(&mut Ledger) -> R) -> PyResult<R> {
        self.check(py)?;
        self.with_even_if_broken(py, call)
    }

    /// [`Shared::with`] for what must answer in any state.
    pub(crate) fn with_even_if_broken<R>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Ledger) -> R,
    ) -> PyResult<R> {
        let mut ledger = self.lock(py);
        let panic = match catch_unwind(AssertUnwindSafe(|| call(&mut ledger))) {
            Ok(result) => return Ok(result),
            Err(panic) => panic,
        };
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("panic");
        let sound = catch_unwind(AssertUnwindSafe(|| ledger.verify().is_ok())).unwrap_or(false);
        if sound {
            return Err(errors::internal(text));
        }
        self.broken.store(true, Ordering::Release);
        let message = format!("internal error: {text}. The ledger's books are in disorder: it stops here");
        Err(errors::named(py, "LedgerCorruptError", message))
    }

    /// The lock, waited for without the GIL. It is never held while the GIL is given up.
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Ledger> {
        loop {
            if let Some(guard) = self.ledger.try_lock() {
                return guard;
            }
            py.detach(|| drop(self.ledger.lock()));
        }
    }
}
