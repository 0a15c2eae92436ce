//! Forecasts of what is easily counted too high: states that are kept while steps overlap, and requests that are set
//! aside or on their way back.

use crate::common::{PAGE, claim, config, copy_pages, forward, prompt};
use crate::scenes::{PLENTY, Place, Scene};
use crate::shelf::Shelf;
use block_hash::Token;
use block_pool::GroupId;
use cache_manager::{
    BegunCopy, CopyEnd, CopyJob, Group, GroupKind, Ledger, LedgerConfig, NewSequence, Outlook, SlotId,
    Snapshots,
};

fn of_groups(kinds: &[GroupKind]) -> Ledger {
    let groups = kinds.iter().map(|&kind| Group { kind, pages: 20 }).collect();
    Ledger::new(LedgerConfig { groups, ..config(20) })
}

fn needed(ledger: &mut Ledger, slot: SlotId) -> Vec<u32> {
    ledger.needed_blocks_one_step(&[slot], Outlook::default()).unwrap()
}

fn remaining(ledger: &mut Ledger, slot: SlotId, chunk: u32, two_steps: bool) -> Vec<u32> {
    let outlook = Outlook { num_tokens: &[chunk], two_steps, walks: &[] };
    ledger.remaining_blocks_to_completion(&[slot], outlook).unwrap()
}

fn free(ledger: &Ledger) -> Vec<u32> {
    ledger.pools().groups().map(|group| ledger.pools().available(group)).collect()
}

fn end(ledger: &mut Ledger, shelf: &mut Shelf, job: &CopyJob) {
    shelf.end(job, CopyEnd::Done);
    ledger.end_copies(&[(job.id.0, CopyEnd::Done)]).unwrap();
    ledger.free_units(shelf);
    ledger.verify().unwrap();
}

fn only(begun: Vec<BegunCopy>) -> CopyJob {
    let [BegunCopy { job, .. }] = <[BegunCopy; 1]>::try_from(begun).ok().expect("one copy");
    job
}

fn suspend(ledger: &mut Ledger, shelf: &mut Shelf, slot: SlotId) {
    let job = only(ledger.suspend(shelf, &[slot]).unwrap());
    end(ledger, shelf, &job);
}

#[test]
fn two_forwards_both_go_on_from_kept_states_only_if_one_reaches_from_state_to_state() {
    let states = GroupKind::Recurrent(Snapshots { interval: 8, last: false });
    let mut ledger = of_groups(&[GroupKind::Full, states]);
    let tokens: Vec<Token> = (0..20).collect();
    let slot = claim(&mut ledger, NewSequence { max_new_tokens: Some(4), ..prompt(&tokens) });
    // 24 tokens are six blocks. States are kept after 8, 16 tokens: a forward of four goes on from one at most, and so
    // do two of them.
    assert_eq!(remaining(&mut ledger, slot, 4, false), [6, 2]);
    assert_eq!(remaining(&mut ledger, slot, 4, true), [6, 2]);
    assert_eq!(remaining(&mut ledger, slot, 8, false), [6, 2]);
    assert_eq!(remaining(&mut ledger, slot, 8, true), [6, 3]);

    let mut fewest = 20;
    for _ in 0..3 {
        if ledger.alloc(&[slot], &[8]).is_err() {
            ledger.step(&[slot], &[], None).unwrap(); // two are out
            ledger.alloc(&[slot], &[8]).unwrap();
        }
        copy_pages(&mut ledger);
        ledger.close_step();
        fewest = fewest.min(free(&ledger)[1]); // from 0, 8 and 16 on
    }
    assert_eq!(fewest, 20 - 3);
}

#[test]
fn states_near_the_end_of_a_prompt_are_kept_at_once() {
    // After 16 tokens, and after 20, where the last whole block of the prompt ends.
    let states = GroupKind::Recurrent(Snapshots { interval: 16, last: true });
    let mut ledger = of_groups(&[GroupKind::Full, states]);
    let tokens: Vec<Token> = (0..22).collect();
    let slot = claim(&mut ledger, NewSequence { max_new_tokens: Some(4), ..prompt(&tokens) });
    assert_eq!(remaining(&mut ledger, slot, 3, true), [7, 2]);
    assert_eq!(remaining(&mut ledger, slot, 4, true), [7, 3]);
    let tokens: Vec<Token> = (100..125).collect(); // after 16 and 24
    let slot = claim(&mut ledger, NewSequence { max_new_tokens: Some(4), ..prompt(&tokens) });
    assert_eq!(remaining(&mut ledger, slot, 7, true), [8, 2]);
    assert_eq!(remaining(&mut ledger, slot, 8, true), [8, 3]);
}

