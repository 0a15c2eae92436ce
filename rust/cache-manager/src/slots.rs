//! Slots: dense indices of claimed requests, with a generation, so that a stale one is noticed.

use crate::sequence::Sequence;
use std::collections::VecDeque;
use std::fmt;

/// A claimed request. Bits 0–19 are its dense index, bits 20–30 the index's generation, so that the slot
/// of a released request names nobody, and every slot is a non-negative int32.
///
/// An index is used again only when 1,024 others have been free for longer, and its generation comes
/// back after 2,048 uses: a stale slot is refused through two million later claims.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotId(pub u32);

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.cast_signed().fmt(f) // as it stands in an int32 array
    }
}

impl SlotId {
    const INDEX_BITS: u32 = 20;
    const GENERATIONS: u32 = 1 << 11;
    /// Free indices that wait before the one that was freed first is used again.
    const RESTING: usize = 1 << 10;
    /// Most requests claimed at one time.
    pub const MAX: usize = 1 << Self::INDEX_BITS;

    fn new(index: usize, generation: u32) -> SlotId {
        SlotId(index as u32 | generation << Self::INDEX_BITS)
    }

    /// The dense index.
    #[inline]
    pub fn index(self) -> usize {
        (self.0 & (Self::MAX as u32 - 1)) as usize
    }

    fn generation(self) -> u32 {
        self.0 >> Self::INDEX_BITS
    }
}

struct Slot {
    generation: u32,
    sequence: Option<Box<Sequence>>,
}

/// The claimed sequences.
#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    /// Free indices, the one that was freed first at the front.
    free: VecDeque<u32>,
}

impl Slots {
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Gives `sequence` a slot; the caller checked that fewer than [`SlotId::MAX`] are taken.
    pub(crate) fn insert(&mut self, sequence: Sequence) -> SlotId {
        let rested = self.free.len() > SlotId::RESTING || self.slots.len() == SlotId::MAX;
        let index = if let Some(index) = self.free.pop_front_if(|_| rested) {
            index as usize
        } else {
            self.slots.push(Slot { generation: 0, sequence: None });
            self.slots.len() - 1
        };
        let slot = &mut self.slots[index];
        slot.sequence = Some(Box::new(sequence));
        SlotId::new(index, slot.generation)
    }

    pub(crate) fn remove(&mut self, id: SlotId) -> Option<Box<Sequence>> {
        let slot = self.slots.get_mut(id.index()).filter(|slot| slot.generation == id.generation())?;
        let sequence = slot.sequence.take()?;
        slot.generation = (slot.generation + 1) % SlotId::GENERATIONS;
        self.free.push_back(id.index() as u32);
        Some(sequence)
    }

    /// Undoes the newest [`Slots::insert`], whose id nobody else knows.
    pub(crate) fn take_back(&mut self, id: SlotId) -> Option<Box<Sequence>> {
        let slot = self.slots.get_mut(id.index()).filter(|slot| slot.generation == id.generation())?;
        let sequence = slot.sequence.take()?;
        if id.index() + 1 == self.slots.len() && id.generation() == 0 {
            self.slots.pop();
        } else {
            self.free.push_front(id.index() as u32);
        }
        Some(sequence)
    }

    #[inline]
    pub(crate) fn get(&self, id: SlotId) -> Option<&Sequence> {
        let slot = self.slots.get(id.index())?;
        if slot.generation == id.generation() { slot.sequence.as_deref() } else { None }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: SlotId) -> Option<&mut Sequence> {
        let slot = self.slots.get_mut(id.index())?;
        if slot.generation == id.generation() { slot.sequence.as_deref_mut() } else { None }
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.slots.iter_mut().filter_map(|slot| slot.sequence.as_deref_mut())
    }

    /// Free indices, in the order in which they are used again.
    pub(crate) fn free(&self) -> impl Iterator<Item = u32> + '_ {
        self.free.iter().copied()
    }

    /// Every claimed request, by index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlotId, &Sequence)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            slot.sequence.as_deref().map(|sequence| (SlotId::new(index, slot.generation), sequence))
        })
    }
}
