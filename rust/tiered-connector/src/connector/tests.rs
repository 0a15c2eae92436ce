use super::*;
use crate::copy::{CpuEngine, Piece, Region};
use crate::host::Arena;
use block_pool::Priority;
use std::ptr::NonNull;
use std::sync::Arc;

pub(super) const PAGE: usize = 32;
pub(super) const WAIT: Option<Duration> = Some(Duration::from_secs(10));

/// A connector over a pool that the test reads and writes while nothing is copied.
pub(super) struct Scene {
    pub(super) connector: TieredConnector,
    pub(super) arena: Arc<Arena>,
    pool: NonNull<u8>,
    pages: usize,
}

pub(super) fn key(number: u64) -> TierKey {
    TierKey { hash: number, guard: [number as u8; 16] }
}

fn offers(blocks: &[(TierKey, PageId)]) -> Vec<Offer> {
    blocks.iter().copied().map(Offer::from).collect()
}

impl Scene {
    pub(super) fn new(pages: usize, units: u32) -> Scene {
        Scene::with_policy(pages, units, EvictionPolicy::PriorityLru)
    }

    fn with_policy(pages: usize, units: u32, policy: EvictionPolicy) -> Scene {
        let pool: &'static mut [u8] = Box::leak(vec![0; pages * PAGE].into_boxed_slice());
        let pool = NonNull::from(pool).cast::<u8>();
        // SAFETY: leaked; the tests touch a page only while no copy does.
        let region =
            unsafe { Region::new(pool, pages * PAGE, pages, PAGE, vec![Piece { offset: 0, len: PAGE }]) };
        let arena = Arc::new(Arena::new(units, PAGE).unwrap());
        let engine = CpuEngine::new(vec![region.unwrap()], Arc::clone(&arena));
        let connector = TieredConnector::new(units, PAGE, policy, 2, Box::new(engine)).unwrap();
        Scene { connector, arena, pool, pages }
    }

    fn byte(&self, page: u32, byte: usize) -> *mut u8 {
        assert!((page as usize) < self.pages && byte < PAGE);
        // SAFETY: inside the pool.
        unsafe { self.pool.as_ptr().add(page as usize * PAGE + byte) }
    }

    pub(super) fn fill(&self, page: u32, value: u8) {
        // SAFETY: inside the pool, and nothing is copied now.
        (0..PAGE).for_each(|byte| unsafe { self.byte(page, byte).write(value) });
    }

    pub(super) fn is(&self, page: u32, value: u8) -> bool {
        // SAFETY: as above.
        (0..PAGE).all(|byte| unsafe { self.byte(page, byte).read() } == value)
    }

    fn offload(&self, blocks: &[(TierKey, PageId)]) -> Offered {
        self.connector.offload(&offers(blocks), Step(0), None).unwrap()
    }

    /// Stores blocks of these numbers from page 1, to the end; the index is not told.
    pub(super) fn store(&self, numbers: &[u64]) {
        let blocks: Vec<_> = numbers.iter().map(|&number| (key(number), PageId(1))).collect();
        let Offered::Storing(stored) = self.offload(&blocks) else { panic!("there is room") };
        assert_eq!(stored.wait(WAIT), Some(completion::Outcome::Done));
    }

    /// Reads a block into page 2, to the end; the index is not told.
    fn load(&self, number: u64) {
        let loaded = self.connector.load(&[(key(number), PageId(2))], Step(0), None).unwrap();
        assert_eq!(loaded.wait(WAIT), Some(completion::Outcome::Done));
    }

    pub(super) fn has(&self, numbers: &[u64]) -> Vec<bool> {
        let keys: Vec<TierKey> = numbers.iter().map(|&number| key(number)).collect();
        self.connector.lookup(&keys).unwrap()
    }
}

