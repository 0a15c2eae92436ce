use super::*;
use block_pool::EvictionPolicy;

fn key(number: u64) -> TierKey {
    TierKey { hash: number, guard: [number as u8; 16] }
}

/// Another block of the same hash.
fn other(number: u64) -> TierKey {
    TierKey { guard: [0xff; 16], ..key(number) }
}

fn index(units: u32) -> TierIndex {
    TierIndex::new(units, EvictionPolicy::PriorityLru)
}

fn wanted(numbers: &[u64]) -> Vec<(TierKey, Priority)> {
    numbers.iter().map(|&number| (key(number), Priority::DEFAULT)).collect()
}

/// Stores blocks and ends the store.
fn stored(index: &mut TierIndex, numbers: &[u64]) {
    let offers: Vec<Offer> = numbers.iter().map(|&number| Offer::from((key(number), PageId(1)))).collect();
    let job = index.store(&offers, Step(0)).unwrap();
    index.apply(job.id, &Outcome::Done);
}

fn here(index: &TierIndex) -> Vec<u64> {
    index.verify().unwrap();
    (0..20).filter(|&number| index.contains(&key(number))).collect()
}

#[test]
fn blocks_that_were_filled_are_found_with_their_priority() {
    let mut index = index(3);
    let (id, units) = index.fill(&[(key(1), Priority::HIGHEST), (key(2), Priority::DEFAULT)]).unwrap();
    assert_eq!((here(&index), index.blocks(), index.in_flight()), (vec![], 0, 0));
    assert!(index.is_being_stored(&key(1)) && index.place_of(&key(1)) == Some(units[0]));
    index.apply(id, &Outcome::Done);
    assert_eq!((here(&index), index.counters().filled, index.counters().stored), (vec![1, 2], 2, 0));
    let priorities = (index.priority(units[0]), index.priority(units[1]));
    assert_eq!(priorities, (Priority::HIGHEST, Priority::DEFAULT));
}

#[test]
fn what_is_here_or_comes_or_is_named_twice_is_not_filled_and_nothing_gives_way() {
    let mut index = index(3);
    stored(&mut index, &[1]);
    let (id, _) = index.fill(&wanted(&[2])).unwrap();
    for refused in [&[3, 1][..], &[3, 2], &[3, 3], &[3, 4, 5]] {
        assert_eq!(index.fill(&wanted(refused)), None, "{refused:?}");
    }
    assert_eq!(index.fill(&[(other(1), Priority::DEFAULT)]), None, "its hash is another block's");
    index.apply(id, &Outcome::Done);
    assert_eq!((here(&index), index.counters().evicted), (vec![1, 2], 0));
}

#[test]
fn units_that_are_held_stay_and_keep_their_place_in_the_order_of_use() {
    let mut index = index(3);
    stored(&mut index, &[3]);
    stored(&mut index, &[2]);
    stored(&mut index, &[1]);
    let oldest = index.unit_of(&key(3)).unwrap();
    let held = index.hold(&[oldest]);
    assert_eq!(index.available(), 2);
    stored(&mut index, &[4]);
    assert_eq!(here(&index), [1, 3, 4], "the next oldest went");
    index.apply(held, &Outcome::Done);
    stored(&mut index, &[5]);
    assert_eq!(here(&index), [1, 4, 5]);
}

#[test]
fn each_unit_of_a_job_may_fail_by_itself() {
    let mut index = index(4);
    let (id, filled) = index.fill(&wanted(&[1, 2, 3])).unwrap();
    index.fail(id, &HashSet::from([filled[1]]));
    assert_eq!(index.place_of(&key(2)), None);
    index.apply(id, &Outcome::Done);
    assert_eq!((here(&index), index.counters().filled, index.available()), (vec![1, 3], 2, 4));

    let read = index.load_from(vec![filled[0], filled[2]], Vec::new(), Step(0));
    index.fail(read.id, &HashSet::from([filled[2]]));
    assert_eq!((index.counters().unloaded, index.available()), (1, 3));
    index.apply(read.id, &Outcome::Done);
    assert_eq!((index.counters().loaded, index.available()), (1, 4));
    index.fail(read.id, &HashSet::from([filled[0]]));
    assert_eq!(here(&index), [1, 3], "a job that has ended does not fail");
}

