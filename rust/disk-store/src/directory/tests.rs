use super::*;
use crate::manifest::FORMAT;
use crate::store::{Files, Layout};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

/// Names the directory that a process of its own is to lock.
const TO_LOCK: &str = "DISK_STORE_TEST_LOCKS";

fn place_of_store() -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("deep/store");
    (parent, path)
}

fn manifest() -> Manifest {
    let fingerprint =
        [("model", "m"), ("dtype", "bfloat16"), ("page_size", "16"), ("groups", "1"), ("shards", "2")];
    Manifest {
        format: FORMAT,
        store: 77,
        fingerprint: fingerprint.map(|(name, value)| (name.into(), value.into())).into(),
        seed: "ab".repeat(32),
        secret: "cd".repeat(32),
        block_bytes: 4096,
        entry_bytes: 192,
    }
}

fn found(directory: &Directory) -> Result<Manifest, OpenError> {
    directory.found(&manifest().fingerprint, None, || Ok(manifest()))
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A process that locks a directory, and has locked it when this returns.
fn locker(path: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "directory::tests::a_process_of_its_own_locks_what_it_is_told_to", "--nocapture"])
        .env(TO_LOCK, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = String::new();
    let mut output = child.stdout.take().unwrap();
    while !told.contains("LOCKED") {
        let mut bytes = [0; 256];
        let count = output.read(&mut bytes).unwrap();
        assert_ne!(count, 0, "the process has ended: {told}");
        told.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
    child
}

/// The same, where it cannot be locked.
fn run_locker(path: &Path) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "directory::tests::a_process_of_its_own_locks_what_it_is_told_to"])
        .env(TO_LOCK, path)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

#[test]
fn a_process_of_its_own_locks_what_it_is_told_to() {
    let Some(path) = std::env::var_os(TO_LOCK) else { return }; // only where another test has started it
    let _directory = Directory::open(Path::new(&path)).unwrap();
    println!("LOCKED");
    _ = std::io::stdin().read(&mut [0]); // until it is killed, or nobody is there any more
}

#[test]
fn one_store_at_a_time_has_a_directory_open_in_a_process() {
    let (_parent, path) = place_of_store();
    let first = Directory::open(&path).unwrap();
    for _ in 0..2 {
        match Directory::open(&path) {
            Err(OpenError::InUse { process, .. }) => assert_eq!(process, Some(std::process::id())),
            other => panic!("{:?}", other.err()),
        }
    }
    drop(first);
    drop(Directory::open(&path).unwrap());
}

#[test]
fn a_refused_try_does_not_unlock_the_directory_for_other_processes() {
    let (_parent, path) = place_of_store();
    let _first = Directory::open(&path).unwrap();
    assert!(Directory::open(&path).is_err());
    let output = run_locker(&path);
    assert!(!output.status.success());
    let told =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(told.contains(&format!("process: Some({})", std::process::id())), "{told}");
}

#[test]
fn a_second_process_is_told_who_has_the_directory_and_gets_it_when_that_one_was_killed() {
    let (_parent, path) = place_of_store();
    let mut child = locker(&path);
    let told = Directory::open(&path).err().unwrap().to_string();
    assert_eq!(told, format!("{}: is in use by process {}; one store at a time", path.display(), child.id()));
    child.kill().unwrap(); // with the signal that cannot be handled
    child.wait().unwrap();
    drop(Directory::open(&path).unwrap());
}

#[test]
fn a_directory_is_its_owners_and_so_is_each_file_also_one_that_was_not() {
    let (_parent, path) = place_of_store();
    drop(Directory::open(&path).unwrap());
    std::fs::set_permissions(path.join(LOCK), PermissionsExt::from_mode(0o664)).unwrap();
    let directory = Directory::open(&path).unwrap();
    found(&directory).unwrap();
    for name in [DATA, ENTRIES] {
        directory.file(name, false).unwrap();
    }
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    assert_eq!(names(&path), [DATA, ENTRIES, LOCK, MANIFEST]);
    for name in names(&path) {
        assert_eq!(mode(&path.join(&name)), 0o600, "{name}");
    }
}

