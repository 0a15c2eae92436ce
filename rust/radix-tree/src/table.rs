//! The table from chained hash to node: open addressing, linear probing, no tombstones.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// An entry: the upper half of the mixed hash, and the node's number plus one (0: empty).
#[derive(Clone, Copy, Default)]
struct Entry {
    tag: u32,
    node_plus_one: u32,
}

/// Finds nodes by 64-bit key. Keys are mixed with a secret of the process, so that chosen keys cannot
/// crowd one place; nothing observable depends on the secret.
pub(crate) struct NodeTable {
    entries: Vec<Entry>,
    len: usize,
    bits: u32,
    secret: [u64; 2],
}

impl NodeTable {
    const MIN_BITS: u32 = 6;
    /// An entry's home is taken from its 32-bit tag.
    const MAX_BITS: u32 = 32;

    /// A table that holds `capacity` nodes before it grows.
    pub(crate) fn with_capacity(capacity: usize) -> NodeTable {
        let bits = (capacity.max(1) * 2).next_power_of_two().ilog2().clamp(Self::MIN_BITS, Self::MAX_BITS);
        let random = RandomState::new();
        let secret = [random.hash_one(1u8), random.hash_one(2u8) | 1];
        NodeTable { entries: vec![Entry::default(); 1 << bits], len: 0, bits, secret }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Nodes that the table holds before it grows.
    pub(crate) fn capacity(&self) -> usize {
        self.entries.len() / 2
    }

    /// The node under `key` for which `is_key` holds (tags of different keys may be equal).
    #[inline]
    pub(crate) fn find(&self, key: u64, is_key: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = self.tag(key);
        let mut at = self.home(tag);
        loop {
            let entry = self.entries[at];
            let node = entry.node_plus_one.checked_sub(1)?;
            if entry.tag == tag && is_key(node) {
                return Some(node);
            }
            at = self.after(at);
        }
    }

    /// Adds `node` under `key`, which is not in the table.
    pub(crate) fn insert(&mut self, key: u64, node: u32) {
        if (self.len + 1) * 2 > self.entries.len() && self.bits < Self::MAX_BITS {
            self.grow();
        }
        let tag = self.tag(key);
        self.place(Entry { tag, node_plus_one: node + 1 });
        self.len += 1;
    }

    /// Removes `node`, which is in the table under `key`.
    pub(crate) fn remove(&mut self, key: u64, node: u32) {
        let mut hole = self.home(self.tag(key));
        while self.entries[hole].node_plus_one != node + 1 {
            assert!(self.entries[hole].node_plus_one != 0, "node {node} is not in the table");
            hole = self.after(hole);
        }
        // Shift back what would no longer be reached past the hole.
        let mut at = hole;
        loop {
            at = self.after(at);
            let entry = self.entries[at];
            if entry.node_plus_one == 0 {
                break;
            }
            let wanted = self.home(entry.tag);
            let mask = self.entries.len() - 1;
            if (at.wrapping_sub(wanted) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = Entry::default();
        self.len -= 1;
    }

    fn place(&mut self, entry: Entry) {
        let mut at = self.home(entry.tag);
        while self.entries[at].node_plus_one != 0 {
            at = self.after(at);
        }
        self.entries[at] = entry;
    }

    fn grow(&mut self) {
        self.bits += 1;
        let old = std::mem::replace(&mut self.entries, vec![Entry::default(); 1 << self.bits]);
        old.into_iter().filter(|entry| entry.node_plus_one != 0).for_each(|entry| self.place(entry));
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
