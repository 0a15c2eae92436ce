//! Events on their way to Python, as tuples that `pagekeeper.events` makes objects of.

use crate::ledger::Ledger;
use crate::tokens::seconds_from;
use block_pool::GroupId;
use cache_manager::{Change, EventKind, Stored};
use numpy::{PyArray1, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use radix_tree::AdapterId;
use std::thread;
use std::time::{Duration, Instant};

/// A wait is this long at most, then signals are looked at.
const WAIT: Duration = Duration::from_millis(50);

#[pymethods]
impl Ledger {
    /// Takes the events that are there as `(id, group, kind, fields...)`; waits up to `timeout` seconds for one.
    fn take_events<'py>(&self, timeout: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = timeout.py();
        let timeout = seconds_from(timeout, "timeout")?;
        if timeout.is_nan() || timeout < 0.0 {
            return Err(PyValueError::new_err(format!("timeout={timeout}: must be at least 0, in seconds")));
        }
        // Too far away to be reckoned with is no deadline.
        let deadline =
            Duration::try_from_secs_f64(timeout).ok().and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map_or(WAIT, |deadline| deadline.saturating_duration_since(Instant::now()));
            let waiter = (!left.is_zero()).then(thread::current);
            let (is_on, events) =
                self.shared.with(py, |ledger| (ledger.events().is_on(), ledger.take_events(waiter)))?;
            if !events.is_empty() || !is_on || left.is_zero() {
                let rows = events.iter().map(|event| row(py, event.id as i64, event.group, &event.kind));
                return PyList::new(py, rows.collect::<PyResult<Vec<_>>>()?);
            }
            py.detach(|| thread::park_timeout(left.min(WAIT)));
            py.check_signals()?;
        }
    }

    /// `(id of the newest event or -1, what is cached now as events with that id)`.
    fn event_snapshot<'py>(&self, py: Python<'py>) -> PyResult<(i64, Bound<'py, PyList>)> {
        let snapshot = self.shared.with(py, cache_manager::Ledger::event_snapshot)?;
        let newest = snapshot.next_id as i64 - 1;
        let rows = snapshot.events.iter().map(|(group, kind)| row(py, newest, *group, kind));
        Ok((newest, PyList::new(py, rows.collect::<PyResult<Vec<_>>>()?)?))
    }
}

fn row<'py>(py: Python<'py>, id: i64, group: GroupId, kind: &EventKind) -> PyResult<Bound<'py, PyTuple>> {
    let group = group.0;
    match kind {
        EventKind::Created { page_size, pages } => {
            (id, group, "created", page_size, PyTuple::new(py, pages)?).into_pyobject(py)
        }
        EventKind::Stored(stored) => stored_row(py, id, group, stored),
        EventKind::Removed { keys } => (id, group, "removed", PyTuple::new(py, keys)?).into_pyobject(py),
        EventKind::Updated { key, change } => {
            let (priority, tier) = match *change {
                Change::Priority(old, new) => (Some((old.level(), new.level())), None),
                Change::Tier(old, new) => (None, Some((old.0, new.0))),
            };
            (id, group, "updated", key, priority, tier).into_pyobject(py)
        }
        EventKind::Cleared => (id, group, "cleared").into_pyobject(py),
    }
}

fn stored_row<'py>(py: Python<'py>, id: i64, group: u8, stored: &Stored) -> PyResult<Bound<'py, PyTuple>> {
    let tokens = PyArray1::from_slice(py, &stored.tokens);
    drop(tokens.readwrite().make_nonwriteable());
    let extra_keys = stored.extra_keys.iter().map(|(block, bytes)| (block, PyBytes::new(py, bytes)));
    let adapter = match &stored.adapter {
        None => None,
        Some(AdapterId::Name(name)) => Some(name.into_pyobject(py)?.into_any()),
        Some(AdapterId::Number(number)) => Some(number.into_pyobject(py)?.into_any()),
    };
    (
        id,
        group,
        "stored",
        stored.parent,
        stored.first,
        PyTuple::new(py, &stored.keys)?,
        tokens,
        PyTuple::new(py, extra_keys.collect::<Vec<_>>())?,
        stored.priority.level(),
        stored.tier.0,
        adapter,
    )
        .into_pyobject(py)
}
