//! A tier over pools that the test reads and writes, on one shard or two, in this process or in others. Copies can be
//! held up and made to fail.

mod pools;
mod workers;

use block_pool::EvictionPolicy;
use pools::{Control, Controlled, Pools};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tiered_connector::connector::TieredConnector;
use tiered_connector::lanes::Lanes;
use tiered_connector::mover::Mover;
use tiered_connector::shards::Shards;
use workers::Workers;

pub(crate) use workers::work;

/// Pages of each pool, the null page counted.
pub(crate) const PAGES: u32 = 2 * UNITS + 1;
/// Units of the tier.
pub(crate) const UNITS: u32 = 8;
/// Limit of every wait.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// How long a worker may be silent.
pub(crate) const PATIENCE: Duration = Duration::from_millis(1500);

/// Where the shards are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setup {
    /// One, in this process.
    Lanes,
    /// Two, in this process.
    Shards,
    /// Two, each in a process of its own.
    Processes,
}

/// A tier.
pub(crate) struct Scene {
    pub(crate) connector: TieredConnector,
    pools: Pools,
    workers: Workers,
}

/// Waits for what another thread or process does.
pub(crate) fn until(what: &str, happened: impl Fn() -> bool) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < SOON, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A directory of this test's own, removed when it is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("shards-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Scene {
    /// Runs a test, and looks at the books after it.
    pub(crate) fn with(setup: Setup, test: impl FnOnce(&Scene)) {
        let directory = Directory::new();
        let path = &directory.0;
        let shards = if setup == Setup::Lanes { 1 } else { 2 };
        let pools = Pools::create(path, shards);
        let mut workers = Workers::none(path);
        let lanes = |shard| Box::new(Lanes::start(2, Box::new(Controlled::new(&pools, shard))).unwrap());
        let mover: Box<dyn Mover> = match setup {
            Setup::Lanes => lanes(0),
            Setup::Shards => Box::new(Shards::new(vec![lanes(0), lanes(1)])),
            Setup::Processes => {
                let movers = (0..shards).map(|shard| Box::new(workers.start(shard)) as Box<dyn Mover>);
                Box::new(Shards::new(movers.collect()))
            }
        };
        let unit_bytes = pools.page_bytes(0);
        let connector = TieredConnector::with_mover(UNITS, unit_bytes, EvictionPolicy::PriorityLru, mover);
        let scene = Scene { connector, pools, workers };
        test(&scene);
        scene.connector.verify().unwrap();
        scene.connector.shutdown(Duration::ZERO);
        assert_eq!(scene.connector.metrics().jobs, 0, "each job has ended");
        scene.connector.verify().unwrap();
    }

    pub(crate) fn shards(&self) -> usize {
        self.pools.shards()
    }

    /// Writes the bytes of a block into a page, on every shard.
    pub(crate) fn fill(&self, page: u32, block: u64) {
        (0..self.shards()).for_each(|shard| self.pools.fill(shard, page, block));
    }

    /// Looks for the bytes of a block in a page, on every shard.
    pub(crate) fn assert_holds(&self, page: u32, block: u64) {
        for shard in 0..self.shards() {
            assert!(
                self.pools.holds(shard, page, block),
                "page {page} of shard {shard} is not block {block}"
            );
        }
    }

    /// Holds copies of a shard up, or lets them go on.
    pub(crate) fn hold(&self, shard: usize, held: bool) {
        self.control(shard).held.store(held.into(), Ordering::SeqCst);
    }

    pub(crate) fn hold_all(&self, held: bool) {
        (0..self.shards()).for_each(|shard| self.hold(shard, held));
    }

    /// Makes copies of a shard fail.
    pub(crate) fn fail(&self, shard: usize, failing: bool) {
        self.control(shard).failing.store(failing.into(), Ordering::SeqCst);
    }

    /// Shards where a copy is held up.
    pub(crate) fn running(&self) -> usize {
        let running = |&shard: &usize| self.control(shard).running.load(Ordering::SeqCst) > 0;
        (0..self.shards()).filter(running).count()
    }

    /// Ends a worker's process at once.
    pub(crate) fn kill(&self, shard: usize) {
        self.workers.kill(shard);
        self.control(shard).running.store(0, Ordering::SeqCst);
    }

    /// Puts another process in the place of one that was killed.
    pub(crate) fn restart(&self, shard: usize) {
        self.workers.restart(shard);
    }

    pub(crate) fn stop(&self, shard: usize) {
        self.workers.signal(shard, rustix::process::Signal::STOP);
    }

    pub(crate) fn go_on(&self, shard: usize) {
        self.workers.signal(shard, rustix::process::Signal::CONT);
    }

    /// Makes a worker hang up.
    pub(crate) fn disconnect(&self, shard: usize) {
        self.workers.disconnect(shard);
    }

    /// Lets the worker that hung up connect again; whether it did.
    pub(crate) fn rejoin(&self, shard: usize) -> bool {
        self.workers.rejoin(shard)
    }

    fn control(&self, shard: usize) -> &Control {
        self.pools.control(shard)
    }
}
