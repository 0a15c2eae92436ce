//! The block that begins as a prompt goes on, among 10 and among 10,000 siblings of 16 tokens.
//!
//! - `match`: one after the other is found by its first tokens. `unlike`: siblings differ from the first token
//!   on. `alike`: they share 12 tokens, and part at the next. `astray`: as before, and the prompt goes on as
//!   none of them does. `binary`: there are two different tokens only, so that siblings part everywhere.
//! - `churn`: the oldest sibling goes, a new one comes, and one is found.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Duration;

use block_hash::Token;
use block_pool::{GroupId, PageId};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use radix_tree::{Insertion, NamespaceKey, NodeId, ParentId, PrefixTree};

const PAGE: usize = 16;
const ALIKE: usize = 12;

type Block = [Token; PAGE];

#[derive(Clone, Copy)]
enum Shape {
    Unlike,
    Alike,
    Astray,
    Binary,
}

const SHAPES: [(&str, Shape); 4] = [
    ("unlike", Shape::Unlike),
    ("alike", Shape::Alike),
    ("astray", Shape::Astray),
    ("binary", Shape::Binary),
];

fn mixed(number: usize) -> usize {
    (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32) as usize
}

impl Shape {
    fn block(self, number: usize) -> Block {
        std::array::from_fn(|at| match self {
            Shape::Unlike => (mixed(number * PAGE + at) % 150_000) as Token,
            Shape::Alike | Shape::Astray if at < ALIKE => at as Token,
            Shape::Alike | Shape::Astray if at == ALIKE => (mixed(number) % 150_000) as Token,
            Shape::Alike | Shape::Astray => number as Token,
            Shape::Binary => (((number * 40_503) >> at) & 1) as Token,
        })
    }

    /// The next tokens of a prompt that goes on as the block does, up to the last of them.
    fn prompt(self, number: usize) -> Block {
        let mut prompt = self.block(number);
        prompt[PAGE - 1] = -1;
        if let Shape::Astray = self {
            prompt[ALIKE] = -1;
        }
        prompt
    }
}

struct Siblings {
    tree: PrefixTree,
    parent: ParentId,
    shape: Shape,
    stored: VecDeque<NodeId>,
    next: usize,
}

impl Siblings {
    fn new(shape: Shape, count: usize) -> Siblings {
        let mut tree = PrefixTree::new(PAGE, 2 * count, 1);
        let parent = ParentId::Root(tree.acquire_namespace(&NamespaceKey::default()));
        let mut siblings = Siblings { tree, parent, shape, stored: VecDeque::new(), next: 0 };
        (0..count).for_each(|_| siblings.store());
        siblings
    }

    fn store(&mut self) {
        let key = mixed(self.next) as u64;
        let block = self.shape.block(self.next);
        let Insertion::New(node) = self.tree.insert(self.parent, key, &block, &[]) else {
            panic!("no two blocks are equal")
        };
        self.tree.set_page(node, GroupId::FIRST, PageId(1));
        self.stored.push_back(node);
        self.next += 1;
    }

    fn find(&self, prompt: &Block) {
        let found = self.tree.longest_partial(self.parent, black_box(prompt), &[], |_| true);
        assert!(black_box(found).is_some(), "some sibling begins as the prompt goes on");
    }
}

fn find(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for (name, shape) in SHAPES {
        for count in [10, 10_000] {
            let siblings = Siblings::new(shape, count);
            let prompts: Vec<Block> = (0..count).map(|number| shape.prompt(mixed(number) % count)).collect();
            let mut next = prompts.iter().cycle();
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter(|| siblings.find(next.next().expect("there are prompts")));
            });
        }
    }
    group.finish();
}

fn churn(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("churn");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for (name, shape) in SHAPES {
        for count in [10, 10_000] {
            let mut siblings = Siblings::new(shape, count);
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter(|| {
                    let gone = siblings.stored.pop_front().expect("there are siblings");
                    siblings.tree.clear_page(gone, GroupId::FIRST);
                    siblings.store();
                    siblings.find(&shape.prompt(siblings.next - 1 - count / 2));
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, find, churn);
criterion_main!(benches);
