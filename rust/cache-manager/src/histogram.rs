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
        self.add_times(number, 1);
    }

    #[inline]
    fn add_times(&mut self, number: u32, times: u64) {
        let bits = (u32::BITS - number.leading_zeros()) as usize;
        self.counts[bits.min(Self::BUCKETS - 1)] += times;
    }

    /// Counts numbers of which neighbours are often equal.
    pub fn runs(&mut self) -> Runs<'_> {
        Runs { histogram: self, number: 0, times: 0 }
    }

    /// What each bucket has counted.
    pub fn counts(&self) -> &[u64; Histogram::BUCKETS] {
        &self.counts
    }
}

/// See [`Histogram::runs`]; what is open is counted when this is dropped.
pub struct Runs<'a> {
    histogram: &'a mut Histogram,
    number: u32,
    times: u64,
}

impl Runs<'_> {
    /// Counts `number`.
    #[inline]
    pub fn add(&mut self, number: u32) {
        if number != self.number {
            self.histogram.add_times(self.number, self.times);
            (self.number, self.times) = (number, 0);
        }
        self.times += 1;
    }
}

impl Drop for Runs<'_> {
    fn drop(&mut self) {
        self.histogram.add_times(self.number, self.times);
    }
}
