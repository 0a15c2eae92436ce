//! The tree's books, checked.

use crate::namespaces::NamespaceId;
use crate::tree::{NodeId, ParentId, PrefixTree};
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

impl PrefixTree {
    /// Checks that parents, child counts, the table and the interned keys agree. `anchors` gives the
    /// number of anchors that sequences hold on a node, `holders` the number of sequences that hold a
    /// namespace.
    ///
    /// # Errors
    /// The first node that breaks the books.
    pub fn verify(
        &self,
        anchors: &HashMap<NodeId, u32>,
        holders: &HashMap<NamespaceId, u32>,
    ) -> Result<(), TreeFault> {
        let fault = |node, what: String| Err(TreeFault { node, what });
        let mut children: HashMap<ParentId, u32> = HashMap::new();
        let mut extra_uses = HashMap::new();
        let mut count = 0;
        for node in self.iter() {
            count += 1;
            *children.entry(self.parent(node)).or_default() += 1;
            *extra_uses.entry(self.node(node).extra).or_insert(0) += 1;
            if !self.is_in_table(node) {
                return fault(node, "the table does not lead to it".into());
            }
        }
        for node in self.iter() {
            let record = self.node(node);
            let below = children.get(&ParentId::Node(node)).copied().unwrap_or(0);
            let held = anchors.get(&node).copied().unwrap_or(0);
            if record.children != below + held {
                let what = format!("counts {} children, has {below} and {held} anchors", record.children);
                return fault(node, what);
            }
            if self.page(node).is_none() && record.children == 0 {
                return fault(node, "has neither a page nor children".into());
            }
        }
        for parent in children.keys() {
            if let ParentId::Node(parent) = *parent
                && !self.is_in_table(parent)
            {
                return fault(parent, "has children and is not in the table".into());
            }
        }
        let root = NodeId(u32::MAX);
        let mut namespaces = 0;
        for (namespace, counted_holders, counted) in self.namespaces.live() {
            let below = children.get(&ParentId::Root(namespace)).copied().unwrap_or(0);
            if counted != below {
                return fault(root, format!("{namespace:?} counts {counted} first blocks, has {below}"));
            }
            let held = holders.get(&namespace).copied().unwrap_or(0);
            if counted_holders != held {
                let what = format!("{namespace:?} counts {counted_holders} holders, {held} hold it");
                return fault(root, what);
            }
            if held == 0 && below == 0 {
                return fault(root, format!("{namespace:?} is kept for nobody"));
            }
            namespaces += usize::from(held > 0);
        }
        if namespaces != holders.len() {
            return fault(
                root,
                format!("{} namespaces are held, the tree knows {namespaces}", holders.len()),
            );
        }
        for extra in self.extras.live() {
            let uses = extra_uses.get(&extra).copied().unwrap_or(0);
            if self.extras.uses(extra) != uses {
                return fault(
                    root,
                    format!("{extra:?} is used by {uses} nodes, not {}", self.extras.uses(extra)),
                );
            }
        }
        let resident = self.iter().filter(|&node| self.page(node).is_some()).count();
        if self.resident() != resident {
            return fault(root, format!("{resident} nodes have a page, {} are counted", self.resident()));
        }
        if self.len() != count {
            return fault(root, format!("the table holds {} nodes, the tree {count}", self.len()));
        }
        Ok(())
    }
}
