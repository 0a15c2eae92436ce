//! Extra keys: what besides its tokens enters a block's hash.
//!
//! Placeholder tokens look alike whatever image or embedding they stand for; extra keys tell such
//! blocks apart. A block is changed only by the keys that touch it, and each key carries its place
//! relative to the block, so equal content at another offset is another block.
//!
//! [`ExtraKeys::encode`] writes records ([`record`]) in this order, little-endian:
//!
//! | tag | key | payload |
//! |---|---|---|
//! | 1 | multimodal item | start − block start: i64, length: u64, content hash: 32 bytes |
//! | 2 | prompt embeddings | start − block start: i64, length: u64, digest: 32 bytes |
//! | 3 | extra id of one token | token − block start: u64, id: u64 |
//! | 4 | override beyond int32 | token − block start: u64, value: i128 |
//!
//! Every record is a multiple of 4 bytes long; [`Chain`](crate::Chain) relies on that.

use crate::{HashError, Token, record};

const MM_ITEM: u32 = 1;
const PROMPT_EMBEDS: u32 = 2;
const EXTRA_ID: u32 = 3;
const WIDE_OVERRIDE: u32 = 4;

/// What an [`ExtraKeys`] is made from; `..Default::default()` leaves the rest out.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExtraInputs<'a> {
    /// Multimodal items. They may overlap; then both enter.
    pub mm_items: &'a [ContentSpan],
    /// Prompt embeddings given instead of tokens.
    pub prompt_embeds: &'a [ContentSpan],
    /// One id per token from the first on, 0 = none; may be shorter than the sequence.
    pub extra_ids: &'a [u64],
    /// `(token index, value)`, at most one per index; values −2⁶³ … 2⁶⁴−1. An index outside the
    /// sequence is ignored.
    pub overrides: &'a [(i64, i128)],
}

/// A run of tokens that stands for content with a 32-byte hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentSpan {
    /// First token of the run: its position in the sequence.
    pub start: u64,
    /// Tokens in the run, at least 1.
    pub length: u64,
    /// Hash or digest of the content.
    pub hash: [u8; 32],
}

impl ContentSpan {
    const fn end(&self) -> u64 {
        self.start + self.length // validated: at most 2⁶³ − 1
    }
}

/// The extra keys of one sequence; by default none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ExtraKeys {
    mm_items: Spans,
    prompt_embeds: Spans,
    extra_ids: Vec<(usize, u64)>,       // sorted by token, ids not 0
    replacements: Vec<(usize, Token)>,  // sorted by token: overrides that fit a token
    wide_overrides: Vec<(usize, i128)>, // sorted by token: overrides that do not
}

