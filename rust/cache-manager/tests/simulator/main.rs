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
mod live;
mod mover;
mod random;
mod tier;

use engine::Engine;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tier::Broken;

const SEEDS: u64 = 500;

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(default, |given| given.parse().unwrap_or_else(|_| panic!("{name}={given}: must be a number")))
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

#[test]
fn every_copy_moves_the_bytes_of_its_own_prefix_and_every_pin_ends_once() {
    let first = number("SIMULATOR_SEED", 0);
    for seed in first..first.saturating_add(number("SIMULATOR_SEEDS", SEEDS)) {
        if let Err(fault) = run(seed, None) {
            panic!("SIMULATOR_SEED={seed}: {fault}");
        }
    }
}

#[test]
fn every_broken_variant_is_caught() {
    let broken = [
        (Broken::FindsBlocksEarly, "the index finds"),
    ];
    for (broken, sign) in broken {
        let caught = (0..SEEDS).find_map(|seed| run(seed, Some(broken)).err());
        let fault = caught.unwrap_or_else(|| panic!("{broken:?} is not caught"));
        assert!(fault.contains(sign), "{broken:?}: {fault}");
    }
}
