//! Counts by powers of two.

/// How often numbers of each size came: bucket 0 counts zeros, bucket `i` numbers from `2^(i - 1)` to
/// `2^i - 1`, and the last one all that are greater.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Histogram {
    counts: [u64; Histogram::BUCKETS],
}

impl Histogram {
    /// Buckets: the last one counts numbers from 2^14 on.
    pub const BUCKETS: usize = 16;

    /// Counts `number`.
    #[inline]
    pub fn add(&mut self, number: u32) {
        let bits = (u32::BITS - number.leading_zeros()) as usize;
        self.counts[bits.min(Self::BUCKETS - 1)] += 1;
    }

    /// What each bucket has counted.
    pub fn counts(&self) -> &[u64; Histogram::BUCKETS] {
        &self.counts
    }
}
