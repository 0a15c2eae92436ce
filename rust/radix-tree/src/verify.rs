//! The tree's books, checked.

use crate::extra_keys::ExtraId;
use crate::namespaces::NamespaceId;
use crate::node::{NONE, NodeId, PackedParent, ParentId};
use crate::partial::Partial;
use crate::tree::PrefixTree;
use block_pool::GroupId;
use std::collections::HashMap;
use thiserror::Error;

#[cfg(test)]
mod tests;

/// The first node that breaks the tree's books.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("node {}: {what}", node.0)]
pub struct TreeFault {
    /// The node.
    pub node: NodeId,
    /// What is wrong with it.
    pub what: String,
}

/// Named by faults that are no single node's.
const NO_NODE: NodeId = NodeId(u32::MAX);

fn fault<T>(node: NodeId, what: impl Into<String>) -> Result<T, TreeFault> {
    Err(TreeFault { node, what: what.into() })
}

impl PrefixTree {
    /// Checks that parents, lists of children, anchors, the table, what tokens lead to and the interned keys agree. `anchors`
    /// gives the number of anchors that sequences hold on a node, `holders` the number of sequences that
    /// hold a namespace.
    ///
    /// # Errors
    /// The first node that breaks the books.
    pub fn verify(
        &self,
        anchors: &HashMap<NodeId, u32>,
        holders: &HashMap<NamespaceId, u32>,
    ) -> Result<(), TreeFault> {
        self.verify_nodes(anchors)?;
        self.verify_lists()?;
        self.verify_forks()?;
        self.verify_namespaces(holders)?;
        self.verify_extra_keys()?;
        for group in (0..self.groups).map(GroupId) {
            let resident = self.iter().filter(|&node| self.page(node, group).is_some()).count();
            let counted = self.resident(group);
            if counted != resident {
                return fault(
                    NO_NODE,
                    format!("{resident} nodes have a page of {group:?}, {counted} are counted"),
                );
            }
        }
        let count = self.iter().count();
        if self.len() != count {
            let (blocks, tails) = (self.table.len(), self.tails);
            return fault(
                NO_NODE,
                format!("{blocks} blocks and {tails} tails are counted, not {count} nodes"),
            );
        }
        Ok(())
    }

    fn verify_nodes(&self, anchors: &HashMap<NodeId, u32>) -> Result<(), TreeFault> {
        for node in self.iter() {
            if self.is_tail(node) {
                self.verify_tail(node)?;
            } else if !self.is_in_table(node) {
                return fault(node, "the table does not lead to it");
            }
            if !self.has_page(node) && self.is_leaf(node) && !self.anchors.contains_key(&node) {
                return fault(node, "has neither pages nor children nor anchors");
            }
        }
        for &node in self.anchors.keys().chain(anchors.keys()) {
            let [counted, held] = [&self.anchors, anchors].map(|map| map.get(&node).copied().unwrap_or(0));
            if counted != held {
                return fault(node, format!("counts {counted} anchors, sequences hold {held}"));
            }
            if counted > 0 && !self.is_in_table(node) {
                return fault(node, "is anchored and not in the table");
            }
        }
        Ok(())
    }

    fn verify_tail(&self, node: NodeId) -> Result<(), TreeFault> {
        let len = self.node(node).tail_len().unwrap_or_default();
        if !(1..self.page_size).contains(&len) {
            return fault(node, format!("is a tail of {len} tokens"));
        }
        if !self.is_leaf(node) {
            return fault(node, "is a tail and has children");
        }
        if !self.is_found_by_tokens(node) {
            return fault(node, "is a tail without a page of the first group");
        }
        Ok(())
    }

    /// Tokens lead to nodes with siblings and a page of the first group, and to no others.
    fn verify_forks(&self) -> Result<(), TreeFault> {
        let mut held = 0;
        for node in self.iter().filter(|&node| self.has_siblings(node) && self.is_found_by_tokens(node)) {
            held += 1;
            let nearest =
                self.longest_partial(self.parent(node), self.tokens(node), self.extra_keys(node), |_| true);
            if nearest != Some(Partial { node, run: self.tokens(node).len() }) {
                return fault(node, "is not what its tokens lead to");
            }
        }
        let found = self.forks.iter().count();
        if found != held {
            return fault(NO_NODE, format!("tokens lead to {found} nodes, and should to {held}"));
        }
        Ok(())
    }

    /// Every record is in its parent's list, once, and its links fit.
    fn verify_lists(&self) -> Result<(), TreeFault> {
        let roots = self.namespaces.live().map(|(namespace, _)| ParentId::Root(namespace));
        let parents = self.iter().map(ParentId::Node).chain(roots).map(PackedParent::pack);
        let mut listed = vec![false; self.nodes.len()];
        for parent in parents.chain([PackedParent::FREE]) {
            let (mut before, mut next) = (NONE, self.head(parent));
            while next != NONE {
                let node = NodeId(next);
                let Some(record) = self.nodes.get(next as usize) else {
                    return fault(node, "is linked and does not exist");
                };
                if record.parent != parent {
                    return fault(node, "is listed below a parent that is not its own");
                }
                if record.previous != before {
                    return fault(node, "links back to another sibling than the one before it");
                }
                listed[next as usize] = true; // and never again: it links back to one node only
                (before, next) = (next, record.next);
            }
        }
        match listed.iter().position(|listed| !listed) {
            Some(index) => fault(NodeId(index as u32), "is not listed below its parent"),
            None => Ok(()),
        }
    }

    fn verify_namespaces(&self, holders: &HashMap<NamespaceId, u32>) -> Result<(), TreeFault> {
        let mut namespaces = 0;
        for (namespace, counted) in self.namespaces.live() {
            let held = holders.get(&namespace).copied().unwrap_or(0);
            if counted != held {
                return fault(NO_NODE, format!("{namespace:?} counts {counted} holders, {held} hold it"));
            }
            if held == 0 && self.namespaces.first_child(namespace) == NONE {
                return fault(NO_NODE, format!("{namespace:?} is kept for nobody"));
            }
            namespaces += usize::from(held > 0);
        }
        if namespaces != holders.len() {
            let held = holders.len();
            return fault(NO_NODE, format!("{held} namespaces are held, the tree knows {namespaces}"));
        }
        Ok(())
    }

    fn verify_extra_keys(&self) -> Result<(), TreeFault> {
        let mut uses: HashMap<ExtraId, u32> = HashMap::new();
        for node in self.iter() {
            *uses.entry(self.node(node).extra.id()).or_default() += 1;
        }
        for extra in self.extras.live() {
            let (uses, counted) = (uses.get(&extra).copied().unwrap_or(0), self.extras.uses(extra));
            if counted != uses {
                return fault(NO_NODE, format!("{extra:?} is used by {uses} nodes, not {counted}"));
            }
        }
        Ok(())
    }
}
