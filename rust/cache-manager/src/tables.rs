//! What attention kernels read: rows of page ids, lengths, and slots of tokens.
//!
//! Tables are written into memory that the caller owns and whose addresses never change. The ledger
//! remembers per buffer what it wrote last ([`RowMemory`]), so that a decode step writes what changed.
//!
//! Drafts that a step verifies count as computed tokens.

use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::row::Row;
use crate::sequence::{Sequence, StepOut};
use crate::slots::SlotId;
use block_pool::{GroupId, PageId};

#[derive(Clone, Copy)]
struct WrittenRow {
    serial: u64,
    version: u32,
    /// Cells that hold pages.
    cells: u32,
}

/// What one table buffer holds, row by row.
#[derive(Default)]
pub struct RowMemory {
    rows: Vec<Option<WrittenRow>>,
}

/// Totals of a batch, in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatchShape {
    /// Tokens that the forward computes, over all requests.
    pub total_active: u32,
    /// Most tokens that it computes for one request.
    pub max_active: u32,
    /// Most tokens of one request, computed ones included.
    pub max_total: u32,
    /// Page-table entries of all requests.
    pub total_pages: u32,
}

/// Outputs of the vLLM / `FlashAttention` form beside the block table.
pub struct VarlenTables<'a> {
    /// Tokens of each request after the forward; `[batch]`.
    pub seq_lens: &'a mut [i32],
    /// Where each computed token's KV goes, `page · page_size + offset`; `[total active]`.
    pub slot_mapping: &'a mut [i64],
    /// Offsets of each request's computed tokens; `[batch + 1]`.
    pub query_start_loc: &'a mut [i32],
}

/// Outputs of the `FlashInfer` form.
pub struct FlashInferTables<'a> {
    /// Offsets into `indices`; `[batch + 1]`.
    pub indptr: &'a mut [i32],
    /// Page ids of all requests; `[total pages]`.
    pub indices: &'a mut [i32],
    /// Tokens in each request's last page, 1 to `page_size`; `[batch]`.
    pub last_page_len: &'a mut [i32],
    /// Offsets of each request's computed tokens; `[batch + 1]`.
    pub query_indptr: &'a mut [i32],
}

/// Outputs of the TensorRT-LLM form: one pool's entries.
pub struct OffsetTable<'a> {
    /// Of each request, of keys and of values, of each block; `[rows, 2, columns]`. -1 where there is no page.
    pub entries: &'a mut [i32],
    /// From one page to the next.
    pub apart: u32,
}

impl Ledger {
    /// Checks that every request of the batch is planned and there once, and gives its totals.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; a request without a step out.
    pub fn batch_shape(&mut self, batch: &[SlotId]) -> Result<BatchShape, LedgerError> {
        self.check_batch(batch)?;
        let mut shape = BatchShape::default();
        for &slot in batch {
            let (_, out) = self.planned(slot)?;
            shape.total_active += out.reach() - out.start;
            shape.max_active = shape.max_active.max(out.reach() - out.start);
            shape.max_total = shape.max_total.max(out.reach());
            shape.total_pages += out.reach().div_ceil(self.config.page_size);
        }
        Ok(shape)
    }

    /// Writes one row a request into `table`, `columns` cells a row: its pages in a group. Unused cells, and those of
    /// placeholders, hold the null page. `memory` is what is known of the buffer, whose other rows are left as they are.
    ///
    /// # Errors
    /// A request without a step out; a row that does not fit.
    pub fn write_rows(
        &self,
        group: GroupId,
        batch: &[SlotId],
        memory: &mut RowMemory,
        table: &mut [u32],
        columns: usize,
    ) -> Result<(), LedgerError> {
        if table.len() < batch.len() * columns || columns == 0 {
            return Err(LedgerError::Mismatch(format!(
                "a table of {} cells has no {} rows",
                table.len(),
                batch.len()
            )));
        }
        memory.rows.resize(memory.rows.len().max(batch.len()), None);
        for ((&slot, row), written) in batch.iter().zip(table.chunks_exact_mut(columns)).zip(&mut memory.rows)
        {
            let (sequence, _) = self.planned(slot)?;
            let held = sequence.row(group);
            if held.pages.len() > columns {
                return Err(LedgerError::Mismatch(format!(
                    "{} pages do not fit a row of {columns}",
                    held.pages.len()
                )));
            }
            write_row(sequence.serial, held, written, row);
        }
        Ok(())
    }

