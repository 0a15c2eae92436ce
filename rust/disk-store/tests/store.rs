//! Blocks go to disk and come back, from the same store and from one that is opened again.

mod scene;

use disk_store::directory::{DATA, ENTRIES, OURS};
use disk_store::entry::{Entry, Origin};
use disk_store::store::{Block, Failure, Sync};
use scene::{Kind, NUMBER, Scene, at, block, payload, reset};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

const KINDS: [Kind; 3] = [Kind::Ring, Kind::Workers, Kind::Buffered];

#[test]
fn blocks_come_back_byte_for_byte_also_after_the_store_was_closed() {
    // Less than a sector, sectors that are no pages, what direct I/O takes, and one byte more; in memory that is
    // aligned, and that is not; and where what follows it is another's.
    for (kind, snug) in KINDS.iter().flat_map(|&kind| [(kind, false), (kind, true)]) {
        for (block_bytes, shift) in [(100, 0), (1536, 0), (4608, 8), (8192, 0), (8192, 8), (8193, 0)] {
            let mut scene = Scene::new(kind, block_bytes, 8);
            (scene.shift, scene.snug) = (shift, snug);
            let store = scene.open();
            for number in 0..6 {
                assert_eq!(scene.write(&store, 5 - number, u64::from(number)), Ok(()));
            }
            for number in 0..6 {
                assert_eq!(
                    scene.read(&store, 5 - number, u64::from(number)).unwrap(),
                    payload(u64::from(number), block_bytes)
                );
            }
            assert!(store.store.flush(Duration::from_secs(10)));
            assert_eq!(at(&store.store.counters().durable), 6);
            drop(store);
            let again = scene.open();
            let found: Vec<(u32, u64)> =
                again.found.iter().map(|entry| (entry.slot, entry.key.hash)).collect();
            assert_eq!(
                found,
                [(5, 0), (4, 1), (3, 2), (2, 3), (1, 4), (0, 5)],
                "in the order of their writing"
            );
            assert_eq!(again.found[2].origin.content, b"from 2");
            for number in 0..6 {
                assert_eq!(
                    scene.read(&again, 5 - number, u64::from(number)).unwrap(),
                    payload(u64::from(number), block_bytes)
                );
            }
        }
    }
}

#[test]
fn what_a_reset_forgot_does_not_come_back() {
    for kind in KINDS {
        let scene = Scene::new(kind, 4096, 4);
        let store = scene.open();
        scene.write(&store, 0, 10).unwrap();
        assert!(store.store.flush(Duration::from_secs(10)));
        reset(&store.store).unwrap();
        scene.write(&store, 1, 11).unwrap();
        drop(store);
        let again = scene.open();
        assert_eq!(again.found.iter().map(|entry| entry.key.hash).collect::<Vec<_>>(), [11]);
    }
}

#[test]
fn of_two_entries_of_a_block_the_newer_holds() {
    let scene = Scene::new(Kind::Workers, 512, 4);
    let store = scene.open();
    for slot in [0, 2, 1] {
        scene.write(&store, slot, 7).unwrap();
    }
    drop(store);
    let again = scene.open();
    assert_eq!(again.found.iter().map(|entry| entry.slot).collect::<Vec<_>>(), [1]);
}

/// The blocks whose entries are in the file, in the order of their slots.
fn entries_of(scene: &Scene) -> Vec<u64> {
    let bytes = std::fs::read(scene.path().join(ENTRIES)).unwrap();
    let entry = |slot: u32| {
        let at = scene.layout().entry_at(slot) as usize;
        Entry::decode(NUMBER, slot, &bytes[at..at + scene.layout().entry_bytes()])
    };
    (0..scene.slots).filter_map(entry).map(|entry| entry.key.hash).collect()
}

#[test]
fn a_block_that_comes_and_goes_takes_no_more_than_its_slot_and_leaves_no_entry() {
    for kind in KINDS {
        let mut scene = Scene::new(kind, 600, 4);
        scene.sync = Sync::None;
        let store = scene.open();
        let flush = || assert!(store.store.flush(Duration::from_secs(10)));
        for (slot, number) in [(0, 1), (0, 1), (1, 2)] {
            scene.write(&store, slot, number).unwrap(); // block 1 twice
            flush();
        }
        for _ in 0..100 {
            scene.write(&store, 2, 3).unwrap();
            flush();
            assert_eq!(entries_of(&scene), [1, 2, 3]);
            store.store.forget(2);
            flush();
            assert_eq!(entries_of(&scene), [1, 2]);
            let bytes = |name| std::fs::metadata(scene.path().join(name)).unwrap().len();
            assert_eq!(bytes(DATA) + bytes(ENTRIES), scene.layout().bytes());
        }
        assert_eq!(at(&store.store.counters().undurable), 0);
        drop(store);
        assert_eq!(scene.open().found.iter().map(|entry| entry.key.hash).collect::<Vec<_>>(), [1, 2]);
    }
}

