//! The native ledger class: one method a verb, each one crossing whatever the batch size.

use crate::batch::{one_slot_of, slots_of};
use crate::context::{RequestKey, TextContext};
use crate::errors;
use crate::hashing::seed_from;
use crate::shared::Shared;
use crate::tiered::TieredConnector;
use crate::tokens::{counts_from, new_tokens_from, number_from};
use block_hash::Algo;
use block_pool::{PolicyError, Priority};
use cache_manager::{
    Expected, Group, GroupKind, LedgerConfig, LedgerError, OnDuplicate, Released, Reserve, SlotId, Snapshots,
    WritePolicy,
};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::collections::HashSet;
use std::sync::Arc;

/// The ledger of one replica; `PagedKVCacheManager` documents its verbs.
#[pyclass(module = "pagekeeper._native", frozen)]
pub(crate) struct Ledger {
    pub(crate) shared: Arc<Shared>,
    pub(crate) config: LedgerConfig,
    pub(crate) max_batch_size: usize,
    /// Keys the second identities of blocks; there are tiers beyond the device.
    pub(crate) guard_secret: Option<[u8; 32]>,
    /// The tier that the ledger asks itself.
    pub(crate) tier: Option<Py<TieredConnector>>,
    /// Claimed contexts by the dense index of their slot.
    pub(crate) contexts: Mutex<Vec<Option<Py<TextContext>>>>,
    /// Ids of the claimed requests.
    pub(crate) ids: Mutex<HashSet<RequestKey>>,
}

impl Ledger {
    /// Runs `call`, and tells the tier what it gave back; an error names the request that it is about.
    pub(crate) fn run<R>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut cache_manager::Ledger) -> Result<R, LedgerError>,
    ) -> PyResult<R> {
        let call = |ledger: &mut cache_manager::Ledger| {
            let result = call(ledger);
            self.free_units(ledger);
            result
        };
        self.shared.with(py, call)?.map_err(|error| self.explain(py, &error))
    }

    pub(crate) fn explain(&self, py: Python<'_>, error: &LedgerError) -> PyErr {
        let slot = match error {
            LedgerError::TwiceInBatch(slot)
            | LedgerError::NothingToCompute { slot }
            | LedgerError::AlreadyPlanned { slot, .. }
            | LedgerError::TwoStepsOut { slot }
            | LedgerError::NotPlanned { slot }
            | LedgerError::Loading { slot }
            | LedgerError::Suspended { slot }
            | LedgerError::Leaving { slot }
            | LedgerError::NotSuspended { slot }
            | LedgerError::StepOut { slot }
            | LedgerError::NothingToSuspend { slot }
            | LedgerError::PageCopyPlanned { slot }
            | LedgerError::PageCopiesLeft { slot }
            | LedgerError::InsufficientUnits { slot, .. }
            | LedgerError::Padding(slot)
            | LedgerError::PlannedBefore(slot)
            | LedgerError::BadCount { slot, .. }
            | LedgerError::NotShortened { slot, .. }
            | LedgerError::BadLoad { slot, .. }
            | LedgerError::TooLong { slot: Some(slot), .. }
            | LedgerError::InsufficientBlocks { slot, .. }
            | LedgerError::RequestTooLarge { slot, .. } => Some(*slot),
            _ => None,
        };
        let context = slot.and_then(|slot| self.context_of(py, slot));
        let id = context.map(|context| context.get().request_id.clone_ref(py));
        errors::from_ledger(py, error, id.as_ref().map(|id| id.bind(py)))
    }

    /// Ends requests; when the ledger is broken, their pages are left alone.
    fn release_slots(
        &self,
        py: Python<'_>,
        slots: &[SlotId],
    ) -> PyResult<Result<Vec<Released>, LedgerError>> {
        let release = |ledger: &mut cache_manager::Ledger| {
            if let Some(tier) = &self.tier {
                ledger.touch_all(&mut &tier.get().core, slots);
            }
            let released = ledger.release(slots);
            self.free_units(ledger);
            released
        };
        self.shared.with_or_rescue(py, release, |ledger| ledger.abandon(slots))
    }

    /// Hands what was published to the tier that the ledger asks itself, if there is one.
    pub(crate) fn offload_to_tier(&self, ledger: &mut cache_manager::Ledger) -> Result<(), LedgerError> {
        match &self.tier {
            Some(tier) => ledger.offload_to(&mut &tier.get().core),
            None => Ok(()),
        }
    }

    /// Takes back the contexts that are still claimed.
    fn end(&self, py: Python<'_>) {
        let slots: Vec<_> = {
            let contexts = self.contexts.lock();
            contexts.iter().flatten().filter_map(|context| context.get().claimed_slot()).collect()
        };
        if let Ok(Ok(released)) = self.release_slots(py, &slots) {
            self.unbind(&slots, released);
        }
    }
}

