//! The native class `TieredConnector`: a host tier as a `KVConnector`.

use crate::adopt::{Adopted, adopt};
use crate::disk::DiskDirectory;
use crate::errors;
use crate::tokens::pages_from;
use crate::transfer::{Transfer, wait};
use block_pool::{PageId, PolicyError, Step};
use completion::Outcome;
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tiered_connector::connector::{Closed, Offered, Refused, TieredConnector as Core};
use tiered_connector::copy::{CpuEngine, Region};
use tiered_connector::host::pin::{PageLock, Pinning};
use tiered_connector::host::{Arena, limits, sizing, topology};
use tiered_connector::job::{Offer, TierKey};
use tiered_connector::vault::DiskVault;

/// Blocks in host memory, copied by Rust threads: a `KVConnector`.
///
/// Args:
///     pages: the device pool: uint8 arrays [pages, …] whose first axis is the page. They are kept, and read and
///         written by threads while a copy is in flight.
///     host_bytes: size of the tier in bytes. None: 1.5 times the pool, at most half of what may still be used.
///     policy: "priority_lru" or "priority_slru".
///     lanes: threads that copy.
///     pin: whether host memory is to be kept from being swapped.
///     numa_node: the NUMA node that threads of the tier run on. None: any.
///
/// Raises:
///     ValueError: arrays that are no pool; a size that does not fit, or that not one page fits in; no such node.
#[pyclass(module = "pagekeeper._native", frozen, weakref)]
pub(crate) struct TieredConnector {
    pub(crate) core: Core,
    /// Dropped after `core`, and before the memory that it pins.
    pinning: Option<Pinning>,
    disk: Option<Arc<DiskVault>>,
    /// What the user has not been told of.
    warnings: Mutex<Vec<String>>,
    engine: Arc<CpuEngine>,
    pages: usize,
    /// The pool's memory; dropped after `core`, whose threads use it. None while it is given up.
    pool: Mutex<Vec<Py<PyAny>>>,
    #[cfg(feature = "faults")]
    pub(crate) faults: Arc<crate::faults::Faults>,
}

/// Blocks, each with its page.
type Blocks = Vec<(TierKey, PageId)>;

/// A `BlockKey`.
struct Key(TierKey);

impl<'py> FromPyObject<'_, 'py> for Key {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Key> {
        let (hash, guard): (Bound<'_, PyBytes>, Bound<'_, PyBytes>) = given.extract()?;
        let (Some(hash), Ok(guard)) = (hash.as_bytes().first_chunk(), guard.as_bytes().try_into()) else {
            return Err(PyValueError::new_err(format!(
                "a BlockKey has a hash of 8 or 32 bytes and a guard of 16, not {} and {}",
                hash.as_bytes().len(),
                guard.as_bytes().len()
            )));
        };
        Ok(Key(TierKey { hash: u64::from_be_bytes(*hash), guard }))
    }
}

fn keys_of(given: &Bound<'_, PyAny>) -> PyResult<Vec<TierKey>> {
    Ok(given.extract::<Vec<Key>>()?.into_iter().map(|Key(key)| key).collect())
}

pub(crate) fn closed(error: Closed) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// Memory of the device, and what keeps it where it is.
struct DeviceMemory {
    count: usize,
    regions: Vec<Region>,
    pool: Vec<Py<PyAny>>,
}

