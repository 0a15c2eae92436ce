//! Nodes, insertion and pruning.

use crate::extra_keys::ExtraKeyStore;
use crate::forks::Forks;
use crate::lookup::DigestCollision;
use crate::namespaces::{NamespaceId, NamespaceKey, Namespaces};
use crate::node::{NONE, Node, NodeId, PackedExtra, PackedParent, ParentId};
use crate::partial::tokens_of;
use block_hash::Token;
use block_pool::{GroupId, PageId};
use memory::{AHEAD, Array, KeyTable, Rows};
use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::iter;

/// What [`PrefixTree::insert`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Insertion {
    /// The block was not there; the new node has no page yet.
    New(NodeId),
    /// The block is there, with or without a page.
    Existing(NodeId),
    /// Another block owns the hash; nothing was stored.
    Collision,
}

/// The tree of one replica. Blocks are `page_size` tokens.
pub struct PrefixTree {
    pub(crate) page_size: usize,
    pub(crate) nodes: Array<Node>,
    /// `page_size` tokens a node, under the node's index.
    pub(crate) tokens: Rows,
    pub(crate) first_free: u32,
    pub(crate) groups: u8,
    /// The pages of the groups after the first, `groups - 1` a node; see [`Node::page`].
    pub(crate) slots: Array<PageId>,
    /// Nodes with a page, a group.
    pub(crate) resident: Vec<usize>,
    /// Nodes that sequences need to stay, and how many do: few, since blocks hold those before them.
    pub(crate) anchors: HashMap<NodeId, u32>,
    /// The blocks. Tails are in no table.
    pub(crate) table: KeyTable,
    pub(crate) tails: usize,
    /// Nodes that were dropped, counting [`PrefixTree::clear`] as one.
    dropped: u64,
    /// The group by whose pages blocks and tails are found by their tokens, if they are.
    pub(crate) found_by: Option<GroupId>,
    /// Nodes with siblings and a page of that group.
    pub(crate) forks: Forks,
    pub(crate) extras: ExtraKeyStore,
    pub(crate) namespaces: Namespaces,
}

impl PrefixTree {
    /// An empty tree for blocks of `page_size` tokens, sized for about `capacity` blocks, with a slot for
    /// each of `groups` groups, at least 1, in a node.
    pub fn new(page_size: usize, capacity: usize, groups: u8) -> PrefixTree {
        debug_assert!(groups > 0, "a model has layers");
        let table = KeyTable::with_capacity(capacity);
        PrefixTree {
            page_size,
            nodes: Array::with_capacity(table.capacity()),
            tokens: Rows::with_capacity(page_size, table.capacity()),
            first_free: NONE,
            groups,
            slots: Array::with_capacity(table.capacity() * (usize::from(groups) - 1)),
            resident: vec![0; usize::from(groups)],
            anchors: HashMap::new(),
            table,
            tails: 0,
            dropped: 0,
            found_by: Some(GroupId::FIRST),
            forks: Forks::default(),
            extras: ExtraKeyStore::default(),
            namespaces: Namespaces::default(),
        }
    }

    /// The empty tree, whose blocks and tails are found by their tokens where they have a page of `group`; of the first
    /// group, if nothing is said. `None`: nothing is, and siblings cost nothing.
    #[must_use]
    pub fn found_by(mut self, group: Option<GroupId>) -> PrefixTree {
        debug_assert!(
            self.is_empty() && group.is_none_or(|group| group.0 < self.groups),
            "said at the start, of a group"
        );
        self.found_by = group;
        self
    }

    /// Drops every node and namespace at once. The cost does not grow with the number of blocks, other
    /// than what giving memory back to the allocator costs.
    pub fn clear(&mut self) {
        let (page_size, capacity, groups) = (self.page_size, self.table.capacity(), self.groups);
        let (found_by, dropped) = (self.found_by, self.dropped + 1);
        *self = PrefixTree::new(page_size, 0, groups); // gives back what the new one takes
        *self = PrefixTree::new(page_size, capacity, groups).found_by(found_by);
        self.dropped = dropped;
    }

