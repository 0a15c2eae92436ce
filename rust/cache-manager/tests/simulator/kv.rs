//! What every cell must hold: the KV of a token, a number that depends on the weights, the salt and every token
//! up to it. So a wrong page, a stale one and one that is read too early all show as a wrong number.

use block_hash::{Algo, Chain, Guards, Token};
use cache_manager::{BlockKey, NewSequence};
use radix_tree::NamespaceKey;
use tiered_connector::job::TierKey;

/// What a copy that fails, a draft that is rejected, and memory that was never written hold.
pub(crate) const POISON: u64 = 0x0BAD;

/// The KV before the first token. Weights change with every reset.
pub(crate) fn root(salt: &str, weights: u32) -> u64 {
    u64::from(weights) << 32 | (salt.len() as u64 + 1)
}

/// The KV of the token after the prefix whose last KV is `before`.
pub(crate) fn kv_after(before: u64, token: Token) -> u64 {
    let mixed = (before ^ u64::from(token.cast_unsigned())).wrapping_add(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// The KV of all of `tokens`.
pub(crate) fn kv_of(root: u64, tokens: &[Token]) -> Vec<u64> {
    let next = |before: &mut u64, &token: &Token| {
        *before = kv_after(*before, token);
        Some(*before)
    };
    tokens.iter().scan(root, next).collect()
}

/// A prompt that other tiers are asked for.
pub(crate) fn request(tokens: &[Token], salt: &str, page_size: u32) -> NewSequence {
    let namespace = NamespaceKey { salt: salt.into(), ..NamespaceKey::default() };
    let root = namespace.root(None);
    let chain = Chain::new(Algo::AHash64, &root);
    let mut request = NewSequence::new(tokens.to_vec(), 1 << 20, namespace, chain);
    request.guards = Some(Guards::new(Algo::AHash64, &root, &[7; 32]));
    request.hash_prompt(page_size);
    request
}

/// The full blocks of a prefix as tiers know them: made anew, not grown with a request.
pub(crate) fn keys(tokens: &[Token], salt: &str, page_size: u32) -> Vec<TierKey> {
    let NewSequence { chain, guards, .. } = request(tokens, salt, page_size);
    let guards = guards.expect("it was given guards");
    (0..chain.len()).map(|block| tier_key(&BlockKey::of(&chain, &guards, block))).collect()
}

pub(crate) fn tier_key(key: &BlockKey) -> TierKey {
    TierKey { hash: key.identity.key(), guard: key.guard }
}