#[test]
fn a_private_store_leaves_no_name() {
    let parent = tempfile::tempdir().unwrap();
    let layout = Layout { block_bytes: 100, content_bytes: 0, slots: 2 };
    for _ in 0..2 {
        let files = Files::open(Directory::private(parent.path()), &layout, true).unwrap();
        files.data.write(b"bytes", 0).unwrap();
        let mut bytes = [0; 5];
        files.data.read(&mut bytes, 0).unwrap();
        assert_eq!((&bytes, names(parent.path()).len()), (b"bytes", 0));
    }
}

#[test]
fn a_manifest_that_was_written_is_found_again() {
    let (_parent, path) = place_of_store();
    for _ in 0..2 {
        let directory = Directory::open(&path).unwrap();
        assert_eq!(found(&directory).unwrap(), manifest());
        let seed = "ab".repeat(32);
        assert!(directory.found(&manifest().fingerprint, Some(&seed), || Ok(other_secret(&seed))).is_ok());
    }
}

#[test]
fn half_a_manifest_that_a_killed_process_left_is_removed_and_the_whole_one_holds() {
    let (_parent, path) = place_of_store();
    found(&Directory::open(&path).unwrap()).unwrap();
    std::fs::write(path.join(NEW_MANIFEST), "{\"format\": 1, ").unwrap();
    assert_eq!(found(&Directory::open(&path).unwrap()).unwrap(), manifest());
    assert_eq!(names(&path), [LOCK, MANIFEST]);
}

/// As many bytes, but other secrets.
fn other_secret(seed: &str) -> Manifest {
    Manifest { store: 78, secret: seed.into(), ..manifest() }
}

#[test]
fn a_store_of_anything_else_is_refused_by_name_and_stays_as_it_is() {
    let (_parent, path) = place_of_store();
    let directory = Directory::open(&path).unwrap();
    found(&directory).unwrap();
    let text = std::fs::read(path.join(MANIFEST)).unwrap();
    let refused = |fingerprint: &Fingerprint, seed: Option<&str>, fresh: Manifest| {
        let refused = directory.found(fingerprint, seed, || Ok(fresh)).unwrap_err();
        assert!(matches!(refused, OpenError::Mismatch { .. }), "{refused}");
        assert_eq!(std::fs::read(path.join(MANIFEST)).unwrap(), text);
        refused.to_string()
    };
    for name in manifest().fingerprint.keys() {
        let mut changed = manifest().fingerprint;
        changed.insert(name.clone(), "another".into());
        assert!(refused(&changed, None, manifest()).contains(&format!("{name} is ")));
        changed.remove(name);
        assert!(refused(&changed, None, manifest()).contains(&format!("{name} is ")));
    }
    let mut more = manifest().fingerprint;
    more.insert("rank".into(), "1".into());
    assert!(refused(&more, None, manifest()).contains("rank is nothing there, 1 here"));
    let own = manifest().fingerprint;
    assert!(refused(&own, Some(&"ac".repeat(32)), manifest()).contains("another seed"));
    let longer = Manifest { block_bytes: 8192, ..manifest() };
    assert!(refused(&own, None, longer).contains("block_bytes is 4096 there, 8192 here"));
    let longer = Manifest { entry_bytes: 256, ..manifest() };
    assert!(refused(&own, None, longer).contains("entry_bytes is 192 there, 256 here"));
}

#[test]
fn a_manifest_that_cannot_be_read_is_refused_and_may_be_wiped() {
    let long = vec![b' '; 2 << 20];
    let harms: [&[u8]; 5] = [b"", b"{", b"\xff\xfe", b"{\"format\": 2}", &long];
    for harm in harms {
        let (_parent, path) = place_of_store();
        let directory = Directory::open(&path).unwrap();
        found(&directory).unwrap();
        std::fs::write(path.join(MANIFEST), harm).unwrap();
        let refused = found(&directory).unwrap_err();
        assert!(matches!(refused, OpenError::Mismatch { .. }), "{refused}");
        directory.wipe().unwrap();
        assert_eq!(names(&path), [""; 0]);
    }
}

