//! One sequence's chain of block hashes.

use std::ops::Range;

use crate::ahash::AHash;
use crate::sha256::{self, Digest};
use crate::{Algo, CpuPath, ExtraKeys, HashError, Identity, Root, Token};

/// Goes between the tokens and the extra keys in a block's message.
///
/// A message with extra keys cannot be a plain one: plain messages are a multiple of 4 bytes long
/// (int32 tokens), the extra keys' records are too, and this string is 6 bytes, so a message with
/// extra keys is 2 modulo 4 long, whatever its page size.
const EXTRA_KEYS: &[u8] = b"pk1-xk";

/// The hashes of one sequence's whole blocks, from the first on.
///
/// Grows with the sequence's token log: each token is hashed once, however the log was fed. A
/// trailing partial block has no hash.
#[derive(Debug, Clone)]
pub struct Chain {
    algo: Algo,
    links: Links,
    keys: Vec<u64>, // one per block
}

/// What continues the chain.
#[derive(Debug, Clone)]
enum Links {
    /// The values are the chain's keys.
    AHash {
        hasher: AHash,
        first_parent: u64,
    },
    Sha {
        path: CpuPath,
        first_parent: Digest,
        digests: Vec<Digest>,
    },
}

impl Chain {
    /// An empty chain.
    pub fn new(algo: Algo, root: &Root) -> Self {
        let links = match algo {
            Algo::AHash64 => Links::AHash { hasher: AHash::new(root), first_parent: 0 },
            Algo::Sha256 | Algo::Sha256Trunc64 => {
                Links::Sha { path: CpuPath::chosen(), first_parent: root.0, digests: Vec::new() }
            }
        };
        Self { algo, links, keys: Vec::new() }
    }

    /// An empty chain that continues `parent`, another chain's last hash.
    ///
    /// For the SHA family the parent replaces the root, so seed and salt have no effect; for
    /// `ahash64` the root still keys the hasher.
    ///
    /// # Errors
    /// A parent that is not [`Algo::parent_len`] bytes: 8 big-endian for `ahash64`, 32 for the SHA
    /// family (also for `sha256_64`, whose 8-byte identity does not determine the chain).
    pub fn with_parent(algo: Algo, root: &Root, parent: &[u8]) -> Result<Self, HashError> {
        let wrong_length = |_| HashError::ParentLength { algo, given: parent.len() };
        let mut chain = Self::new(algo, root);
        match &mut chain.links {
            Links::AHash { first_parent, .. } => {
                *first_parent = u64::from_be_bytes(parent.try_into().map_err(wrong_length)?);
            }
            Links::Sha { first_parent, .. } => {
                *first_parent = parent.try_into().map_err(wrong_length)?;
            }
        }
        Ok(chain)
    }

    /// The same chain, computed by other instructions from here on; its hashes do not change.
    #[must_use]
    pub fn on(mut self, cpu: CpuPath) -> Self {
        if let Links::Sha { path, .. } = &mut self.links {
            *path = cpu;
        }
        self
    }

    /// The algorithm.
    pub const fn algo(&self) -> Algo {
        self.algo
    }

    /// Blocks hashed.
    pub const fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether no block is hashed.
    pub const fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// One key per block: the first 8 of its canonical bytes as a big-endian number.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// Hashes the whole blocks of `tokens` that have no hash yet.
    ///
    /// `tokens` is the sequence's whole token log: its first `len()` blocks are taken as hashed
    /// before. After a change to one of those, [`truncate`](Self::truncate) comes first.
    /// `page_size` (tokens per block) and `extras` are the same in every call.
    ///
    /// # Panics
    /// If `page_size` is 0.
    pub fn extend(&mut self, tokens: &[Token], page_size: usize, extras: &ExtraKeys) {
        if tokens.len() / page_size > self.len() {
            self.extend_by(&tokens[self.len() * page_size..], page_size, extras);
        }
    }

