//! Requests set aside in the ledger's own tier, and the cache without memory.

use crate::batch::slots_of;
use crate::connectors::Begun;
use crate::ledger::Ledger;
use crate::transfer::Transfer;
use cache_manager::{BegunCopy, LedgerError, PrivateTier, SlotId};
use pyo3::prelude::*;

type Call =
    fn(&mut cache_manager::Ledger, &mut dyn PrivateTier, &[SlotId]) -> Result<Vec<BegunCopy>, LedgerError>;

impl Ledger {
    /// Tells the tier that the ledger asks itself, if there is one, of units that no request uses any more.
    pub(crate) fn free_units(&self, ledger: &mut cache_manager::Ledger) {
        if let Some(tier) = &self.tier {
            ledger.free_units(&mut &tier.get().core);
        }
    }

    /// `(number of requests, copies that began)`, each copy as `(slot, copy, transfer)`.
    fn begin_with_tier(&self, batch: &Bound<'_, PyAny>, call: Call) -> PyResult<(usize, Vec<Begun>)> {
        let slots = slots_of(batch, &self.shared, false)?;
        let mut tier = &self.own_tier()?.core;
        let begun = self.run(batch.py(), |ledger| call(ledger, &mut tier, &slots))?;
        let copy = |BegunCopy { slot, job, completion }: BegunCopy| {
            let pages = job.pages.iter().map(|page| page.0).collect();
            (slot.0, job.id.0, Transfer::new(completion, pages))
        };
        Ok((slots.len(), begun.into_iter().map(copy).collect()))
    }
}

#[pymethods]
impl Ledger {
    fn suspend(&self, batch: &Bound<'_, PyAny>) -> PyResult<(usize, Vec<Begun>)> {
        self.begin_with_tier(batch, cache_manager::Ledger::suspend)
    }

    fn resume(&self, batch: &Bound<'_, PyAny>) -> PyResult<(usize, Vec<Begun>)> {
        self.begin_with_tier(batch, cache_manager::Ledger::resume)
    }

    fn check_unused(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |ledger| ledger.check_unused())
    }

    fn sleep(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, cache_manager::Ledger::sleep)
    }

    fn wake(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, cache_manager::Ledger::wake)
    }

    #[getter]
    fn is_asleep(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.with(py, |ledger| ledger.is_asleep())
    }
}
