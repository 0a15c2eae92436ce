//! Copies between device pages and units of host memory.

use crate::host::Arena;
use crate::job::{Direction, Job, Outcome};
use parking_lot::RwLock;
use std::ptr::NonNull;
use std::sync::Arc;
use thiserror::Error;

#[cfg(test)]
mod tests;

/// Moves the bytes of jobs. Jobs in flight at one time touch different pages and units, but that several loads
/// may read one unit, and several stores one page.
pub trait CopyEngine: Send + Sync {
    /// Copies all of a job, in the calling thread. Gives up between pages when `give_up` says so.
    fn copy(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome;
}

/// Bytes of a page that lie in one piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it begins for page 0, from the start of the region.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// Memory of a device pool: the pieces of page `p` lie `p · page_stride` bytes behind those of page 0. A
/// page-first pool has one piece a page, a layer-first pool one for each layer and each of K and V.
#[derive(Clone, Debug)]
pub struct Region {
    base: NonNull<u8>,
    page_stride: usize,
    pieces: Vec<Piece>,
}

// SAFETY: an address; whoever copies says why it may.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// A region that is none.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RegionError {
    /// There is nothing to copy.
    #[error("a page has no bytes in a region")]
    Empty,
    /// Pages reach beyond the memory.
    #[error("page {page} ends at byte {end} of a region of {bytes} bytes")]
    TooShort {
        /// The last page.
        page: usize,
        /// One past its last byte.
        end: usize,
        /// Bytes that there are.
        bytes: usize,
    },
    /// Two pieces have bytes in common.
    #[error("pages or their pieces overlap: byte {0} of a region is in two of them")]
    Overlap(usize),
}

impl Region {
    /// `pages` pages in `bytes` bytes from `base` on.
    ///
    /// # Errors
    /// Pages that lie outside of the memory, or have bytes in common.
    ///
    /// # Safety
    /// The memory stays where it is and may be read and written, by whoever copies, until the region and its
    /// clones are gone.
    pub unsafe fn new(
        base: NonNull<u8>,
        bytes: usize,
        pages: usize,
        page_stride: usize,
        pieces: Vec<Piece>,
    ) -> Result<Region, RegionError> {
        if pages == 0 || pieces.iter().all(|piece| piece.len == 0) {
            return Err(RegionError::Empty);
        }
        let last = pages - 1;
        for piece in &pieces {
            let end = last.saturating_mul(page_stride).saturating_add(piece.offset).saturating_add(piece.len);
            if end > bytes {
                return Err(RegionError::TooShort { page: last, end, bytes });
            }
        }
        for (number, one) in pieces.iter().enumerate() {
            for other in &pieces[number..] {
                if let Some(byte) = common_byte(one, other, std::ptr::eq(one, other), last, page_stride) {
                    return Err(RegionError::Overlap(byte));
                }
            }
        }
        Ok(Region { base, page_stride, pieces })
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len).sum()
    }
}

/// A byte that two pieces, or one piece of two pages, have in common.
fn common_byte(one: &Piece, other: &Piece, same: bool, last_page: usize, stride: usize) -> Option<usize> {
    let (low, high) = if one.offset <= other.offset { (one, other) } else { (other, one) };
    // How many pages on `low` comes next to where `high` begins, and one more.
    let ahead = (high.offset - low.offset).checked_div(stride).unwrap_or(0);
    let pages = [ahead, ahead + 1].into_iter().filter(|&pages| pages <= last_page && !(same && pages == 0));
    // All of this is inside the memory.
    let starts = pages.map(|pages| low.offset + pages * stride);
    starts
        .filter(|&start| start < high.offset + high.len && high.offset < start + low.len)
        .map(|start| start.max(high.offset))
        .next()
}

/// Copies in the processor's memory. A unit holds the pieces of its page one behind the other.
pub struct CpuEngine {
    /// Empty while the device's memory is given up.
    regions: RwLock<Vec<Region>>,
    arena: Arc<Arena>,
}

