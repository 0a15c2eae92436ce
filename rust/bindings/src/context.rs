//! `TextContext`: a request, before, while and after it is claimed.

use crate::errors;
use crate::hashing::{BlockKeywords, generation_from, utf8_of};
use crate::retention::retention_from;
use crate::shared::Shared;
use crate::tokens::{int_from, number_from, shown, token_from, tokens_with_room, value_of};
use block_hash::{ExtraKeys, Token};
use cache_manager::{BlockRetention, LedgerError, Position, SlotId};
use numpy::PyArray1;
use parking_lot::Mutex;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
use radix_tree::NamespaceKey;
use std::sync::{Arc, Weak};

/// Tokens of output that a new request has memory for, so that its first ones do not move the prompt. A
/// usual answer fits; a request pays 1 KiB for it.
const OUTPUT_ROOM: usize = 256;

/// What is wrong with a request in [`State::Lost`].
pub(crate) const LOST: &str = "lost its tokens in an internal error while it was claimed; make it anew";

/// One request: a handle on its token log.
///
/// Before `claim` and after `release` it holds its tokens itself; in between the manager does. A manager that
/// ends releases it.
///
/// Args:
///     request_id: names the request: a `RequestID`, a str, or an int.
///     tokens: the prompt: a `TokenBuffer`, a 1-D integer array, or a list of ints; at least one token.
///     max_length: most tokens of prompt and output. None: no limit of its own.
///     cache_salt: requests with different salts share nothing; "" is no salt.
///     lora_id: the adapter whose KV this is, by name or number; None is the base model.
///     lora_generation: tells apart adapters that were loaded under one id.
///     mm_items: multimodal items, (32-byte content hash, first token, tokens) each.
///     prompt_embeds: prompt embeddings, (32-byte digest, first token, tokens) each.
///     extra_ids: one unsigned 64-bit number a token, 0 for none.
///     token_overrides: (token index, value): content values that stand for placeholder tokens in block
///         hashes, -2**63 to 2**64 - 1, at most one a token.
///     retention: a `RetentionConfig`: how long blocks of this request are kept. None: like all others.
///     no_read: do not reuse cached blocks.
///     no_store: do not share blocks of this request.
///     dkv_cache_hint: for connectors, which get it as `hint`: who may have the prompt's blocks.
///     max_new_tokens: most tokens to generate, which schedulers are told of; not enforced.
///     num_draft_tokens: draft tokens that each decode step verifies besides the token it computes, 0 to 255.
///     beam_width: requests that this one will be forked into, itself among them, which schedulers are told of; 1 to 65535.
///     encoder_length: tokens that an encoder made for it, which layers of cross attention read; from 1. None: none. Blocks are
///         shared with other requests only if an item of `mm_items` that covers token 0 names what the encoder was given.
///
/// Raises:
///     ValueError: what is out of range, and where.
///     TypeError: what is of a wrong type.
#[pyclass(module = "pagekeeper", frozen, weakref)]
pub(crate) struct TextContext {
    /// The id that the request was made with.
    #[pyo3(get)]
    pub(crate) request_id: Py<PyAny>,
    pub(crate) key: RequestKey,
    /// Most tokens of prompt and output.
    #[pyo3(get)]
    pub(crate) max_length: u32,
    /// Most tokens to generate, as given, or None.
    #[pyo3(get)]
    pub(crate) max_new_tokens: Option<u64>,
    /// Whether cached blocks are left alone.
    #[pyo3(get)]
    pub(crate) no_read: bool,
    /// Whether the request's blocks are kept private.
    #[pyo3(get)]
    pub(crate) no_store: bool,
    /// How long its blocks are kept, as given, or None.
    #[pyo3(get, name = "retention")]
    retention_config: Option<Py<PyAny>>,
    pub(crate) retention: Option<Arc<BlockRetention>>,
    /// What the request tells connectors, or None.
    #[pyo3(get)]
    dkv_cache_hint: Option<Py<PyAny>>,
    /// Draft tokens that each decode step verifies.
    #[pyo3(get)]
    pub(crate) num_draft_tokens: u8,
    /// Requests that this one is forked into, itself among them, as given.
    #[pyo3(get)]
    pub(crate) beam_width: u16,
    /// Tokens that an encoder made for layers of cross attention, or None.
    #[pyo3(get)]
    pub(crate) encoder_length: Option<u32>,
    pub(crate) namespace: NamespaceKey,
    pub(crate) state: Mutex<State>,
}