    /// Nodes dropped so far: as long as there are no more, every node that there was is still there.
    #[inline]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Nodes in the tree.
    pub fn len(&self) -> usize {
        self.table.len() + self.tails
    }

    /// Tails in the tree.
    #[inline]
    pub fn tails(&self) -> usize {
        self.tails
    }

    /// Whether the tree has no node.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The namespace of `key`, if anything lives in it.
    pub fn find_namespace(&self, key: &NamespaceKey) -> Option<NamespaceId> {
        self.namespaces.find(key)
    }

    /// The namespace of `key`, held until [`PrefixTree::release_namespace`].
    pub fn acquire_namespace(&mut self, key: &NamespaceKey) -> NamespaceId {
        self.namespaces.acquire(key)
    }

    /// Gives up one hold on `namespace`.
    pub fn release_namespace(&mut self, namespace: NamespaceId) {
        self.namespaces.release(namespace);
    }

    /// The node of the block that [`PrefixTree::find`] would look for, made if it is not there.
    pub fn insert(&mut self, parent: ParentId, key: u64, tokens: &[Token], extra: &[u8]) -> Insertion {
        debug_assert_eq!(tokens.len(), self.page_size, "a node is one whole block");
        match self.find(parent, key, tokens, extra) {
            Ok(Some(node)) => return Insertion::Existing(node),
            Err(DigestCollision) => return Insertion::Collision,
            Ok(None) => {}
        }
        let node = self.place(parent);
        let id = node.0 as usize;
        (self.nodes[id].key, self.nodes[id].extra) = (key, PackedExtra::of_block(self.extras.acquire(extra)));
        self.tokens.write(iter::once((id, tokens)));
        self.table.insert(key, node.0);
        Insertion::New(node)
    }

    /// Stores blocks that follow each other below `parent`: whole blocks of `tokens`, with chained hashes
    /// `keys`, no extra keys, each on its page of the first group in `pages`; the null page is none. Ends
    /// before the first whose hash is stored already. Adds the nodes of those stored to `made`.
    ///
    /// Pages of further groups follow by [`PrefixTree::set_pages`]; then the last node has one of some group.
    pub fn extend(
        &mut self,
        mut parent: ParentId,
        keys: &[u64],
        tokens: &[Token],
        pages: &[PageId],
        made: &mut Vec<NodeId>,
    ) {
        debug_assert_eq!(tokens.len(), keys.len() * self.page_size, "whole blocks, a hash for each");
        debug_assert_eq!(pages.len(), keys.len(), "a page for each block");
        let first = made.len();
        for (block, (&key, &page)) in keys.iter().zip(pages).enumerate() {
            if let Some(&later) = keys.get(block + AHEAD) {
                self.table.prefetch(later);
            }
            if self.owner_of(key).is_some() {
                break;
            }
            let node = self.place(parent);
            let record = &mut self.nodes[node.0 as usize];
            (record.key, record.extra, record.page) = (key, PackedExtra::NONE, page);
            self.table.insert(key, node.0);
            made.push(node);
            parent = ParentId::Node(node);
        }
        let made = &made[first..];
        self.resident[0] += pages[..made.len()].iter().filter(|&&page| page != PageId::NULL).count();
        let blocks = made.iter().map(|node| node.0 as usize).zip(tokens.chunks_exact(self.page_size));
        self.tokens.write(blocks);
        // The others are only children of those before them.
        if let Some(&node) = made.first()
            && self.has_siblings(node)
            && self.is_found_by_tokens(node)
        {
            self.enter_forks(node);
        }
    }

    /// Keeps `node` in the tree, with or without a page, until [`PrefixTree::release_anchor`].
    pub fn anchor(&mut self, node: NodeId) {
        debug_assert!(!self.is_tail(node), "a tail stays as long as its pages");
        *self.anchors.entry(node).or_default() += 1;
    }

    /// Gives up one [`PrefixTree::anchor`].
    ///
    /// # Panics
    /// If nothing anchors the node.
    pub fn release_anchor(&mut self, node: NodeId) {
        let anchors = self.anchors.get_mut(&node).expect("the node is anchored");
        *anchors -= 1;
        if *anchors == 0 {
            self.anchors.remove(&node);
        }
        self.prune(node);
    }

