use super::super::tests::{PAGE, Scene, WAIT, key};
use super::super::{Refused, TieredConnector};
use super::*;
use crate::host::Arena;
use crate::vault::{Moved, VaultCounters};
use block_pool::EvictionPolicy;
use completion::{Completion, Outcome as End, pending};
use std::time::Duration;

mod room;

/// A vault that moves nothing until it is told to, in any order.
struct Late {
    arena: Arc<Arena>,
    slots: Mutex<HashMap<UnitId, (TierKey, Vec<u8>)>>,
    asked: Mutex<Vec<Asked>>,
}

struct Asked {
    up: bool,
    moves: Vec<Move>,
    told: Moved,
}

impl Late {
    fn ask(&self, up: bool, moves: Vec<Move>, told: Moved) {
        self.asked.lock().push(Asked { up, moves, told });
    }

    /// The blocks of the lists that wait.
    fn waiting(&self) -> Vec<Vec<u64>> {
        let numbers = |asked: &Asked| asked.moves.iter().map(|one| one.key.hash).collect();
        self.asked.lock().iter().map(numbers).collect()
    }

    /// Ends a list; the blocks of these numbers fail.
    fn end(&self, which: usize, failed: &[u64], why: &Failure) {
        let Asked { up, moves, told } = self.asked.lock().remove(which);
        let mut unmoved = Vec::new();
        for Move { key, slot, unit, .. } in moves {
            // SAFETY: the unit is this move's until it has ended.
            let memory = unsafe { std::slice::from_raw_parts_mut(self.arena.unit(unit).as_ptr(), PAGE) };
            if failed.contains(&key.hash) {
                memory.iter_mut().filter(|_| up).for_each(|byte| *byte = 0xee);
                unmoved.push((slot, why.clone()));
            } else if up {
                let (held, bytes) = &self.slots.lock()[&slot];
                assert_eq!(*held, key, "the slot was given to another block");
                memory.copy_from_slice(bytes);
            } else {
                self.slots.lock().insert(slot, (key, memory.to_vec()));
            }
        }
        told(unmoved);
    }

    fn end_all(&self) {
        while !self.asked.lock().is_empty() {
            self.end(0, &[], &Failure::GivenUp);
        }
    }
}

impl Vault for Late {
    fn epoch(&self) -> u64 {
        0
    }

    fn write(&self, _epoch: u64, moves: Vec<Move>, told: Moved) {
        self.ask(false, moves, told);
    }

    fn read(&self, moves: Vec<Move>, told: Moved) {
        self.ask(true, moves, told);
    }

    fn reset(&self) -> Completion {
        let (completer, completion) = pending();
        completer.finish();
        completion
    }

    fn wait(&self, _: Duration) -> bool {
        self.asked.lock().is_empty()
    }

    fn flush(&self, timeout: Duration) -> bool {
        self.wait(timeout)
    }

    fn stop(&self, _: Duration) {
        for Asked { moves, told, .. } in std::mem::take(&mut *self.asked.lock()) {
            told(moves.into_iter().map(|one| (one.slot, Failure::GivenUp)).collect());
        }
    }

    fn counters(&self) -> VaultCounters {
        VaultCounters::default()
    }
}

/// A host of `units` units above a vault of `slots` slots.
fn scene(units: u32, slots: u32) -> (Scene, Arc<Late>) {
    let mut scene = Scene::new(20, units);
    let vault = Late { arena: Arc::clone(&scene.arena), slots: Mutex::default(), asked: Mutex::default() };
    let vault = Arc::new(vault);
    let index = TierIndex::new(slots, EvictionPolicy::PriorityLru);
    let below = Arc::clone(&vault);
    scene.connector = scene.connector.above(index, below);
    (scene, vault)
}

/// The same, with these blocks in both as far as there are units, written one after the other.
fn holding(units: u32, numbers: &[u64]) -> (Scene, Arc<Late>) {
    let (scene, vault) = scene(units, 16);
    for &number in numbers {
        scene.fill(1, number as u8);
        scene.store(&[number]);
        scene.connector.verify().unwrap();
        vault.end_all();
    }
    (scene, vault)
}

