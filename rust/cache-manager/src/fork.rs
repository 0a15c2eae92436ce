//! `fork`: another request that goes on from where one stands, on the same pages.
//!
//! The child holds every page of its parent that has computed tokens, the partial last one too. Who writes
//! first into a page that both hold gets a copy of it (`page_copies`). What an encoder made is written no more, and
//! stays with both.

use crate::config::LedgerConfig;
use crate::error::LedgerError;
use crate::groups::GroupKind;
use crate::ledger::Ledger;
use crate::sequence::{NewSequence, Sequence};
use crate::slots::SlotId;

#[cfg(test)]
mod tests;

impl Ledger {
    /// Claims a request with the tokens, namespace and limits of the one under `slot`, and its KV. Steps
    /// out and placeholders are the parent's alone: the child stands at the last token with KV.
    ///
    /// # Errors
    /// An unknown slot; a padding request; a suspended one; no slot left. Nothing is changed then.
    pub fn fork(&mut self, slot: SlotId) -> Result<SlotId, LedgerError> {
        let parent = self.sequence(slot)?;
        if parent.dummy {
            return Err(LedgerError::Padding(slot));
        }
        parent.check_present(slot)?;
        self.check_slots()?;
        let mut child = parent.fork(self.counters.claims + 1, &self.config);
        if let Some(parent) = self.slots.get_mut(slot) {
            parent.exposed = true;
            parent.beams = parent.beams.saturating_sub(1).max(1);
        }
        self.counters.forks += 1;
        for group in self.config.group_ids() {
            for (_, page) in child.row(group).held() {
                self.pools[group].acquire(page);
            }
        }
        if child.epoch == self.epoch {
            self.tree.acquire_namespace(&child.namespace_key);
            for &block in &child.anchored {
                self.tree.anchor(child.nodes[block as usize]);
            }
            child.hold_end(&self.config, &mut self.tree);
        } else if child.holds_nothing() {
            child.join_epoch(&mut self.tree, self.epoch);
        }
        Ok(self.seat(child))
    }
}

impl Sequence {
    /// A sequence that has what this one has computed; the caller counts its references. Where a step out has written
    /// over what goes on from there, it has nothing.
    fn fork(&self, serial: u64, config: &LedgerConfig) -> Sequence {
        let page_size = config.page_size;
        // A token that is computed and not known is a placeholder too.
        let processed = self.processed.min(self.known());
        let new = NewSequence {
            tokens: self.tokens[..self.known() as usize].to_vec(),
            max_length: self.max_length,
            namespace: self.namespace_key.clone(),
            extras: self.extras.clone(),
            chain: self.chain.clone(),
            guards: self.guards.clone(),
            retention: self.retention.clone(),
            no_read: self.no_read,
            no_store: self.no_store,
            drafts: self.drafts,
            max_new_tokens: self.max_new_tokens,
            beams: 1,
            encoder: self.encoder,
        };
        let mut child = Sequence {
            exposed: true,
            prompt: self.prompt,
            prompt_end: self.prompt_end,
            admitted: self.admitted,
            // The parent's newest forward may write to what the child holds.
            last_step: self.last_step,
            ..Sequence::new(new, self.rows.len(), serial, self.namespace, self.epoch)
        };
        if !config.group_ids().all(|group| self.has_state(processed, group, config)) {
            child.prompt_end = child.len();
            return child;
        }
        let blocks = processed.div_ceil(page_size) as usize;
        for group in config.group_ids() {
            let row = self.row(group);
            *child.row_mut(group) = match config.kind(group) {
                GroupKind::Scratch => continue,
                GroupKind::Cross => row.fork(row.pages.len()),
                _ => row.fork(blocks),
            };
        }
        Sequence {
            nodes: self.nodes.clone(),
            anchored: self.anchored.clone(),
            blocked: self.blocked,
            processed,
            position: processed,
            cached: self.cached - self.load.as_ref().map_or(0, |load| load.tokens(self.position, page_size)),
            ..child
        }
    }
}
