//! What is seen of a store that nobody opens: it is sound, or each kind of damage.

mod scene;

use disk_store::directory::{DATA, Directory, ENTRIES, Holder};
use disk_store::inspect::{Inspection, Report, Unreadable};
use disk_store::manifest::{Manifest, Mismatch};
use scene::{Kind, NUMBER, Scene, reset};
use std::path::Path;

const MANIFEST: &str = "manifest.json";
const BLOCK_BYTES: usize = 1000;

/// A closed store of ten slots with blocks in the first five, of which the last was written twice, and a sixth that a
/// reset has forgotten.
fn scene() -> Scene {
    let scene = Scene::new(Kind::Workers, BLOCK_BYTES, 10);
    let manifest = Manifest {
        format: 1,
        store: NUMBER,
        fingerprint: [("model".into(), "m".into())].into(),
        seed: "ab".repeat(32),
        secret: "cd".repeat(32),
        block_bytes: BLOCK_BYTES as u64,
        entry_bytes: scene.layout().entry_bytes() as u64,
    };
    Directory::open(&scene.path())
        .unwrap()
        .found(&manifest.fingerprint, None, || Ok(manifest.clone()))
        .unwrap();
    let store = scene.open();
    scene.write(&store, 5, 5).unwrap();
    store.store.wait(std::time::Duration::from_secs(10));
    assert!(store.store.flush(std::time::Duration::from_secs(10)));
    reset(&store.store).unwrap();
    (0..5).for_each(|slot| scene.write(&store, slot, u64::from(slot)).unwrap());
    drop(store);
    scene
}

fn inspect(path: &Path, deep: bool) -> Report {
    let mut inspection = Inspection::open(path, deep).unwrap();
    while inspection.left() > 0 {
        inspection.check(2);
    }
    inspection.finish().unwrap()
}

/// What is found after `harm` has been done to the bytes of a file.
fn after(name: &str, harm: impl FnOnce(&mut Vec<u8>)) -> Report {
    let scene = scene();
    let path = scene.path().join(name);
    let mut bytes = std::fs::read(&path).unwrap();
    harm(&mut bytes);
    std::fs::write(path, bytes).unwrap();
    inspect(&scene.path(), true)
}

fn counts(report: &Report) -> (u64, u64, u64, u64) {
    (report.blocks, report.damaged_blocks, report.damaged_entries, report.old_entries)
}

#[test]
fn a_sound_store_is_described() {
    let scene = scene();
    std::fs::write(scene.path().join("notes.txt"), "mine").unwrap();
    let report = inspect(&scene.path(), true);
    assert!(report.is_sound(), "{:?}", report.problems);
    assert_eq!(counts(&report), (5, 0, 0, 1));
    assert_eq!((report.slots, report.epoch, report.checked_blocks, report.holder), (10, 1, 5, None));
    assert_eq!(report.files, ["data", "entries", "lock", "manifest.json"]);
    assert_eq!(report.foreign, ["notes.txt"]);
    assert_eq!(report.manifest.unwrap().fingerprint["model"], "m");
    assert!(report.disk_bytes > 0 && report.free_bytes > 0);
}

#[test]
fn blocks_are_read_only_where_that_is_asked_for() {
    let report = inspect(&scene().path(), false);
    assert_eq!((report.blocks, report.checked_blocks), (5, 0));
}

#[test]
fn a_store_without_a_block_is_sound() {
    let scene = Scene::new(Kind::Workers, BLOCK_BYTES, 10);
    let full = self::scene();
    std::fs::create_dir(scene.path()).unwrap();
    std::fs::copy(full.path().join(MANIFEST), scene.path().join(MANIFEST)).unwrap();
    assert!(inspect(&scene.path(), true).is_sound(), "only its manifest");
    drop(scene.open());
    let report = inspect(&scene.path(), true);
    assert!(report.is_sound(), "{:?}", report.problems);
    assert_eq!(counts(&report), (0, 0, 0, 0));
}

#[test]
fn a_flipped_byte_of_a_block_is_found_unless_nobody_will_read_it() {
    let report = after(DATA, |data| data[4096 + 999] ^= 1);
    assert_eq!(counts(&report), (5, 1, 0, 1));
    assert!(!report.is_sound());
    let report = after(DATA, |data| data[5 * 4096] ^= 1);
    assert!(report.is_sound(), "the block that was forgotten");
}

#[test]
fn every_flipped_byte_of_an_entry_is_found() {
    let scene = scene();
    let path = scene.path().join(ENTRIES);
    let whole = std::fs::read(&path).unwrap();
    let size = scene.layout().entry_bytes();
    for at in 0..size {
        let mut bytes = whole.clone();
        bytes[4096 + 2 * size + at] ^= 0x40;
        std::fs::write(&path, bytes).unwrap();
        let report = inspect(&scene.path(), false);
        assert_eq!(counts(&report), (4, 0, 1, 1), "byte {at}");
        assert!(!report.is_sound());
    }
}

