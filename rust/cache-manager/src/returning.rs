//! `resume`: how a suspended request comes back.
//!
//! What the request would share with others when it is back, it takes at once: its blocks that are stored meanwhile, and
//! where others got further with its prompt, what they stored. These pages are neither taken from what is free, if
//! somebody holds them, nor copied into, and nobody evicts them while the copy of the rest is on its way. So what
//! forecasts count on is there.

use crate::blocks::Prefix;
use crate::config::OnDuplicate;
use crate::copies::{CopyEnd, CopyId, CopyJob, CopyPages};
use crate::error::LedgerError;
use crate::groups::{GroupKind, joint_hit};
use crate::ledger::{Ledger, parent_after};
use crate::letting_go::start_over;
use crate::row::Row;
use crate::slots::SlotId;
use crate::suspension::{BegunCopy, PrivateTier, Shape, Stage, drop_suspension};
use block_pool::{GroupId, PageId, Step};
use radix_tree::NodeId;
use smallvec::{SmallVec, smallvec};
use tiered_connector::job::UnitId;

/// How a suspended request comes back, as things are.
pub(crate) struct Return {
    /// Tokens with KV then.
    pub(crate) processed: u32,
    /// Its blocks before that, as far as the tree has them and it will have published them.
    pub(crate) nodes: Vec<NodeId>,
    /// What it will have in each group.
    pub(crate) rows: SmallVec<[ReturnRow; 1]>,
}

/// What it will have in a group.
pub(crate) struct ReturnRow {
    pub(crate) shape: Shape,
    /// Where the pages of its blocks come from.
    sources: Vec<Source>,
}

/// Where a page comes from.
#[derive(Clone, Copy)]
enum Source {
    /// The block is stored on it.
    Stored(PageId),
    /// It is taken, and filled from this unit.
    Unit(UnitId),
    /// It is taken.
    Blank,
}

impl ReturnRow {
    /// The stored blocks, with their pages.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (u32, PageId)> {
        let blocks = self.shape.held().zip(&self.sources);
        blocks.filter_map(|(block, source)| match source {
            Source::Stored(page) => Some((block as u32, *page)),
            _ => None,
        })
    }

    /// Pages that are taken.
    pub(crate) fn taken(&self) -> u32 {
        self.sources.iter().filter(|source| !matches!(source, Source::Stored(_))).count() as u32
    }
}

impl Ledger {
    /// How a suspended request would come back now; `None` if it is not set aside.
    pub(crate) fn look_back(&mut self, slot: SlotId) -> Option<Return> {
        let sequence = self.slots.get_mut(slot)?;
        let suspension = sequence.suspension.as_ref()?;
        if matches!(suspension.stage, Stage::Returning(..)) {
            return None;
        }
        let (page_size, processed) = (self.config.page_size, suspension.processed);
        let full = processed.min(sequence.known()) / page_size;
        let finds = processed < sequence.prompt_end && sequence.reads(&self.config, self.epoch);
        let limit = if finds { sequence.hash_reusable(page_size) } else { 0 };
        let sequence = self.slots.get(slot)?;
        let suspension = sequence.suspension.as_ref()?;
        let adopts = self.publishes(sequence) && self.config.on_duplicate == OnDuplicate::Adopt;
        let mut nodes: Vec<NodeId> = Vec::new();
        if finds || adopts {
            let prefix = Prefix {
                log: &sequence.tokens,
                keys: sequence.chain.keys(),
                extras: &sequence.extras,
                page_size: page_size as usize,
            };
            let blocks = 0..limit.max((full as usize).min(prefix.keys.len()));
            let root = parent_after(sequence, &[]);
            prefix.walk_nodes(&self.tree, root, blocks, &mut self.reader, &mut nodes);
        }
        // A page that opens a huge one would keep other groups out of it.
        let stored = |group, block: usize| {
            let page = nodes.get(block).and_then(|&node| self.tree.page(node, group));
            page.filter(|&page| !self.pools[group].would_open(page))
        };
        let unit = |group: GroupId, block: usize| {
            let row = &suspension.rows[group.index()];
            row.shape.index(block as u32).and_then(|index| row.units.get(index).copied())
        };
        let kinds: SmallVec<[GroupKind; 4]> = self.config.groups.iter().map(|group| group.kind).collect();
        let most = limit.min(nodes.len()) as u32;
        let hit = joint_hit(&kinds, page_size, processed / page_size, most, |group, block| {
            let own = block < full && !self.config.kind(group).is_recurrent();
            stored(group, block as usize).is_some() || own && unit(group, block as usize).is_some()
        });
        let row = |group: GroupId| {
            let (kind, before) = (self.config.kind(group), &suspension.rows[group.index()].shape);
            let Some(end) = hit.filter(|_| !kind.lasts()) else {
                // The live state is written to, unless it is one that is kept.
                let kept = kind.has_blocks()
                    || kind.is_recurrent() && processed > 0 && self.is_snapshot(sequence, group, processed);
                let adopted =
                    |block| stored(group, block).filter(|_| adopts && kept && block < full as usize);
                let units = &suspension.rows[group.index()].units;
                let sources = before.held().enumerate().map(|(index, block)| match adopted(block) {
                    Some(page) => Source::Stored(page),
                    None => units.get(index).map_or(Source::Blank, |&unit| Source::Unit(unit)),
                });
                return ReturnRow { shape: *before, sources: sources.collect() };
            };
            let needed = kind.needed(end * page_size, page_size);
            let shape = Shape { sinks: needed.sinks.min(needed.from), from: needed.from, blocks: end };
            let source = |block| {
                let own = || unit(group, block).map_or(Source::Blank, Source::Unit);
                stored(group, block).map_or_else(own, Source::Stored)
            };
            ReturnRow { shape, sources: shape.held().map(source).collect() }
        };
        let rows = self.config.group_ids().map(row).collect();
        let processed = hit.map_or(processed, |end| end * page_size);
        nodes.truncate(if self.publishes(sequence) { (processed / page_size) as usize } else { 0 });
        Some(Return { processed, nodes, rows })
    }

