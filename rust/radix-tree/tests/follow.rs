//! Following a prefix: what is found, where it ends, and why.

use block_hash::Token;
use block_pool::{GroupId, PageId};
use radix_tree::{DigestCollision, Hits, Insertion, NamespaceKey, NodeId, ParentId, PrefixTree};

const PAGE: usize = 2;
/// More blocks than are compared together, so that a prefix is followed in several runs.
const BLOCKS: usize = 600;

/// How following a prefix ends.
type End = Result<Option<ParentId>, DigestCollision>;

/// Prefixes of [`BLOCKS`] blocks, stored in one tree.
struct Scene {
    tree: PrefixTree,
    root: ParentId,
    prefixes: Vec<Prefix>,
}

struct Prefix {
    keys: Vec<u64>,
    tokens: Vec<Token>,
    nodes: Vec<NodeId>,
}

impl Scene {
    /// Stores `count` prefixes, `at_once` blocks of each in turn: no block but those of one turn lie
    /// beside each other. Block `b` of a prefix is on page `b + 1`.
    fn stored(count: usize, at_once: usize) -> Scene {
        let mut tree = PrefixTree::new(PAGE, 0, 1);
        let root = ParentId::Root(tree.acquire_namespace(&NamespaceKey::default()));
        let prefix = |number: usize| Prefix {
            keys: (0..BLOCKS).map(|block| (number * 1_000 + block) as u64).collect(),
            tokens: (0..BLOCKS * PAGE).map(|token| (number * 10_000 + token) as Token).collect(),
            nodes: Vec::new(),
        };
        let mut prefixes: Vec<Prefix> = (0..count).map(prefix).collect();
        for first in (0..BLOCKS).step_by(at_once) {
            for prefix in &mut prefixes {
                for block in first..BLOCKS.min(first + at_once) {
                    let parent = prefix.nodes.last().map_or(root, |&node| ParentId::Node(node));
                    let tokens = &prefix.tokens[block * PAGE..][..PAGE];
                    let Insertion::New(node) = tree.insert(parent, prefix.keys[block], tokens, &[]) else {
                        panic!("block {block} is new")
                    };
                    tree.set_page(node, GroupId::FIRST, PageId(block as u32 + 1));
                    prefix.nodes.push(node);
                }
            }
        }
        Scene { tree, root, prefixes }
    }

    /// What following `tokens` finds, and how it ends.
    fn follow(&self, keys: &[u64], tokens: &[Token]) -> (Vec<(NodeId, PageId)>, End) {
        let mut found = Hits::default();
        let end = self.tree.follow(self.root, keys, tokens, &mut found);
        (found.nodes.into_iter().zip(found.pages).collect(), end)
    }
}

impl Prefix {
    /// Its first `count` blocks, as they are found.
    fn first(&self, count: usize) -> Vec<(NodeId, PageId)> {
        self.nodes[..count].iter().copied().zip((1..).map(PageId)).collect()
    }
}

#[test]
fn a_stored_prefix_is_found_whole_wherever_its_blocks_lie() {
    for at_once in [1, 2, 15, 16, 17, 255, 256, 257, BLOCKS] {
        let scene = Scene::stored(3, at_once);
        for prefix in &scene.prefixes {
            let end = ParentId::Node(prefix.nodes[BLOCKS - 1]);
            let found = scene.follow(&prefix.keys, &prefix.tokens);
            assert_eq!(found, (prefix.first(BLOCKS), Ok(Some(end))), "{at_once} at once");
        }
    }
}

#[test]
fn no_blocks_end_where_they_begin() {
    let scene = Scene::stored(1, BLOCKS);
    assert_eq!(scene.follow(&[], &[]), (vec![], Ok(Some(scene.root))));
}

#[test]
fn a_prefix_ends_at_the_first_block_that_is_not_stored() {
    for at_once in [1, 7, BLOCKS] {
        let mut scene = Scene::stored(2, at_once);
        for lost in [599, 300, 256, 255, 1, 0] {
            // From the end on, each lost block is pruned with what was lost after it.
            for node in scene.prefixes[1].nodes.drain(lost..).rev() {
                scene.tree.clear_page(node, GroupId::FIRST);
            }
            let prefix = &scene.prefixes[1];
            let found = scene.follow(&prefix.keys, &prefix.tokens);
            assert_eq!(found, (prefix.first(lost), Ok(None)), "{at_once} at once, {lost} left");
        }
    }
}

#[test]
fn a_prefix_ends_at_the_first_block_without_a_page() {
    for lost in [0, 5, 256, 598] {
        let mut scene = Scene::stored(1, BLOCKS);
        scene.tree.clear_page(scene.prefixes[0].nodes[lost], GroupId::FIRST);
        let prefix = &scene.prefixes[0];
        assert_eq!(scene.follow(&prefix.keys, &prefix.tokens), (prefix.first(lost), Ok(None)));
    }
}

