//! A deep warm walk: the 2,048 blocks of 32k cached tokens (page 16) among 100,000 resident blocks.
//!
//! The throughput is in blocks. Each block costs one probe of the table and one comparison of its tokens.

use std::hint::black_box;
use std::time::Duration;

use block_hash::{Algo, Chain, ExtraKeys, Root, Token};
use block_pool::PageId;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use radix_tree::{Insertion, NamespaceId, NamespaceKey, ParentId, PrefixTree};

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

    fn blocks(&self) -> impl Iterator<Item = (u64, &[Token])> {
        self.chain.keys().iter().copied().zip(self.tokens.chunks_exact(PAGE))
    }
}

fn warm_walk(criterion: &mut Criterion) {
    let mut tree = PrefixTree::new(PAGE, RESIDENT_BLOCKS);
    let namespace = tree.acquire_namespace(&NamespaceKey::default());
    let prompts: Vec<Prompt> = (0..=RESIDENT_BLOCKS / PROMPT_BLOCKS).map(Prompt::new).collect();
    for prompt in &prompts {
        store(&mut tree, namespace, prompt);
    }
    let mut group = criterion.benchmark_group("warm walk");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(PROMPT_BLOCKS as u64));
    let mut next = prompts.iter().cycle();
    group.bench_function("2048 blocks among 100k", |bencher| {
        // Another prompt each time: its nodes are not in the first-level cache.
        bencher.iter(|| walk(&tree, namespace, black_box(next.next().expect("there are prompts"))));
    });
    group.finish();
}

fn store(tree: &mut PrefixTree, namespace: NamespaceId, prompt: &Prompt) {
    let mut parent = ParentId::Root(namespace);
    for (key, tokens) in prompt.blocks() {
        let Insertion::New(node) = tree.insert(parent, key, tokens, &[]) else {
            panic!("no two prompts share a block")
        };
        tree.set_page(node, PageId(1));
        parent = ParentId::Node(node);
    }
}

fn walk(tree: &PrefixTree, namespace: NamespaceId, prompt: &Prompt) -> ParentId {
    prompt.blocks().fold(ParentId::Root(namespace), |parent, (key, tokens)| {
        let found = tree.find(parent, key, tokens, &[]).expect("no hash collides");
        ParentId::Node(found.expect("the prompt is stored"))
    })
}

criterion_group!(benches, warm_walk);
criterion_main!(benches);
