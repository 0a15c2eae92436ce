//! What the ledger and a connector in Python tell each other: wanted blocks, loads, offloads, ends.

use crate::batch::slots_of;
use crate::ledger::{Ledger, bounds_from};
use crate::tiered::{TieredConnector, closed};
use crate::tokens::{ids_from, seconds_from};
use crate::transfer::Transfer;
use cache_manager::{BegunLoad, BlockKey, CopyEnd, CopyJob, LoadJob, OuterTier, Presence, SlotId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::ops::Range;
use tiered_connector::connector::Closed;

/// Blocks by what they are: canonical hash and guard each.
pub(crate) type Keys<'py> = Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>;

/// `(blocks that may be reused, how many of them are on the device, the request's hint)`.
type Wanted<'py> = (Keys<'py>, usize, Option<Py<PyAny>>);

/// `(slot, copy, blocks, pages)` of a load that began, a list of blocks and of pages for each group.
type Load = (u32, u64, Vec<Vec<usize>>, Vec<Vec<u32>>);

/// `(copy, pages, keys)` of an offload that began, a list for each group.
type Offload<'py> = (u64, Vec<Vec<u32>>, Vec<Keys<'py>>);

/// `(slot, copy, transfer)` of a load from a native tier.
pub(crate) type Begun = (u32, u64, Transfer);

pub(crate) fn keys<'py>(py: Python<'py>, keys: &[BlockKey]) -> Keys<'py> {
    keys.iter().map(|key| (PyBytes::new(py, &key.identity), PyBytes::new(py, &key.guard))).collect()
}

/// How a copy ended, as Python names it.
struct Ended((u64, CopyEnd));

impl<'py> FromPyObject<'_, 'py> for Ended {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Ended> {
        let (copy, end): (u64, String) = given.extract()?;
        let end = match end.as_str() {
            "done" => CopyEnd::Done,
            "failed" => CopyEnd::Failed,
            "refused" => CopyEnd::Refused,
            _ => {
                return Err(PyValueError::new_err(format!("{end:?}: must be 'done', 'failed' or 'refused'")));
            }
        };
        Ok(Ended((copy, end)))
    }
}

fn pages_by_group(copy: &CopyJob) -> Vec<Vec<u32>> {
    let pages = |(_, part): (_, Range<usize>)| copy.pages[part].iter().map(|page| page.0).collect();
    copy.parts().map(pages).collect()
}

fn load(job: &LoadJob) -> Load {
    let blocks = job.copy.parts().map(|(_, part)| job.blocks[part].to_vec());
    (job.slot.0, job.copy.id.0, blocks.collect(), pages_by_group(&job.copy))
}

fn ends(ended: Vec<Ended>) -> Vec<(u64, CopyEnd)> {
    ended.into_iter().map(|Ended(end)| end).collect()
}

impl Ledger {
    pub(crate) fn own_tier(&self) -> PyResult<&TieredConnector> {
        let tier =
            self.tier.as_ref().ok_or_else(|| PyValueError::new_err("the ledger has no tier of its own"))?;
        Ok(tier.get())
    }
}

#[pymethods]
impl Ledger {
    /// The slots of a batch.
    fn slots(&self, batch: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        Ok(slots_of(batch, &self.shared, false)?.into_iter().map(|slot| slot.0).collect())
    }

    /// The id of the request under a slot; None when nobody is claimed under it.
    fn request_id(&self, py: Python<'_>, slot: u32) -> Option<Py<PyAny>> {
        self.context_of(py, SlotId(slot)).map(|context| context.get().request_id.clone_ref(py))
    }