impl CpuEngine {
    /// An engine between these regions and `arena`, whose units are as large as a page of all regions.
    ///
    /// # Panics
    /// If they are not.
    pub fn new(regions: Vec<Region>, arena: Arc<Arena>) -> CpuEngine {
        let engine = CpuEngine { regions: RwLock::default(), arena };
        engine.take_regions(regions);
        engine
    }

    /// Copies between other regions from now on. Waits for copies that run.
    ///
    /// # Panics
    /// If a unit of the arena is not as large as a page of all regions.
    pub fn take_regions(&self, regions: Vec<Region>) {
        let page_bytes: usize = regions.iter().map(Region::page_bytes).sum();
        assert!(page_bytes == self.arena.unit_bytes(), "a unit of the arena holds a page");
        *self.regions.write() = regions;
    }

    /// Copies nothing any more, and forgets where the regions were. Waits for copies that run.
    pub fn drop_regions(&self) {
        self.regions.write().clear();
    }

    /// Bytes of a unit, and so of a page of all regions.
    pub fn unit_bytes(&self) -> usize {
        self.arena.unit_bytes()
    }
}

impl<E: CopyEngine> CopyEngine for Arc<E> {
    fn copy(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        (**self).copy(job, give_up)
    }
}

impl CopyEngine for CpuEngine {
    fn copy(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        let regions = self.regions.read();
        if regions.is_empty() {
            return Outcome::Failed("the device's memory is given up".into());
        }
        for (&unit, &page) in job.units.iter().zip(&job.pages) {
            if give_up() {
                return Outcome::Cancelled;
            }
            let mut at = self.arena.unit(unit);
            for region in &*regions {
                let start = page.index() * region.page_stride;
                for piece in &region.pieces {
                    // SAFETY: the page is one of the region's, whose pieces were checked to lie in its memory,
                    // and the unit has as many bytes as the page. Nobody else writes to the source or uses the
                    // destination while the job is in flight: the index and the ledger hold both.
                    at = unsafe {
                        let device = region.base.add(start + piece.offset);
                        match job.direction {
                            Direction::Store => copy_bytes(device, at, piece.len),
                            Direction::Load => copy_bytes(at, device, piece.len),
                        }
                        at.add(piece.len)
                    };
                }
            }
        }
        Outcome::Done
    }
}

/// Bytes that a processor moves at once, at most.
const LINE: usize = 64;

/// Copies `len` bytes between places that have none in common.
///
/// A processor compares loads with the stores before them by the lowest 12 bits of their addresses. Where the
/// destination lies less than a line behind the source, in these bits, each load of a copy upwards seems to read
/// what was just stored, and waits: a third of the speed. Downwards it does not. Pools of numpy lie so, 16 bytes
/// behind a multiple of 4,096, beside units that begin at one. Large pieces are copied past the caches, several pages
/// side by side, and do not wait.
///
/// # Safety
/// As [`NonNull::copy_to_nonoverlapping`].
unsafe fn copy_bytes(source: NonNull<u8>, destination: NonNull<u8>, len: usize) {
    let behind = (destination.as_ptr() as usize).wrapping_sub(source.as_ptr() as usize) % 4096;
    if behind == 0 || behind >= LINE || !(4096..1 << 20).contains(&len) {
        // SAFETY: the caller's.
        return unsafe { source.copy_to_nonoverlapping(destination, len) };
    }
    let (from, to) = (source.cast::<[u64; LINE / 8]>(), destination.cast::<[u64; LINE / 8]>());
    let lines = len / LINE;
    // SAFETY: the caller's; these are the bytes behind the last whole line, and then each line.
    unsafe {
        source.add(lines * LINE).copy_to_nonoverlapping(destination.add(lines * LINE), len % LINE);
        for line in (0..lines).rev() {
            to.add(line).write_unaligned(from.add(line).read_unaligned());
        }
    }
}
