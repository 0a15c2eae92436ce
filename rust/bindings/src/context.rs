//! `TextContext`: a request, before, while and after it is claimed.

use crate::errors;
use crate::hashing::BlockInputs;
use crate::shared::Shared;
use crate::tokens::{in_range, token_from, tokens_with_room};
use block_hash::{ExtraKeys, Token};
use cache_manager::{LedgerError, Position, SlotId};
use numpy::PyArray1;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use radix_tree::NamespaceKey;
use std::sync::{Arc, Weak};

/// Tokens of output that a new request has memory for: the log grows without moving the prompt at once.
const OUTPUT_ROOM: usize = 256;

/// One request: a handle on its token log; see `_native.pyi`.
#[pyclass(module = "pagekeeper", frozen, weakref)]
pub(crate) struct TextContext {
    #[pyo3(get)]
    pub(crate) request_id: Py<PyAny>,
    #[pyo3(get)]
    pub(crate) max_length: u32,
    #[pyo3(get)]
    max_new_tokens: Option<u64>,
    #[pyo3(get)]
    pub(crate) no_read: bool,
    #[pyo3(get)]
    pub(crate) no_store: bool,
    pub(crate) namespace: NamespaceKey,
    pub(crate) state: Mutex<State>,
}

/// Who has the tokens.
pub(crate) enum State {
    /// The context itself: it is not claimed.
    Free(Box<Content>),
    /// A claim that is being made.
    Claiming,
    /// The ledger.
    Claimed { shared: Arc<Shared>, slot: SlotId },
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

impl TextContext {
    /// Runs `claimed` on the ledger, or `free` on what the context holds itself.
    fn visit<R>(
        &self,
        py: Python<'_>,
        claimed: impl FnOnce(&mut cache_manager::Ledger, SlotId) -> Result<R, LedgerError>,
        free: impl FnOnce(&mut Content) -> PyResult<R>,
    ) -> PyResult<R> {
        let (shared, slot) = match &mut *self.state.lock() {
            State::Free(own) => return free(own),
            State::Claiming => return Err(self.being_claimed(py)),
            State::Claimed { shared, slot } => (Arc::clone(shared), *slot),
        };
        let outcome = shared.with(py, |ledger| claimed(ledger, slot))?;
        outcome.map_err(|error| errors::from_ledger(py, &error, Some(self.request_id.bind(py))))
    }

    pub(crate) fn being_claimed(&self, py: Python<'_>) -> PyErr {
        let id = self.request_id.bind(py).repr().map_or_else(|_| "?".into(), |id| id.to_string());
        PyValueError::new_err(format!("request {id}: is being claimed in another thread"))
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
                        no_read = false, no_store = false, max_new_tokens = None))]
    #[expect(clippy::too_many_arguments, reason = "one Python signature")]
    fn new(
        request_id: Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        max_length: Option<i128>,
        cache_salt: Option<String>,
        lora_id: Option<&Bound<'_, PyAny>>,
        lora_generation: i128,
        mm_items: Option<&Bound<'_, PyAny>>,
        prompt_embeds: Option<&Bound<'_, PyAny>>,
        extra_ids: Option<&Bound<'_, PyAny>>,
        token_overrides: Option<&Bound<'_, PyAny>>,
        no_read: bool,
        no_store: bool,
        max_new_tokens: Option<i128>,
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
            Some(length) => u32::try_from(length)
                .ok()
                .filter(|&length| length <= i32::MAX.cast_unsigned() && length as usize >= tokens.len())
                .ok_or_else(|| {
                    let given = tokens.len();
                    PyValueError::new_err(format!(
                        "max_length={length}: must be at least the {given} tokens given, and below 2**31"
                    ))
                })?,
        };
        request_id
            .hash()
            .map_err(|_| PyValueError::new_err("request_id: must be hashable, a RequestID or a str"))?;
        let new_tokens =
            max_new_tokens.map(|given| in_range(given, "max_new_tokens", "0 to 2**64 - 1")).transpose()?;
        let inputs = BlockInputs::parse(
            cache_salt,
            lora_id,
            lora_generation,
            mm_items,
            prompt_embeds,
            extra_ids,
            token_overrides,
        )?;
        Ok(TextContext {
            request_id: request_id.unbind(),
            max_length,
            max_new_tokens: new_tokens,
            no_read,
            no_store,
            namespace: inputs.namespace,
            state: Mutex::new(Content { tokens, extras: inputs.extras, former: None, cached: 0 }.free()),
        })
    }

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

    fn truncate(&self, py: Python<'_>, length: i128) -> PyResult<()> {
        let bad = |known: usize| {
            PyValueError::new_err(format!("length={length}: must be 0 to {known}, the tokens of the request"))
        };
        let Ok(wanted) = u32::try_from(length) else { return Err(bad(self.position(py)?.known as usize)) };
        self.visit(
            py,
            |ledger, slot| ledger.truncate(slot, wanted),
            |own| {
                if wanted as usize > own.tokens.len() {
                    return Err(bad(own.tokens.len()));
                }
                own.tokens.truncate(wanted as usize);
                own.extras.truncate(wanted as usize);
                Ok(())
            },
        )
    }

    /// Known tokens as a new int32 array.
    fn token_array<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let tokens = self.visit(
            py,
            |ledger, slot| ledger.tokens(slot).map(<[Token]>::to_vec),
            |own| Ok(own.tokens.clone()),
        )?;
        Ok(PyArray1::from_vec(py, tokens))
    }

    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("pagekeeper.context")?.getattr("TokenBuffer")?.call1((self.token_array(py)?,))
    }

    #[getter]
    fn slot(&self) -> Option<u32> {
        match &*self.state.lock() {
            State::Claimed { slot, .. } => Some(slot.0),
            State::Free(_) | State::Claiming => None,
        }
    }

    #[getter]
    fn processed_length(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.position(py)?.processed)
    }

    #[getter]
    fn active_length(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.position(py)?.active)
    }

    #[getter]
    fn cached_prefix_length(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.position(py)?.cached)
    }

    #[getter]
    fn cache_salt(&self) -> Option<&str> {
        Some(self.namespace.salt.as_str()).filter(|salt| !salt.is_empty())
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
