//! Where chunks of prompts should end. Only the state that a forward ends with can be kept, so that a chunk which
//! reaches over the place of a snapshot leaves none there.

use crate::error::LedgerError;
use crate::groups::{GroupKind, Snapshots, last_boundary};
use crate::ledger::Ledger;
use crate::needs::{Next, Outlook};
use crate::slots::SlotId;

impl Ledger {
    /// Tokens that the next forward of each request should compute: as many as it may, but to the next place at most
    /// where every group with states keeps one. 0 when the request computes nothing more.
    ///
    /// # Errors
    /// As for [`Ledger::needed_blocks_one_step`].
    pub fn chunk_tokens(&mut self, batch: &[SlotId], num_tokens: &[u32]) -> Result<Vec<u32>, LedgerError> {
        let outlook = Outlook { num_tokens, ..Outlook::default() };
        self.forecast(batch, outlook, |ledger, nexts, _| {
            nexts.iter().map(|next| ledger.chunk(next)).collect()
        })
    }

    fn chunk(&self, next: &Next) -> u32 {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else { return 0 };
        let (start, page_size) = (forward.start, self.config.page_size);
        let whole = forward.end - start;
        if !self.config.has_recurrent() || !self.publishes(sequence) {
            return whole;
        }
        let kept = |&end: &u32| {
            let mut snapshots = self.config.groups.iter().filter_map(|group| match group.kind {
                GroupKind::Recurrent(snapshots) => Some(snapshots),
                _ => None,
            });
            end > start && snapshots.all(|it: Snapshots| it.includes(end, sequence.prompt_end, page_size))
        };
        let multiple = start.checked_div(self.config.chunk_alignment()).map(|passed| passed + 1);
        let multiple = multiple.map(|number| number.saturating_mul(self.config.chunk_alignment()));
        let places = [multiple, Some(last_boundary(sequence.prompt_end, page_size))];
        let nearest = places.into_iter().flatten().filter(kept).min();
        nearest.map_or(whole, |end| whole.min(end - start))
    }
}
