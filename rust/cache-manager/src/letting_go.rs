//! `truncate`, `preempt`, `release`: ways to give pages back.

use crate::config::LedgerConfig;
use crate::copies::let_go;
use crate::cross::says_what_it_reads;
use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::loads::drop_load;
use crate::sequence::{Released, Sequence};
use crate::slots::SlotId;
use crate::suspension::drop_suspension;
use block_pool::{GroupId, PageId, Pools, Step};
use radix_tree::PrefixTree;

impl Ledger {
    /// Drops the request's tokens after the first `len`, with their hashes and pages, and its steps out.
    /// If `len` falls into a block whose page is stored, shared or being copied, the page is given up
    /// too, and the block's tokens are computed again: such a page is never written to. So they are where a group has
    /// let go of the page. If a group has let go what the tokens from there on read, all are computed again.
    ///
    /// # Errors
    /// An unknown slot; a suspended request; more tokens than are known.
    pub fn truncate(&mut self, slot: SlotId, len: u32) -> Result<(), LedgerError> {
        let launched = self.launched_before();
        let page_size = self.config.page_size;
        let current = self.epoch;
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        let known = sequence.known();
        if len > known {
            return Err(LedgerError::OutOfRange {
                name: "length",
                given: i128::from(len),
                allowed: format!("0 to {known}, the tokens of the request"),
            });
        }
        if len == sequence.len() {
            return Ok(());
        }
        sequence.check_present(slot)?;
        sequence.drop_steps_out(launched);
        drop_load(sequence, &self.config, &mut self.pools, &self.tree);
        sequence.tokens.truncate(len as usize);
        // From an item that is cut short on, blocks have another identity than they had.
        let same = sequence.extras.truncate(len as usize).map_or(len, |token| token as u32);
        if !says_what_it_reads(&self.config, sequence.encoder, &sequence.extras) {
            (sequence.no_read, sequence.no_store) = (true, true);
        }
        let full = (same / page_size) as usize;
        sequence.chain.truncate(full);
        if let Some(guards) = &mut sequence.guards {
            guards.truncate(full);
        }
        // The page of a partial block stays only if it is the request's own and nobody else knows it.
        let own = |group| {
            let (pool, page) = (&self.pools[group], sequence.row(group).pages.get(full));
            let of_blocks = self.config.kind(group).has_blocks();
            page.filter(|_| of_blocks)
                .is_none_or(|&it| pool.refs(it) == 1 && pool.pins(it) == 0 && pool.node(it).is_none())
        };
        let stays = same == len && self.config.group_ids().all(own);
        let keep = if stays { len.div_ceil(page_size) as usize } else { full };
        let left = sequence.processed.min(if stays { len } else { full as u32 * page_size });
        let goes_on = sequence.can_go_on(left, &self.config);
        let (keep, full) = if goes_on { (keep, full) } else { (0, 0) };
        sequence.drop_states(left, &self.config, &mut self.pools);
        sequence.give_back(keep, full, &self.config, &mut self.pools, &mut self.tree, current);
        sequence.processed = left;
        sequence.position = left;
        if !goes_on {
            start_over(sequence, &mut self.tree, current);
        }
        sequence.prompt_end = sequence.prompt_end.min(len);
        sequence.prompt = sequence.prompt.min(len);
        sequence.blocked &= sequence.nodes.len() < full;
        if sequence.epoch != current && sequence.holds_nothing() {
            sequence.join_epoch(&mut self.tree, current);
        }
        Ok(())
    }

    /// Gives up all pages of every request in `batch`, the tail first; the requests stay claimed, and
    /// compute all their tokens again, but for what is still cached then.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch. Nothing is changed then.
    pub fn preempt(&mut self, batch: &[SlotId]) -> Result<(), LedgerError> {
        self.check_batch(batch)?;
        let launched = self.launched_before();
        let current = self.epoch;
        for &slot in batch {
            self.store_tail(slot);
            let Some(sequence) = self.slots.get_mut(slot) else { continue };
            sequence.drop_steps_out(launched);
            drop_load(sequence, &self.config, &mut self.pools, &self.tree);
            let units = drop_suspension(sequence, &self.config, &mut self.pools, &self.tree);
            self.units_let_go.extend(units);
            sequence.give_back(0, 0, &self.config, &mut self.pools, &mut self.tree, current);
            start_over(sequence, &mut self.tree, current);
            self.counters.preemptions += 1;
        }
        Ok(())
    }

