//! Requests from Python: one context or slot, a list of contexts, or an int32 array of slots.

use crate::context::{LOST, State, TextContext};
use crate::shared::Shared;
use crate::tokens::{in_one_piece, slot_from};
use cache_manager::SlotId;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use std::sync::{Arc, Weak};

/// The slots of `batch` in `shared`. With `late`, a context that was released stands for its former slot:
/// results for it are to be dropped.
pub(crate) fn slots_of(batch: &Bound<'_, PyAny>, shared: &Arc<Shared>, late: bool) -> PyResult<Vec<SlotId>> {
    if let Ok(context) = batch.cast::<TextContext>() {
        return Ok(vec![slot_of(context, shared, late)?]);
    }
    if let Ok(list) = batch.cast::<PyList>() {
        return list.iter().enumerate().map(|(index, item)| item_slot(&item, index, shared, late)).collect();
    }
    if let Ok(tuple) = batch.cast::<PyTuple>() {
        return tuple.iter().enumerate().map(|(index, item)| item_slot(&item, index, shared, late)).collect();
    }
    if let Ok(array) = batch.cast::<PyArray1<i32>>() {
        // Copied without being borrowed, which would take as long as finding a small batch's pages.
        let slots = array.to_vec().or_else(|_| Ok(in_one_piece(array, "batch")?.as_slice()?.to_vec()));
        return slots.map(|slots| slots.into_iter().map(|slot| SlotId(slot.cast_unsigned())).collect());
    }
    if let Some(slot) = slot_from(batch, "batch")? {
        return Ok(vec![slot]);
    }
    let given = match batch.cast::<PyUntypedArray>() {
        Ok(array) => format!("a {}-D array of {}", array.ndim(), array.dtype().str()?),
        Err(_) => batch.get_type().name()?.to_string(),
    };
    Err(PyTypeError::new_err(format!(
        "batch: got {given}; give a TextContext, a slot, a list of TextContext, or a 1-D int32 array of slots"
    )))
}

/// The slot of one request, given as its context or its slot.
pub(crate) fn one_slot_of(request: &Bound<'_, PyAny>, shared: &Arc<Shared>) -> PyResult<SlotId> {
    if let Ok(context) = request.cast::<TextContext>() {
        return slot_of(context, shared, false);
    }
    match slot_from(request, "ctx")? {
        Some(slot) => Ok(slot),
        None => Err(PyTypeError::new_err(format!(
            "ctx: got {}; give one TextContext or one slot",
            request.get_type().name()?
        ))),
    }
}

fn item_slot(item: &Bound<'_, PyAny>, index: usize, shared: &Arc<Shared>, late: bool) -> PyResult<SlotId> {
    match item.cast::<TextContext>() {
        Ok(context) => slot_of(context, shared, late),
        Err(_) => Err(PyTypeError::new_err(format!(
            "batch[{index}]: got {}; must be a TextContext (slots go in an int32 array)",
            item.get_type().name()?
        ))),
    }
}

fn slot_of(context: &Bound<'_, TextContext>, shared: &Arc<Shared>, late: bool) -> PyResult<SlotId> {
    let py = context.py();
    let context = context.get();
    let problem = match &*context.state.lock() {
        State::Claimed { shared: own, slot } if Arc::ptr_eq(own, shared) => return Ok(*slot),
        State::Claimed { .. } => "is claimed by another manager",
        State::Claiming => "is being claimed in another thread",
        State::Lost => LOST,
        State::Free(held) => match &held.former {
            Some((own, slot)) if late && std::ptr::eq(Weak::as_ptr(own), Arc::as_ptr(shared)) => {
                return Ok(*slot);
            }
            Some(_) => "is not claimed (it was released)",
            None => "is not claimed; call claim() first",
        },
    };
    let id = context.request_id.bind(py).repr()?;
    Err(PyValueError::new_err(format!("request {id}: {problem}")))
}
