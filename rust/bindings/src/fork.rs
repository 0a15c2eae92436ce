//! Forks, and the page copies that go before a forward.

use crate::batch::one_slot_of;
use crate::context::{RequestKey, TextContext};
use crate::ledger::Ledger;
use cache_manager::LedgerError;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[pymethods]
impl Ledger {
    /// The pages of a group to zero before the next forward, int32 [pages].
    fn take_page_fills<'py>(&self, py: Python<'py>, group: usize) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = self.group(group)?;
        let pages = self.shared.with(py, |ledger| ledger.take_page_fills(group))?;
        Ok(PyArray1::from_vec(py, pages.iter().map(|page| page.0.cast_signed()).collect()))
    }

    /// Claims another request, named `request_id`, that goes on from where this one stands.
    fn fork<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        request_id: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, TextContext>> {
        let py = request.py();
        let slot = one_slot_of(request, &self.shared)?;
        let parent =
            self.context_of(py, slot).ok_or_else(|| self.explain(py, &LedgerError::UnknownSlot(slot)))?;
        let key = RequestKey::of(&request_id)?;
        let shown = request_id.repr()?;
        let child = Bound::new(py, parent.get().sibling(py, request_id.unbind(), key.clone()))?;
        if !self.ids.lock().insert(key.clone()) {
            return Err(PyValueError::new_err(format!(
                "request {shown}: a request with this id is claimed already"
            )));
        }
        match self.run(py, |ledger| ledger.fork(slot)) {
            Ok(slot) => self.bind(&child, slot),
            Err(error) => {
                self.ids.lock().remove(&key);
                return Err(error);
            }
        }
        Ok(child)
    }

    /// The page copies of a group to carry out before the next forward, in order: int32 [copies, 2], source and
    /// destination.
    fn take_page_copies<'py>(&self, py: Python<'py>, group: usize) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let group = self.group(group)?;
        let copies = self.shared.with(py, |ledger| ledger.take_page_copies(group))?;
        let ids = copies.iter().flat_map(|copy| [copy.source, copy.destination]);
        let ids = ids.map(|page| page.0.cast_signed()).collect();
        PyArray1::from_vec(py, ids).reshape([copies.len(), 2])
    }
}
