//! What the tree finds, keeps and forgets.

use block_hash::Token;
use block_pool::{GroupId, PageId};
use radix_tree::{
    AdapterId, DigestCollision, Insertion, NamespaceId, NamespaceKey, NodeId, ParentId, PrefixTree,
};
use std::collections::HashMap;

const PAGE: usize = 2;

fn tree() -> PrefixTree {
    PrefixTree::new(PAGE, 16, 1)
}

fn salt(salt: &str) -> NamespaceKey {
    NamespaceKey { salt: salt.into(), ..NamespaceKey::default() }
}

/// The root of the namespace of a salt, held by the test.
fn root(tree: &mut PrefixTree, name: &str) -> ParentId {
    ParentId::Root(tree.acquire_namespace(&salt(name)))
}

/// Stores a new block on `page`.
fn store(tree: &mut PrefixTree, parent: ParentId, key: u64, tokens: [Token; PAGE], page: u32) -> NodeId {
    let Insertion::New(node) = tree.insert(parent, key, &tokens, &[]) else {
        panic!("the block is there already, or its hash is another's")
    };
    tree.set_page(node, GroupId::FIRST, PageId(page));
    node
}

/// How often the test holds each of these roots' namespaces.
fn holders(roots: &[ParentId]) -> HashMap<NamespaceId, u32> {
    let mut holders = HashMap::new();
    for root in roots {
        let ParentId::Root(namespace) = *root else { panic!("{root:?} is no root") };
        *holders.entry(namespace).or_default() += 1;
    }
    holders
}

/// Verifies a tree in which the test holds the namespaces of `roots`, and no anchor.
fn verify(tree: &PrefixTree, roots: &[ParentId]) {
    tree.verify(&HashMap::new(), &holders(roots)).unwrap();
}

#[test]
fn a_stored_block_is_found_below_its_parent_with_its_page() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [5, 6], 9);
    let second = store(&mut tree, ParentId::Node(first), 2, [7, 8], 4);
    assert_eq!(tree.find(root, 1, &[5, 6], &[]), Ok(Some(first)));
    assert_eq!(tree.find(ParentId::Node(first), 2, &[7, 8], &[]), Ok(Some(second)));
    assert_eq!(
        (tree.page(first, GroupId::FIRST), tree.page(second, GroupId::FIRST)),
        (Some(PageId(9)), Some(PageId(4)))
    );
    assert_eq!((tree.parent(first), tree.parent(second)), (root, ParentId::Node(first)));
    assert_eq!(tree.tokens(second), [7, 8]);
    verify(&tree, &[root]);
}

#[test]
fn inserting_a_block_again_gives_the_node_that_is_there() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let node = store(&mut tree, root, 1, [5, 6], 9);
    assert_eq!(tree.insert(root, 1, &[5, 6], &[]), Insertion::Existing(node));
    assert_eq!(tree.len(), 1);
    verify(&tree, &[root]);
}

#[test]
fn an_unknown_hash_is_a_miss_and_no_collision() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    store(&mut tree, root, 1, [5, 6], 9);
    assert_eq!(tree.find(root, 2, &[5, 6], &[]), Ok(None));
}

/// The look-up and the insertion of a block whose hash is that of `[5, 6]` with extra keys `image`.
fn with_equal_hash(
    tokens: [Token; PAGE],
    extra: &[u8],
    below_itself: bool,
    namespace: &str,
) -> (Result<Option<NodeId>, DigestCollision>, Insertion) {
    let mut tree = tree();
    let owner = root(&mut tree, "");
    let Insertion::New(node) = tree.insert(owner, 1, &[5, 6], b"image") else { panic!("the tree is empty") };
    tree.set_page(node, GroupId::FIRST, PageId(9));
    let parent = if below_itself { ParentId::Node(node) } else { root(&mut tree, namespace) };
    let outcome = (tree.find(parent, 1, &tokens, extra), tree.insert(parent, 1, &tokens, extra));
    assert_eq!((tree.len(), tree.page(node, GroupId::FIRST)), (1, Some(PageId(9))));
    let held = if below_itself { vec![owner] } else { vec![owner, parent] };
    verify(&tree, &held);
    outcome
}

#[test]
fn an_equal_hash_with_equal_parent_tokens_and_extra_keys_is_a_hit() {
    let (found, inserted) = with_equal_hash([5, 6], b"image", false, "");
    assert_eq!((found, inserted), (Ok(Some(NodeId(0))), Insertion::Existing(NodeId(0))));
}

