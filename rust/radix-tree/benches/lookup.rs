//! Prompts of 2,048 blocks (32k tokens, page 16) among 100,000 resident blocks. The throughput is in blocks.
//!
//! - `walk`: one prompt after the other is found, so that none is in the nearer caches; and one prompt again
//!   and again. Stored in one go, the blocks of a prompt are neighbours; stored in turns with others, none
//!   is beside the block that it follows.
//! - `publish`: the oldest prompt goes, the last block first, and a new one is stored in its place.

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Duration;

use block_hash::{Algo, Chain, ExtraKeys, Root, Token};
use block_pool::{GroupId, PageId};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use radix_tree::{Hits, Insertion, NamespaceId, NamespaceKey, NodeId, ParentId, PrefixTree};

const PAGE: usize = 16;
const PROMPT_BLOCKS: usize = 2_048;
const RESIDENT_BLOCKS: usize = 100_000;

struct Prompt {
    tokens: Vec<Token>,
    chain: Chain,
}

impl Prompt {
    fn new(number: usize) -> Prompt {
        let start = number * 1_000_003;
        let tokens: Vec<Token> =
            (start..start + PROMPT_BLOCKS * PAGE).map(|i| (i * 7919 % 150_000) as Token).collect();
        let mut chain = Chain::new(Algo::AHash64, &Root::new(None, None, None, 0));
        chain.extend(&tokens, PAGE, &ExtraKeys::default());
        Prompt { tokens, chain }
    }
}

/// A tree that is full of these prompts.
fn full_tree(prompts: &[Prompt], in_turns: bool) -> (PrefixTree, NamespaceId) {
    let mut tree = PrefixTree::new(PAGE, RESIDENT_BLOCKS, 1);
    let namespace = tree.acquire_namespace(&NamespaceKey::default());
    if in_turns {
        let mut parents = vec![ParentId::Root(namespace); prompts.len()];
        for block in 0..PROMPT_BLOCKS {
            for (prompt, parent) in prompts.iter().zip(&mut parents) {
                *parent = ParentId::Node(store_block(&mut tree, *parent, prompt, block));
            }
        }
    } else {
        for prompt in prompts {
            store(&mut tree, namespace, prompt);
        }
    }
    (tree, namespace)
}

fn prompts() -> impl Iterator<Item = Prompt> {
    (0..=RESIDENT_BLOCKS / PROMPT_BLOCKS).map(Prompt::new)
}

fn walk(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("walk");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(PROMPT_BLOCKS as u64));
    let prompts: Vec<Prompt> = prompts().collect();
    let (tree, namespace) = full_tree(&prompts, false);
    let mut next = prompts.iter().cycle();
    group.bench_function("neighbours, prompts rotate", |bencher| {
        bencher.iter(|| follow(&tree, namespace, black_box(next.next().expect("there are prompts"))));
    });
    group.bench_function("neighbours, one prompt", |bencher| {
        bencher.iter(|| follow(&tree, namespace, black_box(&prompts[0])));
    });
    let (tree, namespace) = full_tree(&prompts, true);
    group.bench_function("scattered, prompts rotate", |bencher| {
        bencher.iter(|| follow(&tree, namespace, black_box(next.next().expect("there are prompts"))));
    });
    group.finish();
}

fn publish(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("publish");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(PROMPT_BLOCKS as u64));
    let mut prompts: VecDeque<Prompt> = prompts().collect();
    let mut tree = PrefixTree::new(PAGE, RESIDENT_BLOCKS, 1);
    let namespace = tree.acquire_namespace(&NamespaceKey::default());
    let mut stored: VecDeque<Vec<NodeId>> =
        prompts.iter().map(|prompt| store(&mut tree, namespace, prompt)).collect();
    group.bench_function("one prompt goes, another comes", |bencher| {
        bencher.iter(|| {
            let gone = stored.pop_front().expect("the tree is full");
            gone.iter().rev().for_each(|&node| tree.clear_page(node, GroupId::FIRST));
            stored.push_back(store(&mut tree, namespace, &prompts[0]));
            prompts.rotate_left(1);
        });
    });
    group.finish();
}

fn store(tree: &mut PrefixTree, namespace: NamespaceId, prompt: &Prompt) -> Vec<NodeId> {
    let mut parent = ParentId::Root(namespace);
    let blocks = (0..PROMPT_BLOCKS).map(|block| {
        let node = store_block(tree, parent, prompt, block);
        parent = ParentId::Node(node);
        node
    });
    blocks.collect()
}

fn store_block(tree: &mut PrefixTree, parent: ParentId, prompt: &Prompt, block: usize) -> NodeId {
    let tokens = &prompt.tokens[block * PAGE..(block + 1) * PAGE];
    let Insertion::New(node) = tree.insert(parent, prompt.chain.keys()[block], tokens, &[]) else {
        panic!("no two prompts share a block")
    };
    tree.set_page(node, GroupId::FIRST, PageId(1));
    node
}

/// The pages of a prompt.
fn follow(tree: &PrefixTree, namespace: NamespaceId, prompt: &Prompt) -> Vec<PageId> {
    let mut found = Hits::default();
    let root = ParentId::Root(namespace);
    let end = tree.follow(root, prompt.chain.keys(), &prompt.tokens, &mut found);
    assert!(matches!(end, Ok(Some(_))), "the prompt is stored");
    found.pages
}

criterion_group!(benches, walk, publish);
criterion_main!(benches);
