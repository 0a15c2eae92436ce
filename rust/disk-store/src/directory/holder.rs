//! Who has a directory open, asked without locking it.

use super::{HELD, LOCK};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::process::{Flock, FlockType, fcntl_getlk};
use std::io;
use std::os::fd::AsFd;

/// Who has a store open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Its number, if it is one of this system's that can be seen from here.
    pub process: Option<u32>,
}

/// Who has the store in a directory open, if anybody has.
///
/// # Errors
/// What the system says.
pub fn holder(directory: impl AsFd) -> io::Result<Option<Holder>> {
    let held = HELD.lock();
    let stat = match rustix::fs::statat(&directory, LOCK, AtFlags::SYMLINK_NOFOLLOW) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        stat => stat?,
    };
    if let Some(&process) = held.get(&(stat.st_dev, stat.st_ino)) {
        return Ok(Some(Holder { process: Some(process) }));
    }
    // Closing it would give up a lock of this process, but it has none and gets none meanwhile.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lock = rustix::fs::openat(&directory, LOCK, flags, Mode::empty())?;
    let locked = fcntl_getlk(&lock, &Flock::from(FlockType::WriteLock))?;
    let process = |lock: Flock| lock.pid.map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    Ok(locked.map(|lock| Holder { process: process(lock) }))
}
