//! One map from Rust errors to Python exceptions.

use block_hash::HashError;
use cache_manager::{LedgerError, NoRoom};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A `ValueError` for input that hashing refuses.
pub(crate) fn from_hash(error: &HashError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The exception for a refused call; `request_id` names the request that the error is about.
pub(crate) fn from_ledger(
    py: Python<'_>,
    error: &LedgerError,
    request_id: Option<&Bound<'_, PyAny>>,
) -> PyErr {
    let message = match request_id {
        Some(id) => match id.repr() {
            Ok(id) => format!("request {id}: {error}"),
            Err(error) => return error,
        },
        None => error.to_string(),
    };
    match error {
        LedgerError::InsufficientBlocks { room, .. } | LedgerError::InsufficientUnits { room, .. } => {
            no_room(py, "InsufficientBlocksError", message, request_id, room)
        }
        LedgerError::RequestTooLarge { room, .. } => {
            no_room(py, "RequestTooLargeError", message, request_id, room)
        }
        _ => PyValueError::new_err(message),
    }
}

/// The exception named `class` of `pagekeeper.errors`.
pub(crate) fn named(py: Python<'_>, class: &str, message: String) -> PyErr {
    match py.import("pagekeeper.errors").and_then(|module| module.getattr(class)?.call1((message,))) {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// A panic that was caught while the ledger's books stayed in order.
pub(crate) fn internal(message: &str) -> PyErr {
    PyRuntimeError::new_err(format!(
        "internal error: {message}. The ledger was verified and is in order; the call may have taken effect in part"
    ))
}

fn no_room(
    py: Python<'_>,
    class: &str,
    message: String,
    request_id: Option<&Bound<'_, PyAny>>,
    room: &NoRoom,
) -> PyErr {
    let raise = || -> PyResult<Bound<'_, PyAny>> {
        let details = PyDict::new(py);
        details.set_item("request_id", request_id)?;
        details.set_item("needed", room.needed)?;
        details.set_item("free", room.free)?;
        details.set_item("evictable", room.evictable)?;
        details.set_item("pinned", room.pinned)?;
        py.import("pagekeeper.errors")?.getattr(class)?.call((message,), Some(&details))
    };
    raise().map_or_else(|error| error, PyErr::from_value)
}
