//! A file that fails, waits or panics when it is told to.

use disk_store::file::{BlockFile, SystemFile};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

/// What may be asked of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Call {
    Read,
    Write,
    Sync,
    Reserve,
    SetLen,
}

/// How it goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// The system's number of an error.
    Errno(i32),
    /// The file seems to end before.
    Ends,
    Panics,
    /// It waits until the fault is gone, and then does what was asked.
    Hangs,
    /// It waits until the fault is gone, and then says that the disk failed.
    HangsAndFails,
}

pub(crate) const EIO: Fault = Fault::Errno(5);
pub(crate) const ENOSPC: Fault = Fault::Errno(28);
const EINVAL: i32 = 22;

/// A file of the system's with faults.
pub(crate) struct FaultyFile {
    inner: SystemFile,
    faults: Mutex<HashMap<Call, Fault>>,
    changed: Condvar,
    /// Calls that hang, and descriptors that were given instead of the file's.
    hanging: AtomicUsize,
    /// It says that it is direct, and refuses all that is.
    refuses: AtomicBool,
    refused: AtomicUsize,
    /// What the kernel is to read and write instead of the file.
    descriptor: Mutex<Option<OwnedFd>>,
}

impl FaultyFile {
    pub(crate) fn open(path: &Path) -> FaultyFile {
        let file = std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        FaultyFile {
            inner: SystemFile::new(file.unwrap().into(), false),
            faults: Mutex::default(),
            changed: Condvar::new(),
            hanging: AtomicUsize::new(0),
            refuses: AtomicBool::new(false),
            refused: AtomicUsize::new(0),
            descriptor: Mutex::new(None),
        }
    }

    pub(crate) fn fail(&self, call: Call, fault: Fault) {
        self.faults.lock().unwrap().insert(call, fault);
    }

    /// The faults are gone.
    pub(crate) fn heal(&self) {
        self.faults.lock().unwrap().clear();
        *self.descriptor.lock().unwrap() = None;
        self.changed.notify_all();
    }

    pub(crate) fn refuse_direct(&self) {
        self.refuses.store(true, Ordering::SeqCst);
    }

    /// Calls that were refused.
    pub(crate) fn refused(&self) -> usize {
        self.refused.load(Ordering::SeqCst)
    }

    pub(crate) fn put_descriptor(&self, descriptor: OwnedFd) {
        *self.descriptor.lock().unwrap() = Some(descriptor);
    }

    /// The kernel has the file again, but for what it was asked before.
    pub(crate) fn take_descriptor(&self) -> Option<OwnedFd> {
        self.descriptor.lock().unwrap().take()
    }

    /// Waits until so many calls hang.
    pub(crate) fn wait_for_hanging(&self, count: usize) {
        while self.hanging.load(Ordering::SeqCst) < count {
            std::thread::yield_now();
        }
    }

    fn meet(&self, call: Call) -> io::Result<()> {
        let mut faults = self.faults.lock().unwrap();
        match faults.get(&call).copied() {
            None => Ok(()),
            Some(Fault::Errno(number)) => Err(io::Error::from_raw_os_error(number)),
            Some(Fault::Ends) => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(Fault::Panics) => {
                drop(faults);
                panic!("the file panics");
            }
            Some(fault) => {
                self.hanging.fetch_add(1, Ordering::SeqCst);
                while faults.contains_key(&call) {
                    faults = self.changed.wait(faults).unwrap();
                }
                self.hanging.fetch_sub(1, Ordering::SeqCst);
                if fault == Fault::Hangs { Ok(()) } else { Err(io::Error::from_raw_os_error(5)) }
            }
        }
    }

    fn refuse(&self) -> io::Result<()> {
        if !self.is_direct() {
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::SeqCst);
        Err(io::Error::from_raw_os_error(EINVAL))
    }
}

impl BlockFile for FaultyFile {
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.meet(Call::Read)?;
        self.refuse()?;
        self.inner.read(bytes, offset)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.meet(Call::Write)?;
        self.refuse()?;
        self.inner.write(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.meet(Call::Sync)?;
        self.inner.sync()
    }

    fn reserve(&self, from: u64, to: u64) -> io::Result<()> {
        self.meet(Call::Reserve)?;
        self.inner.reserve(from, to)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.meet(Call::SetLen)?;
        self.inner.set_len(len)
    }

    fn bytes(&self) -> io::Result<u64> {
        self.inner.bytes()
    }

    fn is_direct(&self) -> bool {
        self.refuses.load(Ordering::SeqCst)
    }

    fn descriptor(&self, address: usize, len: usize) -> Option<RawFd> {
        let other = self.descriptor.lock().unwrap().as_ref().map(AsRawFd::as_raw_fd);
        self.hanging.fetch_add(usize::from(other.is_some()), Ordering::SeqCst);
        other.or_else(|| self.inner.descriptor(address, len))
    }

    fn give_up_direct(&self) {
        self.refuses.store(false, Ordering::SeqCst);
    }
}
