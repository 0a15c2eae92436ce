//! The prefix tree: which block of which prefix lies on which device page.
//!
//! A node is one block of one prefix. It is identified by its parent, its token ids and its extra keys;
//! the chained hash only finds it. So a digest collision is a counted miss, never a wrong hit.
//! One table leads from the chained hash to the node: a look-up costs at most one probe a block, however
//! many siblings there are, and changes nothing.
//!
//! The tree owns device residency: a node has a slot for each group of layers, which says which page holds
//! the block, or none. A node without pages and without children does not exist.
#![forbid(unsafe_code)]

mod contents;
mod extra_keys;
mod family;
mod lookup;
mod namespaces;
mod node;
mod slots;
mod tree;
mod verify;

pub use lookup::{DigestCollision, Hits};
pub use namespaces::{AdapterId, NamespaceId, NamespaceKey};
pub use node::{NodeId, ParentId};
pub use tree::{Insertion, PrefixTree};
pub use verify::TreeFault;
