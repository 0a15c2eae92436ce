//! Loads: blocks of a prompt that come from other tiers instead of being computed.
//!
//! What a request could use is asked of the tiers while `alloc` plans it, or beforehand ([`Ledger::wanted`]). The
//! request then waits: it holds the pages that the load fills, stored blocks of the device that the hit needs beside
//! them, and pages for the rest of its tokens and drafts, so that two requests that wait cannot starve each other, and
//! the forward that comes after the load fits however it ends. Of a window there are pages for that forward alone, as
//! for every chunk: the one behind the load, or the one without it if that takes more; of states, also the page that
//! the loaded one is copied to. What is not used of these is free when the load has ended. When the load has landed its blocks are published; when it failed, nothing of it is left.

use crate::blocks::{BlockReader, Prefix};
use crate::config::LedgerConfig;
use crate::copies::{CopyEnd, CopyId, CopyJob, CopyPages, let_go};
use crate::error::LedgerError;
use crate::groups::{GroupKind, joint_hit};
use crate::ledger::{Ledger, parent_after};
use crate::page_copies::Leaving;
use crate::planning::{NewPages, Scratch};
use crate::sequence::Sequence;
use crate::slots::SlotId;
use block_hash::{Chain, Guards, Identity};
use block_pool::{GroupId, PageId, Pools};
use radix_tree::{Hits, PrefixTree};
use smallvec::{SmallVec, smallvec};

/// A load that is planned, of blocks `first .. end`.
pub(crate) struct LoadPlan {
    pub(crate) first: u32,
    pub(crate) end: u32,
    /// Where each of these blocks comes from, for each group.
    pub(crate) sources: SmallVec<[Vec<Source>; 1]>,
    /// Pages for the rest of the request's tokens and drafts, in each group: known when there is room for them.
    pub(crate) rest: SmallVec<[u32; 1]>,
}

/// Where a block comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// It is not needed.
    Nowhere,
    /// It is stored on this page.
    Device(PageId),
    /// It is loaded.
    Tier,
}

impl LoadPlan {
    /// All blocks from `first` to `end`, of the only group.
    pub(crate) fn run(first: u32, end: u32) -> LoadPlan {
        let sources = smallvec![vec![Source::Tier; (end - first) as usize]];
        LoadPlan { first, end, sources, rest: SmallVec::new() }
    }

    /// Stored pages of the device that it takes in a group.
    pub(crate) fn stored(&self, group: GroupId) -> impl Iterator<Item = PageId> {
        let stored = |source: &Source| if let Source::Device(page) = source { Some(*page) } else { None };
        self.sources[group.index()].iter().filter_map(stored)
    }

    /// The blocks that are loaded in a group.
    pub(crate) fn blocks_to_load(&self, group: GroupId) -> Vec<u32> {
        let sources = (self.first..).zip(&self.sources[group.index()]);
        sources.filter(|&(_, &source)| source == Source::Tier).map(|(block, _)| block).collect()
    }

    /// How many they are.
    pub(crate) fn loaded(&self, group: GroupId) -> u32 {
        self.sources[group.index()].iter().filter(|&&source| source == Source::Tier).count() as u32
    }
}

/// A load in flight, of blocks `first .. end`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Load {
    pub(crate) copy: CopyId,
    pub(crate) first: u32,
    pub(crate) end: u32,
    /// What the request will have in each group.
    pub(crate) rows: SmallVec<[LoadRow; 1]>,
}

/// What a load holds in a group.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct LoadRow {
    /// The page of each block: one that it is loaded into, or on which it is stored; a placeholder if it is not needed.
    pub(crate) pages: Vec<PageId>,
    /// How many are loaded.
    pub(crate) loaded: u32,
    /// Pages for the rest of the request's tokens and drafts.
    pub(crate) rest: Vec<PageId>,
    /// Pages that are free when it has ended: for the forward from where the request stands now, if nothing came, and
    /// to copy a state to.
    pub(crate) spare: Vec<PageId>,
}

impl LoadRow {
    /// The pages that it holds.
    pub(crate) fn held(&self) -> impl DoubleEndedIterator<Item = PageId> {
        self.pages.iter().chain(&self.rest).chain(&self.spare).copied().filter(|&page| page != PageId::NULL)
    }
}

impl Load {
    /// Tokens that it brings to a request that stands at `position`.
    pub(crate) fn tokens(&self, position: u32, page_size: u32) -> u32 {
        self.end * page_size - position
    }
}

/// A block as other tiers know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockKey {
    /// Its hash.
    pub identity: Identity,
    /// Its second identity, which must agree too.
    pub guard: [u8; 16],
}

