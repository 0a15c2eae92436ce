//! SHA-256 (FIPS 180-4) as block hashing needs it: one message, and chains of equal blocks.

use crate::{CpuPath, Token};

/// A finished hash.
pub(crate) type Digest = [u8; 32];

/// Hashes one message.
pub(crate) fn digest(path: CpuPath, message: &[u8]) -> Digest {
    let mut state = INITIAL;
    let (chunks, rest) = message.as_chunks::<64>();
    let (tail, used) = padded(rest, message.len());
    for chunk in chunks.iter().chain(&tail[..used]) {
        path.compress(&mut state, chunk);
    }
    to_digest(state)
}

/// A block's chained hash from its content's and its parent's.
pub(crate) fn link(path: CpuPath, content: &Digest, parent: &Digest) -> Digest {
    let mut message = [0; 64];
    message[..32].copy_from_slice(content);
    message[32..].copy_from_slice(parent);
    digest(path, &message)
}

/// Chains every whole block of `tokens` onto `parent`; `each` gets their hashes in order.
pub(crate) fn chain(
    path: CpuPath,
    tokens: &[Token],
    page_size: usize,
    parent: &Digest,
    mut each: impl FnMut(Digest),
) {
    let mut parent = *parent;
    let mut message = Vec::with_capacity(4 * page_size);
    for block in tokens.chunks_exact(page_size) {
        message.clear();
        message.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        parent = link(path, &digest(path, &message), &parent);
        each(parent);
    }
}

/// The end of a message of `length` bytes: the `rest` beyond its whole 64-byte chunks with the
/// padding, one chunk or two.
pub(crate) fn padded(rest: &[u8], length: usize) -> ([[u8; 64]; 2], usize) {
    let mut tail = [[0; 64]; 2];
    let used = if rest.len() < 56 { 1 } else { 2 };
    let bytes = tail.as_flattened_mut();
    bytes[..rest.len()].copy_from_slice(rest);
    bytes[rest.len()] = 0x80;
    bytes[64 * used - 8..64 * used].copy_from_slice(&(8 * length as u64).to_be_bytes());
    (tail, used)
}

/// One 64-byte chunk into the state, in plain Rust.
#[expect(clippy::many_single_char_names, reason = "the standard's names")]
pub(crate) fn compress(state: &mut [u32; 8], chunk: &[u8; 64]) {
    let (words, _) = chunk.as_chunks::<4>();
    let schedule = schedule(std::array::from_fn(|i| u32::from_be_bytes(words[i])));
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (constant, word) in K.iter().zip(schedule) {
        let sigma = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = (e & f) ^ (!e & g);
        let first = h.wrapping_add(sigma).wrapping_add(choice).wrapping_add(*constant).wrapping_add(word);
        let sigma = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        let second = sigma.wrapping_add(majority);
        (h, g, f, e) = (g, f, e, d.wrapping_add(first));
        (d, c, b, a) = (c, b, a, first.wrapping_add(second));
    }
    for (word, add) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(add);
    }
}

/// The words of all rounds from those of a chunk.
pub(crate) const fn schedule(chunk: [u32; 16]) -> [u32; 64] {
    let mut words = [0; 64];
    words.split_at_mut(16).0.copy_from_slice(&chunk);
    let mut i = 16;
    while i < 64 {
        let (near, far): (u32, u32) = (words[i - 2], words[i - 15]);
        let near = near.rotate_right(17) ^ near.rotate_right(19) ^ (near >> 10);
        let far = far.rotate_right(7) ^ far.rotate_right(18) ^ (far >> 3);
        words[i] = near.wrapping_add(words[i - 7]).wrapping_add(far).wrapping_add(words[i - 16]);
        i += 1;
    }
    words
}

/// The state that a digest was made from.
#[cfg(target_arch = "x86_64")]
pub(crate) fn from_digest(digest: &Digest) -> [u32; 8] {
    let (words, _) = digest.as_chunks::<4>();
    std::array::from_fn(|i| u32::from_be_bytes(words[i]))
}

/// The digest of a state.
pub(crate) fn to_digest(state: [u32; 8]) -> Digest {
    let mut digest = [0; 32];
    for (bytes, word) in digest.as_chunks_mut::<4>().0.iter_mut().zip(state) {
        *bytes = word.to_be_bytes();
    }
    digest
}

/// The state before the first chunk.
pub(crate) const INITIAL: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The round constants.
#[rustfmt::skip]
pub(crate) const K: [u32; 64] = [
    0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
    0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
    0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
    0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
    0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
    0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
    0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
    0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
];
