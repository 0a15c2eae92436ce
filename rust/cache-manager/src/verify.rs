//! The ledger's books: checked, hashed, and printed.

use crate::ledger::Ledger;
use crate::page_copies::PageCopy;
use crate::sequence::Sequence;
use block_pool::{GroupFault, GroupId, NodeLink, PageFault, PageId};
use radix_tree::{NamespaceId, NodeId, ParentId, TreeFault};
use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use thiserror::Error;

#[cfg(test)]
mod tests;

/// Most evictable pages that [`Ledger::debug_dump`] lists.
const MOST_SHOWN: usize = 32;

/// What [`Ledger::verify`] found broken first.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum LedgerFault {
    /// A page.
    #[error(transparent)]
    Page(#[from] PageFault),
    /// A page of a group.
    #[error(transparent)]
    Group(#[from] GroupFault),
    /// A node of the prefix tree.
    #[error(transparent)]
    Tree(#[from] TreeFault),
    /// A request.
    #[error("slot {slot}: {what}")]
    Sequence {
        /// Its slot.
        slot: u32,
        /// What is wrong with it.
        what: String,
    },
    /// A unit of a tier.
    #[error("unit {0}: two requests hold it")]
    Unit(u32),
    /// The log of events.
    #[error("event {id}: {what}")]
    Event {
        /// Its id.
        id: u64,
        /// What is wrong with it.
        what: &'static str,
    },
}

impl Ledger {
    /// Checks that every page is in one state, that references, pins and nodes add up from both sides,
    /// that sequences are sound, that no block is evicted before a block below it, and that events have
    /// no gaps.
    ///
    /// # Errors
    /// The first page, node, request or event that breaks the books.
    pub fn verify(&self) -> Result<(), LedgerFault> {
        self.pools.verify()?;
        let mut refs: HashMap<(GroupId, PageId), u32> = HashMap::new();
        let mut anchors: HashMap<NodeId, u32> = HashMap::new();
        let mut holders: HashMap<NamespaceId, u32> = HashMap::new();
        for (slot, sequence) in self.slots.iter() {
            self.verify_sequence(sequence).map_err(|what| LedgerFault::Sequence { slot: slot.0, what })?;
            for (group, page) in sequence.suspension.iter().flat_map(|suspension| suspension.pages()) {
                *refs.entry((group, page)).or_default() += 1;
            }
            for group in self.config.group_ids() {
                let loading = sequence.load.iter().flat_map(|load| load.rows[group.index()].held());
                for page in sequence.row(group).held().map(|(_, page)| page).chain(loading) {
                    *refs.entry((group, page)).or_default() += 1;
                }
            }
            let load = sequence.load.as_ref().map(|load| load.copy);
            let awaited = load.or(sequence.suspension.as_ref().and_then(|suspension| suspension.copy()));
            if let Some(awaited) = awaited
                && self.copies.in_flight.get(&awaited.0).is_none_or(|copy| copy.waiter != Some(slot))
            {
                let what = "waits for a copy that is not in flight".into();
                return Err(LedgerFault::Sequence { slot: slot.0, what });
            }
            if sequence.epoch == self.epoch {
                *holders.entry(sequence.namespace).or_default() += 1;
                for &block in &sequence.anchored {
                    *anchors.entry(sequence.nodes[block as usize]).or_default() += 1;
                }
                if let Some(end) = sequence.end {
                    *anchors.entry(end).or_default() += 1;
                }
            }
        }
        for (&slot, &(_, due)) in &self.orphans {
            if due == 0 || self.slots.get(slot).is_some() {
                let what = format!("{due} results are due for the request that was released");
                return Err(LedgerFault::Sequence { slot: slot.0, what });
            }
        }
        if let Some([(_, unit), _]) = self.units_held().array_windows().find(|[a, b]| a == b) {
            return Err(LedgerFault::Unit(unit.0));
        }
        self.verify_writers()?;
        for &held in self.pins.pages.values().flatten() {
            *refs.entry(held).or_default() += 1;
        }
        let mut pins: HashMap<(GroupId, PageId), u32> = HashMap::new();
        let copied = self.copies.in_flight.values().flat_map(|copy| copy.pages.iter());
        let planned = self.page_copies.iter();
        let planned = planned.flat_map(|copy| [copy.source, copy.destination].map(|page| (copy.group, page)));
        for pinned in copied.chain(planned) {
            *pins.entry(pinned).or_default() += 1;
        }
        self.tree.verify(&anchors, &holders)?;
        for group in self.config.group_ids() {
            self.verify_pages(group, &refs, &pins)?;
        }
        self.verify_exposed()?;
        let page_size = self.config.page_size as usize;
        self.events.verify(page_size).map_err(|(id, what)| LedgerFault::Event { id, what })?;
        self.config.group_ids().try_for_each(|group| self.verify_eviction_order(group))
    }

    /// References and pins of a group's pages add up, and pages and nodes lead to each other.
    fn verify_pages(
        &self,
        group: GroupId,
        refs: &HashMap<(GroupId, PageId), u32>,
        pins: &HashMap<(GroupId, PageId), u32>,
    ) -> Result<(), LedgerFault> {
        let pool = &self.pools[group];
        for page in (1..=pool.used()).map(PageId) {
            let count = |held: &HashMap<_, u32>| held.get(&(group, page)).copied().unwrap_or(0);
            let (held, pinned) = (count(refs), count(pins));
            if pool.refs(page) != held {
                let what = format!("counts {} references, requests hold {held}", pool.refs(page));
                return Err(PageFault::new(page, what).into());
            }
            if pool.pins(page) != pinned {
                let what = format!("counts {} pins, copies hold {pinned}", pool.pins(page));
                return Err(PageFault::new(page, what).into());
            }
            if let Some(link) = pool.node(page)
                && self.tree.page(NodeId(link.0), group) != Some(page)
            {
                let what = format!("its node {} does not lead back to it", link.0);
                return Err(PageFault::new(page, what).into());
            }
        }
        for node in self.tree.iter() {
            if let Some(page) = self.tree.page(node, group)
                && pool.node(page) != Some(NodeLink(node.0))
            {
                return Err(TreeFault { node, what: format!("its {page} does not lead back to it") }.into());
            }
        }
        Ok(())
    }

    fn verify_sequence(&self, sequence: &Sequence) -> Result<(), String> {
        let page_size = self.config.page_size;
        if sequence.steps_out.len() > 2 {
            return Err(format!("{} steps are out", sequence.steps_out.len()));
        }
        let mut end = 0;
        for out in &sequence.steps_out {
            if out.start < end || out.end <= out.start {
                return Err(format!("a step out computes {} to {} after {end}", out.start, out.end));
            }
            if out.drafts != 0 && (out.drafts != sequence.drafts || out.start < sequence.prompt_end) {
                return Err(format!(
                    "a step out from token {} verifies {} drafts; the request has {} from token {} on",
                    out.start, out.drafts, sequence.drafts, sequence.prompt_end
                ));
            }
            end = out.end;
        }
        let due = if sequence.steps_out.is_empty() { sequence.processed } else { end };
        if sequence.position != due || sequence.processed > due || due > sequence.len() {
            let (position, processed, len) = (sequence.position, sequence.processed, sequence.len());
            return Err(format!(
                "of {len} tokens, {processed} are processed, its steps end at {due}, not at {position}"
            ));
        }
        if sequence.load.is_some() && !sequence.steps_out.is_empty() {
            return Err("computes while it waits for a load".into());
        }
        if sequence.suspension.is_some() && !sequence.is_set_aside() {
            return Err("is suspended and holds pages, nodes, steps or a position".into());
        }
        if sequence.dummy {
            return if sequence.holds_no_page() {
                Ok(())
            } else {
                Err("a padding request holds pages".into())
            };
        }
        for group in self.config.group_ids() {
            self.verify_row(sequence, group)?;
        }
        if sequence.nodes.len() * page_size as usize > sequence.processed as usize {
            return Err(format!(
                "{} blocks are published, {} tokens processed",
                sequence.nodes.len(),
                sequence.processed
            ));
        }
        let anchored = &sequence.anchored;
        if !anchored.is_sorted_by(|a, b| a < b)
            || anchored.last().is_some_and(|&block| block as usize >= sequence.nodes.len())
        {
            return Err(format!("blocks {anchored:?} of {} are anchored", sequence.nodes.len()));
        }
        if sequence.chain.len() > (sequence.known() / page_size) as usize {
            return Err(format!("{} hashes for {} known tokens", sequence.chain.len(), sequence.known()));
        }
        if sequence.epoch != self.epoch {
            return Ok(());
        }
        let mut parent = ParentId::Root(sequence.namespace);
        for (block, &node) in sequence.nodes.iter().enumerate() {
            if self.tree.parent(node) != parent {
                return Err(format!("block {block} does not follow the block before it in the tree"));
            }
            let anchored = sequence.anchored.binary_search(&(block as u32)).is_ok();
            for group in self.config.group_ids() {
                let held = self.block_page(sequence, group, block);
                if !anchored && held.is_some() && self.tree.page(node, group) != held {
                    return Err(format!("block {block} is on another page in the tree"));
                }
            }
            parent = ParentId::Node(node);
        }
        Ok(())
    }

    /// A row has a page for each block that the group needs, and for all that is going to be computed.
    fn verify_row(&self, sequence: &Sequence, group: GroupId) -> Result<(), String> {
        let page_size = self.config.page_size;
        let row = sequence.row(group);
        if !self.config.kind(group).has_blocks() {
            return self.verify_states(sequence, group);
        }
        if row.pages.len() < sequence.reserved().div_ceil(page_size) as usize {
            return Err(format!("{} pages do not hold {} tokens", row.pages.len(), sequence.reserved()));
        }
        let kept = sequence.processed.min(sequence.known());
        let needed = self.config.kind(group).needed(kept, page_size);
        for (block, &page) in row.pages.iter().enumerate() {
            if (page != PageId::NULL) != needed.has(block as u32) {
                let (group, what) = (group.0, if page == PageId::NULL { "no page" } else { "a page" });
                return Err(format!("has {what} for block {block} in group {group}, at token {kept}"));
            }
        }
        Ok(())
    }

    /// A page that a step out writes to belongs to one request's steps, and the tree does not know it.
    fn verify_writers(&self) -> Result<(), LedgerFault> {
        let mut writers: HashMap<(GroupId, PageId), u32> = HashMap::new();
        for (slot, sequence) in self.slots.iter() {
            let Some(first) = sequence.steps_out.first() else { continue };
            // A hit may have taken the place of blocks that an older step still writes.
            let block = sequence.nodes.len().max((first.start / self.config.page_size) as usize);
            for group in self.config.group_ids() {
                let pages = &sequence.row(group).pages[..];
                let written = match self.config.kind(group) {
                    kind if kind.is_recurrent() => pages.last().map(std::slice::from_ref),
                    kind if kind.lasts() => None,
                    _ => pages.get(block..),
                };
                for &page in written.unwrap_or_default() {
                    let other = writers.insert((group, page), slot.0);
                    if other.is_some() || self.pools[group].node(page).is_some() {
                        let what = format!("slot {} writes to it, and others read it", slot.0);
                        return Err(PageFault::new(page, what).into());
                    }
                }
            }
        }
        Ok(())
    }

    /// The page that a request's next step first writes to is its own, unless it knows better.
    fn verify_exposed(&self) -> Result<(), LedgerFault> {
        for (slot, sequence) in self.slots.iter().filter(|(_, sequence)| !sequence.exposed) {
            let block = (sequence.position / self.config.page_size) as usize;
            for group in self.config.group_ids().filter(|&group| self.config.kind(group).has_blocks()) {
                let Some(page) = sequence.row(group).page(block) else { continue };
                let pool = &self.pools[group];
                if pool.refs(page) > 1 || pool.pins(page) > 0 || pool.node(page).is_some() {
                    let what =
                        format!("{page}, which it writes to next, is held by others, and it does not know");
                    return Err(LedgerFault::Sequence { slot: slot.0, what });
                }
            }
        }
        Ok(())
    }

    /// At equal priority an evictable block goes before the evictable block above it, where all blocks are needed.
    fn verify_eviction_order(&self, group: GroupId) -> Result<(), LedgerFault> {
        if self.config.kind(group).forgets() {
            return Ok(());
        }
        let pool = &self.pools[group];
        let order: HashMap<PageId, usize> = pool.eviction_order().zip(0..).collect();
        for (&page, &rank) in &order {
            let Some(node) = pool.node(page) else { continue };
            let ParentId::Node(parent) = self.tree.parent(NodeId(node.0)) else { continue };
            let Some(above) = self.tree.page(parent, group) else { continue };
            if pool.priority(page) == pool.priority(above)
                && order.get(&above).is_some_and(|&above| above < rank)
            {
                return Err(PageFault::new(
                    above,
                    format!("would be evicted before {page}, a block below it"),
                )
                .into());
            }
        }
        Ok(())
    }

    /// A hash of the whole state, list orders included; counters, hashes not asked for yet and scratch
    /// memory are left out. Equal before and after a call that fails.
    pub fn fingerprint(&self) -> u64 {
        let Ledger {
            pools,
            tree,
            slots,
            copies,
            page_copies,
            step,
            step_open,
            step_joined,
            epoch,
            asleep,
            now,
            has_clock,
            orphans,
            events,
            evicted,
            config: _,
            counters: _,
            batch_pass: _,
            orphans_swept: _,
            reader: _,
            admission: _,
            pass: _,
            taken: _,
            left: _,
            most_blocks_alone: _,
            fills: _, // of pages that were taken
            pins,
            offloads: _,     // their copies are in flight
            units_let_go: _, // on their way to the tier
            published: _,
            demotion,
        } = self;
        let mut hasher = DefaultHasher::new();
        (step, step_open, step_joined, epoch, asleep, now.to_bits(), has_clock).hash(&mut hasher);
        pools.fingerprint(&mut hasher);
        tree.fingerprint(&mut hasher);
        slots.free().for_each(|index| index.hash(&mut hasher));
        for (slot, sequence) in slots.iter() {
            slot.hash(&mut hasher);
            sequence.fingerprint(&mut hasher);
        }
        copies.fingerprint(&mut hasher);
        demotion.ahead.hash(&mut hasher);
        pins.hash(&mut hasher);
        page_copies.hash(&mut hasher);
        let mut orphans: Vec<_> = orphans.iter().collect();
        orphans.sort_unstable();
        orphans.hash(&mut hasher);
        events.fingerprint(&mut hasher);
        evicted.fingerprint(&mut hasher);
        hasher.finish()
    }

    /// The state as text, for people.
    pub fn debug_dump(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let open = if self.step_open { " (open)" } else { "" };
        let _ = writeln!(text, "step {}{open}, epoch {}", self.step.0, self.epoch);
        for group in self.config.group_ids() {
            let (pool, kind) = (&self.pools[group], self.config.kind(group));
            if self.config.groups.len() > 1 {
                let _ = write!(text, "group {} ({kind:?}), ", group.0);
            }
            let _ = writeln!(
                text,
                "pages: {} total, {} pristine, {} evictable, {} in flight; {} cached blocks",
                pool.total(),
                pool.pristine(),
                pool.evictable(),
                pool.in_flight(),
                self.tree.resident(group),
            );
            let next: Vec<u32> = pool.eviction_order().take(MOST_SHOWN).map(|page| page.0).collect();
            let _ = writeln!(text, "evictable pages, the next to go first: {next:?}");
        }
        let ids = |pages: &[PageId]| pages.iter().map(|page| page.0).collect::<Vec<_>>();
        for (slot, sequence) in self.slots.iter() {
            let mut pages = sequence.rows.iter().map(|row| format!("{:?}", ids(&row.pages)));
            let pages = pages.by_ref().collect::<Vec<_>>().join(", ");
            let _ = writeln!(
                text,
                "slot {}: {} tokens ({} unknown), {} processed, {} cached, {} blocks published, steps out {:?}, pages {pages}",
                slot.0,
                sequence.len(),
                sequence.unknown,
                sequence.processed,
                sequence.cached,
                sequence.nodes.len(),
                sequence.steps_out.iter().map(|out| (out.step.0, out.start, out.end)).collect::<Vec<_>>(),
            );
        }
        for (slot, sequence) in self.slots.iter() {
            if let Some(suspension) = &sequence.suspension {
                let _ = writeln!(text, "slot {}: {suspension}", slot.0);
            }
        }
        for (pin, pages) in &self.pins.pages {
            let pages: Vec<PageId> = pages.iter().map(|&(_, page)| page).collect();
            let _ = writeln!(text, "pin {pin}: pages {:?}", ids(&pages));
        }
        for (id, copy) in &self.copies.in_flight {
            let what = copy.waiter.map_or("reads".into(), |slot| format!("for slot {slot},"));
            let _ = writeln!(
                text,
                "copy {id}: {what} pages {:?}",
                copy.pages.iter().map(|(_, page)| page.0).collect::<Vec<_>>()
            );
        }
        for PageCopy { source, destination, .. } in &self.page_copies {
            let _ = writeln!(text, "planned: {source} is copied to {destination}");
        }
        text
    }
}
