//! Arrays that grow with the cache.

use crate::region::Region;
use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// An array of plain values that grows at its end, as [`Vec`] does, in memory that begins at a cache line and
/// comes in huge pages where it is large and the system has them.
///
/// A look-up in a large cache reads a little of many places. With pages of 4 KiB the processor's table of
/// addresses forgets most of them between two look-ups; with pages of 2 MiB it does not.
pub struct Array<T: Copy> {
    region: Region,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Copy> Array<T> {
    const FITS: () =
        assert!(size_of::<T>() > 0 && align_of::<T>() <= 64, "values of regions that begin at cache lines");

    /// No values, and address space for `capacity` of them if there is that much; memory follows use. What is
    /// behind the values is zeros: none is ever taken away.
    pub fn with_capacity(capacity: usize) -> Array<T> {
        let () = Self::FITS;
        let region = capacity.checked_mul(size_of::<T>()).and_then(Region::new);
        Array { region: region.unwrap_or(Region::EMPTY), len: 0, of: PhantomData }
    }

    /// Values that fit before the array moves.
    pub fn capacity(&self) -> usize {
        self.region.bytes() / size_of::<T>()
    }

    /// Adds a value.
    #[inline]
    pub fn push(&mut self, value: T) {
        self.extend_by(1, value);
    }

    /// Adds `more` equal values.
    #[inline]
    pub fn extend_by(&mut self, more: usize, value: T) {
        if self.capacity() - self.len < more {
            self.grow(more);
        }
        let first = self.len;
        // SAFETY: there is room, and what is behind the values is zeros or values: written before it is read.
        unsafe {
            for index in first..first + more {
                self.region.start().cast::<T>().add(index).write(value);
            }
        }
        self.len += more;
    }

    /// Adds `more` values of zero bytes, which are there already.
    ///
    /// # Safety
    /// Zero bytes are a value.
    #[inline]
    pub(crate) unsafe fn extend_zeros(&mut self, more: usize) {
        if self.capacity() - self.len < more {
            self.grow(more);
        }
        self.len += more;
    }

    #[cold]
    fn grow(&mut self, more: usize) {
        let needed = self.len.checked_add(more).expect("an array fits the address space");
        let grown = Array::with_room(needed.max(self.len * 2).max(16));
        // SAFETY: two regions, both with room for what is copied.
        unsafe {
            grown.region.start().cast::<T>().copy_from_nonoverlapping(self.region.start().cast(), self.len);
        }
        *self = Array { len: self.len, ..grown };
    }

    /// [`Array::with_capacity`], or the end of the process.
    fn with_room(capacity: usize) -> Array<T> {
        let array = Array::with_capacity(capacity);
        if array.capacity() < capacity {
            handle_alloc_error(Layout::array::<T>(capacity).unwrap_or(Layout::new::<T>()));
        }
        array
    }
}

/// Numbers, of which all bytes zero are one.
impl Array<u64> {
    /// `len` zeros. They cost nothing until they are written, where they are many.
    pub fn zeros(len: usize) -> Array<u64> {
        Array { len, ..Array::with_room(len) }
    }

    /// [`Array::zeros`]; `None` if there is no address space for them. Where they are 64 KiB or more they begin at a page
    /// of the system's, and their last page holds nothing else.
    pub fn try_zeros(len: usize) -> Option<Array<u64>> {
        let array = Array::with_capacity(len);
        (array.capacity() >= len).then_some(Array { len, ..array })
    }
}

impl<T: Copy> Deref for Array<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: so many values were written there; or zeros, which are numbers.
        unsafe { std::slice::from_raw_parts(self.region.start().cast().as_ptr(), self.len) }
    }
}

impl<T: Copy> DerefMut for Array<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.region.start().cast().as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_when_an_array_grows() {
        let mut array = Array::with_capacity(2);
        for value in 0..2_000_000u32 {
            array.push(value);
        }
        assert!(array.iter().copied().eq(0..2_000_000));
        array.extend_by(3, 7);
        assert_eq!((array.len(), &array[1_999_999..]), (2_000_003, &[1_999_999, 7, 7, 7][..]));
        array[1] = 9;
        assert_eq!(array[..3], [0, 9, 2]);
    }

    #[test]
    fn an_array_does_not_move_within_its_capacity() {
        for capacity in [1, 10, 1 << 20] {
            let mut array = Array::with_capacity(capacity);
            let before = array.as_ptr();
            array.extend_by(capacity, 1u64);
            assert_eq!((array.as_ptr(), array.capacity()), (before, capacity));
            assert_eq!(before.addr() % 64, 0, "a cache line begins here");
        }
    }

    #[test]
    fn an_empty_array_is_one() {
        let mut array = Array::with_capacity(0);
        assert_eq!(array[..], []);
        array.push(5u8);
        assert_eq!(array[..], [5]);
    }

    #[test]
    fn address_space_that_is_not_there_is_asked_for_again_when_it_is_needed() {
        let mut array = Array::with_capacity(usize::MAX / 2);
        assert_eq!(array.capacity(), 0);
        array.push(1u64);
        assert_eq!(array[..], [1]);
    }

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn address_space_is_given_back() {
        for _ in 0..200 {
            // All of them at once would be more than a process has.
            assert_eq!(Array::<u64>::with_capacity(1 << 37).capacity(), 1 << 37);
        }
    }

    #[test]
    fn zeros_are_zeros() {
        for len in [0, 3, 1 << 18, 1 << 20] {
            let zeros = Array::zeros(len);
            assert!(zeros.len() == len && zeros.iter().all(|&word| word == 0));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_is_asked_for_huge_pages_for_large_arrays() {
        let array = Array::zeros(1 << 20);
        let address = array.as_ptr().addr();
        assert_eq!(address % (2 << 20), 0, "a huge page begins here");
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let inside = |line: &str| {
            let (start, rest) = line.split_once('-')?;
            let end = rest.split(' ').next()?;
            let bounds = [start, end].map(|bound| usize::from_str_radix(bound, 16).ok());
            Some((bounds[0]?..bounds[1]?).contains(&address))
        };
        let mut lines = maps.lines().skip_while(|line| inside(line) != Some(true));
        let flags = lines.find(|line| line.starts_with("VmFlags")).unwrap();
        assert!(flags.contains(" hg"), "{flags}");
    }
}
