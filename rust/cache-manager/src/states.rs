//! States: what a request holds in a group of recurrent layers.
//!
//! A state is written over by each forward. So a request has one live page, which lies in its row at the block of the
//! newest token that is computed or on the way, and moves there from step to step; all other cells are placeholders.
//! A state that others may go on from stays on its page, and the step goes on from a copy of it: a snapshot, which is
//! published when its block is, and a page that somebody else holds. A request without a state begins with zeros.
//!
//! A state cannot be taken back: a request whose tokens are cut goes on from a state that it still holds after the very
//! token, and otherwise starts over, from the deepest snapshot that is cached then.

use crate::config::LedgerConfig;
use crate::groups::{GroupKind, state_block};
use crate::ledger::Ledger;
use crate::page_copies::{Leaving, PageCopy};
use crate::planning::{NewPages, Plan};
use crate::sequence::Sequence;
use block_pool::{GroupId, PageId, Pools};

impl Sequence {
    /// Whether the state after `position` tokens is there, if the group keeps states: none is needed at 0, the live page has that after the newest
    /// token, and other pages have that after the last token of their block.
    pub(crate) fn has_state(&self, position: u32, group: GroupId, config: &LedgerConfig) -> bool {
        let page_size = config.page_size;
        !config.kind(group).is_recurrent()
            || position == 0
            || position == self.position
            || position.is_multiple_of(page_size)
                && self.row(group).page(state_block(position, page_size) as usize).is_some()
    }

    /// Whether the page of a block, all of which is computed, is for others too: of states the snapshots are.
    #[inline]
    pub(crate) fn offers(&self, block: usize, group: GroupId, config: &LedgerConfig) -> bool {
        match config.kind(group) {
            GroupKind::Recurrent(snapshots) => {
                let position = (block as u32 + 1) * config.page_size;
                snapshots.includes(position, self.prompt_end, config.page_size)
            }
            kind => !kind.lasts(),
        }
    }

    /// A step that was planned up to token `planned` ends where the request stands now, and its state lies there.
    pub(crate) fn pull_states(&mut self, planned: u32, config: &LedgerConfig) {
        let (from, to) =
            (state_block(planned, config.page_size), state_block(self.position, config.page_size));
        let moves = from > to && !self.dummy; // padding has no state
        for group in config.group_ids().filter(|&group| moves && config.kind(group).is_recurrent()) {
            let row = self.row_mut(group);
            let live = row.replace(from as usize, PageId::NULL);
            row.replace(to as usize, live);
            row.pages.truncate(to as usize + 1);
        }
    }

    /// Gives up the states after more than `position` tokens, if a group has any.
    pub(crate) fn drop_states(&mut self, position: u32, config: &LedgerConfig, pools: &mut Pools) {
        let blocks = position.div_ceil(config.page_size) as usize;
        let last_step = self.last_step;
        for group in config.group_ids().filter(|&group| config.kind(group).is_recurrent()) {
            let row = self.row_mut(group);
            if blocks < row.pages.len() {
                row.version += 1;
                let dropped = row.pages.drain(blocks..).filter(|&page| page != PageId::NULL);
                dropped.for_each(|page| pools[group].release(page, last_step));
                row.from = row.from.min(blocks as u32);
            }
        }
    }
}

impl Ledger {
    /// What a step from token `start` on takes in a group of states, if nothing has to be copied.
    pub(crate) fn new_state(start: u32) -> u32 {
        u32::from(start == 0)
    }

    /// The request's page for a published block: a state at its end need not be stored, and is none then.
    pub(crate) fn block_page(&self, sequence: &Sequence, group: GroupId, block: usize) -> Option<PageId> {
        let stands =
            |page: &PageId| self.config.kind(group).has_blocks() || self.pools[group].node(*page).is_some();
        sequence.row(group).page(block).filter(stands)
    }

    /// Whether a planned step goes on from a copy of its state: it goes on from a hit, the state is a snapshot, or
    /// another request or a mover holds the page. The last of several holders in one batch keeps it.
    pub(crate) fn must_copy_state(
        &self,
        sequence: &Sequence,
        group: GroupId,
        plan: &Plan,
        leaving: &mut Leaving,
    ) -> bool {
        self.goes_on_from_copy(sequence, group, plan.start, !plan.hit().is_empty(), leaving)
    }

