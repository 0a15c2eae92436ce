//! Block hashing, and the keyword arguments that say what a prompt's blocks are made of.

use crate::errors;
use crate::tokens::{TokenInput, ids_from, int_from, number_from, shown, value_of};
use block_hash::{Algo, Chain, ContentSpan, CpuPath, ExtraInputs, ExtraKeys};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyUnicodeEncodeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyIterator, PyList, PyString, PyTuple};
use radix_tree::{AdapterId, NamespaceKey};
use std::borrow::Cow;
use std::time::Duration;

/// Work longer than this is done without the GIL: giving it up costs a switch interval (5 ms by default)
/// when another thread is busy, and microseconds are not worth that.
const GIL_BUDGET: Duration = Duration::from_micros(50);

/// Runs `work`, which is expected to take `estimate`, without the GIL when that is long.
pub(crate) fn without_gil<R: Send>(py: Python<'_>, estimate: Duration, work: impl FnOnce() -> R + Send) -> R {
    if estimate > GIL_BUDGET { py.detach(work) } else { work() }
}

/// About how long hashing `tokens` tokens takes: whole blocks of 16 tokens or more without extra keys, with
/// the instructions of a current x86-64. Slower inputs keep the GIL longer than the budget, not for long.
pub(crate) fn hashing_time(algo: Algo, tokens: usize) -> Duration {
    let picoseconds = match algo {
        Algo::AHash64 => 400,
        Algo::Sha256 | Algo::Sha256Trunc64 => 3_000,
    };
    Duration::from_nanos(tokens as u64 * picoseconds / 1_000)
}

/// What besides tokens makes a prompt's blocks, checked.
pub(crate) struct BlockInputs {
    pub(crate) namespace: NamespaceKey,
    pub(crate) extras: ExtraKeys,
}

/// The keyword arguments that say so, as Python gave them.
pub(crate) struct BlockKeywords<'a, 'py> {
    pub(crate) salt: Option<&'a Bound<'py, PyAny>>,
    pub(crate) lora_id: Option<&'a Bound<'py, PyAny>>,
    pub(crate) lora_generation: u64,
    pub(crate) mm_items: Option<&'a Bound<'py, PyAny>>,
    pub(crate) prompt_embeds: Option<&'a Bound<'py, PyAny>>,
    pub(crate) extra_ids: Option<&'a Bound<'py, PyAny>>,
    pub(crate) overrides: Option<&'a Bound<'py, PyAny>>,
}

impl BlockKeywords<'_, '_> {
    pub(crate) fn parse(&self) -> PyResult<BlockInputs> {
        self.parse_as("salt", "overrides")
    }

    /// [`BlockKeywords::parse`] for a caller that has other names for two of the arguments.
    pub(crate) fn parse_as(&self, salt: &str, overrides: &str) -> PyResult<BlockInputs> {
        let adapter = self.lora_id.map(adapter_from).transpose()?;
        let mm_items = spans_from(self.mm_items, "mm_items")?;
        let prompt_embeds = spans_from(self.prompt_embeds, "prompt_embeds")?;
        let extra_ids = self.extra_ids.map(|ids| ids_from(ids, "extra_ids")).transpose()?.unwrap_or_default();
        let pairs = overrides_from(self.overrides, overrides)?;
        let extras = ExtraKeys::new(&ExtraInputs {
            mm_items: &mm_items,
            prompt_embeds: &prompt_embeds,
            extra_ids: &extra_ids,
            overrides: &pairs,
        })
        .map_err(|error| match error.to_string().strip_prefix("overrides") {
            Some(rest) => PyValueError::new_err(format!("{overrides}{rest}")),
            None => errors::from_hash(&error),
        })?;
        let salt = self.salt.map(|given| text_from(given, salt)).transpose()?.unwrap_or_default();
        Ok(BlockInputs {
            namespace: NamespaceKey { salt, adapter, generation: self.lora_generation },
            extras,
        })
    }
}

