//! What can be wrong with the input of a hash.

use crate::Algo;

/// Bad hashing input: what was given, where, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HashError {
    /// The name is not one of an algorithm.
    #[error("hash algorithm {given:?}: must be one of \"ahash64\", \"sha256\", \"sha256_64\"")]
    UnknownAlgo {
        /// The name as given.
        given: String,
    },
    /// A parent hash of the wrong size.
    #[error("parent: {given} bytes given, {algo} takes {} bytes", algo.parent_len())]
    ParentLength {
        /// The algorithm of the chain.
        algo: Algo,
        /// Bytes given.
        given: usize,
    },
    /// A span of no tokens.
    #[error("{field}[{index}]: length is 0 tokens, must be at least 1")]
    EmptySpan {
        /// `mm_items` or `prompt_embeds`.
        field: &'static str,
        /// Position in that list.
        index: usize,
    },
    /// A span that ends beyond every possible token position.
    #[error(
        "{field}[{index}]: start {start} + length {length} tokens ends beyond 2**63 - 1, \
         the last position allowed"
    )]
    SpanTooFar {
        /// `mm_items` or `prompt_embeds`.
        field: &'static str,
        /// Position in that list.
        index: usize,
        /// First token, as given.
        start: u64,
        /// Tokens, as given.
        length: u64,
    },
    /// Two overrides of one token.
    #[error("overrides: token index {token} is given twice, at most one value per token is allowed")]
    DuplicateOverride {
        /// The token index given twice.
        token: i64,
    },
    /// An override value that does not fit in 64 bits.
    #[error(
        "overrides[{index}]: value {value} for token index {token} is out of range, must be in \
         -2**63 ..= 2**64 - 1"
    )]
    OverrideValue {
        /// Position in the list of overrides.
        index: usize,
        /// The token index it is for.
        token: i64,
        /// The value as given.
        value: i128,
    },
}
