//! What kernels read: the ledger writes into numpy's memory, and says how much it wrote.

use crate::batch::{one_slot_of, slots_of};
use crate::ledger::Ledger;
use crate::tokens::{borrowed, positions_from};
use block_pool::GroupId;
use cache_manager::{FlashInferTables, LedgerError, OffsetTable, SlotId, VarlenTables};
use numpy::{PyArray1, PyReadwriteArray1, PyReadwriteArray2, PyReadwriteArray3, PyUntypedArrayMethods};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
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
    /// Page copies that wait to be carried out.
    pub(crate) page_copies: usize,
    /// Pages that wait to be zeroed.
    pub(crate) page_fills: usize,
}

impl Ledger {
    /// Checks a batch for tables, lets `write` fill them, and closes the step unless pages are to be copied
    /// or zeroed.
    fn write_tables(
        &self,
        batch: &Bound<'_, PyAny>,
        group: GroupId,
        write: impl FnOnce(&mut cache_manager::Ledger, &[SlotId]) -> Result<(), LedgerError>,
    ) -> PyResult<BatchShape> {
        if let Ok(array) = batch.cast::<PyArray1<i32>>() {
            borrowed(array, "batch")?; // unless it lies in the tables' memory
        }
        let slots = slots_of(batch, &self.shared, false)?;
        if slots.len() > self.max_batch_size {
            return Err(PyValueError::new_err(format!(
                "batch of {} requests: over max_batch_size={}",
                slots.len(),
                self.max_batch_size
            )));
        }
        self.run(batch.py(), |ledger| {
            let shape = ledger.batch_shape(&slots)?;
            write(ledger, &slots)?;
            // Else the forward cannot run yet; `page_work_done` closes the step.
            if !slots.is_empty() && !ledger.has_planned_page_work() {
                ledger.close_step();
            }
            Ok(BatchShape {
                requests: slots.len(),
                active: shape.total_active,
                max_active: shape.max_active,
                max_total: shape.max_total,
                pages: shape.total_pages,
                page_copies: ledger.planned_page_copies(group).count(),
                page_fills: ledger.planned_page_fills(group).count(),
            })
        })
    }

    /// The group of a number.
    pub(crate) fn group(&self, group: usize) -> PyResult<GroupId> {
        match self.config.groups.get(group) {
            Some(_) => Ok(GroupId(group as u8)),
            None => Err(PyValueError::new_err(format!("there is no group {group}"))),
        }
    }

    /// Page ids of a request's blocks; 0 for a placeholder.
    fn row(ledger: &cache_manager::Ledger, slot: SlotId, group: GroupId) -> Result<Vec<i32>, LedgerError> {
        Ok(ledger.pages(slot, group)?.iter().map(|page| page.0.cast_signed()).collect())
    }
}

#[pymethods]
impl Ledger {
    /// Writes the lookup table and the cache lengths of a batch.
    fn write_max(
        &self,
        batch: &Bound<'_, PyAny>,
        memory: &RowMemory,
        mut table: PyReadwriteArray2<'_, u32>,
        mut cache_lengths: PyReadwriteArray1<'_, u32>,
        group: usize,
    ) -> PyResult<BatchShape> {
        let group = self.group(group)?;
        let columns = table.shape()[1];
        let (table, lengths) = (table.as_slice_mut()?, cache_lengths.as_slice_mut()?);
        self.write_tables(batch, group, |ledger, slots| {
            ledger.write_cache_lengths(slots, lengths)?;
            ledger.write_rows(group, slots, &mut memory.0.lock(), table, columns)
        })
    }

    /// Writes the block table, sequence lengths, slot mapping and query offsets of a batch.
    #[expect(clippy::too_many_arguments, reason = "one Python signature")]
    fn write_vllm(
        &self,
        batch: &Bound<'_, PyAny>,
        memory: &RowMemory,
        mut table: PyReadwriteArray2<'_, u32>,
        mut seq_lens: PyReadwriteArray1<'_, i32>,
        mut slot_mapping: PyReadwriteArray1<'_, i64>,
        mut query_start_loc: PyReadwriteArray1<'_, i32>,
        group: usize,
    ) -> PyResult<BatchShape> {
        let group = self.group(group)?;
        let columns = table.shape()[1];
        let table = table.as_slice_mut()?;
        let mut varlen = VarlenTables {
            seq_lens: seq_lens.as_slice_mut()?,
            slot_mapping: slot_mapping.as_slice_mut()?,
            query_start_loc: query_start_loc.as_slice_mut()?,
        };
        self.write_tables(batch, group, |ledger, slots| {
            ledger.write_varlen(group, slots, &mut varlen)?;
            ledger.write_rows(group, slots, &mut memory.0.lock(), table, columns)
        })
    }

