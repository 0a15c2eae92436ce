//! Several threads that store, load and cancel at once, until the tier is shut down under them; also under
//! `ThreadSanitizer` (`make test-threads`).

use block_pool::{EvictionPolicy, PageId, Step};
use completion::Outcome;
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tiered_connector::connector::{Offered, Refused, TieredConnector};
use tiered_connector::copy::{CpuEngine, Piece, Region};
use tiered_connector::host::Arena;
use tiered_connector::job::TierKey;
use tiered_connector::lanes::Lanes;
use tiered_connector::mover::Mover;
use tiered_connector::remote::RemoteMover;
use tiered_connector::shards::Shards;
use tiered_connector::wire::Hello;
use tiered_connector::worker::{Served, Worker};

const PAGE: usize = 512;
const CLIENTS: u32 = 4;
const UNITS: u32 = 16;
/// More than fit: blocks are evicted.
const BLOCKS: u64 = 40;
const ROUNDS: u64 = 400;
const SOON: Option<Duration> = Some(Duration::from_mins(1));

/// Memory of two pages a client, each used by its client alone, or by a copy that the client waits for.
#[derive(Clone, Copy)]
struct Pool(NonNull<u8>);

// SAFETY: see above.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    const PAGES: usize = 2 * CLIENTS as usize;

    /// Stays for ever.
    fn new() -> Pool {
        let bytes: &'static mut [u8] = Box::leak(vec![0; Self::PAGES * PAGE].into_boxed_slice());
        Pool(NonNull::from(bytes).cast())
    }

    fn lanes(self) -> Lanes {
        let pieces = vec![Piece { offset: 0, len: PAGE }];
        // SAFETY: leaked; clients leave pages alone that are copied.
        let region = unsafe { Region::new(self.0, Self::PAGES * PAGE, Self::PAGES, PAGE, pieces) };
        let engine = CpuEngine::new(vec![region.unwrap()], Arc::new(Arena::new(UNITS, PAGE).unwrap()));
        Lanes::start(3, Box::new(engine)).unwrap()
    }

    fn fill(self, page: u32, value: u8) {
        // SAFETY: inside the pool; the page is the caller's.
        unsafe { self.0.add(page as usize * PAGE).write_bytes(value, PAGE) }
    }

    fn is(self, page: u32, value: u8) -> bool {
        // SAFETY: as above.
        let bytes = unsafe { NonNull::slice_from_raw_parts(self.0.add(page as usize * PAGE), PAGE).as_ref() };
        bytes.iter().all(|&byte| byte == value)
    }
}

/// Stores and loads blocks by two pages. Gives how many loads it has looked at.
fn client(connector: &TieredConnector, pools: &[Pool], number: u32) -> u64 {
    let (from, to) = (2 * number, 2 * number + 1);
    let mut looked_at = 0;
    for round in 0..ROUNDS {
        let block = (round * 7 + u64::from(number) * 11) % BLOCKS;
        let key = TierKey { hash: block * 0x9e37_79b9, guard: [1; 16] };
        for (shard, pool) in pools.iter().enumerate() {
            pool.fill(from, block as u8 + shard as u8);
            pool.fill(to, 255);
        }
        match connector.offload(&[(key, PageId(from)).into()], Step(0), Some(round)) {
            Ok(Offered::Storing(store)) => {
                if round % 5 == 0 {
                    store.cancel();
                }
                store.wait(SOON).expect("a store ends");
            }
            Ok(Offered::Dropped) => panic!("a few stores at once are not too many"),
            Err(_) => return looked_at,
        }
        connector.touch(&[key.hash]);
        match connector.load(&[(key, PageId(to))], Step(0), None) {
            Ok(load) => {
                if round % 7 == 0 {
                    load.cancel();
                }
                if load.wait(SOON).expect("a load ends") == Outcome::Done {
                    for (shard, pool) in pools.iter().enumerate() {
                        assert!(pool.is(to, block as u8 + shard as u8), "block {block} of shard {shard}");
                    }
                    looked_at += 1;
                }
            }
            Err(Refused::NotHere) => {}
            Err(Refused::Closed(_)) => return looked_at,
        }
        if round % 64 == 0 {
            connector.reset().unwrap();
        }
    }
    looked_at
}

/// All clients at once; with `shut_down` until the tier is shut down under them.
fn stress(pools: &[Pool], mover: Box<dyn Mover>, shut_down: bool) {
    let connector = TieredConnector::with_mover(UNITS, PAGE, EvictionPolicy::PriorityLru, mover);
    let looked_at: u64 = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let connector = &connector;
                scope.spawn(move || client(connector, pools, number))
            })
            .collect();
        if shut_down {
            while connector.metrics().index.loaded < 100 {
                thread::yield_now();
            }
            connector.shutdown(Duration::from_millis(1));
        }
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    assert!(looked_at > 0);
    assert!(connector.drain(Duration::from_mins(1)));
    connector.shutdown(Duration::ZERO);
    connector.verify().unwrap();
    assert_eq!(connector.metrics().jobs, 0, "each job has ended");
}

#[test]
fn in_the_lanes_of_one_tier() {
    for shut_down in [false, true] {
        let pool = Pool::new();
        stress(&[pool], Box::new(pool.lanes()), shut_down);
    }
}

#[test]
fn on_two_shards_one_of_which_is_behind_a_connection() {
    for shut_down in [false, true] {
        let pools = [Pool::new(), Pool::new()];
        let (stream, theirs) = UnixStream::pair().unwrap();
        let hello = Hello { shard: 1, units: UNITS, unit_bytes: PAGE as u64, pages: Pool::PAGES as u32 };
        let mut worker = Worker::new(hello, pools[1].lanes());
        let serving = thread::spawn(move || {
            let served = worker.serve(theirs);
            worker.stop();
            served
        });
        let remote = RemoteMover::join(stream, hello, Duration::from_secs(30)).unwrap();
        stress(&pools, Box::new(Shards::new(vec![Box::new(pools[0].lanes()), Box::new(remote)])), shut_down);
        assert_eq!(serving.join().unwrap().unwrap(), Served::ShutDown);
    }
}
