//! Guards: a second identity of blocks, for those who cannot compare tokens.
//!
//! A tier beyond the device finds a block by its hash and has no tokens to hold against it. A guard is
//! 128 more bits of the same inputs: equal for equal prefixes, and not to be met by chance, nor by someone
//! who makes two prefixes with one `ahash64`.

use crate::sha256;
use crate::{Algo, Chain, CpuPath, ExtraKeys, Root, Token};

const GUARD: &[u8] = b"pk1-gd";

/// The guards of one sequence's whole blocks; they grow, and are cut, with its [`Chain`].
///
/// - `sha256` and `sha256_64`: the last 16 bytes of the chain's digest. They are no part of what
///   `sha256_64` publishes.
/// - `ahash64`: the hashes of two more `ahash64` chains over the same blocks, 8 bytes big-endian each.
///   Chain `n` (0 and 1) has the root `SHA-256("pk1-gd" ‖ n ‖ secret ‖ root)`, `n` as one byte: without
///   the secret nobody can tell which blocks agree.
#[derive(Debug, Clone)]
pub struct Guards {
    /// `None` for algorithms whose digests are long enough.
    keyed: Option<Box<[Chain; 2]>>,
}

impl Guards {
    /// The guards of an empty chain of this `algo` and `root`. Stores that exchange blocks share the
    /// `secret`; the SHA family does without it.
    pub fn new(algo: Algo, root: &Root, secret: &[u8; 32]) -> Self {
        let keyed = |number: u8| {
            let message = [GUARD, &[number], secret, &root.0].concat();
            Chain::new(Algo::AHash64, &Root(sha256::digest(CpuPath::chosen(), &message)))
        };
        let keyed = match algo {
            Algo::AHash64 => Some(Box::new([keyed(0), keyed(1)])),
            Algo::Sha256 | Algo::Sha256Trunc64 => None,
        };
        Self { keyed }
    }

    /// Covers the whole blocks of `tokens`, the whole token log, as [`Chain::extend`] does.
    ///
    /// # Panics
    /// If `page_size` is 0.
    pub fn extend(&mut self, tokens: &[Token], page_size: usize, extras: &ExtraKeys) {
        for chain in self.keyed.iter_mut().flat_map(|chains| chains.iter_mut()) {
            chain.extend(tokens, page_size, extras);
        }
    }

    /// Forgets the blocks from `blocks` on, as [`Chain::truncate`] does.
    pub fn truncate(&mut self, blocks: usize) {
        for chain in self.keyed.iter_mut().flat_map(|chains| chains.iter_mut()) {
            chain.truncate(blocks);
        }
    }

    /// The guard of a block of `chain`, which was fed the same.
    ///
    /// # Panics
    /// If the block is beyond either's end, or `chain` is of an algorithm of the other kind.
    pub fn guard(&self, chain: &Chain, block: usize) -> [u8; 16] {
        if let Some(chains) = &self.keyed {
            let [high, low] = chains.each_ref().map(|chain| u128::from(chain.keys()[block]));
            return (high << 64 | low).to_be_bytes();
        }
        let digest = chain.digest(block).expect("guards of the SHA family go with a chain of it");
        *digest.last_chunk().expect("a digest has 32 bytes")
    }
}
