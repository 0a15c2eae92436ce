//! One suite over a tier in this process, on two shards in this process, and on two shards in processes of their
//! own: the index is here in all of them. And what is lost with a process.

mod scene;

use block_pool::{PageId, Step};
use completion::{Completion, Outcome as End};
use scene::{PAGES, PATIENCE, SOON, Scene, Setup, UNITS, until};
use std::time::{Duration, Instant};
use tiered_connector::connector::{Closed, Offered, Refused};
use tiered_connector::job::{Offer, Outcome, TierKey};

fn key(number: u64) -> TierKey {
    TierKey { hash: number.wrapping_mul(0x9e37_79b9_7f4a_7c15), guard: [number as u8; 16] }
}

/// Blocks `first ..`, one a page, from page `page` on.
fn blocks(first: u64, page: u32, count: u32) -> Vec<(TierKey, PageId)> {
    (0..count).map(|n| (key(first + u64::from(n)), PageId(page + n))).collect()
}

fn offers(blocks: &[(TierKey, PageId)]) -> Vec<Offer> {
    blocks.iter().copied().map(Offer::from).collect()
}

fn offload(scene: &Scene, blocks: &[(TierKey, PageId)]) -> Completion {
    match scene.connector.offload(&offers(blocks), Step(0), None) {
        Ok(Offered::Storing(completion)) => completion,
        other => panic!("{other:?}"),
    }
}

/// Fills pages with the bytes of blocks and stores them.
fn store(scene: &Scene, first: u64, page: u32, count: u32) {
    (0..count).for_each(|n| scene.fill(page + n, first + u64::from(n)));
    assert_eq!(offload(scene, &blocks(first, page, count)).wait(Some(SOON)), Some(End::Done));
}

fn found(scene: &Scene, blocks: std::ops::Range<u64>) -> Vec<bool> {
    scene.connector.lookup(&blocks.map(key).collect::<Vec<_>>()).unwrap()
}

fn all_found(scene: &Scene, blocks: std::ops::Range<u64>) -> bool {
    found(scene, blocks).into_iter().all(|found| found)
}

/// Loads blocks and looks at every byte on every shard.
fn assert_loads(scene: &Scene, first: u64, page: u32, count: u32) {
    (0..count).for_each(|n| scene.fill(page + n, 0));
    let loaded = scene.connector.load(&blocks(first, page, count), Step(0), None).unwrap();
    assert_eq!(loaded.wait(Some(SOON)), Some(End::Done));
    (0..count).for_each(|n| scene.assert_holds(page + n, first + u64::from(n)));
}

/// A test over each set-up.
macro_rules! over_all_setups {
    ($(fn $name:ident($scene:ident: &Scene) $body:block)*) => {
        $(
            mod $name {
                use super::*;

                fn behaves($scene: &Scene) $body

                #[test]
                fn in_this_process() {
                    Scene::with(Setup::Lanes, behaves);
                }

                #[test]
                fn on_two_shards() {
                    Scene::with(Setup::Shards, behaves);
                }

                #[test]
                fn in_processes() {
                    Scene::with(Setup::Processes, behaves);
                }
            }
        )*
    };
}

