//! What has to hold for any bytes, whoever made them up: the fuzzers of `fuzz/` and the tests here call the same.
//!
//! The first byte of an input says how it is tried; the fuzzers find out what it does, as they do for all others.

#![allow(unreachable_pub, reason = "the fuzzers call it from outside")]

use crate::disk::{Disk, Image, Liar};
use crate::scene::{NUMBER, payload};
use disk_store::engine::Workers;
use disk_store::entry::{Entry, Key};
use disk_store::file::Pages;
use disk_store::manifest::{FORMAT, Manifest};
use disk_store::store::{Failure, Files, HEADER, Layout, Memory, Store, Sync};
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::mpsc;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// That of the corpora.
pub(crate) const LAYOUT: Layout = Layout { block_bytes: 600, content_bytes: 40, slots: 4 };
/// In the first byte: the checksums are mended. Whoever knows the store's number may write anything.
pub(crate) const SEALED: u8 = 0x80;
/// In the first byte of files: a block is damaged.
pub(crate) const DAMAGED: u8 = 0x40;
/// No file here has more.
const MOST_SLOTS: u32 = 6;

/// An entry that is believed is of the slot that was asked for, and comes back the same when it is written again.
pub fn entry(input: &[u8]) {
    let Some((&how, bytes)) = input.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if how & SEALED != 0 {
        seal(&mut bytes);
    }
    let mut believed = 0;
    for slot in 0..MOST_SLOTS {
        let Some(entry) = Entry::decode(NUMBER, slot, &bytes) else { continue };
        believed += 1;
        assert_eq!(entry.slot, slot);
        assert!(
            entry.origin.content.len() < bytes.len() && entry.epoch < u64::MAX && entry.serial < u64::MAX
        );
        let mut again = vec![0xEE; bytes.len()];
        entry.encode(NUMBER, &mut again);
        assert_eq!(Entry::decode(NUMBER, slot, &again), Some(entry));
    }
    assert!(believed <= 1, "an entry is of one slot");
}

/// A text is a manifest of this format that comes back the same when it is written again, or none.
pub fn manifest(input: &[u8]) {
    if let Ok(manifest) = Manifest::from_text(&String::from_utf8_lossy(input)) {
        assert_eq!(manifest.format, FORMAT);
        assert_eq!(Manifest::from_text(&manifest.to_text()), Ok(manifest));
    }
}

/// A store opens on any file of entries, finds the same twice, and gives the right bytes of a block or none.
pub fn store(input: &[u8]) {
    let Some((&how, entries)) = input.split_first() else { return };
    let disk = Disk::new(files(how, entries), Liar::None);
    let layout = Layout { slots: [4, 6, 3, 1][usize::from(how & 3)], ..LAYOUT };
    let open = || {
        let files = Files { data: disk.file(0), entries: disk.file(1), directory: None };
        Store::open(files, NUMBER, layout, Sync::Batch, |file| Ok(Box::new(Workers::start(&file, 1)?)))
            .unwrap()
    };
    let (store, found) = open();
    let slots: HashSet<u32> = found.iter().map(|entry| entry.slot).collect();
    let keys: HashSet<Key> = found.iter().map(|entry| entry.key).collect();
    assert!(slots.len() == found.len() && keys.len() == found.len());
    assert!(found.iter().all(|entry| entry.slot < layout.slots));
    store.stop(Duration::from_secs(20));
    drop(store);
    let (store, again) = open();
    assert_eq!(found, again);
    let whole = found.iter().filter(|entry| reads_right(&store, entry)).count();
    store.stop(Duration::from_secs(20));
    drop(store);
    assert_eq!(open().1.len(), whole, "what was damaged is gone");
    assert_eq!(disk.now()[1].len() as u64, layout.entry_at(layout.slots));
    assert!(layout.entry_at(0) == HEADER);
}

/// The entries, and a file of the blocks that they speak of, for as many slots as a file here has.
fn files(how: u8, entries: &[u8]) -> Image {
    let size = LAYOUT.entry_bytes();
    let mut entries = entries[..entries.len().min(LAYOUT.entry_at(MOST_SLOTS) as usize)].to_vec();
    if how & SEALED != 0 {
        let end = entries.len().min(HEADER as usize);
        let (header, entries) = entries.split_at_mut(end);
        header.chunks_mut(512).take(2).filter_map(|sector| sector.get_mut(..24)).for_each(seal);
        entries.chunks_exact_mut(size).for_each(seal);
    }
    let mut data = vec![0; LAYOUT.slot_at(MOST_SLOTS) as usize];
    for slot in 0..MOST_SLOTS {
        let at = LAYOUT.entry_at(slot) as usize;
        let there = entries.get(at..at + size);
        if let Some(entry) = there.and_then(|bytes| Entry::decode(NUMBER, slot, bytes)) {
            data[LAYOUT.slot_at(slot) as usize..][..LAYOUT.block_bytes].copy_from_slice(&block_of(entry.key));
        }
    }
    if how & DAMAGED != 0 {
        data[LAYOUT.slot_at(u32::from(how >> 2) % MOST_SLOTS) as usize + 77] ^= 1;
    }
    [data, entries]
}

/// Ends a record or an entry with the checksum that it has to have.
pub(crate) fn seal(bytes: &mut [u8]) {
    if let Some((body, sum)) = bytes.split_last_chunk_mut() {
        *sum = xxh3_64_with_seed(body, NUMBER).to_le_bytes();
    }
}

/// What a block's slot holds, if it is there.
pub(crate) fn block_of(key: Key) -> Vec<u8> {
    payload(key.hash, LAYOUT.block_bytes)
}

/// Whether a block is there; then it has the right bytes.
fn reads_right(store: &Store, entry: &Entry) -> bool {
    let mut pages = Pages::zeros(LAYOUT.slot_bytes());
    let (sent, ended) = mpsc::channel();
    // SAFETY: the pages are there until the read has ended.
    let memory = unsafe { Memory::new(NonNull::from(pages.bytes_mut()).cast(), LAYOUT.slot_bytes()) };
    store.read(entry.slot, entry.key, memory, Box::new(move |end| _ = sent.send(end)));
    match ended.recv_timeout(Duration::from_secs(20)).unwrap() {
        Ok(()) => {
            assert_eq!(pages.bytes()[..LAYOUT.block_bytes], block_of(entry.key));
            true
        }
        Err(failure) => {
            assert_eq!(failure, Failure::Damaged);
            false
        }
    }
}
