//! Panics on purpose, and lanes, memory and disks that do what a test says. Only with the feature `faults`.

use crate::disk::DiskDirectory;
use crate::ledger::Ledger;
use crate::tiered::TieredConnector;
use block_pool::EvictionPolicy;
use cache_manager::Fault;
use disk_store::file::BlockFile;
use disk_store::store::Files;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tiered_connector::connector::TieredConnector as Core;
use tiered_connector::copy::{CopyEngine, CpuEngine};
use tiered_connector::job::{Job, Outcome, UnitId};
use tiered_connector::lanes::Lanes;
use tiered_connector::mover::{Memory, Mover, Task};
use tiered_connector::units::UnitSet;

#[pymethods]
impl Ledger {
    /// Fails as an error of the ledger's own would, at the place named `fault`.
    fn force_panic(&self, py: Python<'_>, fault: &str) -> PyResult<()> {
        let fault = match fault {
            "at once" => Fault::AtOnce,
            "half reset" => Fault::HalfReset,
            "half release" => Fault::HalfRelease,
            _ => return Err(PyValueError::new_err(format!("fault={fault:?}: no such fault"))),
        };
        self.shared.with(py, |ledger| ledger.force_panic(fault))
    }
}

#[pymethods]
impl TieredConnector {
    /// What lanes do with copies from now on, those that they hold included: "copy", "hold", "fail" or "panic".
    fn force_copies(&self, to: &str) -> PyResult<()> {
        *self.faults.copies.lock() = match to {
            "copy" => Copies::Made,
            "hold" => Copies::Held,
            "fail" => Copies::Failing,
            "panic" => Copies::Panicking,
            _ => return Err(PyValueError::new_err(format!("to={to:?}: no such fault"))),
        };
        Ok(())
    }

    /// The memory is out of reach; with `held`, it is back and only these units hold what they held.
    #[pyo3(signature = (held = None))]
    fn force_loss(&self, held: Option<Vec<u32>>) {
        let memory = match held {
            None => Memory::Lost,
            Some(held) => {
                let mut units = UnitSet::default();
                for unit in held {
                    units.insert(UnitId(unit));
                }
                Memory::Holds(units)
            }
        };
        *self.faults.memory.lock() = Some(memory);
    }
}

#[pymethods]
impl DiskDirectory {
    /// What the file of blocks does with calls of a kind, "read", "write" or "sync", or that of entries with any,
    /// "entries", from now on, those that it holds included: "work", "hold", "fail" or, if a call goes around the page
    /// cache, "refuse" it.
    fn force_disk(&self, call: &str, to: &str) -> PyResult<()> {
        let call = match call {
            "read" => Call::Read,
            "write" => Call::Write,
            "sync" => Call::Sync,
            "entries" => Call::Entries,
            _ => return Err(PyValueError::new_err(format!("call={call:?}: no such call"))),
        };
        let mut calls = self.faults.calls.lock();
        match to {
            "work" => calls.remove(&call),
            "hold" => calls.insert(call, Disk::Holding),
            "fail" => calls.insert(call, Disk::Failing),
            "refuse" => calls.insert(call, Disk::Refusing),
            _ => return Err(PyValueError::new_err(format!("to={to:?}: no such fault"))),
        };
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Copies {
    #[default]
    Made,
    /// They begin when they are let go, unless they are given up.
    Held,
    Failing,
    Panicking,
}

/// What a test says.
#[derive(Default)]
pub(crate) struct Faults {
    copies: Mutex<Copies>,
    /// What nobody has asked for yet.
    memory: Mutex<Option<Memory>>,
}

/// A host tier whose lanes and memory do what `faults` say.
pub(crate) fn tier(
    units: u32,
    unit_bytes: usize,
    policy: EvictionPolicy,
    lanes: usize,
    engine: Arc<CpuEngine>,
    faults: &Arc<Faults>,
) -> std::io::Result<Core> {
    let engine = Faulty { inner: engine, faults: Arc::clone(faults) };
    let lanes = Faulty { inner: Lanes::start(lanes, Box::new(engine))?, faults: Arc::clone(faults) };
    Ok(Core::with_mover(units, unit_bytes, policy, Box::new(lanes)))
}

struct Faulty<T> {
    inner: T,
    faults: Arc<Faults>,
}

impl CopyEngine for Faulty<Arc<CpuEngine>> {
    fn copy(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        loop {
            let copies = *self.faults.copies.lock();
            match copies {
                Copies::Made => return self.inner.copy(job, give_up),
                Copies::Held if give_up() => return Outcome::Cancelled,
                Copies::Held => thread::sleep(Duration::from_millis(1)),
                Copies::Failing => return Outcome::Failed("forced".into()),
                Copies::Panicking => panic!("forced"),
            }
        }
    }
}

impl Mover for Faulty<Lanes> {
    fn has_room(&self, jobs: usize) -> bool {
        self.inner.has_room(jobs)
    }

    fn submit(&self, tasks: Vec<Arc<dyn Task>>) {
        self.inner.submit(tasks);
    }

    fn drain(&self, timeout: Duration) -> bool {
        self.inner.drain(timeout)
    }

    fn stop(&self, timeout: Duration) {
        self.inner.stop(timeout);
    }

    fn take_memory(&self) -> Option<Memory> {
        self.faults.memory.lock().take()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Call {
    Read,
    Write,
    Sync,
    Entries,
}

const EINVAL: i32 = 22;

#[derive(Clone, Copy)]
enum Disk {
    /// Calls go on when they are let go, and not before.
    Holding,
    Failing,
    /// Direct I/O is none that the file system has.
    Refusing,
}

/// What a test says of a disk.
#[derive(Default)]
pub(crate) struct DiskFaults {
    calls: Mutex<HashMap<Call, Disk>>,
}

/// The files of a store, which do what `faults` say.
pub(crate) fn files(files: Files, faults: &Arc<DiskFaults>) -> Files {
    let failing = |inner, any| Arc::new(FaultyFile { inner, faults: Arc::clone(faults), any });
    Files { data: failing(files.data, None), entries: failing(files.entries, Some(Call::Entries)), ..files }
}

/// A file that gives the kernel no descriptor: its calls alone do what a test says.
struct FaultyFile {
    inner: Arc<dyn BlockFile>,
    faults: Arc<DiskFaults>,
    /// What all its calls are, if they are alike.
    any: Option<Call>,
}

impl FaultyFile {
    fn meet(&self, call: Call) -> io::Result<()> {
        loop {
            let fault = self.faults.calls.lock().get(&self.any.unwrap_or(call)).copied();
            match fault {
                Some(Disk::Refusing) if self.is_direct() => return Err(io::Error::from_raw_os_error(EINVAL)),
                None | Some(Disk::Refusing) => return Ok(()),
                Some(Disk::Holding) => thread::sleep(Duration::from_millis(1)),
                Some(Disk::Failing) => return Err(io::Error::other("forced")),
            }
        }
    }
}

impl BlockFile for FaultyFile {
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.meet(Call::Read)?;
        self.inner.read(bytes, offset)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.meet(Call::Write)?;
        self.inner.write(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.meet(Call::Sync)?;
        self.inner.sync()
    }

    fn reserve(&self, from: u64, to: u64) -> io::Result<()> {
        self.inner.reserve(from, to)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }

    fn bytes(&self) -> io::Result<u64> {
        self.inner.bytes()
    }

    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }

    fn give_up_direct(&self) {
        self.inner.give_up_direct();
    }
}
