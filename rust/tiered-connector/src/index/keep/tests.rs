use super::*;
use crate::job::{Job, Offer, Outcome, TierKey};
use block_pool::{EvictionPolicy, PageId, Step};

fn blocks(numbers: &[u64]) -> Vec<(TierKey, PageId)> {
    numbers.iter().map(|&hash| (TierKey { hash, guard: [1; 16] }, PageId(1))).collect()
}

fn store(index: &mut TierIndex, numbers: &[u64]) -> Job {
    let offers: Vec<Offer> = blocks(numbers).into_iter().map(Offer::from).collect();
    index.store(&offers, Step(0)).unwrap()
}

/// Blocks 0, 1, 2 in the units of these numbers, of four.
fn three_blocks() -> TierIndex {
    let mut index = TierIndex::new(4, EvictionPolicy::PriorityLru);
    let job = store(&mut index, &[0, 1, 2]);
    assert_eq!(job.units, [0, 1, 2].map(UnitId));
    index.apply(job.id, &Outcome::Done);
    index
}

fn keep(index: &mut TierIndex, held: &[u32]) {
    index.keep(&held.iter().copied().map(UnitId).collect());
    index.verify().unwrap();
}

fn found(index: &TierIndex) -> Vec<u64> {
    (0..6).filter(|&number| index.contains(&blocks(&[number])[0].0)).collect()
}

#[test]
fn blocks_whose_units_are_held_stay_and_the_other_units_are_free() {
    let mut index = three_blocks();
    keep(&mut index, &[1, 3]);
    assert_eq!((found(&index), index.counters().lost, index.blocks()), (vec![1], 2, 1));
    let job = store(&mut index, &[0, 4, 5]);
    index.apply(job.id, &Outcome::Done);
    assert_eq!((found(&index), index.counters().evicted), (vec![0, 1, 4, 5], 0));
    index.verify().unwrap();
}

#[test]
fn a_store_that_ended_before_and_is_told_of_after_is_not_seen() {
    let mut index = three_blocks();
    let job = store(&mut index, &[3]);
    keep(&mut index, &[0, 1, 2]);
    assert!(index.apply(job.id, &Outcome::Done));
    assert_eq!((found(&index), index.counters().unstored), (vec![0, 1, 2], 1));
    index.verify().unwrap();
    let again = store(&mut index, &[3]);
    index.apply(again.id, &Outcome::Done);
    assert_eq!(found(&index), [0, 1, 2, 3]);
    index.verify().unwrap();
}

#[test]
fn a_unit_that_is_read_is_not_given_away_before_the_load_has_ended() {
    let mut index = three_blocks();
    let load = index.load(&blocks(&[2]), Step(0)).unwrap();
    keep(&mut index, &[]);
    let job = store(&mut index, &[0, 1, 3, 4]);
    assert!(!job.units.contains(&UnitId(2)), "{:?}", job.units);
    index.apply(load.id, &Outcome::Failed("a fault".into()));
    index.verify().unwrap();
    assert_eq!(store(&mut index, &[5]).units, [UnitId(2)]);
    index.verify().unwrap();
}

#[test]
fn private_units_that_are_not_held_have_lost_their_bytes_until_they_are_let_go() {
    let mut index = three_blocks();
    let units = index.reserve(3).unwrap();
    let stored = index.store_private(&units[..2], &[PageId(1), PageId(2)], Step(0));
    index.apply(stored.id, &Outcome::Done);
    let storing = index.store_private(&units[2..], &[PageId(3)], Step(0));
    keep(&mut index, &[units[0].0, units[2].0]);
    assert!(!index.has_lost(&units[..1]), "it is held");
    assert!(index.has_lost(&units[1..2]), "it is not");
    assert!(index.has_lost(&units[2..]), "what was being written is not trusted");
    index.apply(storing.id, &Outcome::Done);
    index.free_private(&units);
    let again = index.reserve(3).unwrap();
    assert!(!index.has_lost(&again));
}