/// A request id as the ledger compares it, without asking Python.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum RequestKey {
    Text(String),
    Number(i128),
}

impl RequestKey {
    pub(crate) fn of(request_id: &Bound<'_, PyAny>) -> PyResult<RequestKey> {
        if let Ok(text) = request_id.cast::<PyString>() {
            return utf8_of(text, "request_id").map(RequestKey::Text);
        }
        // An integer of Python's or numpy's; True is none.
        let number = if request_id.is_instance_of::<PyBool>() { None } else { request_id.extract().ok() };
        number.map(RequestKey::Number).ok_or_else(|| {
            PyTypeError::new_err("request_id: must be a RequestID, a str, or an int of up to 127 bits")
        })
    }
}

/// Who has the tokens.
pub(crate) enum State {
    /// The context itself: it is not claimed.
    Free(Box<Content>),
    /// A claim that is being made.
    Claiming,
    /// The ledger.
    Claimed { shared: Arc<Shared>, slot: SlotId },
    /// Nobody: a panic took them while the request was claimed.
    Lost,
}

/// What a context holds while it is not claimed.
pub(crate) struct Content {
    pub(crate) tokens: Vec<Token>,
    pub(crate) extras: ExtraKeys,
    /// Where it was claimed before, for results that still come.
    pub(crate) former: Option<(Weak<Shared>, SlotId)>,
    /// Tokens that its last life got from the cache.
    pub(crate) cached: u32,
}

impl Content {
    /// The state of a context that holds this.
    pub(crate) fn free(self) -> State {
        State::Free(Box::new(self))
    }
}

/// The argument `num_draft_tokens`.
fn drafts_from(given: &Bound<'_, PyAny>) -> PyResult<u8> {
    number_from(given, "num_draft_tokens", "0 to 255")
}

/// The argument `beam_width`.
fn beams_from(given: &Bound<'_, PyAny>) -> PyResult<u16> {
    let allowed = "1 to 65535";
    match number_from(given, "beam_width", allowed)? {
        0 => Err(PyValueError::new_err(format!("beam_width: 0 is out of range, must be {allowed}"))),
        beams => Ok(beams),
    }
}

/// The argument `encoder_length`.
fn encoder_length_from(given: &Bound<'_, PyAny>) -> PyResult<u32> {
    let allowed = "1 to 2**31 - 1, or None";
    match number_from::<u32>(given, "encoder_length", allowed)? {
        length if length == 0 || length > i32::MAX.cast_unsigned() => {
            Err(PyValueError::new_err(format!("encoder_length: {length} is out of range, must be {allowed}")))
        }
        length => Ok(length),
    }
}

impl TextContext {
    /// Runs `claimed` on the ledger, or `free` on what the context holds itself. `free` runs under the
    /// context's lock, where no Python code may run.
    fn visit<R>(
        &self,
        py: Python<'_>,
        claimed: impl FnOnce(&mut cache_manager::Ledger, SlotId) -> Result<R, LedgerError>,
        free: impl FnOnce(&mut Content) -> PyResult<R>,
    ) -> PyResult<R> {
        let found = match &mut *self.state.lock() {
            State::Free(own) => return free(own),
            State::Claiming => Err("is being claimed in another thread"),
            State::Lost => Err(LOST),
            State::Claimed { shared, slot } => Ok((Arc::clone(shared), *slot)),
        };
        let (shared, slot) = found.map_err(|what| self.problem(py, what))?;
        let outcome = shared.with(py, |ledger| claimed(ledger, slot))?;
        outcome.map_err(|error| errors::from_ledger(py, &error, Some(self.request_id.bind(py))))
    }

    pub(crate) fn hint(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.dkv_cache_hint.as_ref().map(|hint| hint.clone_ref(py))
    }

    /// The slot while the request is claimed.
    pub(crate) fn claimed_slot(&self) -> Option<SlotId> {
        match &*self.state.lock() {
            State::Claimed { slot, .. } => Some(*slot),
            State::Free(_) | State::Claiming | State::Lost => None,
        }
    }

