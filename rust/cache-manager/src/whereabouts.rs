//! Where blocks lie, device and tiers together: a block is told of by its nearest copy.
//!
//! The tiers report what they get and lose ([`Reports`]). The log heeds that before it tells of anything
//! else, so that all events are in one order. Nobody else knows the tokens of a block that the device has
//! lost, so they are kept here.

use crate::events::{Change, EventKind, EventLog, Stored, Tier};
use crate::ledger::Ledger;
use crate::origin::{Content, content_of};
use crate::snapshot::created;
use block_pool::{GroupId, Priority};
use radix_tree::NodeId;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tiered_connector::connector::TieredConnector;
use tiered_connector::groups::TieredGroups;
use tiered_connector::reports::{BELOW, HOST, Report, Reports, What};
use tiered_connector::vault::Restored;

#[cfg(test)]
mod tests;

/// A block of a group.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// The tiers that have it, a bit each.
    tiers: u8,
    /// The tiers that it is on its way to, a bit each.
    coming: u8,
    /// As it was told last.
    priority: Priority,
    /// The block that it was told to follow.
    parent: Option<u64>,
}

impl Known {
    /// The nearest tier that has it.
    fn nearest(&self) -> Option<Tier> {
        (self.tiers != 0).then(|| Tier(self.tiers.trailing_zeros() as u8))
    }
}

/// What a block is, in each group that knows it.
struct Block {
    groups: u8,
    first: u32,
    content: Content,
}

/// The blocks of every group, on every tier.
pub(crate) struct Whereabouts {
    reports: Arc<Reports>,
    /// The call that the newest report is of.
    call: u64,
    /// How many blocks there is room for beyond the device, tier by tier, in each group.
    sizes: Vec<Vec<u32>>,
    groups: Vec<HashMap<u64, Known>>,
    blocks: HashMap<u64, Block>,
}

impl Whereabouts {
    /// Of caches that have room for so many blocks beyond the device, tier by tier, in each group.
    fn new(reports: Arc<Reports>, sizes: Vec<Vec<u32>>) -> Whereabouts {
        let groups = vec![HashMap::new(); sizes.len()];
        Whereabouts { reports, call: 0, sizes, groups, blocks: HashMap::new() }
    }

    /// A group knows a block from now on.
    fn enter(&mut self, group: GroupId, key: u64, known: Known, block: impl FnOnce() -> Block) {
        self.groups[group.index()].insert(key, known);
        self.blocks.entry(key).or_insert_with(block).groups += 1;
    }

    /// A group knows a block no more, unless it is somewhere, or on its way.
    fn leave(&mut self, group: GroupId, key: u64) {
        let known = &mut self.groups[group.index()];
        if known.get(&key).is_some_and(|known| known.tiers | known.coming == 0) {
            known.remove(&key);
            if let Some(block) = self.blocks.get_mut(&key) {
                block.groups -= 1;
                if block.groups == 0 {
                    self.blocks.remove(&key);
                }
            }
        }
    }

    /// The blocks of a group that a tier has or that are on their way there, in the order of their hashes.
    fn of_tier(&self, group: GroupId, tier: Tier) -> Vec<u64> {
        let bit = 1 << tier.0;
        let known = self.groups[group.index()].iter();
        let mut keys: Vec<u64> =
            known.filter(|(_, known)| (known.tiers | known.coming) & bit != 0).map(|(&key, _)| key).collect();
        keys.sort_unstable();
        keys
    }

    /// What is told of one block.
    fn stored(&self, group: GroupId, key: u64) -> Option<Stored> {
        let known = self.groups[group.index()].get(&key)?;
        let Block { first, content, .. } = self.blocks.get(&key)?;
        let extra = (!content.extra.is_empty()).then(|| (0, content.extra.clone()));
        Some(Stored {
            parent: known.parent,
            first: *first,
            keys: vec![key],
            tokens: content.tokens.clone(),
            extra_keys: extra.into_iter().collect(),
            priority: known.priority,
            tier: known.nearest()?,
            adapter: content.adapter.clone(),
        })
    }

