//! Each test damages one field and asks which node is named.

use crate::extra_keys::ExtraKeyStore;
use crate::namespaces::{NamespaceId, NamespaceKey};
use crate::node::{NONE, NodeId, PackedParent, ParentId};
use crate::tree::{Insertion, PrefixTree};
use crate::verify::{NO_NODE, TreeFault};
use block_pool::{GroupId, PageId};
use std::collections::HashMap;

const FIRST: NodeId = NodeId(0);
const SECOND: NodeId = NodeId(1);

/// Two blocks, one below the other, the second with an extra key; the namespace is held once.
struct Scene {
    tree: PrefixTree,
    namespace: NamespaceId,
    anchors: HashMap<NodeId, u32>,
    holders: HashMap<NamespaceId, u32>,
}

fn sound() -> Scene {
    let mut tree = PrefixTree::new(1, 0, 2);
    let namespace = tree.acquire_namespace(&NamespaceKey::default());
    assert_eq!(tree.insert(ParentId::Root(namespace), 1, &[5], &[]), Insertion::New(FIRST));
    tree.set_page(FIRST, GroupId::FIRST, PageId(1));
    assert_eq!(tree.insert(ParentId::Node(FIRST), 2, &[6], b"image"), Insertion::New(SECOND));
    tree.set_page(SECOND, GroupId::FIRST, PageId(2));
    let scene = Scene { tree, namespace, anchors: HashMap::new(), holders: HashMap::from([(namespace, 1)]) };
    scene.tree.verify(&scene.anchors, &scene.holders).unwrap();
    scene
}

fn after(damage: impl FnOnce(&mut Scene)) -> TreeFault {
    let mut scene = sound();
    damage(&mut scene);
    scene.tree.verify(&scene.anchors, &scene.holders).unwrap_err()
}

fn fault(node: NodeId, what: &str) -> TreeFault {
    TreeFault { node, what: what.into() }
}

#[test]
fn a_child_that_does_not_exist_is_found() {
    let found = after(|scene| scene.tree.nodes[1].first_child = 2);
    assert_eq!(found, fault(NodeId(2), "is linked and does not exist"));
}

#[test]
fn a_block_that_its_parent_does_not_list_is_found() {
    let found = after(|scene| scene.tree.nodes[0].first_child = NONE);
    assert_eq!(found, fault(SECOND, "is not listed below its parent"));
}

#[test]
fn a_first_block_that_its_namespace_does_not_list_is_found() {
    let found = after(|scene| scene.tree.namespaces.set_first_child(scene.namespace, NONE));
    assert_eq!(found, fault(FIRST, "is not listed below its parent"));
}

#[test]
fn a_block_below_another_parent_than_the_one_that_lists_it_is_found() {
    let found = after(|scene| scene.tree.nodes[1].parent = PackedParent::pack(ParentId::Node(SECOND)));
    assert_eq!(found, fault(SECOND, "is listed below a parent that is not its own"));
}

#[test]
fn a_sibling_that_links_back_wrongly_is_found() {
    let found = after(|scene| {
        assert_eq!(scene.tree.insert(ParentId::Node(FIRST), 3, &[7], &[]), Insertion::New(NodeId(2)));
        scene.tree.set_page(NodeId(2), GroupId::FIRST, PageId(3));
        scene.tree.nodes[1].previous = NONE;
    });
    assert_eq!(found, fault(SECOND, "links back to another sibling than the one before it"));
}

#[test]
fn a_list_that_runs_in_a_circle_is_found() {
    let found = after(|scene| {
        scene.tree.nodes[1].next = 1;
        scene.tree.nodes[1].previous = 1;
    });
    assert_eq!(found, fault(SECOND, "links back to another sibling than the one before it"));
}

#[test]
fn a_free_record_that_is_not_listed_is_found() {
    let found = after(|scene| {
        scene.tree.clear_page(SECOND, GroupId::FIRST);
        scene.tree.first_free = NONE;
    });
    assert_eq!(found, fault(SECOND, "is not listed below its parent"));
}

#[test]
fn an_anchor_that_nobody_claims_is_found() {
    let found = after(|scene| scene.tree.anchor(FIRST));
    assert_eq!(found, fault(FIRST, "counts 1 anchors, sequences hold 0"));
}

#[test]
fn an_anchor_that_the_tree_does_not_count_is_found() {
    let found = after(|scene| assert_eq!(scene.anchors.insert(SECOND, 1), None));
    assert_eq!(found, fault(SECOND, "counts 0 anchors, sequences hold 1"));
}

#[test]
fn an_anchor_on_a_block_that_has_gone_is_found() {
    let found = after(|scene| {
        scene.tree.clear_page(SECOND, GroupId::FIRST);
        scene.tree.anchors.insert(SECOND, 1);
        scene.anchors.insert(SECOND, 1);
    });
    assert_eq!(found, fault(SECOND, "is anchored and not in the table"));
}

#[test]
fn a_block_with_neither_pages_nor_children_is_found() {
    let found = after(|scene| {
        scene.tree.insert(ParentId::Node(SECOND), 3, &[7], &[]);
    });
    assert_eq!(found, fault(NodeId(2), "has neither pages nor children nor anchors"));
}