#[test]
fn files_that_have_grown_are_cut_and_lose_nothing() {
    let scene = Scene::new(Kind::Workers, 600, 3);
    let store = scene.open();
    (0..3).for_each(|number| scene.write(&store, number, u64::from(number)).unwrap());
    drop(store);
    for more in [1, 512, 20_000] {
        for name in [DATA, ENTRIES] {
            let path = scene.path().join(name);
            let mut bytes = std::fs::read(&path).unwrap();
            bytes.extend(vec![0xEE; more]);
            std::fs::write(path, bytes).unwrap();
        }
        let store = scene.open();
        assert_eq!(store.found.len(), 3);
        for slot in 0..3 {
            assert_eq!(scene.read(&store, slot, u64::from(slot)).unwrap(), payload(u64::from(slot), 600));
        }
        let bytes = |name| std::fs::metadata(scene.path().join(name)).unwrap().len();
        assert_eq!(bytes(DATA) + bytes(ENTRIES), scene.layout().bytes());
    }
}

#[test]
fn a_slot_that_holds_something_else_is_a_miss_that_is_counted_and_forgotten() {
    for kind in KINDS {
        let scene = Scene::new(kind, 4096, 4);
        let store = scene.open();
        scene.write(&store, 0, 1).unwrap();
        assert_eq!(scene.read(&store, 0, 2), Err(Failure::Damaged), "another block");
        assert_eq!(scene.read(&store, 0, 1), Err(Failure::Damaged), "it was forgotten");
        assert_eq!(scene.read(&store, 3, 1), Err(Failure::Damaged), "a slot that was never written");
        assert_eq!(at(&store.store.counters().damaged), 3);
        scene.write(&store, 0, 1).unwrap();
        assert_eq!(scene.read(&store, 0, 1).unwrap(), payload(1, 4096));
    }
}

#[test]
fn no_changed_byte_of_a_block_is_ever_read() {
    const BLOCK: usize = 9000;
    const SLOT: usize = 3 * 4096;
    let scene = Scene::new(Kind::Ring, BLOCK, 3);
    let store = scene.open();
    (0..3).for_each(|number| scene.write(&store, number, u64::from(number)).unwrap());
    drop(store);
    let path = scene.path().join(DATA);
    let whole = std::fs::read(&path).unwrap();
    let mut harms: Vec<Vec<u8>> = (0..BLOCK)
        .step_by(333)
        .map(|at| {
            let mut it = whole.clone();
            it[SLOT + at] ^= 1 << (at % 8);
            it
        })
        .collect();
    harms.push(whole[..SLOT + BLOCK - 1].to_vec()); // cut off
    let page = SLOT + 4096;
    harms.push([&whole[..page], &[0; 4096], &whole[page + 4096..]].concat()); // a page of zeros
    harms.push([&whole[..SLOT], &whole[2 * SLOT..], &whole[SLOT..2 * SLOT]].concat()); // two have changed places
    for harm in harms {
        std::fs::write(&path, &harm).unwrap();
        let again = scene.open();
        assert_eq!(again.found.len(), 3, "the entries are whole");
        assert_eq!(scene.read(&again, 1, 1), Err(Failure::Damaged));
        assert_eq!(scene.read(&again, 0, 0).unwrap(), payload(0, BLOCK));
        drop(again);
        assert_eq!(scene.open().found.len(), 2, "it is not found again");
        // Back as it was.
        std::fs::write(&path, &whole).unwrap();
        let store = scene.open();
        (0..3).for_each(|number| scene.write(&store, number, u64::from(number)).unwrap());
    }
}

#[test]
fn no_changed_byte_of_an_entry_is_ever_believed() {
    let scene = Scene::new(Kind::Ring, 64, 3);
    let store = scene.open();
    (0..3).for_each(|number| scene.write(&store, number, u64::from(number)).unwrap());
    drop(store);
    let path = scene.path().join(ENTRIES);
    let whole = std::fs::read(&path).unwrap();
    let size = scene.layout().entry_bytes();
    let entry = |slot: usize| 4096 + slot * size..4096 + (slot + 1) * size;
    let mut harms: Vec<Vec<u8>> = entry(1)
        .map(|at| {
            let mut it = whole.clone();
            it[at] ^= 0x10;
            it
        })
        .collect();
    harms.push([&whole[..entry(1).start], &vec![0; size][..], &whole[entry(2)]].concat());
    harms.push([&whole[..entry(1).start], &whole[entry(0)], &whole[entry(2)]].concat());
    for harm in harms {
        std::fs::write(&path, harm).unwrap();
        let found: Vec<u64> = scene.open().found.iter().map(|entry| entry.key.hash).collect();
        assert_eq!(found, [0, 2]);
    }
    std::fs::write(&path, &whole[..entry(1).end - 1]).unwrap();
    assert_eq!(scene.open().found.len(), 1);
    std::fs::write(&path, &whole[..100]).unwrap();
    assert_eq!(scene.open().found.len(), 0);
}

