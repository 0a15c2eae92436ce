//! Blocks of a token log as the tree compares them, and the walk along a prefix.

use block_hash::{ExtraKeys, Token};
use block_pool::GroupId;
use radix_tree::{DigestCollision, Hits, NodeId, ParentId, PrefixTree};
use std::ops::Range;

/// Room for the block at hand when overrides or extra keys touch it.
#[derive(Default)]
pub(crate) struct BlockReader {
    tokens: Vec<Token>,
    extra: Vec<u8>,
}

impl BlockReader {
    /// Token ids (overrides applied) and extra keys of block number `block` of `log`.
    #[inline]
    pub(crate) fn read<'a>(
        &'a mut self,
        log: &'a [Token],
        extras: &ExtraKeys,
        page_size: usize,
        block: usize,
    ) -> (&'a [Token], &'a [u8]) {
        let (start, end) = (block * page_size, (block + 1) * page_size);
        if extras.is_empty() || !extras.touches(start, end) {
            return (&log[start..end], &[]);
        }
        self.read_touched(log, extras, start, end)
    }

    #[cold]
    fn read_touched<'a>(
        &'a mut self,
        log: &[Token],
        extras: &ExtraKeys,
        start: usize,
        end: usize,
    ) -> (&'a [Token], &'a [u8]) {
        self.tokens.clear();
        self.tokens.extend_from_slice(&log[start..end]);
        extras.replace_tokens(start, &mut self.tokens);
        self.extra.clear();
        extras.encode(start, end, &mut self.extra);
        (&self.tokens, &self.extra)
    }
}

/// A prefix to look for.
pub(crate) struct Prefix<'a> {
    pub(crate) log: &'a [Token],
    pub(crate) keys: &'a [u64],
    pub(crate) extras: &'a ExtraKeys,
    pub(crate) page_size: usize,
}

impl Prefix<'_> {
    /// Follows `blocks` below `parent`, as long as each is in the tree with a page of the first group, and adds each
    /// to `found`. True when the walk ended at a block whose hash belongs to another.
    pub(crate) fn walk(
        &self,
        tree: &PrefixTree,
        parent: ParentId,
        blocks: Range<usize>,
        reader: &mut BlockReader,
        found: &mut Hits,
    ) -> bool {
        self.follow(
            tree,
            parent,
            blocks,
            reader,
            found,
            |parent, keys, tokens, found| tree.follow(parent, keys, tokens, found),
            |node, found| tree.page(node, GroupId::FIRST).map(|page| found.push(node, page)),
        )
    }

    /// Follows `blocks` below `parent`, as long as each is in the tree, with or without pages, and adds each to
    /// `found`. True when the walk ended at a block whose hash belongs to another.
    pub(crate) fn walk_nodes(
        &self,
        tree: &PrefixTree,
        parent: ParentId,
        blocks: Range<usize>,
        reader: &mut BlockReader,
        found: &mut Vec<NodeId>,
    ) -> bool {
        self.follow(
            tree,
            parent,
            blocks,
            reader,
            found,
            |parent, keys, tokens, found| tree.trace(parent, keys, tokens, found),
            |node, found| {
                found.push(node);
                Some(())
            },
        )
    }

    /// Blocks that nothing but their tokens make up are followed in one go, others one by one.
    #[expect(clippy::too_many_arguments, reason = "what both walks share")]
    fn follow<F>(
        &self,
        tree: &PrefixTree,
        mut parent: ParentId,
        blocks: Range<usize>,
        reader: &mut BlockReader,
        found: &mut F,
        plain: impl Fn(ParentId, &[u64], &[Token], &mut F) -> Result<Option<ParentId>, DigestCollision>,
        touched: impl Fn(NodeId, &mut F) -> Option<()>,
    ) -> bool {
        let page_size = self.page_size;
        let Range { start: mut block, end } = blocks;
        while block < end {
            let next = self.extras.next_touched(block * page_size);
            let plain_end = next.map_or(end, |token| end.min(token / page_size));
            let tokens = &self.log[block * page_size..plain_end * page_size];
            match plain(parent, &self.keys[block..plain_end], tokens, found) {
                Ok(Some(last)) => parent = last,
                Ok(None) => return false,
                Err(DigestCollision) => return true,
            }
            if plain_end == end {
                break;
            }
            let (tokens, extra) = reader.read(self.log, self.extras, page_size, plain_end);
            match tree.find(parent, self.keys[plain_end], tokens, extra) {
                Ok(Some(node)) => {
                    if touched(node, found).is_none() {
                        return false;
                    }
                    parent = ParentId::Node(node);
                }
                Ok(None) => return false,
                Err(DigestCollision) => return true,
            }
            block = plain_end + 1;
        }
        false
    }
}