#[test]
fn a_suspended_request_takes_no_page_for_blocks_that_others_hold() {
    let (mut ledger, mut shelf) = (Ledger::new(config(20)), Shelf::new(20));
    let tokens: Vec<Token> = (0..13).collect();
    let slots = [(); 2].map(|()| {
        let new = NewSequence { max_new_tokens: Some(4), ..prompt(&tokens) };
        claim(&mut ledger, new)
    });
    for slot in slots {
        forward(&mut ledger, slot);
    }
    let [other, slot] = slots;
    assert_eq!(free(&ledger), [20 - 5], "three blocks are common");
    suspend(&mut ledger, &mut shelf, slot);
    // The fourth block has the 13th token; 17 tokens are five blocks.
    assert_eq!((needed(&mut ledger, slot), remaining(&mut ledger, slot, 1, true)), (vec![1], vec![2]));
    let job = only(ledger.resume(&mut shelf, &[slot]).unwrap());
    assert_eq!((job.pages.len(), free(&ledger)), (1, vec![20 - 5]));
    assert_eq!(remaining(&mut ledger, slot, 1, true), [1]);
    end(&mut ledger, &mut shelf, &job);
    assert_eq!((free(&ledger), remaining(&mut ledger, slot, 1, true)), (vec![20 - 5], vec![1]));

    suspend(&mut ledger, &mut shelf, slot);
    ledger.release(&[other]).unwrap();
    // Nobody holds what it finds: each block takes a page of those that are free.
    assert_eq!((free(&ledger), needed(&mut ledger, slot)), (vec![20], vec![4]));
    let job = only(ledger.resume(&mut shelf, &[slot]).unwrap());
    assert_eq!((job.pages.len(), free(&ledger)), (1, vec![20 - 4]));
}

#[test]
fn a_request_comes_back_to_where_others_got_with_its_prompt() {
    let (mut ledger, mut shelf) = (Ledger::new(config(20)), Shelf::new(20));
    let tokens: Vec<Token> = (0..17).collect();
    let slot = claim(&mut ledger, prompt(&tokens));
    ledger.alloc(&[slot], &[6]).unwrap();
    ledger.close_step();
    ledger.step(&[slot], &[], None).unwrap();
    suspend(&mut ledger, &mut shelf, slot);
    assert_eq!(needed(&mut ledger, slot), [5]);
    let other = claim(&mut ledger, prompt(&tokens));
    forward(&mut ledger, other);
    // Four blocks are found, and the last token is computed.
    assert_eq!((free(&ledger), needed(&mut ledger, slot)), (vec![20 - 5], vec![1]));
    let job = only(ledger.resume(&mut shelf, &[slot]).unwrap());
    assert_eq!((job.pages.len(), free(&ledger)), (0, vec![20 - 5]));
    // They stay though the other is gone, and others take all pages that are free.
    ledger.release(&[other]).unwrap();
    let others: Vec<Token> = (100..164).collect();
    let third = claim(&mut ledger, prompt(&others));
    forward(&mut ledger, third);
    end(&mut ledger, &mut shelf, &job);
    let position = ledger.position(slot).unwrap();
    assert_eq!((position.processed, position.cached, free(&ledger)), (16, 10, vec![0]));
    ledger.release(&[third]).unwrap();
    forward(&mut ledger, slot);
    assert_eq!(free(&ledger), [20 - 5]);
    ledger.preempt(&[slot]).unwrap();
    ledger.verify().unwrap();
}

#[test]
fn what_was_found_is_free_again_if_the_copy_fails_or_nobody_waits_for_it() {
    for fails in [true, false] {
        let (mut ledger, mut shelf) = (Ledger::new(config(20)), Shelf::new(20));
        let tokens: Vec<Token> = (0..13).collect();
        let slot = claim(&mut ledger, prompt(&tokens));
        forward(&mut ledger, slot);
        suspend(&mut ledger, &mut shelf, slot);
        let job = only(ledger.resume(&mut shelf, &[slot]).unwrap());
        assert_eq!(free(&ledger), [16]);
        if !fails {
            ledger.preempt(&[slot]).unwrap();
        }
        shelf.end(&job, CopyEnd::Failed);
        ledger.end_copies(&[(job.id.0, CopyEnd::Failed)]).unwrap();
        ledger.free_units(&mut shelf);
        ledger.verify().unwrap();
        assert_eq!((free(&ledger), ledger.cached_blocks(), shelf.private()), (vec![20], 3, 0));
    }
}