    /// Every block that a group has, in runs of consecutive ones that are alike; parents before children.
    fn runs(&self, group: GroupId) -> Vec<Stored> {
        let all = self.groups[group.index()].keys();
        let mut all: Vec<Stored> = all.filter_map(|&key| self.stored(group, key)).collect();
        all.sort_unstable_by_key(|stored| (stored.first, stored.keys[0]));
        let mut runs: Vec<Stored> = Vec::new();
        // By its last block; another that goes on from there starts a run of its own.
        let mut ends: HashMap<u64, usize> = HashMap::new();
        for one in all {
            let before = one.parent.and_then(|parent| Some((parent, *ends.get(&parent)?)));
            let run = before.filter(|&(_, run)| runs[run].goes_on_with(&one));
            ends.insert(one.keys[0], run.map_or(runs.len(), |(_, run)| run));
            match run {
                Some((parent, run)) => {
                    ends.remove(&parent);
                    runs[run].append(one);
                }
                None => runs.push(one),
            }
        }
        runs
    }
}

impl Stored {
    fn goes_on_with(&self, next: &Stored) -> bool {
        self.first + self.keys.len() as u32 == next.first
            && (self.priority, self.tier, &self.adapter) == (next.priority, next.tier, &next.adapter)
            && self.tokens.is_empty() == next.tokens.is_empty()
    }

    fn append(&mut self, next: Stored) {
        let blocks = self.keys.len() as u32;
        self.extra_keys.extend(next.extra_keys.into_iter().map(|(block, extra)| (blocks + block, extra)));
        self.keys.extend(next.keys);
        self.tokens.extend(next.tokens);
    }

    /// The block at `place` alone.
    fn one(&self, place: usize) -> Stored {
        let page_size = self.tokens.len() / self.keys.len();
        let extra = self.extra_keys.iter().find(|&&(block, _)| block as usize == place);
        Stored {
            parent: if place == 0 { self.parent } else { Some(self.keys[place - 1]) },
            first: self.first + place as u32,
            keys: vec![self.keys[place]],
            tokens: self.tokens[place * page_size..(place + 1) * page_size].to_vec(),
            extra_keys: extra.map(|(_, bytes)| (0, bytes.clone())).into_iter().collect(),
            priority: self.priority,
            tier: self.tier,
            adapter: self.adapter.clone(),
        }
    }

    fn block(&self) -> Block {
        let extra = self.extra_keys.first().map(|(_, bytes)| bytes.clone()).unwrap_or_default();
        let content = Content { tokens: self.tokens.clone(), extra, adapter: self.adapter.clone() };
        Block { groups: 0, first: self.first, content }
    }
}

impl EventLog {
    /// Takes account of what the tiers have reported.
    pub(crate) fn heed(&mut self) {
        let Some(beyond) = &self.beyond else { return };
        for Report { group, tier, call, what } in beyond.reports.take() {
            if let Some(beyond) = &mut self.beyond
                && std::mem::replace(&mut beyond.call, call) != call
            {
                self.seal();
            }
            let tier = Tier(tier);
            match what {
                What::Coming(key) => self.expect(group, key, tier),
                What::Got(key) => self.gain(group, key, tier),
                What::Lost(key) => self.lose(group, key, tier),
                What::LostAll => self.lose_all(group, tier),
            }
        }
    }