    /// Writes each request's tokens with KV before the forward; `[batch]`.
    ///
    /// # Errors
    /// A request without a step out.
    pub fn write_cache_lengths(&self, batch: &[SlotId], lengths: &mut [u32]) -> Result<(), LedgerError> {
        for (&slot, length) in batch.iter().zip(lengths) {
            *length = self.planned(slot)?.1.start;
        }
        Ok(())
    }

    /// Writes what the vLLM form has beside the block table of a group.
    ///
    /// # Errors
    /// A request without a step out; a slot mapping that is too small.
    pub fn write_varlen(
        &self,
        group: GroupId,
        batch: &[SlotId],
        tables: &mut VarlenTables<'_>,
    ) -> Result<(), LedgerError> {
        let page_size = self.config.page_size;
        let mut at = 0;
        tables.query_start_loc[0] = 0;
        for (index, &slot) in batch.iter().enumerate() {
            let (sequence, out) = self.planned(slot)?;
            let count = (out.reach() - out.start) as usize;
            let cells = tables.slot_mapping.get_mut(at..at + count).ok_or_else(|| {
                LedgerError::Mismatch(format!(
                    "the slot mapping is smaller than the batch's {} tokens",
                    at + count
                ))
            })?;
            let pages = &sequence.row(group).pages;
            for (position, cell) in (out.start..).zip(cells) {
                let page = pages.get((position / page_size) as usize).unwrap_or(&PageId::NULL);
                *cell = i64::from(page.0) * i64::from(page_size) + i64::from(position % page_size);
            }
            at += count;
            tables.seq_lens[index] = out.reach().cast_signed();
            tables.query_start_loc[index + 1] = at as i32;
        }
        Ok(())
    }

