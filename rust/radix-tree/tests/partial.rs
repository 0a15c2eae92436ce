//! Blocks and tails that begin as a prompt goes on, compared with a list of the children that is searched
//! whole.

use block_hash::Token;
use block_pool::{GroupId, PageId};
use proptest::prelude::*;
use radix_tree::{Insertion, NamespaceId, NamespaceKey, NodeId, ParentId, Partial, PrefixTree};
use std::cmp::Reverse;
use std::collections::HashMap;

const PAGE: usize = 4;
const GROUPS: usize = 2;
const EXTRA_KEYS: [&[u8]; 2] = [b"", b"image"];
const TOKENS: [Token; 4] = [0, 1, -1, Token::MAX];
/// The first is a root.
const PARENTS: usize = 2;

#[derive(Clone, Debug)]
struct Child {
    parent: usize,
    extra: &'static [u8],
    tokens: Vec<Token>,
}

#[derive(Clone, Debug)]
enum Call {
    /// Stores a block or a tail, or gives a block its page of another group; new blocks one by one or, where
    /// they can, at once.
    Store(Child, GroupId, bool),
    Lose(usize, GroupId),
    Anchor(usize),
    ReleaseAnchor(usize),
    /// The tokens are those looked for. Nodes are usable whose number has a bit that the mask has, too.
    Probe(Child, u32),
}

