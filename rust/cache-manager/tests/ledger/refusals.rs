//! Bad calls: each is an error of its kind, and leaves the ledger as it was.

use crate::common::{claim, computed, config, finish_copies, prompt};
use block_hash::{ContentSpan, ExtraInputs, ExtraKeys};
use block_pool::GroupId;
use cache_manager::{
    CopyEnd, FlashInferTables, Ledger, LedgerConfig, LedgerError, RowMemory, SlotId, VarlenTables,
};

/// A ledger in the middle of its work: 5 of 8 pages are held.
struct Scene {
    ledger: Ledger,
    /// Everything is computed.
    idle: SlotId,
    /// Two prompt chunks of four tokens are out, one token is left.
    busy: SlotId,
    /// Planned in the open step.
    planned: SlotId,
    /// Claimed; needs 3 pages.
    waiting: SlotId,
    /// Released.
    gone: SlotId,
    /// A copy in flight.
    copy: u64,
}

fn scene() -> Scene {
    let mut ledger = Ledger::new(LedgerConfig { max_seq_len: Some(20), ..config(8) });
    let gone = claim(&mut ledger, prompt(&[1]));
    ledger.release(&[gone]).unwrap();
    let idle = computed(&mut ledger, &[1, 2, 3, 4, 5]);
    let busy = claim(&mut ledger, prompt(&[11, 12, 13, 14, 15, 16, 17, 18, 19]));
    for _ in 0..2 {
        ledger.alloc(&[busy], &[4]).unwrap();
        ledger.close_step();
    }
    let copy = ledger.start_copy(idle, 0, 1).unwrap().id.0;
    ledger.begin_step(Some(10.0), &[]).unwrap();
    let planned = claim(&mut ledger, prompt(&[21, 22, 23]));
    ledger.alloc(&[planned], &[]).unwrap();
    let waiting = claim(&mut ledger, prompt(&[31, 32, 33, 34, 35, 36, 37, 38, 39]));
    Scene { ledger, idle, busy, planned, waiting, gone, copy }
}

/// The error of a call that is refused; checks that it changed nothing.
fn refused<T>(call: impl FnOnce(&mut Scene) -> Result<T, LedgerError>) -> LedgerError {
    let mut scene = scene();
    let before = scene.ledger.fingerprint();
    let error = call(&mut scene).err().expect("the call is refused");
    assert_eq!(scene.ledger.fingerprint(), before, "{error}");
    scene.ledger.verify().unwrap();
    error
}

macro_rules! refuses {
    ($($name:ident: $call:expr => $error:pat,)+) => {
        $(#[test]
        fn $name() {
            let error = refused($call);
            assert!(matches!(error, $error), "{error:?}");
        })+
    };
}

