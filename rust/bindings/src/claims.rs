//! Claiming and releasing: how tokens move from a context to the ledger and back.

use crate::batch::one_slot_of;
use crate::context::{Content, LOST, State, TextContext};
use crate::errors;
use crate::hashing::{hashing_time, without_gil};
use crate::ledger::Ledger;
use block_hash::{Chain, ExtraKeys, Guards, Token};
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
                self.give_up_claim(own, Content { tokens, extras, former, cached });
                return Err(errors::from_ledger(py, &refused.error, Some(own.request_id.bind(py))));
            }
            Err(panic) => {
                *own.state.lock() = State::Lost; // the tokens went with the panic
                self.ids.lock().remove(&own.key);
                return Err(panic);
            }
        };
        self.bind(context, slot);
        Ok(slot.0)
    }

    /// Undoes [`Ledger::claim_context`] if nothing has come of it; otherwise releases the request.
    pub(crate) fn unclaim_context(&self, context: &Bound<'_, TextContext>) -> PyResult<()> {
        let slot = one_slot_of(context.as_any(), &self.shared)?;
        let released = self.run(context.py(), |ledger| ledger.unclaim(slot))?;
        self.unbind(&[slot], released.into_iter().collect());
        Ok(())
    }

    /// The context stands for the request that was just claimed under `slot`.
    pub(crate) fn bind(&self, context: &Bound<'_, TextContext>, slot: SlotId) {
        *context.get().state.lock() = State::Claimed { shared: Arc::clone(&self.shared), slot };
        let mut contexts = self.contexts.lock();
        let len = contexts.len().max(slot.index() + 1);
        contexts.resize_with(len, || None);
        contexts[slot.index()] = Some(context.clone().unbind());
    }

    /// The context of the request that is claimed under `slot`.
    pub(crate) fn context_of(&self, py: Python<'_>, slot: SlotId) -> Option<Py<TextContext>> {
        let contexts = self.contexts.lock();
        let context = contexts.get(slot.index())?.as_ref().map(|context| context.clone_ref(py));
        context.filter(|context| context.get().claimed_slot() == Some(slot))
    }

    /// Takes what an unclaimed context holds, and reserves its id.
    fn begin_claim(&self, context: &Bound<'_, TextContext>) -> PyResult<Content> {
        let own = context.get();
        let problem = {
            let mut state = own.state.lock();
            match std::mem::replace(&mut *state, State::Claiming) {
                State::Free(held) if self.ids.lock().insert(own.key.clone()) => return Ok(*held),
                other => *state = other,
            }
            match &*state {
                State::Free(_) => "a request with this id is claimed already",
                State::Claimed { shared, .. } if !Arc::ptr_eq(shared, &self.shared) => {
                    "is claimed already, by another manager"
                }
                State::Claimed { .. } => "is claimed already",
                State::Claiming => "is being claimed in another thread",
                State::Lost => LOST,
            }
        };
        let id = own.request_id.bind(context.py()).repr()?;
        Err(PyValueError::new_err(format!("request {id}: {problem}")))
    }

    /// Undoes [`Ledger::begin_claim`].
    fn give_up_claim(&self, context: &TextContext, held: Content) {
        *context.state.lock() = held.free();
        self.ids.lock().remove(&context.key);
    }

    fn new_sequence(
        &self,
        py: Python<'_>,
        context: &TextContext,
        tokens: Vec<Token>,
        extras: ExtraKeys,
    ) -> NewSequence {
        let root = context.namespace.root(self.config.seed.as_ref());
        let guards = self.guard_secret.map(|secret| Guards::new(self.config.algo, &root, &secret));
        let mut sequence = NewSequence {
            tokens,
            max_length: context.max_length,
            namespace: context.namespace.clone(),
            extras,
            chain: Chain::new(self.config.algo, &root),
            guards,
            retention: context.retention.clone(),
            no_read: context.no_read,
            no_store: context.no_store,
            drafts: context.num_draft_tokens.into(),
            max_new_tokens: context.max_new_tokens.map(|tokens| tokens.try_into().unwrap_or(u32::MAX)),
            beams: context.beam_width.into(),
            encoder: context.encoder_length.unwrap_or(0),
        };
        if self.config.prefix_caching {
            let passes = 1 + u32::from(sequence.guards.is_some());
            let time = passes * hashing_time(self.config.algo, sequence.tokens.len());
            without_gil(py, time, || sequence.hash_prompt(self.config.page_size));
        }
        sequence
    }

    /// Gives tokens and extra keys back to the contexts of released slots.
    pub(crate) fn unbind(&self, slots: &[SlotId], released: Vec<Released>) {
        let contexts: Vec<_> = {
            let mut contexts = self.contexts.lock();
            slots.iter().map(|slot| contexts.get_mut(slot.index()).and_then(Option::take)).collect()
        };
        for ((slot, context), released) in slots.iter().zip(&contexts).zip(released) {
            let Released { tokens, extras, cached, tail: _ } = released;
            if let Some(context) = context.as_ref().map(Py::get) {
                let former = Some((Arc::downgrade(&self.shared), *slot));
                *context.state.lock() = Content { tokens, extras, former, cached }.free();
                self.ids.lock().remove(&context.key);
            }
        }
    }
}
