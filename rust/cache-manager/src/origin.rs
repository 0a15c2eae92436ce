//! What a block was made of, in bytes: a tier that survives the process keeps them beside the block, so that it can be
//! announced when nobody else knows its tokens any more.
//!
//! Numbers are little-endian, lengths of 4 bytes: the number of token ids and the ids, 4 bytes each, overrides applied;
//! the length of the canonical extra keys and these; a byte that says what the adapter is named by (0 nothing, 1 a
//! number of 8 bytes, 2 a text with its length), and that; its generation, 8 bytes.

use crate::ledger::Ledger;
use crate::offloads::Place;
use block_hash::Token;
use block_pool::{GroupId, PageId};
use radix_tree::{AdapterId, NodeId};
use tiered_connector::job::Origin;

/// Bytes of extra keys and adapters that there is room for. A block that has more is kept without its content.
const EXTRA: usize = 160;

/// Most bytes of the content of a block of `page_size` tokens.
pub fn content_bytes(page_size: u32) -> usize {
    4 + 4 * page_size as usize + EXTRA
}

impl Ledger {
    /// Where the block on a group's `page` comes from; nothing if the page stands for none.
    pub(crate) fn origin(&self, group: GroupId, page: PageId, place: Place) -> Origin {
        let Some(node) = self.pools[group].node(page).map(|link| NodeId(link.0)) else {
            return Origin::default();
        };
        let tree = &self.tree;
        let mut content = Vec::with_capacity(content_bytes(self.config.page_size));
        let tokens = tree.tokens(node);
        put_len(&mut content, tokens.len());
        content.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        let extra = tree.extra_keys(node);
        put_len(&mut content, extra.len());
        content.extend_from_slice(extra);
        let namespace = tree.namespace_key(place.namespace);
        match &namespace.adapter {
            None => content.push(0),
            Some(AdapterId::Number(number)) => {
                content.push(1);
                content.extend_from_slice(&number.to_le_bytes());
            }
            Some(AdapterId::Name(name)) => {
                content.push(2);
                put_len(&mut content, name.len());
                content.extend_from_slice(name.as_bytes());
            }
        }
        content.extend_from_slice(&namespace.generation.to_le_bytes());
        Origin { parent: tree.parent_key(node).unwrap_or_default(), position: place.position, content }
    }
}

/// What a block was made of.
#[derive(Clone, Default)]
pub(crate) struct Content {
    /// Overrides applied.
    pub(crate) tokens: Vec<Token>,
    /// Canonical extra keys.
    pub(crate) extra: Vec<u8>,
    pub(crate) adapter: Option<AdapterId>,
}

/// The content in these bytes; `None` if the block was kept without.
pub(crate) fn content_of(bytes: &[u8]) -> Option<Content> {
    let mut rest = bytes;
    let mut take = |len: usize| {
        let (taken, left) = rest.split_at_checked(len)?;
        rest = left;
        Some(taken)
    };
    let short = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_le_bytes);
    let count = short(take(4)?)? as usize;
    let tokens = take(4 * count)?
        .chunks_exact(4)
        .map(|token| Token::from_le_bytes(token.try_into().unwrap_or_default()));
    let tokens = tokens.collect();
    let len = short(take(4)?)? as usize;
    let extra = take(len)?.to_vec();
    let adapter = match take(1)? {
        [0] => None,
        [1] => Some(AdapterId::Number(i64::from_le_bytes(take(8)?.try_into().ok()?))),
        [2] => {
            let len = short(take(4)?)? as usize;
            Some(AdapterId::Name(String::from_utf8(take(len)?.to_vec()).ok()?))
        }
        _ => return None,
    };
    Some(Content { tokens, extra, adapter })
}

fn put_len(content: &mut Vec<u8>, len: usize) {
    content.extend_from_slice(&(len as u32).to_le_bytes());
}
