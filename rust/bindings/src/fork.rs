//! Forks, and the page copies that go before a forward.

use crate::batch::one_slot_of;
use crate::context::{RequestKey, TextContext};
use crate::ledger::Ledger;
use block_pool::PageId;
use cache_manager::{LedgerError, PageCopy};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[pymethods]
impl Ledger {
    /// The pages of a group to zero before the next forward, int32 [pages]. They count as zeroed now.
    fn take_page_fills<'py>(&self, py: Python<'py>, group: usize) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = self.group(group)?;
        let pages = self.shared.with(py, |ledger| ledger.take_page_fills(group))?;
        Ok(page_array(py, pages))
    }

    /// The same, which stay planned: whoever has zeroed them takes them.
    fn planned_page_fills<'py>(&self, py: Python<'py>, group: usize) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = self.group(group)?;
        let pages = self.shared.with(py, |ledger| ledger.planned_page_fills(group).collect::<Vec<_>>())?;
        Ok(page_array(py, pages))
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
    /// destination. They count as carried out now.
    fn take_page_copies<'py>(&self, py: Python<'py>, group: usize) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let group = self.group(group)?;
        let copies = self.shared.with(py, |ledger| ledger.take_page_copies(group))?;
        copy_array(py, &copies)
    }

    /// The same, which stay planned: whoever has carried out all of them takes them.
    fn planned_page_copies<'py>(&self, py: Python<'py>, group: usize) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let group = self.group(group)?;
        let copies =
            self.shared.with(py, |ledger| ledger.planned_page_copies(group).copied().collect::<Vec<_>>())?;
        copy_array(py, &copies)
    }

    /// What was planned of all groups' pages is carried out, or given to whoever does it. If `launches` a
    /// forward is about to run.
    fn page_work_done(&self, py: Python<'_>, launches: bool) -> PyResult<()> {
        self.shared.with(py, |ledger| ledger.page_work_done(launches))
    }
}

fn page_array(py: Python<'_>, pages: impl IntoIterator<Item = PageId>) -> Bound<'_, PyArray1<i32>> {
    PyArray1::from_vec(py, pages.into_iter().map(|page| page.0.cast_signed()).collect())
}

fn copy_array<'py>(py: Python<'py>, copies: &[PageCopy]) -> PyResult<Bound<'py, PyArray2<i32>>> {
    let pages = copies.iter().flat_map(|copy| [copy.source, copy.destination]);
    page_array(py, pages).reshape([copies.len(), 2])
}
