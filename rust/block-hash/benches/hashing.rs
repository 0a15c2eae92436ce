//! Hashing a whole prompt into a chain: three algorithms, two page sizes, two lengths.
//!
//! The throughput is in tokens; nanoseconds per token are 1000 over million elements per second.

use std::hint::black_box;
use std::time::Duration;

use block_hash::{Algo, Chain, ExtraKeys, Root, Token};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn prompts(criterion: &mut Criterion) {
    let extras = ExtraKeys::default();
    for algo in [Algo::AHash64, Algo::Sha256, Algo::Sha256Trunc64] {
        let mut group = criterion.benchmark_group(algo.to_string());
        group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
        for page_size in [16, 128] {
            for count in [1_024, 32_768] {
                let tokens: Vec<Token> = (0..count).map(|i| i * 7919 % 150_000).collect();
                group.throughput(Throughput::Elements(tokens.len() as u64));
                let id = BenchmarkId::new(format!("page {page_size}"), tokens.len());
                group.bench_function(id, |bencher| {
                    let mut chain = Chain::new(algo, &Root([0; 32]));
                    bencher.iter(|| {
                        chain.clear();
                        chain.extend(black_box(&tokens), page_size, &extras);
                        black_box(chain.keys().last().copied())
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, prompts);
criterion_main!(benches);