#[test]
fn an_equal_hash_with_other_tokens_is_a_collision() {
    assert_eq!(with_equal_hash([5, 7], b"image", false, ""), (Err(DigestCollision), Insertion::Collision));
}

#[test]
fn an_equal_hash_below_another_parent_is_a_collision() {
    assert_eq!(with_equal_hash([5, 6], b"image", true, ""), (Err(DigestCollision), Insertion::Collision));
}

#[test]
fn an_equal_hash_with_other_extra_keys_is_a_collision() {
    for extra in [b"".as_slice(), b"imagf", b"imag", b"image2"] {
        assert_eq!(with_equal_hash([5, 6], extra, false, ""), (Err(DigestCollision), Insertion::Collision));
    }
}

#[test]
fn an_equal_hash_in_another_namespace_is_a_collision() {
    assert_eq!(with_equal_hash([5, 6], b"image", false, "b"), (Err(DigestCollision), Insertion::Collision));
}

#[test]
fn a_hash_is_free_again_once_its_owner_has_gone() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let node = store(&mut tree, root, 1, [5, 6], 9);
    tree.clear_page(node, GroupId::FIRST);
    assert_eq!(tree.find(root, 1, &[5, 7], &[]), Ok(None));
    store(&mut tree, root, 1, [5, 7], 9);
    verify(&tree, &[root]);
}

#[test]
fn namespaces_are_compared_by_every_byte_of_salt_adapter_and_generation() {
    let mut tree = tree();
    let name = |name: &str| Some(AdapterId::Name(name.into()));
    let key = |salt: &str, adapter, generation| NamespaceKey { salt: salt.into(), adapter, generation };
    let keys = [
        key("", None, 0),
        key("7", None, 0),
        key("", name("7"), 0),
        key("", Some(AdapterId::Number(7)), 0),
        key("a", name("bc"), 0),
        key("ab", name("c"), 0),
        key("", name("7\0"), 0),
        key("", name("7"), 1),
    ];
    let ids: Vec<NamespaceId> = keys.iter().map(|key| tree.acquire_namespace(key)).collect();
    let distinct: std::collections::HashSet<_> = ids.iter().collect();
    assert_eq!(distinct.len(), keys.len());
    assert_eq!(keys.each_ref().map(|key| tree.acquire_namespace(key)).to_vec(), ids);
}

#[test]
fn a_namespace_lives_as_long_as_a_holder_or_a_block() {
    let mut tree = tree();
    let held = tree.acquire_namespace(&salt("a"));
    assert_eq!(tree.acquire_namespace(&salt("a")), held);
    let node = store(&mut tree, ParentId::Root(held), 1, [5, 6], 9);
    tree.release_namespace(held);
    tree.release_namespace(held);
    assert_eq!(tree.find_namespace(&salt("a")), Some(held));
    tree.clear_page(node, GroupId::FIRST);
    assert_eq!(tree.find_namespace(&salt("a")), None);
    verify(&tree, &[]);
}

#[test]
fn a_namespace_without_blocks_goes_with_its_last_holder() {
    let mut tree = tree();
    let held = tree.acquire_namespace(&salt("a"));
    tree.release_namespace(held);
    assert_eq!(tree.find_namespace(&salt("a")), None);
}

#[test]
fn a_lost_block_stays_as_long_as_a_block_below_it_is_stored() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [1, 1], 1);
    let second = store(&mut tree, ParentId::Node(first), 2, [2, 2], 2);
    let third = store(&mut tree, ParentId::Node(second), 3, [3, 3], 3);
    tree.clear_page(first, GroupId::FIRST);
    tree.clear_page(second, GroupId::FIRST);
    assert_eq!(
        (tree.len(), tree.page(second, GroupId::FIRST), tree.page(third, GroupId::FIRST)),
        (3, None, Some(PageId(3)))
    );
    tree.clear_page(third, GroupId::FIRST);
    assert!(tree.is_empty());
    verify(&tree, &[root]);
}

#[test]
fn pruning_stops_at_the_first_block_that_is_stored() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [1, 1], 1);
    let second = store(&mut tree, ParentId::Node(first), 2, [2, 2], 2);
    let third = store(&mut tree, ParentId::Node(second), 3, [3, 3], 3);
    tree.clear_page(second, GroupId::FIRST);
    tree.clear_page(third, GroupId::FIRST);
    assert_eq!(tree.iter().collect::<Vec<_>>(), [first]);
    verify(&tree, &[root]);
}