/// One to four tokens, of which most begin alike.
fn any_child(lengths: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Child> {
    let token = prop_oneof![2 => Just(TOKENS[0]), 1 => prop::sample::select(&TOKENS)];
    let tokens = prop::collection::vec(token, lengths);
    let child = |(parent, extra, tokens)| Child { parent, extra, tokens };
    (0..PARENTS, prop::sample::select(&EXTRA_KEYS), tokens).prop_map(child)
}

fn any_call() -> impl Strategy<Value = Call> {
    let group = || (0..GROUPS as u8).prop_map(GroupId);
    let stored = prop_oneof![2 => any_child(PAGE..=PAGE), 1 => any_child(1..=PAGE - 1)];
    prop_oneof![
        6 => (stored, group(), any::<bool>()).prop_map(|(child, group, at_once)| Call::Store(child, group, at_once)),
        4 => (any::<usize>(), group()).prop_map(|(choice, group)| Call::Lose(choice, group)),
        1 => any::<usize>().prop_map(Call::Anchor),
        1 => any::<usize>().prop_map(Call::ReleaseAnchor),
        6 => (any_child(1..=PAGE), any::<u32>()).prop_map(|(child, mask)| Call::Probe(child, mask)),
    ]
}

/// A child that is stored.
struct Stored {
    child: Child,
    node: NodeId,
    pages: [bool; GROUPS],
    anchored: bool,
}

impl Stored {
    fn is_tail(&self) -> bool {
        self.child.tokens.len() < PAGE
    }

    /// Whether it is found by its tokens as a sibling of `other`.
    fn is_found_as(&self, other: &Child) -> bool {
        self.pages[0] && (self.child.parent, self.child.extra) == (other.parent, other.extra)
    }
}

struct Scene {
    tree: PrefixTree,
    namespace: NamespaceId,
    parents: [ParentId; PARENTS],
    stored: Vec<Stored>,
}

impl Scene {
    fn new() -> Scene {
        let mut tree = PrefixTree::new(PAGE, 0, GROUPS as u8);
        let namespace = tree.acquire_namespace(&NamespaceKey::default());
        let root = ParentId::Root(namespace);
        let Insertion::New(block) = tree.insert(root, 0, &[7; PAGE], b"other keys") else {
            panic!("it is new")
        };
        tree.anchor(block);
        Scene { tree, namespace, parents: [root, ParentId::Node(block)], stored: Vec::new() }
    }

    /// A number of its own for each block.
    fn key(child: &Child) -> u64 {
        let digit = |token: &Token| TOKENS.iter().position(|other| other == token).unwrap() as u64;
        let start = (child.parent * 2 + usize::from(child.extra.is_empty()) + 1) as u64;
        child.tokens.iter().fold(start, |key, token| key * TOKENS.len() as u64 + digit(token))
    }

    fn call(&mut self, call: &Call) {
        match call {
            Call::Store(child, group, at_once) if child.tokens.len() == PAGE => {
                self.store(child, *group, *at_once);
            }
            Call::Store(child, group, _) => self.store_tail(child, *group),
            Call::Lose(choice, group) => {
                let slot = usize::from(group.0);
                let Some(stored) = choose(&mut self.stored, *choice, |stored| stored.pages[slot]) else {
                    return;
                };
                // A tail without the first page would not be found; all of it goes.
                let groups = if stored.is_tail() { vec![1, 0] } else { vec![slot] };
                for slot in groups {
                    if std::mem::take(&mut stored.pages[slot]) {
                        self.tree.clear_page(stored.node, GroupId(slot as u8));
                    }
                }
            }
            Call::Anchor(choice) => {
                if let Some(stored) =
                    choose(&mut self.stored, *choice, |stored| !stored.anchored && !stored.is_tail())
                {
                    stored.anchored = true;
                    self.tree.anchor(stored.node);
                }
            }
            Call::ReleaseAnchor(choice) => {
                if let Some(stored) = choose(&mut self.stored, *choice, |stored| stored.anchored) {
                    stored.anchored = false;
                    self.tree.release_anchor(stored.node);
                }
            }
            Call::Probe(child, mask) => self.probe(child, |node| node.0 & mask != 0),
        }
        self.stored.retain(|stored| stored.pages != [false; GROUPS] || stored.anchored);
    }

    fn store(&mut self, child: &Child, group: GroupId, at_once: bool) {
        let slot = usize::from(group.0);
        let parent = self.parents[child.parent];
        let is_child = |stored: &&mut Stored| {
            let other = &stored.child;
            (other.parent, other.extra, &other.tokens) == (child.parent, child.extra, &child.tokens)
        };
        if let Some(stored) = self.stored.iter_mut().find(is_child) {
            let found = self.tree.insert(parent, Scene::key(child), &child.tokens, child.extra);
            assert_eq!(found, Insertion::Existing(stored.node));
            if !stored.pages[slot] {
                stored.pages[slot] = true;
                self.tree.set_page(stored.node, group, PageId(1));
            }
            return;
        }
        let node = if at_once && child.extra.is_empty() {
            let page = if slot == 0 { PageId(1) } else { PageId::NULL };
            let mut made = Vec::new();
            self.tree.extend(parent, &[Scene::key(child)], &child.tokens, &[page], &mut made);
            if slot > 0 {
                self.tree.set_pages(&made, group, &[PageId(1)]);
            }
            made[0]
        } else {
            let Insertion::New(node) =
                self.tree.insert(parent, Scene::key(child), &child.tokens, child.extra)
            else {
                panic!("{child:?} is new")
            };
            self.tree.set_page(node, group, PageId(1));
            node
        };
        let mut pages = [false; GROUPS];
        pages[slot] = true;
        self.stored.push(Stored { child: child.clone(), node, pages, anchored: false });
    }

    fn store_tail(&mut self, child: &Child, group: GroupId) {
        let covers =
            |stored: &Stored| stored.is_found_as(child) && stored.child.tokens.starts_with(&child.tokens);
        let is_covered = self.stored.iter().any(covers);
        let pages = [true, group.0 == 1];
        let ids = pages.map(|is_there| if is_there { PageId(1) } else { PageId::NULL });
        let made = self.tree.insert_tail(self.parents[child.parent], &child.tokens, child.extra, &ids);
        assert_eq!(made.is_none(), is_covered, "{child:?}");
        if let Some(node) = made {
            assert!(self.tree.is_tail(node) && self.tree.is_leaf(node));
            assert_eq!((self.tree.tokens(node), self.tree.key(node)), (&child.tokens[..], None));
            self.stored.push(Stored { child: child.clone(), node, pages, anchored: false });
        }
    }

    fn probe(&self, child: &Child, usable: impl Fn(NodeId) -> bool) {
        let run = |stored: &Stored| {
            let pairs = stored.child.tokens.iter().zip(&child.tokens);
            pairs.take_while(|(one, other)| one == other).count()
        };
        let mut fitting: Vec<&Stored> =
            self.stored.iter().filter(|stored| stored.is_found_as(child) && run(stored) > 0).collect();
        fitting.sort_by_key(|stored| (Reverse(run(stored)), stored.child.tokens.clone()));
        let best = fitting.iter().take(PrefixTree::MAX_OFFERS).find(|stored| usable(stored.node));
        let best = best.map(|stored| Partial { node: stored.node, run: run(stored) });
        let parent = self.parents[child.parent];
        assert_eq!(self.tree.longest_partial(parent, &child.tokens, child.extra, usable), best, "{child:?}");

        let tails = fitting
            .iter()
            .filter(|stored| stored.is_tail() && child.tokens.starts_with(&stored.child.tokens));
        let longest = tails.max_by_key(|stored| stored.child.tokens.len()).map(|stored| stored.node);
        assert_eq!(self.tree.contained_tail(parent, &child.tokens, child.extra), longest, "{child:?}");
    }

    fn verify(&self) {
        let anchored = self.stored.iter().filter(|stored| stored.anchored).map(|stored| (stored.node, 1));
        let ParentId::Node(block) = self.parents[1] else { panic!("the second parent is a block") };
        let anchors: HashMap<NodeId, u32> = anchored.chain([(block, 1)]).collect();
        self.tree.verify(&anchors, &HashMap::from([(self.namespace, 1)])).unwrap();
        assert_eq!(self.tree.len(), self.stored.len() + 1);
    }
}

fn choose(stored: &mut [Stored], choice: usize, legal: impl Fn(&Stored) -> bool) -> Option<&mut Stored> {
    let mut legal: Vec<&mut Stored> = stored.iter_mut().filter(|stored| legal(stored)).collect();
    let index = choice.checked_rem(legal.len())?;
    Some(legal.swap_remove(index))
}

proptest! {
    #[test]
    fn what_is_found_by_tokens_is_what_a_search_of_every_child_finds(
        calls in prop::collection::vec(any_call(), 1..150),
    ) {
        let mut scene = Scene::new();
        for call in &calls {
            scene.call(call);
            scene.verify();
        }
    }
}

/// A tree of pages of eight tokens, and its root.
fn tree() -> (PrefixTree, ParentId) {
    let mut tree = PrefixTree::new(8, 0, 1);
    let root = ParentId::Root(tree.acquire_namespace(&NamespaceKey::default()));
    (tree, root)
}

fn store(tree: &mut PrefixTree, parent: ParentId, key: u64, tokens: [Token; 8]) -> NodeId {
    let Insertion::New(node) = tree.insert(parent, key, &tokens, &[]) else { panic!("the block is new") };
    tree.set_page(node, GroupId::FIRST, PageId(1));
    node
}

/// What is found of `tokens`, whatever it is.
fn found(tree: &PrefixTree, parent: ParentId, tokens: &[Token]) -> Option<(NodeId, usize)> {
    tree.longest_partial(parent, tokens, &[], |_| true).map(|partial| (partial.node, partial.run))
}

#[test]
fn an_only_child_is_found_as_far_as_its_tokens_run_along() {
    let (mut tree, root) = tree();
    let node = store(&mut tree, root, 1, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(found(&tree, root, &[1, 2, 3, 9]), Some((node, 3)));
    assert_eq!(found(&tree, root, &[1, 2, 3, 4, 5]), Some((node, 5)));
    assert_eq!(found(&tree, root, &[2]), None);
    assert_eq!(tree.longest_partial(root, &[1, 2], b"image", |_| true), None);
    assert_eq!(tree.longest_partial(root, &[1, 2], &[], |_| false), None);
    assert_eq!(found(&tree, ParentId::Node(node), &[1]), None);
}

#[test]
fn a_child_that_is_alone_again_is_found() {
    let (mut tree, root) = tree();
    let nodes = [1, 2, 3].map(|key| store(&mut tree, root, key, [key as Token; 8]));
    tree.clear_page(nodes[0], GroupId::FIRST);
    tree.clear_page(nodes[2], GroupId::FIRST);
    assert_eq!(found(&tree, root, &[2, 2, 9]), Some((nodes[1], 2)));
    let again = store(&mut tree, root, 4, [2, 2, 9, 9, 9, 9, 9, 9]);
    assert_eq!(found(&tree, root, &[2, 2, 9]), Some((again, 3)));
}

#[test]
fn a_search_ends_after_as_many_offers_as_it_says() {
    let (mut tree, root) = tree();
    let most = PrefixTree::MAX_OFFERS;
    // Twenty share two tokens with the prompt, and as many one.
    let second = |key: usize| if key < 20 { 6 } else { 7 };
    let nodes: Vec<NodeId> = (0..40)
        .map(|key| store(&mut tree, root, key as u64, [5, second(key), key as Token, 0, 0, 0, 0, 0]))
        .collect();
    let usable = |index: usize| tree.longest_partial(root, &[5, 6, -1], &[], |node| node == nodes[index]);
    assert_eq!(usable(19), Some(Partial { node: nodes[19], run: 2 }));
    assert_eq!(usable(most - 1), Some(Partial { node: nodes[most - 1], run: 1 }));
    assert_eq!(usable(most), None);
}

#[test]
fn a_tail_is_not_found_by_any_hash_and_gives_its_number_up() {
    let (mut tree, root) = tree();
    let tail = tree.insert_tail(root, &[1, 2, 3], &[], &[PageId(4)]).unwrap();
    // The number of its tokens is kept where others keep their hash.
    assert_eq!((tree.find(root, 3, &[1, 2, 3, 0, 0, 0, 0, 0], &[]), tree.owner_of(3)), (Ok(None), None));
    assert_eq!((tree.len(), tree.resident(GroupId::FIRST), tree.is_empty()), (1, 1, false));
    tree.clear_page(tail, GroupId::FIRST);
    assert!(tree.is_empty());
    assert_eq!(store(&mut tree, root, 3, [1; 8]), tail);
    assert_eq!((tree.is_tail(tail), tree.key(tail)), (false, Some(3)));
}

#[test]
fn following_never_takes_a_tail_for_a_block() {
    let (mut tree, root) = tree();
    let block = store(&mut tree, root, 1, [1; 8]);
    // Beside its parent, with zeros behind it, and as long as the next block's hash is.
    let tail = tree.insert_tail(ParentId::Node(block), &[2, 2, 2], &[], &[PageId(2)]).unwrap();
    assert_eq!(tail.0, block.0 + 1);
    let tokens = [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0];
    let mut nodes = Vec::new();
    assert_eq!(tree.trace(root, &[1, 3], &tokens, &mut nodes), Ok(None));
    assert_eq!(nodes, [block]);
}

#[test]
fn a_tail_does_not_take_the_place_beside_its_parent_that_is_free() {
    let (mut tree, root) = tree();
    let first = store(&mut tree, root, 1, [1; 8]);
    let others = [2, 3].map(|key| store(&mut tree, root, key, [key as Token; 8]));
    for node in others {
        tree.clear_page(node, GroupId::FIRST);
    }
    let tail = tree.insert_tail(ParentId::Node(first), &[9], &[], &[PageId(2)]).unwrap();
    assert_eq!((tail, store(&mut tree, ParentId::Node(first), 4, [4; 8])), (NodeId(2), NodeId(1)));
}

#[test]
fn a_tail_is_one_of_the_children_and_descendants_and_its_parent_no_leaf() {
    let (mut tree, root) = tree();
    let block = store(&mut tree, root, 1, [1; 8]);
    let tail = tree.insert_tail(ParentId::Node(block), &[2], &[], &[PageId(2)]).unwrap();
    assert!(tree.children(ParentId::Node(block)).eq([tail]));
    assert!(tree.descendants(root).eq([tail, block]));
    assert!(!tree.is_leaf(block));
    tree.clear_page(block, GroupId::FIRST);
    assert_eq!(tree.len(), 2);
    tree.clear_page(tail, GroupId::FIRST);
    assert!(tree.is_empty());
}

#[test]
fn a_tree_that_was_cleared_finds_nothing_by_tokens() {
    let (mut tree, root) = tree();
    store(&mut tree, root, 1, [1; 8]);
    store(&mut tree, root, 2, [2; 8]);
    tree.insert_tail(root, &[3], &[], &[PageId(2)]);
    tree.clear();
    let root = ParentId::Root(tree.acquire_namespace(&NamespaceKey::default()));
    assert_eq!((tree.len(), found(&tree, root, &[1])), (0, None));
    store(&mut tree, root, 1, [3; 8]);
    store(&mut tree, root, 2, [4; 8]);
    assert_eq!(found(&tree, root, &[1]), None);
    assert_eq!(tree.contained_tail(root, &[3; 8], &[]), None);
}

#[test]
fn each_of_100_000_siblings_is_found_while_others_go() {
    let (mut tree, root) = tree();
    // The first four tokens are the same of all, the next two tell ten thousand apart.
    let tokens = |number: Token| [7, 7, 7, 7, number % 1_000, number / 1_000 % 10, number / 10_000, 1];
    let nodes: Vec<NodeId> = (0..100_000)
        .map(|number: Token| store(&mut tree, root, u64::from(number.unsigned_abs()), tokens(number)))
        .collect();
    for &node in nodes.iter().step_by(2) {
        tree.clear_page(node, GroupId::FIRST);
    }
    for (number, &node) in (0..).zip(&nodes) {
        let mut probe = tokens(number);
        probe[7] = 2;
        // The last token but one tells the next ten apart, all of which have the same parity.
        let expected = if number % 2 == 1 { Some((node, 7)) } else { None };
        let found = found(&tree, root, &probe);
        assert_eq!(found.filter(|&(_, run)| run > 4), expected, "sibling {number}");
        assert_eq!(found.map(|(_, run)| run), Some(if number % 2 == 1 { 7 } else { 4 }));
    }
    for &node in nodes.iter().skip(1).step_by(2) {
        tree.clear_page(node, GroupId::FIRST);
    }
    assert_eq!((tree.len(), found(&tree, root, &[7])), (0, None));
}

#[test]
fn the_only_one_of_10_000_siblings_with_a_page_is_found() {
    let (mut tree, root) = tree();
    let tokens = |number: Token| [7, 7, 7, 7, 7, 7, number, 1];
    let nodes: Vec<NodeId> = (0..10_000)
        .map(|number: Token| store(&mut tree, root, u64::from(number.unsigned_abs()), tokens(number)))
        .collect();
    for &node in &nodes {
        tree.anchor(node);
    }
    for &node in nodes.iter().filter(|&&node| node != nodes[6_000]) {
        tree.clear_page(node, GroupId::FIRST);
    }
    assert_eq!(tree.len(), 10_000);
    assert_eq!(found(&tree, root, &tokens(3)), Some((nodes[6_000], 6)));
}

#[test]
fn siblings_that_part_at_every_token_of_a_long_page_are_found_and_go_without_recursion() {
    const LONG: usize = 4_000;
    let mut tree = PrefixTree::new(LONG, 0, 1);
    let root = ParentId::Root(tree.acquire_namespace(&NamespaceKey::default()));
    let tokens = |parts_at: usize| {
        let mut tokens = vec![0; LONG];
        tokens[parts_at] = 1;
        tokens
    };
    let nodes: Vec<NodeId> = (0..LONG)
        .map(|parts_at| {
            let mut made = Vec::new();
            tree.extend(root, &[parts_at as u64], &tokens(parts_at), &[PageId(1)], &mut made);
            made[0]
        })
        .collect();
    for parts_at in [0, 1, 1_777, LONG - 2, LONG - 1] {
        assert_eq!(found(&tree, root, &tokens(parts_at)), Some((nodes[parts_at], LONG)));
    }
    for &node in nodes.iter().step_by(2) {
        tree.clear_page(node, GroupId::FIRST);
    }
    assert_eq!(found(&tree, root, &tokens(1_777)), Some((nodes[1_777], LONG)));
    assert_eq!(found(&tree, root, &tokens(1_778)), Some((nodes[LONG - 1], 1_778)));
    let on_a_small_stack = std::thread::Builder::new().stack_size(64 << 10);
    on_a_small_stack.spawn(move || drop(tree)).unwrap().join().unwrap();
}
