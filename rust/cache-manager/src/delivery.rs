//! `step`: results of a forward come in.

use crate::error::LedgerError;
use crate::ledger::{Ledger, check_length};
use crate::slots::SlotId;
use block_hash::Token;
use block_pool::Step;

/// Results of released requests are waited for through this many steps: longer than any forward takes, so
/// that an engine that never delivers them leaves nothing behind.
const ORPHAN_STEPS: u32 = 1 << 16;

impl Ledger {
    /// Delivers the oldest step out of every request in `batch`: its tokens have KV now. `new_tokens`
    /// holds `counts[i]` tokens for request `i` (no counts: one each, or none at all when there are no
    /// tokens), which are appended, or fill placeholders. All but the last token that a decode step brings
    /// are drafts that were right: they have KV too. Then publishes every block all of whose tokens have
    /// KV. Results for requests released, preempted or truncated meanwhile are dropped.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; a request without a step out, or whose forward ran before page
    /// copies that were planned for it; counts that do not match; too many tokens. Nothing is changed then.
    pub fn step(
        &mut self,
        batch: &[SlotId],
        new_tokens: &[Token],
        counts: Option<&[u32]>,
    ) -> Result<(), LedgerError> {
        self.check_delivery(batch, new_tokens, counts)?;
        let one_each = u32::from(!new_tokens.is_empty());
        let mut rest = new_tokens;
        for (index, &slot) in batch.iter().enumerate() {
            let count = counts.map_or(one_each, |counts| counts[index]);
            let (tokens, after) = rest.split_at(count as usize);
            rest = after;
            self.deliver(slot, tokens);
        }
        Ok(())
    }

    fn check_delivery(
        &mut self,
        batch: &[SlotId],
        new_tokens: &[Token],
        counts: Option<&[u32]>,
    ) -> Result<(), LedgerError> {
        let expected = match counts {
            Some(counts) if counts.len() != batch.len() => {
                return Err(LedgerError::Mismatch(format!(
                    "counts has {} entries for {} requests",
                    counts.len(),
                    batch.len()
                )));
            }
            Some(counts) => counts.iter().map(|&count| u64::from(count)).sum(),
            None if new_tokens.is_empty() => 0,
            None => batch.len() as u64,
        };
        if expected != new_tokens.len() as u64 {
            return Err(LedgerError::Mismatch(format!(
                "new_tokens has {} tokens, {expected} are expected for {} requests (counts: tokens of each; default one each)",
                new_tokens.len(),
                batch.len()
            )));
        }
        self.batch_pass += 1;
        let uncopied = self.first_uncopied();
        let one_each = u32::from(!new_tokens.is_empty());
        for (index, &slot) in batch.iter().enumerate() {
            let Some(sequence) = self.slots.get_mut(slot) else {
                match self.orphans.get(&slot) {
                    None => return Err(LedgerError::UnknownSlot(slot)),
                    Some(_) if batch[..index].contains(&slot) => return Err(LedgerError::TwiceInBatch(slot)),
                    Some(_) => continue,
                }
            };
            if std::mem::replace(&mut sequence.batch_mark, self.batch_pass) == self.batch_pass {
                return Err(LedgerError::TwiceInBatch(slot));
            }
            if !sequence.dropped.is_empty() || sequence.interrupted {
                continue;
            }
            let Some(out) = sequence.steps_out.first() else {
                return Err(sequence.not_planned(slot));
            };
            if uncopied.is_some_and(|step| step <= out.step) {
                return Err(LedgerError::PageCopiesLeft { slot });
            }
            let count = counts.map_or(one_each, |counts| counts[index]);
            sequence.check_result(slot, out, count)?;
            check_length(sequence, slot, count.saturating_sub(sequence.unknown), self.config.max_seq_len)?;
        }
        Ok(())
    }

    fn deliver(&mut self, slot: SlotId, tokens: &[Token]) {
        let Some(sequence) = self.slots.get_mut(slot) else {
            return self.drop_orphan(slot);
        };
        if sequence.dropped.pop_front().is_some() || sequence.interrupted {
            self.counters.dropped_results += 1;
            return;
        }
        if sequence.steps_out.is_empty() {
            return;
        }
        let out = sequence.steps_out.remove(0);
        sequence.count_computed(&out, tokens.len() as u32);
        for &token in tokens {
            sequence.append(token);
        }
        if out.step == self.step {
            self.step_open = false;
        }
        self.publish(slot);
        self.slide(slot);
    }

    /// Lets go what the request's groups do not need any more.
    #[inline]
    pub(crate) fn slide(&mut self, slot: SlotId) {
        if self.config.is_plain() {
            return;
        }
        if let Some(sequence) = self.slots.get_mut(slot) {
            // A step that is computed and not known yet may be computed again.
            let position = sequence.processed.min(sequence.known());
            sequence.slide(position, &self.config, &mut self.pools);
        }
    }

    fn drop_orphan(&mut self, slot: SlotId) {
        if let Some((_, due)) = self.orphans.get_mut(&slot) {
            *due -= 1;
            self.counters.dropped_results += 1;
            if *due == 0 {
                self.orphans.remove(&slot);
            }
        }
    }

    /// Remembers that `due` results will still come for a slot that was just released.
    pub(crate) fn expect_orphans(&mut self, slot: SlotId, last: Step, due: u32) {
        if due > 0 {
            if self.orphans.len() >= self.orphans_swept * 2 {
                let oldest = self.step.0.saturating_sub(ORPHAN_STEPS);
                self.orphans.retain(|_, (step, _)| step.0 >= oldest);
                self.orphans_swept = self.orphans.len().max(64);
            }
            self.orphans.insert(slot, (last, due));
        }
    }
}
