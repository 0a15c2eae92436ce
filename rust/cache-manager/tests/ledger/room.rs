//! Whether a batch fits, against a twin of the ledger that has pages enough to show what it would hold.

use crate::common::{claim, computed, config, prompt, row};
use crate::driver::Random;
use block_hash::Token;
use block_pool::{GroupId, PageId, PageState};
use cache_manager::{Ledger, LedgerConfig, LedgerError, Reserve, RowMemory, SlotId};
use std::collections::HashSet;

const PLENTY: u32 = 200;

/// A prompt that shares a prefix with most others.
fn any_prompt(random: &mut Random) -> Vec<Token> {
    let shared = 0..random.below(18) as Token;
    let own = 100 + 10 * random.below(6) as Token;
    shared.chain(own..=own + random.below(6) as Token).collect()
}

/// A ledger with a past in which nothing was evicted, and a batch to plan next. Equal for equal seeds.
fn past(seed: u64, pages: u32) -> (Ledger, Vec<SlotId>, Vec<u32>) {
    let mut random = Random(seed);
    let reserve = if random.below(3) == 0 { Reserve::Prompt } else { Reserve::Chunk };
    let mut ledger = Ledger::new(LedgerConfig { reserve, ..config(pages) });
    let (mut batch, mut bounds) = (Vec::new(), Vec::new());
    for _ in 0..2 + random.below(4) {
        let slot = claim(&mut ledger, prompt(&any_prompt(&mut random)));
        let chunk = 1 + random.below(24) as u32;
        ledger.alloc(&[slot], &[chunk]).expect("the past fits");
        ledger.close_step();
        if random.below(3) == 0 {
            ledger.start_copy(slot, 0, 1).expect("it holds a block");
        }
        let unfinished = ledger.position(slot).is_ok_and(|at| at.active < at.known - at.processed);
        ledger.step(&[slot], &[], None).expect("its step is out");
        if random.below(2) == 0 {
            ledger.release(&[slot]).expect("it is claimed");
        } else if unfinished {
            batch.push(slot);
            bounds.push(1 + random.below(24) as u32);
        }
    }
    for _ in 0..=random.below(3) {
        let index = random.below(batch.len() + 1);
        batch.insert(index, claim(&mut ledger, prompt(&any_prompt(&mut random))));
        bounds.insert(index, 1 + random.below(24) as u32);
    }
    (ledger, batch, bounds)
}

/// Pages that a ledger without want of room holds after planning the first `count` of the batch.
fn held_after(seed: u64, count: usize) -> u32 {
    let (mut ledger, batch, bounds) = past(seed, PLENTY);
    if count > 0 {
        ledger.alloc(&batch[..count], &bounds[..count]).expect("there is plenty of room");
    }
    let pool = ledger.pool();
    let held: HashSet<_> = (1..=PLENTY)
        .map(PageId)
        .filter(|&page| matches!(pool.state(page), PageState::Referenced | PageState::InFlight))
        .collect();
    held.len() as u32
}

#[test]
fn a_batch_fits_exactly_when_the_pages_it_would_hold_do() {
    let (mut fitted, mut refused) = (0, 0);
    for seed in 0..1500 {
        // The smallest pool that had room for the past, up to three pages more, and one whole request.
        let (ample, batch, bounds) = past(seed, PLENTY);
        let touched = PLENTY - ample.pool().pristine();
        let pages = touched.max(8) + (seed % 4) as u32;
        let (mut ledger, _, _) = past(seed, pages);
        let short = (1..=batch.len()).find(|&count| held_after(seed, count) > pages);
        let fits = held_after(seed, batch.len()) <= pages;
        let before = ledger.fingerprint();
        match ledger.alloc(&batch, &bounds) {
            Ok(()) => {
                assert!(fits, "seed {seed}: planned more than there is");
                fitted += 1;
            }
            Err(LedgerError::InsufficientBlocks { slot, .. }) => {
                assert!(!fits, "seed {seed}: refused a batch that fits");
                assert_eq!(Some(slot), short.map(|count| batch[count - 1]), "seed {seed}");
                assert_eq!(ledger.fingerprint(), before, "seed {seed}");
                refused += 1;
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
        ledger.verify().unwrap();
    }
    assert!(fitted > 300 && refused > 300, "{fitted} fitted, {refused} were refused: both must be tried");
}

#[test]
fn an_allocation_never_evicts_a_block_that_the_same_batch_hits() {
    let mut ledger = Ledger::new(config(4));
    let old = computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 7, 8]);
    ledger.release(&[old]).unwrap();
    let other = claim(&mut ledger, prompt(&[9; 5]));
    let again = claim(&mut ledger, prompt(&[1, 2, 3, 4, 9]));
    // Pages 1 and 2 are cached; 3 and 4 go to `other`, so `again` must have page 2 for its tail.
    ledger.alloc(&[other, again], &[]).unwrap();
    assert_eq!(ledger.position(again).unwrap().cached, 4);
    assert_eq!(row(&ledger, again), [1, 2]);
    ledger.verify().unwrap();
}

#[test]
fn a_padding_request_takes_no_page_and_stores_nothing() {
    let mut ledger = Ledger::new(config(1));
    let padding = claim(&mut ledger, prompt(&[0; 4]));
    ledger.alloc_dummy(padding).unwrap();
    assert!(matches!(ledger.pages(padding, GroupId::FIRST), Err(LedgerError::Padding(_))));
    assert!(matches!(ledger.commit(padding), Err(LedgerError::Padding(_))));
    let mut table = [7; 3];
    ledger.write_rows(GroupId::FIRST, &[padding], &mut RowMemory::default(), &mut table, 3).unwrap();
    assert_eq!(table, [7; 3]); // a fresh buffer is zeros, the null page: nothing is written
    ledger.close_step();
    ledger.step(&[padding], &[0], None).unwrap();
    assert_eq!((ledger.pool().available(), ledger.cached_blocks()), (1, 0));
    ledger.release(&[padding]).unwrap();
    ledger.verify().unwrap();
}