#[test]
fn pruning_stops_where_another_branch_begins() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [1, 1], 1);
    let left = store(&mut tree, ParentId::Node(first), 2, [2, 2], 2);
    let right = store(&mut tree, ParentId::Node(first), 3, [3, 3], 3);
    tree.clear_page(first, GroupId::FIRST);
    tree.clear_page(left, GroupId::FIRST);
    assert_eq!(tree.find(root, 1, &[1, 1], &[]), Ok(Some(first)));
    assert_eq!(tree.find(ParentId::Node(first), 3, &[3, 3], &[]), Ok(Some(right)));
    assert_eq!(tree.len(), 2);
    verify(&tree, &[root]);
}

#[test]
fn a_lost_block_that_is_computed_again_takes_its_old_place() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [1, 1], 1);
    let second = store(&mut tree, ParentId::Node(first), 2, [2, 2], 2);
    tree.clear_page(first, GroupId::FIRST);
    assert_eq!(tree.insert(root, 1, &[1, 1], &[]), Insertion::Existing(first));
    tree.set_page(first, GroupId::FIRST, PageId(7));
    assert_eq!(
        (tree.page(first, GroupId::FIRST), tree.page(second, GroupId::FIRST)),
        (Some(PageId(7)), Some(PageId(2)))
    );
    verify(&tree, &[root]);
}

#[test]
fn an_anchored_block_stays_without_a_page_until_its_last_anchor_ends() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let node = store(&mut tree, root, 1, [1, 1], 1);
    tree.anchor(node);
    tree.anchor(node);
    tree.clear_page(node, GroupId::FIRST);
    tree.verify(&HashMap::from([(node, 2)]), &holders(&[root])).unwrap();
    tree.release_anchor(node);
    assert_eq!(tree.find(root, 1, &[1, 1], &[]), Ok(Some(node)));
    tree.release_anchor(node);
    assert!(tree.is_empty());
    verify(&tree, &[root]);
}

#[test]
fn the_last_anchor_of_a_stored_block_leaves_the_block() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let node = store(&mut tree, root, 1, [1, 1], 1);
    tree.anchor(node);
    tree.release_anchor(node);
    assert_eq!(tree.page(node, GroupId::FIRST), Some(PageId(1)));
    verify(&tree, &[root]);
}

#[test]
fn clearing_drops_every_block_and_namespace() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    store(&mut tree, root, 1, [1, 1], 1);
    tree.clear();
    assert_eq!((tree.len(), tree.find_namespace(&salt(""))), (0, None));
    verify(&tree, &[]);
}

#[test]
fn children_are_listed_the_last_inserted_first() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [1, 1], 1);
    let below = [2, 3, 4].map(|key| store(&mut tree, ParentId::Node(first), key, [key as Token; 2], 2));
    let children = |tree: &PrefixTree, parent| tree.children(parent).collect::<Vec<_>>();
    assert_eq!(children(&tree, root), [first]);
    assert_eq!(children(&tree, ParentId::Node(first)), [below[2], below[1], below[0]]);
    assert_eq!(children(&tree, ParentId::Node(below[0])), []);
    for (gone, left) in [(1, vec![below[2], below[0]]), (2, vec![below[0]]), (0, vec![])] {
        tree.clear_page(below[gone], GroupId::FIRST);
        assert_eq!(children(&tree, ParentId::Node(first)), left);
        verify(&tree, &[root]);
    }
}

#[test]
fn a_node_knows_whether_it_is_a_leaf_and_whether_it_has_siblings() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [1, 1], 1);
    let left = store(&mut tree, ParentId::Node(first), 2, [2, 2], 2);
    assert_eq!((tree.is_leaf(first), tree.has_siblings(first)), (false, false));
    assert_eq!((tree.is_leaf(left), tree.has_siblings(left)), (true, false));
    let right = store(&mut tree, ParentId::Node(first), 3, [3, 3], 3);
    assert!(tree.has_siblings(left) && tree.has_siblings(right));
    tree.clear_page(right, GroupId::FIRST);
    assert!(!tree.has_siblings(left));
}

#[test]
fn an_anchor_is_no_child() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let node = store(&mut tree, root, 1, [1, 1], 1);
    tree.anchor(node);
    assert!(tree.is_leaf(node));
    assert_eq!(tree.children(ParentId::Node(node)).count(), 0);
}

