//! The prefix tree: which block of which prefix lies on which device page.
//!
//! A node is one block of one prefix. It is identified by its parent, its token ids and its extra keys;
//! the chained hash only finds it. So a digest collision is a counted miss, never a wrong hit.
//! One table leads from the chained hash to the node: a look-up costs at most one probe a block, however
//! many siblings there are, and changes nothing.
//!
//! Blocks that go on as a prompt does for a while only, and tails, which end before a page does and have no
//! hash, are found by their tokens, at a cost that does not follow the number of siblings either.
//!
//! The tree owns device residency: a node has a slot for each group of layers, which says which page holds
//! the block, or none. A node without pages and without children does not exist.
#![forbid(unsafe_code)]

mod branches;
mod contents;
mod extra_keys;
mod family;
mod forks;
mod lookup;
mod namespaces;
mod node;
mod partial;
mod slots;
mod tree;
mod verify;

pub use lookup::{DigestCollision, Hits};
pub use namespaces::{AdapterId, NamespaceId, NamespaceKey};
pub use node::{NodeId, ParentId};
pub use partial::Partial;
pub use tree::{Insertion, PrefixTree};
pub use verify::TreeFault;
