//! The native class `TieredConnector`: a host tier as a `KVConnector`.

use crate::adopt::{Adopted, adopt};
use crate::disk::{DiskDirectory, Share};
use crate::errors;
use crate::tier_blocks::{Blocks, keys_of};
use crate::tier_metrics;
use crate::transfer::{Transfer, wait};
use block_pool::{PolicyError, Step};
use completion::Outcome;
use parking_lot::Mutex;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tiered_connector::connector::{Closed, Offered, Refused, TieredConnector as Core};
use tiered_connector::copy::{CpuEngine, Region};
use tiered_connector::groups::TieredGroups;
use tiered_connector::host::pin::{PageLock, Pinning};
use tiered_connector::host::{Arena, limits, sizing, topology};
use tiered_connector::job::{Offer, Origin, TierKey};
use tiered_connector::vault::DiskVault;

/// Blocks in host memory, copied by Rust threads: a `KVConnector`.
///
/// Args:
///     pages: the device pool of each group: uint8 arrays [pages, …] whose first axis is the page. They are kept, and
///         read and written by threads while a copy is in flight.
///     host_bytes: size of the tier in bytes, which the groups share as they share the device. None: 1.5 times the
///         pools, at most half of what may still be used.
///     policy: "priority_lru" or "priority_slru".
///     lanes: threads that copy; each group has one at least.
///     pin: whether host memory is to be kept from being swapped.
///     numa_node: the NUMA node that threads of the tier run on. None: any.
///
/// Raises:
///     ValueError: arrays that are no pool; a size that does not fit, or that not one page fits in; no such node.
#[pyclass(module = "pagekeeper._native", frozen, weakref)]
pub(crate) struct TieredConnector {
    pub(crate) core: TieredGroups,
    /// Dropped after `core`, and before the memory that it pins.
    pinnings: Vec<Pinning>,
    disks: Vec<Arc<DiskVault>>,
    /// What the user has not been told of.
    warnings: Mutex<Vec<String>>,
    /// Copies each group's pages.
    engines: Vec<Arc<CpuEngine>>,
    /// Pages of each group.
    pages: Vec<usize>,
    /// The pools' memory; dropped after `core`, whose threads use it. None while it is given up.
    pool: Mutex<Vec<Py<PyAny>>>,
    #[cfg(feature = "faults")]
    pub(crate) faults: Arc<crate::faults::Faults>,
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

fn device_memory(pages: &[Bound<'_, PyAny>], name: &str) -> PyResult<DeviceMemory> {
    let adopted = pages.iter().enumerate().map(|(number, array)| adopt(array, &format!("{name}[{number}]")));
    let adopted: Vec<Adopted> = adopted.collect::<PyResult<_>>()?;
    let count = adopted.iter().map(|array| array.pages).min().unwrap_or(0);
    if count == 0 || adopted.iter().any(|array| array.pages != count) {
        return Err(PyValueError::new_err(format!(
            "{name}: must be at least one array, all of as many pages"
        )));
    }
    let regions = adopted.iter().map(|array| array.region.clone()).collect();
    let pool = adopted.into_iter().map(|array| array.array.into_any()).collect();
    Ok(DeviceMemory { count, regions, pool })
}

/// That of each group.
fn all_device_memory(pages: &[Vec<Bound<'_, PyAny>>]) -> PyResult<Vec<DeviceMemory>> {
    if pages.is_empty() {
        return Err(PyValueError::new_err("pages: empty, must be the arrays of each group"));
    }
    let group = |(number, pages): (usize, &Vec<_>)| device_memory(pages, &format!("pages[{number}]"));
    pages.iter().enumerate().map(group).collect()
}

impl DeviceMemory {
    fn page_bytes(&self) -> usize {
        self.regions.iter().map(Region::page_bytes).sum()
    }
}

impl TieredConnector {
    /// Nothing is copied any more, and the pool's memory is not held.
    fn let_memory_go(&self, py: Python<'_>) {
        py.detach(|| self.engines.iter().for_each(|engine| engine.drop_regions()));
        let pool = std::mem::take(&mut *self.pool.lock());
        drop(pool);
    }

    /// Refuses while copies are in flight, or when none can be.
    fn check_idle(&self) -> PyResult<()> {
        self.core.check_open().map_err(closed)?;
        match self.core.groups().iter().map(|group| group.metrics().jobs).sum::<usize>() {
            0 => Ok(()),
            jobs => Err(PyRuntimeError::new_err(format!("{jobs} copies are in flight"))),
        }
    }

    fn keys(&self, block_hashes: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<TierKey>>> {
        keys_of(block_hashes, self.pages.len())
    }

    /// Bytes of all groups, free and in all.
    fn bytes(&self, of: fn(&Core) -> (u64, u64)) -> (u64, u64) {
        let bytes = self.core.groups().iter().map(of);
        bytes.fold((0, 0), |(free, total), (more_free, more)| (free + more_free, total + more))
    }
}

#[pymethods]
impl TieredConnector {
    #[new]
    #[pyo3(signature = (*, pages, host_bytes, policy, lanes, pin = false, numa_node = None, disk = None, disk_bytes = None, disk_workers = 32, fsync = "batch"))]
    #[expect(clippy::too_many_arguments, reason = "by name, from Python alone")]
    #[expect(clippy::needless_pass_by_value, reason = "an argument of Python's")]
    fn new(
        pages: Vec<Vec<Bound<'_, PyAny>>>,
        host_bytes: Option<u64>,
        policy: &str,
        lanes: usize,
        pin: bool,
        numa_node: Option<u32>,
        disk: Option<Vec<PyRef<'_, DiskDirectory>>>,
        disk_bytes: Option<u64>,
        disk_workers: usize,
        fsync: &str,
    ) -> PyResult<TieredConnector> {
        let policy = policy.parse().map_err(|error: PolicyError| PyValueError::new_err(error.to_string()))?;
        if lanes == 0 {
            return Err(PyValueError::new_err("lanes=0: must be at least 1"));
        }
        let memory = all_device_memory(&pages)?;
        let sizes: Vec<_> =
            memory.iter().map(|group| (group.page_bytes() as u64, group.count as u64)).collect();
        if disk.as_ref().is_some_and(|disk| disk.len() != memory.len()) {
            return Err(PyValueError::new_err("disk: must be a directory for each group"));
        }
        let usable = limits::usable(Path::new("/"));
        let units = sizing::group_units(host_bytes, &sizes, &usable).map_err(PyValueError::new_err)?;
        let node = topology::node_for(Path::new("/"), numa_node, None)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        // Each thread that is started from here on touches the arenas there.
        let (_stay, not_bound) = match node.map(|node| node.stay()).transpose() {
            Ok(stay) => (stay, None),
            Err(error) => (None, Some(format!("host_numa_node: {error}"))),
        };
        let no_thread = |what: &str, error| PyRuntimeError::new_err(format!("cannot start {what}: {error}"));
        #[cfg(feature = "faults")]
        let faults = Arc::default();
        let (mut cores, mut arenas) = (Vec::new(), Vec::new());
        let (mut engines, mut pool, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        let groups = memory.len();
        for (number, (memory, units)) in memory.into_iter().zip(units).enumerate() {
            let unit_bytes = memory.page_bytes();
            let units = units.min(block_pool::Pool::MAX_PAGES);
            let arena =
                Arena::new(units, unit_bytes).map_err(|error| PyValueError::new_err(error.to_string()))?;
            let arena = Arc::new(arena);
            let engine = Arc::new(CpuEngine::new(memory.regions, Arc::clone(&arena)));
            let own = (lanes / groups + usize::from(number < lanes % groups)).max(1);
            #[cfg(feature = "faults")]
            let core = crate::faults::tier(units, unit_bytes, policy, own, Arc::clone(&engine), &faults);
            #[cfg(not(feature = "faults"))]
            let core = Core::new(units, unit_bytes, policy, own, Box::new(Arc::clone(&engine)));
            cores.push(core.map_err(|error| no_thread(&format!("{lanes} threads"), error))?);
            arenas.push(arena);
            engines.push(engine);
            counts.push(memory.count);
            pool.extend(memory.pool);
        }
        let mut pinnings = Vec::new();
        for arena in arenas.iter().filter(|_| pin) {
            let pinning = Pinning::start(Arc::clone(arena), Box::new(PageLock), Pinning::CHUNK_BYTES);
            pinnings.push(pinning.map_err(|error| no_thread("a thread", error))?);
        }
        let all = sizes.iter().map(|(page, pages)| page * pages).sum();
        let depth = disk_workers.div_ceil(groups);
        let mut below = Vec::new();
        for (((disk, arena), &count), (page, pages)) in
            disk.iter().flatten().zip(arenas).zip(&counts).zip(sizes)
        {
            let size = (disk_bytes, Share { own: page * pages, all });
            below.push(disk.open(arena, count, size, depth, fsync, policy)?);
        }
        let disks = below.iter().map(|(_, vault)| Arc::clone(vault)).collect();
        if disk.is_some() {
            let joined = cores.into_iter().zip(below).map(|(core, (index, vault))| core.above(index, vault));
            cores = joined.collect();
        }
        Ok(TieredConnector {
            core: TieredGroups::new(cores),
            pinnings,
            disks,
            warnings: Mutex::new(not_bound.into_iter().collect()),
            engines,
            pages: counts,
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
    fn adopt_pages(&self, py: Python<'_>, pages: Vec<Vec<Bound<'_, PyAny>>>) -> PyResult<()> {
        self.check_idle()?;
        let memory = all_device_memory(&pages)?;
        let given: Vec<_> = memory.iter().map(|group| (group.count, group.page_bytes())).collect();
        let before =
            self.pages.iter().zip(&self.engines).map(|(&pages, engine)| (pages, engine.unit_bytes()));
        let before: Vec<_> = before.collect();
        if given != before {
            let sizes = |sizes: &[(usize, usize)]| {
                let sizes = sizes.iter().map(|(pages, bytes)| format!("{pages} pages of {bytes} bytes"));
                sizes.collect::<Vec<_>>().join(", ")
            };
            return Err(PyValueError::new_err(format!(
                "pages: {}, must be {}, as before",
                sizes(&given),
                sizes(&before)
            )));
        }
        let mut pool = Vec::new();
        for (engine, memory) in self.engines.iter().zip(memory) {
            py.detach(|| engine.take_regions(memory.regions));
            pool.extend(memory.pool);
        }
        let former = std::mem::replace(&mut *self.pool.lock(), pool);
        drop(former);
        Ok(())
    }

    #[pyo3(signature = (block_hashes, replica_idx = 0, hint = None))]
    fn lookup<'py>(
        &self,
        block_hashes: &Bound<'py, PyAny>,
        replica_idx: usize,
        hint: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        _ = (replica_idx, hint);
        let py = block_hashes.py();
        let groups = self.core.groups().iter().zip(self.keys(block_hashes)?);
        let mut there: Vec<Vec<bool>> =
            groups.map(|(group, keys)| group.lookup(&keys).map_err(closed)).collect::<PyResult<_>>()?;
        if there.len() == 1 { there.remove(0).into_bound_py_any(py) } else { there.into_bound_py_any(py) }
    }

    /// Of several groups, the blocks that all have: those that all have in host memory, and those that one has to read.
    #[pyo3(signature = (block_hashes, replica_idx = 0, hint = None))]
    fn count_cached_prefix(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        replica_idx: usize,
        hint: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(usize, usize)> {
        _ = (replica_idx, hint);
        let mut keys = self.keys(block_hashes)?;
        if keys.len() == 1 {
            return self.core.groups()[0].leading(keys.remove(0)).map_err(closed);
        }
        let (mut host, mut disk) = (0, 0);
        for block in 0..keys.iter().map(Vec::len).min().unwrap_or(0) {
            let mut below = 0;
            for (group, keys) in self.core.groups().iter().zip(&keys) {
                match group.leading([keys[block]]).map_err(closed)? {
                    (0, 0) => return Ok((host, disk)),
                    (_, read) => below += read,
                }
            }
            *(if below == 0 { &mut host } else { &mut disk }) += 1;
        }
        Ok((host, disk))
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
        let blocks = Blocks::new(block_ids, block_hashes, &self.pages)?;
        match self.core.load(&blocks.blocks, blocks.parts(), Step(0), None) {
            Ok(completion) => Ok(Transfer::new(completion, blocks.pages())),
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
        let blocks = Blocks::new(block_ids, block_hashes, &self.pages)?;
        let offers: Vec<Offer> = blocks.blocks.iter().copied().map(Offer::from).collect();
        let origin = |_| Origin::default();
        match self.core.offload(&offers, blocks.parts(), &origin, Step(0), None).map_err(closed)? {
            Offered::Storing(completion) => Ok(Transfer::new(completion, blocks.pages())),
            Offered::Dropped => {
                Err(errors::named(py, "KVLoadRefused", "the copy lanes have fallen behind".into()))
            }
        }
    }

    #[pyo3(signature = (block_hashes, replica_idx = 0))]
    fn touch(&self, block_hashes: &Bound<'_, PyAny>, replica_idx: usize) -> PyResult<()> {
        _ = replica_idx;
        for (group, keys) in self.core.groups().iter().zip(self.keys(block_hashes)?) {
            group.touch(&keys.iter().map(|key| key.hash).collect::<Vec<_>>());
        }
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
        byte_count(py, self.bytes(Core::host_bytes))
    }

    #[pyo3(signature = (replica_idx = 0))]
    fn disk_byte_count<'py>(&self, py: Python<'py>, replica_idx: usize) -> PyResult<Bound<'py, PyAny>> {
        _ = replica_idx;
        byte_count(py, self.bytes(Core::below_bytes))
    }

    /// Those of all groups together.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let mut sums: Vec<(&str, u64)> = Vec::new();
        let pinned = self.pinnings.iter().map(|pinning| Some(pinning.progress()));
        for (group, pinned) in self.core.groups().iter().zip(pinned.chain(std::iter::repeat(None))) {
            let named = tier_metrics::named(&group.metrics(), &pinned.unwrap_or_default());
            if sums.is_empty() {
                sums = named;
            } else {
                for ((name, sum), (_, more)) in sums.iter_mut().zip(named) {
                    // Whether all go around the page cache.
                    *sum = if *name == "disk_direct" { more.min(*sum) } else { *sum + more };
                }
            }
        }
        let result = PyDict::new(py);
        for (name, value) in sums {
            result.set_item(name, value)?;
        }
        Ok(result)
    }

    /// What the user has to be told, once.
    fn take_warnings(&self) -> Vec<String> {
        let mut warnings = std::mem::take(&mut *self.warnings.lock());
        let refused = self.pinnings.iter().filter_map(Pinning::take_warning);
        warnings.extend(refused.map(|refused| format!("host_pin_memory: {refused}")));
        let buffered = self.disks.iter().filter_map(|disk| disk.take_warning());
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
            self.pinnings.iter().for_each(Pinning::stop);
        });
        if self.core.check_open() != Err(Closed::Forked) {
            self.let_memory_go(py); // a fork may have caught a thread of the parent's in the middle of a copy
        }
        Ok(())
    }

    fn verify(&self) -> PyResult<()> {
        let verified = self.core.groups().iter().try_for_each(Core::verify);
        verified.map_err(|fault| PyRuntimeError::new_err(fault.to_string()))
    }
}

/// A `ByteCount` of `(free, total)`.
fn byte_count(py: Python<'_>, count: (u64, u64)) -> PyResult<Bound<'_, PyAny>> {
    py.import("pagekeeper.counts")?.getattr("ByteCount")?.call1(count)
}

fn seconds(timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout)
        .map_err(|_| PyValueError::new_err(format!("timeout={timeout}: must be seconds, 0 or more")))
}