fn device_memory(pages: &[Bound<'_, PyAny>]) -> PyResult<DeviceMemory> {
    let adopted = pages.iter().enumerate().map(|(number, array)| adopt(array, &format!("pages[{number}]")));
    let adopted: Vec<Adopted> = adopted.collect::<PyResult<_>>()?;
    let count = adopted.iter().map(|array| array.pages).min().unwrap_or(0);
    if count == 0 || adopted.iter().any(|array| array.pages != count) {
        return Err(PyValueError::new_err("pages: must be at least one array, all of as many pages"));
    }
    let regions = adopted.iter().map(|array| array.region.clone()).collect();
    let pool = adopted.into_iter().map(|array| array.array.into_any()).collect();
    Ok(DeviceMemory { count, regions, pool })
}

impl TieredConnector {
    /// Nothing is copied any more, and the pool's memory is not held.
    fn let_memory_go(&self, py: Python<'_>) {
        py.detach(|| self.engine.drop_regions());
        let pool = std::mem::take(&mut *self.pool.lock());
        drop(pool);
    }

    /// Refuses while copies are in flight, or when none can be.
    fn check_idle(&self) -> PyResult<()> {
        self.core.check_open().map_err(closed)?;
        match self.core.metrics().jobs {
            0 => Ok(()),
            jobs => Err(PyRuntimeError::new_err(format!("{jobs} copies are in flight"))),
        }
    }

    /// Each block with its page.
    fn blocks(
        &self,
        block_ids: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
    ) -> PyResult<(Vec<u32>, Blocks)> {
        let (pages, keys) = (pages_from(block_ids, "block_ids")?, keys_of(block_hashes)?);
        if pages.len() != keys.len() {
            return Err(PyValueError::new_err(format!(
                "{} block_ids for {} block_hashes: must be one page a block",
                pages.len(),
                keys.len()
            )));
        }
        if let Some(page) = pages.iter().find(|&&page| page as usize >= self.pages) {
            return Err(PyValueError::new_err(format!(
                "block_ids: there is no page {page} in a pool of {}",
                self.pages
            )));
        }
        let blocks = keys.into_iter().zip(pages.iter().map(|&page| PageId(page))).collect();
        Ok((pages, blocks))
    }
}

#[pymethods]
impl TieredConnector {
    #[new]
    #[pyo3(signature = (*, pages, host_bytes, policy, lanes, pin = false, numa_node = None, disk = None, disk_bytes = None, disk_workers = 32, fsync = "batch"))]
    #[expect(clippy::too_many_arguments, reason = "by name, from Python alone")]
    #[expect(clippy::needless_pass_by_value, reason = "an argument of Python's")]
    fn new(
        pages: Vec<Bound<'_, PyAny>>,
        host_bytes: Option<u64>,
        policy: &str,
        lanes: usize,
        pin: bool,
        numa_node: Option<u32>,
        disk: Option<&DiskDirectory>,
        disk_bytes: Option<u64>,
        disk_workers: usize,
        fsync: &str,
    ) -> PyResult<TieredConnector> {
        let policy = policy.parse().map_err(|error: PolicyError| PyValueError::new_err(error.to_string()))?;
        if lanes == 0 {
            return Err(PyValueError::new_err("lanes=0: must be at least 1"));
        }
        let DeviceMemory { count, regions, pool } = device_memory(&pages)?;
        let unit_bytes = regions.iter().map(Region::page_bytes).sum();
        let units = units(host_bytes, unit_bytes, count).map_err(PyValueError::new_err)?;
        let arena =
            Arena::new(units, unit_bytes).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let arena = Arc::new(arena);
        let node = topology::node_for(Path::new("/"), numa_node, None)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        // Each thread that is started from here on touches the arena there.
        let (_stay, not_bound) = match node.map(|node| node.stay()).transpose() {
            Ok(stay) => (stay, None),
            Err(error) => (None, Some(format!("host_numa_node: {error}"))),
        };
        let no_thread = |what: &str, error| PyRuntimeError::new_err(format!("cannot start {what}: {error}"));
        let engine = Arc::new(CpuEngine::new(regions, Arc::clone(&arena)));
        #[cfg(feature = "faults")]
        let faults = Arc::default();
        #[cfg(feature = "faults")]
        let core = crate::faults::tier(units, unit_bytes, policy, lanes, Arc::clone(&engine), &faults);
        #[cfg(not(feature = "faults"))]
        let core = Core::new(units, unit_bytes, policy, lanes, Box::new(Arc::clone(&engine)));
        let mut core = core.map_err(|error| no_thread(&format!("{lanes} threads"), error))?;
        let pinning =
            pin.then(|| Pinning::start(Arc::clone(&arena), Box::new(PageLock), Pinning::CHUNK_BYTES));
        let pinning = pinning.transpose().map_err(|error| no_thread("a thread", error))?;
        let mut vault = None;
        if let Some(disk) = disk {
            let (index, opened) = disk.open(arena, count, disk_bytes, disk_workers, fsync, policy)?;
            vault = Some(Arc::clone(&opened));
            core = core.above(index, opened);
        }
        Ok(TieredConnector {
            core,
            pinning,
            disk: vault,
            warnings: Mutex::new(not_bound.into_iter().collect()),
            engine,
            pages: count,
            pool: Mutex::new(pool),
            #[cfg(feature = "faults")]
            faults,
        })
    }

    /// Lets go of the pool's memory; blocks stay. Copies fail until `adopt_pages`.
    fn release_pages(&self, py: Python<'_>) -> PyResult<()> {
        self.check_idle()?;
        self.let_memory_go(py);
        Ok(())
    }

    /// Copies from and to other memory of the same shape from now on.
    #[expect(clippy::needless_pass_by_value, reason = "an argument of Python's")]
    fn adopt_pages(&self, py: Python<'_>, pages: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        self.check_idle()?;
        let DeviceMemory { count, regions, pool } = device_memory(&pages)?;
        let (given, unit_bytes) =
            (regions.iter().map(Region::page_bytes).sum::<usize>(), self.engine.unit_bytes());
        if (count, given) != (self.pages, unit_bytes) {
            return Err(PyValueError::new_err(format!(
                "pages: {count} pages of {given} bytes, must be {} of {unit_bytes}, as before",
                self.pages
            )));
        }
        py.detach(|| self.engine.take_regions(regions));
        let former = std::mem::replace(&mut *self.pool.lock(), pool);
        drop(former);
        Ok(())
    }

    #[pyo3(signature = (block_hashes, replica_idx = 0, hint = None))]
    fn lookup(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        replica_idx: usize,
        hint: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<bool>> {
        _ = (replica_idx, hint);
        self.core.lookup(&keys_of(block_hashes)?).map_err(closed)
    }

    #[pyo3(signature = (block_hashes, replica_idx = 0, hint = None))]
    fn count_cached_prefix(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        replica_idx: usize,
        hint: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(usize, usize)> {
        _ = (replica_idx, hint);
        self.core.leading(keys_of(block_hashes)?).map_err(closed)
    }

    #[pyo3(signature = (block_ids, block_hashes, replica_idx = 0, hint = None))]
    fn load(
        &self,
        py: Python<'_>,
        block_ids: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        replica_idx: usize,
        hint: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Transfer> {
        _ = (replica_idx, hint);
        let (pages, blocks) = self.blocks(block_ids, block_hashes)?;
        match self.core.load(&blocks, Step(0), None) {
            Ok(completion) => Ok(Transfer::new(completion, pages)),
            Err(refused @ Refused::NotHere) => Err(errors::named(py, "KVLoadRefused", refused.to_string())),
            Err(Refused::Closed(error)) => Err(closed(error)),
        }
    }

    #[pyo3(signature = (block_ids, block_hashes, replica_idx = 0))]
    fn offload(
        &self,
        py: Python<'_>,
        block_ids: &Bound<'_, PyAny>,
        block_hashes: &Bound<'_, PyAny>,
        replica_idx: usize,
    ) -> PyResult<Transfer> {
        _ = replica_idx;
        let (pages, blocks) = self.blocks(block_ids, block_hashes)?;
        let offers: Vec<Offer> = blocks.into_iter().map(Offer::from).collect();
        match self.core.offload(&offers, Step(0), None).map_err(closed)? {
            Offered::Storing(completion) => Ok(Transfer::new(completion, pages)),
            Offered::Dropped => {
                Err(errors::named(py, "KVLoadRefused", "the copy lanes have fallen behind".into()))
            }
        }
    }

    #[pyo3(signature = (block_hashes, replica_idx = 0))]
    fn touch(&self, block_hashes: &Bound<'_, PyAny>, replica_idx: usize) -> PyResult<()> {
        _ = replica_idx;
        let hashes: Vec<u64> = keys_of(block_hashes)?.iter().map(|key| key.hash).collect();
        self.core.touch(&hashes);
        Ok(())
    }

    /// Does nothing: what is in flight is no page of a forward.
    #[expect(clippy::unused_self, reason = "a method of the protocol")]
    fn wait_for_loads(&self) {}

    /// Does nothing, likewise.
    #[expect(clippy::unused_self, reason = "a method of the protocol")]
    fn wait_for_offloads(&self) {}

    #[pyo3(signature = (replica_idx = 0))]
    fn host_byte_count<'py>(&self, py: Python<'py>, replica_idx: usize) -> PyResult<Bound<'py, PyAny>> {
        _ = replica_idx;
        byte_count(py, self.core.host_bytes())
    }

    #[pyo3(signature = (replica_idx = 0))]
    fn disk_byte_count<'py>(&self, py: Python<'py>, replica_idx: usize) -> PyResult<Bound<'py, PyAny>> {
        _ = replica_idx;
        byte_count(py, self.core.below_bytes())
    }

    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = self.core.metrics();
        let counted = metrics.index;
        let pinned = self.pinning.as_ref().map(Pinning::progress).unwrap_or_default();
        let named = [
            ("host_stored_blocks", counted.stored),
            ("host_loaded_blocks", counted.loaded),
            ("host_evicted_blocks", counted.evicted),
            ("host_known_blocks", counted.known),
            ("host_dropped_no_unit", counted.no_unit),
            ("host_dropped_busy", metrics.dropped_busy),
            ("host_dropped_lost", metrics.dropped_lost),
            ("host_collisions", counted.collisions),
            ("host_unstored_blocks", counted.unstored),
            ("host_unloaded_blocks", counted.unloaded),
            ("host_lost_blocks", counted.lost),
            ("host_losses", metrics.losses),
            ("host_blocks", metrics.blocks.into()),
            ("host_private_units", metrics.private_units.into()),
            ("host_units", metrics.units.into()),
            ("host_jobs", metrics.jobs as u64),
            ("host_pin_asked_bytes", pinned.asked),
            ("host_pinned_bytes", pinned.pinned),
            ("host_pin_refused_bytes", pinned.refused),
        ];
        let below = metrics.below.map(|below| {
            let (counted, vault) = (below.index, below.vault);
            [
                ("disk_stored_blocks", counted.stored),
                ("disk_loaded_blocks", counted.loaded),
                ("disk_evicted_blocks", counted.evicted),
                ("disk_known_blocks", counted.known),
                ("disk_dropped_no_unit", counted.no_unit),
                ("disk_dropped_busy", below.dropped_busy),
                ("disk_collisions", counted.collisions),
                ("disk_unstored_blocks", counted.unstored),
                ("disk_unloaded_blocks", counted.unloaded),
                ("disk_lost_blocks", counted.lost),
                ("disk_durable_blocks", vault.durable),
                ("disk_undurable_blocks", vault.undurable),
                ("disk_damaged_blocks", vault.damaged),
                ("disk_read_errors", vault.read_errors),
                ("disk_write_errors", vault.write_errors),
                ("disk_direct", vault.direct.into()),
                ("disk_blocks", below.blocks.into()),
                ("disk_units", below.slots.into()),
                ("disk_writes", below.writing as u64),
                ("host_filled_blocks", metrics.index.filled),
            ]
        });
        let result = PyDict::new(py);
        for (name, value) in named.into_iter().chain(below.into_iter().flatten()) {
            result.set_item(name, value)?;
        }
        Ok(result)
    }

    /// What the user has to be told, once.
    fn take_warnings(&self) -> Vec<String> {
        let mut warnings = std::mem::take(&mut *self.warnings.lock());
        let refused = self.pinning.as_ref().and_then(Pinning::take_warning);
        warnings.extend(refused.map(|refused| format!("host_pin_memory: {refused}")));
        let buffered = self.disk.as_ref().and_then(|disk| disk.take_warning());
        warnings.extend(buffered.map(|buffered| format!("disk: {buffered}")));
        warnings
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<()> {
        let reset = py.detach(|| self.core.reset()).map_err(closed)?;
        match wait(py, &reset, None)? {
            Some(Outcome::Failed(why)) => Err(PyOSError::new_err(format!(
                "the disk tier failed, and what it held may be found again after a restart: {why}"
            ))),
            _ => Ok(()),
        }
    }

    /// Waits until every block that was offered would be found after a restart, or was dropped; at most so many
    /// seconds. Whether that is so.
    fn flush(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        py.detach(|| self.core.flush(timeout)).map_err(closed)
    }

    /// Waits until no copy is in flight, at most so many seconds; whether none is.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        Ok(py.detach(|| self.core.drain(timeout)))
    }

    /// Gives copies in flight so many seconds to end, ends the threads, unpins host memory, and lets go of the pool's.
    #[pyo3(signature = (timeout = 5.0))]
    fn shutdown(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds(timeout)?;
        py.detach(|| {
            self.core.shutdown(timeout);
            if let Some(pinning) = &self.pinning {
                pinning.stop();
            }
        });
        if self.core.check_open() != Err(Closed::Forked) {
            self.let_memory_go(py); // a fork may have caught a thread of the parent's in the middle of a copy
        }
        Ok(())
    }

    fn verify(&self) -> PyResult<()> {
        self.core.verify().map_err(|fault| PyRuntimeError::new_err(fault.to_string()))
    }
}

/// Units of a tier of `host_bytes` for a pool of so many pages.
fn units(host_bytes: Option<u64>, unit_bytes: usize, pages: usize) -> Result<u32, String> {
    let usable = limits::usable(Path::new("/"));
    let bytes = sizing::host_bytes(host_bytes, (unit_bytes * pages) as u64, &usable);
    let units = sizing::units(bytes.map_err(|error| error.to_string())?, unit_bytes as u64);
    Ok(units.map_err(|error| error.to_string())?.min(block_pool::Pool::MAX_PAGES))
}

/// A `ByteCount` of `(free, total)`.
fn byte_count(py: Python<'_>, count: (u64, u64)) -> PyResult<Bound<'_, PyAny>> {
    py.import("pagekeeper.counts")?.getattr("ByteCount")?.call1(count)
}

fn seconds(timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout)
        .map_err(|_| PyValueError::new_err(format!("timeout={timeout}: must be seconds, 0 or more")))
}
