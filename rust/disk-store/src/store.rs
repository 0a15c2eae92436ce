//! The store: blocks into slots and back, each end told to whoever asked.

pub use crate::commits::Sync;
use crate::commits::{Change, Commits};
use crate::directory::{DATA, Directory, ENTRIES, OpenError};
use crate::engine::{Engine, Io, Operation};
use crate::entry::{Entry, Key, entry_bytes};
use crate::file::{ALIGNMENT, BlockFile, Pages};
use crate::recovery;
use parking_lot::Mutex;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
    /// Most bytes of a block's origin.
    pub origin_bytes: usize,
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
        entry_bytes(self.origin_bytes)
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
    /// Where they lie: locked until the last thread of the store has ended.
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
    start: NonNull<u8>,
    /// Bytes that may be touched, from there on.
    room: usize,
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
    /// What it was made of; left out if it is longer than the layout allows.
    pub origin: Vec<u8>,
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
    /// Blocks whose entry could not be written or synced: they are lost when the store is closed.
    pub undurable: AtomicU64,
}

/// What the store knows of what was written last to a slot.
#[derive(Clone, Copy, Default)]
struct Stamp {
    epoch: u64,
    /// 0 if nothing was.
    serial: u64,
    checksum: u128,
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
    stamps: Mutex<Vec<Stamp>>,
    epoch: AtomicU64,
    serial: AtomicU64,
    /// Slots that have space on the disk.
    reserved: Mutex<u32>,
    _directory: Option<Directory>,
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
    /// in the order in which they were written.
    ///
    /// # Errors
    /// The system refuses.
    pub fn open(
        files: Files,
        number: u64,
        layout: Layout,
        sync: Sync,
        engine: impl FnOnce(Arc<dyn BlockFile>) -> io::Result<Box<dyn Engine>>,
    ) -> io::Result<(Store, Vec<Entry>)> {
        let Files { data, entries, directory } = files;
        let recovery::Found { epoch, blocks, next } = recovery::recover(&*data, &*entries, number, &layout)?;
        let mut stamps = vec![Stamp::default(); layout.slots as usize];
        for Entry { slot, epoch, serial, checksum, .. } in &blocks {
            stamps[*slot as usize] = Stamp { epoch: *epoch, serial: *serial, checksum: *checksum };
        }
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
            stamps: Mutex::new(stamps),
            epoch: AtomicU64::new(epoch),
            serial: AtomicU64::new(next),
            reserved: Mutex::new(reserved),
            _directory: directory,
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

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.core.counters
    }

    /// Whether blocks go around the page cache.
    pub fn is_direct(&self) -> bool {
        self.core.data.is_direct()
    }

    /// Writes a block into its slot, over what is there; `done` is told of the end, in another thread.
    pub fn write(&self, block: Block, memory: Memory, done: Done) {
        let Block { slot, key, priority, mut origin } = block;
        if origin.len() > self.core.layout.origin_bytes {
            origin.clear();
        }
        let epoch = self.core.epoch.load(Ordering::Acquire);
        let len = self.core.layout.block_bytes as u64;
        let entry = Entry { slot, key, priority, epoch, serial: 0, len, checksum: 0, origin };
        self.begin(true, entry, memory, done);
    }

    /// Reads the block in a slot, which has to be that of `key`; `done` is told of the end, in another thread. When it
    /// has failed the memory may hold anything.
    pub fn read(&self, slot: u32, key: Key, memory: Memory, done: Done) {
        let len = self.core.layout.block_bytes as u64;
        let entry =
            Entry { slot, key, priority: 0, epoch: 0, serial: 0, len, checksum: 0, origin: Vec::new() };
        self.begin(false, entry, memory, done);
    }

    fn begin(&self, write: bool, entry: Entry, memory: Memory, done: Done) {
        assert!(entry.slot < self.core.layout.slots, "there is no slot {}", entry.slot);
        let core = Arc::clone(&self.core);
        self.engine.submit(Operation { core, write, entry, memory, bounce: None, done: Some(done) });
    }

    /// A slot holds nothing that is wanted.
    pub fn forget(&self, slot: u32) {
        self.core.forget(slot);
    }

