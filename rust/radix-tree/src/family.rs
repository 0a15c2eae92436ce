//! Children and siblings. The nodes below one parent are a linked list, the one inserted last in front, so
//! that a subtree is listed at the cost of what is in it. Free records are the list of a parent of their own.

use crate::node::{NONE, NodeId, PackedParent, ParentId};
use crate::tree::PrefixTree;

impl PrefixTree {
    /// The nodes below `parent`, the one inserted last first.
    pub fn children(&self, parent: ParentId) -> impl Iterator<Item = NodeId> + '_ {
        self.list(PackedParent::pack(parent))
    }

    /// Whether no block follows the node's.
    #[inline]
    pub fn is_leaf(&self, node: NodeId) -> bool {
        self.node(node).first_child == NONE
    }

    /// Whether another block follows the same block as the node's does.
    #[inline]
    pub fn has_siblings(&self, node: NodeId) -> bool {
        let record = self.node(node);
        record.next != NONE || record.previous != NONE
    }

    /// Every node below `parent`, children before their parents.
    pub fn descendants(&self, parent: ParentId) -> impl Iterator<Item = NodeId> + '_ {
        let top = PackedParent::pack(parent);
        let mut next = self.first_leaf(self.head(top));
        std::iter::from_fn(move || {
            let node = NodeId((next != NONE).then_some(next)?);
            let record = self.node(node);
            next = match record.parent.unpack() {
                _ if record.next != NONE => self.first_leaf(record.next),
                ParentId::Node(above) if record.parent != top => above.0,
                _ => NONE,
            };
            Some(node)
        })
    }

    /// The node in front of a parent's list.
    pub(crate) fn head(&self, parent: PackedParent) -> u32 {
        if parent == PackedParent::FREE {
            return self.first_free;
        }
        match parent.unpack() {
            ParentId::Root(namespace) => self.namespaces.first_child(namespace),
            ParentId::Node(node) => self.node(node).first_child,
        }
    }

    pub(crate) fn list(&self, parent: PackedParent) -> impl Iterator<Item = NodeId> + '_ {
        let mut next = self.head(parent);
        std::iter::from_fn(move || {
            let node = NodeId((next != NONE).then_some(next)?);
            next = self.node(node).next;
            Some(node)
        })
    }

    /// Puts a node that is in no list in front of `parent`'s.
    pub(crate) fn link(&mut self, node: NodeId, parent: PackedParent) {
        let next = self.head(parent);
        if let Some(next) = self.nodes.get_mut(next as usize) {
            next.previous = node.0;
        }
        let record = &mut self.nodes[node.0 as usize];
        (record.parent, record.next, record.previous) = (parent, next, NONE);
        self.set_head(parent, node.0);
    }

    /// Takes a node out of its parent's list.
    pub(crate) fn unlink(&mut self, node: NodeId) {
        let record = *self.node(node);
        if let Some(next) = self.nodes.get_mut(record.next as usize) {
            next.previous = record.previous;
        }
        match self.nodes.get_mut(record.previous as usize) {
            Some(previous) => previous.next = record.next,
            None => self.set_head(record.parent, record.next),
        }
    }

    fn set_head(&mut self, parent: PackedParent, head: u32) {
        if parent == PackedParent::FREE {
            self.first_free = head;
            return;
        }
        match parent.unpack() {
            ParentId::Root(namespace) => self.namespaces.set_first_child(namespace, head),
            ParentId::Node(node) => self.nodes[node.0 as usize].first_child = head,
        }
    }

    /// Where first children lead from `node`.
    fn first_leaf(&self, mut node: u32) -> u32 {
        while node != NONE {
            match self.nodes[node as usize].first_child {
                NONE => break,
                child => node = child,
            }
        }
        node
    }
}