    /// Writes the block offsets of a batch, pool by pool, sequence lengths and query offsets.
    #[expect(clippy::too_many_arguments, reason = "one Python signature")]
    fn write_tensorrt(
        &self,
        batch: &Bound<'_, PyAny>,
        memory: &RowMemory,
        mut pools: Vec<PyReadwriteArray3<'_, i32>>,
        apart: Vec<u32>,
        fields: usize,
        mut seq_lens: PyReadwriteArray1<'_, i32>,
        mut query_start_loc: PyReadwriteArray1<'_, i32>,
        group: usize,
    ) -> PyResult<BatchShape> {
        let group = self.group(group)?;
        let columns = pools.first().map_or(0, |pool| pool.shape()[2]);
        let mut tables = Vec::with_capacity(pools.len());
        for (pool, apart) in pools.iter_mut().zip(apart) {
            tables.push(OffsetTable { entries: pool.as_slice_mut()?, apart });
        }
        let (lengths, starts) = (seq_lens.as_slice_mut()?, query_start_loc.as_slice_mut()?);
        self.write_tables(batch, group, |ledger, slots| {
            let memory = &mut memory.0.lock();
            ledger.write_offsets(group, slots, memory, &mut tables, fields, columns, lengths, starts)
        })
    }

    /// Writes the index arrays of a batch.
    fn write_flashinfer(
        &self,
        batch: &Bound<'_, PyAny>,
        mut indptr: PyReadwriteArray1<'_, i32>,
        mut indices: PyReadwriteArray1<'_, i32>,
        mut last_page_len: PyReadwriteArray1<'_, i32>,
        mut query_indptr: PyReadwriteArray1<'_, i32>,
        group: usize,
    ) -> PyResult<BatchShape> {
        let group = self.group(group)?;
        let mut tables = FlashInferTables {
            indptr: indptr.as_slice_mut()?,
            indices: indices.as_slice_mut()?,
            last_page_len: last_page_len.as_slice_mut()?,
            query_indptr: query_indptr.as_slice_mut()?,
        };
        self.write_tables(batch, group, |ledger, slots| ledger.write_flashinfer(group, slots, &mut tables))
    }

    /// Writes the page of each request in a group of states, and query offsets.
    fn write_states(
        &self,
        batch: &Bound<'_, PyAny>,
        mut pages: PyReadwriteArray1<'_, i32>,
        mut query_start_loc: PyReadwriteArray1<'_, i32>,
        group: usize,
    ) -> PyResult<BatchShape> {
        let group = self.group(group)?;
        let (pages, starts) = (pages.as_slice_mut()?, query_start_loc.as_slice_mut()?);
        self.write_tables(batch, group, |ledger, slots| ledger.write_states(group, slots, pages, starts))
    }

    /// Writes the block table, the encoder's lengths and query offsets of a batch; gives also the most of these lengths.
    fn write_cross(
        &self,
        batch: &Bound<'_, PyAny>,
        memory: &RowMemory,
        mut table: PyReadwriteArray2<'_, u32>,
        mut lengths: PyReadwriteArray1<'_, i32>,
        mut query_start_loc: PyReadwriteArray1<'_, i32>,
        group: usize,
    ) -> PyResult<(BatchShape, u32)> {
        let group = self.group(group)?;
        let columns = table.shape()[1];
        let (table, lengths) = (table.as_slice_mut()?, lengths.as_slice_mut()?);
        let starts = query_start_loc.as_slice_mut()?;
        let mut most = 0;
        let shape = self.write_tables(batch, group, |ledger, slots| {
            most = ledger.write_encoder_lengths(slots, lengths, starts)?;
            ledger.write_rows(group, slots, &mut memory.0.lock(), table, columns)
        })?;
        Ok((shape, most))
    }

    /// The page ids of each request's blocks in a group; 0 for a placeholder.
    fn pages<'py>(
        &self,
        batch: &Bound<'py, PyAny>,
        group: usize,
    ) -> PyResult<Vec<Bound<'py, PyArray1<i32>>>> {
        let group = self.group(group)?;
        let slots = slots_of(batch, &self.shared, false)?;
        let rows = self.run(batch.py(), |ledger| {
            slots.iter().map(|&slot| Ledger::row(ledger, slot, group)).collect::<Result<Vec<_>, _>>()
        })?;
        Ok(rows.into_iter().map(|row| PyArray1::from_vec(batch.py(), row)).collect())
    }

    /// The page ids of one request's blocks in a group; 0 for a placeholder.
    fn pages_of<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        group: usize,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let group = self.group(group)?;
        let slot = one_slot_of(request, &self.shared)?;
        let row = self.run(request.py(), |ledger| Ledger::row(ledger, slot, group))?;
        Ok(PyArray1::from_vec(request.py(), row))
    }

    /// Where the KV of each token position goes: `page · page_size + offset`, int64.
    fn slot_mapping<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        positions: &Bound<'py, PyAny>,
        group: usize,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let group = self.group(group)?;
        let py = request.py();
        let slot = one_slot_of(request, &self.shared)?;
        let positions = positions_from(positions)?;
        let mapping = self.run(py, |ledger| ledger.slot_mapping(slot, group, positions.iter().copied()))?;
        Ok(PyArray1::from_vec(py, mapping))
    }
}
