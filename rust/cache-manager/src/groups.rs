//! Groups: layers whose KV is kept in the same way, and which prefixes a group can go on from.
//!
//! A token that is computed reads tokens before it: all of them, or those of a window. So a prefix is usable for
//! a group if the blocks with those tokens are there, whatever else is missing. A prefix is usable for a model if
//! it is for each of its groups; the longest is looked for over all groups at once, since a prefix that is
//! shorter may lack a window that a longer one has.

use block_pool::GroupId;

/// Which tokens before its own a group's token reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GroupKind {
    /// All.
    Full,
    /// The last `window - 1`, and the first `sinks`.
    Window {
        /// Tokens, the reading one included; at least 1.
        window: u32,
        /// Tokens at the beginning that are always read.
        sinks: u32,
    },
    /// Those of its own chunk: a sequence is cut into chunks of `chunk` tokens.
    Chunked {
        /// Tokens; at least 1.
        chunk: u32,
    },
    /// None: a state that they went into, which a page holds. The page of a block holds the state after the block's
    /// last token; the live one holds it after the newest.
    Recurrent(Snapshots),
    /// None: the request has a page to work in, as long as it holds anything.
    Scratch,
    /// None, but all that an encoder made of another input: pages for its tokens, as long as the request holds anything.
    Cross,
}

/// After which tokens a state is kept for other requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Snapshots {
    /// At multiples of so many tokens, themselves a multiple of the page size; 0 for none.
    pub interval: u32,
    /// At the end of the last block of a prompt that does not have its last token.
    pub last: bool,
}

impl Snapshots {
    /// Whether the state after `position` tokens is kept, of a request with so long a prompt.
    pub(crate) fn includes(self, position: u32, prompt: u32, page_size: u32) -> bool {
        let last = self.last && position == last_boundary(prompt, page_size);
        position > 0 && (last || self.interval > 0 && position.is_multiple_of(self.interval))
    }

    /// Whether any state is kept.
    pub(crate) fn any(self) -> bool {
        self.interval > 0 || self.last
    }
}

/// Tokens of the whole blocks that do not have a prompt's last token.
pub(crate) fn last_boundary(prompt: u32, page_size: u32) -> u32 {
    prompt.saturating_sub(1) / page_size * page_size
}

/// Blocks that a token reads, beside its own block: the first few, and from one on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Needed {
    /// Blocks at the beginning.
    pub sinks: u32,
    /// The first block of the rest.
    pub from: u32,
}

impl Needed {
    /// Whether a block before the reading token's is read.
    #[inline]
    pub fn has(&self, block: u32) -> bool {
        block < self.sinks || block >= self.from
    }
}

impl GroupKind {
    /// Blocks of `page_size` tokens that the token at position `at` and those after it read, of the tokens before
    /// `at`. Blocks that are not needed at `at` are not needed later either.
    #[inline]
    pub fn needed(&self, at: u32, page_size: u32) -> Needed {
        match *self {
            GroupKind::Full => Needed { sinks: 0, from: 0 },
            GroupKind::Window { window, sinks } => Needed {
                sinks: sinks.div_ceil(page_size),
                from: (u64::from(at) + 1).saturating_sub(u64::from(window)) as u32 / page_size,
            },
            GroupKind::Chunked { chunk } => Needed { sinks: 0, from: at / chunk * chunk / page_size },
            GroupKind::Recurrent(_) => Needed { sinks: 0, from: state_block(at, page_size) },
            GroupKind::Scratch | GroupKind::Cross => Needed { sinks: 0, from: u32::MAX },
        }
    }

    /// Pages that a request holds while the tokens from `start` up to `end` are computed; of states, the one that is
    /// kept and the one that is written to. Not of what lasts.
    #[inline]
    pub fn held(&self, start: u32, end: u32, page_size: u32) -> u32 {
        match self {
            GroupKind::Recurrent(snapshots) => return 1 + u32::from(snapshots.any()),
            GroupKind::Scratch | GroupKind::Cross => return 0,
            _ => {}
        }
        let needed = self.needed(start, page_size);
        needed.sinks.min(needed.from) + end.div_ceil(page_size) - needed.from
    }

