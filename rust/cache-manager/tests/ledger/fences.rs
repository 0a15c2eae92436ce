//! Steps and fences: reads, writes and copies on a device that runs late, with overlapped steps.

use crate::device::Mover;
use crate::driver::Driver;

/// Fewer where the ledger is not optimised: a second there is a tenth of a second here.
const SEEDS: u64 = if cfg!(debug_assertions) { 600 } else { 6_000 };
const CALLS: usize = 160;

#[test]
fn every_forward_and_every_copy_sees_the_kv_of_its_own_prefix() {
    for seed in 0..SEEDS {
        let outcome = Driver::new(seed, Mover::new(true)).run(CALLS);
        assert_eq!(outcome, Ok(()), "seed {seed}");
    }
}

#[test]
fn every_group_of_layers_has_the_kv_that_its_tokens_read() {
    let mut reused = 0;
    for seed in 0..SEEDS {
        let mut driver = Driver::with_groups(seed, Mover::new(true));
        assert_eq!(driver.run(CALLS), Ok(()), "seed {seed}");
        reused += driver.reused_tokens();
    }
    assert!(reused > SEEDS, "{reused} tokens were reused");
}

#[test]
fn a_layer_that_reads_further_back_than_its_group_keeps_is_caught() {
    let run = |seed| Driver::with_groups(seed, Mover::new(true)).reading_one_more().run(CALLS).err();
    let fault = (0..SEEDS).find_map(run).expect("some window has let a page go");
    assert!(fault.contains("reads wrong KV"), "{fault}");
}

#[test]
fn an_engine_that_forgets_page_copies_is_caught() {
    let run = |seed| Driver::new(seed, Mover::new(true)).without_page_copies().run(CALLS).err();
    let fault = (0..SEEDS).find_map(run).expect("some fork writes behind tokens that it shares");
    assert!(fault.contains("reads wrong KV"), "{fault}");
}

#[test]
fn a_mover_that_ignores_fences_is_caught() {
    let caught = (0..SEEDS).find_map(|seed| Driver::new(seed, Mover::new(false)).run(CALLS).err());
    let fault = caught.expect("some copy reads a page before it is written");
    assert!(fault.contains("moves wrong KV"), "{fault}");
}