    /// Ends every request in `batch` and gives back its pages, the tail first. Publishes nothing more.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch. Nothing is changed then.
    pub fn release(&mut self, batch: &[SlotId]) -> Result<Vec<Released>, LedgerError> {
        self.check_batch(batch)?;
        Ok(batch.iter().filter_map(|&slot| self.release_one(slot)).collect())
    }

    /// Takes back the newest claim, if nothing was planned for it: as if it had not been made. Any other
    /// request is released.
    ///
    /// # Errors
    /// An unknown slot.
    pub fn unclaim(&mut self, slot: SlotId) -> Result<Option<Released>, LedgerError> {
        let sequence = self.sequence(slot)?;
        if sequence.admitted || sequence.serial != self.counters.claims {
            return Ok(self.release_one(slot));
        }
        let sequence = self.slots.take_back(slot);
        if let Some(sequence) = sequence.as_ref().filter(|sequence| sequence.epoch == self.epoch) {
            self.tree.release_namespace(sequence.namespace);
        }
        self.counters.claims -= 1;
        Ok(sequence.map(|sequence| sequence.released()))
    }

    /// Ends every request in `batch` and leaves its pages alone: all that is safe when the books are in
    /// disorder.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch. Nothing is changed then.
    pub fn abandon(&mut self, batch: &[SlotId]) -> Result<Vec<Released>, LedgerError> {
        self.check_batch(batch)?;
        let sequences = batch.iter().filter_map(|&slot| self.slots.remove(slot));
        Ok(sequences.map(|sequence| sequence.released()).collect())
    }

    fn release_one(&mut self, slot: SlotId) -> Option<Released> {
        let tail = self.store_tail(slot);
        let mut sequence = self.slots.remove(slot)?;
        // Nothing else can be delivered under this slot: also results of the open step are dropped.
        sequence.drop_steps_out(Step(u32::MAX));
        drop_load(&mut sequence, &self.config, &mut self.pools, &self.tree);
        let units = drop_suspension(&mut sequence, &self.config, &mut self.pools, &self.tree);
        self.units_let_go.extend(units);
        sequence.give_back(0, 0, &self.config, &mut self.pools, &mut self.tree, self.epoch);
        if sequence.epoch == self.epoch {
            self.tree.release_namespace(sequence.namespace);
        }
        self.expect_orphans(slot, sequence.last_step, sequence.dropped.len() as u32);
        self.counters.releases += 1;
        Some(Released { tail, ..sequence.released() })
    }

    /// Steps before this one have been launched: their results will come.
    fn launched_before(&self) -> Step {
        Step(self.step.0 + u32::from(!self.step_open))
    }
}

/// The request has no page any more and computes all its tokens again.
pub(crate) fn start_over(sequence: &mut Sequence, tree: &mut PrefixTree, epoch: u32) {
    sequence.processed = 0;
    sequence.position = 0;
    sequence.cached = 0;
    sequence.prompt_end = sequence.len();
    sequence.blocked = false;
    if sequence.epoch != epoch {
        sequence.join_epoch(tree, epoch);
    }
}

impl Sequence {
    /// Whether every group has what the token at `position` and those after it read.
    fn can_go_on(&self, position: u32, config: &LedgerConfig) -> bool {
        let blocks = position.div_ceil(config.page_size);
        config.group_ids().filter(|&group| config.kind(group).forgets()).all(|group| {
            if !config.kind(group).has_blocks() {
                return self.has_state(position, group, config);
            }
            let needed = config.kind(group).needed(position, config.page_size);
            let row = self.row(group);
            (0..needed.sinks.min(blocks)).chain(needed.from..blocks).all(|it| row.page(it as usize).is_some())
        })
    }

