//! The ledger behind its lock, and what Python is told when something inside panics.

use crate::errors;
use crate::guard::{Fault, Guarded};
use cache_manager::Ledger;
use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;

/// A ledger that contexts and the manager share. After a panic that left its books in disorder nothing
/// is hit or handed out any more.
pub(crate) struct Shared {
    ledger: Mutex<Guarded<Ledger>>,
}

impl Shared {
    pub(crate) fn new(ledger: Ledger) -> Shared {
        Shared { ledger: Mutex::new(Guarded::new(ledger)) }
    }

    /// Fails when the ledger is broken.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.lock(py).is_broken() { Err(told(py, Fault::Broken)) } else { Ok(()) }
    }

    /// Runs `call` on the locked ledger.
    pub(crate) fn with<R>(&self, py: Python<'_>, call: impl FnOnce(&mut Ledger) -> R) -> PyResult<R> {
        let outcome = self.lock(py).run(is_sound, call);
        outcome.map_err(|fault| told(py, fault))
    }

    /// [`Shared::with`] for what must answer in any state.
    pub(crate) fn with_even_if_broken<R>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Ledger) -> R,
    ) -> PyResult<R> {
        let outcome = self.lock(py).run_even_if_broken(is_sound, call);
        outcome.map_err(|fault| told(py, fault))
    }

    /// Runs `call` on the locked ledger, or `rescue` when it is broken.
    pub(crate) fn with_or_rescue<R>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Ledger) -> R,
        rescue: impl FnOnce(&mut Ledger) -> R,
    ) -> PyResult<R> {
        let mut ledger = self.lock(py);
        let outcome = if ledger.is_broken() {
            ledger.run_even_if_broken(is_sound, rescue)
        } else {
            ledger.run(is_sound, call)
        };
        drop(ledger);
        outcome.map_err(|fault| told(py, fault))
    }

    /// The lock, waited for without the GIL. It is never held while the GIL is given up.
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Guarded<Ledger>> {
        loop {
            if let Some(guard) = self.ledger.try_lock() {
                return guard;
            }
            py.detach(|| drop(self.ledger.lock()));
        }
    }
}

fn is_sound(ledger: &Ledger) -> bool {
    ledger.verify().is_ok()
}

fn told(py: Python<'_>, fault: Fault) -> PyErr {
    let message = match fault {
        Fault::Panic { text, sound: true } => return errors::internal(&text),
        Fault::Panic { text, sound: false } => {
            format!("internal error: {text}. The ledger's books are in disorder: it stops here")
        }
        Fault::Broken => "an internal error left the ledger's books in disorder; only verify, release, \
                          shutdown and debug_dump answer"
            .into(),
    };
    errors::named(py, "LedgerCorruptError", message)
}
