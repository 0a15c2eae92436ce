//! Blocks that begin as a prompt goes on, and tails: blocks that end before the page does.
//!
//! Both are found by tokens, where they have a page of one group ([`PrefixTree::found_by`]). Such children, of a parent that has several, are in
//! [`Forks`](crate::forks::Forks); an only child, as all but a few nodes are, is compared itself.

use crate::forks::{Siblings, common};
use crate::node::{NONE, Node, NodeId, PackedExtra, PackedParent, ParentId};
use crate::tree::PrefixTree;
use block_hash::Token;
use block_pool::{GroupId, PageId};
use memory::{Array, Rows};

/// A block that begins with the tokens looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Partial {
    /// The block, or tail.
    pub node: NodeId,
    /// How many tokens are equal from its start on, at least 1.
    pub run: usize,
}

/// Children with pages and equal extra keys.
enum Family {
    One(NodeId),
    Many(Siblings),
}

impl PrefixTree {
    /// Blocks that one [`PrefixTree::longest_partial`] offers to its caller at most.
    pub const MAX_OFFERS: usize = 32;

    /// The block or tail below `parent`, with a page and equal `extra` keys, that has the
    /// most of the next `tokens` from its start on, and is `usable`. Of equally good ones, the first in the
    /// order of their tokens; a tail is before what goes on from it.
    ///
    /// Blocks are offered in that order, [`PrefixTree::MAX_OFFERS`] at most: if none of these is usable, the
    /// answer is `None`, though one with a shorter or as long a run may be.
    pub fn longest_partial(
        &self,
        parent: ParentId,
        tokens: &[Token],
        extra: &[u8],
        usable: impl Fn(NodeId) -> bool,
    ) -> Option<Partial> {
        let offer = |(node, run)| (run > 0 && usable(node)).then_some(Partial { node, run });
        match self.family(parent, extra)? {
            Family::One(node) => offer((node, common(self.tokens(node), tokens))),
            Family::Many(siblings) => {
                let nearest = self.forks.nearest(siblings, tokens, |node| self.tokens(node));
                nearest.take_while(|&(_, run)| run > 0).take(Self::MAX_OFFERS).find_map(offer)
            }
        }
    }

    /// Stores a tail: fewer tokens than a block below `parent`, with `extra` keys, on a page of each group in
    /// `pages`, not null for the one that it is found by. `None` if a block or tail with a page begins with all of the tokens.
    ///
    /// A tail has no key, so that [`PrefixTree::find`] never gives it, and no children. It stays as long as
    /// its pages. [`PrefixTree::contained_tail`] says which one it replaces.
    pub fn insert_tail(
        &mut self,
        parent: ParentId,
        tokens: &[Token],
        extra: &[u8],
        pages: &[PageId],
    ) -> Option<NodeId> {
        debug_assert!((1..self.page_size).contains(&tokens.len()), "a tail is a part of a block");
        debug_assert!(
            self.found_by.is_some_and(|group| pages[usize::from(group.0)] != PageId::NULL),
            "a tail is found by its page"
        );
        let covering = self.longest_partial(parent, tokens, extra, |_| true);
        if covering.is_some_and(|covering| covering.run == tokens.len()) {
            return None;
        }
        // Not beside its parent: a block that goes on from there will need the place.
        let node = self.place_at(self.first_free, parent);
        let extra = PackedExtra::of_tail(self.extras.acquire(extra));
        let record = &mut self.nodes[node.0 as usize];
        (record.key, record.extra) = (tokens.len() as u64, extra);
        let mut row = vec![0; self.page_size];
        row[..tokens.len()].copy_from_slice(tokens);
        self.tokens.write(std::iter::once((node.0 as usize, &row[..])));
        self.tails += 1;
        for (group, &page) in (0..self.groups).map(GroupId).zip(pages) {
            if page != PageId::NULL {
                self.set_page(node, group, page);
            }
        }
        Some(node)
    }

    /// The tail below `parent`, with a page and equal `extra` keys, that `tokens` begin with all of: a tail or
    /// block with these tokens replaces it. Of several the longest.
    pub fn contained_tail(&self, parent: ParentId, tokens: &[Token], extra: &[u8]) -> Option<NodeId> {
        if self.tails == 0 {
            return None;
        }
        match self.family(parent, extra)? {
            Family::One(node) => {
                (self.is_tail(node) && tokens.starts_with(self.tokens(node))).then_some(node)
            }
            Family::Many(siblings) => {
                let is_tail = |node| self.is_tail(node);
                self.forks.longest_tail(siblings, tokens, is_tail, |node| self.tokens(node))
            }
        }
    }

    /// Whether the node is a tail: it has fewer tokens than a block, and neither key nor children.
    #[inline]
    pub fn is_tail(&self, node: NodeId) -> bool {
        self.node(node).extra.is_tail()
    }

    /// The children of `parent` with a page and these extra keys; `None` if there are none of them.
    fn family(&self, parent: ParentId, extra: &[u8]) -> Option<Family> {
        let parent = PackedParent::pack(parent);
        let head = self.head(parent);
        let record = self.nodes.get(head as usize)?;
        if record.next == NONE {
            let node = NodeId(head);
            let fits = self.is_found_by_tokens(node) && self.extras.equals(record.extra.id(), extra);
            return fits.then_some(Family::One(node));
        }
        Some(Family::Many((parent, self.extras.find(extra)?)))
    }

    /// Whether the node has a page of the group that it is found by.
    #[inline]
    pub(crate) fn is_found_by_tokens(&self, node: NodeId) -> bool {
        self.found_by.is_some_and(|group| self.page(node, group).is_some())
    }

    /// Of these nodes, those that have lost their last sibling are no forks.
    #[cold]
    pub(crate) fn leave_alone(&mut self, siblings: [NodeId; 2]) {
        for sibling in siblings {
            if sibling.0 != NONE && !self.has_siblings(sibling) && self.is_found_by_tokens(sibling) {
                self.leave_forks(sibling);
            }
        }
    }

    /// The node has got siblings or its page, and has both.
    #[cold]
    pub(crate) fn enter_forks(&mut self, node: NodeId) {
        let siblings = self.siblings(node);
        let PrefixTree { forks, nodes, tokens, .. } = self;
        forks.insert(siblings, node, |node| tokens_of(nodes, tokens, node));
    }

    /// The node loses its siblings or its page, and had both.
    #[cold]
    pub(crate) fn leave_forks(&mut self, node: NodeId) {
        let siblings = self.siblings(node);
        self.forks.remove(siblings, tokens_of(&self.nodes, &self.tokens, node));
    }

    fn siblings(&self, node: NodeId) -> Siblings {
        let record = self.node(node);
        (record.parent, record.extra.id())
    }
}

/// The node's tokens; of a tail fewer than a block's.
#[inline]
pub(crate) fn tokens_of<'a>(nodes: &Array<Node>, tokens: &'a Rows, node: NodeId) -> &'a [Token] {
    let row = node.0 as usize;
    let tokens = tokens.get(row..row + 1);
    match nodes[row].tail_len() {
        Some(len) => &tokens[..len],
        None => tokens,
    }
}
