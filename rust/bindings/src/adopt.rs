//! Device memory of Python's, as regions that Rust threads copy from and to.
#![expect(unsafe_code, reason = "a region is made of memory that Python owns")]

use numpy::{PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::ptr::NonNull;
use tiered_connector::copy::{Piece, Region};

/// Most pieces of a page in one array.
const MOST_PIECES: usize = 1 << 16;

/// An array whose first axis is the page.
pub(crate) struct Adopted {
    /// Where its bytes lie.
    pub(crate) region: Region,
    pub(crate) pages: usize,
    /// Keeps the memory where it is: to be dropped after the region and its clones.
    pub(crate) array: Py<PyArrayDyn<u8>>,
}

/// A uint8 array [pages, …] of any strides that do not overlap. A page's bytes count in the order of its indices.
///
/// The caller keeps the array, and copies only while nobody else uses the pages that are copied.
pub(crate) fn adopt(given: &Bound<'_, PyAny>, name: &str) -> PyResult<Adopted> {
    let Ok(array) = given.cast::<PyArrayDyn<u8>>() else {
        let kind = given.get_type();
        return Err(PyTypeError::new_err(format!("{name}: got {}, must be a uint8 array", kind.name()?)));
    };
    if array.try_readwrite().is_err() {
        return Err(PyValueError::new_err(format!("{name}: is read-only or borrowed, must be writable")));
    }
    let strides: Option<Vec<usize>> = array.strides().iter().map(|&stride| stride.try_into().ok()).collect();
    let (Some(strides), [pages, shape @ ..]) = (strides, array.shape()) else {
        return Err(PyValueError::new_err(format!(
            "{name}: shape {:?} with strides {:?}; must have a first axis of pages and no negative stride",
            array.shape(),
            array.strides()
        )));
    };
    let Some(pieces) = pieces(shape, &strides[1..]) else {
        return Err(PyValueError::new_err(format!(
            "{name}: the bytes of a page of shape {shape:?} with strides {:?} lie in over {MOST_PIECES} pieces",
            &strides[1..]
        )));
    };
    let bytes = array.shape().iter().zip(&strides).map(|(&len, &stride)| len.saturating_sub(1) * stride);
    let bytes = bytes.sum::<usize>() + 1;
    let base =
        NonNull::new(array.data()).ok_or_else(|| PyValueError::new_err(format!("{name}: is empty")))?;
    // SAFETY: the array's own memory, of this extent by its shape and strides. It stays where it is as long as
    // somebody refers to the array, which `Adopted` does.
    let region = unsafe { Region::new(base, bytes, *pages, strides[0], pieces) };
    let region = region.map_err(|error| PyValueError::new_err(format!("{name}: {error}")))?;
    Ok(Adopted { region, pages: *pages, array: array.clone().unbind() })
}

/// The pieces of page 0, in the order of its indices; `None` when there are too many.
fn pieces(shape: &[usize], strides: &[usize]) -> Option<Vec<Piece>> {
    let mut len = 1;
    let mut outer = shape.len();
    // Inner axes without gaps are one piece.
    while outer > 0 && (shape[outer - 1] == 1 || strides[outer - 1] == len) {
        outer -= 1;
        len *= shape[outer];
    }
    let mut offsets = vec![0];
    for (&len, &stride) in shape[..outer].iter().zip(strides) {
        if offsets.len().checked_mul(len)? > MOST_PIECES {
            return None;
        }
        offsets =
            offsets.iter().flat_map(|&offset| (0..len).map(move |index| offset + index * stride)).collect();
    }
    Some(offsets.into_iter().map(|offset| Piece { offset, len }).collect())
}
