//! Counts the instructions of one eviction in pools of 1 k to 1 M pages, with valgrind's callgrind.
//!
//! ```text
//! cargo run --release -p block-pool --example eviction_cost
//! ```
//!
//! One eviction takes a page, publishes it and releases it. A row's counts may not differ by more than
//! 10 % of the smallest; the exit status says so. Instructions are counted rather than times, because
//! they are the same in every run. With a policy, a number of pages and a number of evictions, the program
//! just makes these evictions: that is what it runs under valgrind.

use std::env;
use std::hint::black_box;
use std::process::{Command, ExitCode};

use block_pool::{EvictionPolicy, NodeLink, PageId, Pool, Priority, Step};

const POOLS: [u32; 4] = [1_000, 10_000, 100_000, 1_000_000];
const EVICTIONS: u32 = 20_000;
const POLICIES: [&str; 2] = ["priority_lru", "priority_slru"];

fn main() -> ExitCode {
    let given: Vec<String> = env::args().skip(1).collect();
    if let [policy, pages, evictions] = &given[..] {
        let policy = policy.parse().expect("the name of a policy");
        let mut pool = shuffled(pages.parse().expect("a number of pages"), policy);
        evict(&mut pool, evictions.parse().expect("a number of evictions"));
        return ExitCode::SUCCESS;
    }
    println!("instructions an eviction, by pages in the pool");
    let mut flat = true;
    for policy in POLICIES {
        let counts = POOLS.map(|pages| count(policy, pages));
        let columns: Vec<String> =
            POOLS.iter().zip(counts).map(|(pages, count)| format!("{pages}: {count:.1}")).collect();
        println!("{policy:>14}  {}", columns.join("  "));
        let (least, most) = counts.iter().fold((f64::MAX, 0.0_f64), |it, &n| (it.0.min(n), it.1.max(n)));
        flat &= most <= least * 1.1;
    }
    if flat {
        return ExitCode::SUCCESS;
    }
    eprintln!("an eviction costs more than 10 % more in one pool than in another");
    ExitCode::FAILURE
}

/// Instructions that one eviction takes, as callgrind counts them.
fn count(policy: &str, pages: u32) -> f64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*eviction_cost::evict*"])
        .arg("--callgrind-out-file=/dev/null")
        .arg(env::current_exe().expect("the program has a path"))
        .args([policy, &pages.to_string(), &EVICTIONS.to_string()])
        .output()
        .expect("valgrind is installed");
    let said = String::from_utf8_lossy(&output.stderr);
    let collected = said.lines().find_map(|line| line.split_once("Collected : ")).map(|(_, count)| count);
    let collected: u32 = collected.and_then(|count| count.trim().parse().ok()).unwrap_or_else(|| {
        panic!("valgrind counted nothing:\n{said}");
    });
    f64::from(collected) / f64::from(EVICTIONS)
}

/// What is counted. A function of its own, so that callgrind finds it by its name.
#[inline(never)]
fn evict(pool: &mut Pool, evictions: u32) {
    for _ in 0..evictions {
        let taken = pool.take(Priority::DEFAULT).expect("every page is evictable");
        pool.publish(taken.page, taken.evicted.expect("every page is cached"), Step(1));
        pool.release(black_box(taken.page), Step(1));
    }
}

/// A pool all of whose pages are cached and evictable, every third of them hit before, released in an
/// order that jumps through memory.
fn shuffled(pages: u32, policy: EvictionPolicy) -> Pool {
    const STRIDE: u64 = 7_368_787; // a prime: every page has its turn
    let mut pool = Pool::new(pages, policy, Priority::DEFAULT);
    while let Some(taken) = pool.take(Priority::DEFAULT) {
        pool.publish(taken.page, NodeLink(taken.page.0), Step(1));
        if taken.page.0 % 3 == 0 {
            pool.mark_reused(taken.page);
        }
    }
    for turn in 0..u64::from(pages) {
        let page = 1 + turn * STRIDE % u64::from(pages);
        pool.release(PageId(page as u32), Step(1));
    }
    pool
}
