//! `shorten`: a planned forward of a prompt computes less than was planned.

use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::sequence::StepOut;
use crate::slots::SlotId;

impl Ledger {
    /// The forward that is planned for each request in the open step computes `num_tokens[i]` tokens instead of more,
    /// for when hits turned out shorter than a scheduler had thought. The pages stay with the request, whose next chunk
    /// needs them.
    ///
    /// # Errors
    /// A slot that is unknown or twice in the batch; as many numbers as requests are not given; a request without a
    /// forward in the open step, whose prompt is computed already, or whose forward computes fewer tokens; 0 tokens.
    /// Nothing is changed then.
    pub fn shorten(&mut self, batch: &[SlotId], num_tokens: &[u32]) -> Result<(), LedgerError> {
        if num_tokens.len() != batch.len() {
            return Err(LedgerError::Mismatch(format!(
                "num_tokens has {} entries for {} requests",
                num_tokens.len(),
                batch.len()
            )));
        }
        self.check_batch(batch)?;
        for (&slot, &tokens) in batch.iter().zip(num_tokens) {
            self.check_shorter(slot, tokens)?;
        }
        for (&slot, &tokens) in batch.iter().zip(num_tokens) {
            let Some(sequence) = self.slots.get_mut(slot) else { continue };
            let Some(StepOut { start, end, .. }) = sequence.steps_out.last_mut() else { continue };
            let planned = std::mem::replace(end, *start + tokens);
            sequence.position = *end;
            sequence.pull_states(planned, &self.config);
        }
        Ok(())
    }

    fn check_shorter(&self, slot: SlotId, tokens: u32) -> Result<(), LedgerError> {
        let sequence = self.sequence(slot)?;
        let refused = |what: String| Err(LedgerError::NotShortened { slot, what });
        match sequence.steps_out.last() {
            Some(out) if self.step_open && out.step == self.step => {
                let planned = out.end - out.start;
                if out.start >= sequence.prompt_end {
                    refused("its prompt is computed: a decode step is as short as can be".into())
                } else if tokens == 0 || tokens > planned {
                    refused(format!(
                        "num_tokens={tokens}: must be 1 to {planned}, the tokens that are planned"
                    ))
                } else {
                    Ok(())
                }
            }
            _ => refused(
                "has no forward in the open step; only what alloc() planned just now can be shortened".into(),
            ),
        }
    }
}
