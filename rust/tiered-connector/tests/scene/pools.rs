//! Pools in a file that is mapped by every process of a test, and an engine that does as the file says.

use super::{PAGES, UNITS};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::fs::File;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tiered_connector::copy::{CopyEngine, CpuEngine, Piece, Region};
use tiered_connector::host::Arena;
use tiered_connector::job::{Job, Outcome};

/// What a test tells the engine of a shard, and is told.
#[repr(C)]
pub(super) struct Control {
    pub(super) held: AtomicU32,
    pub(super) failing: AtomicU32,
    /// Copies that are held up.
    pub(super) running: AtomicU32,
}

/// Bytes of a shard in the file: its control, then its pages.
const SHARD: usize = 64 << 10;
const PAGES_AT: usize = 4096;

/// The mapped file. It stays mapped until the process ends.
#[derive(Clone, Copy)]
pub(super) struct Pools {
    start: NonNull<u8>,
    shards: usize,
}

// SAFETY: shared memory; the tests say who uses a page when.
unsafe impl Send for Pools {}
// SAFETY: as above.
unsafe impl Sync for Pools {}

impl Pools {
    pub(super) fn create(directory: &Path, shards: usize) -> Pools {
        let file = File::create_new(directory.join("pools")).unwrap();
        file.set_len((shards * SHARD) as u64).unwrap();
        Pools::open(directory)
    }

    pub(super) fn open(directory: &Path) -> Pools {
        let file = File::options().read(true).write(true).open(directory.join("pools")).unwrap();
        let bytes = file.metadata().unwrap().len() as usize;
        // SAFETY: a new mapping, which nobody unmaps; the file is not cut short.
        let start = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        };
        Pools { start: NonNull::new(start.unwrap().cast()).unwrap(), shards: bytes / SHARD }
    }

    pub(super) fn shards(&self) -> usize {
        self.shards
    }

    /// Shards have pages of other sizes.
    pub(super) fn page_bytes(&self, shard: usize) -> usize {
        assert!(shard < self.shards);
        1024 - 256 * shard
    }

    pub(super) fn control(&self, shard: usize) -> &Control {
        assert!(shard < self.shards);
        // SAFETY: inside the mapping and aligned; atomics only.
        unsafe { self.start.add(shard * SHARD).cast().as_ref() }
    }

    fn bytes(&self, shard: usize, page: u32) -> impl Iterator<Item = NonNull<u8>> {
        assert!(page < PAGES);
        let bytes = self.page_bytes(shard);
        // SAFETY: inside the mapping.
        let start = unsafe { self.start.add(shard * SHARD + PAGES_AT + page as usize * bytes) };
        // SAFETY: as above.
        (0..bytes).map(move |byte| unsafe { start.add(byte) })
    }

    pub(super) fn fill(&self, shard: usize, page: u32, block: u64) {
        for (at, byte) in self.bytes(shard, page).enumerate() {
            // SAFETY: inside the mapping; the tests fill a page while it is not copied.
            unsafe { byte.write_volatile(expected(shard, block, at)) }
        }
    }

    pub(super) fn holds(&self, shard: usize, page: u32, block: u64) -> bool {
        // SAFETY: as above.
        let mut bytes = self.bytes(shard, page).map(|byte| unsafe { byte.read_volatile() }).enumerate();
        bytes.all(|(at, byte)| byte == expected(shard, block, at))
    }
}

/// The bytes of a block: others on each shard, at each place.
fn expected(shard: usize, block: u64, at: usize) -> u8 {
    let mixed = (block * 1031 + shard as u64 * 37 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// An engine that does as its [`Control`] says.
pub(super) struct Controlled {
    pools: Pools,
    shard: usize,
    engine: CpuEngine,
}

impl Controlled {
    /// Between the pool of a shard and an arena of this process.
    pub(super) fn new(pools: &Pools, shard: usize) -> Controlled {
        let len = pools.page_bytes(shard);
        let arena = Arc::new(Arena::new(UNITS, len).unwrap());
        // SAFETY: inside the mapping, which stays; the tests use a page while it is not copied.
        let region = unsafe {
            let base = pools.start.add(shard * SHARD + PAGES_AT);
            Region::new(base, SHARD - PAGES_AT, PAGES as usize, len, vec![Piece { offset: 0, len }])
        };
        Controlled { pools: *pools, shard, engine: CpuEngine::new(vec![region.unwrap()], arena) }
    }
}

impl CopyEngine for Controlled {
    fn copy(&self, job: &Job, give_up: &dyn Fn() -> bool) -> Outcome {
        let control = self.pools.control(self.shard);
        if control.failing.load(Ordering::SeqCst) != 0 {
            return Outcome::Failed("on purpose".into());
        }
        control.running.fetch_add(1, Ordering::SeqCst);
        while control.held.load(Ordering::SeqCst) != 0 && !give_up() {
            std::thread::sleep(Duration::from_millis(1));
        }
        control.running.fetch_sub(1, Ordering::SeqCst);
        self.engine.copy(job, give_up)
    }
}
