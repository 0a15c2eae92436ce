//! What crosses with a table: what is known of its buffer, and how much was written.

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

/// How much the tables of a batch hold, and its longest requests.
#[pyclass(module = "pagekeeper._native", frozen, get_all)]
pub(crate) struct BatchShape {
    /// Requests of the batch.
    pub(crate) requests: usize,
    /// Tokens that the forward computes, over all requests.
    pub(crate) active: u32,
    /// Most tokens that it computes for one request.
    pub(crate) max_active: u32,
    /// Most tokens of one request after the forward.
    pub(crate) max_total: u32,
    /// Page-table entries of all requests.
    pub(crate) pages: u32,
}