impl BlockKey {
    /// The key of a block of `chain` with these `guards`.
    pub fn of(chain: &Chain, guards: &Guards, block: usize) -> BlockKey {
        BlockKey { identity: chain.identity(block), guard: guards.guard(chain, block) }
    }
}

/// The blocks of a prompt as other tiers know them.
pub struct Wanted {
    /// All blocks that may be reused, from the first on.
    pub keys: Vec<BlockKey>,
    /// How many of them the request has, or `alloc` would find on the device.
    pub on_device: usize,
}

/// Which blocks the tiers have for a request: those from block `first` on, of each group.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Presence {
    /// A block.
    pub first: usize,
    /// Whether each block from there on is there, a list a group; blocks behind the end are not.
    pub groups: Vec<Vec<bool>>,
}

impl Presence {
    pub(crate) fn has(&self, group: GroupId, block: u32) -> bool {
        let index = (block as usize).checked_sub(self.first);
        index.and_then(|index| self.groups.get(group.index())?.get(index)).is_some_and(|&there| there)
    }
}

/// A load that `alloc` began.
pub struct LoadJob {
    /// The request that waits for it.
    pub slot: SlotId,
    /// The block that each page of the copy is for.
    pub blocks: Vec<usize>,
    /// The copy.
    pub copy: CopyJob,
}

impl Sequence {
    /// Whether the request has a prompt to compute and neither computes nor waits.
    pub(crate) fn may_load(&self) -> bool {
        !self.load_failed
            && self.load.is_none()
            && self.steps_out.is_empty()
            && self.position < self.prompt_end
            && !self.dummy
    }

    /// Why the request is in no batch.
    pub(crate) fn not_planned(&self, slot: SlotId) -> LedgerError {
        let waits = if self.load.is_some() { Err(LedgerError::Loading { slot }) } else { Ok(()) };
        match waits.and_then(|()| self.check_present(slot)) {
            Ok(()) => LedgerError::NotPlanned { slot },
            Err(error) => error,
        }
    }
}

impl Ledger {
    /// What the request could use of other tiers. `None` when it may not ask: it reads no cache, has no
    /// prompt to compute, computes already, had a load that failed, or was claimed without guards.
    ///
    /// # Errors
    /// An unknown slot; a request that waits for a load.
    pub fn wanted(&mut self, slot: SlotId) -> Result<Option<Wanted>, LedgerError> {
        let page_size = self.config.page_size;
        let epoch = self.epoch;
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        if sequence.load.is_some() {
            return Err(LedgerError::Loading { slot });
        }
        sequence.check_present(slot)?;
        let reads = self.config.prefix_caching && !sequence.no_read && sequence.epoch == epoch;
        if !reads || !sequence.may_load() {
            return Ok(None);
        }
        sequence.hash_known(page_size as usize);
        let limit = ((sequence.known() - 1) / page_size) as usize;
        let published = sequence.nodes.len();
        let prefix = Prefix {
            log: &sequence.tokens,
            keys: sequence.chain.keys(),
            extras: &sequence.extras,
            page_size: page_size as usize,
        };
        let parent = parent_after(sequence, &sequence.nodes);
        let held = sequence.position / page_size;
        let on_device = if self.config.is_plain() {
            let mut hits = Hits::default();
            prefix.walk(&self.tree, parent, published..limit, &mut self.reader, &mut hits);
            (published + hits.len()).max(held as usize)
        } else {
            let mut nodes = Vec::new();
            prefix.walk_nodes(&self.tree, parent, published..limit, &mut self.reader, &mut nodes);
            let most = (published + nodes.len()) as u32;
            let stored = joint_hit(&self.config.kinds(), page_size, held, most, |group, block| match (block
                as usize)
                .checked_sub(published)
            {
                None => sequence.row(group).page(block as usize).is_some(),
                Some(found) => self.tree.page(nodes[found], group).is_some(),
            });
            stored.map_or(published.max(held as usize), |end| end as usize)
        };
        let Some(guards) = &sequence.guards else { return Ok(None) };
        let keys = (0..limit).map(|block| BlockKey::of(&sequence.chain, guards, block)).collect();
        Ok(Some(Wanted { keys, on_device }))
    }

