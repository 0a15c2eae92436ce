//! Storing many blocks at once is storing one after the other.

use block_hash::Token;
use block_pool::{GroupId, PageId};
use proptest::prelude::*;
use radix_tree::{Insertion, NamespaceId, NamespaceKey, NodeId, ParentId, PrefixTree};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

/// A prefix by the numbers of its blocks: equal numbers at the start of two prefixes are the same blocks.
type Path = Vec<u8>;

/// One tree, and what was stored in it, oldest first.
struct Stored {
    tree: PrefixTree,
    page_size: usize,
    namespace: NamespaceId,
    nodes: Vec<NodeId>,
    pages: u32,
}

impl Stored {
    fn new(page_size: usize, groups: u8) -> Stored {
        let mut tree = PrefixTree::new(page_size, 0, groups);
        let namespace = tree.acquire_namespace(&NamespaceKey::default());
        Stored { tree, page_size, namespace, nodes: Vec::new(), pages: 0 }
    }

    /// The chained hash of a path's last block. Paths of some lengths share theirs, which are collisions.
    fn key(path: &[u8]) -> u64 {
        if path.len() % 7 == 6 {
            return 7;
        }
        path.iter().fold(1u64, |key, &block| key.wrapping_mul(31) + u64::from(block) + 1)
    }

    fn tokens(&self, path: &[u8]) -> Vec<Token> {
        let block = |&number: &u8| (0..self.page_size as Token).map(move |token| token + Token::from(number));
        path.iter().flat_map(block).collect()
    }

    /// The pages of the next `count` blocks.
    fn next_pages(&mut self, count: usize) -> Vec<PageId> {
        (0..count).map(|block| PageId(self.pages + block as u32 + 1)).collect()
    }

    fn further_groups(&self) -> impl Iterator<Item = GroupId> + use<> {
        (1..self.tree.groups()).map(GroupId)
    }

    /// The page of a further group of the block that has `page` of the first; some have none.
    fn page_of(group: GroupId, page: PageId) -> PageId {
        let group = u32::from(group.0);
        if page.0.is_multiple_of(group + 2) { PageId::NULL } else { PageId(page.0 + 1_000 * group) }
    }

    /// Stores the rest of `path` from `from` on, block by block, up to the first that is there: how many.
    fn insert_each(&mut self, parent: ParentId, path: &[u8], from: usize) -> usize {
        let pages = self.next_pages(path.len() - from);
        let mut parent = parent;
        for (block, page) in (from..path.len()).zip(pages) {
            let tokens = self.tokens(&path[block..=block]);
            let key = Stored::key(&path[..=block]);
            let Insertion::New(node) = self.tree.insert(parent, key, &tokens, &[]) else {
                return block - from;
            };
            self.tree.set_page(node, GroupId::FIRST, page);
            for group in self.further_groups() {
                if let page @ PageId(1..) = Stored::page_of(group, page) {
                    self.tree.set_page(node, group, page);
                }
            }
            self.made(node);
            parent = ParentId::Node(node);
        }
        path.len() - from
    }

    /// The same at once.
    fn extend(&mut self, parent: ParentId, path: &[u8], from: usize) -> usize {
        let pages = self.next_pages(path.len() - from);
        let keys: Vec<u64> = (from..path.len()).map(|block| Stored::key(&path[..=block])).collect();
        let mut made = vec![NodeId(u32::MAX)];
        self.tree.extend(parent, &keys, &self.tokens(&path[from..]), &pages, &mut made);
        assert_eq!(made[0], NodeId(u32::MAX), "nodes are added to those that are there");
        for group in self.further_groups() {
            let pages = pages[..made.len() - 1].iter().map(|&page| Stored::page_of(group, page));
            self.tree.set_pages(&made[1..], group, &pages.collect::<Vec<_>>());
        }
        made[1..].iter().for_each(|&node| self.made(node));
        made.len() - 1
    }

    fn made(&mut self, node: NodeId) {
        self.nodes.push(node);
        self.pages += 1;
    }

    /// The blocks of `path` that are stored, and the last of them.
    fn find(&self, path: &[u8]) -> (usize, ParentId) {
        let mut parent = ParentId::Root(self.namespace);
        for block in 0..path.len() {
            let (key, tokens) = (Stored::key(&path[..=block]), self.tokens(&path[block..=block]));
            match self.tree.find(parent, key, &tokens, &[]) {
                Ok(Some(node)) if self.tree.page(node, GroupId::FIRST).is_some() => {
                    parent = ParentId::Node(node);
                }
                _ => return (block, parent),
            }
        }
        (path.len(), parent)
    }

    fn evict(&mut self, count: usize) {
        for _ in 0..count.min(self.nodes.len()) {
            if let Some(node) = self.nodes.pop() {
                for group in (0..self.tree.groups()).map(GroupId) {
                    if self.tree.page(node, group).is_some() {
                        self.tree.clear_page(node, group);
                    }
                }
            }
        }
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.tree.fingerprint(&mut hasher);
        hasher.finish()
    }
}

proptest! {
    #[test]
    fn storing_at_once_is_storing_one_by_one(
        page_size in prop_oneof![Just(1usize), Just(5), Just(16), Just(32), Just(128)],
        groups in 1u8..4,
        calls in prop::collection::vec((prop::collection::vec(0u8..3, 0..40), 0usize..30), 1..30),
    ) {
        let (mut one, mut other) = (Stored::new(page_size, groups), Stored::new(page_size, groups));
        for (path, evicted) in &calls {
            let path: &Path = path;
            let (found, parent) = one.find(path);
            prop_assert_eq!(other.find(path), (found, parent));
            let stored = one.insert_each(parent, path, found);
            prop_assert_eq!(other.extend(parent, path, found), stored);
            prop_assert_eq!(other.find(path).0, found + stored);
            prop_assert_eq!(other.tree.resident(GroupId::FIRST), other.nodes.len());
            one.evict(*evicted);
            other.evict(*evicted);
            prop_assert_eq!(other.fingerprint(), one.fingerprint());
            let holders = HashMap::from([(other.namespace, 1)]);
            prop_assert_eq!(other.tree.verify(&HashMap::new(), &holders), Ok(()));
        }
    }
}
