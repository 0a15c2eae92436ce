//! The arena: units of one size in one piece of memory, which is taken as they are first written.

use crate::job::UnitId;
use memory::Array;
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

    /// `units` units of `unit_bytes` bytes.
    ///
    /// # Errors
    /// The system has no address space for them.
    pub fn new(units: u32, unit_bytes: usize) -> Result<Arena, NoAddressSpace> {
        let refused = NoAddressSpace { units, unit_bytes };
        let alignment = if unit_bytes < Self::SMALL { 1 } else { Self::ALIGNMENT };
        let stride = unit_bytes.checked_next_multiple_of(alignment).ok_or(refused)?;
        let bytes = stride.checked_mul(units as usize).ok_or(refused)?;
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
}
