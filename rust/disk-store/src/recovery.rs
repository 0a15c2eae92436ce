//! What a store holds when it is opened: read from its entries alone.

use crate::entry::{Entry, Key};
use crate::file::BlockFile;
use crate::store::{HEADER, Layout};
use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::collections::{HashMap, HashSet};
use std::io;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What the header's two records begin with. A record is this, the epoch, and XXH3-64 of both, seeded with the store's
/// number. The higher epoch of those that are whole holds. A reset writes both, so that one that is damaged later does
/// not bring back what was forgotten.
const EPOCH: [u8; 8] = *b"PKEPOCH1";
/// A record has a sector of its own, which a disk writes whole or not at all.
const SECTOR: u64 = 512;
/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;

/// What was found.
pub(crate) struct Found {
    /// The epoch that the store is in.
    pub(crate) epoch: u64,
    /// The blocks of this epoch, in the order in which they were written.
    pub(crate) blocks: Vec<Entry>,
    /// The next serial number.
    pub(crate) next: u64,
}

/// Reads what the store holds, and makes its files what they have to be: as long as the layout says, with entries of
/// the blocks that were found and of no others.
pub(crate) fn recover(
    data: &dyn BlockFile,
    entries: &dyn BlockFile,
    number: u64,
    layout: &Layout,
) -> io::Result<Found> {
    let mut all = read_entries(entries, number, layout)?;
    let next = all.iter().map(|entry| entry.serial).max().unwrap_or(0) + 1;
    let epoch = match read_epoch(entries, number)? {
        Some(epoch) => epoch,
        // A new store; or nobody knows what was forgotten, and so everything is.
        None => all.iter().map(|entry| entry.epoch + 1).max().unwrap_or(0),
    };
    all.retain(|entry| entry.epoch == epoch);
    let written: Vec<u32> = all.iter().map(|entry| entry.slot).collect();
    all.retain(|entry| entry.len == layout.block_bytes as u64);
    let mut blocks = newest(all);
    let kept = blocks.split_off(blocks.len().saturating_sub(layout.slots as usize));
    let blocks = by_last_use(into_fewer_slots(data, entries, number, layout, kept)?);
    clear_others(entries, layout, &written, &blocks)?;
    let end = layout.entry_at(layout.slots);
    if entries.bytes()? > end {
        entries.set_len(end)?;
    }
    entries.reserve(0, end)?; // so that a block which found its place finds one for its entry
    if data.bytes()? > layout.slot_at(layout.slots) {
        data.set_len(layout.slot_at(layout.slots))?;
    }
    write_epoch(entries, number, epoch)?;
    Ok(Found { epoch, blocks, next })
}

/// Clears the entries in slots that hold none of the blocks: older copies, and what there is no room for.
fn clear_others(
    entries: &dyn BlockFile,
    layout: &Layout,
    written: &[u32],
    blocks: &[Entry],
) -> io::Result<()> {
    let held: HashSet<u32> = blocks.iter().map(|entry| entry.slot).collect();
    let nothing = vec![0; layout.entry_bytes()];
    for &slot in written.iter().filter(|&&slot| slot < layout.slots && !held.contains(&slot)) {
        entries.write(&nothing, layout.entry_at(slot))?;
    }
    Ok(())
}

/// All entries that are whole.
pub(crate) fn read_entries(entries: &dyn BlockFile, number: u64, layout: &Layout) -> io::Result<Vec<Entry>> {
    let size = layout.entry_bytes();
    let slots = (entries.bytes()?.saturating_sub(HEADER) / size as u64).min(u64::from(u32::MAX)) as u32;
    let mut found = Vec::new();
    let at_once = (CHUNK / size).max(1) as u32;
    let mut bytes = vec![0; at_once as usize * size];
    let mut first = 0;
    while first < slots {
        let count = at_once.min(slots - first);
        let bytes = &mut bytes[..count as usize * size];
        entries.read(bytes, layout.entry_at(first))?;
        let parts = (first..).zip(bytes.chunks_exact(size));
        found.extend(parts.filter_map(|(slot, bytes)| Entry::decode(number, slot, bytes)));
        first += count;
    }
    Ok(found)
}

