//! Retention: which of a request's blocks are kept longer than others.

use crate::error::LedgerError;
use crate::events::{Change, EventLog};
use crate::ledger::Ledger;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Pool, Pools, Priority, Retention};
use radix_tree::{NodeId, PrefixTree};
use std::ops::Range;
use thiserror::Error;

#[cfg(test)]
mod tests;

/// What a request says of its blocks. A block takes the range that covers its first token; a block of the
/// prompt in no range is left as it is.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockRetention {
    ranges: Vec<TokenRange>,
    decode: Retention,
}

/// Tokens `start .. end` of the prompt.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenRange {
    /// First token.
    pub start: u32,
    /// One past the last token; `None`: to the end of the prompt.
    pub end: Option<u32>,
    /// For the blocks that begin there.
    pub retention: Retention,
}

/// Ranges that are none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RangeError {
    /// A range without tokens.
    #[error("ranges[{0}]: start is not before end")]
    Empty(usize),
    /// A range that begins before the one before it ends.
    #[error("ranges[{0}]: starts before ranges[{before}] ends; ranges are sorted and disjoint", before = .0 - 1)]
    Overlap(usize),
    /// An open range that is not the last.
    #[error("ranges[{0}]: has no end, which only the last may do")]
    Open(usize),
    /// A range past the end of the prompt.
    #[error("ranges[{index}]: has token {token}, counted from 0, of a prompt of {tokens} tokens")]
    PastThePrompt {
        /// Which range.
        index: usize,
        /// The token that the range has and the prompt has not.
        token: u32,
        /// Tokens of the prompt.
        tokens: u32,
    },
}

impl BlockRetention {
    /// `ranges` of a prompt of `tokens` tokens, and `decode` for the blocks that are generated.
    ///
    /// # Errors
    /// Ranges that are empty, unsorted, overlapping, open before the last, or past the prompt.
    pub fn new(
        ranges: Vec<TokenRange>,
        decode: Retention,
        tokens: u32,
    ) -> Result<BlockRetention, RangeError> {
        let mut covered = Some(0);
        for (index, range) in ranges.iter().enumerate() {
            let Some(before) = covered else { return Err(RangeError::Open(index - 1)) };
            if range.end.is_some_and(|end| end <= range.start) {
                return Err(RangeError::Empty(index));
            }
            if range.start < before {
                return Err(RangeError::Overlap(index));
            }
            let token = range.end.map_or(range.start, |end| end - 1);
            if token >= tokens {
                return Err(RangeError::PastThePrompt { index, token, tokens });
            }
            covered = range.end;
        }
        Ok(BlockRetention { ranges, decode })
    }

    /// What holds for the block that begins at `token`, of a request whose prompt has `prompt` tokens.
    pub fn of(&self, token: u32, prompt: u32) -> Option<Retention> {
        if token >= prompt {
            return Some(self.decode);
        }
        let after = self.ranges.partition_point(|range| range.start <= token);
        let range = self.ranges[..after].last()?;
        range.end.is_none_or(|end| token < end).then_some(range.retention)
    }
}

/// What a session is going to do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum SessionHint {
    /// It comes back soon: its blocks are kept like this, but for those that are kept better already.
    ResumeSoon(Retention),
    /// It is over: blocks that it shares with nobody go first.
    Done,
}

impl Ledger {
    /// Says what comes of the stored blocks of every request in `batch`. Legal until the release, which it
    /// usually precedes.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch. Nothing is changed then.
    pub fn hint_sessions(&mut self, batch: &[SlotId], hint: SessionHint) -> Result<(), LedgerError> {
        self.check_batch(batch)?;
        for &slot in batch {
            self.hint_session(slot, hint);
        }
        Ok(())
    }

    fn hint_session(&mut self, slot: SlotId, hint: SessionHint) {
        let Some(sequence) = self.slots.get(slot).filter(|sequence| sequence.epoch == self.epoch) else {
            return;
        };
        let SessionHint::ResumeSoon(hint) = hint else {
            self.give_up_own(slot);
            if let Some(sequence) = self.slots.get_mut(slot) {
                sequence.over = true;
            }
            return;
        };
        for group in self.config.group_ids() {
            for page in sequence.nodes.iter().filter_map(|&node| self.tree.page(node, group)) {
                if !is_kept(&self.pools[group], self.now, page, hint) {
                    retain(&mut self.pools, &self.tree, &mut self.events, group, page, Some(hint));
                }
            }
        }
    }

