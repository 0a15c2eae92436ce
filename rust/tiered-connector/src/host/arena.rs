//! The arena: units of one size in one piece of memory, which is taken as they are first written.

use crate::job::UnitId;
use memory::Array;
use rustix::param::page_size;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::ptr::NonNull;
use thiserror::Error;

/// Host memory for blocks.
pub struct Arena {
    /// Where the first unit begins.
    start: NonNull<u8>,
    /// Owns the memory; only used by way of `start`.
    _memory: Array<u64>,
    unit_bytes: usize,
    stride: usize,
    units: u32,
}

// SAFETY: memory of the arena's own. What is done with units says who may use which when.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

/// There is no address space for an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("no address space for {units} units of {unit_bytes} bytes")]
pub struct NoAddressSpace {
    /// Units wanted.
    pub units: u32,
    /// Bytes of each.
    pub unit_bytes: usize,
}

impl Arena {
    /// Units begin at cache lines, unless they are so small that the gaps would count. Those of whole pages of 4,096
    /// bytes begin at one, as direct I/O wants it.
    const ALIGNMENT: usize = 64;
    const SMALL: usize = 1 << 12;
    /// The memory is a multiple of this, and so whole pages of the system's, however large they are.
    const PAGES: usize = 1 << 16;

    /// `units` units of `unit_bytes` bytes.
    ///
    /// # Errors
    /// The system has no address space for them.
    pub fn new(units: u32, unit_bytes: usize) -> Result<Arena, NoAddressSpace> {
        let refused = NoAddressSpace { units, unit_bytes };
        let alignment = if unit_bytes < Self::SMALL { 1 } else { Self::ALIGNMENT };
        let stride = unit_bytes.checked_next_multiple_of(alignment).ok_or(refused)?;
        let bytes = stride.checked_mul(units as usize).ok_or(refused)?;
        let bytes = bytes.checked_next_multiple_of(Self::PAGES).ok_or(refused)?;
        let mut memory = Array::try_zeros(bytes.div_ceil(size_of::<u64>())).ok_or(refused)?;
        let start = NonNull::from(&mut *memory).cast();
        Ok(Arena { start, _memory: memory, unit_bytes, stride, units })
    }

    /// Bytes of a unit.
    pub fn unit_bytes(&self) -> usize {
        self.unit_bytes
    }

    /// Units in all.
    pub fn units(&self) -> u32 {
        self.units
    }

    /// Where a unit's bytes begin, and how many there are that are no other unit's.
    ///
    /// # Panics
    /// If there is no such unit.
    pub(crate) fn unit_with_room(&self, unit: UnitId) -> (NonNull<u8>, usize) {
        (self.unit(unit), self.stride)
    }

    /// Where a unit's bytes begin.
    ///
    /// # Panics
    /// If there is no such unit.
    pub(crate) fn unit(&self, unit: UnitId) -> NonNull<u8> {
        assert!(unit.0 < self.units, "there is no unit {}", unit.0);
        // SAFETY: inside the arena.
        unsafe { self.start.add(unit.0 as usize * self.stride) }
    }

    /// The memory of some units, others of which may be in use, in whole pages. A page that units share is the first
    /// one's: that of small units is empty but for one in so many.
    ///
    /// # Panics
    /// If there are no such units.
    pub(crate) fn pages_of(&self, units: Range<u32>) -> &[UnsafeCell<u8>] {
        assert!(units.start <= units.end && units.end <= self.units, "there are no units {units:?}");
        let border = |unit: u32| (unit as usize * self.stride).next_multiple_of(page_size());
        let (from, to) = (border(units.start), border(units.end));
        // SAFETY: the arena's own bytes, for as long as it is borrowed, and behind cells: who uses units writes there.
        unsafe { std::slice::from_raw_parts(self.start.add(from).cast().as_ptr(), to - from) }
    }
}
