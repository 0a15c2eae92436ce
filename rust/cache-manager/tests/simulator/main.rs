//! A simulator of one replica and its host tier in virtual time: ledger and tier index are the product's, device
//! and mover are late, fail, and end in any order.
//!
//! `SIMULATOR_SEEDS` says how many seeds are run, `SIMULATOR_SEED` which is the first. A seed that fails is printed
//! with its last calls: it alone is run by `SIMULATOR_SEEDS=1 SIMULATOR_SEED=<it>`.

mod checks;
mod device;
mod engine;
mod forwards;
mod kv;
mod letting_go;
mod live;
mod mover;
mod random;
mod tier;

use engine::Engine;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tier::Broken;

const SEEDS: u64 = 500;

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given
        .map_or(default, |given| given.parse().unwrap_or_else(|_| panic!("{name}={given}: must be a number")))
}

/// Runs one seed. A panic of the product's is a fault like others.
fn run(seed: u64, broken: Option<Broken>) -> Result<(), String> {
    let mut engine = Engine::new(seed, broken);
    catch_unwind(AssertUnwindSafe(|| engine.run())).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(engine.explain(&format!("panicked: {}", text.unwrap_or_default())))
    })
}

/// Every copy moves the bytes of its own prefix, and every pin ends once; in every fourth seed, so that four tests run
/// beside each other.
fn run_every_fourth(from: u64) {
    let first = number("SIMULATOR_SEED", 0);
    for at in (from..number("SIMULATOR_SEEDS", SEEDS)).step_by(4) {
        let seed = first.wrapping_add(at);
        if let Err(fault) = run(seed, None) {
            panic!("SIMULATOR_SEED={seed}: {fault}");
        }
    }
}

#[test]
fn copies_and_books_are_right_in_the_first_of_four_seeds() {
    run_every_fourth(0);
}

#[test]
fn copies_and_books_are_right_in_the_second_of_four_seeds() {
    run_every_fourth(1);
}

#[test]
fn copies_and_books_are_right_in_the_third_of_four_seeds() {
    run_every_fourth(2);
}

#[test]
fn copies_and_books_are_right_in_the_last_of_four_seeds() {
    run_every_fourth(3);
}

/// A simulator that calls everything and meets nothing proves nothing.
#[test]
fn few_seeds_meet_loads_and_stores_that_end_in_every_way() {
    let mut met: HashMap<&str, u64> = HashMap::new();
    for seed in 0..60 {
        let mut engine = Engine::new(seed, None);
        engine.run().unwrap_or_else(|fault| panic!("SIMULATOR_SEED={seed}: {fault}"));
        let (ledger, index) = (engine.ledger.counters(), engine.tier.index.counters());
        let counts = [
            ("blocks loaded for a request that waited", ledger.loaded_blocks),
            ("blocks loaded for one that did not", index.loaded - ledger.loaded_blocks.min(index.loaded)),
            ("blocks not loaded", index.unloaded),
            ("blocks stored", index.stored),
            ("blocks not stored", index.unstored),
            ("blocks evicted by the tier", index.evicted),
            ("blocks without a unit", index.no_unit),
            ("copies refused", ledger.copies_refused),
            ("copies failed", ledger.copies_failed),
            ("evictions", ledger.evictions),
            ("resets", ledger.resets),
            ("results that nobody waited for", ledger.dropped_results),
            ("page copies", ledger.page_copies),
        ];
        for (what, count) in counts {
            *met.entry(what).or_default() += count;
        }
    }
    let rare: Vec<_> = met.into_iter().filter(|&(_, count)| count < 10).collect();
    assert!(rare.is_empty(), "met too seldom: {rare:?}");
}

#[test]
fn every_broken_variant_is_caught() {
    const EARLY: &str = "is not pinned while copy";
    const BYTES: &str = "other bytes than its block";
    const UNIT: &str = "is given away while it is read or written";
    let broken: [(Broken, &[&str]); _] = [
        (Broken::FindsBlocksEarly, &["the index finds", UNIT]),
        (Broken::EndsLoadsEarly, &[EARLY, BYTES]),
        (Broken::EndsOffloadsEarly, &[EARLY]),
        (Broken::IgnoresFences, &[BYTES, "reads wrong KV"]),
        (Broken::EndsWithFirstJob, &[EARLY, BYTES]),
        (Broken::FreesUnitsEarly, &[UNIT]),
        (Broken::TrustsFailedStores, &[BYTES]),
        (Broken::TrustsFailedLoads, &[BYTES]),
        (Broken::KeepsBlocksAtReset, &[BYTES]),
    ];
    for (broken, signs) in broken {
        let caught = (0..SEEDS).find_map(|seed| run(seed, Some(broken)).err());
        let fault = caught.unwrap_or_else(|| panic!("{broken:?} is not caught"));
        assert!(signs.iter().any(|sign| fault.contains(sign)), "{broken:?}: {fault}");
    }
}
