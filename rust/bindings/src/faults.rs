//! Panics on purpose, for `tests/test_broken_state.py`. Only with the feature `faults`.

use crate::ledger::Ledger;
use cache_manager::Fault;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[pymethods]
impl Ledger {
    /// Fails as an error of the ledger's own would, at the place named `fault`.
    fn force_panic(&self, py: Python<'_>, fault: &str) -> PyResult<()> {
        let fault = match fault {
            "at once" => Fault::AtOnce,
            "half reset" => Fault::HalfReset,
            "half release" => Fault::HalfRelease,
            _ => return Err(PyValueError::new_err(format!("fault={fault:?}: no such fault"))),
        };
        self.shared.with(py, |ledger| ledger.force_panic(fault))
    }
}