#[test]
fn blocks_come_back_byte_for_byte() {
    let scene = Scene::new(9, 8);
    let blocks: Vec<(TierKey, PageId)> = (1..9).map(|number| (key(number), PageId(number as u32))).collect();
    for page in 1..9 {
        scene.fill(page, page as u8 * 3);
    }
    let Offered::Storing(stored) = scene.offload(&blocks) else { panic!("there are units") };
    assert_eq!(stored.wait(WAIT), Some(completion::Outcome::Done));
    let Offered::Storing(nothing) = scene.offload(&blocks) else { panic!("there is room") };
    assert_eq!(nothing.outcome(), Some(completion::Outcome::Done), "they are here already");
    for page in 1..9 {
        scene.fill(page, 0);
    }
    // Into other pages: block n into page 9 - n.
    let back: Vec<(TierKey, PageId)> =
        (1..9).map(|number| (key(number), PageId(9 - number as u32))).collect();
    let loaded = scene.connector.load(&back, Step(0), Some(5)).unwrap();
    assert_eq!(loaded.wait(WAIT), Some(completion::Outcome::Done));
    for page in 1..9 {
        assert!(scene.is(page, (9 - page) as u8 * 3));
    }
    assert_eq!(scene.connector.take_finished(), [(5, Outcome::Done)]);
    assert_eq!(scene.connector.host_bytes(), (0, 8 * PAGE as u64));
    scene.connector.verify().unwrap();
}

#[test]
fn a_look_up_counts_what_has_landed_and_stops_at_what_has_not() {
    let scene = Scene::new(4, 8);
    let Offered::Storing(stored) = scene.offload(&[(key(1), PageId(1)), (key(2), PageId(2))]) else {
        panic!("there are units")
    };
    stored.wait(WAIT);
    // No other call came in between that could have told the index.
    assert_eq!(scene.connector.leading([key(1), key(2), key(3)]), Ok((2, 0)));
    assert_eq!(scene.connector.leading([key(3), key(1)]), Ok((0, 0)));
    let Offered::Storing(stored) = scene.offload(&[(key(4), PageId(3))]) else { panic!("there are units") };
    stored.wait(WAIT);
    assert_eq!(scene.connector.leading([key(2), key(4), key(1), key(3)]), Ok((3, 0)));
    scene.connector.verify().unwrap();
}

#[test]
fn what_gives_way_to_an_offer_does_not_depend_on_how_far_a_load_is() {
    let scene = Scene::with_policy(3, 4, EvictionPolicy::PrioritySlru);
    scene.store(&[1, 2, 3, 4]);
    scene.load(1);
    scene.connector.touch(&[3, 4, 2]);
    // Of 1, 2 and 4, which are not read now, a third was found again: 1 is spared, though it is the oldest.
    scene.load(3);
    scene.store(&[5]);
    assert_eq!(scene.has(&[1, 2, 3, 4, 5]), [true, false, true, true, true]);
    scene.connector.verify().unwrap();
}

#[test]
fn an_offer_gets_the_unit_of_a_load_that_has_ended_if_there_is_no_other() {
    let scene = Scene::new(3, 1);
    scene.store(&[1]);
    scene.load(1);
    scene.store(&[2]);
    assert_eq!(scene.has(&[1, 2]), [false, true]);
    scene.connector.verify().unwrap();
}

#[test]
fn a_load_of_what_is_not_here_moves_nothing() {
    let scene = Scene::new(3, 2);
    let refused = scene.connector.load(&[(key(1), PageId(1))], Step(0), None).unwrap_err();
    assert_eq!(refused, Refused::NotHere);
    assert_eq!(
        scene.connector.load(&[], Step(0), Some(3)).unwrap().outcome(),
        Some(completion::Outcome::Done)
    );
    assert_eq!(scene.connector.take_finished(), [(3, Outcome::Done)]);
}

#[test]
fn after_a_shutdown_nothing_is_taken_and_what_was_asked_has_an_answer() {
    let scene = Scene::new(3, 2);
    scene.connector.shutdown(Duration::from_secs(1));
    scene.connector.shutdown(Duration::from_secs(1));
    let offered = scene.connector.offload(&offers(&[(key(1), PageId(1))]), Step(0), None);
    assert_eq!(offered.unwrap_err(), Closed::ShutDown);
    let refused = scene.connector.load(&[], Step(0), None).unwrap_err();
    assert_eq!(refused, Refused::Closed(Closed::ShutDown));
    assert_eq!(scene.connector.lookup(&[key(1)]), Ok(vec![false]));
}