fn load(scene: &Scene, blocks: &[(u64, u32)]) -> Result<Completion, Refused> {
    let blocks: Vec<_> = blocks.iter().map(|&(number, page)| (key(number), PageId(page))).collect();
    let begun = scene.connector.load(&blocks, Step(0), None);
    scene.connector.verify().unwrap();
    begun
}

/// Leading blocks in the host, and below.
fn leading(scene: &Scene, numbers: &[u64]) -> (usize, usize) {
    scene.connector.leading(numbers.iter().map(|&number| key(number))).unwrap()
}

fn loadable(scene: &Scene, numbers: &[u64]) -> usize {
    scene.connector.loadable(numbers.iter().map(|&number| key(number))).unwrap()
}

fn below(connector: &TieredConnector) -> BelowMetrics {
    connector.verify().unwrap();
    connector.metrics().below.unwrap()
}

/// Units that nobody reads or writes.
fn free_units(scene: &Scene) -> u32 {
    scene.connector.verify().unwrap();
    scene.connector.inner.lock().index.available()
}

/// From now on blocks are below alone.
fn host_forgets(scene: &Scene) {
    scene.connector.verify().unwrap();
    scene.connector.inner.lock().index.reset();
}

const DAMAGED: Failure = Failure::Damaged;

#[test]
fn blocks_that_the_host_has_lost_come_up_byte_for_byte() {
    let (scene, vault) = holding(2, &[1, 2, 3, 4]);
    assert_eq!((leading(&scene, &[3, 4]), leading(&scene, &[1, 2, 3, 4])), ((2, 0), (2, 2)));
    let loaded = load(&scene, &[(1, 5), (2, 6)]).unwrap();
    assert!(!loaded.is_complete());
    vault.end_all();
    assert_eq!(loaded.wait(WAIT), Some(End::Done));
    assert!(scene.is(5, 1) && scene.is(6, 2));
    assert_eq!((leading(&scene, &[1, 2]), leading(&scene, &[3, 4])), ((2, 0), (0, 2)));
    let counted = scene.connector.metrics();
    assert_eq!((counted.index.filled, counted.index.loaded, below(&scene.connector).index.loaded), (2, 2, 2));
}

#[test]
fn a_load_goes_on_with_what_the_host_has_before_the_rest_has_come_up() {
    let (scene, vault) = holding(4, &[1, 2, 3, 4, 5]);
    let loaded = load(&scene, &[(1, 5), (2, 6), (3, 7)]).unwrap();
    assert!(scene.connector.mover.drain(Duration::from_secs(10)));
    assert!(scene.is(6, 2) && scene.is(7, 3) && !loaded.is_complete());
    vault.end_all();
    assert_eq!(loaded.wait(WAIT), Some(End::Done));
    assert!(scene.is(5, 1));
}

#[test]
fn blocks_that_are_asked_for_twice_are_read_once() {
    let (scene, vault) = holding(3, &[1, 2, 3, 4, 5]);
    let loads = [load(&scene, &[(1, 5), (2, 6)]).unwrap(), load(&scene, &[(2, 7)]).unwrap()];
    assert_eq!(vault.waiting(), [[1, 2]]);
    assert_eq!(leading(&scene, &[1, 2]), (0, 2), "they are on their way");
    vault.end_all();
    assert!(loads.iter().all(|load| load.wait(WAIT) == Some(End::Done)));
    assert!(scene.is(5, 1) && scene.is(6, 2) && scene.is(7, 2));
    let third = load(&scene, &[(2, 8)]).unwrap();
    assert_eq!((third.wait(WAIT), vault.waiting().len(), scene.is(8, 2)), (Some(End::Done), 0, true));
}