#[test]
fn descendants_come_before_what_they_follow() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    //     top       last
    //    /   \
    //  fork  side
    //  /  \
    // one other
    let mut key = 0;
    let mut below = |parent| {
        key += 1;
        store(&mut tree, parent, key, [key as Token; 2], 1)
    };
    let top = below(root);
    let fork = below(ParentId::Node(top));
    let [one, other] = [(); 2].map(|()| below(ParentId::Node(fork)));
    let side = below(ParentId::Node(top));
    let last = below(root);
    let descendants = |parent| tree.descendants(parent).collect::<Vec<_>>();
    assert_eq!(descendants(root), [last, side, other, one, fork, top]);
    assert_eq!(descendants(ParentId::Node(top)), [side, other, one, fork]);
    assert_eq!(descendants(ParentId::Node(fork)), [other, one]);
    assert_eq!(descendants(ParentId::Node(one)), []);
}

#[test]
fn a_block_takes_the_free_number_after_its_parents() {
    let mut tree = tree();
    let root = root(&mut tree, "");
    let first = store(&mut tree, root, 1, [1, 1], 1);
    let others = [2, 3].map(|key| store(&mut tree, root, key, [key as Token; 2], 1));
    assert_eq!((first, others), (NodeId(0), [NodeId(1), NodeId(2)]));
    // Number 2 was given up last, and would be the next for a first block.
    for node in others {
        tree.clear_page(node, GroupId::FIRST);
    }
    assert_eq!(store(&mut tree, ParentId::Node(first), 4, [4, 4], 1), NodeId(1));
    assert_eq!(store(&mut tree, ParentId::Node(first), 5, [5, 5], 1), NodeId(2));
    verify(&tree, &[root]);
}

#[test]
fn a_record_that_had_extra_keys_has_none_when_it_is_used_again_for_many_blocks() {
    let mut tree = PrefixTree::new(4, 0, 1);
    let root = ParentId::Root(tree.acquire_namespace(&NamespaceKey::default()));
    let Insertion::New(node) = tree.insert(root, 1, &[1; 4], b"image") else { panic!("the tree is empty") };
    tree.set_page(node, GroupId::FIRST, PageId(1));
    tree.clear_page(node, GroupId::FIRST);
    let mut made = Vec::new();
    tree.extend(root, &[2], &[2; 4], &[PageId(1)], &mut made);
    tree.insert(root, 3, &[3; 4], b"another");
    assert_eq!(tree.find(root, 2, &[2; 4], &[]), Ok(Some(made[0])));
}

#[test]
fn each_group_has_a_page_of_its_own_for_a_block() {
    let mut tree = PrefixTree::new(PAGE, 16, 3);
    let root = root(&mut tree, "");
    let node = store(&mut tree, root, 1, [1, 1], 7);
    let other = store(&mut tree, root, 2, [2, 2], 8);
    tree.set_page(node, GroupId(2), PageId(7));
    tree.set_page(other, GroupId(1), PageId(9));
    let pages = |node| [0, 1, 2].map(|group| tree.page(node, GroupId(group)));
    assert_eq!(pages(node), [Some(PageId(7)), None, Some(PageId(7))]);
    assert_eq!(pages(other), [Some(PageId(8)), Some(PageId(9)), None]);
    assert_eq!([0, 1, 2].map(|group| tree.resident(GroupId(group))), [2, 1, 1]);
    verify(&tree, &[root]);
}

#[test]
fn a_block_stays_until_its_page_of_the_last_group_has_gone() {
    let mut tree = PrefixTree::new(PAGE, 16, 2);
    let root = root(&mut tree, "");
    let node = store(&mut tree, root, 1, [1, 1], 7);
    tree.set_page(node, GroupId(1), PageId(3));
    tree.clear_page(node, GroupId::FIRST);
    assert_eq!(tree.find(root, 1, &[1, 1], &[]), Ok(Some(node)));
    assert_eq!(tree.page(node, GroupId(1)), Some(PageId(3)));
    tree.clear_page(node, GroupId(1));
    assert!(tree.is_empty());
    verify(&tree, &[root]);
}

#[test]
fn a_block_may_have_no_page_of_the_first_group() {
    let mut tree = PrefixTree::new(PAGE, 16, 2);
    let root = root(&mut tree, "");
    let mut made = Vec::new();
    tree.extend(root, &[1, 2], &[1, 1, 2, 2], &[PageId::NULL, PageId(4)], &mut made);
    tree.set_pages(&made, GroupId(1), &[PageId(5), PageId::NULL]);
    let pages = |group| [0, 1].map(|block: usize| tree.page(made[block], GroupId(group)));
    assert_eq!((pages(0), tree.resident(GroupId(0))), ([None, Some(PageId(4))], 1));
    assert_eq!((pages(1), tree.resident(GroupId(1))), ([Some(PageId(5)), None], 1));
    verify(&tree, &[root]);
}