fn write_policy_from(name: &str, min_hits: u32, min_priority: Option<i64>) -> PyResult<WritePolicy> {
    let min_priority = min_priority.map(Priority::new).transpose();
    let min_priority = min_priority.map_err(|error| PyValueError::new_err(error.to_string()))?;
    match (name, min_priority) {
        ("write_through", _) => Ok(WritePolicy::WriteThrough),
        ("selective", min_priority) => Ok(WritePolicy::Selective { min_hits, min_priority }),
        ("on_evict", Some(min_priority)) => Ok(WritePolicy::OnEvict { min_priority }),
        _ => Err(PyValueError::new_err(format!(
            "write_policy={name:?}: must be 'write_through', 'selective', or 'on_evict' with a priority"
        ))),
    }
}

/// The argument `num_tokens` of `alloc`.
pub(crate) fn bounds_from(given: Option<&Bound<'_, PyAny>>, slots: &[SlotId]) -> PyResult<Vec<u32>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    let bounds = counts_from(given, "num_tokens")?;
    if bounds.is_empty() && !slots.is_empty() {
        return Err(PyValueError::new_err("num_tokens: empty; give one number, or one a request"));
    }
    Ok(bounds)
}

impl Drop for Ledger {
    /// Contexts outlive their manager: they get their tokens back, as from a release.
    fn drop(&mut self) {
        Python::attach(|py| self.end(py));
    }
}

