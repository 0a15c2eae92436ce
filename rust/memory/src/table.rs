//! A table from hashes to small numbers: open addressing, linear probing, no tombstones.

use crate::Array;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

#[cfg(test)]
mod tests;

/// An entry: the tag (the upper half of the mixed key) above the number plus one; 0 is empty. A
/// plain number, since the system hands out zeros for nothing: a table costs what it is filled with.
#[derive(Clone, Copy)]
struct Entry(u64);

impl Entry {
    fn new(tag: u32, number: u32) -> Entry {
        Entry(u64::from(tag) << 32 | u64::from(number + 1))
    }

    #[inline]
    fn tag(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The number; `None` for an empty entry.
    #[inline]
    fn number(self) -> Option<u32> {
        (self.0 as u32).checked_sub(1)
    }
}

/// Finds numbers below 2³² − 1 by 64-bit keys, which are hashes or the like. Keys are mixed with a secret of
/// the process, so that chosen keys cannot crowd one place; nothing observable depends on the secret.
pub struct KeyTable {
    entries: Array<u64>,
    len: usize,
    bits: u32,
    secret: [u64; 2],
}

impl KeyTable {
    const MIN_BITS: u32 = 6;
    /// More numbers than this are worth waiting for a growing table.
    const MAX_FIRST_CAPACITY: usize = 1 << 24;
    /// An entry's home is taken from its 32-bit tag.
    const MAX_BITS: u32 = 32;

    /// A table that holds `capacity` numbers before it grows.
    pub fn with_capacity(capacity: usize) -> KeyTable {
        let bits = (capacity.clamp(1, Self::MAX_FIRST_CAPACITY) * 2)
            .next_power_of_two()
            .ilog2()
            .clamp(Self::MIN_BITS, Self::MAX_BITS);
        let random = RandomState::new();
        let secret = [random.hash_one(1u8), random.hash_one(2u8) | 1];
        KeyTable { entries: Array::zeros(1 << bits), len: 0, bits, secret }
    }

    /// Numbers in the table.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Numbers that the table holds before it grows.
    pub fn capacity(&self) -> usize {
        self.entries.len() / 2
    }

    /// The number under `key` for which `is_key` holds (tags of different keys may be equal).
    #[inline]
    pub fn find(&self, key: u64, is_key: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = self.tag(key);
        let mut at = self.home(tag);
        loop {
            let entry = Entry(self.entries[at]);
            let number = entry.number()?;
            if entry.tag() == tag && is_key(number) {
                return Some(number);
            }
            at = self.after(at);
        }
    }

    /// `key` is asked for, added or removed soon.
    #[inline]
    pub fn prefetch(&self, key: u64) {
        crate::prefetch(&self.entries[0], self.home(self.tag(key)));
    }

    /// Adds `number` under `key`, which is not in the table.
    #[inline]
    pub fn insert(&mut self, key: u64, number: u32) {
        if (self.len + 1) * 2 > self.entries.len() && self.bits < Self::MAX_BITS {
            self.grow();
        }
        self.place(Entry::new(self.tag(key), number));
        self.len += 1;
    }

    /// Removes `number`, which is in the table under `key`.
    ///
    /// # Panics
    /// If it is not.
    #[inline]
    pub fn remove(&mut self, key: u64, number: u32) {
        let mut hole = self.home(self.tag(key));
        while Entry(self.entries[hole]).number() != Some(number) {
            assert!(self.entries[hole] != 0, "the number is in the table");
            hole = self.after(hole);
        }
        // Shift back what would no longer be reached past the hole.
        let mask = self.entries.len() - 1;
        let mut at = self.after(hole);
        while self.entries[at] != 0 {
            let wanted = self.home(Entry(self.entries[at]).tag());
            if (at.wrapping_sub(wanted) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.entries[hole] = 0;
        self.len -= 1;
    }

    #[inline]
    fn place(&mut self, entry: Entry) {
        let mut at = self.home(entry.tag());
        while self.entries[at] != 0 {
            at = self.after(at);
        }
        self.entries[at] = entry.0;
    }

    fn grow(&mut self) {
        self.bits += 1;
        let old = std::mem::replace(&mut self.entries, Array::zeros(1 << self.bits));
        for &entry in old.iter().filter(|&&entry| entry != 0) {
            self.place(Entry(entry));
        }
    }

    #[inline]
    fn tag(&self, key: u64) -> u32 {
        let product = u128::from(key ^ self.secret[0]) * u128::from(self.secret[1]);
        ((product as u64) ^ ((product >> 64) as u64)).wrapping_mul(self.secret[1]).wrapping_shr(32) as u32
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        (tag >> (Self::MAX_BITS - self.bits)) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.entries.len() - 1)
    }
}