refuses! {
    alloc_of_a_released_request: |s| s.ledger.alloc(&[s.waiting, s.gone], &[]) => LedgerError::UnknownSlot(_),
    alloc_of_a_slot_never_given: |s| s.ledger.alloc(&[SlotId(77)], &[]) => LedgerError::UnknownSlot(SlotId(77)),
    alloc_of_one_request_twice: |s| s.ledger.alloc(&[s.waiting, s.waiting], &[]) => LedgerError::TwiceInBatch(_),
    alloc_with_too_few_bounds:
        |s| s.ledger.alloc(&[s.waiting, s.idle, s.busy], &[1, 2]) => LedgerError::Mismatch(_),
    alloc_of_no_tokens:
        |s| s.ledger.alloc(&[s.waiting], &[0]) => LedgerError::OutOfRange { name: "num_tokens", .. },
    alloc_with_more_blocks_to_load_than_there_are:
        |s| s.ledger.alloc_with_loads(&[s.waiting], &[], &[9]) => LedgerError::BadLoad { given: 9, .. },
    alloc_with_nothing_to_compute:
        |s| s.ledger.alloc(&[s.waiting, s.idle], &[]) => LedgerError::NothingToCompute { .. },
    alloc_in_the_same_step_again:
        |s| s.ledger.alloc(&[s.waiting, s.planned], &[]) => LedgerError::AlreadyPlanned { step: 4, .. },
    alloc_of_a_third_step: |s| s.ledger.alloc(&[s.waiting, s.busy], &[]) => LedgerError::TwoStepsOut { .. },
    alloc_of_a_padding_request_planned_before:
        |s| s.ledger.alloc_dummy(s.planned) => LedgerError::PlannedBefore(_),
    alloc_of_a_padding_request_longer_than_a_page:
        |s| s.ledger.alloc_dummy(s.waiting) => LedgerError::TooLong { slot: Some(_), tokens: 9, limit: 4, .. },
    alloc_of_an_unknown_padding_request: |s| s.ledger.alloc_dummy(s.gone) => LedgerError::UnknownSlot(_),

    step_of_a_slot_never_given: |s| s.ledger.step(&[s.busy, SlotId(77)], &[], None) => LedgerError::UnknownSlot(_),
    step_of_a_request_that_is_not_planned:
        |s| s.ledger.step(&[s.busy, s.idle], &[], None) => LedgerError::NotPlanned { .. },
    step_of_one_request_twice: |s| s.ledger.step(&[s.busy, s.busy], &[], None) => LedgerError::TwiceInBatch(_),
    step_with_too_few_counts:
        |s| s.ledger.step(&[s.busy, s.planned], &[], Some(&[0])) => LedgerError::Mismatch(_),
    step_with_fewer_tokens_than_counted:
        |s| s.ledger.step(&[s.busy, s.planned], &[5], Some(&[0, 2])) => LedgerError::Mismatch(_),
    step_with_one_token_for_two_requests:
        |s| s.ledger.step(&[s.busy, s.planned], &[5], None) => LedgerError::Mismatch(_),
    step_with_a_token_behind_an_unfinished_prompt:
        |s| s.ledger.step(&[s.planned, s.busy], &[5, 6], None) => LedgerError::BadCount { .. },
    step_with_more_tokens_than_the_longest_sequence_holds:
        |s| s.ledger.step(&[s.planned], &[5; 18], Some(&[18])) => LedgerError::TooLong { slot: Some(_), tokens: 21, limit: 20, .. },

    update_of_a_released_request: |s| s.ledger.update(s.gone, 1) => LedgerError::UnknownSlot(_),
    truncate_of_a_released_request: |s| s.ledger.truncate(s.gone, 0) => LedgerError::UnknownSlot(_),
    truncate_to_more_than_there_is: |s| s.ledger.truncate(s.idle, 6) => LedgerError::OutOfRange { given: 6, .. },
    preempt_of_a_released_request: |s| s.ledger.preempt(&[s.idle, s.gone]) => LedgerError::UnknownSlot(_),
    preempt_of_one_request_twice: |s| s.ledger.preempt(&[s.idle, s.idle]) => LedgerError::TwiceInBatch(_),
    release_of_a_released_request: |s| s.ledger.release(&[s.idle, s.gone]) => LedgerError::UnknownSlot(_),
    release_of_one_request_twice: |s| s.ledger.release(&[s.idle, s.idle]) => LedgerError::TwiceInBatch(_),

    copy_of_a_released_request: |s| s.ledger.start_copy(s.gone, 0, 1) => LedgerError::UnknownSlot(_),
    copy_of_a_request_without_pages:
        |s| s.ledger.start_copy(s.waiting, 0, 1) => LedgerError::OutOfRange { name: "blocks", .. },
    copy_of_more_blocks_than_are_held: |s| s.ledger.start_copy(s.idle, 1, 2) => LedgerError::OutOfRange { .. },
    copy_of_no_block: |s| s.ledger.start_copy(s.idle, 0, 0) => LedgerError::OutOfRange { .. },
    copy_past_the_end_of_numbers:
        |s| s.ledger.start_copy(s.idle, 1, usize::MAX) => LedgerError::OutOfRange { .. },
    end_of_a_copy_that_never_began: |s| finish_copies(&mut s.ledger, &[s.copy, 99]) => LedgerError::UnknownCopy(99),
    end_of_one_copy_twice: |s| finish_copies(&mut s.ledger, &[s.copy, s.copy]) => LedgerError::UnknownCopy(0),
    time_that_goes_back: |s| s.ledger.begin_step(Some(9.5), &[(s.copy, CopyEnd::Done)]) => LedgerError::TimeGoesBack { .. },
    time_that_is_no_number:
        |s| s.ledger.begin_step(Some(f64::NAN), &[(s.copy, CopyEnd::Done)]) => LedgerError::TimeGoesBack { .. },
    time_without_end:
        |s| s.ledger.begin_step(Some(f64::INFINITY), &[(s.copy, CopyEnd::Done)]) => LedgerError::TimeGoesBack { .. },
    a_step_with_the_end_of_an_unknown_copy:
        |s| s.ledger.begin_step(Some(11.0), &[(s.copy, CopyEnd::Done), (99, CopyEnd::Done)]) => LedgerError::UnknownCopy(99),

    a_table_of_a_request_that_is_not_planned:
        |s| s.ledger.batch_shape(&[s.planned, s.idle]) => LedgerError::NotPlanned { .. },
    a_table_of_one_request_twice:
        |s| s.ledger.batch_shape(&[s.planned, s.planned]) => LedgerError::TwiceInBatch(_),
    a_table_with_too_few_rows: |s| rows(s, 1, 2) => LedgerError::Mismatch(_),
    a_table_with_too_few_columns: |s| rows(s, 2, 1) => LedgerError::Mismatch(_),
    a_table_without_columns: |s| rows(s, 2, 0) => LedgerError::Mismatch(_),
    a_slot_mapping_that_is_too_small: slot_mapping => LedgerError::Mismatch(_),
    a_page_list_that_is_too_small: page_list => LedgerError::Mismatch(_),

    a_question_about_a_released_request: |s| s.ledger.position(s.gone) => LedgerError::UnknownSlot(_),
    the_tokens_of_a_released_request: |s| s.ledger.tokens(s.gone).map(<[i32]>::len) => LedgerError::UnknownSlot(_),
    the_pages_of_a_released_request: |s| s.ledger.pages(s.gone, GroupId::FIRST).map(<[_]>::len) => LedgerError::UnknownSlot(_),
    the_hashes_of_a_released_request: |s| s.ledger.commit(s.gone) => LedgerError::UnknownSlot(_),
}