#[test]
fn fills_may_end_in_any_order() {
    let (scene, vault) = holding(4, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let loads = [1, 2, 3, 4].map(|number| load(&scene, &[(number, 4 + number as u32)]).unwrap());
    for which in [2, 0, 1, 0] {
        vault.end(which, &[], &DAMAGED);
    }
    for (load, number) in loads.iter().zip(1..) {
        assert_eq!(load.wait(WAIT), Some(End::Done));
        assert!(scene.is(4 + number, number as u8));
    }
    assert_eq!(leading(&scene, &[1, 2, 3, 4]), (4, 0));
    scene.connector.verify().unwrap();
}

#[test]
fn of_blocks_that_have_come_up_the_one_that_was_asked_for_first_goes_first_below() {
    for last in [0, 1] {
        let (scene, vault) = scene(8, 2);
        for number in [1, 2] {
            scene.store(&[number]);
            scene.connector.verify().unwrap();
            vault.end_all();
        }
        host_forgets(&scene);
        let loads = [load(&scene, &[(1, 5)]).unwrap(), load(&scene, &[(2, 6)]).unwrap()];
        vault.end(1 - last, &[], &DAMAGED);
        vault.end(0, &[], &DAMAGED);
        assert!(loads.iter().all(|load| load.wait(WAIT) == Some(End::Done)));
        scene.connector.verify().unwrap();
        scene.store(&[3]);
        scene.connector.verify().unwrap();
        vault.end_all();
        host_forgets(&scene);
        assert_eq!([1, 2, 3].map(|number| leading(&scene, &[number]).1), [0, 1, 1]);
    }
}

#[test]
fn a_block_that_is_damaged_fails_every_load_that_waits_for_it_and_is_found_when_it_was_stored_anew() {
    let (scene, vault) = holding(4, &[1, 2, 3, 4, 5, 6, 7]);
    let loads = [load(&scene, &[(1, 5), (2, 6), (3, 7)]).unwrap(), load(&scene, &[(3, 8)]).unwrap()];
    vault.end(0, &[2], &DAMAGED);
    for load in loads {
        assert!(matches!(load.wait(WAIT), Some(End::Failed(_))));
    }
    assert_eq!(leading(&scene, &[2]), (0, 0));
    assert_eq!(leading(&scene, &[1, 3]), (2, 0), "the others have come up");
    assert_eq!(below(&scene.connector).index.lost, 1);
    assert_eq!(load(&scene, &[(2, 9)]).unwrap_err(), Refused::NotHere);
    scene.fill(1, 2);
    scene.store(&[2]);
    scene.connector.verify().unwrap();
    vault.end_all();
    for number in 8..12 {
        scene.store(&[number]);
        scene.connector.verify().unwrap();
        vault.end_all();
    }
    assert_eq!(leading(&scene, &[2]), (0, 1));
    let again = load(&scene, &[(2, 9)]).unwrap();
    vault.end_all();
    assert_eq!((again.wait(WAIT), scene.is(9, 2)), (Some(End::Done), true));
}

#[test]
fn a_load_that_comes_after_a_fill_has_failed_is_refused() {
    let (scene, vault) = holding(2, &[1, 2, 3]);
    let failed = load(&scene, &[(1, 5)]).unwrap();
    vault.end(0, &[1], &DAMAGED);
    assert_eq!(load(&scene, &[(1, 6)]).unwrap_err(), Refused::NotHere);
    assert!(matches!(failed.wait(WAIT), Some(End::Failed(_))));
    assert_eq!(below(&scene.connector).blocks, 2);
}

#[test]
fn a_block_that_goes_between_a_look_up_and_its_load_takes_with_it_what_follows_and_not_what_leads_to_it() {
    let (scene, vault) = holding(8, &[1, 2, 3, 4, 5, 6, 7, 8]);
    host_forgets(&scene);
    assert_eq!(leading(&scene, &[1, 2, 3, 4, 5, 6, 7, 8]), (0, 8));
    let other = load(&scene, &[(4, 15)]).unwrap();
    vault.end(0, &[4], &DAMAGED);
    assert!(matches!(other.wait(WAIT), Some(End::Failed(_))));
    scene.fill(1, 0xee);
    let blocks: Vec<(u64, u32)> = (1..=8).map(|number| (number, number as u32)).collect();
    assert_eq!(load(&scene, &blocks).unwrap_err(), Refused::NotHere);
    assert!(scene.is(1, 0xee) && vault.waiting().is_empty(), "nothing moves");
    assert_eq!(leading(&scene, &[1, 2, 3, 4, 5, 6, 7, 8]), (0, 3));
    let rest = load(&scene, &blocks[..3]).unwrap();
    vault.end_all();
    assert_eq!(rest.wait(WAIT), Some(End::Done));
    assert!((1..=3).all(|number| scene.is(number, number as u8)));
    assert_eq!(free_units(&scene), 8);
}

#[test]
fn reads_that_were_given_up_leave_their_blocks_below() {
    let (scene, vault) = holding(2, &[1, 2, 3]);
    let failed = load(&scene, &[(1, 5)]).unwrap();
    vault.end(0, &[1], &Failure::GivenUp);
    assert!(matches!(failed.wait(WAIT), Some(End::Failed(_))));
    assert_eq!((leading(&scene, &[1]), below(&scene.connector).index.lost), ((0, 1), 0));
}

#[test]
fn a_reset_while_blocks_come_up_and_go_down_leaves_none_of_them() {
    let (scene, vault) = holding(4, &[1, 2, 3, 4, 5]);
    let loaded = load(&scene, &[(1, 5)]).unwrap();
    scene.fill(1, 6);
    scene.store(&[6]);
    assert_eq!(below(&scene.connector).writing, 1);
    scene.connector.reset().unwrap();
    scene.connector.verify().unwrap();
    scene.fill(1, 11);
    scene.store(&[1]);
    assert_eq!(leading(&scene, &[1]), (1, 0), "another block 1, of after the reset");
    vault.end_all();
    assert_eq!((loaded.wait(WAIT), scene.is(5, 1)), (Some(End::Done), true), "nobody else has its unit");
    scene.connector.verify().unwrap();
    vault.end_all();
    assert_eq!(leading(&scene, &[1]), (1, 0));
    assert!([2, 3, 4, 5, 6].iter().all(|&number| leading(&scene, &[number]) == (0, 0)));
    let again = load(&scene, &[(1, 7)]).unwrap();
    assert_eq!((again.wait(WAIT), scene.is(7, 11)), (Some(End::Done), true));
    assert_eq!((below(&scene.connector).writing, below(&scene.connector).blocks), (0, 1));
    assert_eq!(scene.connector.host_bytes(), (3 * PAGE as u64, 4 * PAGE as u64));
}

#[test]
fn a_read_that_fails_after_a_reset_takes_nothing_of_what_was_stored_since() {
    let (scene, vault) = holding(2, &[1, 2, 3]);
    let loaded = load(&scene, &[(1, 5)]).unwrap();
    scene.connector.reset().unwrap();
    scene.store(&[1]);
    assert_eq!(below(&scene.connector).writing, 1);
    vault.end(1, &[], &DAMAGED);
    vault.end(0, &[1], &DAMAGED);
    assert!(matches!(loaded.wait(WAIT), Some(End::Failed(_))));
    assert_eq!((leading(&scene, &[1]), below(&scene.connector).blocks), ((1, 0), 1));
}

#[test]
fn of_blocks_that_are_written_together_each_may_fail_alone() {
    let (scene, vault) = scene(6, 16);
    scene.store(&[1, 2, 3]);
    scene.connector.verify().unwrap();
    vault.end(0, &[2], &Failure::Io("no space".into()));
    let counted = below(&scene.connector);
    assert_eq!((counted.blocks, counted.index.stored, counted.index.unstored), (2, 2, 1));
    assert_eq!((counted.writing, scene.connector.below_bytes()), (0, (14 * PAGE as u64, 16 * PAGE as u64)));
    host_forgets(&scene);
    assert_eq!([1, 2, 3].map(|number| leading(&scene, &[number])), [(0, 1), (0, 0), (0, 1)]);
}

#[test]
fn a_hash_that_is_another_blocks_in_the_host_is_no_hit_below() {
    let (scene, vault) = holding(2, &[1, 2, 3]);
    let other = TierKey { guard: [0xff; 16], ..key(1) };
    let offers = [(other, PageId(1)).into()];
    let stored = scene.connector.offload(&offers, Step(0), None).unwrap();
    let super::super::Offered::Storing(stored) = stored else { panic!("there is room") };
    stored.wait(WAIT);
    assert_eq!(leading(&scene, &[1]), (0, 0), "its place in the host is another's");
    assert_eq!(load(&scene, &[(1, 5)]).unwrap_err(), Refused::NotHere);
    assert_eq!(below(&scene.connector).index.collisions, 1, "and the other one's below is this one's");
    vault.end_all();
    scene.connector.verify().unwrap();
}

#[test]
fn a_block_that_is_named_twice_in_a_load_is_refused_where_it_would_come_up() {
    let (scene, vault) = holding(2, &[1, 2, 3]);
    assert_eq!(load(&scene, &[(1, 5), (1, 6)]).unwrap_err(), Refused::NotHere);
    assert_eq!((vault.waiting().len(), leading(&scene, &[2, 3])), (0, (2, 0)));
}

#[test]
fn a_load_that_was_given_up_while_it_waits_for_a_fill_moves_nothing_onto_the_device() {
    let (scene, vault) = holding(2, &[1, 2, 3]);
    scene.fill(5, 77);
    let loaded = load(&scene, &[(1, 5)]).unwrap();
    loaded.cancel();
    vault.end_all();
    assert_eq!((loaded.wait(WAIT), scene.is(5, 77)), (Some(End::Cancelled), true));
    assert_eq!(leading(&scene, &[1]), (1, 0));
}

#[test]
fn a_shutdown_ends_what_waits_for_a_fill() {
    let (scene, vault) = holding(4, &[1, 2, 3, 4, 5]);
    let loads = [load(&scene, &[(1, 5)]).unwrap(), load(&scene, &[(1, 6), (5, 7)]).unwrap()];
    scene.store(&[6]);
    scene.connector.shutdown(Duration::ZERO);
    for load in loads {
        assert!(matches!(load.wait(WAIT), Some(End::Failed(_) | End::Cancelled)));
    }
    assert_eq!(vault.waiting().len(), 0);
    let counted = below(&scene.connector);
    assert_eq!((counted.writing, scene.connector.metrics().jobs), (0, 0));
    assert!(matches!(load(&scene, &[(1, 5)]).unwrap_err(), Refused::Closed(_)));
}

#[test]
fn blocks_that_are_used_on_the_device_stay_below_longer_than_others() {
    let (scene, vault) = scene(4, 3);
    let mut store = |number: u64| {
        scene.fill(1, number as u8);
        scene.store(&[number]);
        scene.connector.verify().unwrap();
        vault.end_all();
        scene.connector.verify().unwrap();
    };
    [1, 2, 3].into_iter().for_each(&mut store);
    scene.connector.touch(&[key(1).hash, key(2).hash]);
    store(4);
    store(5);
    host_forgets(&scene);
    let there = [1, 2, 3, 4, 5].map(|number| leading(&scene, &[number]).1);
    assert_eq!(there, [1, 0, 0, 1, 1], "3 was not used, and the end of a prefix goes before its beginning");
}

#[test]
fn what_was_used_before_a_reset_says_nothing_of_what_comes_after_it() {
    let (scene, vault) = scene(4, 2);
    scene.connector.touch(&[key(2).hash, key(1).hash]);
    scene.connector.reset().unwrap();
    for number in [1, 2, 3] {
        scene.store(&[number]);
        scene.connector.verify().unwrap();
        vault.end_all();
        scene.connector.verify().unwrap();
    }
    host_forgets(&scene);
    assert_eq!([1, 2, 3].map(|number| leading(&scene, &[number]).1), [0, 1, 1]);
}
