//! What is asked of the ledger without a request: prefixes, books, counters.

use crate::connectors::{Keys, keys};
use crate::errors;
use crate::hashing::{BlockInputs, BlockKeywords, generation_from, hashing_time, without_gil};
use crate::ledger::Ledger;
use crate::shared::Shared;
use crate::tokens::tokens_from;
use block_hash::{Chain, Guards};
use block_pool::Slab;
use cache_manager::{BlockKey, MissReason, PrefixQuery, Presence};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use std::sync::{Arc, Weak};

/// `(reusable blocks that are held, the same by group, reusable blocks, hash of the first block not stored, why it is
/// not, the step of its eviction, where the blocks were found, keys of the full blocks behind those that are stored)`.
/// With windows or several groups the keys are those behind the reusable blocks.
type Reuse<'py> = (
    u32,
    Vec<u32>,
    u32,
    Option<Bound<'py, PyBytes>>,
    Option<&'static str>,
    Option<u32>,
    PrefixWalk,
    Keys<'py>,
);

/// Where a ledger found the blocks of a prompt. A copy of it is None.
#[pyclass(module = "pagekeeper._native", frozen)]
pub(crate) struct PrefixWalk {
    of: Weak<Shared>,
    walk: cache_manager::PrefixWalk,
}

impl PrefixWalk {
    /// The walk, if it was this ledger's.
    pub(crate) fn within(&self, shared: &Arc<Shared>) -> Option<&cache_manager::PrefixWalk> {
        std::ptr::eq(Weak::as_ptr(&self.of), Arc::as_ptr(shared)).then_some(&self.walk)
    }
}

#[pymethods]
impl PrefixWalk {
    #[expect(clippy::unused_self, reason = "Python's protocol")]
    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, Bound<'py, PyTuple>) {
        (py.None().bind(py).get_type(), PyTuple::empty(py))
    }
}

fn name_of(reason: MissReason) -> &'static str {
    match reason {
        MissReason::NeverStored => "never_stored",
        MissReason::Evicted => "evicted",
        MissReason::Collision => "collision",
        MissReason::OtherNamespace => "other_namespace",
        MissReason::Window => "window",
        MissReason::NoSnapshot => "no_snapshot",
    }
}

impl Ledger {
    pub(crate) fn query(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        inputs: BlockInputs,
    ) -> PyResult<PrefixQuery> {
        let tokens = tokens_from(tokens, "tokens")?;
        let mut chain = Chain::new(self.config.algo, &inputs.namespace.root(self.config.seed.as_ref()));
        let page_size = self.config.page_size as usize;
        if self.config.prefix_caching {
            let time = hashing_time(self.config.algo, tokens.len());
            without_gil(py, time, || chain.extend(&tokens, page_size, &inputs.extras));
        }
        Ok(PrefixQuery { tokens, namespace: inputs.namespace, extras: inputs.extras, chain })
    }

    /// The full blocks of the prompt from number `first` on as other tiers know them, if there are any.
    fn keys_from(&self, py: Python<'_>, query: &PrefixQuery, first: usize) -> Vec<BlockKey> {
        let missing = first..query.chain.len();
        let Some(secret) = self.guard_secret.as_ref().filter(|_| !missing.is_empty()) else {
            return Vec::new();
        };
        let root = query.namespace.root(self.config.seed.as_ref());
        let mut guards = Guards::new(self.config.algo, &root, secret);
        let page_size = self.config.page_size as usize;
        let time = hashing_time(self.config.algo, query.tokens.len());
        without_gil(py, time, || guards.extend(&query.tokens, page_size, &query.extras));
        missing.map(|block| BlockKey::of(&query.chain, &guards, block)).collect()
    }
}

