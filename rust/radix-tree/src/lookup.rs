//! Look-up: of one block, and along a prefix.
//!
//! Blocks that were stored in one go are neighbours, records and tokens alike, and a prefix is followed
//! through them in the order of memory: the place of the next block is known before this one is read. The
//! table is asked only where the neighbour is another block.

use crate::node::{Node, NodeId, PackedExtra, PackedParent, ParentId};
use crate::tree::PrefixTree;
use block_hash::Token;
use block_pool::PageId;
use memory::AHEAD;

/// Two different blocks have one hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DigestCollision;

/// Blocks that were found: the node of each, and the page it lies on.
#[derive(Default)]
pub struct Hits {
    /// In the order of the blocks.
    pub nodes: Vec<NodeId>,
    /// In the same order.
    pub pages: Vec<PageId>,
}

impl Hits {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Adds a block.
    pub fn push(&mut self, node: NodeId, page: PageId) {
        self.nodes.push(node);
        self.pages.push(page);
    }

    /// Keeps the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.nodes.truncate(len);
        self.pages.truncate(len);
    }
}

/// Neighbours whose tokens are compared together. Their records, read twice, stay in the nearest cache.
const RUN: usize = 256;

impl PrefixTree {
    /// The node of the block with chained hash `key`, these `tokens` and `extra` keys, below `parent`.
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
        let Some(node) = self.owner_of(key) else { return Ok(None) };
        let record = self.node(node);
        let is_block = record.parent == PackedParent::pack(parent)
            && self.tokens(node) == tokens
            && self.extras.equals(record.extra.id(), extra);
        if is_block { Ok(Some(node)) } else { Err(DigestCollision) }
    }

    /// Follows whole blocks of `tokens`, with chained hashes `keys` and no extra keys, below `parent`, as
    /// long as each is stored with a page of the first group, and adds each to `found`. The last of them, or
    /// `parent` for no blocks; `None` where a block is not there.
    ///
    /// # Errors
    /// [`DigestCollision`] where a hash belongs to another block.
    pub fn follow(
        &self,
        parent: ParentId,
        keys: &[u64],
        tokens: &[Token],
        found: &mut Hits,
    ) -> Result<Option<ParentId>, DigestCollision> {
        self.walk(
            parent,
            keys,
            tokens,
            |record| record.page != PageId::NULL,
            |first, records| {
                found.nodes.extend((first.0..).map(NodeId).take(records.len()));
                found.pages.extend(records.iter().map(|record| record.page));
            },
        )
    }

    /// [`PrefixTree::follow`] along blocks that are stored, with whatever pages.
    ///
    /// # Errors
    /// [`DigestCollision`] where a hash belongs to another block.
    pub fn trace(
        &self,
        parent: ParentId,
        keys: &[u64],
        tokens: &[Token],
        found: &mut Vec<NodeId>,
    ) -> Result<Option<ParentId>, DigestCollision> {
        self.walk(
            parent,
            keys,
            tokens,
            |_| true,
            |first, records| {
                found.extend((first.0..).map(NodeId).take(records.len()));
            },
        )
    }

    /// Follows blocks whose records are `wanted`; those that are neighbours are `found` together.
    #[inline]
    fn walk(
        &self,
        mut parent: ParentId,
        keys: &[u64],
        tokens: &[Token],
        wanted: impl Fn(&Node) -> bool,
        mut found: impl FnMut(NodeId, &[Node]),
    ) -> Result<Option<ParentId>, DigestCollision> {
        debug_assert_eq!(tokens.len(), keys.len() * self.page_size, "whole blocks, a hash for each");
        let mut block = 0;
        // The owners of the keys of the blocks `asked`.
        let (mut owners, mut asked, mut ask) = ([None; AHEAD], 0..0, 1);
        while block < keys.len() {
            if block >= asked.end {
                asked = block..keys.len().min(block + ask);
                for (owner, &key) in owners.iter_mut().zip(&keys[asked.clone()]) {
                    *owner = self.owner_of(key);
                }
            }
            let Some(first) = owners[block - asked.start] else { return Ok(None) };
            let (keys, tokens) = (&keys[block..], &tokens[block * self.page_size..]);
            let run = self.run(first, parent, keys, tokens, &wanted);
            if run == 0 {
                // The block is not wanted, or another block has its hash.
                return self.find(parent, keys[0], &tokens[..self.page_size], &[]).map(|_| None);
            }
            let start = first.0 as usize;
            found(first, &self.nodes[start..start + run]);
            parent = ParentId::Node(NodeId(first.0 + run as u32 - 1));
            block += run;
            ask = if run < AHEAD { AHEAD } else { 1 };
        }
        Ok(Some(parent))
    }

    /// How many of the blocks lie on `first` and its neighbours, all of them wanted.
    #[inline]
    fn run(
        &self,
        first: NodeId,
        parent: ParentId,
        keys: &[u64],
        tokens: &[Token],
        wanted: impl Fn(&Node) -> bool,
    ) -> usize {
        let start = first.0 as usize;
        let mut parent = PackedParent::pack(parent);
        let mut run = 0;
        for (record, &key) in self.nodes[start..].iter().zip(keys).take(RUN) {
            memory::prefetch(record, AHEAD);
            let is_next = record.key == key && record.parent == parent && record.extra == PackedExtra::NONE;
            if !is_next || !wanted(record) {
                break;
            }
            parent = PackedParent::pack(ParentId::Node(NodeId((start + run) as u32)));
            run += 1;
        }
        let stored = self.tokens.get(start..start + run);
        let wanted = &tokens[..run * self.page_size];
        if stored == wanted {
            return run;
        }
        let blocks = stored.chunks_exact(self.page_size).zip(wanted.chunks_exact(self.page_size));
        blocks.take_while(|(stored, wanted)| stored == wanted).count()
    }
}
