//! The store: blocks into slots and back, each end told to whoever asked.

pub use crate::commits::Sync;
use crate::commits::{Change, Commits};
use crate::directory::{DATA, Directory, ENTRIES, OpenError};
use crate::engine::Engine;
use crate::entry::{Entry, Key, Origin, entry_bytes};
use crate::file::{ALIGNMENT, BlockFile};
use crate::manifest::Manifest;
use crate::operation::{Operation, Told};
use crate::recovery;
use crate::slots::Slots;
use parking_lot::Mutex;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Bytes before the first entry: the store's epoch.
pub const HEADER: u64 = 4096;
/// Space is taken from the disk so many bytes at a time.
const EXTENT: u64 = 64 << 20;

/// Sizes of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Most bytes of a block's content.
    pub content_bytes: usize,
    /// Blocks that there is room for.
    pub slots: u32,
}

impl Layout {
    /// Bytes of a slot: those of a block, and as many more as direct I/O wants.
    pub fn slot_bytes(&self) -> usize {
        self.block_bytes.next_multiple_of(ALIGNMENT)
    }

    /// Bytes of an entry.
    pub fn entry_bytes(&self) -> usize {
        entry_bytes(self.content_bytes)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.slot_at(self.slots) + self.entry_at(self.slots)
    }

    /// Where a slot begins.
    pub fn slot_at(&self, slot: u32) -> u64 {
        u64::from(slot) * self.slot_bytes() as u64
    }

    /// Where a slot's entry begins.
    pub fn entry_at(&self, slot: u32) -> u64 {
        HEADER + u64::from(slot) * self.entry_bytes() as u64
    }
}

/// The files of a store.
pub struct Files {
    /// The blocks.
    pub data: Arc<dyn BlockFile>,
    /// What they are.
    pub entries: Arc<dyn BlockFile>,
    /// Where they lie: locked until the store was stopped, and the last of its threads has ended.
    pub directory: Option<Directory>,
}

impl Files {
    /// Those in a directory, in which there must be room for a store of this layout.
    ///
    /// # Errors
    /// There is not; the system refuses.
    pub fn open(directory: Directory, layout: &Layout, direct: bool) -> Result<Files, OpenError> {
        directory.check_space(layout.bytes())?;
        let data = Arc::new(directory.file(DATA, direct)?);
        let entries = Arc::new(directory.file(ENTRIES, false)?);
        directory.sync()?;
        Ok(Files { data, entries, directory: Some(directory) })
    }
}

/// Why a block was not written, or not read.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Failure {
    /// The system failed.
    #[error("{0}")]
    Io(String),
    /// What is there is not what was written.
    #[error("the block on disk is damaged")]
    Damaged,
    /// The store was stopped, or the block is not wanted any more.
    #[error("the copy was given up")]
    GivenUp,
}

/// Told how a write or a read ended.
pub type Done = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// Memory of a block.
#[derive(Clone, Copy)]
pub struct Memory {
    pub(crate) start: NonNull<u8>,
    /// Bytes that may be touched, from there on.
    pub(crate) room: usize,
}

// SAFETY: an address; whoever made it says that it may be used until the operation has ended.
unsafe impl Send for Memory {}

impl Memory {
    /// The memory of a block, and what follows it up to `room` bytes, which may be read and written too.
    ///
    /// # Safety
    /// Until the operation has ended the memory stays where it is; nobody writes to it, and if it is read into nobody
    /// reads it either.
    pub unsafe fn new(start: NonNull<u8>, room: usize) -> Memory {
        Memory { start, room }
    }
}

/// A block to be written.
pub struct Block {
    /// Where.
    pub slot: u32,
    /// What it is.
    pub key: Key,
    /// How long to keep it.
    pub priority: u8,
    /// Where it comes from; its content is left out if it is longer than the layout allows.
    pub origin: Origin,
}

/// What was counted; numbers never fall.
#[derive(Default, Debug)]
pub struct Counters {
    /// Blocks written.
    pub written: AtomicU64,
    /// Blocks read, and found to be what they should.
    pub read: AtomicU64,
    /// Blocks that were damaged when they were read.
    pub damaged: AtomicU64,
    /// Writes that the system failed.
    pub write_errors: AtomicU64,
    /// Reads that the system failed.
    pub read_errors: AtomicU64,
    /// Blocks whose bytes and entry are on the disk; synced, unless the store never syncs.
    pub durable: AtomicU64,
    /// Blocks that were written and did not become durable: the disk failed, the store was stopped, or they were
    /// forgotten or written over before.
    pub undurable: AtomicU64,
}

