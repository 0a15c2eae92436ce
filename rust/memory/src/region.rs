//! Memory from the system, zero until it is written.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// The size of a huge page.
#[cfg(all(target_os = "linux", not(miri)))]
const HUGE_PAGE: usize = 2 << 20;
/// Less than this is not worth a call of the system's.
#[cfg(all(target_os = "linux", not(miri)))]
const MAPPED: usize = 1 << 16;
/// A cache line.
const ALIGNMENT: usize = 64;
#[repr(align(64))]
struct Aligned;

/// Zeros, at an address that a cache line begins at. Large ones begin at a huge page and ask for huge pages.
pub(crate) struct Region {
    start: NonNull<u8>,
    bytes: usize,
    from: Source,
}

enum Source {
    /// There are no bytes.
    Nowhere,
    Allocator,
    /// A mapping: its address and length.
    #[cfg(all(target_os = "linux", not(miri)))]
    System(NonNull<u8>, usize),
}

// SAFETY: bytes that belong to the region and to nobody else.
unsafe impl Send for Region {}
// SAFETY: as above; they change only through what is borrowed mutably.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) const EMPTY: Region =
        Region { start: NonNull::<Aligned>::dangling().cast(), bytes: 0, from: Source::Nowhere };

    /// `bytes` zeros; `None` if there is no such room.
    pub(crate) fn new(bytes: usize) -> Option<Region> {
        if bytes == 0 {
            return Some(Region::EMPTY);
        }
        isize::try_from(bytes).ok()?; // no slice is longer
        #[cfg(all(target_os = "linux", not(miri)))]
        if bytes >= MAPPED {
            return Region::map(bytes);
        }
        let layout = Layout::from_size_align(bytes, ALIGNMENT).ok()?;
        // SAFETY: not of zero bytes.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Region { start, bytes, from: Source::Allocator })
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    fn map(bytes: usize) -> Option<Region> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

        let huge = bytes >= HUGE_PAGE;
        let mapped =
            if huge { bytes.checked_next_multiple_of(HUGE_PAGE)?.checked_add(HUGE_PAGE)? } else { bytes };
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping wherever there is room.
        let mapping = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped, access, flags) };
        let mapping = NonNull::new(mapping.ok()?.cast::<u8>())?;
        if !huge {
            return Some(Region { start: mapping, bytes, from: Source::System(mapping, mapped) });
        }
        let skipped = mapping.addr().get().next_multiple_of(HUGE_PAGE) - mapping.addr().get();
        // SAFETY: inside the mapping, which is longer by a huge page than what is used of it.
        let start = unsafe { mapping.add(skipped) };
        let region = Region { start, bytes, from: Source::System(mapping, mapped) };
        // SAFETY: the region's own memory; the advice changes no byte of it.
        let told = unsafe {
            madvise(start.as_ptr().cast(), bytes.next_multiple_of(HUGE_PAGE), Advice::LinuxHugepage)
        };
        let _ = told; // a system without huge pages says so; the memory is as good
        Some(region)
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.from {
            Source::Nowhere => {}
            Source::Allocator => {
                let layout = Layout::from_size_align(self.bytes, ALIGNMENT).expect("as it was allocated");
                // SAFETY: allocated with this layout.
                unsafe { dealloc(self.start.as_ptr(), layout) }
            }
            #[cfg(all(target_os = "linux", not(miri)))]
            Source::System(mapping, bytes) => {
                // SAFETY: the whole of a mapping that nothing uses any more.
                let gone = unsafe { rustix::mm::munmap(mapping.as_ptr().cast(), bytes) };
                debug_assert!(gone.is_ok(), "a mapping of ours can be taken back");
            }
        }
    }
}
