//! An entry: what a slot holds, in bytes that check themselves.
//!
//! Numbers are little-endian. Of an entry of `size` bytes
//!
//! | bytes | what |
//! |---|---|
//! | 0 .. 8 | [`MAGIC`] |
//! | 8 .. 12 | the slot |
//! | 12 | the block's priority |
//! | 13 .. 16 | zeros |
//! | 16 .. 24 | the epoch: the store forgets the blocks of earlier ones |
//! | 24 .. 32 | the serial number: of two entries of one block the higher holds |
//! | 32 .. 40 | the block's hash |
//! | 40 .. 56 | its second identity |
//! | 56 .. 64 | bytes of the payload |
//! | 64 .. 80 | XXH3-128 of bytes 8 .. 64 but for 12 .. 16, then of the payload |
//! | 80 .. 88 | the hash of the block before it, 0 if there is none |
//! | 88 .. 92 | how many blocks are before it |
//! | 92 .. 96 | bytes of its content |
//! | 96 .. | what it was made of: its content, then zeros |
//! | `size` - 8 .. | XXH3-64 of all before it, seeded with the store's number |

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// What an entry begins with: its kind and format.
pub const MAGIC: [u8; 8] = *b"PKENTRY1";
const CONTENT: usize = 96;
const SUM: usize = 8;

/// A block, as every tier knows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    /// Its hash.
    pub hash: u64,
    /// Its second identity.
    pub guard: [u8; 16],
}

/// Where a block comes from. The store does not look into the content.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Origin {
    /// The hash of the block before it, 0 if there is none.
    pub parent: u64,
    /// How many blocks are before it.
    pub position: u32,
    /// What it was made of, for whoever announces it.
    pub content: Vec<u8>,
}

/// What a slot holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The slot, counted from 0.
    pub slot: u32,
    /// The block.
    pub key: Key,
    /// How long to keep it.
    pub priority: u8,
    /// When it was written, in resets of the store.
    pub epoch: u64,
    /// When it was written, in blocks.
    pub serial: u64,
    /// Bytes of its payload.
    pub len: u64,
    /// Of the payload, bound to all the above but the priority.
    pub checksum: u128,
    /// Where it comes from.
    pub origin: Origin,
}

/// Bytes of an entry with a content of up to so many bytes.
pub fn entry_bytes(content: usize) -> usize {
    (CONTENT + content + SUM).next_multiple_of(64)
}

impl Entry {
    /// The checksum that `payload` has in this slot, for this block, at this time.
    pub fn checksum_of(&self, payload: &[u8]) -> u128 {
        let mut sum = Xxh3::new();
        sum.update(&self.slot.to_le_bytes());
        for number in [self.epoch, self.serial, self.key.hash] {
            sum.update(&number.to_le_bytes());
        }
        sum.update(&self.key.guard);
        sum.update(&(payload.len() as u64).to_le_bytes());
        sum.update(payload);
        sum.digest128()
    }

    /// Whether `payload` is what was written.
    pub fn matches(&self, payload: &[u8]) -> bool {
        payload.len() as u64 == self.len && self.checksum_of(payload) == self.checksum
    }