#[pymethods]
impl Ledger {
    #[new]
    #[pyo3(signature = (*, page_size, groups, huge_pages, request_pages, max_batch_size, prefix_caching, partial_reuse, copy_on_partial_reuse, store_partial_tails, algo, seed, on_duplicate, reserve, policy, priority,
                        max_seq_len, max_num_input_tokens, guard_secret, tier, write_policy, min_hits, min_priority, event_buffer_max_size))]
    #[expect(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "one Python signature")]
    fn new(
        page_size: u32,
        groups: Vec<(String, u32, u32, u32)>,
        huge_pages: Option<u32>,
        request_pages: Vec<u32>,
        max_batch_size: usize,
        prefix_caching: bool,
        partial_reuse: bool,
        copy_on_partial_reuse: bool,
        store_partial_tails: bool,
        algo: &str,
        seed: Option<&Bound<'_, PyAny>>,
        on_duplicate: &str,
        reserve: &str,
        policy: &str,
        priority: i64,
        max_seq_len: Option<u32>,
        max_num_input_tokens: Option<u32>,
        guard_secret: Option<&Bound<'_, PyAny>>,
        tier: Option<Py<TieredConnector>>,
        write_policy: &str,
        min_hits: u32,
        min_priority: Option<i64>,
        event_buffer_max_size: u32,
    ) -> PyResult<Ledger> {
        if page_size == 0 || max_batch_size == 0 {
            return Err(PyValueError::new_err("page_size and max_batch_size must be at least 1"));
        }
        if groups.is_empty() || groups.len() > usize::from(u8::MAX) {
            return Err(PyValueError::new_err(format!("{} groups: must be 1 to 255", groups.len())));
        }
        let groups: Vec<Group> = groups
            .into_iter()
            .map(|(kind, tokens, sinks, pages)| group_from(page_size, &kind, tokens, sinks, pages))
            .collect::<PyResult<_>>()?;
        if max_seq_len.is_none() && groups.iter().all(|group| group.kind.forgets()) {
            return Err(PyValueError::new_err(
                "max_seq_len: missing; where no group keeps all tokens, their pages bound no request",
            ));
        }
        if groups.iter().all(|group| group.kind.lasts()) {
            return Err(PyValueError::new_err(
                "groups: all are scratch or cross; one must keep what tokens leave",
            ));
        }
        let config = LedgerConfig {
            page_size,
            groups,
            huge_pages,
            expected: Expected { requests: max_batch_size as u32, pages: request_pages },
            prefix_caching,
            partial_reuse,
            copy_on_partial_reuse,
            store_partial_tails,
            algo: algo.parse::<Algo>().map_err(|error| errors::from_hash(&error))?,
            seed: seed.map(seed_from).transpose()?,
            on_duplicate: match on_duplicate {
                "adopt" => OnDuplicate::Adopt,
                "private" => OnDuplicate::Private,
                _ => {
                    return Err(PyValueError::new_err(format!(
                        "on_duplicate={on_duplicate:?}: must be 'adopt' or 'private'"
                    )));
                }
            },
            reserve: match reserve {
                "chunk" => Reserve::Chunk,
                "prompt" => Reserve::Prompt,
                _ => {
                    return Err(PyValueError::new_err(format!(
                        "reserve={reserve:?}: must be 'chunk' or 'prompt'"
                    )));
                }
            },
            policy: policy.parse().map_err(|error: PolicyError| PyValueError::new_err(error.to_string()))?,
            priority: Priority::new(priority).map_err(|error| PyValueError::new_err(error.to_string()))?,
            max_seq_len,
            max_num_input_tokens,
            write_policy: write_policy_from(write_policy, min_hits, min_priority)?,
            event_buffer_max_size,
        };
        config.check_pools().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let mut ledger = cache_manager::Ledger::new(config.clone());
        if let Some(tier) = &tier {
            ledger.tell_of(&tier.get().core);
        }
        let shared = Arc::new(Shared::new(ledger));
        let guard_secret = guard_secret.map(seed_from).transpose()?;
        Ok(Ledger {
            shared,
            config,
            max_batch_size,
            guard_secret,
            tier,
            contexts: Mutex::default(),
            ids: Mutex::default(),
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // A lock that is taken has the ledger in use: nothing is visited then, and nothing collected.
        let Some(contexts) = self.contexts.try_lock() else { return Ok(()) };
        contexts.iter().flatten().try_for_each(|context| visit.call(context))
    }

    /// Most blocks that one request may have whose decode steps verify so many drafts.
    fn max_blocks_per_request(&self, num_draft_tokens: u8) -> u32 {
        self.config.max_blocks_per_request(num_draft_tokens.into())
    }

    fn claim(&self, context: &Bound<'_, TextContext>) -> PyResult<u32> {
        self.claim_context(context)
    }

    fn unclaim(&self, context: &Bound<'_, TextContext>) -> PyResult<()> {
        self.unclaim_context(context)
    }

    fn alloc(&self, batch: &Bound<'_, PyAny>, num_tokens: Option<&Bound<'_, PyAny>>) -> PyResult<usize> {
        let slots = slots_of(batch, &self.shared, false)?;
        let bounds = bounds_from(num_tokens, &slots)?;
        self.run(batch.py(), |ledger| ledger.alloc(&slots, &bounds))?;
        Ok(slots.len())
    }

    fn alloc_dummy(&self, request: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = one_slot_of(request, &self.shared)?;
        self.run(request.py(), |ledger| ledger.alloc_dummy(slot))
    }

    fn truncate(&self, request: &Bound<'_, PyAny>, length: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = one_slot_of(request, &self.shared)?;
        let length = number_from(length, "length", "0 to the number of known tokens")?;
        self.run(request.py(), |ledger| ledger.truncate(slot, length))
    }

    #[pyo3(signature = (batch, new_tokens = None, counts = None))]
    fn step(
        &self,
        batch: &Bound<'_, PyAny>,
        new_tokens: Option<&Bound<'_, PyAny>>,
        counts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let slots = slots_of(batch, &self.shared, true)?;
        let tokens = new_tokens.map(new_tokens_from).transpose()?.unwrap_or_default();
        let counts = counts.map(|counts| counts_from(counts, "counts")).transpose()?;
        self.run(batch.py(), |ledger| {
            ledger.step(&slots, &tokens, counts.as_deref())?;
            self.offload_to_tier(ledger)
        })
    }

    fn preempt(&self, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        let slots = slots_of(batch, &self.shared, false)?;
        self.run(batch.py(), |ledger| ledger.preempt(&slots))
    }

    /// The page of each request's last block, where that is stored as a tail.
    fn release(&self, batch: &Bound<'_, PyAny>) -> PyResult<Vec<Option<u32>>> {
        let py = batch.py();
        let slots = slots_of(batch, &self.shared, false)?;
        let released = self.release_slots(py, &slots)?.map_err(|error| self.explain(py, &error))?;
        let tails = released.iter().map(|released| released.tail.map(|page| page.0)).collect();
        self.unbind(&slots, released);
        Ok(tails)
    }

    /// Whether a request with this id is claimed.
    fn contains(&self, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.shared.check(request_id.py())?;
        Ok(RequestKey::of(request_id).is_ok_and(|key| self.ids.lock().contains(&key)))
    }

    /// Pins the pages of `count` blocks from block `first` on; gives `(id, pages, after step)`.
    fn start_copy(
        &self,
        request: &Bound<'_, PyAny>,
        first: usize,
        count: usize,
    ) -> PyResult<(u64, Vec<u32>, u32)> {
        let slot = one_slot_of(request, &self.shared)?;
        let job = self.run(request.py(), |ledger| ledger.start_copy(slot, first, count))?;
        Ok((job.id.0, job.pages.iter().map(|page| page.0).collect(), job.after.0))
    }

    fn commit<'py>(&self, request: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = request.py();
        let slot = one_slot_of(request, &self.shared)?;
        let hashes = self.run(py, |ledger| {
            let hashes = ledger.commit(slot)?;
            self.offload_to_tier(ledger)?;
            Ok(hashes)
        })?;
        PyList::new(py, hashes.iter().map(|hash| PyBytes::new(py, hash)))
    }
}

