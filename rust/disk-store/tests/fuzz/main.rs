//! Bytes that no store has written: what reads them never panics, and never believes what does not check itself.
//!
//! Fuzzers that coverage guides call the same checks (`make fuzz`). Here every input that they found worth keeping is
//! tried again, and what was written is changed at random: `FUZZ_SECONDS` says for how long each test goes on,
//! `FUZZ_SEED` where the first one of its rounds begins. The corpus was written by format 1, and has to be readable by
//! every later version that reads this format.

mod checks;
#[allow(dead_code, reason = "no power is cut here")]
#[path = "../crash/disk.rs"]
mod disk;
#[path = "../crash/random.rs"]
mod random;
#[path = "../scene/mod.rs"]
mod scene;

use checks::{DAMAGED, LAYOUT, SEALED, block_of, seal};
use disk_store::entry::{Entry, Key, Origin};
use disk_store::manifest::{FORMAT, Manifest};
use random::Random;
use scene::NUMBER;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const ENTRIES: &[u8] = include_bytes!("../corpus/entries");
const MANIFEST: &str = include_str!("../corpus/manifest.json");

/// What the fuzzers begin with, and have found.
fn corpus(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(of)
}

/// Rounds with a seed each: so many, or for as long as was said.
fn rounds(few: u64, mut round: impl FnMut(&mut Random)) {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let first = number("FUZZ_SEED").unwrap_or(0);
    let begun = Instant::now();
    let long = number("FUZZ_SECONDS").map(Duration::from_secs);
    for seed in first.. {
        if long.map_or(seed - first >= few, |long| begun.elapsed() >= long) {
            return;
        }
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| round(&mut Random::new(seed))));
        assert!(ended.is_ok(), "FUZZ_SEED={seed}");
    }
}

/// Changes bytes in one of the ways that often matter.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len());
    match random.below(7) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        1 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF][random.below(5)],
        2 => bytes.truncate(at),
        3 => bytes.extend((0..random.below(300)).map(|_| 0xFF)),
        4 if bytes.len() > 8 => {
            let at = random.below(bytes.len() - 8);
            let number = [0, 1, u64::MAX, u64::MAX - 1, random.next()][random.below(5)];
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        5 => {
            let len = random.below(bytes.len() - at.min(bytes.len()));
            let piece = bytes[at..at + len].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, piece);
        }
        _ => {
            let len = random.below(bytes.len().saturating_sub(at));
            bytes.drain(at..at + len);
        }
    }
}

/// An entry of any numbers, most of them near the ends.
fn any_entry(random: &mut Random) -> Entry {
    let mut number = |near: u64| match random.below(4) {
        0 => random.next(),
        1 => u64::MAX - random.next() % 3,
        _ => random.next() % near,
    };
    let mut entry = Entry {
        slot: number(6) as u32,
        key: Key { hash: number(5), guard: [number(2) as u8; 16] },
        priority: number(100) as u8,
        epoch: number(3),
        serial: number(20),
        len: [600, 600, 600, number(700)][number(4) as usize % 4],
        checksum: 0,
        origin: Origin {
            parent: number(7),
            position: number(9) as u32,
            content: vec![7; number(41) as usize % 41],
        },
    };
    entry.checksum = entry.checksum_of(&block_of(entry.key));
    entry
}

/// What the corpus has of a slot.
fn entry_of(slot: u32) -> Entry {
    let mut entry = Entry {
        slot,
        key: Key { hash: 100 + u64::from(slot), guard: [slot as u8; 16] },
        priority: 50,
        epoch: 1,
        serial: 7 + u64::from(slot),
        len: 600,
        checksum: 0,
        origin: Origin {
            parent: 99 + u64::from(slot),
            position: slot,
            content: format!("the content of {slot}").into_bytes(),
        },
    };
    entry.checksum = entry.checksum_of(&block_of(entry.key));
    entry
}

/// A record of a header.
fn epoch_record(epoch: u64) -> [u8; 24] {
    let mut record = [0; 24];
    record[..8].copy_from_slice(b"PKEPOCH1");
    record[8..16].copy_from_slice(&epoch.to_le_bytes());
    seal(&mut record);
    record
}

#[test]
#[ignore = "writes the corpus anew: for a new format alone"]
fn write_the_corpus() {
    let mut bytes = vec![0; LAYOUT.entry_at(LAYOUT.slots) as usize];
    bytes[..24].copy_from_slice(&epoch_record(1));
    bytes[512..536].copy_from_slice(&epoch_record(1));
    for slot in [0, 1, 3] {
        let at = LAYOUT.entry_at(slot) as usize;
        entry_of(slot).encode(NUMBER, &mut bytes[at..at + LAYOUT.entry_bytes()]);
    }
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    std::fs::write(corpus.join("entries"), bytes).unwrap();
    let fingerprint = [("dtype", "bfloat16"), ("model", "some/model@main"), ("page_size", "16")];
    let manifest = Manifest {
        format: FORMAT,
        store: NUMBER,
        fingerprint: fingerprint.map(|(name, value)| (name.into(), value.into())).into(),
        seed: "0f".repeat(32),
        secret: "a5".repeat(32),
        block_bytes: 600,
        entry_bytes: LAYOUT.entry_bytes() as u64,
    };
    std::fs::write(corpus.join("manifest.json"), manifest.to_text()).unwrap();
}