impl ExtraKeys {
    /// Validates and sorts the inputs.
    ///
    /// # Errors
    /// A span of 0 tokens or one that ends beyond position 2⁶³ − 1; two overrides of one token; an
    /// override value outside −2⁶³ … 2⁶⁴−1.
    pub fn new(inputs: &ExtraInputs<'_>) -> Result<Self, HashError> {
        let mut keys = Self {
            mm_items: Spans::new("mm_items", inputs.mm_items)?,
            prompt_embeds: Spans::new("prompt_embeds", inputs.prompt_embeds)?,
            extra_ids: inputs.extra_ids.iter().copied().enumerate().filter(|&(_, id)| id != 0).collect(),
            ..Self::default()
        };
        for (index, &(token, value)) in inputs.overrides.iter().enumerate() {
            if value < i128::from(i64::MIN) || value > i128::from(u64::MAX) {
                return Err(HashError::OverrideValue { index, token, value });
            }
        }
        let mut overrides = inputs.overrides.to_vec();
        overrides.sort_unstable();
        if let Some(pair) = overrides.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(HashError::DuplicateOverride { token: pair[0].0 });
        }
        for (token, value) in overrides {
            let Ok(token) = usize::try_from(token) else {
                continue;
            };
            match Token::try_from(value) {
                Ok(value) => keys.replacements.push((token, value)),
                Err(_) => keys.wide_overrides.push((token, value)),
            }
        }
        Ok(keys)
    }

    /// Whether no block is changed by these keys.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.mm_items.sorted.is_empty()
            && self.prompt_embeds.sorted.is_empty()
            && self.extra_ids.is_empty()
            && self.replacements.is_empty()
            && self.wide_overrides.is_empty()
    }

    /// Whether a multimodal item covers the first token, so that its digest is in the hash of every block.
    pub fn names_the_start(&self) -> bool {
        self.mm_items.next(0) == Some(0)
    }

    /// One past the last token that a multimodal item or prompt embedding covers; 0 without any.
    pub fn reach(&self) -> u64 {
        self.mm_items.reach().max(self.prompt_embeds.reach())
    }

    /// Forgets what belongs to tokens from `len` on, as when the sequence is cut there. A span across
    /// the cut becomes shorter: then the first token of the earliest such span is given, since blocks
    /// from that token on are no longer what they were.
    pub fn truncate(&mut self, len: usize) -> Option<usize> {
        self.extra_ids.retain(|&(token, _)| token < len);
        self.replacements.retain(|&(token, _)| token < len);
        self.wide_overrides.retain(|&(token, _)| token < len);
        let cut = [self.mm_items.truncate(len as u64), self.prompt_embeds.truncate(len as u64)];
        cut.into_iter().flatten().min().map(|token| token as usize)
    }

    /// The first token from `start` on that is changed by a key: replaced, or with bytes encoded.
    /// Costs five binary searches.
    pub fn next_touched(&self, start: usize) -> Option<usize> {
        [
            self.mm_items.next(start),
            self.prompt_embeds.next(start),
            next(&self.extra_ids, start),
            next(&self.replacements, start),
            next(&self.wide_overrides, start),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Whether a key changes one of the tokens `start..end`.
    pub fn touches(&self, start: usize, end: usize) -> bool {
        self.next_touched(start).is_some_and(|token| token < end)
    }

    /// Replaces the overridden tokens among `tokens`, the sequence's tokens from `start` on.
    pub fn replace_tokens(&self, start: usize, tokens: &mut [Token]) {
        for &(token, value) in within(&self.replacements, start, start + tokens.len()) {
            tokens[token - start] = value;
        }
    }

    /// Appends the canonical bytes of what touches the block `start..end`, beyond replaced tokens.
    /// Appends nothing when nothing does. The form is in the module's table.
    pub fn encode(&self, start: usize, end: usize, out: &mut Vec<u8>) {
        self.mm_items.encode(MM_ITEM, start, end, out);
        self.prompt_embeds.encode(PROMPT_EMBEDS, start, end, out);
        for &(token, id) in within(&self.extra_ids, start, end) {
            record::push(out, EXTRA_ID, &[&((token - start) as u64).to_le_bytes(), &id.to_le_bytes()]);
        }
        for &(token, value) in within(&self.wide_overrides, start, end) {
            let offset = (token - start) as u64;
            record::push(out, WIDE_OVERRIDE, &[&offset.to_le_bytes(), &value.to_le_bytes()]);
        }
    }
}

/// The entries of tokens `start..end` in a list sorted by token.
fn within<T>(entries: &[(usize, T)], start: usize, end: usize) -> &[(usize, T)] {
    let from = entries.partition_point(|&(token, _)| token < start);
    let entries = &entries[from..];
    &entries[..entries.partition_point(|&(token, _)| token < end)]
}

/// The first token from `start` on in a list sorted by token.
fn next<T>(entries: &[(usize, T)], start: usize) -> Option<usize> {
    entries.get(entries.partition_point(|&(token, _)| token < start)).map(|&(token, _)| token)
}

/// Spans sorted by start, with the running maximum of their ends: overlapping spans are found by
/// binary search too.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Spans {
    sorted: Vec<ContentSpan>,
    reach: Vec<u64>, // reach[i]: the greatest end of sorted[..=i]
}

impl Spans {
    fn new(field: &'static str, spans: &[ContentSpan]) -> Result<Self, HashError> {
        for (index, span) in spans.iter().enumerate() {
            let &ContentSpan { start, length, .. } = span;
            if length == 0 {
                return Err(HashError::EmptySpan { field, index });
            }
            if start.checked_add(length).is_none_or(|end| end > i64::MAX as u64) {
                return Err(HashError::SpanTooFar { field, index, start, length });
            }
        }
        Ok(Self::sorted(spans.to_vec()))
    }

    fn sorted(mut sorted: Vec<ContentSpan>) -> Self {
        sorted.sort_unstable();
        let mut furthest = 0;
        let reach = sorted.iter().map(|span| {
            furthest = span.end().max(furthest);
            furthest
        });
        let reach = reach.collect();
        Self { sorted, reach }
    }

    /// The greatest end of all spans.
    fn reach(&self) -> u64 {
        self.reach.last().copied().unwrap_or(0)
    }

    /// Cuts every span at `len`; gives the start of the earliest that became shorter and is still there.
    fn truncate(&mut self, len: u64) -> Option<u64> {
        if self.reach() <= len {
            return None;
        }
        let mut spans = std::mem::take(&mut self.sorted);
        spans.retain(|span| span.start < len);
        let cut = spans.iter().filter(|span| span.end() > len).map(|span| span.start).min();
        for span in &mut spans {
            span.length = span.length.min(len - span.start);
        }
        *self = Self::sorted(spans);
        cut
    }

    /// The shortest run that has every span touching `start..end`; its first span does, so it is
    /// empty exactly when none does.
    fn within(&self, start: usize, end: usize) -> &[ContentSpan] {
        let to = self.sorted.partition_point(|span| span.start < end as u64);
        let from = self.reach[..to].partition_point(|&reach| reach <= start as u64);
        &self.sorted[from..to]
    }

    /// The first token from `start` on that a span covers.
    fn next(&self, start: usize) -> Option<usize> {
        let span = self.sorted.get(self.reach.partition_point(|&reach| reach <= start as u64))?;
        Some(start.max(span.start as usize))
    }

    fn encode(&self, tag: u32, start: usize, end: usize, out: &mut Vec<u8>) {
        for span in self.within(start, end).iter().filter(|span| span.end() > start as u64) {
            let offset = span.start.wrapping_sub(start as u64); // two's complement: the i64 offset
            record::push(out, tag, &[&offset.to_le_bytes(), &span.length.to_le_bytes(), &span.hash]);
        }
    }
}