/// The hash of each full block of a sequence; a partial last block has none.
///
/// A hash covers the block's tokens, its extra keys and the hash of the block before it, so it names the
/// whole prefix. Values equal those of MAX 26.7 bit for bit when there is neither adapter nor extra key.
///
/// Args:
///     tokens: a 1-D integer array (strided and byte-swapped ones too) or a list of ints, each an int32.
///     page_size: tokens in a block, 1 to 2**32 - 1.
///     algo: "ahash64" (8 bytes, fast), "sha256" (32 bytes) or "sha256_64" (its first 8 bytes).
///     parent: hash of the block before the first: 8 bytes for "ahash64", 32 for the SHA family, where it
///         replaces seed and salt.
///     seed: 32 bytes or 64 hexadecimal characters. A manager hashes with its `hash_seed`.
///     salt: isolates those who give different ones; "" is none.
///     lora_id: an adapter, by name or number.
///     lora_generation: tells apart adapters loaded under one id.
///     mm_items: multimodal items, (32-byte content hash, first token, tokens) each.
///     prompt_embeds: prompt embeddings, (32-byte digest, first token, tokens) each.
///     extra_ids: one unsigned 64-bit number a token, 0 for none.
///     overrides: (token index, value): -2**63 to 2**64 - 1, at most one a token; indices out of range are
///         ignored.
///
/// Items and embeddings may reach past the tokens, which may be the head of a prompt.
///
/// Returns:
///     8 bytes a block for "ahash64" and "sha256_64", 32 for "sha256".
///
/// Raises:
///     ValueError: what is out of range, and where.
///     TypeError: what is of a wrong type.
#[pyfunction]
#[pyo3(signature = (tokens, page_size, *, algo = "ahash64", parent = None, seed = None, salt = None, lora_id = None,
                    lora_generation = 0, mm_items = None, prompt_embeds = None, extra_ids = None, overrides = None))]
#[expect(clippy::too_many_arguments, reason = "one Python signature")]
pub(crate) fn hash_blocks<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    page_size: &Bound<'py, PyAny>,
    algo: &str,
    parent: Option<&Bound<'py, PyAny>>,
    seed: Option<&Bound<'py, PyAny>>,
    salt: Option<&Bound<'py, PyAny>>,
    lora_id: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = generation_from)] lora_generation: u64,
    mm_items: Option<&Bound<'py, PyAny>>,
    prompt_embeds: Option<&Bound<'py, PyAny>>,
    extra_ids: Option<&Bound<'py, PyAny>>,
    overrides: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyList>> {
    let keywords =
        BlockKeywords { salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides };
    let inputs = keywords.parse()?;
    let page_size = page_size_from(page_size)?;
    let mut chains = [start_chain(&inputs, algo, parent, seed)?];
    let log = (TokenInput::read(tokens, "tokens")?, Cow::Borrowed("tokens"));
    hash_logs(py, &mut chains, &[log], page_size, &inputs.extras)?;
    let [chain] = chains;
    PyList::new(py, (0..chain.len()).map(|block| PyBytes::new(py, &chain.identity(block))))
}

/// Hashes `[blocks, 8 or 32]`, and where those of each sequence begin `[sequences + 1]`.
type HashArrays<'py> = (Bound<'py, PyArray2<u8>>, Bound<'py, PyArray1<i64>>);

/// `hash_blocks` of many sequences in one call, into arrays.
///
/// Args:
///     sequences: the token sequences; each as in `hash_blocks`. The other arguments hold for all of them.
///     page_size: tokens in a block, 1 to 2**32 - 1.
///
/// The keyword arguments and errors are those of `hash_blocks`.
///
/// Returns:
///     The hashes, uint8 [blocks, 8 or 32], and where each sequence's begin, int64 [sequences + 1].
#[pyfunction]
#[pyo3(signature = (sequences, page_size, *, algo = "ahash64", parent = None, seed = None, salt = None, lora_id = None,
                    lora_generation = 0, mm_items = None, prompt_embeds = None, extra_ids = None, overrides = None))]
