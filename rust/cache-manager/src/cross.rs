//! Cross attention: what a request reads of what an encoder made.
//!
//! The request takes pages for the encoder's tokens with its first forward, and has them as long as it has anything. They
//! do not grow, nobody finds them, and its forks hold the same ones.
//!
//! The KV of its own tokens depends on the encoder's input. So it takes part in the prefix cache only if that is part of
//! what its blocks are made of: if an item says from the first token on what the encoder was given. And so does a request
//! without an encoder only if no item covers its first token, or it would be found for one that has.

use crate::config::LedgerConfig;
use crate::error::LedgerError;
use crate::ledger::Ledger;
use crate::slots::SlotId;
use block_hash::ExtraKeys;

/// Whether the hashes of a request's blocks say all that its KV depends on.
pub(crate) fn says_what_it_reads(config: &LedgerConfig, encoder: u32, extras: &ExtraKeys) -> bool {
    !config.has_cross() || (encoder > 0) == extras.names_the_start()
}

impl Ledger {
    /// Writes each request's tokens of its encoder, `[batch]`, and the offsets of its computed tokens, `[batch + 1]`.
    /// The pages are those that [`Ledger::write_rows`] writes. Gives the most tokens of an encoder.
    ///
    /// # Errors
    /// A request without a step out.
    pub fn write_encoder_lengths(
        &self,
        batch: &[SlotId],
        lengths: &mut [i32],
        query_start_loc: &mut [i32],
    ) -> Result<u32, LedgerError> {
        let (mut at, mut most) = (0, 0);
        query_start_loc[0] = 0;
        for (index, &slot) in batch.iter().enumerate() {
            let (sequence, out) = self.planned(slot)?;
            let encoder = if sequence.dummy { 0 } else { sequence.encoder };
            lengths[index] = encoder.cast_signed();
            most = most.max(encoder);
            at += out.reach() - out.start;
            query_start_loc[index + 1] = at.cast_signed();
        }
        Ok(most)
    }
}
