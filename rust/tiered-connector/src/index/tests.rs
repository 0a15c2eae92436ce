use super::*;

fn key(number: u64) -> TierKey {
    TierKey { hash: number, guard: [number as u8; 16] }
}

fn blocks(numbers: impl IntoIterator<Item = u64>) -> Vec<(TierKey, PageId)> {
    numbers.into_iter().map(|number| (key(number), PageId(100 + number as u32))).collect()
}

fn offers(numbers: impl IntoIterator<Item = u64>) -> Vec<Offer> {
    blocks(numbers).into_iter().map(Offer::from).collect()
}

fn offers_of(priority: Priority, numbers: impl IntoIterator<Item = u64>) -> Vec<Offer> {
    blocks(numbers).into_iter().map(|(key, page)| Offer { key, page, priority }).collect()
}

fn index(units: u32) -> TierIndex {
    TierIndex::new(units, EvictionPolicy::PriorityLru)
}

/// Stores blocks and ends the store.
fn stored(index: &mut TierIndex, numbers: impl IntoIterator<Item = u64>) {
    let job = index.store(&offers(numbers), Step(0)).expect("there is something to store");
    assert!(index.apply(job.id, &Outcome::Done));
    index.verify().unwrap();
}

fn here(index: &TierIndex, numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.filter(|&number| index.contains(&key(number))).collect()
}

#[test]
fn a_block_is_found_once_its_store_is_done() {
    let mut index = index(4);
    let job = index.store(&offers([1, 2]), Step(7)).unwrap();
    assert_eq!((job.direction, &job.units[..]), (Direction::Store, &[UnitId(0), UnitId(1)][..]));
    assert_eq!((&job.pages[..], job.after), (&[PageId(101), PageId(102)][..], Step(7)));
    assert_eq!((here(&index, 0..5), index.blocks()), (vec![], 0));
    assert!(index.load(&blocks([1]), Step(0)).is_none());
    index.verify().unwrap();

    assert!(index.apply(job.id, &Outcome::Done));
    assert_eq!((here(&index, 0..5), index.blocks()), (vec![1, 2], 2));
    assert_eq!(index.leading(&mut [key(1), key(2), key(3)].into_iter()), (2, Some(key(3))));
    assert_eq!(index.leading(&mut [key(3), key(1)].into_iter()), (0, Some(key(3))));
    assert!(!index.apply(job.id, &Outcome::Done), "it has ended already");
}

#[test]
fn a_store_that_fails_leaves_no_block_and_gives_its_units_back() {
    for outcome in [Outcome::Failed("a fault".into()), Outcome::Cancelled] {
        let mut index = index(2);
        let job = index.store(&offers([1, 2]), Step(0)).unwrap();
        index.apply(job.id, &outcome);
        index.verify().unwrap();
        assert_eq!((here(&index, 0..5), index.counters().unstored), (vec![], 2));
        stored(&mut index, [1, 3]);
        assert_eq!(here(&index, 0..5), [1, 3]);
    }
}

#[test]
fn equal_content_is_stored_once() {
    let mut index = index(4);
    let first = index.store(&offers([1, 2]), Step(0)).unwrap();
    let second = index.store(&offers([1, 2, 3]), Step(0)).unwrap();
    assert_eq!(second.pages, [PageId(103)]);
    for job in [first, second] {
        index.apply(job.id, &Outcome::Done);
    }
    assert!(index.store(&offers([3, 1]), Step(0)).is_none());
    assert_eq!((index.counters().known, index.counters().stored), (4, 3));
}

#[test]
fn another_guard_under_the_same_hash_is_another_block() {
    let mut index = index(4);
    stored(&mut index, [1]);
    let other = TierKey { guard: [9; 16], ..key(1) };
    assert!(!index.contains(&other));
    assert!(index.load(&[(other, PageId(5))], Step(0)).is_none());
    assert!(index.store(&[(other, PageId(5)).into()], Step(0)).is_none());
    assert_eq!(index.counters().collisions, 1);
    assert_eq!(
        (index.leading(&mut [other].into_iter()).0, index.counters().collisions),
        (0, 2),
        "a counted miss"
    );
    assert!(index.contains(&key(1)));
}