    /// What each request of a batch could use of other tiers; None for one that does not ask.
    fn wanted<'py>(&self, batch: &Bound<'py, PyAny>) -> PyResult<Vec<Option<Wanted<'py>>>> {
        let py = batch.py();
        let slots = slots_of(batch, &self.shared, false)?;
        let wanted = self
            .run(py, |ledger| slots.iter().map(|&slot| ledger.wanted(slot)).collect::<Result<Vec<_>, _>>())?;
        let one = |(slot, wanted): (&SlotId, cache_manager::Wanted)| {
            let hint = self.context_of(py, *slot).and_then(|context| context.get().hint(py));
            (keys(py, &wanted.keys), wanted.on_device, hint)
        };
        Ok(slots.iter().zip(wanted).map(|(slot, wanted)| wanted.map(|wanted| one((slot, wanted)))).collect())
    }

    /// `alloc`, with blocks of each request that come from another tier.
    fn alloc_with_loads(
        &self,
        batch: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        loads: &Bound<'_, PyList>,
    ) -> PyResult<Vec<Load>> {
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        let loads: Vec<u32> = loads.extract()?;
        let jobs = self.run(batch.py(), |ledger| ledger.alloc_with_loads(&slots, &bounds, &loads))?;
        Ok(jobs.iter().map(load).collect())
    }

    /// `alloc`, with what other tiers have of each request's blocks: `(first block, a list a group)`, which says
    /// of each block from that one on whether it is there. With `only`, requests that load nothing are not planned.
    fn alloc_with_blocks(
        &self,
        batch: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        there: Vec<(usize, Vec<Vec<bool>>)>,
        only: bool,
    ) -> PyResult<Vec<Load>> {
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        let there: Vec<_> = there.into_iter().map(|(first, groups)| Presence { first, groups }).collect();
        let jobs = self.run(batch.py(), |ledger| ledger.alloc_with_blocks(&slots, &bounds, &there, only))?;
        Ok(jobs.iter().map(load).collect())
    }

    /// `alloc`, with what the tier that the ledger asks itself has: `(number of requests, loads that began)`, each
    /// load as `(slot, copy, transfer)`. With `only`, requests that load nothing are not planned.
    fn alloc_from_tier(
        &self,
        batch: &Bound<'_, PyAny>,
        num_tokens: Option<&Bound<'_, PyAny>>,
        only: bool,
    ) -> PyResult<(usize, Vec<Begun>)> {
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        let mut tier = &self.own_tier()?.core;
        let begun = self.run(batch.py(), |ledger| ledger.alloc_from(&mut tier, &slots, &bounds, only))?;
        let load = |BegunLoad { slot, copy, completion }: BegunLoad| {
            let pages = copy.pages.iter().map(|page| page.0).collect();
            (slot.0, copy.id.0, Transfer::new(completion, pages))
        };
        Ok((slots.len(), begun.into_iter().map(load).collect()))
    }

    /// Copies of the tier that have ended since the last call: `(copy, "done" | "failed")` each.
    fn take_ended(&self, py: Python<'_>) -> PyResult<Vec<(u64, &'static str)>> {
        let mut tier = &self.own_tier()?.core;
        let ended = tier.take_ended();
        if ended.is_empty()
            && let Err(error @ Closed::Forked) = tier.check_open()
            && self.shared.with(py, |ledger| ledger.copies_in_flight())? > 0
        {
            return Err(closed(error)); // those that are in flight never end here
        }
        let name = |(copy, end)| (copy, if end == CopyEnd::Done { "done" } else { "failed" });
        Ok(ended.into_iter().map(name).collect())
    }

    /// Whether a copy was begun with the tier and was not among those that have ended.
    fn is_copying_to_tier(&self, copy: u64) -> PyResult<bool> {
        Ok(self.own_tier()?.core.is_copying(copy))
    }

    /// The argument `completions`: numbers of copies.
    #[staticmethod]
    fn copy_ids(completions: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
        ids_from(completions, "completions")
    }

    /// Whether a copy is in flight.
    fn is_copying(&self, py: Python<'_>, copy: u64) -> PyResult<bool> {
        self.shared.with(py, |ledger| ledger.is_copying(copy))
    }

    /// Tells how copies ended: `(copy, "done" | "failed" | "refused")` each. Gives the slots that waited. What a token
    /// that came by itself has published since goes to the tier.
    fn end_copies(&self, ended: &Bound<'_, PyList>) -> PyResult<Vec<u32>> {
        let py = ended.py();
        let ended = ends(ended.extract()?);
        let ready = self.run(py, |ledger| {
            let ready = ledger.end_copies(&ended)?;
            self.offload_to_tier(ledger)?;
            Ok(ready)
        })?;
        Ok(ready.into_iter().map(|slot| slot.0).collect())
    }

    /// Opens the next step if the newest is closed or planned, and ends copies. Gives its number, and the
    /// slots that waited for these copies.
    fn begin_step(
        &self,
        now: Option<&Bound<'_, PyAny>>,
        ended: &Bound<'_, PyList>,
    ) -> PyResult<(u32, Vec<u32>)> {
        let now = now.map(|now| seconds_from(now, "now")).transpose()?;
        let py = ended.py();
        let ended = ends(ended.extract()?);
        let (step, ready) = self.run(py, |ledger| {
            let begun = ledger.begin_step(now, &ended)?;
            self.offload_to_tier(ledger)?;
            Ok(begun)
        })?;
        Ok((step.0, ready.into_iter().map(|slot| slot.0).collect()))
    }

    /// Offloads that began since the last call: `(copy, pages, keys)` each, a list for each group.
    fn take_offloads<'py>(&self, py: Python<'py>) -> PyResult<Vec<Offload<'py>>> {
        let jobs = self.shared.with(py, cache_manager::Ledger::take_offloads)?;
        let offload = |job: cache_manager::OffloadJob| {
            let keys = job.copy.parts().map(|(_, part)| keys(py, &job.keys[part]));
            (job.copy.id.0, pages_by_group(&job.copy), keys.collect())
        };
        Ok(jobs.into_iter().map(offload).collect())
    }
}
