//! A simulator of one replica and its host tier. In virtual time ledger and tier index are the product's, device and
//! mover are late, fail, and end in any order. With real threads connector, lanes and copies are the product's too,
//! and the copies are slow.
//!
//! `SIMULATOR_SEEDS` says how many seeds are run, `SIMULATOR_SEED` which is the first. A seed that fails is printed
//! with its last calls: it alone is run by `SIMULATOR_SEEDS=1 SIMULATOR_SEED=<it>`.

mod broken;
mod checks;
mod device;
mod engine;
mod forwards;
mod kv;
mod letting_go;
mod live;
mod mover;
mod prefetching;
mod private;
mod random;
mod settling;
mod slow;
mod suspending;
mod threads;
mod tier;
mod world;

use broken::Broken;
use cache_manager::WritePolicy;
use engine::Engine;
use slow::Faulty;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use threads::Threads;
use tier::Tier;
use world::World;

const SEEDS: u64 = 500;

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given
        .map_or(default, |given| given.parse().unwrap_or_else(|_| panic!("{name}={given}: must be a number")))
}

fn engine(seed: u64, broken: Option<Broken>) -> Engine<Tier> {
    Engine::new(seed, broken, |config, random| Tier::new(config, broken, random))
}

/// Makes the calls of one seed. A panic of the product's is a fault like others.
fn run<W: World>(engine: &mut Engine<W>) -> Result<(), String> {
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
        if let Err(fault) = run(&mut engine(seed, None)) {
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
    for seed in 0..100 {
        let mut engine = engine(seed, None);
        engine.run().unwrap_or_else(|fault| panic!("SIMULATOR_SEED={seed}: {fault}"));
        let (ledger, index) = (engine.ledger.counters(), engine.world.index.counters());
        let stored_by = match engine.ledger.config().write_policy {
            WritePolicy::WriteThrough => "blocks stored as they were published",
            WritePolicy::Selective { .. } => "blocks stored as they were hit or published with a priority",
            WritePolicy::OnEvict { .. } => "blocks stored ahead of their eviction",
        };
        let counts = [
            ("blocks loaded for a request that waited", ledger.loaded_blocks),
            ("blocks loaded for one that did not", index.loaded - ledger.loaded_blocks.min(index.loaded)),
            ("blocks loaded ahead of their request", engine.prefetched),
            ("blocks not loaded", index.unloaded),
            (stored_by, index.stored),
            ("blocks not stored", index.unstored),
            ("blocks evicted by the tier", index.evicted),
            ("blocks without a unit", index.no_unit),
            ("copies refused", ledger.copies_refused),
            ("copies failed", ledger.copies_failed),
            ("suspensions", ledger.suspensions),
            ("resumptions", ledger.resumptions),
            ("suspensions whose KV was lost", ledger.suspensions_lost),
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

/// What faults show as.
const EARLY: &str = "is not pinned while";
const BYTES: &str = "other bytes than its";
const FORWARD: &str = "reads wrong KV";
const UNIT: &str = "is given away while it is read or written";

fn assert_caught(broken: &[(Broken, &[&str])]) {
    for &(broken, signs) in broken {
        let caught = (0..SEEDS).find_map(|seed| run(&mut engine(seed, Some(broken))).err());
        let fault = caught.unwrap_or_else(|| panic!("{broken:?} is not caught"));
        assert!(signs.iter().any(|sign| fault.contains(sign)), "{broken:?}: {fault}");
    }
}

#[test]
fn every_variant_that_is_broken_with_blocks_is_caught() {
    assert_caught(&[
        (Broken::FindsBlocksEarly, &["the index finds", UNIT]),
        (Broken::EndsLoadsEarly, &[EARLY, BYTES]),
        (Broken::EndsOffloadsEarly, &[EARLY]),
        (Broken::IgnoresFences, &[BYTES, FORWARD]),
        (Broken::EndsWithFirstJob, &[EARLY, BYTES]),
        (Broken::FreesUnitsEarly, &[UNIT]),
        (Broken::TrustsFailedStores, &[BYTES]),
        (Broken::TrustsFailedLoads, &[BYTES]),
        (Broken::KeepsBlocksAtReset, &[BYTES]),
    ]);
}

#[test]
fn every_variant_that_is_broken_with_demotions_suspensions_or_prefetches_is_caught() {
    assert_caught(&[
        (Broken::EndsDemotionsEarly, &[EARLY]),
        (Broken::EndsSuspensionsEarly, &[EARLY, BYTES]),
        (Broken::GivesHeldUnitsAway, &["private units are"]),
        (Broken::FreesPrivateUnitsEarly, &[UNIT]),
        (Broken::MixesPrivateUnits, &[BYTES]),
        (Broken::MixesPrefetchedBlocks, &[BYTES]),
    ]);
}

/// Runs with real threads.
const RUNS: u64 = 100;

fn threaded(seed: u64, faulty: Option<Faulty>) -> Engine<Threads> {
    Engine::new(seed, None, |config, random| Threads::new(config, faulty, random))
}

/// The same with real threads, in every second run. A seed draws their habits, not which goes first.
fn run_threads(from: u64) {
    let first = number("SIMULATOR_SEED", 0);
    let runs = RUNS.min(number("SIMULATOR_SEEDS", RUNS));
    let mut met = [("loaded", 0), ("stored", 0), ("not stored", 0), ("brought back", 0)];
    for at in (from..runs).step_by(2) {
        let seed = first.wrapping_add(at);
        let mut engine = threaded(seed, None);
        if let Err(fault) = run(&mut engine) {
            panic!("SIMULATOR_SEED={seed}, with real threads: {fault}");
        }
        let (ledger, tier) = (engine.ledger.counters(), engine.world.connector().metrics().index);
        let counts = [tier.loaded, tier.stored, tier.unstored, ledger.resumptions];
        met.iter_mut().zip(counts).for_each(|((_, met), count)| *met += count);
    }
    assert!(runs < RUNS || met.iter().all(|&(_, count)| count >= 10), "met too seldom: {met:?}");
}

#[test]
fn copies_and_books_are_right_with_real_threads_in_the_first_of_two_runs() {
    run_threads(0);
}

#[test]
fn copies_and_books_are_right_with_real_threads_in_the_last_of_two_runs() {
    run_threads(1);
}

#[test]
fn every_faulty_engine_is_caught_with_real_threads() {
    let faulty: [(Faulty, &[&str]); _] = [
        (Faulty::EndsBeforeItCopies, &[EARLY, "is used by", BYTES, FORWARD, "its handle does not say so"]),
        (Faulty::SkipsLastPages, &[BYTES, FORWARD]),
        (Faulty::TrustsFailures, &[BYTES, FORWARD]),
    ];
    for (faulty, signs) in faulty {
        let caught = (0..RUNS).find_map(|seed| run(&mut threaded(seed, Some(faulty))).err());
        let fault = caught.unwrap_or_else(|| panic!("{faulty:?} is not caught"));
        assert!(signs.iter().any(|sign| fault.contains(sign)), "{faulty:?}: {fault}");
    }
}
