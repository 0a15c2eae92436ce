//! Handing out a page by evicting the one released longest ago, then releasing it as a cached page again.
//!
//! The pages were released in a shuffled order, so that the lists jump through memory as they do after
//! hours of traffic. The cost of an eviction stays flat up to what cache misses cost: nothing is searched.

use std::hint::black_box;
use std::time::Duration;

use block_pool::{NodeLink, PageId, Priority, Slab, Step};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

fn take_and_release(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("take and release");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for pages in [1_000, 10_000, 100_000, 1_000_000] {
        let mut slab = shuffled(pages);
        group.bench_function(BenchmarkId::from_parameter(pages), |bencher| {
            bencher.iter(|| {
                let taken = slab.take(Priority::DEFAULT).expect("every page is evictable");
                slab.publish(taken.page, taken.evicted.expect("every page is cached"), Step(1));
                slab.release(black_box(taken.page), Step(1));
            });
        });
    }
    group.finish();
}

/// A slab all of whose pages are cached and evictable, released in an order that looks random.
fn shuffled(pages: u32) -> Slab {
    let mut slab = Slab::new(pages);
    while let Some(taken) = slab.take(Priority::DEFAULT) {
        slab.publish(taken.page, NodeLink(taken.page.0), Step(1));
    }
    let mut order: Vec<u32> = (1..=pages).collect();
    let mut random = 1_u64;
    for at in (1..order.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(at, (random >> 33) as usize % (at + 1));
    }
    for page in order {
        slab.release(PageId(page), Step(1));
    }
    slab
}

criterion_group!(benches, take_and_release);
criterion_main!(benches);
