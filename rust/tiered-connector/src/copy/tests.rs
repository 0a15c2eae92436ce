use super::*;
use crate::job::{JobId, UnitId};
use block_pool::{PageId, Step};

const PAGES: usize = 5;

/// Bytes of a region, its page stride, and offset and length of each piece.
type Pool = (usize, usize, &'static [(usize, usize)]);

fn job(direction: Direction, moves: &[(u32, u32)]) -> Job {
    let units = moves.iter().map(|&(unit, _)| UnitId(unit)).collect();
    let pages = moves.iter().map(|&(_, page)| PageId(page)).collect();
    Job { id: JobId(0), direction, units, pages, after: Step(0) }
}

/// A region over all of `memory`, which outlives it in each test.
fn region(memory: &mut [u8], page_stride: usize, pieces: &[(usize, usize)]) -> Result<Region, RegionError> {
    let pieces = pieces.iter().map(|&(offset, len)| Piece { offset, len }).collect();
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the tests keep the memory, and use it while nothing is copied.
    unsafe { Region::new(base, memory.len(), PAGES, page_stride, pieces) }
}

/// Where the bytes of a page lie.
fn bytes_of(page: usize, page_stride: usize, pieces: &[(usize, usize)]) -> Vec<usize> {
    pieces
        .iter()
        .flat_map(|&(offset, len)| (page * page_stride + offset)..(page * page_stride + offset + len))
        .collect()
}

#[test]
fn pages_come_back_as_they_went_and_nothing_else_changes() {
    // A page-first pool; a layer-first one of three layers; a pool with a region of its own for scales.
    let pools: [&[Pool]; 3] = [
        &[(5 * 24, 24, &[(0, 24)])],
        &[(3 * 5 * 8, 8, &[(0, 8), (40, 8), (80, 8)])],
        &[(5 * 16, 16, &[(0, 16)]), (5 * 4 + 2, 4, &[(1, 2)])],
    ];
    for pool in pools {
        let mut memories: Vec<Vec<u8>> =
            pool.iter().map(|&(len, ..)| (0..len).map(|i| i as u8).collect()).collect();
        let before = memories.clone();
        let layout = pool.iter().zip(&mut memories);
        let regions: Vec<Region> =
            layout.map(|(&(_, stride, pieces), memory)| region(memory, stride, pieces).unwrap()).collect();
        let unit_bytes = regions.iter().map(Region::page_bytes).sum();
        let engine = CpuEngine::new(regions, Arc::new(Arena::new(3, unit_bytes).unwrap()));

        assert_eq!(engine.copy(&job(Direction::Store, &[(2, 1), (0, 4)]), &|| false), Outcome::Done);
        for memory in &mut memories {
            memory.fill(255);
        }
        // The two pages change places.
        assert_eq!(engine.copy(&job(Direction::Load, &[(2, 4), (0, 1)]), &|| false), Outcome::Done);

        for ((&(len, stride, pieces), memory), before) in pool.iter().zip(&memories).zip(&before) {
            let mut expected = vec![255; len];
            for (from, to) in [(1, 4), (4, 1)] {
                for (from, to) in bytes_of(from, stride, pieces).into_iter().zip(bytes_of(to, stride, pieces))
                {
                    expected[to] = before[from];
                }
            }
            assert_eq!(*memory, expected);
        }
    }
}

#[test]
fn a_copy_gives_up_between_pages() {
    let mut memory = vec![7; 5 * 4];
    let engine =
        CpuEngine::new(vec![region(&mut memory, 4, &[(0, 4)]).unwrap()], Arc::new(Arena::new(2, 4).unwrap()));
    let asked = std::cell::Cell::new(0);
    let give_up = || asked.replace(asked.get() + 1) == 1;
    assert_eq!(engine.copy(&job(Direction::Store, &[(0, 1), (1, 2)]), &give_up), Outcome::Cancelled);
    assert_eq!(asked.get(), 2);
}

#[test]
fn memory_that_is_no_pool_is_refused() {
    let mut memory = vec![0; 39];
    assert_eq!(
        region(&mut memory, 8, &[(0, 8)]).unwrap_err(),
        RegionError::TooShort { page: 4, end: 40, bytes: 39 }
    );
    assert_eq!(region(&mut memory, 4, &[(0, 8)]).unwrap_err(), RegionError::Overlap(4));
    assert_eq!(region(&mut memory, 4, &[(0, 2), (1, 2)]).unwrap_err(), RegionError::Overlap(1));
    assert_eq!(region(&mut memory, 0, &[(0, 2)]).unwrap_err(), RegionError::Overlap(0));
    assert_eq!(region(&mut memory, 4, &[(0, 0)]).unwrap_err(), RegionError::Empty);
    assert_eq!(region(&mut memory, 4, &[]).unwrap_err(), RegionError::Empty);
    let far = region(&mut memory, usize::MAX / 2, &[(0, 2)]).unwrap_err();
    assert!(matches!(far, RegionError::TooShort { .. }), "{far}");
}

#[test]
fn pages_overlap_where_any_two_of_their_bytes_do() {
    let mut memory = vec![0; 200];
    for stride in 0..14 {
        for second in 0..40 {
            for len in 1..6 {
                let pieces = [(3, 4), (second, len)];
                let mut seen = std::collections::HashSet::new();
                let bytes = (0..PAGES).flat_map(|page| bytes_of(page, stride, &pieces));
                let apart = bytes.into_iter().all(|byte| seen.insert(byte));
                let made = region(&mut memory, stride, &pieces);
                assert_eq!(made.is_ok(), apart, "stride {stride}, pieces {pieces:?}");
            }
        }
    }
}

#[test]
fn an_arena_that_no_address_space_holds_is_refused() {
    assert!(Arena::new(u32::MAX, usize::MAX / 2).is_err());
    assert!(Arena::new(u32::MAX, 1 << 40).is_err());
}

#[test]
fn an_engine_copies_between_the_regions_that_it_was_given_last() {
    let (mut first, mut second) = (vec![7; 5 * 8], vec![0; 5 * 8]);
    let engine =
        CpuEngine::new(vec![region(&mut first, 8, &[(0, 8)]).unwrap()], Arc::new(Arena::new(1, 8).unwrap()));
    assert_eq!(engine.copy(&job(Direction::Store, &[(0, 3)]), &|| false), Outcome::Done);
    engine.drop_regions();
    let given_up = engine.copy(&job(Direction::Load, &[(0, 1)]), &|| false);
    assert!(matches!(given_up, Outcome::Failed(_)), "{given_up:?}");
    engine.take_regions(vec![region(&mut second, 8, &[(0, 8)]).unwrap()]);
    assert_eq!(engine.copy(&job(Direction::Load, &[(0, 1)]), &|| false), Outcome::Done);
    drop(engine);
    assert_eq!(second.iter().map(|&byte| usize::from(byte)).sum::<usize>(), 8 * 7);
    assert_eq!(second[8..16], [7; 8]);
}

#[test]
fn bytes_are_copied_between_addresses_of_any_kind_and_no_others_are() {
    let random = |i: usize| (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[7];
    let source: Vec<u8> = (0..4 * 4096).map(random).collect();
    let place = |memory: *mut u8, offset: usize| {
        let start = memory.align_offset(4096) + offset;
        // SAFETY: inside the memory, which is longer by a page than what is used of it.
        NonNull::new(unsafe { memory.add(start) }).unwrap()
    };
    for len in [0, 1, 63, 64, 4095, 4096, 4097, 4096 + 64, 8191] {
        for (from, to) in
            (0..130).map(|to| (0, to)).chain([(1, 0), (8, 7), (8, 24), (4090, 4096 + 8), (17, 17)])
        {
            let mut read = vec![0; source.len()];
            let from = place(read.as_mut_ptr(), from);
            let mut memory = vec![0xEE; 5 * 4096];
            let at = place(memory.as_mut_ptr(), to);
            // SAFETY: both have so many bytes from there on.
            unsafe {
                NonNull::new(source.as_ptr().cast_mut()).unwrap().copy_to_nonoverlapping(from, len);
                copy_bytes(from, at, len);
            }
            let start = at.as_ptr() as usize - memory.as_ptr() as usize;
            assert!(memory[start..start + len] == source[..len], "{len} bytes, {to} behind");
            let others = memory[..start].iter().chain(&memory[start + len..]);
            assert!(others.copied().all(|byte| byte == 0xEE), "{len} bytes, {to} behind");
        }
    }
}
