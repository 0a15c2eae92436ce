//! Many blocks: long chains, wide families and churn.

use block_hash::Token;
use block_pool::{GroupId, PageId};
use radix_tree::{Insertion, NamespaceKey, NodeId, ParentId, PrefixTree};
use std::collections::HashMap;

fn tree() -> (PrefixTree, ParentId) {
    let mut tree = PrefixTree::new(1, 0, 1);
    let root = ParentId::Root(tree.acquire_namespace(&NamespaceKey::default()));
    (tree, root)
}

/// Verifies a tree in which the test holds the namespace of `root`.
fn verify(tree: &PrefixTree, root: ParentId) {
    let ParentId::Root(namespace) = root else { panic!("{root:?} is no root") };
    tree.verify(&HashMap::new(), &HashMap::from([(namespace, 1)])).unwrap();
}

fn store(tree: &mut PrefixTree, parent: ParentId, key: u64) -> NodeId {
    let Insertion::New(node) = tree.insert(parent, key, &[key as Token], &[]) else {
        panic!("key {key} is taken")
    };
    tree.set_page(node, GroupId::FIRST, PageId(1));
    node
}

fn finds(tree: &PrefixTree, parent: ParentId, key: u64, node: NodeId) -> bool {
    tree.find(parent, key, &[key as Token], &[]) == Ok(Some(node))
}

#[test]
fn a_chain_of_100_000_blocks_is_found_and_pruned_without_recursion() {
    let (mut tree, root) = tree();
    let mut parent = root;
    let nodes: Vec<NodeId> = (0..100_000)
        .map(|key| {
            let node = store(&mut tree, parent, key);
            parent = ParentId::Node(node);
            node
        })
        .collect();
    let mut parent = root;
    for (key, &node) in (0..).zip(&nodes) {
        assert!(finds(&tree, parent, key, node));
        parent = ParentId::Node(node);
    }
    // From the root down, everything stays for the last block; then all goes at once.
    let (last, above) = nodes.split_last().unwrap();
    for &node in above {
        tree.clear_page(node, GroupId::FIRST);
    }
    assert_eq!(tree.len(), 100_000);
    tree.clear_page(*last, GroupId::FIRST);
    assert!(tree.is_empty());
}

#[test]
fn a_chain_of_100_000_blocks_is_listed_from_its_end_without_recursion() {
    let (mut tree, root) = tree();
    let mut parent = root;
    let mut nodes: Vec<NodeId> = (0..100_000)
        .map(|key| {
            let node = store(&mut tree, parent, key);
            parent = ParentId::Node(node);
            node
        })
        .collect();
    nodes.reverse();
    assert!(tree.descendants(root).eq(nodes));
}

#[test]
fn each_of_10_000_siblings_is_found_while_others_go() {
    let (mut tree, root) = tree();
    let nodes: Vec<NodeId> = (0..10_000).map(|key| store(&mut tree, root, key)).collect();
    for &node in nodes.iter().step_by(3) {
        tree.clear_page(node, GroupId::FIRST);
    }
    for (key, &node) in (0..).zip(&nodes) {
        assert_eq!(finds(&tree, root, key, node), key % 3 != 0, "sibling {key}");
    }
    verify(&tree, root);
}

#[test]
fn removing_from_a_crowded_table_never_loses_another_block() {
    let (mut tree, root) = tree();
    // 31 live blocks in a table for 32: long runs, which wrap around its end.
    let mut live: Vec<(u64, NodeId)> = (0..31).map(|key| (key, store(&mut tree, root, key))).collect();
    let mut random = 1_u64;
    for key in 31..20_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (_, gone) = live.swap_remove((random >> 33) as usize % live.len());
        tree.clear_page(gone, GroupId::FIRST);
        live.push((key, store(&mut tree, root, key)));
        assert!(live.iter().all(|&(key, node)| finds(&tree, root, key, node)), "after key {key}");
    }
    assert_eq!(tree.len(), 31);
    verify(&tree, root);
}

#[test]
fn memory_follows_what_is_stored_not_what_was() {
    let (mut tree, root) = tree();
    let mut live = std::collections::VecDeque::new();
    for key in 0..1_000_000_u64 {
        // A chain of two blocks comes, the oldest one goes.
        let first = store(&mut tree, root, 2 * key);
        let second = store(&mut tree, ParentId::Node(first), 2 * key + 1);
        live.push_back([first, second]);
        if live.len() > 8 {
            live.pop_front().into_iter().flatten().for_each(|node| tree.clear_page(node, GroupId::FIRST));
        }
        assert!(first.0.max(second.0) < 18, "node numbers of the blocks that went are used again");
    }
    assert_eq!(tree.len(), 16);
}

#[test]
fn extra_keys_and_namespaces_that_went_leave_nothing_behind() {
    let mut tree = PrefixTree::new(1, 0, 1);
    for generation in 0..10_000_u64 {
        let key = NamespaceKey { generation, ..NamespaceKey::default() };
        let namespace = tree.acquire_namespace(&key);
        let inserted = tree.insert(ParentId::Root(namespace), generation, &[0], &generation.to_le_bytes());
        let Insertion::New(node) = inserted else { panic!("the tree is empty") };
        tree.set_page(node, GroupId::FIRST, PageId(1));
        tree.release_namespace(namespace);
        tree.clear_page(node, GroupId::FIRST);
        assert_eq!((tree.find_namespace(&key), node), (None, NodeId(0)));
    }
    tree.verify(&HashMap::new(), &HashMap::new()).unwrap();
}