    /// Brings every suspended request in `batch` back: it takes what is stored of it, pages for the rest, and copies its
    /// KV into these. The request waits for the copy; then it stands where it stood, or further where others stored
    /// more of its prompt, and its blocks are published.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; a request that is not suspended, or whose pages are still
    /// copied out; a tier that takes no copies; [`LedgerError::InsufficientBlocks`] naming the first request
    /// that did not fit. Nothing is changed then.
    pub fn resume(
        &mut self,
        tier: &mut dyn PrivateTier,
        batch: &[SlotId],
    ) -> Result<Vec<BegunCopy>, LedgerError> {
        self.check_batch(batch)?;
        self.check_awake()?;
        let groups = self.config.groups.len();
        // Of each group, the pages that are taken, and the idle ones that are found.
        let mut demand: SmallVec<[u32; 1]> = smallvec![0; groups];
        let mut claimed: SmallVec<[u32; 1]> = smallvec![0; groups];
        self.config.group_ids().for_each(|group| self.pools[group].open_marks());
        let mut returns = Vec::with_capacity(batch.len());
        for &slot in batch {
            let sequence = self.sequence(slot)?;
            match sequence.suspension.as_ref().map(|suspension| &suspension.stage) {
                None => return Err(LedgerError::NotSuspended { slot }),
                Some(Stage::Away) => {}
                Some(_) => sequence.check_present(slot)?,
            }
            let Some(back) = self.look_back(slot) else { continue };
            let before: SmallVec<[u32; 1]> = demand.iter().zip(&claimed).map(|(a, b)| a + b).collect();
            for (group, row) in self.config.group_ids().zip(&back.rows) {
                let pool = &mut self.pools[group];
                let idle = row.stored().filter(|&(_, page)| pool.is_evictable(page) && pool.mark(page));
                claimed[group.index()] += idle.count() as u32;
                demand[group.index()] += row.taken();
            }
            returns.push((slot, back));
            let all: SmallVec<[u32; 1]> = demand.iter().zip(&claimed).map(|(a, b)| a + b).collect();
            if self.pools.can_satisfy(&all) {
                continue;
            }
            let short = |&group: &GroupId| all[group.index()] > self.pools.available(group);
            let room = match self.config.group_ids().find(short) {
                Some(group) => {
                    let (before, all) = (before[group.index()], all[group.index()]);
                    self.room(group, all - before, self.pools.available(group) - before)
                }
                None => self.huge_room(&all),
            };
            return Err(LedgerError::InsufficientBlocks { slot, room });
        }
        tier.check_open().map_err(|why| LedgerError::NoTier(why.to_string()))?;
        self.events.seal();
        // All of it first, so that no page taken for one request is one that another finds.
        for (_, back) in &returns {
            for (group, row) in self.config.group_ids().zip(&back.rows) {
                row.stored().for_each(|(_, page)| self.pools[group].acquire(page));
            }
        }
        if self.config.huge_pages.is_some() {
            self.left = self.left_beside(&demand);
        }
        let mut begun = Vec::with_capacity(batch.len());
        for (slot, back) in returns {
            let Some((units, job)) = self.bring_back(slot, &back) else { continue };
            match tier.load_private(&units, &job) {
                Ok(completion) => begun.push(BegunCopy { slot, job, completion }),
                Err(_) => drop(self.end_copies(&[(job.id.0, CopyEnd::Refused)])?),
            }
        }
        Ok(begun)
    }

