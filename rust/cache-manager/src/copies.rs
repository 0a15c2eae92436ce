//! Copies in flight: what a mover is told to copy, and what its pins hold.
//!
//! The ledger decides and never waits. A job says which pages a copy touches and after which step's fence
//! the mover may touch them; the pages stay pinned until the ledger is told how the copy ended. A copy of blocks
//! of several groups is one copy: it ends when all of it has, as bad as the worst.

use crate::config::LedgerConfig;
use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::slots::SlotId;
use block_pool::{GroupId, PageId, Pools, Step};
use radix_tree::{NodeId, ParentId, PrefixTree};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use std::ops::Range;

/// A copy in flight; a number is never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CopyId(pub u64);

/// What a mover is to copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyJob {
    /// To be given back when the copy has ended, well or not.
    pub id: CopyId,
    /// The pages, group by group, those of a group in the order of the blocks.
    pub pages: Vec<PageId>,
    /// Where the pages of each group end.
    ends: SmallVec<[u32; 1]>,
    /// The mover waits for the fence of this step before it touches a page.
    pub after: Step,
}

impl CopyJob {
    /// Each group with its part of [`CopyJob::pages`], which may be empty.
    pub fn parts(&self) -> impl Iterator<Item = (GroupId, Range<usize>)> {
        parts(&self.ends)
    }
}

fn parts(ends: &[u32]) -> impl DoubleEndedIterator<Item = (GroupId, Range<usize>)> + ExactSizeIterator {
    let range =
        |group: usize| group.checked_sub(1).map_or(0, |before| ends[before]) as usize..ends[group] as usize;
    (0..ends.len()).map(move |group| (GroupId(group as u8), range(group)))
}

/// Pages that are going to be copied, group by group.
#[derive(Clone, Default, PartialEq, Eq, Hash, Debug)]
pub(crate) struct CopyPages {
    pages: Vec<PageId>,
    ends: SmallVec<[u32; 1]>,
    /// How many of each group's pages, the first ones, hold what its windows always need.
    sinks: SmallVec<[u32; 1]>,
}

impl CopyPages {
    /// The pages of one of so many groups alone; the first `sinks` are what its windows always need.
    pub(crate) fn of(group: GroupId, groups: usize, pages: Vec<PageId>, sinks: u32) -> CopyPages {
        let mut all = CopyPages { ends: smallvec![0; groups], sinks: smallvec![0; groups], pages };
        all.ends[group.index()..].fill(all.pages.len() as u32);
        all.sinks[group.index()] = sinks;
        all
    }

    /// Adds the pages of the next group, in the order of their blocks; `always` says how many blocks at the beginning
    /// it always needs.
    pub(crate) fn add_group(&mut self, pages: impl IntoIterator<Item = (usize, PageId)>, always: u32) {
        let mut sinks = 0;
        for (block, page) in pages {
            sinks += u32::from(block < always as usize);
            self.pages.push(page);
        }
        self.ends.push(self.pages.len() as u32);
        self.sinks.push(sinks);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Every page with its group.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (GroupId, PageId)> {
        parts(&self.ends).flat_map(|(group, part)| self.pages[part].iter().map(move |&page| (group, page)))
    }
}

/// How a copy ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyEnd {
    /// Every byte is where it belongs.
    Done,
    /// Nobody knows what the pages hold now.
    Failed,
    /// It was declined before anything moved.
    Refused,
}

/// A copy in flight as the ledger remembers it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Copy {
    pub(crate) pages: CopyPages,
    /// The request that waits for it: its load, suspension or resumption.
    pub(crate) waiter: Option<SlotId>,
    /// A copy ahead of eviction: nobody used the pages.
    pub(crate) demotion: bool,
}

/// Every copy in flight.
#[derive(Default)]
pub(crate) struct Copies {
    pub(crate) in_flight: BTreeMap<u64, Copy>,
    next: u64,
}

impl Copies {
    /// Pages of a group in copies ahead of eviction.
    pub(crate) fn demoted(&self, group: GroupId) -> u32 {
        let demotions = self.in_flight.values().filter(|copy| copy.demotion);
        let parts = demotions.flat_map(|copy| parts(&copy.pages.ends));
        parts.filter(|(of, _)| *of == group).map(|(_, part)| part.len() as u32).sum()
    }

    /// The copy is one ahead of eviction.
    pub(crate) fn is_demotion(&mut self, id: CopyId) {
        if let Some(copy) = self.in_flight.get_mut(&id.0) {
            copy.demotion = true;
        }
    }

    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        (&self.in_flight, self.next).hash(hasher);
    }
}

impl Ledger {
    /// Pins the pages of the request's blocks `first .. first + count` in the first group for a copy, until
    /// [`Ledger::end_copies`].
    ///
    /// # Errors
    /// An unknown slot; blocks that the request does not hold.
    pub fn start_copy(&mut self, slot: SlotId, first: usize, count: usize) -> Result<CopyJob, LedgerError> {
        let sequence = self.sequence(slot)?;
        let row = &sequence.row(GroupId::FIRST).pages;
        let pages = match first.checked_add(count).and_then(|end| row.get(first..end)) {
            Some(pages) if !pages.is_empty() && !pages.contains(&PageId::NULL) && !sequence.dummy => {
                pages.to_vec()
            }
            _ => {
                return Err(LedgerError::OutOfRange {
                    name: "blocks",
                    given: first as i128,
                    allowed: format!("at least one block of the {} that the request holds", row.len()),
                });
            }
        };
        let (last_step, page_size) = (sequence.last_step, self.config.page_size);
        if let Some(sequence) = self.slots.get_mut(slot) {
            // A truncation may take the next step back to the tokens with KV.
            sequence.exposed |= first + count > (sequence.processed / page_size) as usize;
        }
        let always = self.config.kind(GroupId::FIRST).needed(0, page_size).sinks as usize;
        let sinks = (first + count).min(always).saturating_sub(first) as u32;
        Ok(self.begin_copy(
            CopyPages::of(GroupId::FIRST, self.config.groups.len(), pages, sinks),
            last_step,
            None,
        ))
    }