    /// What is to be loaded for a request that has, or finds on the device, all that it needs of the blocks before
    /// `first`; `limit` blocks may be reused. `has` says whether the tiers have a block. `None`: nothing.
    pub(crate) fn plan_load(
        config: &LedgerConfig,
        tree: &PrefixTree,
        reader: &mut BlockReader,
        sequence: &Sequence,
        (first, limit): (u32, u32),
        mut has: impl FnMut(GroupId, u32) -> bool,
    ) -> Option<LoadPlan> {
        let page_size = config.page_size;
        let prefix = Prefix {
            log: &sequence.tokens,
            keys: sequence.chain.keys(),
            extras: &sequence.extras,
            page_size: page_size as usize,
        };
        let (published, mut nodes) = (sequence.nodes.len(), Vec::new());
        let parent = parent_after(sequence, &sequence.nodes);
        prefix.walk_nodes(tree, parent, published..limit as usize, reader, &mut nodes);
        let stored = |group, block: u32| {
            let node = nodes.get(block as usize - published);
            node.and_then(|&node| tree.page(node, group))
        };
        let end = joint_hit(&config.kinds(), page_size, first, limit, |group, block| {
            block < first || stored(group, block).is_some() || has(group, block)
        })?;
        let source = |group: GroupId, block: u32| match stored(group, block) {
            _ if !config.kind(group).needed(end * page_size, page_size).has(block) => Source::Nowhere,
            Some(page) => Source::Device(page),
            None => Source::Tier,
        };
        let sources = |group| (first..end).map(|block| source(group, block)).collect::<Vec<_>>();
        let sources = config.group_ids().map(sources).collect();
        let plan = LoadPlan { first, end, sources, rest: SmallVec::new() };
        config.group_ids().any(|group| plan.loaded(group) > 0).then_some(plan)
    }

    /// What a load takes in place of what the newest plan takes, which is for the forward after `start`: at least as
    /// much, so that this forward fits if nothing comes. False if it is more than there could ever be: then it is not
    /// loaded.
    pub(crate) fn plan_load_pages(
        &self,
        load: &mut LoadPlan,
        slot: SlotId,
        start: u32,
        bound: Option<u32>,
        hit_end: u32,
        scratch: &mut Scratch,
    ) -> bool {
        let Some(sequence) = self.slots.get(slot) else { return false };
        let page_size = self.config.page_size;
        let drafts = sequence.draft_room([].iter());
        let most = self.config.most_tokens(bound);
        let chunk = sequence.len().min((load.end * page_size).saturating_add(most)) + drafts;
        let mut held = SmallVec::<[u32; 1]>::new();
        let first = scratch.pages.len() - self.config.groups.len();
        let mut planned: SmallVec<[NewPages; 1]> = SmallVec::new();
        for ((row, group), without) in
            sequence.rows.iter().zip(self.config.group_ids()).zip(&scratch.pages[first..])
        {
            let kind = self.config.kind(group);
            let covered = if kind.forgets() { chunk } else { sequence.len() + drafts };
            let before = (row.pages.len() as u32).max(hit_end);
            let (rest, least) = if kind.lasts() {
                (without.new, 0)
            } else if kind.is_recurrent() {
                (0, load.loaded(group) + 1) // to copy the state to
            } else {
                let copies = without.copies && self.must_copy(sequence, group, start, &mut Leaving::new());
                let rest = covered.div_ceil(page_size).saturating_sub(before.max(load.end));
                (rest, without.new + u32::from(copies))
            };
            load.rest.push(rest);
            let new = (load.loaded(group) + rest).max(least);
            planned.push(NewPages { new, copies: false });
            let needed = kind.needed(start, page_size);
            let here = if kind.lasts() {
                row.pages.len() as u32
            } else {
                needed.sinks.min(needed.from) + before.saturating_sub(needed.from)
            };
            held.push(here + load.stored(group).count() as u32 + new);
        }
        if !self.config.is_plain() && !self.pools.capacity().can_satisfy(&held) {
            return false;
        }
        scratch.pages[first..].copy_from_slice(&planned);
        for group in self.config.group_ids() {
            scratch.found.add(group, load.stored(group));
        }
        true
    }