/// A group from its kind's name ("full", "window", "chunked"), the tokens of its window or chunk, those at the
/// beginning that a window keeps, and its pages.
fn group_from(page_size: u32, kind: &str, tokens: u32, sinks: u32, pages: u32) -> PyResult<Group> {
    let kind = match kind {
        "full" => GroupKind::Full,
        "recurrent" if tokens.is_multiple_of(page_size) => {
            GroupKind::Recurrent(Snapshots { interval: tokens, last: sinks > 0 })
        }
        "recurrent" => {
            return Err(PyValueError::new_err(format!(
                "snapshots every {tokens} tokens: must be a multiple of page_size={page_size}"
            )));
        }
        "scratch" => GroupKind::Scratch,
        "cross" => GroupKind::Cross,
        _ if tokens == 0 => {
            return Err(PyValueError::new_err(format!("{kind} of 0 tokens: must be at least 1")));
        }
        "window" => GroupKind::Window { window: tokens, sinks },
        "chunked" => GroupKind::Chunked { chunk: tokens },
        _ => {
            return Err(PyValueError::new_err(format!(
                "kind={kind:?}: must be 'full', 'window', 'chunked', 'recurrent', 'scratch' or 'cross'"
            )));
        }
    };
    if pages == 0 || pages > block_pool::Pool::MAX_PAGES {
        return Err(PyValueError::new_err(format!(
            "pages={pages}: must be 1 to {}",
            block_pool::Pool::MAX_PAGES
        )));
    }
    Ok(Group { kind, pages })
}