    /// Writes one row a request into the tables of each pool, 2 fields of `columns` cells a row, of which the first
    /// `fields` have entries, `page · apart + field`. `memory` is what is known of these tables, which were -1 at first.
    /// The caller has checked that every entry is an i32. Beside them [`VarlenTables::seq_lens`] and
    /// [`VarlenTables::query_start_loc`].
    ///
    /// # Errors
    /// A request without a step out; a row that does not fit.
    #[expect(clippy::too_many_arguments, reason = "tables and what is known of them")]
    pub fn write_offsets(
        &self,
        group: GroupId,
        batch: &[SlotId],
        memory: &mut RowMemory,
        pools: &mut [OffsetTable<'_>],
        fields: usize,
        columns: usize,
        seq_lens: &mut [i32],
        query_start_loc: &mut [i32],
    ) -> Result<(), LedgerError> {
        memory.rows.resize(memory.rows.len().max(batch.len()), None);
        let mut at = 0;
        query_start_loc[0] = 0;
        for (index, (&slot, written)) in batch.iter().zip(&mut memory.rows).enumerate() {
            let (sequence, out) = self.planned(slot)?;
            let held = sequence.row(group);
            let row = index * 2 * columns..(index + 1) * 2 * columns;
            if held.pages.len() > columns || pools.iter().any(|pool| pool.entries.len() < row.end) {
                return Err(LedgerError::Mismatch(format!(
                    "{} pages of request {index} do not fit rows of {columns}",
                    held.pages.len()
                )));
            }
            let (first, stale_end) = changed(sequence.serial, held, written);
            for pool in &mut *pools {
                let cells = pool.entries[row.clone()].chunks_exact_mut(columns).take(fields);
                for (field, cells) in (0..).zip(cells) {
                    for (cell, &page) in cells[first..].iter_mut().zip(&held.pages[first..]) {
                        let entry = (page.0 * pool.apart + field).cast_signed();
                        *cell = if page == PageId::NULL { -1 } else { entry };
                    }
                    cells[held.pages.len()..stale_end.max(held.pages.len())].fill(-1);
                }
            }
            at += out.reach() - out.start;
            seq_lens[index] = out.reach().cast_signed();
            query_start_loc[index + 1] = at.cast_signed();
        }
        Ok(())
    }

    /// Writes the `FlashInfer` form of a group.
    ///
    /// # Errors
    /// A request without a step out; an index array that is too small.
    pub fn write_flashinfer(
        &self,
        group: GroupId,
        batch: &[SlotId],
        tables: &mut FlashInferTables<'_>,
    ) -> Result<(), LedgerError> {
        let page_size = self.config.page_size;
        let (mut at, mut queries) = (0, 0);
        tables.indptr[0] = 0;
        tables.query_indptr[0] = 0;
        for (index, &slot) in batch.iter().enumerate() {
            let (sequence, out) = self.planned(slot)?;
            let count = out.reach().div_ceil(page_size) as usize;
            let cells = tables.indices.get_mut(at..at + count).ok_or_else(|| {
                LedgerError::Mismatch(format!(
                    "the index array is smaller than the batch's {} pages",
                    at + count
                ))
            })?;
            let pages = &sequence.row(group).pages;
            for (block, cell) in cells.iter_mut().enumerate() {
                *cell = pages.get(block).unwrap_or(&PageId::NULL).0.cast_signed();
            }
            at += count;
            queries += out.reach() - out.start;
            tables.indptr[index + 1] = at as i32;
            tables.last_page_len[index] = ((out.reach() - 1) % page_size + 1).cast_signed();
            tables.query_indptr[index + 1] = queries.cast_signed();
        }
        Ok(())
    }

    /// Writes the page of each request in a group of states or of pages that last; the null page for padding. A forward
    /// reads the state from it and writes the new one to it. `[batch]`. Beside them the offsets of each request's
    /// computed tokens; `[batch + 1]`.
    ///
    /// # Errors
    /// A request without a step out.
    pub fn write_states(
        &self,
        group: GroupId,
        batch: &[SlotId],
        pages: &mut [i32],
        query_start_loc: &mut [i32],
    ) -> Result<(), LedgerError> {
        let mut at = 0;
        query_start_loc[0] = 0;
        for (index, &slot) in batch.iter().enumerate() {
            let (sequence, out) = self.planned(slot)?;
            pages[index] = sequence.row(group).pages.last().unwrap_or(&PageId::NULL).0.cast_signed();
            at += out.reach() - out.start;
            query_start_loc[index + 1] = at.cast_signed();
        }
        Ok(())
    }

    /// Where the KV of the request's token `positions` goes in a group: page · page size + offset.
    ///
    /// # Errors
    /// An unknown slot; a padding request; a position that the request has no page for, or none any more.
    pub fn slot_mapping(
        &self,
        slot: SlotId,
        group: GroupId,
        positions: impl Iterator<Item = i64>,
    ) -> Result<Vec<i64>, LedgerError> {
        let page_size = i64::from(self.config.page_size);
        let pages = self.pages(slot, group)?;
        let place = |position: i64| {
            let block = usize::try_from(position.div_euclid(page_size)).ok();
            let page = block.and_then(|block| pages.get(block)).filter(|&&page| page != PageId::NULL);
            let page = page.ok_or_else(|| LedgerError::OutOfRange {
                name: "positions",
                given: i128::from(position),
                allowed: format!("0 to {}, where the request has pages", pages.len() as i64 * page_size - 1),
            })?;
            Ok(i64::from(page.0) * page_size + position % page_size)
        };
        positions.map(place).collect()
    }

    pub(crate) fn planned(&self, slot: SlotId) -> Result<(&Sequence, StepOut), LedgerError> {
        let sequence = self.sequence(slot)?;
        let out = sequence.steps_out.last().ok_or_else(|| sequence.not_planned(slot))?;
        Ok((sequence, *out))
    }
}

/// The first cell that is not as it was written before, and where cells end that hold what was before; `written` is
/// what the row holds from now on.
#[inline]
fn changed(serial: u64, held: &Row, written: &mut Option<WrittenRow>) -> (usize, usize) {
    let (version, cells) = (held.version, held.pages.len() as u32);
    let changed = match *written {
        Some(old) if old.serial == serial && old.version == version && old.cells <= cells => {
            (old.cells as usize, 0)
        }
        Some(old) => (0, old.cells as usize),
        None => (0, 0),
    };
    *written = Some(WrittenRow { serial, version, cells });
    changed
}

#[inline]
fn write_row(serial: u64, held: &Row, written: &mut Option<WrittenRow>, row: &mut [u32]) {
    let pages = &held.pages;
    let (first, stale_end) = changed(serial, held, written);
    row[first..pages.len()].iter_mut().zip(&pages[first..]).for_each(|(cell, page)| *cell = page.0);
    if stale_end > pages.len() {
        row[pages.len()..stale_end].fill(PageId::NULL.0);
    }
}
