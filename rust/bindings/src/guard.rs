//! What a panic inside a call leaves behind: a value that was checked and goes on, or one that is broken.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// A value that calls work on, and whether a panic left it in disorder. Disorder does not heal.
pub(crate) struct Guarded<T> {
    value: T,
    broken: bool,
}

/// Why a call gave no result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// An earlier panic left the value in disorder; the call was not made.
    Broken,
    /// The call panicked with this text; `sound` tells whether the value is in order.
    Panic { text: String, sound: bool },
}

impl<T> Guarded<T> {
    pub(crate) fn new(value: T) -> Guarded<T> {
        Guarded { value, broken: false }
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Makes `call`, unless the value is broken. After a panic `is_sound` decides whether it is.
    pub(crate) fn run<R>(
        &mut self,
        is_sound: impl FnOnce(&T) -> bool,
        call: impl FnOnce(&mut T) -> R,
    ) -> Result<R, Fault> {
        if self.broken {
            return Err(Fault::Broken);
        }
        self.run_even_if_broken(is_sound, call)
    }

    /// [`Guarded::run`] for what must answer in any state.
    pub(crate) fn run_even_if_broken<R>(
        &mut self,
        is_sound: impl FnOnce(&T) -> bool,
        call: impl FnOnce(&mut T) -> R,
    ) -> Result<R, Fault> {
        let panic = match catch_unwind(AssertUnwindSafe(|| call(&mut self.value))) {
            Ok(result) => return Ok(result),
            Err(panic) => panic,
        };
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("panic");
        // A check that panics has found disorder.
        self.broken |= !catch_unwind(AssertUnwindSafe(|| is_sound(&self.value))).unwrap_or(false);
        Err(Fault::Panic { text: text.to_owned(), sound: !self.broken })
    }
}