    /// The same of a step from token `start` on.
    pub(crate) fn goes_on_from_copy(
        &self,
        sequence: &Sequence,
        group: GroupId,
        start: u32,
        from_hit: bool,
        leaving: &mut Leaving,
    ) -> bool {
        if start == 0 || sequence.dummy || !self.config.kind(group).is_recurrent() {
            return false;
        }
        let block = state_block(start, self.config.page_size) as usize;
        let Some(page) = sequence.row(group).page(block).filter(|_| !from_hit) else { return true };
        self.is_snapshot(sequence, group, start) || self.is_shared(group, page, leaving)
    }

    /// Whether the request's state after `position` tokens is kept for others.
    pub(crate) fn is_snapshot(&self, sequence: &Sequence, group: GroupId, position: u32) -> bool {
        let block = position / self.config.page_size;
        self.config.prefix_caching
            && sequence.stores()
            && sequence.epoch == self.epoch
            && position.is_multiple_of(self.config.page_size)
            && sequence.offers(block as usize - 1, group, &self.config)
    }

    /// Carries out what a plan says of a group of states: the live page comes to the block of the step's last token.
    pub(crate) fn move_state(&mut self, plan: &Plan, group: GroupId, pages: NewPages) {
        let page_size = self.config.page_size;
        let (from, to) =
            (state_block(plan.start, page_size) as usize, state_block(plan.end, page_size) as usize);
        if pages.count() > 0 {
            self.take(group, 1);
        }
        let taken = self.taken.first().map(|taken| taken.page).filter(|_| pages.count() > 0);
        let stays = self.slots.get(plan.slot).and_then(|sequence| {
            let page = sequence.row(group).page(from)?;
            let known = self.pools[group].node(page).is_some();
            Some(known || self.is_snapshot(sequence, group, plan.start))
        });
        let Some(sequence) = self.slots.get_mut(plan.slot) else { return };
        let row = sequence.row_mut(group);
        let live = match (taken, row.page(from)) {
            (None, Some(_)) if from == to => return,
            (None, Some(_)) => row.replace(from, PageId::NULL),
            (None, None) => return, // padding
            (Some(fresh), None) => {
                self.fills.plan(group, fresh);
                fresh
            }
            (Some(fresh), Some(source)) => {
                let pool = &mut self.pools[group];
                pool.pin(source);
                pool.pin(fresh);
                if stays != Some(true) {
                    row.replace(from, PageId::NULL);
                    pool.release(source, self.step);
                }
                self.page_copies.push(PageCopy { group, source, destination: fresh, before: self.step });
                self.counters.page_copies += 1;
                fresh
            }
        };
        row.pages.resize(row.pages.len().max(to + 1), PageId::NULL);
        row.replace(to, live);
    }
}

impl Ledger {
    /// A row of states has the live page at its end; a page before it has the state after its block. A page that lasts
    /// is the only one.
    pub(crate) fn verify_states(&self, sequence: &Sequence, group: GroupId) -> Result<(), String> {
        let (row, number) = (sequence.row(group), group.0);
        let lasts = self.config.kind(group).lasts();
        let expected = if lasts {
            let lasting = self.config.kind(group).lasting(sequence.encoder, self.config.page_size) as usize;
            // A fork may have none before its first step.
            if sequence.steps_out.is_empty() { row.pages.len().min(lasting) } else { lasting }
        } else {
            sequence.position.div_ceil(self.config.page_size) as usize
        };
        if row.pages.len() != expected {
            return Err(format!("has {} cells in group {number}, not {expected}", row.pages.len()));
        }
        if expected > 0 && row.page(expected - 1).is_none() {
            return Err(format!("has no live page in group {number}"));
        }
        if lasts && row.held().count() < expected {
            return Err(format!("has a placeholder in group {number}"));
        }
        let kept = state_block(sequence.processed.min(sequence.known()), self.config.page_size);
        match row.held().find(|&(block, _)| !lasts && (block as u32) < kept) {
            Some((block, _)) => Err(format!("has a page for block {block} in group {number}, before {kept}")),
            None => Ok(()),
        }
    }
}
