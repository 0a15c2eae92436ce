//! Units or slots are short: what does not fit moves nothing, and holds nothing.

use super::*;

#[test]
fn more_blocks_than_the_host_has_units_come_up_in_parts_and_nothing_gives_way_in_vain() {
    let (scene, vault) = holding(3, &[1, 2, 3, 4, 5, 6]);
    assert_eq!(leading(&scene, &[1, 2, 3, 4]), (1, 3));
    assert_eq!(load(&scene, &[(1, 5), (2, 6), (3, 7), (4, 8)]).unwrap_err(), Refused::NotHere);
    assert_eq!((leading(&scene, &[4, 5, 6]), vault.waiting().len()), ((3, 0), 0));
    assert_eq!((loadable(&scene, &[1, 2, 3, 4]), loadable(&scene, &[4, 5, 6])), (3, 3));
    assert_eq!(loadable(&scene, &[4, 5, 6, 1]), 3, "those that are read have the units");
    let loaded = load(&scene, &[(1, 5), (2, 6), (3, 7)]).unwrap();
    assert_eq!(loadable(&scene, &[4]), 0);
    vault.end_all();
    assert_eq!(loaded.wait(WAIT), Some(End::Done));
}

#[test]
fn blocks_do_not_come_up_while_writes_have_the_units() {
    let (scene, vault) = holding(2, &[1, 2, 3]);
    scene.store(&[4]);
    assert_eq!(below(&scene.connector).writing, 1);
    let held = scene.connector.reserve(1).unwrap();
    assert_eq!((leading(&scene, &[1]), loadable(&scene, &[1])), ((0, 1), 0));
    assert_eq!(load(&scene, &[(1, 5)]).unwrap_err(), Refused::NotHere);
    vault.end_all();
    assert_eq!(below(&scene.connector).writing, 0);
    assert_eq!(loadable(&scene, &[1]), 1);
    scene.connector.free_private(&held);
}

#[test]
fn writes_have_half_of_the_units_at_most_and_what_is_too_much_is_dropped() {
    let (scene, vault) = scene(4, 16);
    scene.store(&[1, 2, 3]);
    assert_eq!((below(&scene.connector).writing, below(&scene.connector).dropped_busy), (2, 1));
    scene.store(&[4]);
    assert_eq!((below(&scene.connector).writing, below(&scene.connector).dropped_busy), (2, 2));
    scene.store(&[5, 6]);
    assert_eq!(leading(&scene, &[1, 2, 5, 6]), (4, 0), "what is being written stays");
    vault.end_all();
    assert_eq!((below(&scene.connector).writing, below(&scene.connector).blocks), (0, 2));
}

#[test]
fn a_load_for_which_units_are_short_moves_nothing_and_its_parts_come_byte_for_byte() {
    let (scene, vault) = holding(2, &[1, 2, 3, 4, 5]);
    (5..8).for_each(|page| scene.fill(page, 0xee));
    let blocks = [(1, 5), (2, 6), (3, 7)];
    assert_eq!(load(&scene, &blocks).unwrap_err(), Refused::NotHere);
    assert!((5..8).all(|page| scene.is(page, 0xee)) && vault.waiting().is_empty());
    assert_eq!((free_units(&scene), scene.connector.metrics().index.loaded), (2, 0));
    for part in [&blocks[..2], &blocks[2..]] {
        let loaded = load(&scene, part).unwrap();
        vault.end_all();
        assert_eq!(loaded.wait(WAIT), Some(End::Done));
        assert_eq!(free_units(&scene), 2);
    }
    assert!(blocks.iter().all(|&(number, page)| scene.is(page, number as u8)));
    let counted = scene.connector.metrics().index;
    assert_eq!((counted.filled, counted.loaded), (3, 3));
}

#[test]
fn a_load_that_is_given_up_in_the_middle_of_its_plan_lets_go_of_what_it_has() {
    let (scene, vault) = holding(4, &[1, 2, 3, 4, 5, 6]);
    scene.connector.inner.lock().below.as_mut().unwrap().blocks_a_move = 1;
    // 3 is in the host, 1 gets a unit, and for the second 1 there is none.
    assert_eq!(load(&scene, &[(3, 5), (1, 6), (1, 7)]).unwrap_err(), Refused::NotHere);
    assert_eq!((vault.waiting().len(), free_units(&scene)), (0, 4));
    assert_eq!((leading(&scene, &[1, 2]), leading(&scene, &[3])), ((0, 2), (1, 0)));
    let loaded = load(&scene, &[(3, 5), (1, 6), (2, 7)]).unwrap();
    vault.end_all();
    assert_eq!(loaded.wait(WAIT), Some(End::Done));
    assert!(scene.is(5, 3) && scene.is(6, 1) && scene.is(7, 2));
    assert_eq!(free_units(&scene), 4);
}

#[test]
fn a_slot_that_is_being_read_is_given_to_no_other_block() {
    let (scene, vault) = scene(6, 2);
    scene.fill(1, 1);
    scene.store(&[1, 2]);
    scene.connector.verify().unwrap();
    vault.end_all();
    host_forgets(&scene);
    let loaded = load(&scene, &[(1, 5)]).unwrap();
    scene.fill(1, 3);
    scene.store(&[3, 4]);
    let counted = below(&scene.connector);
    assert_eq!((counted.index.evicted, counted.index.no_unit, counted.writing), (1, 1, 1), "2 made room");
    vault.end(1, &[], &DAMAGED);
    vault.end_all();
    assert_eq!((loaded.wait(WAIT), scene.is(5, 1)), (Some(End::Done), true));
    host_forgets(&scene);
    assert_eq!([1, 2, 3, 4].map(|number| leading(&scene, &[number]).1), [1, 0, 1, 0]);
}

#[test]
fn what_the_host_alone_has_is_no_reason_not_to_write_what_follows_it() {
    let (scene, vault) = scene(20, 16);
    let store = |numbers: &[u64], value: u8, failed: &[u64]| {
        scene.fill(1, value);
        scene.store(numbers);
        scene.connector.verify().unwrap();
        let written = vault.waiting().concat();
        vault.end(0, failed, &Failure::Io("no space".into()));
        written
    };
    store(&[1, 2, 3, 4], 10, &[]);
    store(&[5, 6, 7, 8], 20, &[5, 6, 7, 8]);
    let all = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    assert_eq!(store(&all, 30, &[]), [9, 10], "the rest is in the host");
    assert_eq!(leading(&scene, &all), (10, 0));
    host_forgets(&scene);
    assert_eq!((leading(&scene, &all), leading(&scene, &[9, 10])), ((0, 4), (0, 2)));
    assert_eq!(below(&scene.connector).blocks, 6, "what is listed can be read:");
    let loaded = load(&scene, &[(1, 5), (2, 6), (3, 7), (4, 8), (9, 9), (10, 10)]).unwrap();
    vault.end_all();
    assert_eq!(loaded.wait(WAIT), Some(End::Done));
    assert!((5..9).all(|page| scene.is(page, 10)) && scene.is(9, 30) && scene.is(10, 30));
}

#[test]
fn what_is_below_of_an_offer_does_not_give_way_to_the_rest() {
    let (scene, vault) = scene(8, 4);
    for numbers in [&[2][..], &[1], &[6], &[2, 3, 4, 5]] {
        scene.store(numbers);
        scene.connector.verify().unwrap();
        vault.end_all();
    }
    assert_eq!(below(&scene.connector).index.evicted, 2);
    host_forgets(&scene);
    assert_eq!([1, 2, 3, 4, 5, 6].map(|number| leading(&scene, &[number]).1), [0, 1, 1, 1, 1, 0]);
}
