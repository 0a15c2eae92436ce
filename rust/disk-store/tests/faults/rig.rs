//! A store on files that fail, and what was told of its copies.

use crate::faulty::{Call, Fault, FaultyFile};
use crate::scene::{Kind, NUMBER, at, block, key, payload};
use disk_store::engine::{Engine, Ring, Workers};
use disk_store::file::{BlockFile, Pages};
use disk_store::store::{Counters, Failure, Files, Layout, Memory, Store, Sync};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tempfile::TempDir;

pub(crate) const LAYOUT: Layout = Layout { block_bytes: 5000, content_bytes: 16, slots: 64 };
pub(crate) const LONG: Duration = Duration::from_secs(20);

pub(crate) struct Rig {
    pub(crate) store: Store,
    pub(crate) data: Arc<FaultyFile>,
    pub(crate) entries: Arc<FaultyFile>,
    pub(crate) found: Vec<u64>,
    sync: Sync,
    kind: Kind,
    /// Memory of what was begun and not waited for, by slot.
    memory: HashMap<u32, Pages>,
    sender: mpsc::Sender<(u32, Result<(), Failure>)>,
    ends: mpsc::Receiver<(u32, Result<(), Failure>)>,
    directory: Arc<TempDir>,
}

impl Rig {
    pub(crate) fn new(kind: Kind, sync: Sync) -> Rig {
        Rig::in_directory(Arc::new(tempfile::tempdir().unwrap()), kind, sync)
    }

    /// Block 0 is being synced, which goes wrong; block 1 is written, and waits for the next sync.
    pub(crate) fn with_a_sync_that(fails: Fault) -> Rig {
        let mut rig = Rig::new(Kind::Workers, Sync::Always);
        rig.data.fail(Call::Sync, fails);
        rig.begin_write(0);
        rig.data.wait_for_hanging(1);
        rig.begin_write(1);
        while rig.count(|it| &it.written) < 2 {
            std::thread::yield_now();
        }
        rig
    }

    fn in_directory(directory: Arc<TempDir>, kind: Kind, sync: Sync) -> Rig {
        let data = Arc::new(FaultyFile::open(&directory.path().join("data")));
        let entries = Arc::new(FaultyFile::open(&directory.path().join("entries")));
        let files = Files { data: data.clone(), entries: entries.clone(), directory: None };
        let engine = |file: Arc<dyn BlockFile>| -> io::Result<Box<dyn Engine>> {
            Ok(match kind {
                Kind::Ring => Box::new(Ring::start(file, 4)?),
                _ => Box::new(Workers::start(&file, 3)?),
            })
        };
        let (store, found) = Store::open(files, NUMBER, LAYOUT, sync, engine).unwrap();
        let found = found.iter().map(|entry| entry.key.hash).collect();
        let (sender, ends) = mpsc::channel();
        Rig { store, data, entries, found, sync, kind, memory: HashMap::new(), sender, ends, directory }
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Heals the files, stops the store and opens it again.
    pub(crate) fn again(self) -> Rig {
        let (directory, kind, sync) = (Arc::clone(&self.directory), self.kind, self.sync);
        drop(self);
        Rig::in_directory(directory, kind, sync)
    }

    pub(crate) fn begin_write(&mut self, slot: u32) {
        let memory = self.memory_of(slot, &payload(u64::from(slot), LAYOUT.block_bytes));
        let sender = self.sender.clone();
        let done = Box::new(move |end| sender.send((slot, end)).unwrap());
        self.store.write(block(slot, u64::from(slot)), memory, done);
    }

    /// A write of which somebody is told who panics.
    pub(crate) fn begin_write_and_panic(&mut self, slot: u32) {
        let memory = self.memory_of(slot, &payload(u64::from(slot), LAYOUT.block_bytes));
        let sender = self.sender.clone();
        let done = Box::new(move |end| {
            sender.send((slot, end)).unwrap();
            panic!("whoever is told panics");
        });
        self.store.write(block(slot, u64::from(slot)), memory, done);
    }

    pub(crate) fn begin_read(&mut self, slot: u32) {
        let memory = self.memory_of(slot, &vec![0xEE; LAYOUT.block_bytes]);
        let sender = self.sender.clone();
        let done = Box::new(move |end| sender.send((slot, end)).unwrap());
        self.store.read(slot, key(u64::from(slot)), memory, done);
    }

    fn memory_of(&mut self, slot: u32, bytes: &[u8]) -> Memory {
        let mut pages = Pages::zeros(LAYOUT.slot_bytes());
        pages.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let start = NonNull::from(pages.bytes_mut()).cast();
        assert!(self.memory.insert(slot, pages).is_none(), "one copy of a slot at a time");
        // SAFETY: the pages are kept until the operation has ended.
        unsafe { Memory::new(start, LAYOUT.slot_bytes()) }
    }

    /// Waits for the end of one copy. Its memory then has these bytes.
    pub(crate) fn end(&mut self) -> (u32, Result<(), Failure>, Vec<u8>) {
        let (slot, end) = self.ends.recv_timeout(LONG).expect("every copy ends");
        let pages = self.memory.remove(&slot).expect("it was begun, and has not ended before");
        (slot, end, pages.bytes()[..LAYOUT.block_bytes].to_vec())
    }

    /// Whether nothing has ended that was not waited for, and nothing ends any more.
    pub(crate) fn is_quiet(&self) -> bool {
        self.ends.try_recv().is_err()
    }

    pub(crate) fn write(&mut self, slot: u32) -> Result<(), Failure> {
        self.begin_write(slot);
        self.end().1
    }

    /// Reads a block, which has the right bytes or fails.
    pub(crate) fn read(&mut self, slot: u32) -> Result<(), Failure> {
        self.begin_read(slot);
        let (_, end, bytes) = self.end();
        assert!(end.is_err() || bytes == payload(u64::from(slot), LAYOUT.block_bytes));
        end
    }

    pub(crate) fn flush(&self) {
        assert!(self.store.flush(LONG));
    }

    pub(crate) fn count(&self, which: impl Fn(&Counters) -> &AtomicU64) -> u64 {
        at(which(self.store.counters()))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.data.heal();
        self.entries.heal();
        self.store.stop(LONG);
    }
}