fn rows(scene: &mut Scene, rows: usize, columns: usize) -> Result<(), LedgerError> {
    let batch = [scene.planned, scene.busy];
    scene.ledger.write_rows(
        GroupId::FIRST,
        &batch,
        &mut RowMemory::default(),
        &mut vec![0; rows * columns],
        columns,
    )
}

fn slot_mapping(scene: &mut Scene) -> Result<(), LedgerError> {
    let mut tables =
        VarlenTables { seq_lens: &mut [0; 2], slot_mapping: &mut [0; 6], query_start_loc: &mut [0; 3] };
    scene.ledger.write_varlen(GroupId::FIRST, &[scene.planned, scene.busy], &mut tables)
}

fn page_list(scene: &mut Scene) -> Result<(), LedgerError> {
    let mut tables = FlashInferTables {
        indptr: &mut [0; 3],
        indices: &mut [0; 2],
        last_page_len: &mut [0; 2],
        query_indptr: &mut [0; 3],
    };
    scene.ledger.write_flashinfer(GroupId::FIRST, &[scene.planned, scene.busy], &mut tables)
}

#[test]
fn the_first_request_that_did_not_fit_is_named_with_the_room_it_found() {
    let mut scene = scene();
    let large = claim(&mut scene.ledger, prompt(&[41; 17]));
    let before = scene.ledger.fingerprint();
    let error = scene.ledger.alloc(&[scene.waiting, large], &[]).unwrap_err();
    assert_eq!(scene.ledger.fingerprint(), before);
    // 8 pages, 5 held, 3 for the request before: none is left for the 5 of the large one.
    let LedgerError::InsufficientBlocks { slot, room } = error else { panic!("{error:?}") };
    assert_eq!(slot, large);
    assert_eq!((room.needed, room.free, room.evictable, room.pinned, room.total), (5, 0, 0, 5, 8));
}

#[test]
fn a_request_that_will_never_fit_is_told_apart() {
    let mut ledger = Ledger::new(config(2));
    let slot = claim(&mut ledger, prompt(&[7; 9]));
    let before = ledger.fingerprint();
    let error = ledger.alloc(&[slot], &[1]).unwrap_err();
    assert_eq!(ledger.fingerprint(), before);
    let LedgerError::RequestTooLarge { tokens, limit, room, .. } = error else { panic!("{error:?}") };
    assert_eq!((tokens, limit, room.needed, room.total), (9, 2, 3, 2));
}