over_all_setups! {
    fn blocks_come_back_byte_for_byte(scene: &Scene) {
        store(scene, 100, 1, UNITS);
        assert!(all_found(scene, 100..100 + u64::from(UNITS)));
        assert_loads(scene, 100, 1 + UNITS, UNITS);
        assert_loads(scene, 100, 1, UNITS);
        assert_eq!(scene.connector.metrics().index.loaded, 2 * u64::from(UNITS));
    }

    fn equal_content_is_stored_once(scene: &Scene) {
        store(scene, 100, 1, 3);
        store(scene, 100, 5, 3);
        let metrics = scene.connector.metrics();
        assert_eq!((metrics.index.stored, metrics.index.known, metrics.blocks), (3, 3, 3));
    }

    fn the_least_recently_used_block_makes_room(scene: &Scene) {
        store(scene, 100, 1, UNITS);
        store(scene, 200, 1, 1);
        // A prefix goes from its tail.
        let last = 100 + u64::from(UNITS) - 1;
        assert_eq!(found(scene, last..last + 1), [false]);
        assert!(all_found(scene, 100..last));
        assert_loads(scene, 200, 3, 1);
        assert_loads(scene, 100, 3, UNITS - 1);
    }

    fn a_load_of_what_is_not_here_moves_nothing(scene: &Scene) {
        store(scene, 100, 1, 2);
        (1..4).for_each(|page| scene.fill(page, 7));
        let refused = scene.connector.load(&blocks(100, 1, 3), Step(0), None).unwrap_err();
        assert_eq!(refused, Refused::NotHere);
        assert!(scene.connector.drain(SOON));
        (1..4).for_each(|page| scene.assert_holds(page, 7));
    }

    fn a_cancelled_copy_ends_and_its_blocks_are_not_found(scene: &Scene) {
        scene.hold_all(true);
        let running = offload(scene, &blocks(100, 1, 2));
        until("the copy runs", || scene.running() == scene.shards());
        assert!(running.cancel());
        assert_eq!(running.wait(Some(SOON)), Some(End::Cancelled));
        scene.hold_all(false);
        assert_eq!(found(scene, 100..102), [false, false]);
        store(scene, 100, 1, 2);
        assert_loads(scene, 100, 4, 2);
    }

    fn a_failure_on_one_shard_fails_the_copy_and_its_blocks_are_not_seen(scene: &Scene) {
        for shard in 0..scene.shards() {
            scene.fail(shard, true);
            let failed = Some(End::Failed("on purpose".into()));
            assert_eq!(offload(scene, &blocks(100, 1, 2)).wait(Some(SOON)), failed);
            assert_eq!(found(scene, 100..102), [false, false]);
            scene.fail(shard, false);
            store(scene, 100, 1, 2);
            scene.fail(shard, true);
            let load = scene.connector.load(&blocks(100, 4, 2), Step(0), Some(5)).unwrap();
            assert_eq!(load.wait(Some(SOON)), failed);
            assert_eq!(scene.connector.take_finished(), [(5, Outcome::Failed("on purpose".into()))]);
            scene.fail(shard, false);
            assert_loads(scene, 100, 4, 2);
            scene.connector.reset().unwrap();
        }
    }

    fn a_reset_forgets_what_is_here_and_what_is_on_its_way(scene: &Scene) {
        store(scene, 100, 1, 2);
        scene.hold_all(true);
        let on_its_way = offload(scene, &blocks(200, 4, 2));
        scene.connector.reset().unwrap();
        scene.hold_all(false);
        on_its_way.wait(Some(SOON));
        assert_eq!(found(scene, 100..102), [false, false]);
        assert_eq!(found(scene, 200..202), [false, false]);
        store(scene, 200, 4, 2);
        assert_loads(scene, 200, 1, 2);
    }

    fn a_shutdown_answers_every_copy_and_takes_no_more(scene: &Scene) {
        scene.hold_all(true);
        let copies: Vec<Completion> = (1..7).map(|n| offload(scene, &blocks(100 + u64::from(n), n, 1))).collect();
        let began = Instant::now();
        scene.connector.shutdown(Duration::from_millis(50));
        assert!(began.elapsed() < SOON);
        assert!(copies.iter().all(|copy| copy.outcome() == Some(End::Cancelled)));
        let offered = scene.connector.offload(&offers(&blocks(100, 1, 1)), Step(0), None);
        assert_eq!(offered.unwrap_err(), Closed::ShutDown);
        let loaded = scene.connector.load(&blocks(100, 1, 1), Step(0), None);
        assert_eq!(loaded.unwrap_err(), Refused::Closed(Closed::ShutDown));
    }

    fn of_many_copies_at_once_each_moves_its_own_bytes(scene: &Scene) {
        for round in 1..20 {
            let first = round * 1000;
            (1..PAGES).for_each(|page| scene.fill(page, first + u64::from(page)));
            let store = |page| offload(scene, &blocks(first + u64::from(page), page, 1));
            let stores: Vec<Completion> = (1..=UNITS).map(store).collect();
            assert!(stores.iter().all(|store| store.wait(Some(SOON)) == Some(End::Done)));
            // Block n into page n + UNITS.
            let load = |n: u32| scene.connector.load(&blocks(first + u64::from(n), n + UNITS, 1), Step(0), None);
            let loads: Vec<Completion> = (1..=UNITS).map(|n| load(n).unwrap()).collect();
            assert!(loads.iter().all(|load| load.wait(Some(SOON)) == Some(End::Done)));
            (1..=UNITS).for_each(|n| scene.assert_holds(n + UNITS, first + u64::from(n)));
        }
    }
}

/// What is lost with a shard, and how the tier goes on.
mod a_shard_that_is_lost {
    use super::*;

    /// A tier that holds blocks 10 and 11, and is storing blocks 100 and 101 on both shards.
    fn in_mid_copy(behaves: fn(&Scene, Completion)) {
        Scene::with(Setup::Processes, |scene| {
            store(scene, 10, 8, 2);
            scene.hold_all(true);
            let running = offload(scene, &blocks(100, 1, 2));
            until("the copy runs", || scene.running() == 2);
            behaves(scene, running);
        });
    }