#[test]
fn a_store_that_fails_in_part_counts_what_it_did_not_store() {
    let mut index = index(4);
    let offers = [1, 2, 3].map(|number| Offer::from((key(number), PageId(1))));
    let job = index.store(&offers, Step(0)).unwrap();
    index.fail(job.id, &HashSet::from([job.units[1]]));
    index.apply(job.id, &Outcome::Done);
    assert_eq!((here(&index), index.counters().stored, index.counters().unstored), (vec![1, 3], 2, 1));
}

#[test]
fn a_fill_that_ends_after_a_reset_is_not_found_and_its_units_are_free() {
    let mut index = index(3);
    let (id, filled) = index.fill(&wanted(&[1, 2])).unwrap();
    let waiting = index.load_from(filled.clone(), Vec::new(), Step(0));
    index.reset();
    index.fail(id, &HashSet::from([filled[0]]));
    index.apply(id, &Outcome::Done);
    assert_eq!((here(&index), index.available()), (vec![], 1), "the load has them still");
    index.apply(waiting.id, &Outcome::Done);
    assert_eq!((here(&index), index.available()), (vec![], 3));
}

#[test]
fn a_load_from_units_that_are_being_filled_keeps_them_when_the_fill_has_failed() {
    let mut index = index(2);
    let (id, filled) = index.fill(&wanted(&[1, 2])).unwrap();
    let waiting = index.load_from(filled, Vec::new(), Step(0));
    index.apply(id, &Outcome::Cancelled);
    assert_eq!((here(&index), index.available()), (vec![], 0));
    assert_eq!(index.fill(&wanted(&[3])), None);
    index.apply(waiting.id, &Outcome::Failed("it was not filled".into()));
    assert_eq!(index.available(), 2);
    assert!(index.fill(&wanted(&[1, 2])).is_some());
}

#[test]
fn a_job_that_was_withdrawn_leaves_the_order_of_use_as_it_was() {
    let mut index = index(2);
    stored(&mut index, &[2]);
    stored(&mut index, &[1]);
    let oldest = index.unit_of(&key(2)).unwrap();
    let job = index.load_from(vec![oldest], Vec::new(), Step(0));
    index.withdraw(job.id);
    assert!(!index.apply(job.id, &Outcome::Done), "it is no job any more");
    stored(&mut index, &[3]);
    assert_eq!((here(&index), index.counters().loaded), (vec![1, 3], 0));
}

#[test]
fn a_block_that_is_forgotten_gives_its_unit_to_the_next() {
    let mut index = index(2);
    stored(&mut index, &[1, 2]);
    let unit = index.unit_of(&key(1)).unwrap();
    index.forget(unit);
    index.forget(unit);
    assert_eq!((here(&index), index.counters().lost), (vec![2], 1));
    stored(&mut index, &[3]);
    assert_eq!((here(&index), index.counters().evicted), (vec![2, 3], 0));
}

#[test]
fn blocks_that_lay_in_units_before_are_found_there_and_the_oldest_goes_first() {
    let mut index = index(6);
    let blocks =
        [(4, 1), (0, 2), (2, 3)].map(|(unit, number)| (UnitId(unit), key(number), Priority::DEFAULT));
    index.restore(blocks.into_iter());
    assert_eq!((here(&index), index.available(), index.counters().evicted), (vec![1, 2, 3], 6, 0));
    assert_eq!(index.unit_of(&key(1)), Some(UnitId(4)));
    stored(&mut index, &[4, 5, 6]);
    assert_eq!(here(&index), [1, 2, 3, 4, 5, 6], "the free units first");
    stored(&mut index, &[7]);
    stored(&mut index, &[8]);
    assert_eq!(here(&index), [3, 4, 5, 6, 7, 8]);
}

#[test]
fn of_two_blocks_of_one_hash_that_lay_here_before_the_older_is_found() {
    let mut index = index(3);
    let blocks = [key(1), other(1), key(2)];
    let blocks = (0..).zip(blocks).map(|(unit, key)| (UnitId(unit), key, Priority::DEFAULT));
    index.restore(blocks);
    assert_eq!((here(&index), index.contains(&other(1))), (vec![1, 2], false));
    stored(&mut index, &[3]);
    assert_eq!((here(&index), index.counters().evicted), (vec![1, 2, 3], 0));
}