/// What all threads of a store share.
pub(crate) struct Core {
    pub(crate) data: Arc<dyn BlockFile>,
    pub(crate) entries: Arc<dyn BlockFile>,
    pub(crate) number: u64,
    pub(crate) layout: Layout,
    pub(crate) sync: Sync,
    pub(crate) counters: Counters,
    pub(crate) commits: Commits,
    /// Locked before the queue of the commits: what is known and what is to be written go together.
    pub(crate) slots: Mutex<Slots>,
    /// The epoch that the header surely says. Whoever writes to the entries has it locked.
    pub(crate) header: Mutex<Option<u64>>,
    /// Syncs of the data that have failed: what was written before one, and not synced before, may be lost whatever
    /// later syncs say.
    pub(crate) failed_syncs: AtomicU64,
    /// Slots that have space on the disk.
    reserved: Mutex<u32>,
    directory: Mutex<Option<Directory>>,
    /// Nothing is written any more: the files may be another store's.
    stopped: AtomicBool,
}

/// A store of blocks.
pub struct Store {
    core: Arc<Core>,
    engine: Box<dyn Engine>,
    committer: Mutex<Option<JoinHandle<()>>>,
    process: u32,
}

impl Store {
    /// Opens the store in these files, or makes one. `number` is that of its manifest. Gives the blocks that it holds,
    /// in the order of their last use, as far as that can be told: what came before a block was used with it.
    ///
    /// # Errors
    /// The layout has blocks of no bytes; the system refuses.
    pub fn open(
        files: Files,
        number: u64,
        layout: Layout,
        sync: Sync,
        engine: impl FnOnce(Arc<dyn BlockFile>) -> io::Result<Box<dyn Engine>>,
    ) -> io::Result<(Store, Vec<Entry>)> {
        let Files { data, entries, directory } = files;
        if layout.block_bytes == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "block_bytes=0: must be 1 or more"));
        }
        let recovery::Found { epoch, blocks, next } = recovery::recover(&*data, &*entries, number, &layout)?;
        let reserved = (data.bytes()? / layout.slot_bytes() as u64).min(u64::from(layout.slots)) as u32;
        let engine = engine(Arc::clone(&data))?;
        let core = Arc::new(Core {
            data,
            entries,
            number,
            layout,
            sync,
            counters: Counters::default(),
            commits: Commits::default(),
            slots: Mutex::new(Slots::new(layout.slots, epoch, next, &blocks)),
            header: Mutex::new(Some(epoch)),
            failed_syncs: AtomicU64::new(0),
            reserved: Mutex::new(reserved),
            directory: Mutex::new(directory),
            stopped: AtomicBool::new(false),
        });
        let of_thread = Arc::clone(&core);
        let committer = std::thread::Builder::new().name("pk-disk-sync".into());
        let committer = committer.spawn(move || of_thread.commits.run(&of_thread))?;
        let committer = Mutex::new(Some(committer));
        Ok((Store { core, engine, committer, process: std::process::id() }, blocks))
    }

    /// Its sizes.
    pub fn layout(&self) -> Layout {
        self.core.layout
    }

    /// Writes another manifest of this store, for good. All blocks have to be forgotten before.
    ///
    /// # Errors
    /// The system refuses: the former one is there still.
    pub fn revise(&self, manifest: &Manifest) -> Result<(), OpenError> {
        self.core.directory.lock().as_ref().map_or(Ok(()), |directory| directory.revise(manifest))
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.core.counters
    }

    /// Whether blocks go around the page cache.
    pub fn is_direct(&self) -> bool {
        self.core.data.is_direct()
    }

    /// Writes a block into its slot, over what is there; `done` is told of the end, in another thread. Until then
    /// nothing else may be asked of the slot but to forget it: then the block is given up.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn write(&self, block: Block, memory: Memory, done: Done) {
        self.write_since(self.epoch(), block, memory, done);
    }

    /// A number that every reset changes.
    pub fn epoch(&self) -> u64 {
        self.core.slots.lock().epoch()
    }

    /// [`Store::write`] of a block of this epoch: it is given up if there was a reset since.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn write_since(&self, epoch: u64, block: Block, memory: Memory, done: Done) {
        let Block { slot, key, priority, mut origin } = block;
        if origin.content.len() > self.core.layout.content_bytes {
            origin.content.clear();
        }
        let serial = {
            let mut slots = self.core.slots.lock();
            if slots.epoch() != epoch {
                drop(slots);
                return Told::new(done).tell(Err(Failure::GivenUp));
            }
            slots.claim(slot)
        };
        let len = self.core.layout.block_bytes as u64;
        let entry = Entry { slot, key, priority, epoch, serial, len, checksum: 0, origin };
        self.submit(true, entry, memory, done);
    }

    /// Reads the block in a slot, which has to be that of `key`; `done` is told of the end, in another thread. When it
    /// has failed the memory may hold anything, and the block is forgotten.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn read(&self, slot: u32, key: Key, memory: Memory, done: Done) {
        let (epoch, stamp) = {
            let slots = self.core.slots.lock();
            (slots.epoch(), slots.get(slot))
        };
        let (serial, checksum) = stamp.unwrap_or_default();
        let len = self.core.layout.block_bytes as u64;
        let entry = Entry { slot, key, priority: 0, epoch, serial, len, checksum, origin: Origin::default() };
        self.submit(false, entry, memory, done);
    }

    fn submit(&self, write: bool, entry: Entry, memory: Memory, done: Done) {
        let (core, told) = (Arc::clone(&self.core), Told::new(done));
        self.engine.submit(Operation { core, write, entry, memory, bounce: None, told, failed_syncs: 0 });
    }

    /// A slot holds nothing that is wanted.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn forget(&self, slot: u32) {
        let mut slots = self.core.slots.lock();
        slots.forget(slot);
        let instead = self.core.commits.push(slot, Change::Clear);
        drop(slots);
        self.core.left(instead);
    }

    /// Forgets every block at once; writes that are on their way are given up. `done` is told, in another thread, when
    /// none comes back however the process ends, or the power: that is synced whatever else is not. Where the disk has
    /// failed, or the store was stopped, blocks may come back if it is opened again; until then none does.
    pub fn reset(&self, done: Done) {
        self.core.slots.lock().begin_epoch();
        let (core, told) = (Arc::clone(&self.core), Told::new(done));
        let thread = std::thread::Builder::new().name("pk-disk-reset".into());
        // Where no thread starts the end is told as well: `told` is dropped.
        _ = thread.spawn(move || told.tell(core.write_epoch().map_err(Failure::from)));
    }

    /// Writes waiting or under way.
    pub fn writes(&self) -> usize {
        self.engine.writes()
    }

    /// Waits until nothing is being read or written; false when `timeout` passes first.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.engine.wait(Instant::now().checked_add(timeout))
    }

    /// Waits until every block that was given is durable, or was refused; false when `timeout` passes first.
    pub fn flush(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        self.engine.wait(deadline) && self.core.commits.wait(deadline)
    }

    /// Takes no more, gives what is on its way `timeout` to end, gives up the rest, and ends the threads but for those
    /// that the system does not answer. Where all have ended the directory is free for another store. Calling it again
    /// does nothing.
    pub fn stop(&self, timeout: Duration) {
        if self.process != std::process::id() {
            return; // its threads are in another process, and with them perhaps its locks
        }
        let deadline = Instant::now().checked_add(timeout);
        self.engine.stop(deadline);
        self.core.commits.close();
        let committed = self.core.commits.wait(deadline);
        if !committed {
            self.core.commits.give_up();
        }
        if let Some(committer) = self.committer.lock().take()
            && committed
        {
            _ = committer.join(); // it calls no function of others that may panic
        }
        if committed && self.engine.wait(Some(Instant::now())) {
            let soon = Instant::now().checked_add(timeout); // a reset may be under way
            let nobody_writes = soon
                .map_or_else(|| Some(self.core.header.lock()), |soon| self.core.header.try_lock_until(soon));
            if nobody_writes.is_some() {
                self.core.stopped.store(true, Ordering::Release);
                drop(self.core.directory.lock().take());
            }
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

impl Core {
    /// Forgets what was written to a slot under this number, if nothing was since.
    pub(crate) fn forget_one(&self, slot: u32, serial: u64) {
        let mut slots = self.slots.lock();
        if !slots.is_wanted(slot, serial) {
            return;
        }
        slots.forget(slot);
        let instead = self.commits.push(slot, Change::Clear);
        drop(slots);
        self.left(instead);
    }

    /// The header says which epoch it is, for good.
    fn write_epoch(&self) -> io::Result<()> {
        let mut header = self.header.lock();
        if self.stopped.load(Ordering::Acquire) {
            return Err(io::Error::other("the store was stopped"));
        }
        let epoch = self.slots.lock().epoch();
        *header = None;
        let written = recovery::write_epoch(&*self.entries, self.number, epoch);
        match written.and_then(|()| self.entries.sync()) {
            Ok(()) => *header = Some(epoch),
            // Where that cannot be written the entries may still be cut off; the next commit writes it.
            Err(error) => {
                self.entries.set_len(0).and_then(|()| self.entries.sync()).map_err(|_| error)?;
            }
        }
        Ok(())
    }

    /// A change will not be committed: another one of its slot goes instead, or the store was stopped.
    pub(crate) fn left(&self, change: Option<Change>) {
        if let Some(Change::Put(put)) = change {
            self.counters.undurable.fetch_add(1, Ordering::Relaxed);
            drop(put); // whoever waits is told that it was given up
        }
    }

    /// Takes space on the disk for a slot and those after it.
    pub(crate) fn reserve(&self, slot: u32) -> io::Result<()> {
        let mut reserved = self.reserved.lock();
        if slot < *reserved {
            return Ok(());
        }
        let layout = &self.layout;
        let more = (EXTENT / layout.slot_bytes() as u64).max(1) as u32;
        let wide = slot.saturating_add(more).min(layout.slots);
        let from = layout.slot_at(*reserved);
        // Where there is no room for many there may be for one.
        let to = match self.data.reserve(from, layout.slot_at(wide)) {
            Ok(()) => wide,
            Err(_) => self.data.reserve(from, layout.slot_at(slot + 1)).map(|()| slot + 1)?,
        };
        *reserved = to;
        Ok(())
    }
}
