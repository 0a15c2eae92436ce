//! A hit is the same block: same parent, tokens, extra keys and namespace, whatever the hashes say.

use crate::common::{PAGE, claim, computed, config, forward, hit, overridden, prompt, row, salted};
use cache_manager::Ledger;

const PROMPT: [i32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// `PROMPT` and one more token.
const LONGER: [i32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

/// A ledger in which `PROMPT` was computed and released.
fn stored() -> Ledger {
    let mut ledger = Ledger::new(config(16));
    let slot = computed(&mut ledger, &PROMPT);
    ledger.release(&[slot]).unwrap();
    ledger
}

#[test]
fn whole_blocks_are_hit_up_to_the_last_token_of_the_prompt() {
    let mut ledger = stored();
    assert_eq!(hit(&mut ledger, prompt(&LONGER)), 8);
    assert_eq!(hit(&mut ledger, prompt(&PROMPT)), 4);
    assert_eq!(hit(&mut ledger, prompt(&PROMPT[..5])), 4);
    assert_eq!(hit(&mut ledger, prompt(&PROMPT[..4])), 0);
    ledger.verify().unwrap();
}

#[test]
fn blocks_of_another_salt_are_not_hit() {
    assert_eq!(hit(&mut stored(), salted(&LONGER, "tenant", PAGE)), 0);
}

#[test]
fn a_block_whose_hash_is_taken_stays_private_with_all_below_it() {
    let mut ledger = stored();
    let mut forged = prompt(&[1, 2, 3, 99, 5, 6, 7, 8, 9]);
    forged.chain = prompt(&LONGER).chain;
    let slot = claim(&mut ledger, forged);
    forward(&mut ledger, slot);
    assert_eq!(ledger.cached_blocks(), 2);
    ledger.release(&[slot]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&LONGER)), 8);
    ledger.verify().unwrap();
}

#[test]
fn a_token_that_is_generated_at_an_overridden_index_is_itself() {
    let mut ledger = Ledger::new(config(16));
    let slot = claim(&mut ledger, overridden(&PROMPT[..5], &[(6, 99)]));
    forward(&mut ledger, slot);
    PROMPT[5..].iter().for_each(|&token| ledger.update(slot, token).unwrap());
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 99, 8, 9])), 4);
    assert_eq!(hit(&mut ledger, prompt(&LONGER)), 8);
}

#[test]
fn an_override_goes_with_the_token_that_truncation_drops() {
    let mut ledger = Ledger::new(config(16));
    let slot = claim(&mut ledger, overridden(&PROMPT, &[(6, 99)]));
    ledger.truncate(slot, 5).unwrap();
    PROMPT[5..].iter().for_each(|&token| ledger.update(slot, token).unwrap());
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 99, 8, 9])), 4);
    assert_eq!(hit(&mut ledger, prompt(&LONGER)), 8);
}

#[test]
fn a_truncated_sequence_stores_what_a_fresh_one_would() {
    let mut ledger = Ledger::new(config(16));
    let slot = computed(&mut ledger, &[1, 2, 3, 4, 5, 6, 70, 80]);
    ledger.truncate(slot, 6).unwrap();
    PROMPT[6..].iter().for_each(|&token| ledger.update(slot, token).unwrap());
    forward(&mut ledger, slot);
    let edited: Vec<Vec<u8>> =
        ledger.commit(slot).unwrap().iter().map(|identity| identity.to_vec()).collect();
    let fresh = prompt(&PROMPT).chain;
    assert_eq!(edited, [fresh.identity(0).to_vec(), fresh.identity(1).to_vec()]);
    ledger.release(&[slot]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&LONGER)), 8);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 5, 6, 70, 80, 9])), 8);
    ledger.verify().unwrap();
}

#[test]
fn a_truncated_request_gives_up_the_stored_page_that_the_cut_falls_into() {
    let mut ledger = Ledger::new(config(16));
    let slot = computed(&mut ledger, &PROMPT);
    let before = row(&ledger, slot);
    ledger.truncate(slot, 6).unwrap();
    assert_eq!(ledger.position(slot).unwrap().processed, 4);
    ledger.alloc(&[slot], &[]).unwrap();
    let after = row(&ledger, slot);
    assert_eq!(after[0], before[0]);
    assert_ne!(after[1], before[1]);
}

#[test]
fn a_block_published_by_a_sibling_is_hit_in_the_middle_of_a_prompt() {
    let mut ledger = Ledger::new(config(16));
    let slot = claim(&mut ledger, prompt(&LONGER));
    ledger.alloc(&[slot], &[3]).unwrap();
    ledger.close_step();
    ledger.step(&[slot], &[], None).unwrap();
    let sibling = computed(&mut ledger, &PROMPT);
    ledger.alloc(&[slot], &[]).unwrap();
    let position = ledger.position(slot).unwrap();
    assert_eq!((position.processed, position.active, position.cached), (8, 1, 5));
    assert_eq!(row(&ledger, slot)[..2], row(&ledger, sibling)[..]);
    ledger.verify().unwrap();
}

#[test]
fn a_request_that_does_not_read_hits_nothing_but_stores() {
    let mut ledger = Ledger::new(config(16));
    for _ in 0..2 {
        let mut request = prompt(&LONGER);
        request.no_read = true;
        let slot = claim(&mut ledger, request);
        forward(&mut ledger, slot);
        assert_eq!(ledger.position(slot).unwrap().cached, 0);
        ledger.release(&[slot]).unwrap();
    }
    assert_eq!(hit(&mut ledger, prompt(&LONGER)), 8);
}

#[test]
fn a_request_that_does_not_store_publishes_nothing_but_hits() {
    let mut ledger = stored();
    let mut request = prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
    request.no_store = true;
    let slot = claim(&mut ledger, request);
    forward(&mut ledger, slot);
    assert_eq!((ledger.position(slot).unwrap().cached, ledger.cached_blocks()), (8, 2));
}

#[test]
fn after_a_reset_neither_old_blocks_nor_those_in_use_are_hit() {
    let mut ledger = stored();
    let running = claim(&mut ledger, prompt(&[1, 2, 3, 4, 50, 60, 70, 80]));
    ledger.alloc(&[running], &[]).unwrap();
    ledger.close_step();
    ledger.reset_prefix_cache();
    ledger.step(&[running], &[], None).unwrap();
    ledger.release(&[running]).unwrap();
    assert_eq!(hit(&mut ledger, prompt(&LONGER)), 0);
    assert_eq!(hit(&mut ledger, prompt(&[1, 2, 3, 4, 50, 60, 70, 80, 9])), 0);
    ledger.verify().unwrap();
}

#[test]
fn a_token_that_is_not_known_yet_is_neither_hashed_nor_stored() {
    let mut ledger = Ledger::new(config(16));
    let slot = claim(&mut ledger, prompt(&PROMPT[..7]));
    ledger.alloc(&[slot], &[]).unwrap();
    ledger.close_step();
    ledger.alloc(&[slot], &[]).unwrap();
    ledger.close_step();
    assert_eq!(ledger.commit(slot).unwrap().len(), 1);
    ledger.step(&[slot], &[8], None).unwrap();
    assert_eq!((ledger.commit(slot).unwrap().len(), ledger.cached_blocks()), (2, 1));
    ledger.step(&[slot], &[9], None).unwrap();
    assert_eq!(ledger.cached_blocks(), 2);
}
