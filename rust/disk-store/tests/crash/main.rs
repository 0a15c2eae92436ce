//! Power cuts at random moments of random lives: whatever a disk may have kept of what was not synced, the store that is
//! opened again gives every block that was durable, none that was forgotten, and no wrong byte.
//!
//! `CRASH_IMAGES` says how many images are opened, `CRASH_SEED` which is the first life. A life that fails is named: it
//! alone is lived by `CRASH_IMAGES=1 CRASH_SEED=<it>`. Threads take turns as they like, so it may fail in another place.

mod disk;
mod life;
mod random;
#[path = "../scene/mod.rs"]
mod scene;

use disk::{Disk, Image, Liar};
use disk_store::entry::Entry;
use disk_store::store::{Failure, Sync};
use life::{LAYOUT, Life, bytes_of, live, open, read};
use random::Random;
use scene::NUMBER;
use std::time::Duration;

/// Power cuts of each life, and lives one after the other on a disk.
const CUTS: usize = 5;
const LIVES: u64 = 3;

/// A store after a power cut: its files, the blocks that are whole in their slots, and their generation.
struct Left {
    image: Image,
    held: Vec<(u32, u64)>,
    generation: u64,
}

/// Opens what a power cut at this time left, and looks at all of it.
fn check(image: Image, life: &Life, time: usize, sync: Sync) -> Result<Left, String> {
    let disk = Disk::new(image, Liar::None);
    let (store, found) = open(&disk, sync)?;
    store.stop(Duration::from_secs(20));
    drop(store);
    if found != whole_entries(&disk.now()[1]) {
        return Err("the entries in the file are not those of the blocks that were found".into());
    }
    let (store, again) = open(&disk, sync)?;
    if found != again {
        return Err(format!("{} blocks are found, and then {}", found.len(), again.len()));
    }
    let last = life.resets.iter().rfind(|reset| reset.returned <= time);
    let first_allowed = last.map_or(0, |reset| reset.generation);
    let begun = life.resets.iter().filter(|reset| reset.began < time);
    let mut allowed: Vec<u64> = begun
        .map(|reset| reset.generation)
        .filter(|&it| it >= first_allowed)
        .chain([first_allowed])
        .collect();
    let mut held = Vec::new();
    for Entry { slot, key, .. } in &found {
        match read(&store, *slot, key.hash) {
            Err(Failure::Damaged) => {}
            Err(failure) => return Err(format!("slot {slot} cannot be read: {failure}")),
            Ok(bytes) => {
                allowed.retain(|&generation| bytes == bytes_of(key.hash, generation));
                held.push((*slot, key.hash));
            }
        }
        if allowed.is_empty() {
            return Err(format!("slot {slot} gives bytes that are not those of block {}", key.hash));
        }
    }
    for copy in &life.copies {
        let durable = copy.durable.is_some_and(|durable| durable <= time);
        let kept = copy.let_go.is_none_or(|let_go| time <= let_go);
        if durable && kept && !held.contains(&(copy.slot, copy.key)) {
            return Err(format!("block {} was durable in slot {} and is gone", copy.key, copy.slot));
        }
    }
    store.stop(Duration::from_secs(20));
    drop(store);
    let (store, at_last) = open(&disk, sync)?;
    drop(store);
    if at_last.len() != held.len() {
        return Err(format!("{} blocks are whole, and {} are found", held.len(), at_last.len()));
    }
    held.sort_unstable();
    Ok(Left { image: disk.now(), held, generation: allowed[0] })
}

/// What the file says that there is, read without the store: the blocks of the highest epoch.
fn whole_entries(file: &[u8]) -> Vec<Entry> {
    let decode = |slot: u32| {
        let at = LAYOUT.entry_at(slot) as usize;
        Entry::decode(NUMBER, slot, file.get(at..at + LAYOUT.entry_bytes())?)
    };
    let epoch = |at: usize| u64::from_le_bytes(file[at + 8..at + 16].try_into().unwrap());
    let mut all: Vec<Entry> = (0..LAYOUT.slots).filter_map(decode).collect();
    all.retain(|entry| entry.epoch == epoch(0).max(epoch(512)));
    all.sort_unstable_by_key(|entry| entry.serial);
    all
}

/// Lives, and power cuts. Gives how many images were opened.
fn run(seed: u64, liar: Liar, sync: Sync) -> Result<usize, String> {
    let mut random = Random::new(seed);
    let mut left = Left { image: Image::default(), held: vec![], generation: 0 };
    let mut images = 0;
    for fresh in (1..=LIVES).map(|life| 1000 * life) {
        let disk = Disk::new(left.image, liar);
        let generation = if left.held.is_empty() { fresh } else { left.generation };
        let life = live(&disk, sync, &left.held, generation, fresh + 1, &mut random)?;
        let mut last = None;
        for _ in 0..CUTS {
            let time = random.below(disk.time() + 1);
            let image = disk.image(time, &mut random);
            last = Some(check(image, &life, time, sync).map_err(|fault| format!("at {time}: {fault}"))?);
            images += 1;
        }
        left = last.ok_or("no cut")?;
    }
    Ok(images)
}

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

fn run_all(sync: Sync) {
    let (first, wanted) = (number("CRASH_SEED", 0), number("CRASH_IMAGES", 40) as usize);
    let mut images = 0;
    for seed in first.. {
        match run(seed, Liar::None, sync) {
            Ok(more) => images += more,
            Err(fault) => panic!("CRASH_SEED={seed} {sync:?}: {fault}"),
        }
        if images >= wanted {
            break;
        }
    }
}

#[test]
fn after_a_power_cut_no_byte_is_wrong_and_what_was_durable_is_there() {
    run_all(Sync::Batch);
}

#[test]
fn after_a_power_cut_every_write_that_ended_well_is_there_where_each_is_synced() {
    run_all(Sync::Always);
}

#[test]
fn after_a_power_cut_no_byte_is_wrong_and_resets_hold_where_nothing_else_is_synced() {
    run_all(Sync::None);
}

#[test]
fn a_disk_whose_syncs_lie_does_not_pass_these_tests() {
    for (liar, sync, expected) in [
        (Liar::Data, Sync::Batch, "was durable"),
        (Liar::Data, Sync::Always, "was durable"),
        (Liar::Entries, Sync::Batch, "was durable"),
        (Liar::Entries, Sync::None, "gives bytes that are not those"),
    ] {
        let caught = |seed| run(seed, liar, sync).is_err_and(|fault| fault.contains(expected));
        assert!((0..40).any(caught), "{liar:?} {sync:?}");
    }
}
