//! Draft tokens: what speculative decoding adds to a step.
//!
//! A decode step of a request with `d` drafts computes its active tokens and, behind them, the `d` tokens
//! that a drafter guessed. Its result says how many guesses were right: these have KV, the newest token has
//! none yet. What a wrong guess left behind lies past the tokens with KV: it is never published, and the
//! next step writes over it. So a rejection gives nothing back.
//!
//! A step that is planned before that result is known starts where no guess was right, and is moved when
//! some were. Its pages cover the case that all were, its own drafts, and those that the drafter adds.

use crate::error::LedgerError;
use crate::sequence::{Sequence, StepOut};
use crate::slots::SlotId;
use std::cmp::Ordering;

/// Tokens past the longest sequence that a request with so many drafts may hold pages for.
pub(crate) fn slack(drafts: u32) -> u32 {
    if drafts == 0 { 0 } else { 3 * drafts + 1 }
}

impl StepOut {
    /// One past the last position that the forward writes to, drafts included.
    #[inline]
    pub(crate) fn reach(&self) -> u32 {
        self.end + self.drafts
    }
}

impl Sequence {
    /// Drafts that a step from token `start` to `end` of `len` verifies: none while the prompt is computed,
    /// and none where known tokens follow.
    #[inline]
    pub(crate) fn drafts_of(&self, start: u32, end: u32, len: u32) -> u32 {
        if start < self.prompt_end || end < len || self.dummy { 0 } else { self.drafts }
    }

    /// Tokens that there must be pages for behind the end of a step that is planned after the `older` ones.
    #[inline]
    pub(crate) fn draft_room<'a>(&self, older: impl Iterator<Item = &'a StepOut>) -> u32 {
        if self.drafts == 0 || self.dummy {
            0
        } else {
            older.map(|out| out.drafts).sum::<u32>() + 2 * self.drafts
        }
    }

    /// Tokens that the row has pages for, at least.
    pub(crate) fn reserved(&self) -> u32 {
        match self.steps_out.len().checked_sub(1) {
            Some(older) => self.position + self.draft_room(self.steps_out.iter().take(older)),
            None => self.position,
        }
    }

    /// Checks that the result of `out`, the oldest step, may bring `count` tokens.
    #[inline]
    pub(crate) fn check_result(&self, slot: SlotId, out: &StepOut, count: u32) -> Result<(), LedgerError> {
        let fits = match out.end.cmp(&self.known()) {
            Ordering::Less => count == 0,
            Ordering::Equal if out.drafts > 0 => count <= out.drafts + 1,
            Ordering::Equal | Ordering::Greater => self.unknown == 0 || count <= self.unknown,
        };
        if fits { Ok(()) } else { Err(self.bad_count(slot, out, count)) }
    }

    #[cold]
    fn bad_count(&self, slot: SlotId, out: &StepOut, count: u32) -> LedgerError {
        let (known, drafts) = (self.known(), out.drafts);
        let what = if out.end < known {
            format!(
                "{count} tokens for a step that computed up to token {} of {known} known ones: its count must be 0",
                out.end
            )
        } else if out.end == known && drafts > 0 {
            format!(
                "{count} tokens for a step that verified {drafts} drafts: at most {} may come",
                drafts + 1
            )
        } else {
            format!(
                "{count} tokens for a request whose next step is planned for {} token: deliver the tokens one a step, or plan after the delivery",
                self.unknown
            )
        };
        LedgerError::BadCount { slot, what }
    }

    /// Counts what `out`, until now the oldest step, computed as processed, with the drafts that were
    /// right if its result brings `count` tokens. A step out that was planned behind it moves by as many.
    #[inline]
    pub(crate) fn count_computed(&mut self, out: &StepOut, count: u32) {
        // While tokens are missing that the step computed, what comes are these, and says nothing of drafts.
        let tells = out.drafts > 0 && out.end == self.known();
        let accepted = if tells { count.saturating_sub(1) } else { 0 };
        if accepted > 0 {
            for later in &mut self.steps_out {
                later.start += accepted;
                later.end += accepted;
            }
            self.position += accepted;
        }
        // A hit may have moved past the end of this step meanwhile.
        self.processed = self.processed.max(out.end + accepted);
    }
}
