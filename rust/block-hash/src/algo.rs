//! The algorithms by name, and the canonical bytes of a hash.

use std::fmt;
use std::ops::Deref;
use std::str::FromStr;

use crate::HashError;

/// How blocks are hashed. As text: `ahash64`, `sha256`, `sha256_64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Algo {
    /// The portable (folded-multiply) `AHash`: fast, 64 bits, not cryptographic.
    #[default]
    AHash64,
    /// SHA-256, 256 bits.
    Sha256,
    /// A SHA-256 chain on 32 bytes whose published identity is the first 64 bits, for protocols
    /// that carry 8 bytes.
    Sha256Trunc64,
}

impl Algo {
    /// Length of a hash's canonical bytes: 8 or 32.
    pub const fn identity_len(self) -> usize {
        match self {
            Self::AHash64 | Self::Sha256Trunc64 => 8,
            Self::Sha256 => 32,
        }
    }

    /// Length in bytes of the parent that [`Chain::with_parent`](crate::Chain::with_parent) takes.
    /// It is the link of the chain itself, which `sha256_64` does not shorten.
    pub const fn parent_len(self) -> usize {
        match self {
            Self::AHash64 => 8,
            Self::Sha256 | Self::Sha256Trunc64 => 32,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::AHash64 => "ahash64",
            Self::Sha256 => "sha256",
            Self::Sha256Trunc64 => "sha256_64",
        }
    }
}

impl FromStr for Algo {
    type Err = HashError;

    fn from_str(name: &str) -> Result<Self, HashError> {
        [Self::AHash64, Self::Sha256, Self::Sha256Trunc64]
            .into_iter()
            .find(|algo| algo.name() == name)
            .ok_or_else(|| HashError::UnknownAlgo { given: name.to_owned() })
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A block's canonical bytes, the form that crosses every protocol: 8 bytes big-endian for
/// `ahash64`, the digest's first 8 bytes as they stand for `sha256_64`, all 32 for `sha256`.
/// Reads as a `[u8]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity {
    bytes: [u8; 32], // zeros beyond `len`
    len: u8,
}

impl Identity {
    /// The first 8 bytes as a big-endian number: the block's key in its chain.
    pub fn key(&self) -> u64 {
        u64::from_be_bytes(std::array::from_fn(|byte| self.bytes[byte]))
    }

    /// That of a 64-bit hash.
    pub fn of_key(key: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&key.to_be_bytes());
        Self { bytes, len: 8 }
    }

    pub(crate) const fn of_digest(digest: [u8; 32]) -> Self {
        Self { bytes: digest, len: 32 }
    }
}

impl Deref for Identity {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
