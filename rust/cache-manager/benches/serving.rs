//! What a request and a step cost in the ledger, without Python.
//!
//! - `cycle`: one request of 32k tokens, from claim to release, hashing included. Cold: every page is
//!   handed out by evicting a cached block, and every block is published. Warm: all blocks but the last
//!   are hits.
//! - `events`: the cold cycle without a log of events and with one, which is full, so
//!   that each event drops one.
//! - `decode`: one step of 256 running requests: plan, write the block-table rows that changed and the
//!   lengths, deliver a token each. The throughput is in requests.

use block_pool::GroupId;
use std::hint::black_box;
use std::time::Duration;

use block_hash::{Algo, Chain, Root, Token};
use cache_manager::{Ledger, LedgerConfig, NewSequence, RowMemory, SlotId};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use radix_tree::NamespaceKey;

const PROMPT: usize = 32_768;

fn ledger(page_size: u32, pages: u32) -> Ledger {
    telling(page_size, pages, 0)
}

fn telling(page_size: u32, pages: u32, event_buffer_max_size: u32) -> Ledger {
    Ledger::new(LedgerConfig { event_buffer_max_size, ..LedgerConfig::new(page_size, pages) })
}

/// A prompt whose first block, and so every block, differs from that of any other number.
fn prompt(number: usize, len: usize) -> Vec<Token> {
    let mut tokens: Vec<Token> = (0..len).map(|i| (i * 7919 % 150_000) as Token).collect();
    tokens[0] = number as Token;
    tokens
}

fn claim(ledger: &mut Ledger, tokens: Vec<Token>) -> SlotId {
    let mut request = NewSequence::new(
        tokens,
        1 << 20,
        NamespaceKey::default(),
        Chain::new(Algo::AHash64, &Root::new(None, None, None, 0)),
    );
    request.hash_prompt(ledger.config().page_size);
    ledger.claim(request).map_err(|refused| refused.error).expect("the claim is valid")
}

fn serve(ledger: &mut Ledger, tokens: Vec<Token>) {
    let slot = claim(ledger, tokens);
    ledger.alloc(&[slot], &[]).expect("there is room for one request");
    ledger.close_step();
    ledger.step(&[slot], &[1], None).expect("the step is out");
    black_box(ledger.release(&[slot]).expect("the slot is claimed"));
}

fn cycle(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("cycle");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(PROMPT as u64));
    for page_size in [16, 128] {
        let pages = 4 * PROMPT as u32 / page_size;
        let mut cold = ledger(page_size, pages);
        let mut number = 0;
        let mut next = || {
            number += 1;
            prompt(number, PROMPT)
        };
        (0..8).for_each(|_| serve(&mut cold, next()));
        group.bench_function(BenchmarkId::new("cold", format!("page {page_size}")), |bencher| {
            bencher.iter_batched(&mut next, |tokens| serve(&mut cold, tokens), BatchSize::LargeInput);
        });
        let mut warm = ledger(page_size, pages);
        serve(&mut warm, prompt(0, PROMPT));
        group.bench_function(BenchmarkId::new("warm", format!("page {page_size}")), |bencher| {
            bencher.iter_batched(
                || prompt(0, PROMPT),
                |tokens| serve(&mut warm, tokens),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

fn events(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("events");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for page_size in [16, 128] {
        for (name, buffer) in [("off", 0), ("on", 16)] {
            let mut ledger = telling(page_size, 4 * PROMPT as u32 / page_size, buffer);
            let mut number = 0;
            let mut next = || {
                number += 1;
                prompt(number, PROMPT)
            };
            (0..32).for_each(|_| serve(&mut ledger, next()));
            group.bench_function(BenchmarkId::new(name, format!("page {page_size}")), |bencher| {
                bencher.iter_batched(&mut next, |tokens| serve(&mut ledger, tokens), BatchSize::LargeInput);
            });
        }
    }
    group.finish();
}

const BATCH: usize = 256;
/// Decode steps after which the requests start over, so that a row is never longer than [`COLUMNS`].
const STEPS: usize = 4_096;
const PAGE: u32 = 16;
const COLUMNS: usize = (1_024 + STEPS) / PAGE as usize + 1;

/// Running requests, and the table memory that kernels read.
struct Decoding {
    ledger: Ledger,
    batch: Vec<SlotId>,
    memory: RowMemory,
    table: Vec<u32>,
    lengths: Vec<u32>,
    tokens: Vec<Token>,
    steps: usize,
}

impl Decoding {
    fn new() -> Decoding {
        let mut decoding = Decoding {
            ledger: ledger(PAGE, (BATCH * COLUMNS) as u32),
            batch: Vec::new(),
            memory: RowMemory::default(),
            table: vec![0; BATCH * COLUMNS],
            lengths: vec![0; BATCH],
            tokens: vec![7; BATCH],
            steps: 0,
        };
        decoding.start_over();
        decoding
    }

    fn start_over(&mut self) {
        self.ledger.release(&self.batch).expect("the slots are claimed");
        self.batch = (0..BATCH).map(|number| claim(&mut self.ledger, prompt(number, 1_024))).collect();
        self.steps = 0;
        self.step();
    }

    fn step(&mut self) {
        self.ledger.alloc(&self.batch, &[]).expect("there is room");
        self.ledger
            .write_rows(GroupId::FIRST, &self.batch, &mut self.memory, &mut self.table, COLUMNS)
            .expect("the table is large enough");
        self.ledger.write_cache_lengths(&self.batch, &mut self.lengths).expect("every request is planned");
        self.ledger.close_step();
        self.ledger.step(&self.batch, &self.tokens, None).expect("the step is out");
        self.steps += 1;
    }
}

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(BATCH as u64));
    let mut decoding = Decoding::new();
    group.bench_function(BenchmarkId::new("step", BATCH), |bencher| {
        bencher.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                if decoding.steps == STEPS {
                    decoding.start_over();
                }
                let start = std::time::Instant::now();
                decoding.step();
                spent += start.elapsed();
            }
            black_box(&decoding.table);
            spent
        });
    });
    group.finish();
}

criterion_group!(benches, cycle, events, decode);
criterion_main!(benches);
