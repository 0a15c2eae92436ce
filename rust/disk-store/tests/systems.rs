//! The file systems that there are, and one that is full. Some have to be mounted first, which needs root.

mod scene;

use disk_store::directory::Directory;
use disk_store::store::{Failure, Files};
use scene::{Kind, Scene, at, key, payload};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const KINDS: [Kind; 3] = [Kind::Ring, Kind::Workers, Kind::Buffered];

/// Blocks that are written are read, by the store that wrote them and by one that is opened again.
fn holds_blocks(place: &Path) {
    for kind in KINDS {
        // Odd, sectors that are no pages, and pages.
        for block_bytes in [701, 1536, 4608, 387 * 512, 64 << 10] {
            let scene = Scene::within(place, kind, block_bytes, 12);
            let store = scene.open();
            (0..12).for_each(|slot| assert_eq!(scene.write(&store, slot, u64::from(slot)), Ok(())));
            assert!(store.store.flush(Duration::from_secs(20)));
            assert_eq!(at(&store.store.counters().durable), 12);
            (0..12).for_each(|slot| assert_eq!(scene.read(&store, slot, 50), Err(Failure::Damaged)));
            (0..6).for_each(|slot| assert_eq!(scene.write(&store, slot, u64::from(slot)), Ok(())));
            drop(store);
            let again = scene.open();
            assert_eq!(
                again.found.iter().map(|entry| entry.key).collect::<Vec<_>>(),
                (0..6).map(key).collect::<Vec<_>>()
            );
            for slot in 0..6 {
                assert_eq!(
                    scene.read(&again, slot, u64::from(slot)).unwrap(),
                    payload(u64::from(slot), block_bytes)
                );
            }
        }
    }
}

/// Something that is mounted, until it is dropped.
struct Mount {
    path: PathBuf,
    _parent: TempDir,
}

impl Mount {
    /// Mounts it, or says why not: whoever is not root may not.
    fn new(arguments: &[&str], source: impl FnOnce(&Path) -> Option<PathBuf>) -> Option<Mount> {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("mounted");
        std::fs::create_dir(&path).unwrap();
        let source = source(parent.path())?;
        let mounted = Command::new("mount").args(arguments).arg(source).arg(&path).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: mount {arguments:?} is not allowed here");
            return None;
        }
        Some(Mount { path, _parent: parent })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        _ = Command::new("umount").arg("--lazy").arg(&self.path).output();
    }
}

#[test]
fn the_file_system_of_temporary_files_holds_blocks() {
    holds_blocks(&std::env::temp_dir());
}

#[test]
fn the_directory_of_the_build_holds_blocks() {
    holds_blocks(Path::new(env!("CARGO_TARGET_TMPDIR")));
}

#[test]
fn a_file_system_in_memory_holds_blocks() {
    match Path::new("/dev/shm") {
        place if place.is_dir() => holds_blocks(place),
        _ => eprintln!("skipped: there is no /dev/shm"),
    }
}

#[test]
fn xfs_holds_blocks() {
    let image = |parent: &Path| {
        let image = parent.join("image");
        std::fs::File::create(&image).unwrap().set_len(320 << 20).unwrap(); // the least that it takes
        let made = Command::new("mkfs.xfs").arg("-q").arg(&image).output();
        if !made.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: there is no mkfs.xfs");
            return None;
        }
        Some(image)
    };
    if let Some(mount) = Mount::new(&["-o", "loop"], image) {
        holds_blocks(&mount.path);
    }
}

#[test]
fn a_disk_that_is_full_drops_writes_and_takes_them_again_when_there_is_room() {
    let Some(mount) = Mount::new(&["-t", "tmpfs", "-o", "size=4m"], |_| Some("none".into())) else { return };
    for kind in KINDS {
        let scene = Scene::within(&mount.path, kind, 256 << 10, 10);
        let store = scene.open();
        let other = mount.path.join("other");
        std::fs::write(&other, vec![1; 2 << 20]).unwrap();
        // Of 4 MiB there are 2 left, less the entries: seven blocks of 256 KiB.
        let ends: Vec<bool> =
            (0..10).map(|slot| scene.write(&store, slot, u64::from(slot)).is_ok()).collect();
        assert_eq!(ends, [[true; 7].as_slice(), &[false; 3]].concat());
        assert_eq!(at(&store.store.counters().write_errors), 3);
        (0..7).for_each(|slot| {
            assert_eq!(scene.write(&store, slot, 20 + u64::from(slot)), Ok(()), "over another");
        });
        std::fs::remove_file(other).unwrap();
        (7..10).for_each(|slot| assert_eq!(scene.write(&store, slot, u64::from(slot)), Ok(())));
        assert!(store.store.flush(Duration::from_secs(20)));
        assert_eq!(at(&store.store.counters().undurable), 0, "entries have had their space all the time");
        drop(store);
        assert_eq!(scene.open().found.len(), 10);
    }
}

#[test]
fn a_store_that_does_not_fit_on_its_disk_is_refused_when_it_is_opened() {
    let Some(mount) = Mount::new(&["-t", "tmpfs", "-o", "size=4m"], |_| Some("none".into())) else { return };
    let scene = Scene::within(&mount.path, Kind::Workers, 1 << 20, 4);
    let refused = Files::open(Directory::open(&scene.path()).unwrap(), &scene.layout(), true).err().unwrap();
    let bytes = 4 * (1 << 20) + 4096 + 4 * 192; // blocks, the header, entries
    assert!(refused.to_string().contains(&format!("the store takes {bytes}")), "{refused}");
}
