//! Where a store lies: a directory that somebody named and that is locked while it is open, or files without a name.

use crate::file::{SystemFile, free_bytes, taken_bytes};
use crate::manifest::{Fingerprint, Manifest, Mismatch};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use thiserror::Error;

mod holder;
#[cfg(test)]
mod tests;

pub use holder::{Holder, holder};

const LOCK: &str = "lock";
pub(crate) const MANIFEST: &str = "manifest.json";
const NEW_MANIFEST: &str = "manifest.json.new";
/// Bytes; one that is longer is none.
const LONGEST_MANIFEST: u64 = 1 << 20;
/// The file of entries.
pub const ENTRIES: &str = "entries";
/// The file of blocks.
pub const DATA: &str = "data";
/// All files that a store has in its directory.
pub const OURS: [&str; 5] = [DATA, ENTRIES, MANIFEST, NEW_MANIFEST, LOCK];

/// Why there is no store in a directory.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Another process, or another store of this one, has it open.
    #[error("{}: is in use{}; one store at a time", path.display(), by(*process))]
    InUse {
        /// Where.
        path: PathBuf,
        /// Who.
        process: Option<u32>,
    },
    /// It is another store.
    #[error("{}: {why}; name another directory, or wipe it (pagekeeper doctor --wipe)", path.display())]
    Mismatch {
        /// Where.
        path: PathBuf,
        /// What does not agree.
        why: Mismatch,
    },
    /// A file of one of our names is there that no store has made.
    #[error("{}: has a file {name:?} that is no store's; name another directory", path.display())]
    Foreign {
        /// Where.
        path: PathBuf,
        /// Its name.
        name: &'static str,
    },
    /// There is not enough room.
    #[error("{}: the store takes {wanted} more bytes, and {free} are free", path.display())]
    NoSpace {
        /// Where.
        path: PathBuf,
        /// Bytes that it does not take yet.
        wanted: u64,
        /// Bytes left.
        free: u64,
    },
    /// The system refuses.
    #[error("{}: {error}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What it says.
        error: io::Error,
    },
}

fn by(process: Option<u32>) -> String {
    process.map_or(String::new(), |process| format!(" by process {process}"))
}

/// A directory for one store.
pub struct Directory {
    path: PathBuf,
    /// The directory itself; `None` where files have no names.
    named: Option<Named>,
}

struct Named {
    directory: OwnedFd,
    lock: Option<File>,
    /// Device and inode of the lock.
    place: (u64, u64),
}

/// Locks that this process holds, by device and inode, and its number. The system's are one for all of a process, and
/// are lost when it closes any descriptor of the file; so a file that is locked here is not opened again.
static HELD: Mutex<BTreeMap<(u64, u64), u32>> = Mutex::new(BTreeMap::new());

impl Drop for Named {
    fn drop(&mut self) {
        let mut held = HELD.lock();
        drop(self.lock.take()); // while nobody can lock it anew: that lock would be lost, too
        held.remove(&self.place);
    }
}