#[test]
fn the_least_recently_used_block_makes_room_and_a_prefix_goes_from_its_tail() {
    let mut index = index(4);
    stored(&mut index, [1, 2]);
    stored(&mut index, [3, 4]);
    index.touch(&[1, 2]);
    stored(&mut index, [5]);
    assert_eq!(here(&index, 0..9), [1, 2, 3, 5], "4 was the tail of the older prefix");
    stored(&mut index, [6, 7]);
    assert_eq!(here(&index, 0..9), [1, 5, 6, 7], "then 3, and 2 before 1");
    assert_eq!(index.counters().evicted, 3);
}

#[test]
fn a_block_that_is_read_or_written_is_not_evicted() {
    let mut index = index(3);
    stored(&mut index, [1]);
    let load = index.load(&blocks([1]), Step(0)).unwrap();
    assert_eq!(
        (load.direction, &load.units[..], &load.pages[..]),
        (Direction::Load, &[UnitId(0)][..], &[PageId(101)][..])
    );
    let store = index.store(&offers([2, 3, 4]), Step(0)).unwrap();
    assert_eq!(store.pages, [PageId(102), PageId(103)], "there are two units left");
    assert_eq!(index.counters().no_unit, 1);
    assert!(index.store(&offers([5]), Step(0)).is_none());
    index.verify().unwrap();
    index.apply(load.id, &Outcome::Done);
    index.apply(store.id, &Outcome::Done);
    stored(&mut index, [5]);
    assert_eq!(here(&index, 0..9), [2, 3, 5], "1 was used before 2 and 3 were stored");
}

#[test]
fn a_load_is_all_or_nothing() {
    let mut index = index(4);
    stored(&mut index, [1, 2]);
    assert!(index.load(&blocks([1, 2, 3]), Step(0)).is_none());
    assert_eq!(index.in_flight(), 0);
    index.verify().unwrap();
}

#[test]
fn a_block_makes_no_room_for_one_of_lower_priority() {
    let mut index = index(1);
    let high = Priority::new(80).unwrap();
    let job = index.store(&offers_of(high, [1]), Step(0)).unwrap();
    index.apply(job.id, &Outcome::Done);
    assert!(index.store(&offers([2]), Step(0)).is_none());
    assert_eq!(index.counters().no_unit, 1);
    let job = index.store(&offers_of(high, [3]), Step(0)).unwrap();
    index.apply(job.id, &Outcome::Done);
    assert_eq!(here(&index, 0..9), [3]);
}

#[test]
fn a_reset_forgets_what_is_here_and_what_is_on_its_way() {
    let mut index = index(4);
    stored(&mut index, [1, 2]);
    let load = index.load(&blocks([1]), Step(0)).unwrap();
    let store = index.store(&offers([3]), Step(0)).unwrap();
    index.reset();
    index.verify().unwrap();
    assert_eq!((here(&index, 0..9), index.blocks()), (vec![], 0));

    // The same block again, while the old one is still being written: it is another unit.
    let again = index.store(&offers([3]), Step(0)).unwrap();
    assert_ne!(again.units, store.units);
    index.apply(store.id, &Outcome::Done);
    index.verify().unwrap();
    assert!(here(&index, 0..9).is_empty());
    index.apply(load.id, &Outcome::Done);
    index.apply(again.id, &Outcome::Done);
    index.verify().unwrap();
    assert_eq!((here(&index, 0..9), index.counters().unstored), (vec![3], 1));
}

#[test]
fn a_load_that_ends_badly_leaves_the_block_where_it_is() {
    let mut index = index(2);
    stored(&mut index, [1]);
    let job = index.load(&blocks([1]), Step(0)).unwrap();
    index.apply(job.id, &Outcome::Cancelled);
    index.verify().unwrap();
    assert_eq!((here(&index, 0..9), index.counters().unloaded), (vec![1], 1));
}
