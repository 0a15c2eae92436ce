//! SHA-256 with the x86 SHA extensions.
//!
//! One compression mostly waits for its own rounds; two in one instruction stream take little
//! longer. The contents of blocks do not depend on each other and a link only on the one before,
//! so [`ShaNi::chain`] runs the links of two blocks beside the contents of the next two.

use std::arch::x86_64::{
    __m128i, _mm_add_epi32, _mm_alignr_epi8, _mm_blend_epi16, _mm_set_epi64x, _mm_sha256msg1_epu32,
    _mm_sha256msg2_epu32, _mm_sha256rnds2_epu32, _mm_shuffle_epi8, _mm_shuffle_epi32,
};
use std::mem::transmute;

use crate::Token;
use crate::sha256::{Digest, INITIAL, K, from_digest, padded, schedule, to_digest};

/// Proof that the CPU has the instructions used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ShaNi(());

impl ShaNi {
    /// `None` on a CPU without them.
    pub(super) fn detect() -> Option<Self> {
        let detected = is_x86_feature_detected!("sha")
            && is_x86_feature_detected!("ssse3")
            && is_x86_feature_detected!("sse4.1");
        detected.then_some(Self(()))
    }

    /// One 64-byte chunk into the state.
    pub(super) fn compress(self, state: &mut [u32; 8], chunk: &[u8; 64]) {
        let Self(()) = self;
        // SAFETY: a `ShaNi` exists only where these features were detected.
        unsafe { compress(state, chunk) }
    }

    /// Chains every whole block of `tokens` onto `parent`; `each` gets their hashes in order.
    pub(super) fn chain(self, tokens: &[Token], page_size: usize, parent: &Digest, each: impl FnMut(Digest)) {
        let Self(()) = self;
        // SAFETY: a `ShaNi` exists only where these features were detected.
        unsafe { chain(tokens, page_size, parent, each) }
    }
}

/// [`super::narrow`] with 256-bit vectors; `None` on a CPU without them.
pub(super) fn narrow(values: &[i64], out: &mut Vec<Token>) -> Option<bool> {
    if !is_x86_feature_detected!("avx2") {
        return None;
    }
    // SAFETY: the feature was detected.
    Some(unsafe { narrow_wide(values, out) })
}

#[target_feature(enable = "avx2")]
fn narrow_wide(values: &[i64], out: &mut Vec<Token>) -> bool {
    super::narrow_anywhere(values, out)
}

#[target_feature(enable = "sha,ssse3,sse4.1")]
fn compress(state: &mut [u32; 8], chunk: &[u8; 64]) {
    let [next] = rounds([State::new(*state)], [message(chunk)]);
    *state = next.words();
}

#[target_feature(enable = "sha,ssse3,sse4.1")]
fn chain(tokens: &[Token], page_size: usize, parent: &Digest, mut each: impl FnMut(Digest)) {
    let page_bytes = 4 * page_size;
    let initial = State::new(INITIAL);
    let padding = message(&padded(&[], 64).0[0]); // of a 64-byte message, as each link is
    let mut parent = State::new(from_digest(parent));
    let mut each = |link: State| each(to_digest(link.words()));

    let pairs = as_bytes(tokens).chunks_exact(2 * page_bytes);
    let last = pairs.remainder();
    let mut pages = [Page::new(page_bytes), Page::new(page_bytes)];
    let chunks = page_bytes / 64 + pages[0].tail_chunks;
    let mut waiting: Option<[State; 2]> = None; // contents of two blocks not linked yet
    for pair in pairs {
        let (left, right) = pair.split_at(page_bytes);
        pages[0].fill(left);
        pages[1].fill(right);
        let mut contents = [initial; 2];
        let mut done = 0;
        if let Some(earlier) = waiting {
            for i in 0..2 {
                let message = link_message(earlier[i], parent);
                let link;
                [link, contents[i]] = rounds([initial, contents[i]], [message, pages[i].chunk(0)]);
                if page_bytes == 64 {
                    [parent, contents[i]] = padding_rounds([link, contents[i]]);
                } else if chunks > 1 {
                    let messages = [padding, pages[i].chunk(1)];
                    [parent, contents[i]] = rounds([link, contents[i]], messages);
                } else {
                    [parent] = padding_rounds([link]);
                }
                each(parent);
            }
            done = chunks.min(2);
        }
        for chunk in done..chunks {
            contents = rounds(contents, [pages[0].chunk(chunk), pages[1].chunk(chunk)]);
        }
        waiting = Some(contents);
    }

    let mut link_alone = |content: State| {
        [parent] = rounds([initial], [link_message(content, parent)]);
        [parent] = padding_rounds([parent]);
        each(parent);
    };
    waiting.into_iter().flatten().for_each(&mut link_alone);
    if last.len() >= page_bytes {
        let [mut page, _] = pages;
        page.fill(&last[..page_bytes]);
        let mut content = initial;
        for chunk in 0..chunks {
            [content] = rounds([content], [page.chunk(chunk)]);
        }
        link_alone(content);
    }
}

/// One block's bytes as 64-byte chunks, the padding included.
#[derive(Clone, Copy)]
struct Page<'a> {
    whole: &'a [[u8; 64]],
    tail: [[u8; 64]; 2],
    tail_chunks: usize,
}

impl<'a> Page<'a> {
    /// For blocks of `bytes` bytes.
    fn new(bytes: usize) -> Self {
        let (tail, tail_chunks) = padded(&[0; 64][..bytes % 64], bytes);
        Self { whole: &[], tail, tail_chunks }
    }