#[test]
#[ignore = "writes what the fuzzers begin with anew: for a new format alone"]
fn write_what_the_fuzzers_begin_with() {
    let write = |of: &str, how: &[u8], bytes: &[u8]| {
        std::fs::write(corpus(of).join("written"), [how, bytes].concat()).unwrap();
        std::fs::write(corpus(of).join("changed"), [how, &bytes[..bytes.len() / 2]].concat()).unwrap();
    };
    let at = LAYOUT.entry_at(3) as usize;
    write("entry", &[SEALED], &ENTRIES[at..at + LAYOUT.entry_bytes()]);
    write("manifest", &[], MANIFEST.as_bytes());
    write("store", &[SEALED | DAMAGED], ENTRIES);
}

#[test]
fn the_entries_of_the_corpus_are_read_as_they_were_written() {
    let size = LAYOUT.entry_bytes();
    let entry = |slot: u32| {
        let at = LAYOUT.entry_at(slot) as usize;
        Entry::decode(NUMBER, slot, &ENTRIES[at..at + size])
    };
    for slot in [0, 1, 3] {
        let read = entry(slot).unwrap();
        assert_eq!(read, entry_of(slot));
        assert!(read.matches(&block_of(read.key)));
    }
    assert_eq!(entry(2), None, "a slot that was forgotten");
    assert_eq!(&ENTRIES[..16], b"PKEPOCH1\x01\0\0\0\0\0\0\0");
}

#[test]
fn the_manifest_of_the_corpus_is_read_as_it_was_written() {
    let manifest = Manifest::from_text(MANIFEST).unwrap();
    assert_eq!((manifest.format, FORMAT), (1, 1));
    assert_eq!((manifest.store, manifest.block_bytes, manifest.entry_bytes), (NUMBER, 600, 192));
    assert_eq!(manifest.fingerprint["model"], "some/model@main");
    assert_eq!((manifest.seed, manifest.secret), ("0f".repeat(32), "a5".repeat(32)));
}

#[test]
fn what_the_fuzzers_kept_is_read_as_it_has_to_be() {
    type Check = fn(&[u8]);
    let checks =
        [("entry", checks::entry as Check), ("manifest", checks::manifest), ("store", checks::store)];
    for (of, check) in checks {
        let inputs: Vec<PathBuf> =
            std::fs::read_dir(corpus(of)).unwrap().map(|input| input.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{of}");
        for input in inputs {
            let bytes = std::fs::read(&input).unwrap();
            let ended = std::panic::catch_unwind(|| check(&bytes));
            assert!(ended.is_ok(), "{}", input.display());
        }
    }
}

#[test]
fn an_entry_is_what_was_encoded_or_none() {
    let size = LAYOUT.entry_bytes();
    rounds(4000, |random| {
        let mut bytes = if random.chance(50) {
            let at = LAYOUT.entry_at([0, 1, 3][random.below(3)]) as usize;
            ENTRIES[at..at + size].to_vec()
        } else {
            let mut bytes = vec![0; size];
            any_entry(random).encode(NUMBER, &mut bytes);
            bytes
        };
        let whole = bytes.clone();
        (0..random.below(4)).for_each(|_| mutate(&mut bytes, random));
        let believed = (0..6).any(|slot| Entry::decode(NUMBER, slot, &bytes).is_some());
        assert!(!believed || bytes == whole, "bytes that were changed are believed");
        let how = if random.chance(50) { SEALED } else { 0 };
        checks::entry(&[&[how], bytes.as_slice()].concat());
    });
}

#[test]
fn a_text_is_a_manifest_that_comes_back_the_same_or_none() {
    rounds(2000, |random| {
        let mut bytes = MANIFEST.as_bytes().to_vec();
        (0..random.below(5)).for_each(|_| mutate(&mut bytes, random));
        checks::manifest(&bytes);
    });
}

/// A file of honest entries, of none, and of anything between.
fn any_entries(random: &mut Random) -> Vec<u8> {
    let mut entries = ENTRIES.to_vec();
    if random.chance(70) {
        entries.resize(LAYOUT.entry_at(6) as usize, 0);
        for slot in 0..6 {
            let at = LAYOUT.entry_at(slot) as usize;
            let mut entry = any_entry(random);
            if random.chance(80) {
                entry.slot = slot;
                entry.checksum = entry.checksum_of(&block_of(entry.key));
            }
            entry.encode(NUMBER, &mut entries[at..at + LAYOUT.entry_bytes()]);
        }
        let at = 512 * random.below(2);
        entries[at..at + 24].copy_from_slice(&epoch_record(random.next() % 3));
    }
    if random.chance(50) {
        mutate(&mut entries, random);
    }
    entries
}

#[test]
fn a_store_opens_on_any_files_and_gives_no_wrong_byte() {
    rounds(300, |random| {
        let how = random.next() as u8 & (DAMAGED | 0x3F);
        checks::store(&[&[how], any_entries(random).as_slice()].concat());
    });
}