    /// Hashes the whole blocks of `tokens`, which follow the blocks hashed so far.
    ///
    /// # Panics
    /// If `page_size` is 0.
    pub fn extend_by(&mut self, tokens: &[Token], page_size: usize, extras: &ExtraKeys) {
        let first = self.len();
        let blocks = first + tokens.len() / page_size;
        self.reserve(blocks - first);
        let mut message = Vec::new();
        while self.len() < blocks {
            let touched = extras.next_touched(self.len() * page_size);
            let plain_end = touched.map_or(blocks, |token| blocks.min(token / page_size));
            let block = |number: usize| (number - first) * page_size;
            self.extend_plain(&tokens[block(self.len())..block(plain_end)], page_size);
            if plain_end < blocks {
                let own = &tokens[block(plain_end)..block(plain_end + 1)];
                block_message(own, plain_end * page_size, extras, &mut message);
                self.push_message(&message);
            }
        }
    }

    /// Forgets the blocks from `blocks` on; extending again gives what a fresh chain would.
    pub fn truncate(&mut self, blocks: usize) {
        self.keys.truncate(blocks);
        if let Links::Sha { digests, .. } = &mut self.links {
            digests.truncate(blocks);
        }
    }

    /// Forgets every block.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// A block's canonical bytes.
    ///
    /// # Panics
    /// If `block` is not below [`len`](Self::len).
    pub fn identity(&self, block: usize) -> Identity {
        match (&self.links, self.algo) {
            (Links::Sha { digests, .. }, Algo::Sha256) => Identity::of_digest(digests[block]),
            _ => Identity::of_key(self.keys[block]),
        }
    }

    /// Appends the canonical bytes of a range of blocks, [`Algo::identity_len`] bytes each.
    ///
    /// # Panics
    /// If the range ends beyond [`len`](Self::len).
    pub fn write_identities(&self, range: Range<usize>, out: &mut Vec<u8>) {
        match (&self.links, self.algo) {
            (Links::Sha { digests, .. }, Algo::Sha256) => {
                out.extend_from_slice(digests[range].as_flattened());
            }
            _ => out.extend(self.keys[range].iter().flat_map(|key| key.to_be_bytes())),
        }
    }

    /// A block's whole digest; `None` for `ahash64`, which has none.
    pub(crate) fn digest(&self, block: usize) -> Option<&Digest> {
        match &self.links {
            Links::AHash { .. } => None,
            Links::Sha { digests, .. } => Some(&digests[block]),
        }
    }

    fn reserve(&mut self, blocks: usize) {
        self.keys.reserve(blocks);
        if let Links::Sha { digests, .. } = &mut self.links {
            digests.reserve(blocks);
        }
    }

    /// Appends whole blocks that no extra key touches.
    fn extend_plain(&mut self, tokens: &[Token], page_size: usize) {
        let keys = &mut self.keys;
        match &mut self.links {
            Links::AHash { hasher, first_parent } => {
                let mut parent = keys.last().copied().unwrap_or(*first_parent);
                hasher.blocks(tokens, page_size, |content| {
                    parent = hasher.link(parent, content);
                    keys.push(parent);
                });
            }
            Links::Sha { path, first_parent, digests } => {
                let parent = *digests.last().unwrap_or(first_parent);
                path.chain(tokens, page_size, &parent, |digest| {
                    keys.push(key(&digest));
                    digests.push(digest);
                });
            }
        }
    }

    /// Appends one block with the given message.
    fn push_message(&mut self, message: &[u8]) {
        match &mut self.links {
            Links::AHash { hasher, first_parent } => {
                let parent = self.keys.last().copied().unwrap_or(*first_parent);
                self.keys.push(hasher.link(parent, hasher.bytes(message)));
            }
            Links::Sha { path, first_parent, digests } => {
                let parent = digests.last().unwrap_or(first_parent);
                let digest = sha256::link(*path, &sha256::digest(*path, message), parent);
                self.keys.push(key(&digest));
                digests.push(digest);
            }
        }
    }
}

/// The message of the block that starts at token `start`, with its replacements and extra keys.
fn block_message(block: &[Token], start: usize, extras: &ExtraKeys, message: &mut Vec<u8>) {
    let mut block = block.to_vec();
    extras.replace_tokens(start, &mut block);
    message.clear();
    message.extend(block.iter().flat_map(|token| token.to_le_bytes()));
    let plain = message.len();
    message.extend_from_slice(EXTRA_KEYS);
    extras.encode(start, start + block.len(), message);
    if message.len() == plain + EXTRA_KEYS.len() {
        message.truncate(plain); // only replaced tokens: the block is a plain one
    }
}

fn key(digest: &Digest) -> u64 {
    u64::from_be_bytes(*digest.first_chunk().expect("a digest has 32 bytes"))
}