    /// From the request's last stored block back to where another session branches off or reads along.
    fn give_up_own(&mut self, slot: SlotId) {
        let Some(sequence) = self.slots.get(slot) else { return };
        let lowest = Retention::from(Priority::LOWEST);
        let mut below = None;
        for (block, &node) in sequence.nodes.iter().enumerate().rev() {
            let alone = below.map_or(self.tree.is_leaf(node), |child| !self.tree.has_siblings(child));
            let read_along = self.config.group_ids().any(|group| {
                let (stored, held) = (self.tree.page(node, group), self.block_page(sequence, group, block));
                // Another session's, where this one kept a twin.
                let is_twin = held.is_some() && held != stored;
                is_twin || stored.is_some_and(|it| self.pools[group].refs(it) > u32::from(held.is_some()))
            });
            if !alone || read_along {
                return;
            }
            for group in self.config.group_ids() {
                if let Some(stored) = self.tree.page(node, group) {
                    retain(&mut self.pools, &self.tree, &mut self.events, group, stored, Some(lowest));
                }
            }
            below = Some(node);
        }
    }

    /// The request uses its stored blocks from number `first` on: what it says of them holds from now on.
    pub(crate) fn use_blocks(&mut self, slot: SlotId, first: usize) {
        let page_size = self.config.page_size as usize;
        let Some(sequence) = self.slots.get(slot).filter(|sequence| sequence.retention.is_some()) else {
            return;
        };
        for group in self.config.group_ids() {
            for (block, &node) in sequence.nodes.iter().enumerate().skip(first) {
                if let Some(page) = self.tree.page(node, group) {
                    let retention = sequence.retention_of(block, page_size);
                    retain(&mut self.pools, &self.tree, &mut self.events, group, page, retention);
                }
            }
        }
    }

    /// Blocks of the request count as reused; where all blocks are needed, what they follow does too, so that a
    /// policy which protects reused blocks never drops one before a block below it.
    pub(crate) fn mark_reused(&mut self, slot: SlotId, blocks: Range<usize>) {
        // Nodes of an older epoch are gone: a load may land after a reset.
        let Some(sequence) = self.slots.get(slot).filter(|sequence| sequence.epoch == self.epoch) else {
            return;
        };
        let nodes = &sequence.nodes[..blocks.end.min(sequence.nodes.len())];
        for group in self.config.group_ids() {
            let first = if self.config.kind(group).forgets() { blocks.start } else { 0 };
            for (block, &node) in nodes.iter().enumerate().skip(first).rev() {
                // A block that was evicted leaves a gap; those above it count all the same.
                let Some(page) = self.tree.page(node, group) else { continue };
                let fresh = self.pools[group].mark_reused(page);
                if block < blocks.start && !fresh {
                    break;
                }
            }
        }
    }

    /// Tells the pools the time, if there is a new one; priorities that ended are told.
    pub(crate) fn tell_time(&mut self, now: Option<f64>) {
        for group in self.config.group_ids() {
            let pool = &mut self.pools[group];
            if let Some(now) = now.filter(|_| !self.has_clock) {
                pool.start_clock(now);
            }
            for lapsed in pool.tell_time(now.unwrap_or(self.now)) {
                tell_priority(pool, &self.tree, &mut self.events, group, lapsed.page, lapsed.from);
            }
        }
        if let Some(now) = now {
            (self.now, self.has_clock) = (now, true);
        }
    }
}

/// Whether `page` has a higher priority than a hint says already, or the same for at least as long from now.
fn is_kept(pool: &Pool, now: f64, page: PageId, hint: Retention) -> bool {
    let kept = pool.retention(page);
    let end = |it: Retention| {
        it.expires_at().or_else(|| it.duration().map(|time| now + time)).unwrap_or(f64::INFINITY)
    };
    kept.priority() > hint.priority() || kept.priority() == hint.priority() && end(kept) >= end(hint)
}

impl Sequence {
    /// What the request says of one of its blocks, if it says anything.
    #[inline]
    pub(crate) fn retention_of(&self, block: usize, page_size: usize) -> Option<Retention> {
        self.retention.as_ref()?.of((block * page_size) as u32, self.prompt)
    }
}

/// Gives `page`, which stands for a block, another retention, unless there is none to give.
pub(crate) fn retain(
    pools: &mut Pools,
    tree: &PrefixTree,
    events: &mut EventLog,
    group: GroupId,
    page: PageId,
    retention: Option<Retention>,
) {
    if let Some(retention) = retention {
        let pool = &mut pools[group];
        let before = pool.priority(page);
        pool.retain(page, retention);
        tell_priority(pool, tree, events, group, page, before);
    }
}

/// Tells of a stored block's other priority.
fn tell_priority(
    pool: &Pool,
    tree: &PrefixTree,
    events: &mut EventLog,
    group: GroupId,
    page: PageId,
    before: Priority,
) {
    let after = pool.priority(page);
    if before != after
        && let Some(link) = pool.node(page)
        && let Some(key) = tree.key(NodeId(link.0))
    {
        events.updated(group, key, Change::Priority(before, after));
    }
}
