//! `ahash64`: the portable (folded-multiply) variant of `AHash`, keyed by the root.
//!
//! The folded multiplies of a message do not depend on the running state, so several blocks are
//! hashed side by side and the multiplier stays busy.

use crate::{Root, Token};

const PI: [u64; 4] =
    [0x243F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344, 0xA409_3822_299F_31D0, 0x082E_FA98_EC4E_6C89];
const MULTIPLE: u64 = 6_364_136_223_846_793_005;
const ROTATE: u32 = 23;
/// Blocks hashed side by side.
const LANES: usize = 3;
/// How far before they are hashed tokens are fetched, at least. Read from several places in turn, they are no
/// stream that the processor would see.
const AHEAD: usize = 512;
/// Four tokens are absorbed at a time; so many times make a cache line.
const CHUNKS_A_LINE: usize = 4;

/// A keyed hasher, ready to hash any number of messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AHash {
    buffer: u64,
    pad: u64,
    extra: [u64; 2],
}

impl AHash {
    pub(crate) fn new(root: &Root) -> Self {
        let (words, _) = root.0.as_chunks::<8>();
        let key = |i: usize| u64::from_le_bytes(words[i]) ^ PI[i];
        Self { buffer: key(0), pad: key(1), extra: [key(2), key(3)] }
    }

    /// Hashes every whole block of `tokens`, in order.
    pub(crate) fn blocks(&self, tokens: &[Token], page_size: usize, mut each: impl FnMut(u64)) {
        if page_size <= 4 {
            let mut message = Vec::with_capacity(4 * page_size);
            for block in tokens.chunks_exact(page_size) {
                message.clear();
                message.extend(block.iter().flat_map(|token| token.to_le_bytes()));
                each(self.bytes(&message));
            }
            return;
        }
        let groups = tokens.chunks_exact(LANES * page_size);
        let rest = groups.remainder();
        let ahead = AHEAD.max(LANES * page_size);
        for group in groups {
            let lanes = std::array::from_fn(|lane| &group[lane * page_size..][..page_size]);
            self.side_by_side::<LANES>(lanes, ahead).into_iter().for_each(&mut each);
        }
        for block in rest.chunks_exact(page_size) {
            each(self.side_by_side([block], ahead)[0]);
        }
    }

    /// Hashes any message.
    pub(crate) fn bytes(&self, message: &[u8]) -> u64 {
        let first_u64 = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
        let last_u64 = |bytes: &[u8]| first_u64(&bytes[bytes.len() - 8..]);
        let first_u32 = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes")).into();
        let state = self.start(message.len());
        let state = match message.len() {
            0 => self.absorb(state, 0, 0),
            1 => self.absorb(state, message[0].into(), message[0].into()),
            len @ 2..4 => {
                let first = u16::from_le_bytes([message[0], message[1]]);
                self.absorb(state, first.into(), message[len - 1].into())
            }
            len @ 4..=8 => self.absorb(state, first_u32(message), first_u32(&message[len - 4..])),
            9..=16 => self.absorb(state, first_u64(message), last_u64(message)),
            len => {
                let tail = &message[len - 16..];
                let state = self.absorb(state, first_u64(tail), last_u64(tail));
                let (chunks, _) = message[..len - 1].as_chunks::<16>();
                chunks
                    .iter()
                    .fold(state, |state, chunk| self.absorb(state, first_u64(chunk), last_u64(chunk)))
            }
        };
        self.finish(state)
    }

    /// A block's chained hash from its parent's and its content's.
    pub(crate) fn link(&self, parent: u64, content: u64) -> u64 {
        self.finish(self.absorb(self.buffer, parent, content))
    }

    /// Hashes `N` blocks of one length, more than 4 tokens each. Fetches what lies `ahead` tokens behind them.
    #[inline]
    fn side_by_side<const N: usize>(&self, blocks: [&[Token]; N], ahead: usize) -> [u64; N] {
        let len = blocks[0].len();
        let tails = blocks.map(|block| block.last_chunk::<4>().expect("more than 4 tokens"));
        let mut states = tails.map(|tail| self.absorb_tokens(self.start(4 * len), tail));
        let chunks = blocks.map(|block| block[..len - 1].as_chunks::<4>().0);
        for i in 0..(len - 1) / 4 {
            for (state, chunks) in states.iter_mut().zip(&chunks) {
                if i % CHUNKS_A_LINE == 0 {
                    memory::prefetch(&chunks[i], ahead / 4);
                }
                *state = self.absorb_tokens(*state, &chunks[i]);
            }
        }
        states.map(|state| self.finish(state))
    }

    fn start(&self, message_bytes: usize) -> u64 {
        self.buffer.wrapping_add(message_bytes as u64).wrapping_mul(MULTIPLE)
    }

    fn absorb_tokens(&self, state: u64, tokens: &[Token; 4]) -> u64 {
        let word = |i: usize| u64::from(tokens[i].cast_unsigned());
        self.absorb(state, word(0) | word(1) << 32, word(2) | word(3) << 32)
    }

    fn absorb(&self, state: u64, a: u64, b: u64) -> u64 {
        let folded = fold(a ^ self.extra[0], b ^ self.extra[1]);
        (state.wrapping_add(self.pad) ^ folded).rotate_left(ROTATE)
    }

    fn finish(&self, state: u64) -> u64 {
        fold(state, self.pad).rotate_left((state & 63) as u32)
    }
}

/// The low half of the 128-bit product, XOR the high half.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}