    /// Takes the pages of a planned load, so many in each group, and pins those that it fills. The stored ones are
    /// referenced already.
    pub(crate) fn begin_load(&mut self, slot: SlotId, plan: &LoadPlan, take: &[NewPages]) -> Option<LoadJob> {
        let (mut rows, mut blocks, mut loaded) = (SmallVec::new(), Vec::new(), CopyPages::default());
        for (group, take) in self.config.group_ids().zip(take) {
            self.take(group, take.new);
            let mut taken = self.taken.iter().map(|taken| taken.page);
            let first = blocks.len();
            let mut pages = Vec::with_capacity(plan.sources[group.index()].len());
            for (block, &source) in (plan.first as usize..).zip(&plan.sources[group.index()]) {
                pages.push(match source {
                    Source::Nowhere => PageId::NULL,
                    Source::Device(page) => page,
                    Source::Tier => {
                        blocks.push(block);
                        taken.next()?
                    }
                });
            }
            let rest = taken.by_ref().take(plan.rest[group.index()] as usize).collect();
            let spare = taken.collect();
            let of_load = blocks[first..].iter().map(|&block| (block, pages[block - plan.first as usize]));
            loaded.add_group(of_load, self.config.kind(group).needed(0, self.config.page_size).sinks);
            rows.push(LoadRow { loaded: (blocks.len() - first) as u32, pages, rest, spare });
        }
        let last_step = self.slots.get(slot)?.last_step;
        self.fills.copied_to(loaded.iter());
        let copy = self.begin_copy(loaded, last_step, Some(slot));
        let page_size = self.config.page_size;
        let sequence = self.slots.get_mut(slot)?;
        let load = Load { copy: copy.id, first: plan.first, end: plan.end, rows };
        sequence.cached += load.tokens(sequence.position, page_size);
        sequence.load = Some(Box::new(load));
        Some(LoadJob { slot, blocks, copy })
    }

    /// The load of `copy` has ended. False when the request does not wait for it any more.
    pub(crate) fn end_load(&mut self, slot: SlotId, copy: CopyId, end: CopyEnd) -> bool {
        let page_size = self.config.page_size;
        let Some(sequence) = self.slots.get_mut(slot) else { return false };
        let Some(load) = sequence.load.take_if(|load| load.copy == copy) else { return false };
        if end != CopyEnd::Done {
            sequence.load_failed |= end == CopyEnd::Failed;
            undo(sequence, &load, &self.config, &mut self.pools, &self.tree);
            if sequence.epoch != self.epoch && sequence.holds_nothing() {
                sequence.join_epoch(&mut self.tree, self.epoch);
            }
            return true;
        }
        let tokens = load.tokens(sequence.position, page_size);
        let last_step = sequence.last_step;
        let (first, end) = (load.first as usize, load.end as usize);
        for (group, of_load) in self.config.group_ids().zip(load.rows) {
            let row = sequence.row_mut(group);
            if self.config.kind(group).lasts() {
                if self.config.kind(group) == GroupKind::Scratch {
                    of_load.rest.iter().for_each(|&page| self.fills.plan(group, page));
                }
                row.pages.extend(of_load.rest);
                continue;
            }
            let held = end.min(row.pages.len());
            for &page in row.pages[first.min(held)..held].iter().rev() {
                let_go(&mut self.pools, &self.tree, &self.config, group, page, last_step);
                row.version += 1;
            }
            let kept = row.pages.split_off(held);
            row.pages.truncate(first);
            row.pages.extend(of_load.pages.iter().chain(&kept));
            row.pages.extend(of_load.rest);
            of_load.spare.iter().for_each(|&page| self.pools[group].release(page, last_step));
            self.counters.loaded_blocks += u64::from(of_load.loaded);
        }
        self.counters.loaded_tokens += u64::from(tokens);
        sequence.processed = load.end * page_size;
        sequence.position = sequence.processed;
        self.publish_computed(slot); // the tiers have these blocks: no offload
        if let Some(sequence) = self.slots.get_mut(slot) {
            sequence.slide(sequence.processed, &self.config, &mut self.pools);
        }
        self.mark_reused(slot, first..end);
        true
    }
}

/// The request no longer waits: pages of the load are in flight until the copy ends, then free.
pub(crate) fn drop_load(
    sequence: &mut Sequence,
    config: &LedgerConfig,
    pools: &mut Pools,
    tree: &PrefixTree,
) {
    if let Some(load) = sequence.load.take() {
        undo(sequence, &load, config, pools, tree);
    }
}

fn undo(sequence: &mut Sequence, load: &Load, config: &LedgerConfig, pools: &mut Pools, tree: &PrefixTree) {
    sequence.cached -= load.tokens(sequence.position, config.page_size);
    for (group, row) in config.group_ids().zip(&load.rows) {
        for &page in row.rest.iter().chain(&row.spare).rev() {
            pools[group].release(page, sequence.last_step);
        }
        let (kind, end) = (config.kind(group), load.end as usize);
        let mut order: SmallVec<[usize; 16]> = (0..end).rev().collect();
        if kind.forgets() {
            order = kind.release_order(end, config.page_size).collect();
        }
        let pages = order.iter().filter_map(|block| row.pages.get(block.checked_sub(load.first as usize)?));
        for &page in pages.filter(|&&page| page != PageId::NULL) {
            let_go(pools, tree, config, group, page, sequence.last_step);
        }
    }
}
