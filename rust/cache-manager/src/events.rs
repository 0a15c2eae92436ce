//! Events: what the cache stores and forgets, in order, for those who keep an index of it elsewhere.
//!
//! The [`EventLog`] is written where the fact changes, by four verbs: [`stored`](EventLog::stored),
//! [`removed`](EventLog::removed), [`updated`](EventLog::updated), [`cleared`](EventLog::cleared). It is
//! bounded and never waits: when it is full the oldest event goes and is counted. Ids are gapless, so a
//! reader sees by one comparison that it missed something, and asks for [`Ledger::event_snapshot`].
//!
//! Each group of layers is told of by itself: what one loses another may have still. Blocks are named by their
//! 64-bit keys. Salts are never told; they are in the hashes.

use crate::ledger::Ledger;
use crate::sequence::Sequence;
use crate::whereabouts::Whereabouts;
use block_hash::Token;
use block_pool::{GroupId, Priority};
use radix_tree::AdapterId;
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::thread::Thread;

#[cfg(test)]
mod tests;

/// Most hashes of one [`EventKind::Removed`].
pub const MOST_REMOVED: usize = 1024;

/// Where a block lies: 0 is the device, greater numbers are farther away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tier(pub u8);

impl Tier {
    /// The device.
    pub const DEVICE: Tier = Tier(0);
}

/// One entry of the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// Counted from 0, without gaps.
    pub id: u64,
    /// The group of layers that it tells of.
    pub group: GroupId,
    /// What happened.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// The cache was made; the first event of the group.
    Created {
        /// Tokens a block.
        page_size: u32,
        /// Usable pages of each tier, the device first.
        pages: Vec<u32>,
    },
    /// The group has got blocks.
    Stored(Stored),
    /// The group has lost blocks, on every tier; at most [`MOST_REMOVED`].
    Removed {
        /// Their hashes.
        keys: Vec<u64>,
    },
    /// A stored block changed.
    Updated {
        /// Its hash.
        key: u64,
        /// What changed.
        change: Change,
    },
    /// The group has no block left.
    Cleared,
}

/// Consecutive blocks of one prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stored {
    /// Hash of the block before the first, stored or not; `None` for the first block of a prefix. Of a group of
    /// states: hash of the last one before it that the group has, for none was ever told between the two.
    pub parent: Option<u64>,
    /// Number of the first block in its prefix, from 0.
    pub first: u32,
    /// Hashes.
    pub keys: Vec<u64>,
    /// Tokens of all blocks, overrides applied; none of blocks that were kept without them.
    pub tokens: Vec<Token>,
    /// Canonical extra keys of the blocks that have some, by the block's place in this event.
    pub extra_keys: Vec<(u32, Vec<u8>)>,
    /// Retention priority.
    pub priority: Priority,
    /// Where they lie.
    pub tier: Tier,
    /// The adapter that computed them.
    pub adapter: Option<AdapterId>,
}

/// What changed of a block, from the first to the second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Its retention priority.
    Priority(Priority, Priority),
    /// The tier it lies on.
    Tier(Tier, Tier),
}

/// The newest events, oldest first.
#[derive(Default)]
pub struct EventLog {
    /// Most events kept; 0 records nothing.
    capacity: usize,
    events: VecDeque<Event>,
    next_id: u64,
    dropped: u64,
    /// Nothing can be added to the newest event.
    sealed: bool,
    /// A thread to unpark when an event comes.
    waiter: Option<Thread>,
    /// Where blocks lie, if events tell of tiers beyond the device.
    pub(crate) beyond: Option<Box<Whereabouts>>,
}

impl EventLog {
    /// A log of at most `capacity` events, whose first ones say what was made; 0 is no log.
    pub fn new(capacity: usize, created: impl IntoIterator<Item = (GroupId, EventKind)>) -> EventLog {
        let mut log = EventLog { capacity, ..EventLog::default() };
        created.into_iter().for_each(|(group, kind)| log.push(group, kind));
        log
    }

    /// Whether anything is recorded.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// The device has got blocks of a group. `stored` is asked only when the log is on.
    #[inline]
    pub fn stored(&mut self, group: GroupId, stored: impl FnOnce() -> Stored) {
        if self.beyond.is_some() {
            self.gain_on_device(group, &stored());
        } else if self.is_on() {
            self.push(group, EventKind::Stored(stored()));
        }
    }

    /// The device has lost a block of a group. Those lost one after the other in one call share an event.
    #[inline]
    pub fn removed(&mut self, group: GroupId, key: u64) {
        if self.beyond.is_some() {
            self.heed();
            self.lose(group, key, Tier::DEVICE);
        } else if self.is_on() {
            self.push_removed(group, key);
        }
    }

    /// A block of a group is nowhere any more.
    pub(crate) fn push_removed(&mut self, group: GroupId, key: u64) {
        match self.events.back_mut() {
            Some(Event { group: newest, kind: EventKind::Removed { keys }, .. })
                if !self.sealed && *newest == group && keys.len() < MOST_REMOVED =>
            {
                keys.push(key);
            }
            _ => self.push(group, EventKind::Removed { keys: vec![key] }),
        }
    }

    /// A block that a group has on the device has another priority.
    #[inline]
    pub fn updated(&mut self, group: GroupId, key: u64, change: Change) {
        self.heed();
        if let Change::Priority(_, priority) = change {
            self.note_priority(group, key, priority);
        }
        self.push(group, EventKind::Updated { key, change });
    }

