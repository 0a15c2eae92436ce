//! What schedulers ask: needs, passes, chunks that are made shorter.

use crate::batch::{one_slot_of, slots_of};
use crate::ledger::{Ledger, bounds_from};
use crate::queries::PrefixWalk;
use crate::tokens::{counts_from, seconds_from};
use cache_manager::Outlook;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The argument `blocks`: pages of each group.
fn blocks_from(given: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    counts_from(given, "blocks")
}

#[pymethods]
impl Ledger {
    /// Pages that the next forward takes, or with `to_completion` all forwards to come: int32 [requests, groups].
    /// `walks` are where a summary says that the blocks of each request were found.
    #[pyo3(signature = (batch, num_tokens, two_steps, to_completion, walks = None))]
    fn needed_blocks<'py>(
        &self,
        batch: &Bound<'py, PyAny>,
        num_tokens: Option<&Bound<'py, PyAny>>,
        two_steps: bool,
        to_completion: bool,
        walks: Option<Vec<Option<Py<PrefixWalk>>>>,
    ) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let py = batch.py();
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        if let Some(walks) = walks.as_ref().filter(|walks| walks.len() != slots.len()) {
            let (summaries, requests) = (walks.len(), slots.len());
            return Err(PyValueError::new_err(format!(
                "summary has {summaries} entries for {requests} requests: give one a request, or None"
            )));
        }
        let walks = walks.unwrap_or_default();
        let walks: Vec<_> = walks.iter().map(|walk| walk.as_ref()?.get().within(&self.shared)).collect();
        let outlook = Outlook { num_tokens: &bounds, two_steps, walks: &walks };
        let needs = self.run(py, |ledger| {
            if to_completion {
                ledger.remaining_blocks_to_completion(&slots, outlook)
            } else {
                ledger.needed_blocks_one_step(&slots, outlook)
            }
        })?;
        let needs = needs.iter().map(|need| i32::try_from(*need).unwrap_or(i32::MAX)).collect();
        PyArray1::from_vec(py, needs).reshape([slots.len(), self.config.groups.len()])
    }

    /// Whether `alloc` would find room.
    fn can_alloc(&self, batch: &Bound<'_, PyAny>, num_tokens: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        self.run(batch.py(), |ledger| ledger.can_alloc(&slots, &bounds))
    }

    /// Whether so many pages of each group can be had together.
    fn can_satisfy(&self, blocks: &Bound<'_, PyAny>, at_capacity: bool) -> PyResult<bool> {
        let demand = blocks_from(blocks)?;
        self.run(blocks.py(), |ledger| ledger.can_satisfy(&demand, at_capacity))
    }

    /// Tokens that the next forward costs, int32 [requests].
    fn reuse_adjusted_compute<'py>(
        &self,
        batch: &Bound<'py, PyAny>,
        num_tokens: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        let costs = self.run(batch.py(), |ledger| ledger.reuse_adjusted_compute(&slots, &bounds))?;
        Ok(PyArray1::from_vec(batch.py(), costs.iter().map(|cost| cost.cast_signed()).collect()))
    }

    /// Tokens that the next forward should compute, int32 [requests].
    fn chunk_tokens<'py>(
        &self,
        batch: &Bound<'py, PyAny>,
        num_tokens: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        let chunks = self.run(batch.py(), |ledger| ledger.chunk_tokens(&slots, &bounds))?;
        Ok(PyArray1::from_vec(batch.py(), chunks.iter().map(|chunk| chunk.cast_signed()).collect()))
    }

    /// `(pages that the request holds in the end, pages that there are)`, where that says whether it can be served.
    fn block_budget(&self, request: &Bound<'_, PyAny>) -> PyResult<Option<(u32, u32)>> {
        let slot = one_slot_of(request, &self.shared)?;
        self.run(request.py(), |ledger| ledger.block_budget(slot))
    }

    fn start_scheduling(&self, py: Python<'_>, now: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let now = now.map(|now| seconds_from(now, "now")).transpose()?;
        self.run(py, |ledger| ledger.start_scheduling(now))
    }

    fn scheduling_reserve(&self, request: &Bound<'_, PyAny>, blocks: &Bound<'_, PyAny>) -> PyResult<bool> {
        let slot = one_slot_of(request, &self.shared)?;
        let blocks = blocks_from(blocks)?;
        self.run(request.py(), |ledger| ledger.scheduling_reserve(slot, &blocks))
    }

    fn scheduling_remove(&self, request: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = one_slot_of(request, &self.shared)?;
        self.run(request.py(), |ledger| ledger.scheduling_remove(slot))
    }

    fn scheduling_has_free_blocks(&self, blocks: &Bound<'_, PyAny>) -> PyResult<bool> {
        let demand = blocks_from(blocks)?;
        self.run(blocks.py(), |ledger| ledger.scheduling_has_free_blocks(&demand))
    }

    /// Chunks that were planned compute less.
    fn shorten(&self, batch: &Bound<'_, PyAny>, num_tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let slots = slots_of(batch, &self.shared, false)?;
        let tokens = counts_from(num_tokens, "num_tokens")?;
        self.run(batch.py(), |ledger| ledger.shorten(&slots, &tokens))
    }
}