#[test]
fn an_equal_hash_with_another_last_token_is_a_collision() {
    for at_once in [1, BLOCKS] {
        let scene = Scene::stored(2, at_once);
        for block in [0, 5, 256, 599] {
            let prefix = &scene.prefixes[1];
            let mut tokens = prefix.tokens.clone();
            tokens[block * PAGE + 1] ^= 1 << 31;
            let found = scene.follow(&prefix.keys, &tokens);
            assert_eq!(found, (prefix.first(block), Err(DigestCollision)), "block {block}");
        }
    }
}

#[test]
fn an_equal_hash_without_a_page_and_with_other_tokens_is_a_collision() {
    let mut scene = Scene::stored(1, BLOCKS);
    scene.tree.clear_page(scene.prefixes[0].nodes[5], GroupId::FIRST);
    let prefix = &scene.prefixes[0];
    let mut tokens = prefix.tokens.clone();
    tokens[5 * PAGE] += 1;
    assert_eq!(scene.follow(&prefix.keys, &tokens), (prefix.first(5), Err(DigestCollision)));
}

#[test]
fn an_equal_hash_below_another_parent_is_a_collision() {
    let scene = Scene::stored(2, BLOCKS);
    let [one, other] = &scene.prefixes[..] else { panic!("two prefixes are stored") };
    let keys = [&one.keys[..70], &other.keys[70..]].concat();
    let tokens = [&one.tokens[..70 * PAGE], &other.tokens[70 * PAGE..]].concat();
    assert_eq!(scene.follow(&keys, &tokens), (one.first(70), Err(DigestCollision)));
}

#[test]
fn an_equal_hash_of_a_block_with_extra_keys_is_a_collision() {
    let mut scene = Scene::stored(1, BLOCKS);
    let end = ParentId::Node(scene.prefixes[0].nodes[BLOCKS - 1]);
    let Insertion::New(node) = scene.tree.insert(end, 7_000, &[1, 2], b"image") else {
        panic!("the block is new")
    };
    scene.tree.set_page(node, GroupId::FIRST, PageId(9));
    let prefix = &scene.prefixes[0];
    let keys = [&prefix.keys[..], &[7_000]].concat();
    let tokens = [&prefix.tokens[..], &[1, 2]].concat();
    assert_eq!(scene.follow(&keys, &tokens), (prefix.first(BLOCKS), Err(DigestCollision)));
}

#[test]
fn a_record_that_is_free_is_no_block_of_the_prefix_that_it_was_in() {
    let mut scene = Scene::stored(1, 1);
    let gone = scene.prefixes[0].nodes.pop().unwrap();
    scene.tree.clear_page(gone, GroupId::FIRST);
    let prefix = &scene.prefixes[0];
    assert_eq!(scene.follow(&prefix.keys, &prefix.tokens), (prefix.first(BLOCKS - 1), Ok(None)));
}

/// What tracing `tokens` finds, and how it ends.
fn trace(scene: &Scene, keys: &[u64], tokens: &[Token]) -> (Vec<NodeId>, End) {
    let mut found = Vec::new();
    let end = scene.tree.trace(scene.root, keys, tokens, &mut found);
    (found, end)
}

#[test]
fn tracing_goes_on_through_blocks_without_pages() {
    for at_once in [1, 7, BLOCKS] {
        let mut scene = Scene::stored(2, at_once);
        for lost in [0, 5, 256, 257, 598] {
            scene.tree.clear_page(scene.prefixes[1].nodes[lost], GroupId::FIRST);
        }
        let prefix = &scene.prefixes[1];
        let end = ParentId::Node(prefix.nodes[BLOCKS - 1]);
        assert_eq!(
            trace(&scene, &prefix.keys, &prefix.tokens),
            (prefix.nodes.clone(), Ok(Some(end))),
            "{at_once} at once"
        );
    }
}

#[test]
fn tracing_ends_where_a_block_is_not_stored_or_another_has_its_hash() {
    let mut scene = Scene::stored(1, BLOCKS);
    let gone = scene.prefixes[0].nodes.pop().unwrap();
    scene.tree.clear_page(gone, GroupId::FIRST);
    let prefix = &scene.prefixes[0];
    assert_eq!(trace(&scene, &prefix.keys, &prefix.tokens), (prefix.nodes.clone(), Ok(None)));
    let mut tokens = prefix.tokens.clone();
    tokens[300 * PAGE] += 1;
    let found = trace(&scene, &prefix.keys, &tokens);
    assert_eq!(found, (prefix.nodes[..300].to_vec(), Err(DigestCollision)));
}