#[test]
fn what_is_computed_again_beside_others_comes_back_and_is_not_counted() {
    let states = GroupKind::Recurrent(Snapshots { interval: 64, last: false });
    let mut ledger = of_groups(&[GroupKind::Full, states]);
    let tokens: Vec<Token> = (0..33).collect();
    let other = claim(&mut ledger, prompt(&tokens));
    forward(&mut ledger, other);
    // No state is stored, so that nothing is found; but the eight blocks that are computed again are the other's then.
    let slot = claim(&mut ledger, NewSequence { max_new_tokens: Some(12), ..prompt(&tokens) });
    assert_eq!(needed(&mut ledger, slot), [9, 1]);
    // 45 tokens are twelve blocks, of which four are its own in the end. Two forwards of four tokens need three at most,
    // two of eight tokens five.
    assert_eq!(remaining(&mut ledger, slot, 4, true), [4, 1]);
    assert_eq!(remaining(&mut ledger, slot, 8, true), [5, 1]);
    let mut fewest = 20;
    while ledger.position(slot).unwrap().processed < 33 {
        ledger.alloc(&[slot], &[8]).unwrap();
        fewest = fewest.min(free(&ledger)[0]);
        ledger.close_step();
        ledger.step(&[slot], &[], None).unwrap();
        // One at a time.
    }
    assert_eq!((fewest, free(&ledger)[0]), (20 - 9 - 2, 20 - 9 - 1));
    ledger.release(&[other]).unwrap();
    assert_eq!(free(&ledger)[0], 20 - 9);
    assert_eq!(remaining(&mut ledger, slot, 8, true), [3, 0]);
}

#[test]
fn who_is_on_the_way_back_has_its_pages_in_every_group() {
    let window = GroupKind::Window { window: 9, sinks: 0 };
    let states = GroupKind::Recurrent(Snapshots::default());
    let kinds = [GroupKind::Full, window, states, GroupKind::Scratch, GroupKind::Cross];
    let (mut ledger, mut shelf) = (of_groups(&kinds), Shelf::new(60));
    let tokens: Vec<Token> = (0..13).collect();
    let new = NewSequence { max_new_tokens: Some(8), encoder: 9, no_store: true, ..prompt(&tokens) };
    let slot = claim(&mut ledger, new);
    forward(&mut ledger, slot);
    // 21 tokens are six blocks. Of the window there are three at any time, as there are now.
    assert_eq!(remaining(&mut ledger, slot, 1, false), [2, 0, 0, 0, 0]);
    suspend(&mut ledger, &mut shelf, slot);
    assert_eq!(remaining(&mut ledger, slot, 1, false), [6, 3, 1, 1, 3]);
    let job = only(ledger.resume(&mut shelf, &[slot]).unwrap());
    assert_eq!(free(&ledger), [16, 17, 19, 19, 17]);
    assert_eq!(remaining(&mut ledger, slot, 1, false), [2, 0, 0, 0, 0]);
    end(&mut ledger, &mut shelf, &job);
    assert_eq!(remaining(&mut ledger, slot, 1, false), [2, 0, 0, 0, 0]);
}

#[test]
fn who_computes_nothing_more_still_takes_pages_to_come_back() {
    let (mut ledger, mut shelf) = (Ledger::new(config(20)), Shelf::new(20));
    let tokens: Vec<Token> = (0..10).collect();
    let new = NewSequence { max_length: 10, no_store: true, ..prompt(&tokens) };
    let slot = claim(&mut ledger, new);
    forward(&mut ledger, slot);
    suspend(&mut ledger, &mut shelf, slot);
    let pages = 10_u32.div_ceil(PAGE);
    assert_eq!(
        (needed(&mut ledger, slot), remaining(&mut ledger, slot, 1, false)),
        (vec![pages], vec![pages])
    );
}

#[test]
fn a_state_that_is_kept_comes_back_and_is_copied() {
    let states = GroupKind::Recurrent(Snapshots { interval: 4, last: false });
    let (mut ledger, mut shelf) = (of_groups(&[GroupKind::Full, states]), Shelf::new(60));
    let tokens: Vec<Token> = (0..9).collect();
    let slot = claim(&mut ledger, prompt(&tokens));
    ledger.alloc(&[slot], &[8]).unwrap();
    ledger.close_step();
    ledger.step(&[slot], &[], None).unwrap();
    suspend(&mut ledger, &mut shelf, slot);
    // Two blocks and the state are stored and idle, the third block and the copy of the state are new.
    assert_eq!(needed(&mut ledger, slot), [3, 2]);
    let job = only(ledger.resume(&mut shelf, &[slot]).unwrap());
    assert_eq!((job.pages.len(), free(&ledger)), (0, vec![18, 19]));
    end(&mut ledger, &mut shelf, &job);
    ledger.alloc(&[slot], &[]).unwrap();
    let copies = ledger.take_page_copies(GroupId(1));
    assert_eq!((copies.len(), free(&ledger)), (1, vec![17, 18]));
}