    /// Of these blocks, those from number `first` on.
    pub(crate) fn held_from(&self, first: u32, start: u32, end: u32, page_size: u32) -> u32 {
        let needed = self.needed(start, page_size);
        let sinks = needed.sinks.min(needed.from);
        sinks.saturating_sub(first) + end.div_ceil(page_size).saturating_sub(needed.from.max(first))
    }

    /// The first `blocks` blocks of a window or a chunk in the order in which they are let go: the head first, since
    /// the tail is what a later hit needs; then the sinks, which all hits need.
    pub(crate) fn release_order(
        &self,
        blocks: usize,
        page_size: u32,
    ) -> impl DoubleEndedIterator<Item = usize> + use<> {
        let sinks = (self.needed(0, page_size).sinks as usize).min(blocks);
        (sinks..blocks).chain(0..sinks)
    }

    /// Whether a request that gets longer needs other blocks than its first ones.
    #[inline]
    pub fn forgets(&self) -> bool {
        *self != GroupKind::Full
    }

    /// Whether a page holds a state.
    #[inline]
    pub fn is_recurrent(&self) -> bool {
        matches!(self, GroupKind::Recurrent(_))
    }

    /// The same where nothing is stored for other requests.
    pub(crate) fn without_snapshots(self) -> GroupKind {
        if self.is_recurrent() { GroupKind::Recurrent(Snapshots::default()) } else { self }
    }

    /// States that a beam has at one time, at most: the live one, and those that two steps out went on from,
    /// if any are kept.
    pub(crate) fn most_states(&self) -> u32 {
        if matches!(self, GroupKind::Recurrent(snapshots) if snapshots.any()) { 3 } else { 1 }
    }

    /// Whether there is a page for each block that is needed, with the keys and values of its tokens.
    #[inline]
    pub fn has_blocks(&self) -> bool {
        !self.is_recurrent() && !self.lasts()
    }

    /// Whether pages have nothing to do with tokens: a request takes them once, and holds them to the end.
    #[inline]
    pub fn lasts(&self) -> bool {
        matches!(self, GroupKind::Scratch | GroupKind::Cross)
    }

    /// The pages that a request takes once, if it has so many tokens of an encoder: 0 where pages do not last.
    #[inline]
    pub(crate) fn lasting(&self, encoder: u32, page_size: u32) -> u32 {
        match self {
            GroupKind::Scratch => 1,
            GroupKind::Cross => encoder.div_ceil(page_size),
            _ => 0,
        }
    }
}

/// The block whose page holds the state after `position` tokens.
#[inline]
pub(crate) fn state_block(position: u32, page_size: u32) -> u32 {
    position.saturating_sub(1) / page_size
}

/// A group of a ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Group {
    /// Which tokens it keeps.
    pub kind: GroupKind,
    /// Usable pages of its own, the null page not counted; where groups share a slab, its pages in a huge page.
    pub pages: u32,
}

/// The longest prefix, in blocks of `page_size` tokens, that every group can go on from: more than `least` blocks, and
/// at most `most`. `present` says whether a group has a block.
pub fn joint_hit(
    kinds: &[GroupKind],
    page_size: u32,
    least: u32,
    most: u32,
    mut present: impl FnMut(GroupId, u32) -> bool,
) -> Option<u32> {
    let mut hit = most;
    loop {
        let before = hit;
        for (group, kind) in kinds.iter().enumerate() {
            let present = |block| present(GroupId(group as u8), block);
            hit = longest_hit(kind, page_size, least, hit, present);
        }
        if hit <= least {
            return None;
        }
        if hit == before {
            return Some(hit);
        }
    }
}

/// The longest prefix of at most `most` blocks that one group can go on from. It is not looked for below `least`.
fn longest_hit(
    kind: &GroupKind,
    page_size: u32,
    least: u32,
    most: u32,
    mut present: impl FnMut(u32) -> bool,
) -> u32 {
    let sinks = kind.needed(0, page_size).sinks.min(most);
    let mut hit = (0..sinks).find(|&block| !present(block)).unwrap_or(most);
    while hit > least {
        let from = kind.needed(hit * page_size, page_size).from;
        // A longer prefix that does without the missing block was no hit.
        match (from..hit).rev().find(|&block| !present(block)) {
            Some(missing) => hit = missing,
            None => break,
        }
    }
    hit
}

#[cfg(test)]
mod tests;