#[test]
fn a_node_under_another_hash_than_the_table_has_is_found() {
    let found = after(|scene| scene.tree.nodes[1].key = 9);
    assert_eq!(found, fault(SECOND, "the table does not lead to it"));
}

#[test]
fn a_node_that_is_free_and_in_the_table_is_found() {
    let found = after(|scene| {
        scene.tree.unlink(SECOND);
        scene.tree.link(SECOND, PackedParent::FREE);
        scene.tree.resident[0] -= 1;
        scene.tree.extras = ExtraKeyStore::default();
    });
    assert_eq!(found, fault(NO_NODE, "2 blocks and 0 tails are counted, not 1 nodes"));
}

#[test]
fn a_hold_on_a_namespace_that_no_sequence_has_is_found() {
    let found = after(|scene| {
        scene.tree.acquire_namespace(&NamespaceKey::default());
    });
    assert_eq!(found, fault(NO_NODE, "NamespaceId(0) counts 2 holders, 1 hold it"));
}

#[test]
fn a_sequence_whose_hold_is_not_counted_is_found() {
    let found = after(|scene| scene.tree.release_namespace(scene.namespace));
    assert_eq!(found, fault(NO_NODE, "NamespaceId(0) counts 0 holders, 1 hold it"));
}

#[test]
fn a_sequence_in_a_namespace_that_has_gone_is_found() {
    let found = after(|scene| {
        let salt = "gone".to_owned();
        let gone = scene.tree.acquire_namespace(&NamespaceKey { salt, ..NamespaceKey::default() });
        scene.tree.release_namespace(gone);
        scene.holders.insert(gone, 1);
    });
    assert_eq!(found, fault(NO_NODE, "2 namespaces are held, the tree knows 1"));
}

#[test]
fn an_extra_key_that_is_used_more_often_than_nodes_have_it_is_found() {
    let found = after(|scene| {
        scene.tree.extras.acquire(b"image");
    });
    assert_eq!(found, fault(NO_NODE, "ExtraId(1) is used by 1 nodes, not 2"));
}

#[test]
fn a_wrong_number_of_blocks_on_the_device_is_found() {
    let found = after(|scene| scene.tree.resident[0] += 1);
    assert_eq!(found, fault(NO_NODE, "2 nodes have a page of GroupId(0), 3 are counted"));
}

#[test]
fn a_wrong_number_of_blocks_of_a_further_group_is_found() {
    let found = after(|scene| scene.tree.slots[1] = PageId(4));
    assert_eq!(found, fault(NO_NODE, "1 nodes have a page of GroupId(1), 0 are counted"));
}

/// [`after`], with a third node beside the second.
fn after_with_siblings(damage: impl FnOnce(&mut Scene)) -> TreeFault {
    after(|scene| {
        scene.tree.insert(ParentId::Node(FIRST), 3, &[7], b"image");
        scene.tree.set_page(NodeId(2), GroupId::FIRST, PageId(3));
        scene.tree.verify(&scene.anchors, &scene.holders).unwrap();
        damage(scene);
    })
}

#[test]
fn a_block_that_its_tokens_do_not_lead_to_is_found() {
    let found = after_with_siblings(|scene| scene.tree.leave_forks(NodeId(2)));
    assert_eq!(found, fault(NodeId(2), "is not what its tokens lead to"));
}

#[test]
fn a_block_without_a_page_that_tokens_lead_to_is_found() {
    let found = after_with_siblings(|scene| {
        scene.tree.anchor(NodeId(2));
        scene.anchors.insert(NodeId(2), 1);
        scene.tree.clear_page(NodeId(2), GroupId::FIRST);
        scene.tree.enter_forks(NodeId(2));
    });
    assert_eq!(found, fault(NO_NODE, "tokens lead to 2 nodes, and should to 1"));
}

/// What is wrong with a tail of two tokens, on pages of two groups, after the damage.
fn after_with_tail(damage: impl FnOnce(&mut PrefixTree)) -> TreeFault {
    let mut tree = PrefixTree::new(4, 0, 2);
    let namespace = tree.acquire_namespace(&NamespaceKey::default());
    tree.insert_tail(ParentId::Root(namespace), &[5, 6], &[], &[PageId(1), PageId(2)]);
    let holders = HashMap::from([(namespace, 1)]);
    tree.verify(&HashMap::new(), &holders).unwrap();
    damage(&mut tree);
    tree.verify(&HashMap::new(), &holders).unwrap_err()
}

#[test]
fn a_tail_that_is_as_long_as_a_block_is_found() {
    assert_eq!(after_with_tail(|tree| tree.nodes[0].key = 4), fault(FIRST, "is a tail of 4 tokens"));
}

#[test]
fn a_tail_that_blocks_follow_is_found() {
    let found = after_with_tail(|tree| tree.nodes[0].first_child = 0);
    assert_eq!(found, fault(FIRST, "is a tail and has children"));
}

#[test]
fn a_tail_that_is_not_on_the_device_in_the_first_group_is_found() {
    let found = after_with_tail(|tree| tree.clear_page(FIRST, GroupId::FIRST));
    assert_eq!(found, fault(FIRST, "is a tail without a page of the first group"));
}