    /// A context of another name for a fork of this one, which is being claimed.
    pub(crate) fn sibling(&self, py: Python<'_>, request_id: Py<PyAny>, key: RequestKey) -> TextContext {
        TextContext {
            request_id,
            key,
            max_length: self.max_length,
            max_new_tokens: self.max_new_tokens,
            no_read: self.no_read,
            no_store: self.no_store,
            num_draft_tokens: self.num_draft_tokens,
            beam_width: 1,
            encoder_length: self.encoder_length,
            retention: self.retention.clone(),
            retention_config: self.retention_config.as_ref().map(|config| config.clone_ref(py)),
            dkv_cache_hint: self.hint(py),
            namespace: self.namespace.clone(),
            state: Mutex::new(State::Claiming),
        }
    }

    fn problem(&self, py: Python<'_>, what: &str) -> PyErr {
        let id = self.request_id.bind(py).repr().map_or_else(|_| "?".into(), |id| id.to_string());
        PyValueError::new_err(format!("request {id}: {what}"))
    }

    fn position(&self, py: Python<'_>) -> PyResult<Position> {
        self.visit(
            py,
            |ledger, slot| ledger.position(slot),
            |own| Ok(Position { known: own.tokens.len() as u32, cached: own.cached, ..Position::default() }),
        )
    }
}