    /// The node's hash is read soon.
    #[inline]
    pub fn prefetch(&self, node: NodeId) {
        memory::prefetch(&self.nodes[0], node.0 as usize);
    }

    /// The node's page is cleared soon.
    #[inline]
    pub fn prefetch_key(&self, node: NodeId) {
        self.table.prefetch(self.node(node).key);
    }

    /// What the node's block follows.
    pub fn parent(&self, node: NodeId) -> ParentId {
        self.node(node).parent.unpack()
    }

    /// The node's token ids, overrides applied.
    #[inline]
    pub fn tokens(&self, node: NodeId) -> &[Token] {
        tokens_of(&self.nodes, &self.tokens, node)
    }

    /// Every node, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        let live = self.nodes.iter().enumerate().filter(|(_, node)| !node.is_free());
        live.map(|(index, _)| NodeId(index as u32))
    }

    /// Feeds every node, the order of siblings and the order in which free numbers are used again to
    /// `hasher`.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        for node in self.iter() {
            let record = self.node(node);
            (node, record.parent, record.page, record.first_child, record.next).hash(hasher);
            (self.further_slots(node), self.anchors.get(&node), self.tokens(node)).hash(hasher);
            self.extra_keys(node).hash(hasher);
        }
        self.list(PackedParent::FREE).for_each(|node| node.hash(hasher));
    }

    #[inline]
    pub(crate) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }

    pub(crate) fn is_in_table(&self, node: NodeId) -> bool {
        let key = self.nodes[node.0 as usize].key;
        self.table.find(key, |index| index == node.0).is_some()
    }

    /// A new record below `parent`, beside it if that place is free: then what follows is found there.
    fn place(&mut self, parent: ParentId) -> NodeId {
        let beside = match parent {
            ParentId::Node(above) => above.0 + 1,
            ParentId::Root(_) => NONE,
        };
        let node = match self.nodes.get(beside as usize) {
            Some(record) if record.is_free() => beside,
            _ => self.first_free,
        };
        self.place_at(node, parent)
    }

    /// The free record, or a new one for none, below `parent`.
    #[inline]
    pub(crate) fn place_at(&mut self, node: u32, parent: ParentId) -> NodeId {
        debug_assert!(
            !matches!(parent, ParentId::Node(above) if self.is_tail(above)),
            "nothing follows a tail"
        );
        let node = if node == NONE {
            self.nodes.push(Node::UNUSED);
            self.tokens.push();
            if self.groups > 1 {
                self.slots.extend_by(usize::from(self.groups) - 1, PageId::NULL);
            }
            NodeId(self.nodes.len() as u32 - 1)
        } else {
            self.unlink(NodeId(node));
            NodeId(node)
        };
        self.link(node, PackedParent::pack(parent));
        let sibling = NodeId(self.node(node).next);
        if sibling.0 != NONE && self.node(sibling).next == NONE && self.is_found_by_tokens(sibling) {
            self.enter_forks(sibling);
        }
        node
    }

    /// Drops the node if it holds nothing and leads nowhere, and then those before it that do neither.
    pub(crate) fn prune(&mut self, mut node: NodeId) {
        loop {
            let record = *self.node(node);
            let holds = record.page != PageId::NULL || self.has_further_page(node);
            if holds || record.first_child != NONE || self.anchors.contains_key(&node) {
                return;
            }
            if record.extra.is_tail() {
                self.tails -= 1;
            } else {
                self.table.remove(record.key, node.0);
            }
            self.dropped += 1;
            self.extras.release(record.extra.id());
            self.unlink(node);
            if (record.next != NONE || record.previous != NONE) && self.found_by.is_some() {
                self.leave_alone([record.next, record.previous].map(NodeId));
            }
            self.link(node, PackedParent::FREE);
            match record.parent.unpack() {
                ParentId::Root(_) => return,
                ParentId::Node(parent) => node = parent,
            }
        }
    }
}