#[test]
fn a_reset_forgets_what_is_on_its_way() {
    let scene = Scene::new(3, 2);
    let offered = scene.offload(&[(key(1), PageId(1)), (key(2), PageId(2))]);
    scene.connector.reset().unwrap();
    let Offered::Storing(stored) = offered else { panic!("there are units") };
    stored.wait(WAIT);
    assert_eq!(scene.connector.lookup(&[key(1), key(2)]), Ok(vec![false, false]));
    scene.connector.verify().unwrap();
}

#[test]
fn private_units_come_back_byte_for_byte_and_are_told_of_by_their_tags() {
    let scene = Scene::new(9, 4);
    let pages: Vec<PageId> = (1..4).map(PageId).collect();
    (1..4).for_each(|page| scene.fill(page, page as u8 * 5));
    let units = scene.connector.reserve(3).unwrap();
    let stored = scene.connector.store_private(&units, &pages, Step(0), 11).unwrap();
    assert_eq!(stored.wait(WAIT), Some(completion::Outcome::Done));
    (1..4).for_each(|page| scene.fill(page, 0));
    scene.connector.reset().unwrap();
    let others: Vec<PageId> = (5..8).map(PageId).collect();
    let loaded = scene.connector.load_private(&units, &others, Step(0), 12).unwrap();
    assert_eq!(loaded.wait(WAIT), Some(completion::Outcome::Done));
    assert!((1..4).all(|page| scene.is(page + 4, page as u8 * 5)));
    assert_eq!(scene.connector.take_finished(), [(11, Outcome::Done), (12, Outcome::Done)]);
    assert_eq!(scene.connector.host_bytes(), (PAGE as u64, 4 * PAGE as u64));
    scene.connector.free_private(&units);
    assert_eq!(
        (scene.connector.host_bytes().0, scene.connector.private_units()),
        (4 * PAGE as u64, Some(vec![]))
    );
    scene.connector.verify().unwrap();
}

#[test]
fn after_a_shutdown_private_copies_are_cancelled_and_no_unit_is_had() {
    let scene = Scene::new(3, 4);
    let units = scene.connector.reserve(1).unwrap();
    scene.connector.shutdown(Duration::ZERO);
    assert_eq!(scene.connector.reserve(1), Err(NoUnits::Closed(Closed::ShutDown)));
    assert_eq!(scene.connector.check_open(), Err(Closed::ShutDown));
    let stored = scene.connector.store_private(&units, &[PageId(1)], Step(0), 5).unwrap();
    assert_eq!(stored.outcome(), Some(completion::Outcome::Cancelled));
    assert_eq!(scene.connector.take_finished(), [(5, Outcome::Cancelled)]);
    scene.connector.verify().unwrap();
}

#[test]
fn what_is_here_of_an_offer_does_not_give_way_to_the_rest() {
    for policy in [EvictionPolicy::PriorityLru, EvictionPolicy::PrioritySlru] {
        for priority in [Priority::DEFAULT, Priority::LOWEST] {
            let scene = Scene::with_policy(4, 4, policy);
            let first = Offer { key: key(2), page: PageId(1), priority };
            let Offered::Storing(stored) = scene.connector.offload(&[first], Step(0), None).unwrap() else {
                panic!("there are units")
            };
            stored.wait(WAIT);
            scene.store(&[1]);
            scene.store(&[6]);
            scene.store(&[2, 3, 4, 5]);
            scene.connector.verify().unwrap();
            assert_eq!(scene.has(&[1, 2, 3, 4, 5, 6]), [false, true, true, true, true, false]);
            assert_eq!(scene.connector.metrics().index.evicted, 2);
        }
    }
}

#[test]
fn an_offer_of_what_is_here_is_no_use_of_it() {
    let scene = Scene::new(4, 3);
    for numbers in [[1], [2], [3], [1]] {
        scene.store(&numbers);
    }
    scene.store(&[4]);
    scene.connector.verify().unwrap();
    assert_eq!(scene.has(&[1, 2, 3, 4]), [false, true, true, true], "the oldest is the oldest still");
}
