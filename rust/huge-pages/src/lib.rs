//! Room for large arrays in huge pages, where the system has them.
//!
//! A look-up in a large cache reads a little of many places. With pages of 4 KiB the processor's table of
//! addresses forgets most of them between two look-ups; with pages of 2 MiB it does not. So arrays that grow
//! with the cache ask for these. It is advice: nothing but the time of an access depends on it.

/// Makes room for `more` elements behind those of `memory`, as [`Vec::reserve`] does, and asks for huge pages
/// for it if it is large.
#[inline]
pub fn reserve<T>(memory: &mut Vec<T>, more: usize) {
    if memory.capacity() - memory.len() < more {
        memory.reserve(more);
        advise(memory);
    }
}

/// `len` zeros. Memory that the system hands out is zero already: it costs nothing until it is written.
pub fn zeros(len: usize) -> Vec<u64> {
    let memory = vec![0; len];
    advise(&memory);
    memory
}

/// Less than this is not worth a call.
#[cfg(target_os = "linux")]
const LARGE: usize = 1 << 20;

#[cfg(target_os = "linux")]
#[cold]
fn advise<T>(memory: &Vec<T>) {
    use rustix::mm::{Advice, madvise};

    let bytes = memory.capacity() * size_of::<T>();
    let page = rustix::param::page_size();
    let skipped = memory.as_ptr().addr().next_multiple_of(page) - memory.as_ptr().addr();
    let Some(len) = bytes.checked_sub(skipped).map(|bytes| bytes / page * page) else { return };
    if len >= LARGE {
        let start = memory.as_ptr().wrapping_byte_add(skipped);
        // SAFETY: `start .. start + len` is inside the vector's own allocation, and this advice changes no
        // byte of it.
        let told = unsafe { madvise(start.cast_mut().cast(), len, Advice::LinuxHugepage) };
        let _ = told; // a system without huge pages says so; the memory is as good
    }
}

#[cfg(not(target_os = "linux"))]
fn advise<T>(_: &Vec<T>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_made_and_elements_stay() {
        let mut memory: Vec<u32> = (0..10).collect();
        reserve(&mut memory, 3_000_000);
        assert!(memory.capacity() >= 3_000_010);
        assert_eq!(memory, (0..10).collect::<Vec<u32>>());
        memory.resize(3_000_010, 7);
        assert_eq!(memory[3_000_009], 7);
    }

    #[test]
    fn room_that_is_there_is_not_made_again() {
        let mut memory = Vec::with_capacity(8);
        memory.push(1u8);
        let before = memory.as_ptr();
        reserve(&mut memory, 7);
        assert_eq!((memory.as_ptr(), memory.capacity()), (before, 8));
    }

    #[test]
    fn zeros_are_zeros() {
        assert!(zeros(1 << 18).iter().all(|&word| word == 0));
        assert!(zeros(0).is_empty());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_is_asked_for_huge_pages_for_large_arrays() {
        let memory = zeros(1 << 20);
        let address = memory.as_ptr().addr() + (4 << 20);
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
