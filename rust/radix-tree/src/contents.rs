//! What the tree holds, for those who tell others of it.

use crate::namespaces::{NamespaceId, NamespaceKey};
use crate::node::{NONE, NodeId, ParentId};
use crate::tree::PrefixTree;

impl PrefixTree {
    /// The chained hash of the node's block; `None` for a tail.
    #[inline]
    pub fn key(&self, node: NodeId) -> Option<u64> {
        let record = self.node(node);
        (!record.extra.is_tail()).then_some(record.key)
    }

    /// The node whose block has chained hash `key`, whatever its tokens are.
    #[inline]
    pub fn owner_of(&self, key: u64) -> Option<NodeId> {
        self.table.find(key, |node| self.nodes[node as usize].key == key).map(NodeId)
    }

    /// The extra keys of the node's block; most have none.
    pub fn extra_keys(&self, node: NodeId) -> &[u8] {
        self.extras.bytes(self.node(node).extra.id())
    }

    /// The hash of the block before; `None` for the first of a prefix.
    pub fn parent_key(&self, node: NodeId) -> Option<u64> {
        match self.parent(node) {
            ParentId::Node(parent) => self.key(parent),
            ParentId::Root(_) => None,
        }
    }

    /// Salt and adapter of `namespace`, which is in use.
    pub fn namespace_key(&self, namespace: NamespaceId) -> &NamespaceKey {
        self.namespaces.key(namespace)
    }

    /// The namespaces that have blocks.
    pub fn namespaces(&self) -> impl Iterator<Item = NamespaceId> + '_ {
        let live = self.namespaces.live().map(|(namespace, _)| namespace);
        live.filter(|&namespace| self.namespaces.first_child(namespace) != NONE)
    }
}