#[test]
fn a_wipe_takes_our_files_and_leaves_others_and_the_directory() {
    let (_parent, path) = place_of_store();
    let directory = Directory::open(&path).unwrap();
    found(&directory).unwrap();
    directory.file(DATA, false).unwrap();
    directory.file(ENTRIES, false).unwrap();
    std::fs::write(path.join("notes.txt"), "mine").unwrap();
    directory.wipe().unwrap();
    assert_eq!(names(&path), ["notes.txt"]);
    let directory = Directory::open(&path).unwrap();
    assert!(directory.manifest().unwrap().is_none());
    found(&directory).unwrap();
}

#[test]
fn files_of_our_names_that_no_store_has_made_are_left_alone() {
    for name in [DATA, ENTRIES] {
        let (_parent, path) = place_of_store();
        let directory = Directory::open(&path).unwrap();
        std::fs::write(path.join(name), "mine").unwrap();
        let refused = found(&directory).unwrap_err();
        assert!(matches!(refused, OpenError::Foreign { name: told, .. } if told == name), "{refused}");
        assert!(matches!(directory.wipe(), Err(OpenError::Foreign { .. })));
        assert_eq!(std::fs::read(path.join(name)).unwrap(), b"mine");
    }
    let (_parent, path) = place_of_store();
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join(LOCK), "my notes on locks").unwrap();
    std::fs::set_permissions(path.join(LOCK), PermissionsExt::from_mode(0o644)).unwrap();
    assert!(matches!(Directory::open(&path), Err(OpenError::Foreign { name: LOCK, .. })));
    assert_eq!(std::fs::read(path.join(LOCK)).unwrap(), b"my notes on locks");
    assert_eq!(std::fs::metadata(path.join(LOCK)).unwrap().mode() & 0o777, 0o644);
}

/// Puts something in place of a file.
type Harm<'a> = &'a dyn Fn(&Path);

#[test]
fn links_directories_and_pipes_in_place_of_files_are_refused() {
    let (parent, path) = place_of_store();
    let target = parent.path().join("target");
    std::fs::write(&target, "mine").unwrap();
    let harms: [(&str, Harm<'_>); 3] = [
        ("a link", &|at| symlink(&target, at).unwrap()),
        ("a directory", &|at| std::fs::create_dir(at).unwrap()),
        ("a pipe", &|at| {
            let owners = Mode::RUSR | Mode::WUSR;
            rustix::fs::mkfifoat(rustix::fs::CWD, at, owners).unwrap();
        }),
    ];
    for (what, harm) in harms {
        for name in [LOCK, MANIFEST, DATA, ENTRIES] {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path).unwrap();
            harm(&path.join(name));
            let opened = Directory::open(&path).and_then(|directory| match name {
                LOCK => Ok(()),
                MANIFEST => found(&directory).map(|_| ()),
                _ => directory.file(name, true).map(|_| ()),
            });
            assert!(matches!(opened, Err(OpenError::Io { .. })), "{what} for {name}: {opened:?}");
            std::fs::remove_dir_all(&path).unwrap();
        }
    }
    assert_eq!(std::fs::read(target).unwrap(), b"mine");
}

#[test]
fn a_directory_that_was_wiped_is_locked_by_whoever_opens_it_next() {
    let (_parent, path) = place_of_store();
    Directory::open(&path).unwrap().wipe().unwrap();
    let _second = Directory::open(&path).unwrap();
    assert!(!run_locker(&path).status.success());
}

#[test]
fn a_store_that_does_not_fit_is_refused_with_the_numbers() {
    let (_parent, path) = place_of_store();
    let directory = Directory::open(&path).unwrap();
    let free = free_bytes(File::open(&path).unwrap()).unwrap();
    directory.check_space(free / 2).unwrap();
    match directory.check_space(u64::MAX) {
        Err(OpenError::NoSpace { wanted, free, .. }) => assert!(wanted == u64::MAX && free < u64::MAX),
        other => panic!("{other:?}"),
    }
}

#[test]
fn where_no_directory_can_be_made_the_system_says_why() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(matches!(Directory::open(&file), Err(OpenError::Io { .. })));
    assert!(matches!(Directory::open(&file.join("below")), Err(OpenError::Io { .. })));
    let nowhere = Directory::private(&parent.path().join("nowhere"));
    assert!(matches!(nowhere.file(DATA, false), Err(OpenError::Io { .. })));
}