#[test]
fn without_a_header_that_is_whole_nothing_is_believed() {
    let scene = Scene::new(Kind::Workers, 64, 3);
    let store = scene.open();
    scene.write(&store, 0, 0).unwrap();
    reset(&store.store).unwrap();
    scene.write(&store, 1, 1).unwrap();
    drop(store);
    let path = scene.path().join(ENTRIES);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[..4096].fill(0);
    std::fs::write(&path, bytes).unwrap();
    let store = scene.open();
    assert_eq!(store.found.len(), 0);
    scene.write(&store, 2, 2).unwrap();
    drop(store);
    assert_eq!(scene.open().found.iter().map(|entry| entry.key.hash).collect::<Vec<_>>(), [2]);
}

#[test]
fn with_fewer_slots_the_newest_blocks_stay() {
    for kind in KINDS {
        let mut scene = Scene::new(kind, 300, 10);
        let store = scene.open();
        for slot in 0..10 {
            scene.write(&store, slot, u64::from(slot)).unwrap();
        }
        drop(store);
        scene.slots = 5;
        let store = scene.open();
        let found: Vec<u64> = store.found.iter().map(|entry| entry.key.hash).collect();
        assert_eq!(found, [5, 6, 7, 8, 9]);
        for entry in &store.found {
            assert_eq!(scene.read(&store, entry.slot, entry.key.hash).unwrap(), payload(entry.key.hash, 300));
        }
        drop(store);
        let bytes = |name| std::fs::metadata(scene.path().join(name)).unwrap().len();
        assert!(bytes(DATA) + bytes(ENTRIES) <= scene.layout().bytes());
        scene.slots = 20;
        assert_eq!(scene.open().found.len(), 5);
    }
}

#[test]
fn files_are_for_their_owner_and_others_are_left_alone() {
    let scene = Scene::new(Kind::Ring, 64, 2);
    let foreign = scene.path().join("notes.txt");
    std::fs::create_dir_all(scene.path()).unwrap();
    std::fs::write(&foreign, "mine").unwrap();
    drop(scene.open());
    for name in OURS {
        if let Ok(found) = std::fs::metadata(scene.path().join(name)) {
            assert_eq!(found.permissions().mode() & 0o777, 0o600, "{name}");
        }
    }
    assert_eq!(std::fs::read_to_string(foreign).unwrap(), "mine");
}

#[test]
fn after_a_stop_what_is_asked_is_given_up() {
    for kind in KINDS {
        let scene = Scene::new(kind, 64, 2);
        let store = scene.open();
        scene.write(&store, 0, 0).unwrap();
        store.store.stop(Duration::from_secs(5));
        store.store.stop(Duration::from_secs(5));
        assert_eq!(scene.write(&store, 1, 1), Err(Failure::GivenUp));
        assert_eq!(scene.read(&store, 0, 0), Err(Failure::GivenUp));
    }
}

#[test]
fn a_write_that_always_syncs_has_ended_when_it_is_durable() {
    for (sync, durable) in [(Sync::Always, 1), (Sync::Batch, 0)] {
        let mut scene = Scene::new(Kind::Ring, 64, 2);
        scene.sync = sync;
        let store = scene.open();
        scene.write(&store, 0, 0).unwrap();
        assert_eq!(at(&store.store.counters().durable), durable);
    }
}

#[test]
fn blocks_are_found_in_the_order_of_their_last_use_and_what_is_deeper_before_what_is_above_it() {
    let scene = Scene::new(Kind::Workers, 64, 16);
    let store = scene.open();
    // Two prefixes, written from their heads on: 1, 2, 3 and 11, 12; then 2 gets another successor, 4.
    let written = [(1, 0, 0), (2, 1, 1), (3, 2, 2), (11, 0, 0), (12, 11, 1), (4, 2, 2)];
    for (slot, (number, parent, position)) in written.into_iter().enumerate() {
        let origin = Origin { parent, position, content: Vec::new() };
        let block = Block { origin, ..block(slot as u32, number) };
        scene.write_block(&store, number, block).unwrap();
    }
    drop(store);
    let found: Vec<u64> = scene.open().found.iter().map(|entry| entry.key.hash).collect();
    // 3 was used third, 12 and with it 11 fifth, 4 and with it 2 and 1 last.
    assert_eq!(found, [3, 12, 11, 4, 2, 1]);
}