#[test]
fn what_suspended_requests_need_is_what_resume_and_alloc_take() {
    let mut tried = 0;
    for seed in 0..4000 {
        let mut scene = Scene::new(seed, false, PLENTY);
        for _ in 0..20 + scene.random.below(40) {
            scene.act().expect("there is plenty of room");
        }
        scene.end_all_copies();
        let away: Vec<usize> =
            scene.all().into_iter().filter(|&at| scene.running[at].place == Place::Away).collect();
        let Some(&index) = away.first() else { continue };
        let (needs, held) = (scene.needed(&[index]), scene.held());
        scene.resume(index).expect("there is plenty of room");
        scene.end_all_copies();
        let slot = scene.running[index].slot;
        if scene.ledger.position(slot).expect("it is claimed").processed == 0 {
            continue; // its copy failed
        }
        if scene.plannable().contains(&index) {
            scene.alloc(&[index], true).expect("there is plenty of room");
        }
        for (group, (&need, (before, after))) in needs.iter().zip(held.iter().zip(scene.held())).enumerate() {
            let took = after.saturating_sub(*before);
            assert_eq!(took, need, "seed {seed}, group {group}: {need} said, {took} taken");
        }
        tried += 1;
    }
    assert!(tried > 500, "{tried} came back: more must be tried");
}

/// Computes the prompt of a request in forwards of `chunk` tokens; gives the fewest free pages of the first group meanwhile.
fn fewest_free(ledger: &mut Ledger, slot: SlotId, chunk: u32) -> u32 {
    let mut fewest = free(ledger)[0];
    while ledger.position(slot).is_ok_and(|at| at.processed < at.known) {
        ledger.alloc(&[slot], &[chunk]).unwrap();
        copy_pages(ledger);
        ledger.close_step();
        fewest = fewest.min(free(ledger)[0]);
        ledger.step(&[slot], &[], None).unwrap();
        ledger.verify().unwrap();
    }
    fewest
}

#[test]
fn blocks_of_a_window_that_others_hold_are_given_back_once_they_are_computed() {
    // There are no states to go on from, so that nothing is found.
    let states = GroupKind::Recurrent(Snapshots { interval: 0, last: false });
    let mut ledger = of_groups(&[GroupKind::Window { window: 9, sinks: 0 }, states]);
    let tokens: Vec<Token> = (0..12).collect();
    let new = || NewSequence { max_new_tokens: Some(1), ..prompt(&tokens) };
    let other = claim(&mut ledger, new());
    forward(&mut ledger, other);
    assert_eq!(free(&ledger)[0], 20 - 2, "the window of the 13th token begins in the second block");
    let slot = claim(&mut ledger, new());
    // Three blocks when the third is computed, of which the second is the other's by then.
    assert_eq!(remaining(&mut ledger, slot, 1, false)[0], 2);
    assert_eq!(fewest_free(&mut ledger, slot, 1), 20 - 2 - 2);
    // In one forward all three are its own.
    let slot = claim(&mut ledger, new());
    assert_eq!(remaining(&mut ledger, slot, 12, false)[0], 3);
    assert_eq!(fewest_free(&mut ledger, slot, 12), 20 - 2 - 3);
}

#[test]
fn a_forward_starts_behind_those_whose_results_it_waits_for() {
    let mut ledger = of_groups(&[GroupKind::Chunked { chunk: 8 }]);
    let tokens: Vec<Token> = (0..17).collect();
    let slot = claim(&mut ledger, NewSequence { max_new_tokens: Some(15), ..prompt(&tokens) });
    ledger.alloc(&[slot], &[9]).unwrap();
    ledger.close_step();
    // It has three pages. From the ninth token on the next forward needs the last three blocks, and each later one two.
    assert_eq!(free(&ledger), [20 - 3]);
    assert_eq!(remaining(&mut ledger, slot, 40, false), [0]);
    // With two forwards out the next may start before anything is known: five blocks.
    assert_eq!(remaining(&mut ledger, slot, 40, true), [2]);
}

#[test]
fn of_several_that_compute_what_nobody_holds_one_pays_for_it() {
    let states = GroupKind::Recurrent(Snapshots { interval: 0, last: false });
    let mut ledger = of_groups(&[GroupKind::Full, states]);
    let tokens: Vec<Token> = (0..13).collect();
    let new = || NewSequence { max_new_tokens: Some(3), ..prompt(&tokens) };
    let before = claim(&mut ledger, new());
    forward(&mut ledger, before);
    ledger.release(&[before]).unwrap();
    let both = [(); 2].map(|()| claim(&mut ledger, new()));
    // Four blocks each, of which three become common.
    let outlook = Outlook { num_tokens: &[1], ..Outlook::default() };
    let said = ledger.remaining_blocks_to_completion(&both, outlook).unwrap();
    assert_eq!(said[0] + said[2], 4 + 1);
    assert_eq!(both.map(|slot| fewest_free(&mut ledger, slot, 1)), [20 - 4, 20 - 5]);
}