    /// Forgets every block, so that none comes back however the process ends. Waits for the disk.
    ///
    /// # Errors
    /// The disk failed. Blocks may come back if the store is opened again; until then none does.
    pub fn reset(&self) -> io::Result<()> {
        let core = &self.core;
        let epoch = core.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        let written = recovery::write_epoch(&*core.entries, core.number, epoch);
        let synced =
            written.and_then(|()| if core.sync == Sync::None { Ok(()) } else { core.entries.sync() });
        // Where that cannot be written the entries may still be cut off.
        synced.or_else(|error| core.entries.set_len(0).and_then(|()| core.entries.sync()).map_err(|_| error))
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
    /// that the system does not answer. Calling it again does nothing.
    pub fn stop(&self, timeout: Duration) {
        if self.process != std::process::id() {
            return; // its threads are in another process, and with them perhaps its locks
        }
        let deadline = Instant::now().checked_add(timeout);
        self.engine.stop(deadline);
        let committed = self.core.commits.wait(deadline);
        self.core.commits.close();
        if let Some(committer) = self.committer.lock().take()
            && committed
        {
            _ = committer.join(); // it does not panic
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

impl Core {
    fn forget(&self, slot: u32) {
        self.stamps.lock()[slot as usize] = Stamp::default();
        self.commits.push(Change::Clear(slot));
    }

    /// Takes space on the disk for a slot and those after it.
    fn reserve(&self, slot: u32) -> io::Result<()> {
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

impl Operation {
    /// What is to be read or written, once; called in a thread that may take its time.
    pub(crate) fn begin(&mut self) -> io::Result<Io> {
        let core = Arc::clone(&self.core);
        let block_bytes = core.layout.block_bytes;
        let slot = self.entry.slot;
        if self.write {
            self.entry.serial = core.serial.fetch_add(1, Ordering::Relaxed);
            core.stamps.lock()[slot as usize] = Stamp::default(); // from now on nobody knows what is there
            // SAFETY: a block's bytes, which nobody writes to.
            let payload = unsafe { std::slice::from_raw_parts(self.memory.start.as_ptr(), block_bytes) };
            self.entry.checksum = self.entry.checksum_of(payload);
            core.reserve(slot)?;
        } else {
            let Stamp { epoch, serial, checksum } = core.stamps.lock()[slot as usize];
            (self.entry.epoch, self.entry.serial, self.entry.checksum) = (epoch, serial, checksum);
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

    /// It was read or written; called in a thread that may take its time.
    pub(crate) fn end(mut self, moved: io::Result<()>) {
        let core = Arc::clone(&self.core);
        let Some(done) = self.done.take() else { return };
        if self.write { self.written(&core, moved, done) } else { done(self.read(&core, moved)) }
    }

    fn written(&mut self, core: &Core, moved: io::Result<()>, done: Done) {
        let origin = std::mem::take(&mut self.entry.origin);
        let entry = Entry { origin, ..self.entry.clone() };
        if let Err(error) = moved {
            core.counters.write_errors.fetch_add(1, Ordering::Relaxed);
            core.commits.push(Change::Clear(entry.slot));
            return done(Err(Failure::Io(error.to_string())));
        }
        core.counters.written.fetch_add(1, Ordering::Relaxed);
        let Entry { slot, epoch, serial, checksum, .. } = entry;
        core.stamps.lock()[slot as usize] = Stamp { epoch, serial, checksum };
        let (now, later) = if core.sync == Sync::Always { (None, Some(done)) } else { (Some(done), None) };
        core.commits.push(Change::Put(Box::new(entry), later));
        if let Some(done) = now {
            done(Ok(()));
        }
    }

    fn read(&self, core: &Core, moved: io::Result<()>) -> Result<(), Failure> {
        let counters = &core.counters;
        match moved {
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                counters.read_errors.fetch_add(1, Ordering::Relaxed);
                core.forget(self.entry.slot);
                return Err(Failure::Io(error.to_string()));
            }
            Ok(()) if self.entry.serial != 0 && self.take() => {
                counters.read.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            _ => {}
        }
        counters.damaged.fetch_add(1, Ordering::Relaxed);
        core.forget(self.entry.slot);
        Err(Failure::Damaged)
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

// SAFETY: addresses, to be used by whoever carries the operation out; see `Memory`.
unsafe impl Send for Operation {}