    /// A group has got blocks on the device: those that lie farther away too have come nearer.
    pub(crate) fn gain_on_device(&mut self, group: GroupId, stored: &Stored) {
        self.heed();
        let mut new: Option<Stored> = None;
        for place in 0..stored.keys.len() {
            let (key, one) = (stored.keys[place], stored.one(place));
            let Some(beyond) = &mut self.beyond else { return };
            let known = beyond.groups[group.index()].get_mut(&key);
            let before = known.map(|known| {
                let before = *known;
                known.tiers |= 1;
                (known.priority, known.parent) = (one.priority, one.parent);
                before
            });
            if before.is_none() {
                let Stored { priority, parent, .. } = one;
                beyond.enter(group, key, Known { tiers: 1, coming: 0, priority, parent }, || one.block());
            }
            let Some((before, from)) = before.and_then(|before| Some((before, before.nearest()?))) else {
                match &mut new {
                    Some(run) => run.append(one),
                    None => new = Some(one),
                }
                continue;
            };
            if let Some(run) = new.take() {
                self.push(group, EventKind::Stored(run));
            }
            if from != Tier::DEVICE {
                self.push(group, EventKind::Updated { key, change: Change::Tier(from, Tier::DEVICE) });
            }
            if before.priority != one.priority {
                let change = Change::Priority(before.priority, one.priority);
                self.push(group, EventKind::Updated { key, change });
            }
        }
        if let Some(run) = new {
            self.push(group, EventKind::Stored(run));
        }
    }

    /// A group's block on a tier is there no more, nor on its way there.
    pub(crate) fn lose(&mut self, group: GroupId, key: u64, tier: Tier) {
        let Some(beyond) = &mut self.beyond else { return };
        let Some(known) = beyond.groups[group.index()].get_mut(&key) else { return };
        let before = known.nearest();
        known.tiers &= !(1 << tier.0);
        known.coming &= !(1 << tier.0);
        let after = known.nearest();
        beyond.leave(group, key);
        self.tell_move(group, key, before, after);
    }

    /// Likewise everything that a group has on a tier.
    pub(crate) fn lose_all(&mut self, group: GroupId, tier: Tier) {
        let keys = self.beyond.as_ref().map(|beyond| beyond.of_tier(group, tier)).unwrap_or_default();
        for key in keys {
            self.lose(group, key, tier);
        }
    }

    fn expect(&mut self, group: GroupId, key: u64, tier: Tier) {
        if let Some(beyond) = &mut self.beyond
            && let Some(known) = beyond.groups[group.index()].get_mut(&key)
        {
            known.coming |= 1 << tier.0;
        }
    }

    fn gain(&mut self, group: GroupId, key: u64, tier: Tier) {
        let Some(beyond) = &mut self.beyond else { return };
        // Of one that the ledger has not offered nobody knows what it is.
        let Some(known) = beyond.groups[group.index()].get_mut(&key) else { return };
        let before = known.nearest();
        known.tiers |= 1 << tier.0;
        known.coming &= !(1 << tier.0);
        let after = known.nearest();
        self.tell_move(group, key, before, after);
    }

    fn tell_move(&mut self, group: GroupId, key: u64, before: Option<Tier>, after: Option<Tier>) {
        match (before, after) {
            (Some(before), Some(after)) if before != after => {
                self.push(group, EventKind::Updated { key, change: Change::Tier(before, after) });
            }
            (Some(_), None) => self.push_removed(group, key),
            // It was on its way when the device lost it.
            (None, Some(_)) => {
                if let Some(stored) = self.beyond.as_ref().and_then(|beyond| beyond.stored(group, key)) {
                    self.push(group, EventKind::Stored(stored));
                }
            }
            _ => {}
        }
    }

    /// A block's other priority is told.
    pub(crate) fn note_priority(&mut self, group: GroupId, key: u64, priority: Priority) {
        if let Some(beyond) = &mut self.beyond
            && let Some(known) = beyond.groups[group.index()].get_mut(&key)
        {
            known.priority = priority;
        }
    }

    /// Nothing is anywhere any more, in no group: what was reported and not heeded is of before.
    pub(crate) fn forget_all(&mut self) {
        if let Some(beyond) = &mut self.beyond {
            drop(beyond.reports.take());
            beyond.groups.iter_mut().for_each(HashMap::clear);
            beyond.blocks.clear();
        }
    }

    /// Whether a group has a block on any tier.
    pub(crate) fn knows(&self, group: GroupId, key: u64) -> bool {
        let known = self.beyond.as_ref().and_then(|beyond| beyond.groups[group.index()].get(&key));
        known.is_some_and(|known| known.tiers != 0)
    }

