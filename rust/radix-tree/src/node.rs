//! The record of a node: what a look-up compares, and the links of the tree.

use crate::extra_keys::ExtraId;
use crate::namespaces::NamespaceId;
use block_pool::PageId;

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

/// The end of a list of nodes.
pub(crate) const NONE: u32 = u32::MAX;

/// [`ParentId`] in four bytes: roots have the upper bit.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PackedParent(u32);

impl PackedParent {
    const ROOT: u32 = 1 << 31;
    /// What all free records follow.
    pub(crate) const FREE: PackedParent = PackedParent(u32::MAX);

    #[inline]
    pub(crate) fn pack(parent: ParentId) -> PackedParent {
        match parent {
            ParentId::Root(namespace) => PackedParent(namespace.0 | Self::ROOT),
            ParentId::Node(node) => PackedParent(node.0),
        }
    }

    #[inline]
    pub(crate) fn unpack(self) -> ParentId {
        if self.0 & Self::ROOT == 0 {
            ParentId::Node(NodeId(self.0))
        } else {
            ParentId::Root(NamespaceId(self.0 & !Self::ROOT))
        }
    }
}

/// An [`ExtraId`], and whether the node is a tail, in four bytes: tails have the upper bit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct PackedExtra(u32);

impl PackedExtra {
    const TAIL: u32 = 1 << 31;
    /// No extra keys, and a block.
    pub(crate) const NONE: PackedExtra = PackedExtra(0);

    #[inline]
    pub(crate) fn of_block(extra: ExtraId) -> PackedExtra {
        PackedExtra(extra.0)
    }

    pub(crate) fn of_tail(extra: ExtraId) -> PackedExtra {
        PackedExtra(extra.0 | Self::TAIL)
    }

    #[inline]
    pub(crate) fn id(self) -> ExtraId {
        ExtraId(self.0 & !Self::TAIL)
    }

    #[inline]
    pub(crate) fn is_tail(self) -> bool {
        self.0 & Self::TAIL != 0
    }
}

/// Two records share a cache line, and none lies in two.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Node {
    /// The chained hash; of a tail, which has none, how many tokens it has.
    pub(crate) key: u64,
    pub(crate) parent: PackedParent,
    /// The slot of the first group; the null page stands for "no page".
    pub(crate) page: PageId,
    pub(crate) extra: PackedExtra,
    /// The child inserted last.
    pub(crate) first_child: u32,
    /// The sibling inserted before this node.
    pub(crate) next: u32,
    /// The sibling inserted after this node.
    pub(crate) previous: u32,
}

const _: () = assert!(size_of::<Node>() == 32);

impl Node {
    /// A record before its block is known.
    pub(crate) const UNUSED: Node = Node {
        key: 0,
        parent: PackedParent::FREE,
        page: PageId::NULL,
        extra: PackedExtra::NONE,
        first_child: NONE,
        next: NONE,
        previous: NONE,
    };

    pub(crate) fn is_free(&self) -> bool {
        self.parent == PackedParent::FREE
    }

    /// How many tokens the tail has; `None` for a block.
    #[inline]
    pub(crate) fn tail_len(&self) -> Option<usize> {
        self.extra.is_tail().then_some(self.key as usize)
    }
}
