//! Nodes, look-up, insertion and pruning.

use crate::extra_keys::{ExtraId, ExtraKeyStore};
use crate::namespaces::{NamespaceId, NamespaceKey, Namespaces};
use crate::table::NodeTable;
use block_hash::Token;
use block_pool::PageId;
use std::hash::{Hash, Hasher};

/// A node of the tree: one block of one prefix.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

/// What a block follows: the root of its namespace, or another block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ParentId {
    /// The block is the first of its prefix.
    Root(NamespaceId),
    /// The block before it.
    Node(NodeId),
}

/// [`ParentId`] in four bytes: roots have the upper bit.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PackedParent(u32);

impl PackedParent {
    const ROOT: u32 = 1 << 31;

    #[inline]
    fn pack(parent: ParentId) -> PackedParent {
        match parent {
            ParentId::Root(namespace) => PackedParent(namespace.0 | Self::ROOT),
            ParentId::Node(node) => PackedParent(node.0),
        }
    }

    #[inline]
    fn unpack(self) -> ParentId {
        if self.0 & Self::ROOT == 0 {
            ParentId::Node(NodeId(self.0))
        } else {
            ParentId::Root(NamespaceId(self.0 & !Self::ROOT))
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Node {
    pub(crate) key: u64,
    parent: PackedParent,
    /// Child nodes, and anchors of sequences that need the node to stay.
    pub(crate) children: u32,
    /// The device slot; the null page stands for "no page".
    page: PageId,
    pub(crate) extra: ExtraId,
}

impl Node {
    pub(crate) fn parent(&self) -> ParentId {
        self.parent.unpack()
    }

    fn is_free(&self) -> bool {
        self.children == u32::MAX
    }
}

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
    page_size: usize,
    pub(crate) nodes: Vec<Node>,
    /// `page_size` tokens a node, under the node's index.
    tokens: Vec<Token>,
    free: Vec<NodeId>,
    /// Nodes with a page.
    pub(crate) resident: usize,
    table: NodeTable,
    pub(crate) extras: ExtraKeyStore,
    pub(crate) namespaces: Namespaces,
}

impl PrefixTree {
    /// An empty tree for blocks of `page_size` tokens, sized for about `capacity` blocks.
    pub fn new(page_size: usize, capacity: usize) -> PrefixTree {
        PrefixTree {
            page_size,
            nodes: Vec::new(),
            tokens: Vec::new(),
            free: Vec::new(),
            resident: 0,
            table: NodeTable::with_capacity(capacity),
            extras: ExtraKeyStore::default(),
            namespaces: Namespaces::default(),
        }
    }

    /// Drops every node and namespace at once. The cost does not grow with the number of blocks, other
    /// than what giving memory back to the allocator costs.
    pub fn clear(&mut self) {
        *self = PrefixTree::new(self.page_size, self.table.capacity());
    }

    /// Nodes in the tree.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Blocks on the device: nodes that have a page.
    pub fn resident(&self) -> usize {
        self.resident
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

    /// The node of the block with chained hash `key`, these `tokens` and `extra` keys, below `parent`.
    /// `Err` tells that another block has the same hash.
    ///
    /// # Errors
    /// [`DigestCollision`] when the hash belongs to another block.
    #[inline]
    pub fn find(
        &self,
        parent: ParentId,
        key: u64,
        tokens: &[Token],
        extra: &[u8],
    ) -> Result<Option<NodeId>, DigestCollision> {
        match self.by_key(key) {
            Some(node) if self.is_block(node, parent, tokens, extra) => Ok(Some(node)),
            Some(_) => Err(DigestCollision),
            None => Ok(None),
        }
    }

    /// The node whose block has chained hash `key`, whatever its tokens are: to be compared with
    /// [`PrefixTree::is_block`]. Asking for many keys first and comparing afterwards lets their memory
    /// accesses overlap.
    #[inline]
    pub fn by_key(&self, key: u64) -> Option<NodeId> {
        self.table.find(key, |index| self.nodes[index as usize].key == key).map(NodeId)
    }

    /// Whether `node` is the block of these tokens and extra keys below `parent`.
    #[inline]
    pub fn is_block(&self, node: NodeId, parent: ParentId, tokens: &[Token], extra: &[u8]) -> bool {
        let record = &self.nodes[node.0 as usize];
        record.parent == PackedParent::pack(parent)
            && self.tokens(node) == tokens
            && self.extras.equals(record.extra, extra)
    }

    /// The node of that block, made if it is not there.
    pub fn insert(&mut self, parent: ParentId, key: u64, tokens: &[Token], extra: &[u8]) -> Insertion {
        debug_assert_eq!(tokens.len(), self.page_size, "a node is one whole block");
        match self.find(parent, key, tokens, extra) {
            Ok(Some(node)) => return Insertion::Existing(node),
            Err(DigestCollision) => return Insertion::Collision,
            Ok(None) => {}
        }
        let node = Node {
            key,
            parent: PackedParent::pack(parent),
            children: 0,
            page: PageId::NULL,
            extra: self.extras.acquire(extra),
        };
        let id = if let Some(id) = self.free.pop() {
            self.nodes[id.0 as usize] = node;
            let start = id.0 as usize * self.page_size;
            self.tokens[start..start + self.page_size].copy_from_slice(tokens);
            id
        } else {
            self.nodes.push(node);
            self.tokens.extend_from_slice(tokens);
            NodeId(self.nodes.len() as u32 - 1)
        };
        match parent {
            ParentId::Root(namespace) => self.namespaces.add_child(namespace),
            ParentId::Node(parent) => self.nodes[parent.0 as usize].children += 1,
        }
        self.table.insert(key, id.0);
        Insertion::New(id)
    }

    /// The page that holds the node's block on the device.
    #[inline]
    pub fn page(&self, node: NodeId) -> Option<PageId> {
        let page = self.nodes[node.0 as usize].page;
        (page != PageId::NULL).then_some(page)
    }

    /// `page` holds the node's block from now on.
    pub fn set_page(&mut self, node: NodeId, page: PageId) {
        debug_assert!(self.page(node).is_none(), "the node has a page already");
        self.nodes[node.0 as usize].page = page;
        self.resident += 1;
    }

    /// The node's block is no longer on the device. Its descendants stay; nodes that hold nothing and
    /// lead nowhere go.
    pub fn clear_page(&mut self, node: NodeId) {
        debug_assert!(self.page(node).is_some(), "the node has no page");
        self.nodes[node.0 as usize].page = PageId::NULL;
        self.resident -= 1;
        self.prune(node);
    }

    /// Keeps `node` in the tree, with or without a page, until [`PrefixTree::release_anchor`].
    pub fn anchor(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].children += 1;
    }

    /// Gives up one [`PrefixTree::anchor`].
    pub fn release_anchor(&mut self, node: NodeId) {
        self.nodes[node.0 as usize].children -= 1;
        self.prune(node);
    }

    /// What the node's block follows.
    pub fn parent(&self, node: NodeId) -> ParentId {
        self.nodes[node.0 as usize].parent()
    }

    /// The node's token ids, overrides applied.
    #[inline]
    pub fn tokens(&self, node: NodeId) -> &[Token] {
        let start = node.0 as usize * self.page_size;
        &self.tokens[start..start + self.page_size]
    }

    /// Every node, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        let live = self.nodes.iter().enumerate().filter(|(_, node)| !node.is_free());
        live.map(|(index, _)| NodeId(index as u32))
    }

    /// Feeds every node and the order in which free numbers are used again to `hasher`.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        for node in self.iter() {
            (node, self.parent(node), self.page(node), self.node(node).children, self.tokens(node))
                .hash(hasher);
        }
        self.free.hash(hasher);
    }

    pub(crate) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }

    pub(crate) fn is_in_table(&self, node: NodeId) -> bool {
        let key = self.nodes[node.0 as usize].key;
        self.table.find(key, |index| index == node.0).is_some()
    }

    fn prune(&mut self, mut node: NodeId) {
        loop {
            let record = self.nodes[node.0 as usize];
            if record.page != PageId::NULL || record.children > 0 {
                return;
            }
            self.table.remove(record.key, node.0);
            self.extras.release(record.extra);
            self.nodes[node.0 as usize].children = u32::MAX;
            self.free.push(node);
            match record.parent() {
                ParentId::Root(namespace) => return self.namespaces.remove_child(namespace),
                ParentId::Node(parent) => {
                    self.nodes[parent.0 as usize].children -= 1;
                    node = parent;
                }
            }
        }
    }
}

/// Two different blocks have one hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DigestCollision;