    /// How many blocks there is room for beyond the device, tier by tier.
    pub(crate) fn sizes(&self, group: GroupId) -> &[u32] {
        self.beyond.as_ref().map_or(&[], |beyond| &beyond.sizes[group.index()])
    }

    /// What a group has on all tiers; `None` where the device alone is known.
    pub(crate) fn runs(&self, group: GroupId) -> Option<Vec<Stored>> {
        self.beyond.as_ref().map(|beyond| beyond.runs(group))
    }
}

impl Ledger {
    /// Tells of blocks on these tiers, too, from now on, and of those that are there from the start. For a
    /// ledger that nothing was asked of yet.
    pub fn tell_of(&mut self, tiers: &TieredGroups) {
        let restored: Vec<Vec<Restored>> =
            tiers.groups().iter().map(TieredConnector::take_restored).collect();
        if !self.events.is_on() {
            return;
        }
        let reports = Arc::new(Reports::default());
        let groups = self.config.group_ids().zip(tiers.groups());
        let sizes = groups.map(|(group, tier)| tier.report_to(&reports, group)).collect();
        let mut beyond = Whereabouts::new(reports, sizes);
        let parents = restored.iter().flatten().filter(|block| block.origin.position > 0);
        let parents: HashMap<u64, u64> = parents.map(|block| (block.key.hash, block.origin.parent)).collect();
        for (group, blocks) in self.config.group_ids().zip(&restored) {
            let there: HashSet<u64> = blocks.iter().map(|block| block.key.hash).collect();
            for Restored { key, priority, origin } in blocks {
                let mut above = std::iter::successors(parents.get(&key.hash), |above| parents.get(above));
                let skips = self.config.kind(group).is_recurrent();
                let parent = above.find(|above| !skips || there.contains(above)).copied();
                let known = Known { tiers: 1 << BELOW, coming: 0, priority: *priority, parent };
                let content = content_of(&origin.content).unwrap_or_default();
                beyond.enter(group, key.hash, known, || Block { groups: 0, first: origin.position, content });
            }
        }
        let told = self.config.group_ids().flat_map(|group| {
            let runs = beyond.runs(group).into_iter();
            runs.map(move |run| (group, EventKind::Stored(run)))
        });
        let told: Vec<_> = told.collect();
        let capacity = self.config.event_buffer_max_size as usize;
        self.events = EventLog::new(capacity, []);
        self.events.beyond = Some(Box::new(beyond));
        let created: Vec<_> = created(&self.config, &self.events).collect();
        created.into_iter().chain(told).for_each(|(group, kind)| self.events.push(group, kind));
    }

    /// Checks that what was told of blocks is where they are.
    ///
    /// # Errors
    /// Hash and group of a block that is elsewhere.
    pub fn verify_whereabouts(&mut self, tiers: &TieredGroups) -> Result<(), (u64, GroupId)> {
        if self.events.beyond.is_none() || tiers.check_open().is_err() {
            return Ok(());
        }
        self.events.heed();
        let Some(beyond) = &self.events.beyond else { return Ok(()) };
        for (group, tier) in self.config.group_ids().zip(tiers.groups()) {
            let known = &beyond.groups[group.index()];
            let mut keys: Vec<u64> = known.keys().copied().collect();
            keys.sort_unstable();
            let nodes = self.tree.iter().filter(|&node| self.tree.page(node, group).is_some());
            let on_device: HashSet<u64> = nodes.filter_map(|node: NodeId| self.tree.key(node)).collect();
            if let Some(&untold) = on_device.iter().find(|key| !known.contains_key(key)) {
                return Err((untold, group));
            }
            for (key, (host, below)) in keys.iter().zip(tier.has(keys.iter().copied())) {
                let tiers = known[key].tiers;
                if (tiers & 1 << HOST != 0, tiers & 1 << BELOW != 0) != (host, below) {
                    return Err((*key, group));
                }
            }
            let told = |key: &&u64| known[*key].tiers & 1 != 0;
            if let Some(&gone) = keys.iter().filter(told).find(|key| !on_device.contains(key)) {
                return Err((gone, group));
            }
        }
        Ok(())
    }
}