#[test]
fn a_second_token_for_one_that_is_on_the_way_is_refused() {
    let mut ledger = Ledger::new(config(8));
    let slot = claim(&mut ledger, prompt(&[1, 2, 3]));
    for _ in 0..2 {
        ledger.alloc(&[slot], &[]).unwrap();
        ledger.close_step();
    }
    let before = ledger.fingerprint();
    assert!(matches!(ledger.step(&[slot], &[4, 5], Some(&[2])), Err(LedgerError::BadCount { .. })));
    assert_eq!(ledger.fingerprint(), before);
}

#[test]
fn a_request_at_its_own_limit_takes_no_further_token() {
    let mut ledger = Ledger::new(config(8));
    let mut request = prompt(&[1, 2, 3]);
    request.max_length = 3;
    let slot = claim(&mut ledger, request);
    ledger.alloc(&[slot], &[]).unwrap();
    ledger.close_step();
    let before = ledger.fingerprint();
    for error in [ledger.alloc(&[slot], &[]), ledger.step(&[slot], &[4], None), ledger.update(slot, 4)] {
        assert!(matches!(error, Err(LedgerError::TooLong { tokens: 4, limit: 3, .. })), "{error:?}");
    }
    assert_eq!(ledger.fingerprint(), before);
}

/// Why a claim is refused; checks that the request comes back and that nothing was changed.
fn refused_claim(request: cache_manager::NewSequence) -> LedgerError {
    let mut scene = scene();
    let (before, tokens) = (scene.ledger.fingerprint(), request.tokens.clone());
    let refused = scene.ledger.claim(request).expect_err("the claim is refused");
    assert_eq!((scene.ledger.fingerprint(), refused.request.tokens), (before, tokens));
    scene.ledger.verify().unwrap();
    refused.error
}

#[test]
fn an_empty_prompt_is_not_claimed() {
    assert!(matches!(refused_claim(prompt(&[])), LedgerError::OutOfRange { name: "tokens", .. }));
}

#[test]
fn a_prompt_longer_than_the_request_allows_is_not_claimed() {
    let mut request = prompt(&[1, 2, 3]);
    request.max_length = 2;
    assert!(matches!(refused_claim(request), LedgerError::TooLong { tokens: 3, limit: 2, .. }));
}

#[test]
fn a_prompt_longer_than_the_longest_sequence_is_not_claimed() {
    assert!(matches!(refused_claim(prompt(&[1; 21])), LedgerError::TooLong { tokens: 21, limit: 20, .. }));
}

#[test]
fn a_prompt_with_an_item_that_reaches_past_it_is_not_claimed() {
    let mut request = prompt(&[1, 2, 3]);
    let mm_items = &[ContentSpan { start: 2, length: 2, hash: [0; 32] }];
    request.extras = ExtraKeys::new(&ExtraInputs { mm_items, ..ExtraInputs::default() }).unwrap();
    assert!(matches!(refused_claim(request), LedgerError::TooLong { tokens: 4, limit: 3, .. }));
}

#[test]
fn a_slot_that_is_used_again_is_not_the_old_one() {
    let mut ledger = Ledger::new(config(8));
    let old = claim(&mut ledger, prompt(&[1]));
    ledger.release(&[old]).unwrap();
    // An index rests until 1,024 others were freed after it.
    let mut again = None;
    for later in 0..=1024 {
        let slot = claim(&mut ledger, prompt(&[1]));
        assert!(!ledger.contains(old));
        if slot.index() == old.index() {
            again = Some((later, slot));
        }
        ledger.release(&[slot]).unwrap();
    }
    let (later, slot) = again.expect("the index is used again");
    assert_eq!(later, 1024);
    assert_ne!(slot, old);
}

#[test]
fn a_stale_slot_is_refused_through_many_claims() {
    let mut ledger = Ledger::new(config(8));
    let old = claim(&mut ledger, prompt(&[1]));
    ledger.release(&[old]).unwrap();
    for _ in 0..20_000 {
        let slot = claim(&mut ledger, prompt(&[1]));
        assert!(!ledger.contains(old));
        ledger.release(&[slot]).unwrap();
    }
}
