//! Claiming and releasing: how tokens move from a context to the ledger and back.

use crate::context::{Content, State, TextContext};
use crate::errors;
use crate::hashing::{hashing_time, without_gil};
use crate::ledger::Ledger;
use block_hash::{Chain, ExtraKeys, Token};
use cache_manager::{NewSequence, Released, SlotId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

impl Ledger {
    /// Gives an unclaimed context a slot: its tokens move to the ledger.
    pub(crate) fn claim_context(&self, context: &Bound<'_, TextContext>) -> PyResult<u32> {
        let py = context.py();
        let own = context.get();
        self.shared.check(py)?;
        let Content { tokens, extras, former, cached } = self.begin_claim(context)?;
        let sequence = self.new_sequence(py, own, tokens, extras);
        let slot = match self.shared.with_even_if_broken(py, |ledger| ledger.claim(sequence)) {
            Ok(Ok(slot)) => slot,
            Ok(Err(refused)) => {
                let NewSequence { tokens, extras, .. } = refused.request;
                self.give_up_claim(context, Content { tokens, extras, former, cached })?;
                return Err(errors::from_ledger(py, &refused.error, Some(own.request_id.bind(py))));
            }
            Err(panic) => {
                let (tokens, extras) = Default::default();
                self.give_up_claim(context, Content { tokens, extras, former, cached })?;
                return Err(panic);
            }
        };
        *own.state.lock() = State::Claimed { shared: Arc::clone(&self.shared), slot };
        let mut contexts = self.contexts.lock();
        let len = contexts.len().max(slot.index() + 1);
        contexts.resize_with(len, || None);
        contexts[slot.index()] = Some(context.clone().unbind());
        Ok(slot.0)
    }

    /// Takes what an unclaimed context holds, and reserves its id.
    fn begin_claim(&self, context: &Bound<'_, TextContext>) -> PyResult<Content> {
        let py = context.py();
        let own = context.get();
        let id = own.request_id.bind(py);
        let taken = std::mem::replace(&mut *own.state.lock(), State::Claiming);
        let problem = match taken {
            State::Free(held) => {
                // One call, so that of two threads with one id only one gets it.
                let holder = self.ids.bind(py).call_method1("setdefault", (id, context));
                if holder.as_ref().is_ok_and(|holder| holder.is(context)) {
                    return Ok(*held);
                }
                *own.state.lock() = State::Free(held);
                holder?;
                "a request with this id is claimed already"
            }
            State::Claimed { .. } => {
                *own.state.lock() = taken;
                "is claimed already"
            }
            State::Claiming => "is being claimed in another thread",
        };
        Err(PyValueError::new_err(format!("request {}: {problem}", id.repr()?)))
    }

    /// Undoes [`Ledger::begin_claim`].
    fn give_up_claim(&self, context: &Bound<'_, TextContext>, held: Content) -> PyResult<()> {
        let own = context.get();
        *own.state.lock() = held.free();
        self.ids.bind(context.py()).del_item(own.request_id.bind(context.py()))
    }

    fn new_sequence(
        &self,
        py: Python<'_>,
        context: &TextContext,
        tokens: Vec<Token>,
        extras: ExtraKeys,
    ) -> NewSequence {
        let root = context.namespace.root(self.config.seed.as_ref());
        let mut sequence = NewSequence {
            tokens,
            max_length: context.max_length,
            namespace: context.namespace.clone(),
            extras,
            chain: Chain::new(self.config.algo, &root),
            no_read: context.no_read,
            no_store: context.no_store,
        };
        if self.config.prefix_caching {
            let time = hashing_time(self.config.algo, sequence.tokens.len());
            without_gil(py, time, || sequence.hash_prompt(self.config.page_size));
        }
        sequence
    }

    /// Gives tokens and extra keys back to the contexts of released slots.
    pub(crate) fn unbind(&self, py: Python<'_>, slots: &[SlotId], released: Vec<Released>) -> PyResult<()> {
        for (&slot, Released { tokens, extras, cached }) in slots.iter().zip(released) {
            let context = self.contexts.lock().get_mut(slot.index()).and_then(Option::take);
            if let Some(context) = context {
                let context = context.get();
                let former = Some((Arc::downgrade(&self.shared), slot));
                *context.state.lock() = Content { tokens, extras, former, cached }.free();
                self.ids.bind(py).del_item(context.request_id.bind(py))?;
            }
        }
        Ok(())
    }
}