#[expect(clippy::too_many_arguments, reason = "one Python signature")]
pub(crate) fn hash_blocks_batch<'py>(
    py: Python<'py>,
    sequences: &Bound<'py, PyAny>,
    page_size: &Bound<'py, PyAny>,
    algo: &str,
    parent: Option<&Bound<'py, PyAny>>,
    seed: Option<&Bound<'py, PyAny>>,
    salt: Option<&Bound<'py, PyAny>>,
    lora_id: Option<&Bound<'py, PyAny>>,
    #[pyo3(from_py_with = generation_from)] lora_generation: u64,
    mm_items: Option<&Bound<'py, PyAny>>,
    prompt_embeds: Option<&Bound<'py, PyAny>>,
    extra_ids: Option<&Bound<'py, PyAny>>,
    overrides: Option<&Bound<'py, PyAny>>,
) -> PyResult<HashArrays<'py>> {
    let keywords =
        BlockKeywords { salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides };
    let inputs = keywords.parse()?;
    let page_size = page_size_from(page_size)?;
    let start = start_chain(&inputs, algo, parent, seed)?;
    let width = start.algo().identity_len();
    let inputs_of = |(index, tokens): (usize, PyResult<Bound<'py, PyAny>>)| {
        let name = format!("sequences[{index}]");
        Ok((TokenInput::read(&tokens?, &name)?, Cow::Owned(name)))
    };
    let logs = iterated(sequences, "sequences")?.enumerate().map(inputs_of).collect::<PyResult<Vec<_>>>()?;
    let mut chains = vec![start; logs.len()];
    hash_logs(py, &mut chains, &logs, page_size, &inputs.extras)?;
    let (mut bytes, mut offsets) = (Vec::new(), vec![0]);
    for chain in &chains {
        chain.write_identities(0..chain.len(), &mut bytes);
        offsets.push((bytes.len() / width) as i64);
    }
    let rows = bytes.len() / width;
    Ok((PyArray1::from_vec(py, bytes).reshape([rows, width])?, PyArray1::from_vec(py, offsets)))
}

/// Extends each chain by the tokens beside it: short ones where they lie, long ones without the GIL, copied.
fn hash_logs(
    py: Python<'_>,
    chains: &mut [Chain],
    logs: &[(TokenInput<'_>, Cow<'_, str>)],
    page_size: usize,
    extras: &ExtraKeys,
) -> PyResult<()> {
    let Some(first) = chains.first() else { return Ok(()) };
    if hashing_time(first.algo(), logs.iter().map(|(log, _)| log.len()).sum()) <= GIL_BUDGET {
        for (chain, (log, name)) in chains.iter_mut().zip(logs) {
            log.for_pieces(page_size, name, |piece| chain.extend_by(piece, page_size, extras))?;
        }
        return Ok(());
    }
    let copies = logs.iter().map(|(log, name)| log.copied(name)).collect::<PyResult<Vec<_>>>()?;
    py.detach(|| {
        for (chain, tokens) in chains.iter_mut().zip(&copies) {
            chain.extend(tokens, page_size, extras);
        }
    });
    Ok(())
}

/// The instructions that hash here, such as "sha-ni", or "portable".
///
/// With `PAGEKEEPER_CPU=portable` in the environment no special ones are used; hashes are the same.
#[pyfunction]
pub(crate) fn hash_cpu_path() -> String {
    CpuPath::chosen().to_string()
}

fn start_chain(
    inputs: &BlockInputs,
    algo: &str,
    parent: Option<&Bound<'_, PyAny>>,
    seed: Option<&Bound<'_, PyAny>>,
) -> PyResult<Chain> {
    let algo: Algo = algo.parse().map_err(|error| errors::from_hash(&error))?;
    let root = inputs.namespace.root(seed.map(seed_from).transpose()?.as_ref());
    match parent {
        None => Ok(Chain::new(algo, &root)),
        Some(parent) => {
            let parent = parent.cast::<PyBytes>().map_err(|_| {
                PyTypeError::new_err("parent: must be bytes, another block's hash as hash_blocks gives it")
            })?;
            Chain::with_parent(algo, &root, parent.as_bytes()).map_err(|error| errors::from_hash(&error))
        }
    }
}

/// A seed: 32 bytes, or 64 hexadecimal characters.
pub(crate) fn seed_from(seed: &Bound<'_, PyAny>) -> PyResult<[u8; 32]> {
    let bad = || PyValueError::new_err("seed: must be 32 bytes, or 64 hexadecimal characters");
    if let Ok(bytes) = seed.cast::<PyBytes>() {
        return bytes.as_bytes().try_into().map_err(|_| bad());
    }
    let text = seed.cast::<PyString>().map_err(|_| bad())?.to_str()?;
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(bad());
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&text[pair..pair + 2], 16).map_err(|_| bad())?;
    }
    Ok(bytes)
}

fn page_size_from(page_size: &Bound<'_, PyAny>) -> PyResult<usize> {
    let size = int_from(page_size, "page_size")?;
    match value_of(&size).and_then(|size| u32::try_from(size).ok()) {
        Some(size) if size > 0 => Ok(size as usize),
        _ => Err(PyValueError::new_err(format!(
            "page_size={}: must be at least 1 token, below 2**32",
            shown(&size)
        ))),
    }
}

