//! A copy in flight, as Python sees it: the native classes `Transfer` and `Completer`.

use crate::errors;
use crate::tokens::{pages_from, seconds_from};
use completion::{Completion, Outcome};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::net::Shutdown;
use std::os::fd::{IntoRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long a wait goes on without looking for signals, such as Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);

/// A copy in flight, to be asked, waited for, or awaited in asyncio. `pagekeeper.transfers.pending` makes one.
///
/// All methods may be called from any thread.
#[pyclass(module = "pagekeeper._native", frozen)]
pub(crate) struct Transfer {
    completion: Completion,
    block_ids: Vec<u32>,
    /// One end of a connection whose other end is shut down when the copy ends; made when first awaited.
    wake: Mutex<Option<UnixStream>>,
    /// Where the copy is made: whoever ends it is not in a forked process.
    process: u32,
}

/// Two ends of one copy: what is waited for, and what ends it.
#[pyfunction]
pub(crate) fn pending_transfer(block_ids: &Bound<'_, PyAny>) -> PyResult<(Transfer, Completer)> {
    let block_ids = pages_from(block_ids, "block_ids")?;
    let (completer, completion) = completion::pending();
    Ok((Transfer::new(completion, block_ids), Completer { completer }))
}

impl Transfer {
    pub(crate) fn new(completion: Completion, block_ids: Vec<u32>) -> Transfer {
        Transfer { completion, block_ids, wake: Mutex::default(), process: std::process::id() }
    }

    /// That the end of a copy in flight can be waited for here.
    fn check_process(&self) -> PyResult<()> {
        if self.completion.is_complete() || self.process == std::process::id() {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(
            "the transfer was begun before this process was forked: it ends in the other process",
        ))
    }

    /// Waits without the GIL.
    fn wait(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<()> {
        self.check_process()?;
        match wait(py, &self.completion, timeout)? {
            Some(Outcome::Done) => Ok(()),
            Some(Outcome::Failed(message)) => Err(errors::named(py, "KVLoadFailed", message)),
            Some(Outcome::Cancelled) => {
                Err(errors::named(py, "KVLoadFailed", "the transfer was cancelled".into()))
            }
            None => {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                let message = format!("the transfer is still in flight after {seconds} s");
                Err(PyTimeoutError::new_err(message))
            }
        }
    }
}

/// Waits without the GIL, and looks for signals in between; `None` when `timeout` passes first.
pub(crate) fn wait(
    py: Python<'_>,
    completion: &Completion,
    timeout: Option<Duration>,
) -> PyResult<Option<Outcome>> {
    // A time beyond what the clock can say is no limit.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map_or(SLICE, |deadline| deadline.saturating_duration_since(Instant::now()));
        match completion.outcome() {
            None if !left.is_zero() => {}
            outcome => return Ok(outcome),
        }
        py.detach(|| completion.wait(Some(left.min(SLICE))));
        py.check_signals()?;
    }
}

#[pymethods]
impl Transfer {
    /// The device pages that the copy touches, a tuple of ids.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.block_ids)
    }

    /// Whether the copy has ended, well or not. Never waits, never raises.
    fn is_complete(&self) -> bool {
        self.completion.is_complete()
    }

    /// Waits for the end of the copy.
    ///
    /// Raises:
    ///     KVLoadFailed: the copy failed or was cancelled; the pages hold no KV.
    ///     RuntimeError: the copy was in flight when this process was forked.
    fn result(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, None)
    }

    /// Waits for the end of the copy, at most `timeout` seconds; None waits as long as it takes.
    ///
    /// Raises:
    ///     KVLoadFailed: the copy failed or was cancelled; the pages hold no KV.
    ///     TimeoutError: it is still in flight.
    ///     RuntimeError: it was in flight when this process was forked.
    ///     ValueError: a timeout that is negative or not finite.
    #[pyo3(signature = (timeout = None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let timeout = timeout.map(timeout_from).transpose()?;
        self.wait(py, timeout)
    }

    /// Asks that the copy be given up; False when it has ended already.
    ///
    /// The copy may end in any way all the same, and may write until `is_complete()` is True.
    fn cancel(&self) -> bool {
        self.completion.cancel()
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let ended = slf.py().import("pagekeeper.transfers")?.getattr("ended")?.call1((slf,))?;
        ended.call_method0("__await__")
    }

    /// A file descriptor of the caller's, to be closed by it, that is readable once the copy has ended.
    fn wake_fd(&self) -> PyResult<RawFd> {
        self.check_process()?;
        let mut wake = self.wake.lock();
        let reader = match &mut *wake {
            Some(reader) => reader,
            none => {
                let ((reader, other), process) = (UnixStream::pair()?, self.process);
                // Shut down and not just closed, since a forked process has it open too; nor does its end of the
                // copy count.
                self.completion.when_complete(move || {
                    if process == std::process::id() {
                        _ = other.shutdown(Shutdown::Both);
                    }
                });
                none.insert(reader)
            }
        };
        Ok(reader.try_clone()?.into_raw_fd())
    }

    fn __repr__(&self) -> String {
        let state = match self.completion.outcome() {
            None => "in flight",
            Some(Outcome::Done) => "done",
            Some(Outcome::Failed(_)) => "failed",
            Some(Outcome::Cancelled) => "cancelled",
        };
        format!("Transfer({} pages, {state})", self.block_ids.len())
    }
}

fn timeout_from(timeout: &Bound<'_, PyAny>) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds_from(timeout, "timeout")?)
        .map_err(|_| PyValueError::new_err(format!("timeout={timeout}: must be seconds, 0 or more, or None")))
}

/// The end of whoever carries a copy out. The first result stands.
///
/// A completer that is dropped without a result fails its transfer, so that nobody waits for ever. All
/// methods may be called from any thread.
#[pyclass(module = "pagekeeper._native", frozen)]
pub(crate) struct Completer {
    completer: completion::Completer,
}

#[pymethods]
impl Completer {
    /// Every byte is where it belongs. False when the copy had ended already.
    fn finish(&self) -> bool {
        self.completer.finish()
    }

    /// The copy failed: the transfer raises `KVLoadFailed(message)`. False when it had ended already.
    fn fail(&self, message: &str) -> bool {
        self.completer.fail(message)
    }

    /// The copy was given up and writes nothing more. False when it had ended already.
    fn abandon(&self) -> bool {
        self.completer.abandon()
    }

    /// Whether somebody asked that the copy be given up. Never waits.
    fn is_cancel_requested(&self) -> bool {
        self.completer.is_cancel_requested()
    }
}