    fn fill(&mut self, bytes: &'a [u8]) {
        let (whole, rest) = bytes.as_chunks();
        self.whole = whole;
        self.tail.as_flattened_mut()[..rest.len()].copy_from_slice(rest);
    }

    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn chunk(&self, i: usize) -> Message {
        message(self.whole.get(i).unwrap_or_else(|| &self.tail[i - self.whole.len()]))
    }
}

/// The working variables of one compression, in the order of the instructions.
#[derive(Clone, Copy)]
struct State {
    abef: __m128i,
    cdgh: __m128i,
}

impl State {
    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn new(words: [u32; 8]) -> Self {
        // SAFETY: the same size, and every bit pattern is a vector.
        let [abcd, efgh]: [__m128i; 2] = unsafe { transmute(words) };
        let badc = _mm_shuffle_epi32(abcd, 0xB1);
        let hgfe = _mm_shuffle_epi32(efgh, 0x1B);
        Self { abef: _mm_alignr_epi8(badc, hgfe, 8), cdgh: _mm_blend_epi16(hgfe, badc, 0xF0) }
    }

    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn words(self) -> [u32; 8] {
        // SAFETY: the same size, and every bit pattern is an integer.
        unsafe { transmute(self.vectors()) }
    }

    /// The eight words in their order.
    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn vectors(self) -> [__m128i; 2] {
        let feba = _mm_shuffle_epi32(self.abef, 0x1B);
        let dchg = _mm_shuffle_epi32(self.cdgh, 0xB1);
        [_mm_blend_epi16(feba, dchg, 0xF0), _mm_alignr_epi8(dchg, feba, 8)]
    }

    /// Four rounds; `keyed` is their words with the round constants added.
    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn four_rounds(&mut self, keyed: __m128i) {
        self.cdgh = _mm_sha256rnds2_epu32(self.cdgh, self.abef, keyed);
        let upper = _mm_shuffle_epi32(keyed, 0x0E);
        self.abef = _mm_sha256rnds2_epu32(self.abef, self.cdgh, upper);
    }
}

/// The sixteen words of one chunk, in order.
type Message = [__m128i; 4];

// SAFETY: the same size, and every bit pattern is a vector.
static CONSTANTS: [__m128i; 16] = unsafe { transmute(K) };

/// Round constants and words of the chunk that pads a message of 64 bytes, added up.
static KEYED_PADDING: [__m128i; 16] = {
    let mut words = schedule([0x8000_0000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8 * 64]);
    let mut i = 0;
    while i < 64 {
        words[i] = words[i].wrapping_add(K[i]);
        i += 1;
    }
    // SAFETY: the same size, and every bit pattern is a vector.
    unsafe { transmute(words) }
};

/// Runs `N` compressions side by side.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn rounds<const N: usize>(before: [State; N], mut messages: [Message; N]) -> [State; N] {
    let mut states = before;
    // Spelled out: a loop would move every message register in every step.
    macro_rules! steps {
        ($($step:literal)*) => { $(scheduled_rounds::<N, $step>(&mut states, &mut messages);)* };
    }
    steps!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    add(states, before)
}

/// As [`rounds`], of the chunk that pads a message of 64 bytes.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn padding_rounds<const N: usize>(before: [State; N]) -> [State; N] {
    let mut states = before;
    for &keyed in &KEYED_PADDING {
        for state in &mut states {
            state.four_rounds(keyed);
        }
    }
    add(states, before)
}

/// Four rounds of `N` compressions; the words used make room for those of four steps later.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn scheduled_rounds<const N: usize, const STEP: usize>(states: &mut [State; N], messages: &mut [Message; N]) {
    for (state, words) in states.iter_mut().zip(messages) {
        let [oldest, next, later, newest] = [0, 1, 2, 3].map(|age| words[(STEP + age) % 4]);
        state.four_rounds(_mm_add_epi32(oldest, CONSTANTS[STEP]));
        if STEP < 12 {
            let near = _mm_sha256msg1_epu32(oldest, next);
            let sum = _mm_add_epi32(near, _mm_alignr_epi8(newest, later, 4));
            words[STEP % 4] = _mm_sha256msg2_epu32(sum, newest);
        }
    }
}

#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn add<const N: usize>(mut states: [State; N], before: [State; N]) -> [State; N] {
    for (state, before) in states.iter_mut().zip(before) {
        state.abef = _mm_add_epi32(state.abef, before.abef);
        state.cdgh = _mm_add_epi32(state.cdgh, before.cdgh);
    }
    states
}

/// The message of a link: content ‖ parent.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn link_message(content: State, parent: State) -> Message {
    let ([a, b], [c, d]) = (content.vectors(), parent.vectors());
    [a, b, c, d]
}

#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn message(chunk: &[u8; 64]) -> Message {
    // SAFETY: the same size, and every bit pattern is a vector.
    let vectors: Message = unsafe { transmute(*chunk) };
    let big_endian = _mm_set_epi64x(0x0C0D_0E0F_0809_0A0B, 0x0405_0607_0001_0203);
    vectors.map(|words| _mm_shuffle_epi8(words, big_endian))
}

/// The bytes of the tokens as int32 little-endian: x86 keeps them so.
fn as_bytes(tokens: &[Token]) -> &[u8] {
    // SAFETY: the same memory, for the same lifetime; bytes need no alignment and have no invalid
    // patterns.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast(), size_of_val(tokens)) }
}