#[pymethods]
impl Ledger {
    /// What a prompt would reuse; `other_namespaces` also asks whether another salt or adapter has more.
    #[pyo3(signature = (tokens, *, salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides,
                        other_namespaces))]
    #[expect(clippy::too_many_arguments, reason = "one Python signature")]
    fn probe<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        salt: Option<&Bound<'py, PyAny>>,
        lora_id: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = generation_from)] lora_generation: u64,
        mm_items: Option<&Bound<'py, PyAny>>,
        prompt_embeds: Option<&Bound<'py, PyAny>>,
        extra_ids: Option<&Bound<'py, PyAny>>,
        overrides: Option<&Bound<'py, PyAny>>,
        other_namespaces: bool,
    ) -> PyResult<Reuse<'py>> {
        let py = tokens.py();
        let keywords =
            BlockKeywords { salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides };
        let inputs = keywords.parse()?;
        let query = self.query(py, tokens, inputs)?;
        let reuse = self.shared.with(py, |ledger| {
            if other_namespaces { ledger.probe_namespaces(&query) } else { ledger.probe(&query) }
        })?;
        let plain = self.config.groups.len() == 1 && !self.config.groups[0].kind.forgets();
        let rest = self.keys_from(py, &query, if plain { reuse.present } else { reuse.all } as usize);
        Ok((
            reuse.allocated,
            reuse.allocated_by_group,
            reuse.all,
            reuse.first_new_block.map(|hash| PyBytes::new(py, &hash)),
            reuse.miss.map(|miss| name_of(miss.reason)),
            reuse.miss.and_then(|miss| miss.evicted_at).map(|step| step.0),
            PrefixWalk { of: Arc::downgrade(&self.shared), walk: reuse.walk },
            keys(py, &rest),
        ))
    }

    /// Leading blocks that could be reused, and full ones that are there, if `there`, `(first block, a list a group)`,
    /// says which blocks from the first one on other tiers have.
    #[expect(clippy::too_many_arguments, reason = "one Python signature")]
    #[pyo3(signature = (tokens, there, *, salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides))]
    fn probe_with<'py>(
        &self,
        tokens: &Bound<'py, PyAny>,
        there: (usize, Vec<Vec<bool>>),
        salt: Option<&Bound<'py, PyAny>>,
        lora_id: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = generation_from)] lora_generation: u64,
        mm_items: Option<&Bound<'py, PyAny>>,
        prompt_embeds: Option<&Bound<'py, PyAny>>,
        extra_ids: Option<&Bound<'py, PyAny>>,
        overrides: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(u32, u32)> {
        let py = tokens.py();
        let keywords =
            BlockKeywords { salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides };
        let query = self.query(py, tokens, keywords.parse()?)?;
        let there = Presence { first: there.0, groups: there.1 };
        self.shared.with(py, |ledger| ledger.probe_with(&query, &there))
    }

    /// Fails when the books are in disorder, as every call does then.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.check(py)
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.with(py, cache_manager::Ledger::reset_prefix_cache)
    }

    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        let (verified, held) =
            self.shared.with_even_if_broken(py, |ledger| (ledger.verify(), ledger.units_held()))?;
        let corrupt = |what: String| errors::named(py, "LedgerCorruptError", what);
        verified.map_err(|fault| corrupt(fault.to_string()))?;
        let Some(tier) = self.tier.as_ref().map(|tier| &tier.get().core) else { return Ok(()) };
        for (number, group) in tier.groups().iter().enumerate() {
            group.verify().map_err(|fault| corrupt(format!("host tier: {fault}")))?;
            let held = held.iter().filter(|(of, _)| of.index() == number).map(|&(_, unit)| unit);
            let held: Vec<_> = held.collect();
            if let Some(private) = group.private_units().filter(|private| *private != held) {
                let what = format!("host tier: units {private:?} are private, requests hold {held:?}");
                return Err(corrupt(what));
            }
        }
        let where_told = self.shared.with_even_if_broken(py, |ledger| ledger.verify_whereabouts(tier))?;
        where_told.map_err(|(hash, group)| {
            corrupt(format!("block {hash:016x} of group {} is not where events say", group.0))
        })
    }

    fn fingerprint(&self, py: Python<'_>) -> PyResult<u64> {
        self.shared.with(py, |ledger| ledger.fingerprint())
    }

    fn debug_dump(&self, py: Python<'_>) -> PyResult<String> {
        self.shared.with_even_if_broken(py, |ledger| ledger.debug_dump())
    }

    /// `(pages that can be had, all pages)` of each group.
    fn block_count(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        self.shared.with(py, |ledger| {
            let pools = ledger.pools();
            pools.groups().map(|group| (pools.available(group), pools[group].total())).collect()
        })
    }

    /// `(huge pages that any group can have, all huge pages)` of the slab that groups share, if they do.
    fn huge_page_count(&self, py: Python<'_>) -> PyResult<Option<(u32, u32)>> {
        self.shared.with(py, |ledger| {
            let pools = ledger.pools();
            let slab = pools.slabs().iter().find(|slab| slab.is_shared())?;
            Some((pools.free_huge_pages(slab), slab.huge_pages()))
        })
    }

    /// Counters and gauges by name.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        let (counters, events, gauges) = self.shared.with(py, |ledger| {
            let pools = ledger.pools();
            // Of a slab that groups share its huge pages count: what one group has, no other can have.
            let sum =
                |count: &dyn Fn(&Slab) -> u32| pools.slabs().iter().map(|slab| u64::from(count(slab))).sum();
            let (free, pristine): (u64, u64) =
                (sum(&|slab| pools.free_huge_pages(slab)), sum(&|slab| pools.pristine_huge_pages(slab)));
            let gauges = [
                ("pages_total", sum(&Slab::huge_pages)),
                ("pages_free", free),
                ("pages_pristine", pristine),
                ("pages_evictable", free - pristine),
                ("pages_in_flight", pools.groups().map(|group| u64::from(pools[group].in_flight())).sum()),
                ("cached_blocks", ledger.cached_blocks() as u64),
                ("requests", ledger.requests() as u64),
                ("suspended", ledger.suspended() as u64),
                ("pins", ledger.pins() as u64),
                ("copies_in_flight", ledger.copies_in_flight() as u64),
            ];
            let log = ledger.events();
            let events = [("events_recorded", log.next_id()), ("events_dropped", log.dropped())];
            (*ledger.counters(), events, gauges)
        })?;
        for (name, value) in counters.named().into_iter().chain(events).chain(gauges) {
            out.set_item(name, value)?;
        }
        Ok(out)
    }

    /// What each histogram has counted, by name.
    fn histograms<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        let histograms = self.shared.with(py, |ledger| ledger.counters().histograms())?;
        for (name, histogram) in histograms {
            out.set_item(name, PyTuple::new(py, histogram.counts())?)?;
        }
        Ok(out)
    }
}
