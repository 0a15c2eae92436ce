//! Tokens and counts from Python: arrays and lists in, checked numbers out.

use block_hash::{Token, narrow};
use cache_manager::SlotId;
use numpy::{
    PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};

/// Token ids as a new int32 array.
///
/// What is accepted is said at [`tokens_from`].
#[pyfunction]
pub(crate) fn normalize_tokens<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyArray1<i32>>> {
    Ok(PyArray1::from_vec(py, tokens_from(tokens, "tokens")?))
}

/// Token ids from a 1-D integer array (strided and byte-swapped ones too), or from a list or tuple of
/// ints. A value outside −2³¹ … 2³¹−1, a float or a bool is a `ValueError` that names the index.
pub(crate) fn tokens_from(tokens: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<Token>> {
    tokens_with_room(tokens, name, 0)
}

/// [`tokens_from`], with memory for `room` more tokens where that costs no copy.
pub(crate) fn tokens_with_room(tokens: &Bound<'_, PyAny>, name: &str, room: usize) -> PyResult<Vec<Token>> {
    if let Ok(array) = tokens.cast::<PyArray1<i32>>()
        && let Ok(values) = borrowed(array, name)?.as_slice()
    {
        let mut out = Vec::with_capacity(values.len() + room);
        out.extend_from_slice(values);
        return Ok(out);
    }
    if let Ok(array) = tokens.cast::<PyArray1<i64>>()
        && let Ok(values) = borrowed(array, name)?.as_slice()
        && let Some(out) = narrowed(values, room)
    {
        return Ok(out);
    }
    if !tokens.is_instance_of::<PyUntypedArray>() && tokens.hasattr("__array__")? {
        return tokens_with_room(&as_array(tokens)?, name, room);
    }
    integers(tokens, name, "-2**31 to 2**31 - 1", |value| Token::try_from(value).ok())
}

/// `values` as tokens, if all of them are.
fn narrowed(values: &[i64], room: usize) -> Option<Vec<Token>> {
    let mut out = Vec::with_capacity(values.len() + room);
    values.chunks(1024).all(|chunk| narrow(chunk, &mut out)).then_some(out)
}

/// Token ids that are read where they lie if they are int32 or int64 arrays. What is borrowed is
/// Python's: it must not be read without the GIL.
pub(crate) enum TokenInput<'py> {
    Int32(PyReadonlyArray1<'py, i32>),
    Int64(PyReadonlyArray1<'py, i64>),
    Owned(Vec<Token>),
}

impl<'py> TokenInput<'py> {
    /// Looks at `tokens`; what is no array of int32 or int64 in one piece is copied.
    pub(crate) fn read(tokens: &Bound<'py, PyAny>, name: &str) -> PyResult<TokenInput<'py>> {
        if let Ok(array) = tokens.cast::<PyArray1<i32>>() {
            return Ok(TokenInput::Int32(in_one_piece(array, name)?));
        }
        if let Ok(array) = tokens.cast::<PyArray1<i64>>() {
            return Ok(TokenInput::Int64(in_one_piece(array, name)?));
        }
        tokens_from(tokens, name).map(TokenInput::Owned)
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        match self {
            TokenInput::Int32(array) => array.len(),
            TokenInput::Int64(array) => array.len(),
            TokenInput::Owned(tokens) => tokens.len(),
        }
    }

    /// A copy of the tokens.
    pub(crate) fn copied(&self, name: &str) -> PyResult<Vec<Token>> {
        let mut copy = Vec::with_capacity(self.len());
        self.for_pieces(1, name, |piece| copy.extend_from_slice(piece))?;
        Ok(copy)
    }

    /// Gives the tokens to `each` in order, in pieces of a multiple of `multiple` tokens but for the last.
    pub(crate) fn for_pieces(
        &self,
        multiple: usize,
        name: &str,
        mut each: impl FnMut(&[Token]),
    ) -> PyResult<()> {
        match self {
            TokenInput::Int32(array) => each(array.as_slice()?),
            TokenInput::Owned(tokens) => each(tokens),
            TokenInput::Int64(array) => {
                let piece = 2048usize.next_multiple_of(multiple);
                let mut tokens = Vec::with_capacity(piece);
                for values in array.as_slice()?.chunks(piece) {
                    tokens.clear();
                    if !narrow(values, &mut tokens) {
                        tokens_from(array.as_any(), name)?; // finds the value and names its index
                    }
                    each(&tokens);
                }
            }
        }
        Ok(())
    }
}

/// Unsigned 64-bit ids, in the same forms.
pub(crate) fn ids_from(ids: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u64>> {
    integers(ids, name, "0 to 2**64 - 1", |value| u64::try_from(value).ok())
}

/// The argument `name`, in seconds.
pub(crate) fn seconds_from(given: &Bound<'_, PyAny>, name: &str) -> PyResult<f64> {
    // Python's and numpy's, which are both numbers to `extract`.
    if given.get_type().name()?.to_string_lossy().starts_with("bool") {
        return Err(PyTypeError::new_err(format!("{name}: got bool, must be a time in seconds")));
    }
    given.extract().map_err(|error: PyErr| {
        let py = given.py();
        if error.is_instance_of::<PyOverflowError>(py) {
            PyValueError::new_err(format!("{name}: out of range, must be a time in seconds"))
        } else if error.is_instance_of::<PyTypeError>(py) {
            PyTypeError::new_err(format!("{name}: {}", error.value(py)))
        } else {
            error
        }
    })
}

/// Page ids, in the same forms.
pub(crate) fn pages_from(pages: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u32>> {
    integers(pages, name, "0 to 2**32 - 1", |value| u32::try_from(value).ok())
}

/// Counts of tokens, in the same forms, or one int.
pub(crate) fn counts_from(counts: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u32>> {
    let check = |value| u32::try_from(value).ok();
    if is_one(counts)? {
        return Ok(vec![checked(counts, name, None, "0 to 2**32 - 1", check)?]);
    }
    integers(counts, name, "0 to 2**32 - 1", check)
}

/// [`tokens_from`], or one int.
pub(crate) fn new_tokens_from(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<Token>> {
    if is_one(tokens)? {
        return Ok(vec![token_from(tokens, "new_tokens")?]);
    }
    tokens_from(tokens, "new_tokens")
}

/// An int argument, numpy's too, of any size.
pub(crate) fn int_from<'py>(given: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyInt>> {
    if !given.is_instance_of::<PyBool>()
        && let Some(int) = index_of(given)?
    {
        return Ok(int);
    }
    Err(PyTypeError::new_err(format!("{name}: got {}, must be an int", given.get_type().name()?)))
}

/// [`int_from`] as a number of a Rust type.
pub(crate) fn number_from<T: TryFrom<i128>>(
    given: &Bound<'_, PyAny>,
    name: &str,
    allowed: &str,
) -> PyResult<T> {
    let int = int_from(given, name)?;
    value_of(&int)
        .and_then(|value| T::try_from(value).ok())
        .ok_or_else(|| out_of_range(name, None, &shown(&int), allowed))
}

/// The value of an int of at most 64 bits.
pub(crate) fn value_of(int: &Bound<'_, PyInt>) -> Option<i128> {
    int.extract::<i64>().ok().map(i128::from).or_else(|| int.extract::<u64>().ok().map(i128::from))
}

/// An int as an error tells it.
pub(crate) fn shown(int: &Bound<'_, PyInt>) -> String {
    int.str().map_or_else(|_| "an int of thousands of digits".into(), |digits| digits.to_string())
}

/// One token id.
pub(crate) fn token_from(token: &Bound<'_, PyAny>, name: &str) -> PyResult<Token> {
    checked(token, name, None, "-2**31 to 2**31 - 1", |value| Token::try_from(value).ok())
}

/// A slot, if `slot` is an int or a numpy scalar.
pub(crate) fn slot_from(slot: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<SlotId>> {
    if slot.hasattr(intern!(slot.py(), "__len__"))? || index_of(slot)?.is_none() {
        return Ok(None);
    }
    let check = |value| u32::try_from(value).ok().filter(|slot| slot.leading_zeros() > 0).map(SlotId);
    checked(slot, name, None, "a slot, 0 to 2**31 - 1", check).map(Some)
}

/// Positions of tokens, in the same forms.
pub(crate) fn positions_from(positions: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    integers(positions, "positions", "-2**63 to 2**63 - 1", |value| i64::try_from(value).ok())
}

/// Reads an array of Python's; memory that the same call writes is refused.
pub(crate) fn borrowed<'py, T: numpy::Element>(
    array: &Bound<'py, PyArray1<T>>,
    name: &str,
) -> PyResult<PyReadonlyArray1<'py, T>> {
    array
        .try_readonly()
        .map_err(|_| PyValueError::new_err(format!("{name}: is memory that this call writes")))
}

/// [`borrowed`], or a copy if the numbers do not lie one after the other at aligned addresses.
pub(crate) fn in_one_piece<'py, T: numpy::Element>(
    array: &Bound<'py, PyArray1<T>>,
    name: &str,
) -> PyResult<PyReadonlyArray1<'py, T>> {
    let lent = borrowed(array, name)?;
    if lent.as_slice().is_ok() {
        return Ok(lent);
    }
    borrowed(array.call_method0(intern!(array.py(), "copy"))?.cast()?, name)
}

/// Whether `value` stands for one number: an int, or something of numpy's or torch's without dimensions.
fn is_one(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    if value.is_instance_of::<PyInt>() {
        return Ok(true);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        return Ok(false);
    }
    match value.getattr_opt(intern!(value.py(), "ndim"))? {
        Some(dimensions) => dimensions.eq(0),
        None => value.hasattr(intern!(value.py(), "__index__")),
    }
}

fn integers<T>(
    values: &Bound<'_, PyAny>,
    name: &str,
    allowed: &str,
    convert: impl Fn(i128) -> Option<T> + Copy,
) -> PyResult<Vec<T>> {
    if let Ok(list) = values.cast::<PyList>() {
        return list.iter().enumerate().map(|(i, v)| checked(&v, name, Some(i), allowed, convert)).collect();
    }
    if let Ok(tuple) = values.cast::<PyTuple>() {
        return tuple.iter().enumerate().map(|(i, v)| checked(&v, name, Some(i), allowed, convert)).collect();
    }
    if let Ok(array) = values.cast::<PyUntypedArray>() {
        return from_array(array, name, allowed, convert);
    }
    if values.hasattr("__array__")? {
        return from_array(as_array(values)?.cast::<PyUntypedArray>()?, name, allowed, convert);
    }
    let given = values.get_type().name()?;
    Err(PyTypeError::new_err(format!("{name}: got {given}; give a 1-D integer array, or a list of ints")))
}

/// What `values` gives as a numpy array.
fn as_array<'py>(values: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    values.py().import("numpy")?.call_method1("asarray", (values,))
}

fn from_array<T>(
    array: &Bound<'_, PyUntypedArray>,
    name: &str,
    allowed: &str,
    convert: impl Fn(i128) -> Option<T> + Copy,
) -> PyResult<Vec<T>> {
    if array.ndim() != 1 {
        return Err(PyValueError::new_err(format!("{name}: has {} dimensions, must have 1", array.ndim())));
    }
    if let Ok(array) = array.cast::<PyArray1<i32>>() {
        return copied(&in_one_piece(array, name)?, name, allowed, convert);
    }
    if let Ok(array) = array.cast::<PyArray1<i64>>() {
        return copied(&in_one_piece(array, name)?, name, allowed, convert);
    }
    if let Ok(array) = array.cast::<PyArray1<u32>>() {
        return copied(&in_one_piece(array, name)?, name, allowed, convert);
    }
    if let Ok(array) = array.cast::<PyArray1<u64>>() {
        return copied(&in_one_piece(array, name)?, name, allowed, convert);
    }
    match array.dtype().kind() {
        b'i' => from_array(array.call_method1("astype", ("=i8",))?.cast()?, name, allowed, convert),
        b'u' => from_array(array.call_method1("astype", ("=u8",))?.cast()?, name, allowed, convert),
        b'O' => integers(&array.call_method0("tolist")?, name, allowed, convert),
        _ if array.len() == 0 => Ok(Vec::new()),
        _ => Err(PyValueError::new_err(format!(
            "{name}[0]: the array is of dtype {}, must be of integers",
            array.dtype().str()?
        ))),
    }
}

fn copied<S: numpy::Element + Copy + Into<i128>, T>(
    array: &PyReadonlyArray1<'_, S>,
    name: &str,
    allowed: &str,
    convert: impl Fn(i128) -> Option<T>,
) -> PyResult<Vec<T>> {
    let values = array.as_slice()?;
    let mut out = Vec::with_capacity(values.len());
    for (index, &value) in values.iter().enumerate() {
        match convert(value.into()) {
            Some(value) => out.push(value),
            None => return Err(out_of_range(name, Some(index), &value.into().to_string(), allowed)),
        }
    }
    Ok(out)
}

fn checked<T>(
    value: &Bound<'_, PyAny>,
    name: &str,
    index: Option<usize>,
    allowed: &str,
    convert: impl Fn(i128) -> Option<T>,
) -> PyResult<T> {
    // numpy's bool has no __index__, Python's has.
    let int = if value.is_instance_of::<PyBool>() { None } else { index_of(value)? };
    let Some(int) = int else {
        let given = value.repr()?;
        return Err(PyValueError::new_err(format!("{}: {given} is no integer", place(name, index))));
    };
    match value_of(&int).and_then(convert) {
        Some(value) => Ok(value),
        None => Err(out_of_range(name, index, &shown(&int), allowed)),
    }
}

/// `value` as Python's int, if it is an integer. What its `__index__` raises goes through, but for the
/// `TypeError` of what is none.
fn index_of<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyInt>>> {
    if let Ok(int) = value.cast::<PyInt>() {
        return Ok(Some(int.clone()));
    }
    let name = intern!(value.py(), "__index__");
    match value.call_method0(name) {
        Ok(int) => Ok(int.cast_into::<PyInt>().ok()),
        Err(error) if error.is_instance_of::<PyTypeError>(value.py()) || !value.hasattr(name)? => Ok(None),
        Err(error) => Err(error),
    }
}

fn out_of_range(name: &str, index: Option<usize>, given: &str, allowed: &str) -> PyErr {
    PyValueError::new_err(format!("{}: {given} is out of range, must be {allowed}", place(name, index)))
}

fn place(name: &str, index: Option<usize>) -> String {
    index.map_or_else(|| name.to_owned(), |index| format!("{name}[{index}]"))
}