#[test]
fn a_flipped_byte_of_the_header_is_found_and_what_it_means() {
    let report = after(ENTRIES, |entries| entries[8] ^= 1); // the record of epoch 0
    assert!(!report.is_sound());
    let report = after(ENTRIES, |entries| {
        entries[8] ^= 1;
        entries[520] ^= 1;
    });
    assert_eq!(report.problems, ["entries: its header is damaged: all blocks are forgotten"]);
    assert_eq!(counts(&report), (0, 0, 0, 6));
}

#[test]
fn a_flipped_byte_of_the_manifest_is_found() {
    let report = after(MANIFEST, |manifest| {
        let at = manifest.windows(3).position(|text| text == b"\"m\"").unwrap();
        manifest[at + 1] = b'n'; // another model
    });
    assert_eq!(report.problems, ["manifest.json is damaged: its checksum is another"]);
    assert!(report.manifest.is_none());
    let report = after(MANIFEST, |manifest| manifest[0] ^= 1);
    assert!(report.problems[0].starts_with("manifest.json is damaged: "), "{:?}", report.problems);
}

#[test]
fn files_that_are_cut_off_are_found() {
    let size = scene().layout().entry_bytes();
    let report = after(DATA, |data| data.truncate(3 * 4096 + 999));
    assert_eq!(counts(&report), (5, 2, 0, 1));
    let report = after(ENTRIES, |entries| entries.truncate(4096 + 2 * size + 1));
    assert_eq!((report.blocks, &report.problems[..]), (2, &["entries is cut off".to_owned()][..]));
    let report = after(ENTRIES, |entries| entries.truncate(4096 + 2 * size));
    assert_eq!(report.problems, ["entries is cut off"], "the blocks say so");
    let report = after(ENTRIES, |entries| entries.truncate(600));
    assert!(!report.is_sound());
}

#[test]
fn files_that_are_missing_are_named() {
    for (name, problem) in [
        (DATA, "data is missing"),
        (ENTRIES, "entries is missing: nobody knows what the blocks are"),
        (MANIFEST, "manifest.json is missing"),
    ] {
        let scene = scene();
        std::fs::remove_file(scene.path().join(name)).unwrap();
        assert_eq!(inspect(&scene.path(), true).problems, [problem]);
    }
}

#[test]
fn what_is_no_store_or_another_version_s_is_told_apart() {
    let scene = scene();
    std::fs::write(scene.path().join(MANIFEST), r#"{"format": 7, "other": 1}"#).unwrap();
    let refused = Inspection::open(&scene.path(), true).err().unwrap();
    assert!(matches!(refused, Unreadable::Format(Mismatch::Format { found: 7 })), "{refused}");
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(Inspection::open(empty.path(), true), Err(Unreadable::NoStore)));
    assert!(matches!(Inspection::open(&empty.path().join("gone"), true), Err(Unreadable::Io(_))));
}

#[test]
fn a_store_that_is_open_is_looked_into_and_stays_locked() {
    let scene = scene();
    let store = scene.open();
    let report = inspect(&scene.path(), true);
    assert_eq!(report.holder, Some(Holder { process: Some(std::process::id()) }));
    assert_eq!(counts(&report), (5, 0, 0, 1));
    // A process of its own would get a lock that was lost here.
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_child_that_finds_the_store_in_use", "--ignored"])
        .env("STORE", scene.path())
        .status()
        .unwrap();
    assert!(status.success());
    drop(store);
    assert_eq!(inspect(&scene.path(), true).holder, None);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn a_child_that_finds_the_store_in_use() {
    let path = std::env::var_os("STORE").unwrap();
    let holder = inspect(Path::new(&path), true).holder.unwrap();
    assert_eq!(holder.process, Some(std::os::unix::process::parent_id()));
    assert!(Directory::open(Path::new(&path)).is_err());
}

#[test]
fn looking_changes_nothing() {
    let scene = scene();
    let files = || -> Vec<_> {
        let entries = std::fs::read_dir(scene.path()).unwrap().map(Result::unwrap);
        let mut all: Vec<_> = entries
            .map(|entry| {
                let stat = entry.metadata().unwrap();
                (entry.path(), std::fs::read(entry.path()).unwrap(), stat.modified().unwrap())
            })
            .collect();
        all.sort();
        all
    };
    let before = files();
    inspect(&scene.path(), true);
    assert!(before == files());
}