    /// Pins `pages` for a copy that waits for the fence of step `after`, and of every page's last use.
    pub(crate) fn begin_copy(&mut self, pages: CopyPages, after: Step, waiter: Option<SlotId>) -> CopyJob {
        let mut last_use = after;
        for (group, part) in parts(&pages.ends) {
            let pool = &mut self.pools[group];
            for &page in &pages.pages[part] {
                last_use = last_use.max(pool.last_use(page));
                pool.pin(page);
            }
        }
        let id = CopyId(self.copies.next);
        self.copies.next += 1;
        let job = CopyJob { id, pages: pages.pages.clone(), ends: pages.ends.clone(), after: last_use };
        self.copies.in_flight.insert(id.0, Copy { pages, waiter, demotion: false });
        self.counters.copies_started += 1;
        job
    }

    /// Whether a copy is in flight.
    pub fn is_copying(&self, id: u64) -> bool {
        self.copies.in_flight.contains_key(&id)
    }

    /// The copies have ended: their pages are no longer pinned, and loads land or are undone. Gives the
    /// requests that waited for a load or a resumption, or whose suspension failed; each can be planned again.
    ///
    /// # Errors
    /// A copy that is not in flight, or is named twice. Nothing is changed then.
    pub fn end_copies(&mut self, ended: &[(u64, CopyEnd)]) -> Result<Vec<SlotId>, LedgerError> {
        let mut named = HashSet::with_capacity(ended.len());
        if let Some(&(id, _)) =
            ended.iter().find(|(id, _)| !self.copies.in_flight.contains_key(id) || !named.insert(*id))
        {
            return Err(LedgerError::UnknownCopy(id));
        }
        let mut ready = Vec::new();
        for &(id, end) in ended {
            let Some(copy) = self.copies.in_flight.remove(&id) else { continue };
            self.unpin_copied(&copy, end);
            match end {
                CopyEnd::Done => self.counters.copies_finished += 1,
                CopyEnd::Failed => self.counters.copies_failed += 1,
                CopyEnd::Refused => self.counters.copies_refused += 1,
            }
            if let Some(slot) = copy.waiter
                && (self.end_load(slot, CopyId(id), end) || self.end_suspension(slot, CopyId(id), end))
            {
                ready.push(slot);
            }
        }
        Ok(ready)
    }

    /// A copy holds its pages no more, in the order in which a request lets go of blocks: deepest first, and what lies
    /// above counts as used now, so that no block is evicted before a block below it; of windows the head first.
    fn unpin_copied(&mut self, copy: &Copy, end: CopyEnd) {
        for ((group, part), &sinks) in parts(&copy.pages.ends).zip(&copy.pages.sinks) {
            let pages = &copy.pages.pages[part];
            if copy.demotion {
                let pool = &mut self.pools[group];
                for &page in pages.iter().rev() {
                    pool.unpin_in_place(page);
                    pool.set_offered(page, end == CopyEnd::Done);
                }
            } else if self.config.kind(group).forgets() {
                let (sinks, rest) = pages.split_at(sinks as usize);
                for &page in rest.iter().chain(sinks) {
                    self.pools[group].unpin(page);
                }
            } else {
                for &page in pages.iter().rev() {
                    if self.pools[group].unpin(page) {
                        refresh_ancestors(&mut self.pools, &self.tree, &self.config, group, page);
                    }
                }
            }
        }
    }
}

/// One reference less to a page that may stand for a block. If that was the last one, what lies above counts
/// as used now, so that no block is evicted before a block below it.
pub(crate) fn let_go(
    pools: &mut Pools,
    tree: &PrefixTree,
    config: &LedgerConfig,
    group: GroupId,
    page: PageId,
    last_use: Step,
) {
    pools[group].release(page, last_use);
    if pools[group].is_evictable(page) {
        refresh_ancestors(pools, tree, config, group, page);
    }
}

/// Counts the blocks above that of `page`, which just became evictable, as used now too: whatever their
/// priorities, which may be equal later, and also while copies read them. A group that needs only the end of a
/// prefix keeps that longest, so that blocks above are left where they are.
pub(crate) fn refresh_ancestors(
    pools: &mut Pools,
    tree: &PrefixTree,
    config: &LedgerConfig,
    group: GroupId,
    page: PageId,
) {
    if config.kind(group).forgets() {
        return;
    }
    let pool = &mut pools[group];
    let mut node = pool.node(page).map(|link| NodeId(link.0));
    while let Some(ParentId::Node(parent)) = node.map(|node| tree.parent(node)) {
        match tree.page(parent, group) {
            Some(page) if pool.refs(page) == 0 => pool.refresh(page),
            _ => return,
        }
        node = Some(parent);
    }
}