/// The argument `lora_generation`.
pub(crate) fn generation_from(generation: &Bound<'_, PyAny>) -> PyResult<u64> {
    number_from(generation, "lora_generation", "0 to 2**64 - 1")
}

/// Iterates over a list that was given as `name`.
fn iterated<'py>(values: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyIterator>> {
    values.try_iter().map_err(|error| {
        if error.is_instance_of::<PyTypeError>(values.py()) {
            PyTypeError::new_err(format!("{name}: {}", error.value(values.py())))
        } else {
            error
        }
    })
}

/// A tuple that an argument lists, or `bad` when it is none. What else its numbers raise goes through. A bool
/// is no number.
fn extracted<'py, T: FromPyObjectOwned<'py>>(
    item: &Bound<'py, PyAny>,
    bad: impl FnOnce() -> PyErr,
) -> PyResult<T> {
    if item.cast::<PyTuple>().is_ok_and(|parts| parts.iter().any(|part| part.is_instance_of::<PyBool>())) {
        return Err(bad());
    }
    item.extract::<T>().map_err(Into::into).map_err(|error: PyErr| {
        let py = item.py();
        let misfits = error.is_instance_of::<PyTypeError>(py)
            || error.is_instance_of::<PyValueError>(py)
            || error.is_instance_of::<PyOverflowError>(py);
        if misfits { bad() } else { error }
    })
}

fn text_from(text: &Bound<'_, PyAny>, name: &str) -> PyResult<String> {
    match text.cast::<PyString>() {
        Ok(text) => utf8_of(text, name),
        Err(_) => {
            Err(PyTypeError::new_err(format!("{name}: got {}, must be a str", text.get_type().name()?)))
        }
    }
}

/// The text of an argument, which Python may have no UTF-8 for.
pub(crate) fn utf8_of(text: &Bound<'_, PyString>, name: &str) -> PyResult<String> {
    text.to_str().map(str::to_owned).map_err(|error| {
        if error.is_instance_of::<PyUnicodeEncodeError>(text.py()) {
            PyValueError::new_err(format!("{name}: {}", error.value(text.py())))
        } else {
            error
        }
    })
}

fn adapter_from(lora_id: &Bound<'_, PyAny>) -> PyResult<AdapterId> {
    if let Ok(name) = lora_id.cast::<PyString>() {
        return utf8_of(name, "lora_id").map(AdapterId::Name);
    }
    if lora_id.is_instance_of::<PyBool>() || !lora_id.hasattr("__index__")? {
        let given = lora_id.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "lora_id: got {given}; must be a name (str) or a number (int)"
        )));
    }
    number_from(lora_id, "lora_id", "-2**63 to 2**63 - 1").map(AdapterId::Number)
}

fn spans_from(spans: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<Vec<ContentSpan>> {
    let Some(spans) = spans else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for (index, span) in iterated(spans, name)?.enumerate() {
        let bad = |what: &str| PyValueError::new_err(format!("{name}[{index}]: {what}"));
        let (hash, start, length): (Bound<'_, PyAny>, i64, i64) =
            extracted(&span?, || bad("must be (32-byte content hash, first token, number of tokens)"))?;
        let hash = hash.cast::<PyBytes>().map_err(|_| bad("the content hash must be bytes"))?.as_bytes();
        let hash = hash
            .try_into()
            .map_err(|_| bad(&format!("the content hash has {} bytes, must have 32", hash.len())))?;
        let start =
            u64::try_from(start).map_err(|_| bad(&format!("first token {start}: must be 0 or more")))?;
        let length =
            u64::try_from(length).map_err(|_| bad(&format!("{length} tokens: must be 1 or more")))?;
        out.push(ContentSpan { start, length, hash });
    }
    Ok(out)
}

fn overrides_from(overrides: Option<&Bound<'_, PyAny>>, name: &str) -> PyResult<Vec<(i64, i128)>> {
    let Some(overrides) = overrides else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for (index, pair) in iterated(overrides, name)?.enumerate() {
        out.push(extracted(&pair?, || {
            PyValueError::new_err(format!(
                "{name}[{index}]: must be (token index, value), the value an int in -2**63 to 2**64 - 1"
            ))
        })?);
    }
    Ok(out)
}
