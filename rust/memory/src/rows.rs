//! Rows of tokens, written past the processor's caches.

use crate::Array;
use std::ops::Range;

/// Integers of a cache line.
const LINE: usize = 16;
/// Fewer integers are written the usual way: past the caches, the end of it must be waited for.
const STREAMED: usize = 16 * LINE;

/// Memory in cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([i32; LINE]);

/// Rows of equally many integers, one behind the other, the first at the start of a cache line.
///
/// Many at once are written past the caches: a plain store would first read the line that it overwrites, and
/// put out what is needed sooner.
pub struct Rows {
    lines: Array<Line>,
    row: usize,
    count: usize,
}

impl Rows {
    /// No rows yet, of `row` integers each, and address space for `capacity` rows.
    pub fn with_capacity(row: usize, capacity: usize) -> Rows {
        let lines = Array::with_capacity(capacity.saturating_mul(row).div_ceil(LINE));
        Rows { lines, row, count: 0 }
    }

    /// Appends a row of zeros.
    #[inline]
    pub fn push(&mut self) {
        self.count += 1;
        let more = (self.count * self.row).div_ceil(LINE) - self.lines.len();
        // SAFETY: zero bytes are a line of zeros.
        unsafe { self.lines.extend_zeros(more) };
    }

    /// Rows that follow each other, as one piece.
    ///
    /// # Panics
    /// If there are fewer rows.
    #[inline]
    pub fn get(&self, rows: Range<usize>) -> &[i32] {
        &self.all()[rows.start * self.row..rows.end * self.row]
    }

    /// Overwrites rows: the number of each, and its integers.
    ///
    /// # Panics
    /// If there is no such row, or it is of another length.
    pub fn write<'a>(&mut self, rows: impl ExactSizeIterator<Item = (usize, &'a [i32])>) {
        let len = self.row;
        if len.is_multiple_of(LINE) && rows.len() * len >= STREAMED {
            let lines = len / LINE;
            return stream(&mut self.lines, lines, rows.map(|(row, values)| (row * lines, values)));
        }
        let all = self.all_mut();
        for (row, values) in rows {
            all[row * len..(row + 1) * len].copy_from_slice(values);
        }
    }

    #[inline]
    fn all(&self) -> &[i32] {
        // SAFETY: lines are integers and nothing else, one behind the other, and the rows end in the last line.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.count * self.row) }
    }

    #[inline]
    fn all_mut(&mut self) -> &mut [i32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.count * self.row) }
    }
}

/// Copies integers to the `len` lines from each place on, past the caches.
fn stream<'a>(lines: &mut [Line], len: usize, places: impl Iterator<Item = (usize, &'a [i32])>) {
    let _fence = Fence; // also when this ends by a panic
    for (start, values) in places {
        assert!(values.len() == len * LINE, "a row has another length");
        let (values, _) = values.as_chunks::<LINE>();
        for (line, values) in lines[start..start + len].iter_mut().zip(values) {
            store(line, *values);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
fn store(line: &mut Line, values: [i32; LINE]) {
    use std::arch::x86_64::{__m128i, _mm_stream_si128};

    let to = std::ptr::from_mut(line).cast::<__m128i>();
    // SAFETY: the same size, and every bit pattern is a vector.
    let values: [__m128i; 4] = unsafe { std::mem::transmute(values) };
    for (part, value) in values.into_iter().enumerate() {
        // SAFETY: a quarter of a line, which is aligned to more than its size.
        unsafe { _mm_stream_si128(to.add(part), value) };
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn store(line: &mut Line, values: [i32; LINE]) {
    line.0 = values;
}

/// Streamed stores are not ordered with others: without this at their end, whoever sees a later store might not
/// see them.
struct Fence;

impl Drop for Fence {
    fn drop(&mut self) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: every processor of this kind has it.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` rows of `row` integers, of which those in `written` were written at once: row `r` is `r`,
    /// `r + 1`, … and the others are zeros.
    fn written(row: usize, count: usize, written: &[usize]) -> Rows {
        let mut rows = Rows::with_capacity(row, 0);
        (0..count).for_each(|_| rows.push());
        let values: Vec<Vec<i32>> = written.iter().map(|&number| values(number, row)).collect();
        rows.write(written.iter().copied().zip(values.iter().map(Vec::as_slice)));
        rows
    }

    fn values(number: usize, row: usize) -> Vec<i32> {
        (number..number + row).map(|value| value as i32).collect()
    }

    #[test]
    fn rows_hold_what_was_written_and_nothing_else_was() {
        for row in [1, 3, 15, 16, 17, 32, 128] {
            for many in [0, 1, 2, 60, 299] {
                // From the last on, every second one.
                let numbers: Vec<usize> = (0..many).map(|number| 600 - 2 * number).collect();
                let rows = written(row, 601, &numbers);
                for number in 0..601 {
                    let expected = if numbers.contains(&number) { values(number, row) } else { vec![0; row] };
                    assert_eq!(
                        rows.get(number..number + 1),
                        expected,
                        "row {number} of {row}, {many} written"
                    );
                }
            }
        }
    }

    #[test]
    fn rows_that_follow_each_other_are_one_piece() {
        let rows = written(48, 100, &(0..100).collect::<Vec<_>>());
        assert_eq!(rows.get(7..9), [values(7, 48), values(8, 48)].concat());
        assert_eq!(rows.get(100..100), []);
    }

    #[test]
    fn rows_stay_when_there_are_more() {
        let mut rows = written(16, 300, &(0..300).collect::<Vec<_>>());
        (0..100_000).for_each(|_| rows.push());
        assert!((0..300).all(|number| rows.get(number..number + 1) == values(number, 16)));
    }

    #[test]
    #[should_panic(expected = "length")]
    fn a_row_of_another_length_is_refused() {
        let mut rows = written(16, 20, &[]);
        rows.write((0..20).map(|row| (row, &[0; 15][..])));
    }

    #[test]
    fn rows_that_are_not_there_are_refused_where_they_would_be_in_the_last_line() {
        let refused = |call: fn(Rows)| std::panic::catch_unwind(|| call(written(5, 3, &[]))).is_err();
        assert!(refused(|rows| _ = rows.get(2..4).len()));
        assert!(refused(|mut rows| rows.write(std::iter::once((3, &[0; 5][..])))));
        assert!(!refused(|mut rows| rows.write(std::iter::once((2, &[0; 5][..])))));
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn a_row_that_is_not_there_is_refused() {
        let mut rows = written(16, 20, &[]);
        rows.write((1..21).map(|row| (row, &[0; 16][..])).collect::<Vec<_>>().into_iter());
    }
}
