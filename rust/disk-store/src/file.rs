//! Files as the store uses them: by a trait, so that tests can record what is written, lose it, and fail.

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// What direct I/O asks of addresses, offsets and lengths, on any disk that there is.
pub const ALIGNMENT: usize = 4096;

/// A file of the store.
pub trait BlockFile: Send + Sync {
    /// Reads all of `bytes` from `offset` on.
    ///
    /// # Errors
    /// What the system says; [`io::ErrorKind::UnexpectedEof`] where the file ends.
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` from `offset` on.
    ///
    /// # Errors
    /// What the system says.
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when what was written, and the file's length, will be there after a power cut.
    ///
    /// # Errors
    /// What the system says; then nobody knows what will be there.
    fn sync(&self) -> io::Result<()>;

    /// Takes space on the disk for bytes `from .. to`, and makes the file as long.
    ///
    /// # Errors
    /// What the system says, such as that the disk is full.
    fn reserve(&self, from: u64, to: u64) -> io::Result<()>;

    /// Cuts the file, or makes it longer by zeros that take no space.
    ///
    /// # Errors
    /// What the system says.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Bytes of the file.
    ///
    /// # Errors
    /// What the system says.
    fn bytes(&self) -> io::Result<u64>;

    /// Whether reads and writes of aligned memory go around the page cache now.
    fn is_direct(&self) -> bool {
        false
    }

    /// The descriptor for such a read or write by the kernel itself; `None` if only this trait's calls will do.
    fn descriptor(&self, _address: usize, _len: usize) -> Option<RawFd> {
        None
    }

    /// The system has refused a direct read or write: from now on all go through the page cache.
    fn give_up_direct(&self) {}
}

/// A file of the system's.
pub struct SystemFile {
    buffered: File,
    direct: Option<File>,
    gave_up: AtomicBool,
}

impl SystemFile {
    /// The file that `descriptor` has open, for reading and writing. With `direct` what is aligned goes around the page
    /// cache, where the file system has that.
    pub fn new(descriptor: OwnedFd, direct: bool) -> SystemFile {
        let direct = direct.then(|| around_the_cache(&descriptor)).flatten();
        SystemFile { buffered: descriptor.into(), direct, gave_up: AtomicBool::new(false) }
    }

    /// What takes such a read or write.
    fn file(&self, address: usize, len: usize, offset: u64) -> &File {
        let aligned = [address, len, offset as usize].iter().all(|number| number.is_multiple_of(ALIGNMENT));
        self.direct.as_ref().filter(|_| aligned && self.is_direct()).unwrap_or(&self.buffered)
    }
}

/// The same file, opened anew for direct I/O, if it really does that.
fn around_the_cache(file: &OwnedFd) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let direct: File = rustix::fs::open(path, flags, Mode::empty()).ok()?.into();
    // Some file systems take the flag and refuse the first read.
    let mut page = Pages::zeros(ALIGNMENT);
    match direct.read_at(page.bytes_mut(), 0) {
        Ok(_) => Some(direct),
        Err(_) => None,
    }
}

impl BlockFile for SystemFile {
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file(bytes.as_ptr().addr(), bytes.len(), offset).read_exact_at(bytes, offset)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file(bytes.as_ptr().addr(), bytes.len(), offset).write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.buffered.sync_data()
    }

    fn reserve(&self, from: u64, to: u64) -> io::Result<()> {
        let fallocate = || rustix::fs::fallocate(&self.buffered, FallocateFlags::empty(), from, to - from);
        match rustix::io::retry_on_intr(fallocate) {
            Err(rustix::io::Errno::OPNOTSUPP) => self.set_len(to.max(self.bytes()?)),
            done => Ok(done?),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.buffered.set_len(len)
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.buffered.metadata()?.len())
    }

    fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.gave_up.load(Ordering::Relaxed)
    }

    fn descriptor(&self, address: usize, len: usize) -> Option<RawFd> {
        Some(self.file(address, len, 0).as_raw_fd())
    }

    fn give_up_direct(&self) {
        self.gave_up.store(true, Ordering::Relaxed);
    }
}

/// Whether the system says that this is no way to read or write here.
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error())
}

/// Bytes that the file system of a directory has left, for such as us.
///
/// # Errors
/// What the system says.
pub fn free_bytes(directory: impl AsFd) -> io::Result<u64> {
    let stat = rustix::fs::fstatvfs(directory)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Bytes that a file takes on its disk.
///
/// # Errors
/// What the system says.
pub fn taken_bytes(directory: impl AsFd, name: &str) -> io::Result<u64> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(rustix::io::Errno::NOENT) => Ok(0),
        stat => Ok(stat?.st_blocks.cast_unsigned().saturating_mul(512)),
    }
}

/// Memory that direct I/O takes.
pub struct Pages(Vec<Page>);

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; ALIGNMENT]);

impl Pages {
    /// So many zeros, rounded up to whole pages.
    pub fn zeros(bytes: usize) -> Pages {
        Pages(vec![Page([0; ALIGNMENT]); bytes.div_ceil(ALIGNMENT)])
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: pages are bytes, one behind the other.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * ALIGNMENT) }
    }

    /// All bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: pages are bytes, one behind the other, and any bytes are a page.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * ALIGNMENT) }
    }
}