/// The newest entry of each block, in the order in which they were written.
pub(crate) fn newest(all: Vec<Entry>) -> Vec<Entry> {
    let mut newest: HashMap<Key, Entry> = HashMap::with_capacity(all.len());
    for entry in all {
        match newest.entry(entry.key) {
            Vacant(place) => _ = place.insert(entry),
            Occupied(mut place) if place.get().serial < entry.serial => _ = place.insert(entry),
            Occupied(_) => {}
        }
    }
    let mut blocks: Vec<Entry> = newest.into_values().collect();
    blocks.sort_unstable_by_key(|entry| (entry.serial, entry.slot));
    blocks
}

/// Blocks in the order of their last use: each counts as used when the last of those that follow it was written, and
/// before what precedes it.
fn by_last_use(mut blocks: Vec<Entry>) -> Vec<Entry> {
    let mut last_use: HashMap<u64, u64> = blocks.iter().map(|entry| (entry.key.hash, entry.serial)).collect();
    blocks.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.origin.position));
    for Entry { key, origin, .. } in &blocks {
        let used = last_use.get(&key.hash).copied().unwrap_or_default();
        if let Some(parent) = last_use.get_mut(&origin.parent).filter(|_| origin.position > 0) {
            *parent = used.max(*parent);
        }
    }
    let used = |entry: &Entry| last_use.get(&entry.key.hash).copied().unwrap_or_default();
    blocks.sort_by_key(used); // what lies deeper stays before what lies above it
    blocks
}

/// Moves blocks out of slots that there are no more, into those that are free. One that cannot be read is lost.
fn into_fewer_slots(
    data: &dyn BlockFile,
    entries: &dyn BlockFile,
    number: u64,
    layout: &Layout,
    blocks: Vec<Entry>,
) -> io::Result<Vec<Entry>> {
    let (mut stay, go): (Vec<Entry>, Vec<Entry>) =
        blocks.into_iter().partition(|entry| entry.slot < layout.slots);
    if go.is_empty() {
        return Ok(stay);
    }
    let mut free = vec![true; layout.slots as usize];
    for entry in &stay {
        free[entry.slot as usize] = false;
    }
    let free = (0..layout.slots).filter(|&slot| free[slot as usize]);
    let mut payload = vec![0; layout.block_bytes];
    let mut moved = Vec::new();
    for (mut entry, slot) in go.into_iter().zip(free) {
        if data.read(&mut payload, layout.slot_at(entry.slot)).is_err() || !entry.matches(&payload) {
            continue;
        }
        entry.slot = slot;
        entry.checksum = entry.checksum_of(&payload);
        data.write(&payload, layout.slot_at(slot))?;
        moved.push(entry);
    }
    data.sync()?;
    let mut bytes = vec![0; layout.entry_bytes()];
    for entry in &moved {
        entry.encode(number, &mut bytes);
        entries.write(&bytes, layout.entry_at(entry.slot))?;
    }
    entries.sync()?;
    stay.extend(moved);
    stay.sort_unstable_by_key(|entry| (entry.serial, entry.slot));
    Ok(stay)
}

/// The epoch in the header, if a record is whole.
pub(crate) fn read_epoch(entries: &dyn BlockFile, number: u64) -> io::Result<Option<u64>> {
    let record = |which: u64| -> io::Result<Option<u64>> {
        let mut bytes = [0; 24];
        match entries.read(&mut bytes, which * SECTOR) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            done => done?,
        }
        let (body, sum) = bytes.split_at(16);
        let whole = body.starts_with(&EPOCH) && xxh3_64_with_seed(body, number).to_le_bytes() == sum;
        let epoch = body.last_chunk().map(|epoch| u64::from_le_bytes(*epoch));
        Ok(epoch.filter(|&epoch| whole && epoch < u64::MAX))
    };
    Ok(record(0)?.max(record(1)?))
}

/// Writes the epoch into both records.
pub(crate) fn write_epoch(entries: &dyn BlockFile, number: u64, epoch: u64) -> io::Result<()> {
    let mut record = [0; 24];
    record[..8].copy_from_slice(&EPOCH);
    record[8..16].copy_from_slice(&epoch.to_le_bytes());
    let sum = xxh3_64_with_seed(&record[..16], number);
    record[16..].copy_from_slice(&sum.to_le_bytes());
    (0..2).try_for_each(|which| entries.write(&record, which * SECTOR))
}
