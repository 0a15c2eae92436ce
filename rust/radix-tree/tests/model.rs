//! Any order of calls, compared with a map from whole paths after each; most hashes collide.

use block_hash::Token;
use block_pool::{GroupId, PageId};
use proptest::prelude::*;
use radix_tree::{DigestCollision, Insertion, NamespaceId, NamespaceKey, NodeId, ParentId, PrefixTree};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Token and extra key of a block of one token.
type Block = (Token, &'static [u8]);
/// A salt, and the blocks from the root on.
type Path = (&'static str, Vec<Block>);

const SALTS: [&str; 3] = ["", "a", "b"];
const GROUPS: usize = 3;
const EXTRA_KEYS: [&[u8]; 3] = [b"", b"a", b"b"];

#[derive(Clone, Debug)]
enum Call {
    /// Stores the block below its parent, if the parent is there, with a page of a group.
    Store(Path, GroupId),
    Lose(usize, GroupId),
    Anchor(usize),
    ReleaseAnchor(usize),
    Find(Path),
}

fn any_path() -> impl Strategy<Value = Path> {
    let block = (0..3, prop::sample::select(&EXTRA_KEYS));
    (prop::sample::select(&SALTS), prop::collection::vec(block, 1..4))
}

fn any_call() -> impl Strategy<Value = Call> {
    let group = || (0..GROUPS as u8).prop_map(GroupId);
    prop_oneof![
        8 => (any_path(), group()).prop_map(|(path, group)| Call::Store(path, group)),
        4 => (any::<usize>(), group()).prop_map(|(choice, group)| Call::Lose(choice, group)),
        2 => any::<usize>().prop_map(Call::Anchor),
        3 => any::<usize>().prop_map(Call::ReleaseAnchor),
        8 => any_path().prop_map(Call::Find),
    ]
}

/// A chained hash so short that many paths share one: tokens 0 and 2, extra keys `a` and `b`, and what
/// wraps around.
fn hash((salt, blocks): &Path) -> u64 {
    let start = salt.len() as u64 + u64::from(*salt == "b");
    blocks.iter().fold(start, |hash, (token, extra)| {
        (hash * 31 + u64::from(token.unsigned_abs() % 2) * 7 + extra.len() as u64) % 41
    })
}

fn key(salt: &str) -> NamespaceKey {
    NamespaceKey { salt: salt.into(), ..NamespaceKey::default() }
}

#[derive(Debug)]
struct Stored {
    node: NodeId,
    pages: [Option<PageId>; GROUPS],
    anchors: u32,
}

#[derive(Default)]
struct Model {
    paths: BTreeMap<Path, Stored>,
    pages: u32,
}

impl Model {
    fn parent(&self, namespace: NamespaceId, path: &Path) -> Option<ParentId> {
        let mut above = path.clone();
        above.1.pop();
        if above.1.is_empty() {
            return Some(ParentId::Root(namespace));
        }
        self.paths.get(&above).map(|stored| ParentId::Node(stored.node))
    }

    /// Whether another path has the hash of `path`.
    fn collides(&self, path: &Path) -> bool {
        self.paths.keys().any(|other| other != path && hash(other) == hash(path))
    }

    /// The `choice`-th (around) of the blocks that are legal.
    fn choose(&mut self, choice: usize, legal: impl Fn(&Stored) -> bool) -> Option<&mut Stored> {
        let mut legal: Vec<&mut Stored> = self.paths.values_mut().filter(|stored| legal(stored)).collect();
        let index = choice.checked_rem(legal.len())?;
        Some(legal.swap_remove(index))
    }

    /// Drops paths that hold nothing and lead nowhere, the longest first.
    fn prune(&mut self) {
        let mut paths: Vec<Path> = self.paths.keys().cloned().collect();
        paths.sort_by_key(|(_, blocks)| std::cmp::Reverse(blocks.len()));
        for path in paths {
            let leads_on = self.paths.keys().any(|other| {
                other.0 == path.0 && other.1.len() > path.1.len() && other.1.starts_with(&path.1)
            });
            let stored = &self.paths[&path];
            if stored.pages == [None; GROUPS] && stored.anchors == 0 && !leads_on {
                self.paths.remove(&path);
            }
        }
    }

    /// Makes the call on both sides, if it is legal.
    fn call(&mut self, tree: &mut PrefixTree, call: &Call) {
        match call {
            Call::Store(path, _) | Call::Find(path) => {
                let namespace = tree.acquire_namespace(&key(path.0));
                if let Some(parent) = self.parent(namespace, path) {
                    match call {
                        Call::Store(_, group) => self.store(tree, parent, path, *group),
                        _ => self.find(tree, parent, path),
                    }
                }
                tree.release_namespace(namespace);
            }
            Call::Lose(choice, group) => {
                let slot = usize::from(group.0);
                if let Some(stored) = self.choose(*choice, |stored| stored.pages[slot].is_some()) {
                    stored.pages[slot] = None;
                    tree.clear_page(stored.node, *group);
                }
            }
            Call::Anchor(choice) => {
                if let Some(stored) = self.choose(*choice, |_| true) {
                    stored.anchors += 1;
                    tree.anchor(stored.node);
                }
            }
            Call::ReleaseAnchor(choice) => {
                if let Some(stored) = self.choose(*choice, |stored| stored.anchors > 0) {
                    stored.anchors -= 1;
                    tree.release_anchor(stored.node);
                }
            }
        }
        self.prune();
    }

    fn store(&mut self, tree: &mut PrefixTree, parent: ParentId, path: &Path, group: GroupId) {
        let (token, extra) = path.1[path.1.len() - 1];
        let inserted = tree.insert(parent, hash(path), &[token], extra);
        if self.collides(path) {
            assert_eq!(inserted, Insertion::Collision);
            return;
        }
        let stored = match (self.paths.get_mut(path), inserted) {
            (Some(stored), Insertion::Existing(node)) if stored.node == node => stored,
            (None, Insertion::New(node)) => {
                self.paths.entry(path.clone()).or_insert(Stored { node, pages: [None; GROUPS], anchors: 0 })
            }
            (stored, inserted) => panic!("{stored:?} is stored, the tree says {inserted:?}"),
        };
        let page = &mut stored.pages[usize::from(group.0)];
        if page.is_none() {
            self.pages += 1;
            *page = Some(PageId(self.pages));
            tree.set_page(stored.node, group, PageId(self.pages));
        }
    }

    fn find(&self, tree: &PrefixTree, parent: ParentId, path: &Path) {
        let (token, extra) = path.1[path.1.len() - 1];
        let expected = match self.paths.get(path) {
            Some(stored) => Ok(Some(stored.node)),
            None if self.collides(path) => Err(DigestCollision),
            None => Ok(None),
        };
        assert_eq!(tree.find(parent, hash(path), &[token], extra), expected);
    }

    /// Each path that goes on from this one is listed once, after those that go on from it.
    fn compare_descendants(&self, tree: &PrefixTree, path: &Path, node: NodeId) {
        let below = |path: &Path| {
            let goes_on = |other: &&Path| {
                other.0 == path.0 && other.1.len() > path.1.len() && other.1.starts_with(&path.1)
            };
            self.paths.keys().filter(goes_on).map(|path| self.paths[path].node).collect::<BTreeSet<_>>()
        };
        let listed: Vec<NodeId> = tree.descendants(ParentId::Node(node)).collect();
        assert_eq!(listed.len(), below(path).len(), "{path:?}");
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), below(path), "{path:?}");
        assert_eq!(tree.is_leaf(node), listed.is_empty(), "{path:?}");
        for (at, &node) in listed.iter().enumerate() {
            if let ParentId::Node(above) = tree.parent(node) {
                assert!(!listed[..at].contains(&above), "{path:?}");
            }
        }
    }

    fn compare(&self, tree: &PrefixTree) {
        let anchors: HashMap<NodeId, u32> =
            self.paths.values().map(|stored| (stored.node, stored.anchors)).collect();
        tree.verify(&anchors, &HashMap::new()).unwrap();
        assert_eq!(tree.len(), self.paths.len());
        for salt in SALTS {
            let used = self.paths.keys().any(|path| path.0 == salt);
            assert_eq!(tree.find_namespace(&key(salt)).is_some(), used, "namespace {salt:?}");
        }
        for (path, stored) in &self.paths {
            for (group, &page) in (0..).map(GroupId).zip(&stored.pages) {
                assert_eq!(tree.page(stored.node, group), page, "{path:?} of {group:?}");
            }
            assert_eq!(tree.tokens(stored.node), [path.1[path.1.len() - 1].0], "{path:?}");
            self.compare_descendants(tree, path, stored.node);
        }
    }
}

proptest! {
    #[test]
    fn any_order_of_calls_leaves_what_a_map_of_paths_says(calls in prop::collection::vec(any_call(), 1..120)) {
        let (mut tree, mut model) = (PrefixTree::new(1, 0, GROUPS as u8), Model::default());
        for call in &calls {
            model.call(&mut tree, call);
            model.compare(&tree);
        }
    }
}
