//! A block on its way between memory and its slot.

use crate::commits::{Change, Put, Sync};
use crate::entry::Entry;
use crate::file::{ALIGNMENT, Pages};
use crate::store::{Core, Done, Failure, Memory};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Whoever is told of an end, once: that the copy was given up, if nobody says anything else.
pub(crate) struct Told(Option<Done>);

impl Told {
    pub(crate) fn new(done: Done) -> Told {
        Told(Some(done))
    }

    /// Tells it. The function is another's, and its panic ends here.
    pub(crate) fn tell(mut self, end: Result<(), Failure>) {
        self.once(end);
    }

    fn once(&mut self, end: Result<(), Failure>) {
        if let Some(done) = self.0.take() {
            _ = catch_unwind(AssertUnwindSafe(|| done(end)));
        }
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.once(Err(Failure::GivenUp));
    }
}

/// A block on its way.
pub struct Operation {
    pub(crate) core: Arc<Core>,
    pub(crate) write: bool,
    /// What is written; of what is read, what is known of it: its serial number is 0 if that is nothing.
    pub(crate) entry: Entry,
    pub(crate) memory: Memory,
    /// Where its bytes are while direct I/O moves them, if it cannot take those of the memory.
    pub(crate) bounce: Option<Pages>,
    pub(crate) told: Told,
    /// Syncs of the data that had failed before it was written.
    pub(crate) failed_syncs: u64,
}

/// What an operation reads or writes.
pub(crate) struct Io {
    pub(crate) write: bool,
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) offset: u64,
}

impl Operation {
    /// What is to be read or written, once; called in a thread that may take its time.
    pub(crate) fn begin(&mut self) -> Result<Io, Failure> {
        let core = Arc::clone(&self.core);
        let slot = self.entry.slot;
        let block_bytes = core.layout.block_bytes;
        if !self.write && self.entry.serial == 0 {
            return Err(Failure::Damaged);
        }
        if self.write {
            if !core.slots.lock().is_wanted(slot, self.entry.serial) {
                return Err(Failure::GivenUp);
            }
            core.reserve(slot)?;
            self.failed_syncs = core.failed_syncs.load(Ordering::Acquire);
            // SAFETY: a block's bytes, which nobody writes to.
            let payload = unsafe { std::slice::from_raw_parts(self.memory.start.as_ptr(), block_bytes) };
            self.entry.checksum = self.entry.checksum_of(payload);
        }
        let (mut start, mut len) = (self.memory.start, block_bytes);
        if core.data.is_direct() {
            len = core.layout.slot_bytes();
            let aligned = start.as_ptr().addr().is_multiple_of(ALIGNMENT) && self.memory.room >= len;
            if !aligned {
                let mut pages = Pages::zeros(len);
                if self.write {
                    // SAFETY: a block's bytes, which nobody writes to.
                    let payload = unsafe { std::slice::from_raw_parts(start.as_ptr(), block_bytes) };
                    pages.bytes_mut()[..block_bytes].copy_from_slice(payload);
                }
                start = NonNull::from(self.bounce.insert(pages).bytes_mut()).cast();
            }
        }
        Ok(Io { write: self.write, start, len, offset: core.layout.slot_at(slot) })
    }

    /// It was read or written, or was not; called in a thread that may take its time.
    pub(crate) fn end(self, moved: Result<(), Failure>) {
        if self.write { self.written(moved) } else { self.read(moved) }
    }

    fn written(self, moved: Result<(), Failure>) {
        let Operation { core, entry, told, failed_syncs, .. } = self;
        let Entry { slot, serial, checksum, .. } = entry;
        if let Err(failure) = moved {
            if failure != Failure::GivenUp {
                core.counters.write_errors.fetch_add(1, Ordering::Relaxed);
                core.forget_one(slot, serial);
            }
            return told.tell(Err(failure));
        }
        core.counters.written.fetch_add(1, Ordering::Relaxed);
        let (now, later) = if core.sync == Sync::Always { (None, Some(told)) } else { (Some(told), None) };
        let put = Put { entry, failed_syncs, told: later };
        let mut slots = core.slots.lock();
        let end = if slots.is_wanted(slot, serial) {
            slots.arrived(slot, serial, checksum);
            let instead = core.commits.push(slot, Change::Put(Box::new(put)));
            drop(slots);
            core.left(instead);
            Ok(())
        } else {
            drop(slots);
            core.left(Some(Change::Put(Box::new(put))));
            Err(Failure::GivenUp)
        };
        if let Some(told) = now {
            told.tell(end);
        }
    }

    fn read(self, moved: Result<(), Failure>) {
        let Entry { slot, serial, .. } = self.entry;
        let counters = &self.core.counters;
        let end = moved.and_then(|()| if self.take() { Ok(()) } else { Err(Failure::Damaged) });
        let count = match &end {
            Ok(()) => &counters.read,
            Err(Failure::Io(_)) => &counters.read_errors,
            Err(_) => &counters.damaged,
        };
        count.fetch_add(1, Ordering::Relaxed);
        if end.is_err() && serial != 0 {
            self.core.forget_one(slot, serial);
        }
        self.told.tell(end);
    }

    /// Puts what was read where it is wanted. Gives whether it is the block.
    fn take(&self) -> bool {
        let block_bytes = self.core.layout.block_bytes;
        // SAFETY: a block's bytes, which are this operation's alone.
        let payload = unsafe { std::slice::from_raw_parts_mut(self.memory.start.as_ptr(), block_bytes) };
        match &self.bounce {
            None => self.entry.matches(payload),
            Some(bounce) => {
                let read = &bounce.bytes()[..block_bytes];
                let matches = self.entry.matches(read);
                if matches {
                    payload.copy_from_slice(read);
                }
                matches
            }
        }
    }
}

impl From<io::Error> for Failure {
    /// Where a file ends too early the block is damaged; for all else the system is to blame.
    fn from(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Failure::Damaged,
            _ => Failure::Io(error.to_string()),
        }
    }
}

// SAFETY: addresses, to be used by whoever carries the operation out; see `Memory`.
unsafe impl Send for Operation {}