#[pymethods]
impl TextContext {
    #[new]
    #[pyo3(signature = (request_id, tokens, max_length = None, *, cache_salt = None, lora_id = None, lora_generation = 0,
                        mm_items = None, prompt_embeds = None, extra_ids = None, token_overrides = None,
                        retention = None, no_read = false, no_store = false, dkv_cache_hint = None, max_new_tokens = None, num_draft_tokens = 0,
                        beam_width = 1, encoder_length = None))]
    #[expect(clippy::too_many_arguments, reason = "one Python signature")]
    fn new(
        request_id: Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        max_length: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        lora_id: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = generation_from)] lora_generation: u64,
        mm_items: Option<&Bound<'_, PyAny>>,
        prompt_embeds: Option<&Bound<'_, PyAny>>,
        extra_ids: Option<&Bound<'_, PyAny>>,
        token_overrides: Option<&Bound<'_, PyAny>>,
        retention: Option<&Bound<'_, PyAny>>,
        no_read: bool,
        no_store: bool,
        dkv_cache_hint: Option<Py<PyAny>>,
        max_new_tokens: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = drafts_from)] num_draft_tokens: u8,
        #[pyo3(from_py_with = beams_from)] beam_width: u16,
        encoder_length: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<TextContext> {
        let mut tokens = tokens_with_room(tokens, "tokens", OUTPUT_ROOM)?;
        // Touch the room now, so that the first output tokens do not wait for the memory.
        let given = tokens.len();
        tokens.resize(given + OUTPUT_ROOM, 0);
        tokens.truncate(given);
        if tokens.is_empty() {
            return Err(PyValueError::new_err("tokens: empty; a request has at least one token"));
        }
        let max_length = match max_length {
            None => i32::MAX.cast_unsigned(),
            Some(length) => {
                let length = int_from(length, "max_length")?;
                value_of(&length)
                    .and_then(|length| u32::try_from(length).ok())
                    .filter(|&length| length <= i32::MAX.cast_unsigned() && length as usize >= tokens.len())
                    .ok_or_else(|| {
                        PyValueError::new_err(format!(
                            "max_length={}: must be at least the {} tokens given, and below 2**31",
                            shown(&length),
                            tokens.len()
                        ))
                    })?
            }
        };
        let key = RequestKey::of(&request_id)?;
        let new_tokens =
            max_new_tokens.map(|given| number_from(given, "max_new_tokens", "0 to 2**64 - 1")).transpose()?;
        let keywords = BlockKeywords {
            salt: cache_salt,
            lora_id,
            lora_generation,
            mm_items,
            prompt_embeds,
            extra_ids,
            overrides: token_overrides,
        };
        let inputs = keywords.parse_as("cache_salt", "token_overrides")?;
        Ok(TextContext {
            request_id: request_id.unbind(),
            key,
            max_length,
            max_new_tokens: new_tokens,
            no_read,
            no_store,
            retention: retention.map(|config| retention_from(config, tokens.len())).transpose()?,
            retention_config: retention.map(|config| config.clone().unbind()),
            dkv_cache_hint,
            num_draft_tokens,
            beam_width,
            encoder_length: encoder_length.map(encoder_length_from).transpose()?,
            namespace: inputs.namespace,
            state: Mutex::new(Content { tokens, extras: inputs.extras, former: None, cached: 0 }.free()),
        })
    }

    /// Appends one generated token, or fills the oldest placeholder.
    ///
    /// A token of a forward that was dropped meanwhile (by `preempt` or `truncate`) is dropped.
    ///
    /// Args:
    ///     token: a token id, -2**31 to 2**31 - 1.
    ///
    /// Raises:
    ///     ValueError: no token id, or one token more than `max_length`.
    fn update(&self, py: Python<'_>, token: &Bound<'_, PyAny>) -> PyResult<()> {
        let token = token_from(token, "token")?;
        self.visit(
            py,
            |ledger, slot| ledger.update(slot, token),
            |own| {
                if own.tokens.len() as u64 >= u64::from(self.max_length) {
                    return Err(PyValueError::new_err(format!(
                        "the request has {} tokens already, its max_length",
                        own.tokens.len()
                    )));
                }
                own.tokens.push(token);
                Ok(())
            },
        )
    }

    /// Drops the tokens after the first `length`, with their KV and the request's steps out.
    ///
    /// Args:
    ///     length: tokens to keep, 0 to those known.
    ///
    /// Raises:
    ///     ValueError: a negative length, or more than the known tokens.
    fn truncate(&self, length: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = length.py();
        let length = int_from(length, "length")?;
        let bad = |known: usize| {
            let given = shown(&length);
            PyValueError::new_err(format!("length={given}: must be 0 to {known}, the tokens of the request"))
        };
        let Some(wanted) = value_of(&length).and_then(|length| u32::try_from(length).ok()) else {
            return Err(bad(self.position(py)?.known as usize));
        };
        self.visit(
            py,
            |ledger, slot| ledger.truncate(slot, wanted).map(Ok),
            |own| {
                if wanted as usize > own.tokens.len() {
                    return Ok(Err(own.tokens.len()));
                }
                own.tokens.truncate(wanted as usize);
                own.extras.truncate(wanted as usize);
                Ok(Ok(()))
            },
        )?
        .map_err(bad)
    }

    /// The known tokens: a copy, as a `TokenBuffer`.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let tokens = self.visit(
            py,
            |ledger, slot| ledger.tokens(slot).map(<[Token]>::to_vec),
            |own| Ok(own.tokens.clone()),
        )?;
        let tokens = PyArray1::from_vec(py, tokens);
        py.import("pagekeeper.context")?.getattr("TokenBuffer")?.call1((tokens,))
    }

    /// The slot while the request is claimed, else None.
    #[getter]
    fn slot(&self) -> Option<u32> {
        self.claimed_slot().map(|slot| slot.0)
    }

    /// Tokens that have KV; 0 while the request is not claimed.
    #[getter]
    fn processed_length(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.position(py)?.processed)
    }

    /// Tokens that the newest planned forward computes; 0 when none is out.
    #[getter]
    fn active_length(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.position(py)?.active)
    }

    /// Tokens of this admission that came from the cache instead of being computed.
    #[getter]
    fn cached_prefix_length(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.position(py)?.cached)
    }

    /// Tokens that the next `alloc` would find on the device instead of computing them; 0 once the prompt is computed,
    /// and while the request is not claimed.
    #[getter]
    fn estimated_reusable_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        self.visit(py, |ledger, slot| Ok(ledger.reusable_tokens(&[slot])?[0]), |_| Ok(0))
    }

    /// The salt; None when there is none.
    #[getter]
    fn cache_salt(&self) -> Option<&str> {
        Some(self.namespace.salt.as_str()).filter(|salt| !salt.is_empty())
    }

    /// An id of a class of the caller's may refer back to the context.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.request_id)?;
        visit.call(&self.retention_config)?;
        visit.call(&self.dkv_cache_hint)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.position(py)?.known as usize)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let id = self.request_id.bind(py).repr()?;
        let length = self.position(py)?.known;
        Ok(match self.slot() {
            Some(slot) => format!("TextContext(request_id={id}, {length} tokens, slot {slot})"),
            None => format!("TextContext(request_id={id}, {length} tokens, not claimed)"),
        })
    }
}
