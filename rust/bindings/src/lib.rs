//! The Python module `pagekeeper._native`: conversions, errors, locks; no logic of its own.
//!
//! Every call goes through [`shared::Shared::with`], which takes the ledger's lock and turns a panic into
//! a Python exception. Calls of microseconds keep the GIL; hashing a long prompt gives it up.
#![deny(unsafe_code)] // but for what adopts Python's memory
#![expect(clippy::doc_markdown, reason = "what Python sees is documented in Python's style")]

use pyo3::prelude::*;
use pyo3::types::PyTuple;

mod adopt;
mod batch;
mod claims;
mod connectors;
mod context;
mod disk;
mod errors;
mod events;
#[cfg(feature = "faults")]
mod faults;
mod fork;
mod geometry;
mod guard;
mod hashing;
mod inspect;
mod ledger;
mod queries;
mod retention;
mod scheduling;
mod shared;
mod suspension;
mod tables;
mod tier_blocks;
mod tier_metrics;
mod tiered;
mod tokens;
mod transfer;

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<context::TextContext>()?;
    m.add_class::<disk::DiskDirectory>()?;
    m.add_class::<ledger::Ledger>()?;
    m.add_class::<queries::PrefixWalk>()?;
    m.add_class::<tables::BatchShape>()?;
    m.add_class::<tables::RowMemory>()?;
    m.add_class::<tiered::TieredConnector>()?;
    m.add_class::<transfer::Completer>()?;
    m.add_class::<transfer::Transfer>()?;
    m.add("STORE_FILES", PyTuple::new(m.py(), disk_store::directory::OURS)?)?;
    m.add_function(wrap_pyfunction!(hashing::hash_blocks, m)?)?;
    m.add_function(wrap_pyfunction!(hashing::hash_blocks_batch, m)?)?;
    m.add_function(wrap_pyfunction!(hashing::hash_cpu_path, m)?)?;
    m.add_function(wrap_pyfunction!(geometry::slab_geometry, m)?)?;
    m.add_function(wrap_pyfunction!(inspect::inspect_store, m)?)?;
    m.add_function(wrap_pyfunction!(inspect::store_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(inspect::wipe_store, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::normalize_tokens, m)?)?;
    m.add_function(wrap_pyfunction!(transfer::pending_transfer, m)?)?;
    Ok(())
}
