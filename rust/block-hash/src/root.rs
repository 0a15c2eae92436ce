//! The root: what is hashed before the first block, from seed, salt, adapter and generation.

use crate::{CpuPath, record, sha256};

/// The start of a chain, 32 bytes. Chains of different roots share no hash.
///
/// For the SHA family it is the first block's parent; for `ahash64` it is the hasher's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Root(pub [u8; 32]);

/// The adapter (LoRA) that a sequence's KV was computed with. A name and a number never coincide,
/// not even `"7"` and 7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Adapter<'a> {
    /// An adapter known by name.
    Name(&'a str),
    /// An adapter known by number.
    Number(i64),
}

const NAMESPACE: &[u8] = b"pk1-ns";
const ADAPTER_NAME: u32 = 1;
const ADAPTER_NUMBER: u32 = 2;
const GENERATION: u32 = 3;

impl Root {
    /// The seed (zeros when there is none) XOR SHA-256 of the salt; an empty salt is no salt.
    ///
    /// With an adapter or a generation other than 0 (an adapter reloaded under its old name) the
    /// root becomes `SHA-256("pk1-ns" ‖ records ‖ root)`: the fields are tagged and
    /// length-prefixed, and the salt is inside `root`, so no two fields can be confused.
    pub fn new(
        seed: Option<&[u8; 32]>,
        salt: Option<&str>,
        adapter: Option<Adapter<'_>>,
        generation: u64,
    ) -> Self {
        let mut root = seed.copied().unwrap_or_default();
        if let Some(salt) = salt.filter(|salt| !salt.is_empty()) {
            let salt = sha256::digest(CpuPath::chosen(), salt.as_bytes());
            root.iter_mut().zip(salt).for_each(|(byte, salt)| *byte ^= salt);
        }
        if adapter.is_none() && generation == 0 {
            return Self(root);
        }
        let mut message = NAMESPACE.to_vec();
        match adapter {
            Some(Adapter::Name(name)) => {
                record::push(&mut message, ADAPTER_NAME, &[name.as_bytes()]);
            }
            Some(Adapter::Number(number)) => {
                record::push(&mut message, ADAPTER_NUMBER, &[&number.to_le_bytes()]);
            }
            None => {}
        }
        if generation != 0 {
            record::push(&mut message, GENERATION, &[&generation.to_le_bytes()]);
        }
        message.extend_from_slice(&root);
        Self(sha256::digest(CpuPath::chosen(), &message))
    }
}