    /// No group has a block left, on no tier.
    pub fn cleared(&mut self, groups: impl IntoIterator<Item = GroupId>) {
        self.forget_all();
        groups.into_iter().for_each(|group| self.push(group, EventKind::Cleared));
    }

    /// The device has no block left, of any group.
    pub(crate) fn device_cleared(&mut self, groups: impl IntoIterator<Item = GroupId>) {
        if self.beyond.is_none() {
            return self.cleared(groups);
        }
        self.heed();
        self.seal();
        groups.into_iter().for_each(|group| self.lose_all(group, Tier::DEVICE));
    }

    /// Every event that is there, oldest first, taken out. When there is none, `waiter` is unparked by
    /// the next one; only the last waiter is, so threads wait with a limit and ask again.
    pub fn take(&mut self, waiter: Option<Thread>) -> VecDeque<Event> {
        self.heed();
        if self.events.is_empty() && waiter.is_some() {
            self.waiter = waiter;
        }
        std::mem::take(&mut self.events)
    }

    /// The id that the next event gets: as many have been recorded.
    pub fn next_id(&self) -> u64 {
        self.next_id
    }

    /// Events that nobody had taken when the log was full.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Nothing is added to the newest event any more. A call that removes blocks begins with it, so that
    /// ids are the same whether and whenever events are read; a reader that leaves events where they are
    /// ends with it.
    pub(crate) fn seal(&mut self) {
        self.sealed = true;
    }

    pub(crate) fn push(&mut self, group: GroupId, kind: EventKind) {
        if !self.is_on() {
            return;
        }
        if self.events.len() == self.capacity {
            self.events.pop_front();
            self.dropped += 1;
        }
        self.events.push_back(Event { id: self.next_id, group, kind });
        self.next_id += 1;
        self.sealed = false;
        if let Some(waiter) = self.waiter.take() {
            waiter.unpark();
        }
    }

    /// Checks the log itself, for blocks of `page_size` tokens; `Err` names an event.
    pub(crate) fn verify(&self, page_size: usize) -> Result<(), (u64, &'static str)> {
        if self.events.len() > self.capacity {
            return Err((self.next_id, "more events are kept than the log may hold"));
        }
        for (event, expected) in self.events.iter().rev().zip((0..self.next_id).rev()) {
            let sound = match &event.kind {
                _ if event.id != expected => return Err((event.id, "does not follow the one before it")),
                EventKind::Stored(stored) => {
                    let blocks = stored.keys.len();
                    blocks > 0
                        && [0, blocks * page_size].contains(&stored.tokens.len())
                        && stored.extra_keys.iter().all(|&(block, _)| (block as usize) < blocks)
                }
                EventKind::Removed { keys } => (1..=MOST_REMOVED).contains(&keys.len()),
                EventKind::Created { .. } | EventKind::Updated { .. } | EventKind::Cleared => true,
            };
            if !sound {
                return Err((event.id, "does not add up"));
            }
        }
        Ok(())
    }

    /// Feeds to `hasher` how much was told; who reads it and when makes no difference.
    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        self.next_id.hash(hasher);
    }
}

/// Consecutive blocks of a request that one call publishes in a group with one priority.
#[derive(Clone, Default)]
pub(crate) struct Run {
    blocks: Range<usize>,
    priority: Priority,
}

impl Run {
    /// Adds `block`. Gives the blocks so far if it does not go on from them.
    #[inline]
    pub(crate) fn add(&mut self, block: usize, priority: Priority) -> Option<Run> {
        if self.blocks.end == block && self.priority == priority && !self.blocks.is_empty() {
            self.blocks.end += 1;
            return None;
        }
        let before = std::mem::replace(self, Run { blocks: block..block + 1, priority });
        before.into_some()
    }

    /// The run, unless it has no block.
    pub(crate) fn into_some(self) -> Option<Run> {
        (!self.blocks.is_empty()).then_some(self)
    }

    /// The first block.
    pub(crate) fn start(&self) -> usize {
        self.blocks.start
    }

    /// What is told of these blocks of `sequence`, whose block `parent` they follow.
    pub(crate) fn of(&self, sequence: &Sequence, page_size: usize, parent: Option<usize>) -> Stored {
        let Range { start, end } = self.blocks;
        let keys = sequence.chain.keys();
        let mut tokens = sequence.tokens[start * page_size..end * page_size].to_vec();
        let mut extra_keys = Vec::new();
        if !sequence.extras.is_empty() {
            sequence.extras.replace_tokens(start * page_size, &mut tokens);
            for block in self.blocks.clone() {
                let mut bytes = Vec::new();
                sequence.extras.encode(block * page_size, (block + 1) * page_size, &mut bytes);
                if !bytes.is_empty() {
                    extra_keys.push(((block - start) as u32, bytes));
                }
            }
        }
        Stored {
            parent: parent.map(|block| keys[block]),
            first: start as u32,
            keys: keys[start..end].to_vec(),
            tokens,
            extra_keys,
            priority: self.priority,
            tier: Tier::DEVICE,
            adapter: sequence.namespace_key.adapter.clone(),
        }
    }
}

impl Ledger {
    /// The log of events.
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// [`EventLog::take`] of the ledger's log.
    pub fn take_events(&mut self, waiter: Option<Thread>) -> VecDeque<Event> {
        self.events.take(waiter)
    }
}
