//! Which instructions compute the hashes. The values never depend on it.

use std::fmt;
use std::sync::OnceLock;

use crate::Token;
use crate::sha256::{self, Digest};

#[cfg(target_arch = "x86_64")]
mod x86;

/// The instructions that SHA-256 runs on, chosen once per process from what the CPU has.
///
/// `PAGEKEEPER_CPU=portable` in the environment chooses the portable path. `ahash64` is integer
/// arithmetic and runs alike on every path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuPath(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Portable,
    Library,
    #[cfg(target_arch = "x86_64")]
    ShaNi(x86::ShaNi),
}

impl CpuPath {
    /// Plain Rust, on every CPU.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// The path of this process: the fastest, unless the environment says otherwise.
    pub fn chosen() -> Self {
        static CHOSEN: OnceLock<CpuPath> = OnceLock::new();
        *CHOSEN.get_or_init(|| match std::env::var("PAGEKEEPER_CPU") {
            Ok(name) if name == "portable" => Self::PORTABLE,
            _ => Self::available()[0],
        })
    }

    /// Every path that this CPU can run, fastest first.
    pub fn available() -> Vec<Self> {
        let portable = [Self(Kind::Library), Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        let fastest = x86::ShaNi::detect().map(|proof| Self(Kind::ShaNi(proof)));
        #[cfg(not(target_arch = "x86_64"))]
        let fastest: Option<Self> = None;
        fastest.into_iter().chain(portable).collect()
    }

    /// One 64-byte chunk into a SHA-256 state.
    pub(crate) fn compress(self, state: &mut [u32; 8], chunk: &[u8; 64]) {
        match self.0 {
            Kind::Portable => sha256::compress(state, chunk),
            Kind::Library => sha2::block_api::compress256(state, std::slice::from_ref(chunk)),
            #[cfg(target_arch = "x86_64")]
            Kind::ShaNi(proof) => proof.compress(state, chunk),
        }
    }

    /// Chains every whole block of `tokens` onto `parent` with SHA-256; `each` gets their hashes
    /// in order.
    pub(crate) fn chain(self, tokens: &[Token], page_size: usize, parent: &Digest, each: impl FnMut(Digest)) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::ShaNi(proof) => proof.chain(tokens, page_size, parent, each),
            _ => sha256::chain(self, tokens, page_size, parent, each),
        }
    }
}

/// Appends 64-bit `values` to `out` as tokens; false if one of them is no token, and then what was
/// appended means nothing. A `values` that fits the first-level cache is read from memory once.
pub fn narrow(values: &[i64], out: &mut Vec<Token>) -> bool {
    #[cfg(target_arch = "x86_64")]
    if let Some(all_tokens) = x86::narrow(values, out) {
        return all_tokens;
    }
    narrow_anywhere(values, out)
}

/// Two simple loops, so that each becomes vector code of the width that its caller allows.
#[expect(clippy::inline_always, reason = "the caller's CPU features decide what it becomes")]
#[inline(always)]
fn narrow_anywhere(values: &[i64], out: &mut Vec<Token>) -> bool {
    let lost =
        values.iter().fold(0, |lost, &value| lost | (value.wrapping_add(1 << 31).cast_unsigned() >> 32));
    out.extend(values.iter().map(|&value| value as Token));
    lost == 0
}

impl fmt::Display for CpuPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.0 {
            Kind::Portable => "portable",
            Kind::Library => "sha2",
            #[cfg(target_arch = "x86_64")]
            Kind::ShaNi(_) => "sha-ni",
        })
    }
}
