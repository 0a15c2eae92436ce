//! Handing out pages by evicting those released longest ago, then releasing them as cached pages again.
//!
//! The pages were released in a shuffled order, so that the lists jump through memory as they do after
//! hours of traffic. The cost of an eviction stays flat up to what cache misses cost: nothing is searched.
//! `cargo run --release --example eviction_cost` counts the instructions. A run of pages of one prompt is
//! hit and released in the order in which it lies in memory. Three groups that share a slab take a run by thirds; by
//! then their pages lie scattered, too, so that one group's shuffled pages are what to compare with.

use std::hint::black_box;
use std::time::Duration;

use block_pool::{
    EvictionPolicy, GroupId, Member, NodeLink, PageId, Pool, Pools, Priority, SlabShape, Step, Taken,
};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Pages of 32k tokens, 16 a page.
const RUN: u32 = 2048;

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(20);
    group
}

fn one_by_one(criterion: &mut Criterion) {
    for policy in [EvictionPolicy::PriorityLru, EvictionPolicy::PrioritySlru] {
        let mut group = group(criterion, &format!("take and release/{policy:?}"));
        for pages in [1_000, 10_000, 100_000, 1_000_000] {
            let mut pool = shuffled(pages, policy);
            group.bench_function(BenchmarkId::from_parameter(pages), |bencher| {
                bencher.iter(|| {
                    let taken = pool.take(Priority::DEFAULT).expect("every page is evictable");
                    publish_and_release(&mut pool, black_box(taken));
                });
            });
        }
    }
}

fn many_at_once(criterion: &mut Criterion) {
    let mut group = group(criterion, "take many and release");
    let mut taken = Vec::new();
    for pages in [10_000, 100_000, 1_000_000] {
        let mut pool = shuffled(pages, EvictionPolicy::PriorityLru);
        group.throughput(Throughput::Elements(RUN.into()));
        group.bench_function(BenchmarkId::from_parameter(pages), |bencher| {
            bencher.iter(|| {
                taken.clear();
                assert!(pool.take_many(RUN, Priority::DEFAULT, &mut taken));
                for &taken in &taken {
                    publish_and_release(&mut pool, taken);
                }
            });
        });
    }
}

fn runs(criterion: &mut Criterion) {
    let mut group = group(criterion, "hit and release a run");
    let mut pool = cached(100_000, EvictionPolicy::PriorityLru);
    (1..=100_000).rev().for_each(|page| pool.release(PageId(page), Step(1)));
    let mut first = 1;
    group.throughput(Throughput::Elements(RUN.into()));
    group.bench_function(BenchmarkId::from_parameter(RUN), |bencher| {
        bencher.iter(|| {
            first = (first + RUN) % (100_000 - RUN) + 1;
            (first..first + RUN).for_each(|page| pool.acquire(PageId(page)));
            (first..first + RUN).rev().for_each(|page| pool.release(PageId(page), Step(2)));
        });
    });
}

fn shared(criterion: &mut Criterion) {
    let mut group = group(criterion, "take many and release");
    let (mut taken, mut lost) = (Vec::new(), Vec::new());
    let member = |(group, ratio)| Member { group, ratio, policy: EvictionPolicy::PriorityLru };
    let members = (0..).map(GroupId).zip([5, 1, 3]).map(member).collect();
    // 3 pages a huge page on the average.
    let slab = SlabShape { huge_pages: 33_333, members };
    let mut pools = Pools::new(&[slab], Priority::DEFAULT).expect("a shape that is allowed");
    let mut turn = |pools: &mut Pools| {
        for group in pools.groups() {
            taken.clear();
            lost.clear();
            assert!(pools.take_many(group, RUN / 3, Priority::DEFAULT, &[], &mut taken, &mut lost));
            let pool = &mut pools[group];
            for taken in &taken {
                pool.publish(taken.page, NodeLink(taken.page.0), Step(1));
                pool.release(taken.page, Step(1));
            }
        }
    };
    (0..200).for_each(|_| turn(&mut pools)); // every page is cached, and the groups have met
    group.throughput(Throughput::Elements(RUN.into()));
    group.bench_function("100000 in three groups", |bencher| bencher.iter(|| turn(&mut pools)));
}

fn publish_and_release(pool: &mut Pool, taken: Taken) {
    pool.publish(taken.page, taken.evicted.expect("every page is cached"), Step(1));
    pool.release(taken.page, Step(1));
}

/// A pool all of whose pages are cached, and held.
fn cached(pages: u32, policy: EvictionPolicy) -> Pool {
    let mut pool = Pool::new(pages, policy, Priority::DEFAULT);
    while let Some(taken) = pool.take(Priority::DEFAULT) {
        pool.publish(taken.page, NodeLink(taken.page.0), Step(1));
    }
    pool
}

/// A pool all of whose pages are evictable, released in an order that looks random.
fn shuffled(pages: u32, policy: EvictionPolicy) -> Pool {
    let mut pool = cached(pages, policy);
    let mut order: Vec<u32> = (1..=pages).collect();
    let mut random = 1_u64;
    for at in (1..order.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(at, (random >> 33) as usize % (at + 1));
    }
    for page in order {
        pool.release(PageId(page), Step(1));
    }
    pool
}

criterion_group!(benches, one_by_one, many_at_once, runs, shared);
criterion_main!(benches);
