//! Slots: which page of which group holds a node's block.
//!
//! The slot of the first group is in the node's record, where look-up reads it; those of further groups are
//! an array beside, so that a tree of one group has none.

use crate::node::NodeId;
use crate::tree::PrefixTree;
use block_pool::{GroupId, PageId};

impl PrefixTree {
    /// Groups that have a slot in each node.
    pub fn groups(&self) -> u8 {
        self.groups
    }

    /// Blocks of `group` on the device: nodes that have a page of it.
    pub fn resident(&self, group: GroupId) -> usize {
        self.resident[usize::from(group.0)]
    }

    /// The page of `group` that holds the node's block on the device.
    #[inline]
    pub fn page(&self, node: NodeId, group: GroupId) -> Option<PageId> {
        let page = match group {
            GroupId::FIRST => self.node(node).page,
            _ => self.slots[self.slot(node, group)],
        };
        (page != PageId::NULL).then_some(page)
    }

    /// `page` of `group` holds the node's block from now on.
    #[inline]
    pub fn set_page(&mut self, node: NodeId, group: GroupId, page: PageId) {
        debug_assert!(self.page(node, group).is_none(), "the node has a page already");
        *self.slot_mut(node, group) = page;
        self.resident[usize::from(group.0)] += 1;
        if Some(group) == self.found_by && self.has_siblings(node) {
            self.enter_forks(node);
        }
    }

    /// Pages of a further group for nodes that have none of it, in the same order; the null page is none.
    /// What [`PrefixTree::extend`] made gets those of all groups so.
    pub fn set_pages(&mut self, nodes: &[NodeId], group: GroupId, pages: &[PageId]) {
        debug_assert_eq!(nodes.len(), pages.len(), "a page for each node");
        for (&node, &page) in nodes.iter().zip(pages).filter(|&(_, &page)| page != PageId::NULL) {
            self.set_page(node, group, page);
        }
    }

    /// The node's block is no longer on the device in `group`. Its descendants stay; nodes that hold nothing
    /// and lead nowhere go.
    #[expect(clippy::inline_always, reason = "each eviction makes this call")]
    #[inline(always)]
    pub fn clear_page(&mut self, node: NodeId, group: GroupId) {
        debug_assert!(self.page(node, group).is_some(), "the node has no page");
        *self.slot_mut(node, group) = PageId::NULL;
        self.resident[usize::from(group.0)] -= 1;
        if Some(group) == self.found_by && self.has_siblings(node) {
            self.leave_forks(node);
        }
        self.prune(node);
    }

    /// The node's slots of further groups.
    #[inline]
    pub(crate) fn further_slots(&self, node: NodeId) -> &[PageId] {
        let further = usize::from(self.groups) - 1;
        &self.slots[node.0 as usize * further..][..further]
    }

    /// Whether the node has a page of any group.
    pub(crate) fn has_page(&self, node: NodeId) -> bool {
        self.node(node).page != PageId::NULL || self.has_further_page(node)
    }

    /// Whether the node has a page of any group but the first.
    #[inline]
    pub(crate) fn has_further_page(&self, node: NodeId) -> bool {
        self.groups > 1 && self.further_slots(node).iter().any(|&page| page != PageId::NULL)
    }

    #[inline]
    fn slot_mut(&mut self, node: NodeId, group: GroupId) -> &mut PageId {
        if group == GroupId::FIRST {
            return &mut self.nodes[node.0 as usize].page;
        }
        let slot = self.slot(node, group);
        &mut self.slots[slot]
    }

    #[inline]
    fn slot(&self, node: NodeId, group: GroupId) -> usize {
        debug_assert!(group.0 < self.groups, "there is no {group:?}");
        node.0 as usize * (usize::from(self.groups) - 1) + usize::from(group.0) - 1
    }
}