    /// Writes the entry over `bytes`, all of them.
    ///
    /// # Panics
    /// If the content has no room.
    pub fn encode(&self, store: u64, bytes: &mut [u8]) {
        let (body, sum) = bytes.split_at_mut(bytes.len() - SUM);
        body.fill(0);
        let mut at = 0;
        let mut put = |field: &[u8]| {
            body[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&self.slot.to_le_bytes());
        put(&[self.priority, 0, 0, 0]);
        put(&self.epoch.to_le_bytes());
        put(&self.serial.to_le_bytes());
        put(&self.key.hash.to_le_bytes());
        put(&self.key.guard);
        put(&self.len.to_le_bytes());
        put(&self.checksum.to_le_bytes());
        let Origin { parent, position, content } = &self.origin;
        put(&parent.to_le_bytes());
        put(&position.to_le_bytes());
        put(&(content.len() as u32).to_le_bytes());
        put(content);
        sum.copy_from_slice(&xxh3_64_with_seed(body, store).to_le_bytes());
    }

    /// The entry in `bytes`, if it is a whole one, of this store and slot.
    pub fn decode(store: u64, slot: u32, bytes: &[u8]) -> Option<Entry> {
        let (body, sum) = bytes.split_at_checked(bytes.len().checked_sub(SUM)?)?;
        if body.len() < CONTENT || !body.starts_with(&MAGIC) {
            return None;
        }
        if xxh3_64_with_seed(body, store).to_le_bytes() != sum {
            return None;
        }
        let number = |at: usize| u64::from_le_bytes(array(body, at));
        let short = |at: usize| u32::from_le_bytes(array(body, at));
        let content = body.get(CONTENT..CONTENT.checked_add(short(92) as usize)?)?.to_vec();
        let entry = Entry {
            slot: short(8),
            key: Key { hash: number(32), guard: array(body, 40) },
            priority: body[12],
            epoch: number(16),
            serial: number(24),
            len: number(56),
            checksum: u128::from_le_bytes(array(body, 64)),
            origin: Origin { parent: number(80), position: short(88), content },
        };
        // The highest numbers have no next ones, and serial numbers begin with 1: no store ever writes others.
        let numbered = entry.epoch < u64::MAX && (1..u64::MAX).contains(&entry.serial);
        (entry.slot == slot && numbered).then_some(entry)
    }
}

/// Bytes from `at` on, which there are.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        let mut entry = Entry {
            slot: 7,
            key: Key { hash: 0x0102_0304_0506_0708, guard: [9; 16] },
            priority: 35,
            epoch: 3,
            serial: 41,
            len: 5,
            checksum: 0,
            origin: Origin { parent: 0x11, position: 6, content: b"where from".to_vec() },
        };
        entry.checksum = entry.checksum_of(b"bytes");
        entry
    }

    fn encoded() -> Vec<u8> {
        let mut bytes = vec![0xEE; entry_bytes(16)];
        entry().encode(5, &mut bytes);
        bytes
    }

    #[test]
    fn an_entry_comes_back_as_it_went() {
        assert_eq!(entry_bytes(16), 128);
        assert_eq!(Entry::decode(5, 7, &encoded()), Some(entry()));
    }

    #[test]
    fn an_entry_has_the_layout_that_is_written_down() {
        let bytes = encoded();
        assert_eq!(&bytes[..16], b"PKENTRY1\x07\0\0\0\x23\0\0\0");
        assert_eq!(&bytes[16..32], b"\x03\0\0\0\0\0\0\0\x29\0\0\0\0\0\0\0");
        assert_eq!(&bytes[32..40], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!((&bytes[40..56], &bytes[56..64]), (&[9; 16][..], &b"\x05\0\0\0\0\0\0\0"[..]));
        assert_eq!(&bytes[80..106], b"\x11\0\0\0\0\0\0\0\x06\0\0\0\x0a\0\0\0where from");
        assert!(bytes[106..120].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn no_changed_byte_and_no_other_place_goes_unnoticed() {
        let bytes = encoded();
        for at in 0..bytes.len() {
            for flip in [1, 0x80, 0xFF] {
                let mut changed = bytes.clone();
                changed[at] ^= flip;
                assert_eq!(Entry::decode(5, 7, &changed), None, "byte {at} with {flip:#x}");
            }
        }
        assert_eq!(Entry::decode(5, 6, &bytes), None, "another slot");
        assert_eq!(Entry::decode(6, 7, &bytes), None, "another store");
        for len in 0..bytes.len() {
            assert_eq!(Entry::decode(5, 7, &bytes[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn a_checksum_belongs_to_one_block_in_one_slot_at_one_time() {
        let entry = entry();
        assert!(entry.matches(b"bytes") && !entry.matches(b"bytez") && !entry.matches(b"byte"));
        let others = [
            Entry { slot: 8, ..entry.clone() },
            Entry { epoch: 4, ..entry.clone() },
            Entry { serial: 42, ..entry.clone() },
            Entry { key: Key { hash: 1, ..entry.key }, ..entry.clone() },
            Entry { key: Key { guard: [8; 16], ..entry.key }, ..entry.clone() },
        ];
        assert!(others.iter().all(|other| !other.matches(b"bytes")));
    }
}
