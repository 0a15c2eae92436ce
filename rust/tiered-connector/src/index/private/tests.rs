use super::*;
use crate::job::{Offer, Outcome, TierKey};
use block_pool::EvictionPolicy;

fn index(units: u32) -> TierIndex {
    TierIndex::new(units, EvictionPolicy::PriorityLru)
}

fn blocks(numbers: std::ops::Range<u64>) -> Vec<(TierKey, PageId)> {
    numbers.map(|number| (TierKey { hash: number, guard: [0; 16] }, PageId(number as u32))).collect()
}

/// Stores blocks of a priority, as many as there is room for.
fn store(index: &mut TierIndex, numbers: std::ops::Range<u64>, priority: Priority) {
    let offer = |(key, page)| Offer { key, page, priority };
    let offers: Vec<Offer> = blocks(numbers).into_iter().map(offer).collect();
    if let Some(job) = index.store(&offers, Step(0)) {
        index.apply(job.id, &Outcome::Done);
    }
    index.verify().unwrap();
}

#[test]
fn private_units_are_taken_from_blocks_of_any_priority_and_given_to_none() {
    let mut index = index(4);
    store(&mut index, 0..4, Priority::HIGHEST);
    let units = index.reserve(3).unwrap();
    index.verify().unwrap();
    assert_eq!((units.len(), index.private_units().len(), index.blocks()), (3, 3, 1));
    store(&mut index, 10..14, Priority::HIGHEST);
    assert_eq!((index.private_units().len(), index.blocks()), (3, 1), "one block had room");
    assert_eq!(index.counters().stored, 5);
}

#[test]
fn all_units_are_had_or_none() {
    let mut index = index(4);
    store(&mut index, 0..1, Priority::DEFAULT);
    index.reserve(1).unwrap();
    assert_eq!(index.reserve(4), Err(TooFew { free: 3, evictable: 1, total: 4 }));
    assert_eq!((index.private_units().len(), index.blocks()), (1, 1));
    let job = index.load(&blocks(0..1), Step(0)).unwrap();
    assert_eq!(index.reserve(3), Err(TooFew { free: 2, evictable: 0, total: 4 }), "one is read");
    index.apply(job.id, &Outcome::Done);
    assert_eq!(index.reserve(3).map(|units| units.len()), Ok(3));
    index.verify().unwrap();
}

#[test]
fn a_reset_leaves_private_units_and_their_copies_alone() {
    let mut index = index(4);
    let units = index.reserve(2).unwrap();
    let stored = index.store_private(&units, &[PageId(7), PageId(8)], Step(3));
    assert_eq!(
        (stored.direction, stored.units.clone(), stored.after),
        (Direction::Store, units.clone(), Step(3))
    );
    index.reset();
    index.verify().unwrap();
    assert!(index.apply(stored.id, &Outcome::Done));
    let loaded = index.load_private(&units, &[PageId(1), PageId(2)], Step(4));
    index.reset();
    store(&mut index, 0..4, Priority::DEFAULT);
    assert_eq!(index.blocks(), 2);
    assert_eq!((loaded.direction, loaded.units.clone()), (Direction::Load, units));
    assert!(index.apply(loaded.id, &Outcome::Cancelled));
    index.verify().unwrap();
    assert_eq!(index.private_units().len(), 2);
}

#[test]
fn what_is_let_go_while_it_is_copied_is_free_when_the_copy_has_ended() {
    for outcome in [Outcome::Done, Outcome::Cancelled, Outcome::Failed("a fault".into())] {
        let mut index = index(2);
        let units = index.reserve(2).unwrap();
        let job = index.store_private(&units, &[PageId(7), PageId(8)], Step(0));
        index.free_private(&units);
        index.free_private(&units); // again changes nothing
        index.verify().unwrap();
        assert_eq!(index.reserve(1), Err(TooFew { free: 0, evictable: 0, total: 2 }));
        index.apply(job.id, &outcome);
        index.verify().unwrap();
        assert_eq!(index.reserve(2).map(|units| units.len()), Ok(2));
    }
}