impl Directory {
    /// Opens the directory, and makes it (and what it lies in) if it is not there. Locks it.
    ///
    /// # Errors
    /// It is in use; its lock is no store's; the system refuses.
    pub fn open(path: &Path) -> Result<Directory, OpenError> {
        let failed = |error: io::Error| OpenError::Io { path: path.into(), error };
        let in_use = |process| OpenError::InUse { path: path.into(), process };
        make(path).map_err(failed)?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
        let mut held = HELD.lock();
        loop {
            if let Some(process) = place(&directory, LOCK).map_err(failed)?.and_then(|it| held.get(&it)) {
                return Err(in_use(Some(*process)));
            }
            let mut lock: File = open_or_make(&directory, LOCK).map_err(failed)?.into();
            // Held by process, and not inherited: a child that lives on does not keep the directory locked.
            let locked = rustix::fs::fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
            let mut text = String::new();
            let read = (&mut lock).take(32).read_to_string(&mut text);
            if read.is_err() || !text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'\n') {
                return Err(OpenError::Foreign { path: path.into(), name: LOCK });
            }
            if !locked {
                return Err(in_use(text.trim().parse().ok()));
            }
            let stat = rustix::fs::fstat(&lock).map_err(|error| failed(error.into()))?;
            let place_of_lock = (stat.st_dev, stat.st_ino);
            if place(&directory, LOCK).map_err(failed)? != Some(place_of_lock) {
                continue; // whoever held it has wiped the directory
            }
            sign(&lock).map_err(failed)?;
            held.insert(place_of_lock, std::process::id());
            let named = Named { directory, lock: Some(lock), place: place_of_lock };
            return Ok(Directory { path: path.into(), named: Some(named) });
        }
    }

    /// A place for a store that ends with its process: files in `parent` that have no name.
    pub fn private(parent: &Path) -> Directory {
        Directory { path: parent.into(), named: None }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether what is stored here survives.
    pub fn is_named(&self) -> bool {
        self.named.is_some()
    }

    /// The manifest of the store that is here, if one is.
    ///
    /// # Errors
    /// It cannot be read, or has another format.
    pub fn manifest(&self) -> Result<Option<Manifest>, OpenError> {
        let Some(named) = &self.named else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mut bytes = Vec::new();
        match rustix::fs::openat(&named.directory, MANIFEST, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(self.failed(error.into())),
            Ok(file) => {
                let file = regular(file, MANIFEST).map_err(|error| self.failed(error))?;
                let read = File::from(file).take(LONGEST_MANIFEST).read_to_end(&mut bytes);
                read.map_err(|error| self.failed(error))?
            }
        };
        let text = String::from_utf8_lossy(&bytes);
        let manifest = Manifest::from_text(&text);
        Ok(Some(manifest.map_err(|why| OpenError::Mismatch { path: self.path.clone(), why })?))
    }

    /// The manifest of the store that is here, which has to be one of what `fingerprint` says, hashed with `seed` if
    /// one is given, and to have blocks and entries as long as those of `fresh`; or `fresh` itself, written for good,
    /// where there is no store.
    ///
    /// # Errors
    /// Another store is here, or files of our names that are no store's; the system refuses.
    pub fn found(
        &self,
        fingerprint: &Fingerprint,
        seed: Option<&str>,
        fresh: impl FnOnce() -> io::Result<Manifest>,
    ) -> Result<Manifest, OpenError> {
        let fresh = fresh().map_err(|error| self.failed(error))?;
        if let Some(manifest) = self.manifest()? {
            let checked = manifest.check(fingerprint, seed).and_then(|()| manifest.check_sizes(&fresh));
            checked.map_err(|why| OpenError::Mismatch { path: self.path.clone(), why })?;
            if let Some(named) = &self.named {
                // Whoever was writing another one has ended before it was whole.
                remove(&named.directory, NEW_MANIFEST).map_err(|error| self.failed(error))?;
            }
            return Ok(manifest);
        }
        self.check_foreign()?;
        if let Some(named) = &self.named {
            named.found(&fresh).map_err(|error| self.failed(error))?;
        }
        Ok(fresh)
    }

    /// Writes another manifest of this store over its manifest, for good.
    ///
    /// # Errors
    /// The system refuses; the former one is there still.
    pub fn revise(&self, manifest: &Manifest) -> Result<(), OpenError> {
        let Some(named) = &self.named else { return Ok(()) };
        named.found(manifest).map_err(|error| self.failed(error))
    }

    /// Opens one of the store's files, and makes it if it is not there.
    ///
    /// # Errors
    /// The system refuses; the name is a link or no file.
    pub fn file(&self, name: &str, direct: bool) -> Result<SystemFile, OpenError> {
        let file = match &self.named {
            Some(named) => create(&named.directory, name),
            None => unnamed(&self.path),
        };
        Ok(SystemFile::new(file.map_err(|error| self.failed(error))?, direct))
    }

    /// Bytes that a store may have here: those it takes, and those that are free.
    ///
    /// # Errors
    /// The system refuses to say.
    pub fn room(&self) -> Result<u64, OpenError> {
        let (free, taken) = self.space()?;
        Ok(free.saturating_add(taken))
    }

    /// Returns when the names of the files will be there after a power cut.
    ///
    /// # Errors
    /// The system refuses.
    pub fn sync(&self) -> Result<(), OpenError> {
        let Some(named) = &self.named else { return Ok(()) };
        rustix::fs::fsync(&named.directory).map_err(|error| self.failed(error.into()))
    }

    /// Refuses if there is no manifest, which a store makes first and removes last, but a file for blocks or entries.
    fn check_foreign(&self) -> Result<(), OpenError> {
        let Some(named) = &self.named else { return Ok(()) };
        let is_there = |name| place(&named.directory, name).map_err(|error| self.failed(error));
        if is_there(MANIFEST)?.is_some() {
            return Ok(());
        }
        for name in [DATA, ENTRIES] {
            if is_there(name)?.is_some() {
                return Err(OpenError::Foreign { path: self.path.clone(), name });
            }
        }
        Ok(())
    }

    /// Refuses if `bytes` bytes in these files do not fit.
    ///
    /// # Errors
    /// They do not; the system refuses to say.
    pub fn check_space(&self, bytes: u64) -> Result<(), OpenError> {
        let (free, taken) = self.space()?;
        let wanted = bytes.saturating_sub(taken);
        if wanted > free {
            return Err(OpenError::NoSpace { path: self.path.clone(), wanted, free });
        }
        Ok(())
    }

    /// Bytes that are free, and those that the store takes.
    fn space(&self) -> Result<(u64, u64), OpenError> {
        let failed = |error| self.failed(error);
        let (free, taken) = match &self.named {
            Some(Named { directory, .. }) => {
                let taken =
                    [DATA, ENTRIES].iter().map(|name| taken_bytes(directory, name)).sum::<io::Result<u64>>();
                (free_bytes(directory), taken.map_err(failed)?)
            }
            None => (File::open(&self.path).and_then(free_bytes), 0),
        };
        Ok((free.map_err(failed)?, taken))
    }

    /// Removes the files of a store. The directory stays: somebody has named it.
    ///
    /// # Errors
    /// There is no store, but files of our names; the system refuses.
    pub fn wipe(self) -> Result<(), OpenError> {
        let Some(named) = &self.named else { return Ok(()) };
        self.check_foreign()?;
        for name in OURS {
            remove(&named.directory, name).map_err(|error| self.failed(error))?;
        }
        self.sync()
    }

    fn failed(&self, error: io::Error) -> OpenError {
        OpenError::Io { path: self.path.clone(), error }
    }
}