    /// Lets go what the groups do not need any more, now that the tokens before `position` are computed.
    pub(crate) fn slide(&mut self, position: u32, config: &LedgerConfig, pools: &mut Pools) {
        let last_step = self.last_step;
        for group in config.group_ids().filter(|&group| config.kind(group).forgets()) {
            if config.kind(group).lasts() {
                continue;
            }
            let needed = config.kind(group).needed(position, config.page_size);
            let row = self.row_mut(group);
            let from = row.from.max(needed.sinks);
            for block in from..needed.from.min(row.pages.len() as u32) {
                let page = row.replace(block as usize, PageId::NULL);
                if page != PageId::NULL {
                    pools[group].release(page, last_step);
                }
            }
            row.from = row.from.max(needed.from);
        }
    }

    /// Gives back the pages of all blocks but the first `blocks`, and forgets the nodes of all but the first
    /// `nodes`. `epoch` is the ledger's.
    pub(crate) fn give_back(
        &mut self,
        blocks: usize,
        nodes: usize,
        config: &LedgerConfig,
        pools: &mut Pools,
        tree: &mut PrefixTree,
        epoch: u32,
    ) {
        let current = self.epoch == epoch;
        for group in config.group_ids() {
            if config.kind(group).lasts() && blocks > 0 {
                continue;
            }
            if config.kind(group).forgets() {
                self.give_back_window(blocks, group, config, pools);
            } else {
                self.give_back_tail_first(blocks, group, config, pools, tree, current);
            }
            let row = self.row_mut(group);
            if blocks < row.pages.len() {
                row.pages.truncate(blocks);
                row.from = row.from.min(blocks as u32);
                row.version += 1;
            }
        }
        if current {
            let forgotten = self.anchored.iter().rev().take_while(|&&block| block as usize >= nodes);
            for &block in forgotten {
                tree.release_anchor(self.nodes[block as usize]);
            }
        }
        self.anchored.retain(|&block| (block as usize) < nodes);
        self.nodes.truncate(nodes);
        if current {
            self.hold_end(config, tree);
        }
    }

    /// The tail first. A stored page that the sequence holds a twin of counts as used at the twin's turn, so that no
    /// block is evicted before a block below it.
    fn give_back_tail_first(
        &self,
        blocks: usize,
        group: GroupId,
        config: &LedgerConfig,
        pools: &mut Pools,
        tree: &PrefixTree,
        current: bool,
    ) {
        let (row, published) = (&self.row(group).pages, self.nodes.len());
        let mut twins = self.anchored.iter().rev().peekable();
        for block in (0..row.len()).rev() {
            if twins.peek().is_none() && block < published {
                // The rest is released in one go.
                let pages = row.get(blocks..=block).unwrap_or_default();
                pools[group].release_all(pages.iter().rev().copied(), self.last_step);
                break;
            }
            if block >= blocks {
                if block < published {
                    pools[group].release(row[block], self.last_step);
                } else {
                    // The tree may know it by way of another request that shared it.
                    let_go(pools, tree, config, group, row[block], self.last_step);
                }
            }
            if twins.next_if(|&&twin| twin as usize == block).is_some()
                && current
                && let Some(twin) = tree.page(self.nodes[block], group)
            {
                pools[group].refresh(twin);
            }
        }
    }

    fn give_back_window(&self, blocks: usize, group: GroupId, config: &LedgerConfig, pools: &mut Pools) {
        let row = self.row(group);
        let order = config.kind(group).release_order(row.pages.len(), config.page_size);
        for block in order.filter(|&block| block >= blocks) {
            if let Some(page) = row.page(block) {
                pools[group].release(page, self.last_step);
            }
        }
    }

    /// Where no group keeps all blocks, nothing but this keeps the last published block in the tree: what the
    /// request publishes next follows it.
    pub(crate) fn hold_end(&mut self, config: &LedgerConfig, tree: &mut PrefixTree) {
        let last = self.nodes.last().copied().filter(|_| config.groups.iter().all(|it| it.kind.forgets()));
        if last != self.end {
            if let Some(node) = last {
                tree.anchor(node);
            }
            if let Some(node) = std::mem::replace(&mut self.end, last) {
                tree.release_anchor(node);
            }
        }
    }
}