    fn why_failed(copy: &Completion) -> String {
        match copy.wait(Some(SOON)) {
            Some(End::Failed(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    fn assert_lost(scene: &Scene) {
        until("the loss is seen", || scene.connector.metrics().losses == 1);
        assert_eq!(found(scene, 10..12), [false, false]);
        let refused = scene.connector.load(&blocks(10, 4, 2), Step(0), None).unwrap_err();
        assert_eq!(refused, Refused::NotHere);
        let offered = scene.connector.offload(&offers(&blocks(300, 1, 3)), Step(0), None);
        assert!(matches!(offered, Ok(Offered::Dropped)));
        let metrics = scene.connector.metrics();
        assert_eq!((metrics.dropped_lost, metrics.dropped_busy, metrics.blocks), (3, 0, 0));
        scene.connector.verify().unwrap();
    }

    #[test]
    fn by_a_kill_is_an_error_within_a_bound_and_the_rest_goes_on() {
        in_mid_copy(|scene, running| {
            let began = Instant::now();
            scene.kill(1);
            scene.hold_all(false);
            assert_eq!(why_failed(&running), "the worker of shard 1 is lost: the other side hung up");
            assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
            assert_lost(scene);
            scene.restart(1);
            // Shard 0 has the blocks still. A block that one shard does not have is a miss.
            assert_eq!(found(scene, 10..12), [false, false]);
            assert_eq!(scene.connector.metrics().index.lost, 2);
            store(scene, 100, 1, UNITS);
            assert_loads(scene, 100, 1, UNITS);
        });
    }

    #[test]
    fn by_a_stop_is_an_error_within_a_bound_and_writes_into_no_page_when_it_goes_on() {
        Scene::with(Setup::Processes, |scene| {
            store(scene, 10, 8, 2);
            scene.hold(0, true);
            let running = scene.connector.load(&blocks(10, 1, 2), Step(0), None).unwrap();
            until("the copy runs", || scene.running() == 1);
            scene.stop(0);
            let began = Instant::now();
            let why = why_failed(&running);
            assert!(why.contains("shard 0 is lost: nothing was heard of"), "{why}");
            assert!(began.elapsed() < 2 * PATIENCE, "{:?}", began.elapsed());
            assert_lost(scene);
            // Its pages belong to others now.
            (1..3).for_each(|page| scene.fill(page, 55));
            scene.hold(0, false);
            scene.go_on(0);
            until("it joins again", || scene.rejoin(0));
            (1..3).for_each(|page| scene.assert_holds(page, 55));
            assert_loads(scene, 10, 1, 2);
        });
    }

    #[test]
    fn by_its_connection_alone_keeps_what_was_stored() {
        in_mid_copy(|scene, running| {
            scene.disconnect(1);
            until("shard 1 gives up", || scene.running() == 1);
            scene.hold_all(false);
            why_failed(&running);
            assert_lost(scene);
            until("it joins again", || scene.rejoin(1));
            assert!(all_found(scene, 10..12));
            assert_eq!(found(scene, 100..102), [false, false], "they are on one shard only");
            assert_loads(scene, 10, 1, 2);
            store(scene, 100, 1, UNITS - 2);
            assert_loads(scene, 100, 1, UNITS - 2);
        });
    }

    #[test]
    fn by_a_kill_does_not_hold_a_shutdown_up() {
        in_mid_copy(|scene, running| {
            scene.kill(1);
            let began = Instant::now();
            scene.connector.shutdown(Duration::from_millis(10));
            assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
            assert!(running.is_complete());
        });
    }

    #[test]
    fn by_a_stop_does_not_hold_a_shutdown_up_for_longer_than_it_may_be_silent() {
        in_mid_copy(|scene, running| {
            scene.stop(1);
            let began = Instant::now();
            scene.connector.shutdown(Duration::from_millis(10));
            assert!(began.elapsed() < 2 * PATIENCE, "{:?}", began.elapsed());
            assert_eq!(running.outcome(), Some(End::Cancelled));
        });
    }

    #[test]
    fn may_come_back_many_times() {
        Scene::with(Setup::Processes, |scene| {
            for round in 0..6 {
                store(scene, 100, 1, 3);
                scene.kill(round % 2);
                scene.restart(round % 2);
                assert_eq!(found(scene, 100..103), [false; 3]);
            }
        });
    }
}

/// The life of a worker's process.
#[test]
#[ignore = "other tests run it, in a process of its own"]
fn worker_process() {
    scene::work();
}