impl Named {
    /// Writes a manifest, whole or not at all.
    fn found(&self, manifest: &Manifest) -> io::Result<()> {
        let mut file: File = create(&self.directory, NEW_MANIFEST)?.into();
        file.set_len(0)?;
        file.write_all(manifest.to_text().as_bytes())?;
        file.sync_all()?;
        rustix::fs::renameat(&self.directory, NEW_MANIFEST, &self.directory, MANIFEST)?;
        Ok(rustix::fs::fsync(&self.directory)?)
    }
}

/// Says in the lock who holds it.
fn sign(mut lock: &File) -> io::Result<()> {
    for_its_owner(lock)?;
    lock.set_len(0)?;
    lock.rewind()?;
    lock.write_all(format!("{}\n", std::process::id()).as_bytes())
}

/// Makes a directory for nobody but its owner, and what it lies in.
fn make(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Device and inode of what has a name, if anything has.
fn place(directory: impl AsFd, name: &str) -> io::Result<Option<(u64, u64)>> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(rustix::io::Errno::NOENT) => Ok(None),
        stat => Ok(Some(stat.map(|stat| (stat.st_dev, stat.st_ino))?)),
    }
}

/// Removes a file, if it is there.
fn remove(directory: impl AsFd, name: &str) -> io::Result<()> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(rustix::io::Errno::NOENT) => Ok(()),
        removed => Ok(removed?),
    }
}

/// Opens a file, and makes it if it is not there, for nobody but its owner.
fn create(directory: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    let file = open_or_make(directory, name)?;
    for_its_owner(&file)?;
    Ok(file)
}

fn open_or_make(directory: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    regular(rustix::fs::openat(directory, name, flags, Mode::RUSR | Mode::WUSR)?, name)
}

fn for_its_owner(file: impl AsFd) -> io::Result<()> {
    let owners = Mode::RUSR | Mode::WUSR;
    if Mode::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != owners {
        rustix::fs::fchmod(&file, owners)?;
    }
    Ok(())
}

fn regular(file: OwnedFd, name: &str) -> io::Result<OwnedFd> {
    match rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        rustix::fs::FileType::RegularFile => Ok(file),
        _ => Err(io::Error::other(format!("{name} is no file"))),
    }
}

/// A file that has no name, or loses it at once.
fn unnamed(parent: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match rustix::fs::open(parent, flags, Mode::RUSR | Mode::WUSR) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {}
        file => return Ok(file?),
    }
    let mut number = [0; 8];
    rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())?;
    let path = parent.join(format!(".pagekeeper-{:016x}", u64::from_ne_bytes(number)));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}
