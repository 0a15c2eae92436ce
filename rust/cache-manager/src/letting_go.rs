//! `truncate`, `preempt`, `release`: ways to give pages back.

use crate::copies::let_go;
use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::loads::drop_load;
use crate::sequence::{Released, Sequence};
use crate::slots::SlotId;
use crate::suspension::drop_suspension;
use block_pool::{GroupId, Pool, Step};
use radix_tree::PrefixTree;

impl Ledger {
    /// Drops the request's tokens after the first `len`, with their hashes and pages, and its steps out.
    /// If `len` falls into a block whose page is stored, shared or being copied, the page is given up
    /// too, and the block's tokens are computed again: such a page is never written to.
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
        drop_load(sequence, page_size, &mut self.pool);
        sequence.tokens.truncate(len as usize);
        // From an item that is cut short on, blocks have another identity than they had.
        let same = sequence.extras.truncate(len as usize).map_or(len, |token| token as u32);
        let full = (same / page_size) as usize;
        sequence.chain.truncate(full);
        if let Some(guards) = &mut sequence.guards {
            guards.truncate(full);
        }
        // The page of a partial block stays only if it is the request's own and nobody else knows it.
        let known =
            |page| self.pool.node(page).is_some() || self.pool.refs(page) > 1 || self.pool.pins(page) > 0;
        let shared = same < len || sequence.row.get(full).is_some_and(|&page| known(page));
        let keep = if shared { full } else { len.div_ceil(page_size) as usize };
        sequence.give_back(keep, full, &mut self.pool, &mut self.tree, current);
        sequence.processed = sequence.processed.min(if shared { full as u32 * page_size } else { len });
        sequence.position = sequence.processed;
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
        let (current, page_size) = (self.epoch, self.config.page_size);
        for &slot in batch {
            let Some(sequence) = self.slots.get_mut(slot) else { continue };
            sequence.drop_steps_out(launched);
            drop_load(sequence, page_size, &mut self.pool);
            self.units_let_go.extend(drop_suspension(sequence, &mut self.pool));
            sequence.give_back(0, 0, &mut self.pool, &mut self.tree, current);
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
        let mut sequence = self.slots.remove(slot)?;
        // Nothing else can be delivered under this slot: also results of the open step are dropped.
        sequence.drop_steps_out(Step(u32::MAX));
        drop_load(&mut sequence, self.config.page_size, &mut self.pool);
        self.units_let_go.extend(drop_suspension(&mut sequence, &mut self.pool));
        sequence.give_back(0, 0, &mut self.pool, &mut self.tree, self.epoch);
        if sequence.epoch == self.epoch {
            self.tree.release_namespace(sequence.namespace);
        }
        self.expect_orphans(slot, sequence.last_step, sequence.dropped.len() as u32);
        self.counters.releases += 1;
        Some(sequence.released())
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
    /// Gives back the pages of all blocks but the first `pages`, and forgets the nodes of all but the first
    /// `nodes`, the tail first. A stored page that the sequence holds a twin of counts as used at the twin's
    /// turn, so that no block is evicted before a block below it. `epoch` is the ledger's.
    pub(crate) fn give_back(
        &mut self,
        pages: usize,
        nodes: usize,
        pool: &mut Pool,
        tree: &mut PrefixTree,
        epoch: u32,
    ) {
        let sequence = self;
        let current = sequence.epoch == epoch;
        let published = sequence.nodes.len();
        let mut twins = sequence.anchored.iter().rev().peekable();
        for block in (0..sequence.row.len()).rev() {
            if twins.peek().is_none() && block < published {
                // The rest is released in one go.
                let pages = sequence.row.get(pages..=block).unwrap_or_default();
                pool.release_all(pages.iter().rev().copied(), sequence.last_step);
                break;
            }
            if block >= pages {
                let page = sequence.row[block];
                if block < published {
                    pool.release(page, sequence.last_step);
                } else {
                    // The tree may know it by way of another request that shared it.
                    let_go(pool, tree, page, sequence.last_step);
                }
            }
            if twins.next_if(|&&twin| twin as usize == block).is_some() && current {
                let node = sequence.nodes[block];
                if let Some(twin) = tree.page(node, GroupId::FIRST) {
                    pool.refresh(twin);
                }
                if block >= nodes {
                    tree.release_anchor(node);
                }
            }
        }
        sequence.anchored.retain(|&block| (block as usize) < nodes);
        sequence.nodes.truncate(nodes);
        if pages < sequence.row.len() {
            sequence.row.truncate(pages);
            sequence.row_version += 1;
        }
    }
}
