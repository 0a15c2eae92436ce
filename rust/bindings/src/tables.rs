//! What is known of one table buffer between calls.

use parking_lot::Mutex;
use pyo3::prelude::*;

/// What the ledger wrote into one table buffer last, row by row.
#[pyclass(module = "pagekeeper._native", frozen)]
#[derive(Default)]
pub(crate) struct RowMemory(pub(crate) Mutex<cache_manager::RowMemory>);

#[pymethods]
impl RowMemory {
    #[new]
    fn new() -> RowMemory {
        RowMemory::default()
    }
}
