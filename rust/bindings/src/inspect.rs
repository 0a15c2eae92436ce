//! Stores on disk that nobody here opens: looked into, wiped, sized.

use crate::disk::raised;
use cache_manager::content_bytes;
use disk_store::directory::Directory;
use disk_store::inspect::{Inspection, Report, Unreadable};
use disk_store::store::Layout;
use pyo3::exceptions::{PyFileNotFoundError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

/// Bytes of blocks that are checked between two looks for signals.
const PIECE: u64 = 64 << 20;

/// What a store on disk holds and what is damaged. It may be open elsewhere; nothing is changed.
///
/// Args:
///     path: its directory.
///     deep: whether the bytes of blocks are checked too.
///     on_blocks: told how many blocks have been checked, and how many there are.
///
/// Raises:
///     FileNotFoundError: there is no store.
///     ValueError: another version made it.
///     OSError: the system refuses.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments of Python's")]
pub(crate) fn inspect_store<'py>(
    py: Python<'py>,
    path: PathBuf,
    deep: bool,
    on_blocks: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut inspection = py.detach(|| Inspection::open(&path, deep)).map_err(|error| match error {
        Unreadable::NoStore => PyFileNotFoundError::new_err(error.to_string()),
        Unreadable::Format(_) => PyValueError::new_err(error.to_string()),
        Unreadable::Io(error) => error.into(),
    })?;
    let all = inspection.left();
    let block_bytes = inspection.report().manifest.as_ref().map_or(1, |manifest| manifest.block_bytes);
    let piece = (PIECE / block_bytes).clamp(1, 4096) as usize;
    while inspection.left() > 0 {
        py.check_signals()?;
        py.detach(|| inspection.check(piece));
        on_blocks.call1((all - inspection.left(), all))?;
    }
    let report = py.detach(|| inspection.finish())?;
    described(py, &report)
}

/// Removes the files of the store in a directory.
///
/// Raises:
///     OSError: it is in use; the system refuses.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "an argument of Python's")]
pub(crate) fn wipe_store(path: PathBuf) -> PyResult<()> {
    Directory::open(&path).and_then(Directory::wipe).map_err(|error| raised(&error))
}

/// Bytes that a store of so many blocks of `page_size` tokens takes on a disk.
///
/// Raises:
///     ValueError: they are too many.
#[pyfunction]
pub(crate) fn store_bytes(page_size: u32, block_bytes: usize, blocks: u32) -> PyResult<u64> {
    if block_bytes > 1 << 40 {
        return Err(PyValueError::new_err(format!("block_bytes={block_bytes}: must be at most 2**40")));
    }
    let layout = Layout { block_bytes, content_bytes: content_bytes(page_size), slots: blocks };
    let bytes = u128::from(blocks) * (layout.slot_bytes() + layout.entry_bytes()) as u128;
    if bytes >> 62 != 0 {
        return Err(PyValueError::new_err(format!("blocks={blocks}: no disk has room for {bytes} bytes")));
    }
    Ok(layout.bytes())
}

/// Plain values; of the seed a hash, and of the secret nothing.
fn described<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    let manifest = report.manifest.as_ref();
    let seed = manifest.map(|manifest| seed_fingerprint(py, &manifest.seed)).transpose()?;
    result.set_item("format", manifest.map(|manifest| manifest.format))?;
    result
        .set_item("fingerprint", manifest.map(|manifest| manifest.fingerprint.clone()).unwrap_or_default())?;
    result.set_item("seed_fingerprint", seed)?;
    result.set_item("in_use", report.holder.is_some())?;
    result.set_item("process", report.holder.and_then(|holder| holder.process))?;
    result.set_item("block_bytes", manifest.map(|manifest| manifest.block_bytes))?;
    result.set_item("slots", report.slots)?;
    result.set_item("epoch", report.epoch)?;
    result.set_item("blocks", report.blocks)?;
    result.set_item("old_entries", report.old_entries)?;
    result.set_item("damaged_entries", report.damaged_entries)?;
    result.set_item("checked_blocks", report.checked_blocks)?;
    result.set_item("damaged_blocks", report.damaged_blocks)?;
    result.set_item("disk_bytes", report.disk_bytes)?;
    result.set_item("free_bytes", report.free_bytes)?;
    result.set_item("foreign", &report.foreign)?;
    result.set_item("problems", &report.problems)?;
    result.set_item("sound", report.is_sound())?;
    Ok(result)
}

/// The first 16 digits of the SHA-256 of a seed's digits: by it two seeds are compared, and not guessed.
fn seed_fingerprint(py: Python<'_>, seed: &str) -> PyResult<String> {
    let hash = py.import("hashlib")?.call_method1("sha256", (seed.as_bytes(),))?;
    hash.call_method0("hexdigest")?.extract::<String>().map(|digits| digits.chars().take(16).collect())
}
