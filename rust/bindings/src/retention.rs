//! What is kept longer: retention, pins, hints, and what is forgotten on purpose.

use crate::batch::{one_slot_of, slots_of};
use crate::hashing::{BlockKeywords, generation_from};
use crate::ledger::Ledger;
use block_pool::{Priority, Retention};
use cache_manager::{BlockRetention, SessionHint, TokenRange};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::sync::Arc;

/// `(start, end, priority, seconds after the last release, time of expiry)`, as `RetentionConfig` checked it.
type Range = (u32, Option<u32>, i64, Option<f64>, Option<f64>);

/// The native form of a `RetentionConfig` for a prompt of `tokens` tokens.
pub(crate) fn retention_from(config: &Bound<'_, PyAny>, tokens: usize) -> PyResult<Arc<BlockRetention>> {
    static CONFIG: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if !config.is_instance(CONFIG.import(config.py(), "pagekeeper.retention", "RetentionConfig")?)? {
        let given = config.get_type().name()?;
        return Err(PyTypeError::new_err(format!("retention: got {given}, must be a RetentionConfig")));
    }
    let ranges: Vec<Range> = config.call_method0("native_ranges")?.extract()?;
    let (priority, duration): (i64, Option<f64>) = config.call_method0("native_decode")?.extract()?;
    let ranges = ranges
        .into_iter()
        .map(|(start, end, priority, duration, expires_at)| {
            Ok(TokenRange { start, end, retention: one(priority, duration, expires_at)? })
        })
        .collect::<PyResult<Vec<_>>>()?;
    BlockRetention::new(ranges, one(priority, duration, None)?, tokens as u32)
        .map(Arc::new)
        .map_err(|error| PyValueError::new_err(format!("retention: {error}")))
}

fn one(priority: i64, duration: Option<f64>, expires_at: Option<f64>) -> PyResult<Retention> {
    let priority = Priority::new(priority).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Retention::new(priority, duration, expires_at).map_err(|error| PyValueError::new_err(error.to_string()))
}

#[pymethods]
impl Ledger {
    /// Keeps the stored blocks of a request until `unpin`.
    fn pin(&self, request: &Bound<'_, PyAny>) -> PyResult<u64> {
        let slot = one_slot_of(request, &self.shared)?;
        self.run(request.py(), |ledger| ledger.pin(slot))
    }

    fn unpin(&self, py: Python<'_>, pin: u64) -> PyResult<()> {
        self.run(py, |ledger| ledger.unpin(pin))
    }

    /// The sessions of these requests come back soon: their blocks get this priority at least.
    fn resume_soon(&self, batch: &Bound<'_, PyAny>, priority: i64, duration: Option<f64>) -> PyResult<()> {
        self.hint(batch, SessionHint::ResumeSoon(one(priority, duration, None)?))
    }

    /// The sessions of these requests are over.
    fn session_done(&self, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hint(batch, SessionHint::Done)
    }

    /// Forgets unused stored blocks that follow the prompt's full blocks; gives their number.
    #[pyo3(signature = (tokens, *, salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides))]
    #[expect(clippy::too_many_arguments, reason = "one Python signature")]
    fn truncate_prefix(
        &self,
        tokens: &Bound<'_, PyAny>,
        salt: Option<&Bound<'_, PyAny>>,
        lora_id: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = generation_from)] lora_generation: u64,
        mm_items: Option<&Bound<'_, PyAny>>,
        prompt_embeds: Option<&Bound<'_, PyAny>>,
        extra_ids: Option<&Bound<'_, PyAny>>,
        overrides: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let py = tokens.py();
        let keywords =
            BlockKeywords { salt, lora_id, lora_generation, mm_items, prompt_embeds, extra_ids, overrides };
        let query = self.query(py, tokens, keywords.parse()?)?;
        self.shared.with(py, |ledger| ledger.truncate_prefix(&query))
    }
}

impl Ledger {
    /// Tells the ledger a hint for every request of a batch.
    fn hint(&self, batch: &Bound<'_, PyAny>, hint: SessionHint) -> PyResult<()> {
        let slots = slots_of(batch, &self.shared, false)?;
        self.run(batch.py(), |ledger| ledger.hint_sessions(&slots, hint))
    }
}