    /// Takes the pages of a suspended request, for which there is room; it has those that it found.
    fn bring_back(&mut self, slot: SlotId, back: &Return) -> Option<(Vec<UnitId>, CopyJob)> {
        let last_step = self.slots.get(slot)?.last_step;
        let (mut units, mut rows, mut copied) = (Vec::new(), SmallVec::new(), CopyPages::default());
        for (group, row) in self.config.group_ids().zip(&back.rows) {
            self.take(group, row.taken());
            let (mut taken, mut pages) = (self.taken.iter(), Vec::with_capacity(row.sources.len()));
            let mut filled = Vec::new();
            for (block, source) in row.shape.held().zip(&row.sources) {
                let page = match source {
                    Source::Stored(page) => *page,
                    _ => taken.next()?.page,
                };
                if let Source::Unit(unit) = source {
                    units.push(*unit);
                    filled.push((block, page));
                }
                pages.push(page);
            }
            copied.add_group(filled, self.config.kind(group).needed(0, self.config.page_size).sinks);
            rows.push(pages);
        }
        self.fills.copied_to(copied.iter());
        let job = self.begin_copy(copied, last_step, Some(slot));
        let sequence = self.slots.get_mut(slot)?;
        let suspension = sequence.suspension.as_mut()?;
        let adopts = back.processed == suspension.processed;
        sequence.cached += back.processed - suspension.processed;
        suspension.processed = back.processed;
        for (shelved, row) in suspension.rows.iter_mut().zip(&back.rows) {
            shelved.shape = row.shape;
        }
        suspension.stage = Stage::Returning(job.id, rows);
        if adopts {
            let adopted: usize = back.rows.iter().map(|row| row.stored().count()).sum();
            self.counters.adopted_blocks += adopted as u64;
        }
        Some((units, job))
    }

    /// A copy of a suspended request has ended. True when the request can be planned now.
    pub(crate) fn end_suspension(&mut self, slot: SlotId, copy: CopyId, end: CopyEnd) -> bool {
        let Some(sequence) = self.slots.get_mut(slot) else { return false };
        let Some(suspension) = sequence.suspension.as_mut().filter(|it| it.copy() == Some(copy)) else {
            return false;
        };
        if end != CopyEnd::Done {
            let units = drop_suspension(sequence, &self.config, &mut self.pools, &self.tree);
            self.units_let_go.extend(units);
            sequence.drop_steps_out(Step(0)); // none is out, but tokens may be due
            start_over(sequence, &mut self.tree, self.epoch);
            self.counters.suspensions_lost += 1;
            return true;
        }
        let Stage::Returning(_, pages) = std::mem::replace(&mut suspension.stage, Stage::Away) else {
            return false;
        };
        let Some(suspension) = sequence.suspension.take() else { return false };
        for ((row, shelved), pages) in sequence.rows.iter_mut().zip(&suspension.rows).zip(pages) {
            *row = shelved.shape.row(&pages, row.version + 1);
        }
        sequence.processed = suspension.processed;
        sequence.position = suspension.processed;
        sequence.slide(suspension.processed, &self.config, &mut self.pools);
        self.units_let_go.extend(suspension.units());
        self.counters.resumptions += 1;
        self.publish_computed(slot); // the tiers were offered these blocks: no offload
        true
    }
}

impl Shape {
    /// A row of it on these pages.
    fn row(&self, pages: &[PageId], version: u32) -> Row {
        let mut row = Row { pages: vec![PageId::NULL; self.blocks as usize], version, from: 0 };
        for (block, &page) in self.held().zip(pages) {
            row.pages[block] = page;
        }
        row
    }
}
