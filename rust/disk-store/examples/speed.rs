//! How fast blocks go to disk and come back: `speed write|read DIR BLOCK_BYTES TOTAL_BYTES [DEPTH [SYNC]]`.
//!
//! Writes a new store in a directory, or reads the one that was written there, in the order of its slots, with so many
//! copies on their way (32) and half as many that wait, aligned memory, direct I/O and checksums, synced as the store does it by itself (batch). Prints MiB/s, and the milliseconds in which the
//! store was opened. Nothing is kept in memory between the two: each is a process of its own, and goes around the cache.

use disk_store::directory::Directory;
use disk_store::engine::best;
use disk_store::entry::{Key, Origin};
use disk_store::file::Pages;
use disk_store::store::{Block, Files, Layout, Memory, Store, Sync};
use std::error::Error;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const STORE: u64 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (Some(what), Some(directory)) = (arguments.first(), arguments.get(1)) else {
        return Err("usage: speed write|read DIR BLOCK_BYTES TOTAL_BYTES [DEPTH [batch|none|always]]".into());
    };
    let number = |at: usize, otherwise: usize| arguments.get(at).map_or(Ok(otherwise), |text| text.parse());
    let (block_bytes, total, depth) = (number(2, 1 << 20)?, number(3, 1 << 30)?, number(4, 32)?);
    let sync = match arguments.get(5).map(String::as_str) {
        None | Some("batch") => Sync::Batch,
        Some("none") => Sync::None,
        Some("always") => Sync::Always,
        Some(other) => return Err(format!("{other}: batch, none or always").into()),
    };
    let layout = Layout { block_bytes, content_bytes: 64, slots: (total / block_bytes) as u32 };
    let begun = Instant::now();
    let files = Files::open(Directory::open(Path::new(directory))?, &layout, true)?;
    let (store, found) = Store::open(files, STORE, layout, sync, |file| best(&file, depth))?;
    let opened = begun.elapsed();
    match what.as_str() {
        "write" => {}
        "read" if found.len() == layout.slots as usize => {}
        "read" => return Err(format!("{} blocks are there, not {}", found.len(), layout.slots).into()),
        other => return Err(format!("{other}: write or read").into()),
    }
    // In one piece, as a tier's memory is.
    let mut memory = Pages::zeros((depth + depth / 2) * layout.slot_bytes());
    fill(memory.bytes_mut());
    let begun = Instant::now();
    copy_all(&store, what == "write", &mut memory)?;
    if sync != Sync::None && !store.flush(Duration::from_mins(10)) {
        return Err("the disk does not answer".into());
    }
    let took = begun.elapsed().as_secs_f64();
    let mib = f64::from(layout.slots) * f64::from(u32::try_from(block_bytes)?) / f64::from(1 << 20);
    println!("{:.1} MiB/s, opened in {:.1} ms", mib / took, opened.as_secs_f64() * 1e3);
    store.stop(Duration::from_mins(1));
    Ok(())
}

/// Copies each slot, and begins the next copy in the memory of one that has ended.
fn copy_all(store: &Store, write: bool, memory: &mut Pages) -> Result<(), Box<dyn Error>> {
    let layout = store.layout();
    let asked = memory.bytes().len() / layout.slot_bytes();
    let (sender, ends) = mpsc::channel();
    let mut copy = |place: usize, slot: u32| {
        let start = NonNull::from(&mut memory.bytes_mut()[place * layout.slot_bytes()..]).cast();
        // SAFETY: the pages are there until all has ended, and each place has one copy at a time.
        let memory = unsafe { Memory::new(start, layout.slot_bytes()) };
        let key = Key { hash: u64::from(slot), guard: [7; 16] };
        let sender = sender.clone();
        let done = Box::new(move |end| _ = sender.send((place, end)));
        if write {
            store.write(
                Block {
                    slot,
                    key,
                    priority: 50,
                    origin: Origin { content: vec![1; 64], ..Origin::default() },
                },
                memory,
                done,
            );
        } else {
            store.read(slot, key, memory, done);
        }
    };
    let mut slots = 0..layout.slots;
    let mut on_its_way = 0;
    for (place, slot) in (0..asked).zip(&mut slots) {
        copy(place, slot);
        on_its_way += 1;
    }
    while on_its_way > 0 {
        let (place, end) = ends.recv()?;
        end?;
        match slots.next() {
            Some(slot) => copy(place, slot),
            None => on_its_way -= 1,
        }
    }
    Ok(())
}

/// Bytes that no disk makes fewer.
fn fill(bytes: &mut [u8]) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for chunk in bytes.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes());
    }
}
