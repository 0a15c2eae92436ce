//! A store in a directory of its own, driven one block at a time.

#![allow(dead_code, reason = "each test uses a part of it")]

use disk_store::directory::Directory;
use disk_store::engine::{Engine, Ring, Workers};
use disk_store::entry::{Entry, Key, Origin};
use disk_store::file::{BlockFile, Pages};
use disk_store::store::{Block, Failure, Files, Layout, Memory, Store, Sync};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use tempfile::TempDir;

/// What moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Ring,
    Workers,
    /// Threads, through the page cache.
    Buffered,
}

pub(crate) struct Scene {
    pub(crate) kind: Kind,
    pub(crate) block_bytes: usize,
    pub(crate) slots: u32,
    pub(crate) sync: Sync,
    /// How far the memory of a block begins behind a page.
    pub(crate) shift: usize,
    /// Whether what follows a block in memory is somebody else's.
    pub(crate) snug: bool,
    directory: TempDir,
}

pub(crate) struct Opened {
    pub(crate) store: Store,
    pub(crate) found: Vec<Entry>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.store.stop(Duration::from_secs(10));
    }
}

pub(crate) const NUMBER: u64 = 0x1234_5678_9abc_def0;

impl Scene {
    pub(crate) fn new(kind: Kind, block_bytes: usize, slots: u32) -> Scene {
        Scene::within(&std::env::temp_dir(), kind, block_bytes, slots)
    }

    /// A store in a directory of its own on some file system.
    pub(crate) fn within(place: &Path, kind: Kind, block_bytes: usize, slots: u32) -> Scene {
        let directory = tempfile::tempdir_in(place).unwrap();
        Scene { kind, block_bytes, slots, sync: Sync::Batch, shift: 0, snug: false, directory }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("store")
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout { block_bytes: self.block_bytes, content_bytes: 32, slots: self.slots }
    }

    pub(crate) fn open(&self) -> Opened {
        let directory = Directory::open(&self.path()).unwrap();
        let files = Files::open(directory, &self.layout(), self.kind != Kind::Buffered).unwrap();
        let (store, found) = open(files, self.layout(), self.sync, self.kind);
        Opened { store, found }
    }

    pub(crate) fn write(&self, opened: &Opened, slot: u32, number: u64) -> Result<(), Failure> {
        self.write_block(opened, number, block(slot, number))
    }

    pub(crate) fn write_block(&self, opened: &Opened, number: u64, block: Block) -> Result<(), Failure> {
        let (sent, ended) = mpsc::channel();
        let mut pages = self.memory();
        pages.bytes_mut()[self.shift..self.shift + self.block_bytes]
            .copy_from_slice(&payload(number, self.block_bytes));
        let memory = self.address(&mut pages);
        opened.store.write(block, memory, Box::new(move |end| _ = sent.send(end)));
        let end = ended.recv().unwrap();
        drop(pages);
        end
    }

    pub(crate) fn read(&self, opened: &Opened, slot: u32, number: u64) -> Result<Vec<u8>, Failure> {
        let (sent, ended) = mpsc::channel();
        let mut pages = self.memory();
        pages.bytes_mut().fill(0xEE);
        let memory = self.address(&mut pages);
        opened.store.read(slot, key(number), memory, Box::new(move |end| _ = sent.send(end)));
        let end = ended.recv().unwrap();
        let others = &pages.bytes()[self.shift + self.room()..];
        assert!(others.iter().all(|&byte| byte == 0xEE), "more is written to than there was room for");
        end?;
        Ok(pages.bytes()[self.shift..self.shift + self.block_bytes].to_vec())
    }

    fn memory(&self) -> Pages {
        Pages::zeros(self.shift + self.layout().slot_bytes())
    }

    fn address(&self, pages: &mut Pages) -> Memory {
        let start = NonNull::from(&mut pages.bytes_mut()[self.shift..]).cast();
        // SAFETY: the test keeps the pages until the operation has ended.
        unsafe { Memory::new(start, self.room()) }
    }

    fn room(&self) -> usize {
        if self.snug { self.block_bytes } else { self.layout().slot_bytes() }
    }
}

pub(crate) fn open(files: Files, layout: Layout, sync: Sync, kind: Kind) -> (Store, Vec<Entry>) {
    let engine = |file: Arc<dyn BlockFile>| -> std::io::Result<Box<dyn Engine>> {
        Ok(match kind {
            Kind::Ring => Box::new(Ring::start(file, 8)?),
            Kind::Workers | Kind::Buffered => Box::new(Workers::start(&file, 4)?),
        })
    };
    Store::open(files, NUMBER, layout, sync, engine).unwrap()
}

/// Resets a store, and waits until that has ended.
pub(crate) fn reset(store: &Store) -> Result<(), Failure> {
    let (sender, end) = mpsc::channel();
    store.reset(Box::new(move |ended| sender.send(ended).unwrap()));
    end.recv().unwrap()
}

pub(crate) fn key(number: u64) -> Key {
    Key { hash: number, guard: [number as u8 ^ 0x5A; 16] }
}

pub(crate) fn block(slot: u32, number: u64) -> Block {
    Block {
        slot,
        key: key(number),
        priority: 50,
        origin: Origin { content: format!("from {number}").into_bytes(), ..Origin::default() },
    }
}

/// Bytes that no other block has.
pub(crate) fn payload(number: u64, len: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(byte).take(len).collect()
}

pub(crate) fn at(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
