//! What events say of the calls that cause them.

use crate::common::{PAGE, claim, computed, config, forward, overridden, private, prompt};
use block_hash::{ExtraInputs, ExtraKeys, Token};
use cache_manager::{EventKind, EventSnapshot, Ledger, LedgerConfig, NewSequence, SlotId, Stored};
use radix_tree::AdapterId;

fn telling(mut config: LedgerConfig) -> Ledger {
    config.event_buffer_max_size = 64;
    let mut ledger = Ledger::new(config);
    assert_eq!(
        told(&mut ledger),
        [EventKind::Created { page_size: PAGE, pages: vec![ledger.config().groups[0].pages] }]
    );
    ledger
}

fn told(ledger: &mut Ledger) -> Vec<EventKind> {
    ledger.verify().unwrap();
    ledger.take_events(None).into_iter().map(|event| event.kind).collect()
}

/// What was told since last time; it is all stored blocks.
fn told_stored(ledger: &mut Ledger) -> Vec<Stored> {
    let stored = told(ledger).into_iter().map(|kind| match kind {
        EventKind::Stored(stored) => stored,
        other => panic!("{other:?}"),
    });
    stored.collect()
}

/// What a snapshot says is stored, behind the event that says what was made.
fn stored_of(snapshot: &EventSnapshot) -> Vec<&Stored> {
    let stored = snapshot.events[1..].iter().map(|(_, kind)| match kind {
        EventKind::Stored(stored) => stored,
        other => panic!("{other:?}"),
    });
    stored.collect()
}

fn keys(request: &NewSequence) -> Vec<u64> {
    request.chain.keys().to_vec()
}

fn release(ledger: &mut Ledger, slot: SlotId) {
    ledger.release(&[slot]).expect("the slot is claimed");
}

fn tokens(range: std::ops::Range<Token>) -> Vec<Token> {
    range.collect()
}

#[test]
fn one_event_tells_of_the_blocks_that_a_call_publishes() {
    let mut ledger = telling(config(8));
    computed(&mut ledger, &tokens(0..11));
    let stored = told_stored(&mut ledger);
    assert_eq!(stored.len(), 1);
    assert_eq!((stored[0].parent, stored[0].first), (None, 0));
    assert_eq!(stored[0].keys, keys(&prompt(&tokens(0..8))));
    assert_eq!(stored[0].tokens, tokens(0..8));
    assert_eq!((stored[0].priority.level(), stored[0].tier.0, &stored[0].adapter), (35, 0, &None));
}

#[test]
fn the_parent_of_a_new_block_is_the_block_before_it_though_that_was_there_already() {
    let mut ledger = telling(config(16));
    computed(&mut ledger, &tokens(0..8));
    told(&mut ledger);
    computed(&mut ledger, &tokens(0..16));
    let chain = keys(&prompt(&tokens(0..16)));
    let stored = told_stored(&mut ledger);
    assert_eq!(stored.iter().map(|run| (run.parent, run.first)).collect::<Vec<_>>(), [(Some(chain[1]), 2)]);
    assert_eq!(stored[0].keys, chain[2..]);
    assert_eq!(stored[0].tokens, tokens(8..16));
}

#[test]
fn blocks_on_both_sides_of_one_that_is_there_are_two_events() {
    let mut ledger = telling(private(16));
    // Twins: both compute all; the first stores all of its two blocks, the second one more.
    let twins = [tokens(0..8), tokens(0..12)].map(|tokens| claim(&mut ledger, prompt(&tokens)));
    ledger.alloc(&twins, &[]).expect("there is room");
    ledger.close_step();
    ledger.step(&twins, &[], None).expect("the step is out");
    let chain = keys(&prompt(&tokens(0..12)));
    let stored = told_stored(&mut ledger);
    assert_eq!(stored.iter().map(|run| run.keys.clone()).collect::<Vec<_>>(), [&chain[..2], &chain[2..]]);
    assert_eq!((stored[1].parent, stored[1].first), (Some(chain[1]), 2));
}

#[test]
fn a_parent_that_is_not_resident_is_named_all_the_same() {
    let mut ledger = telling(private(6));
    let twins = [tokens(0..5), tokens(0..5)].map(|tokens| claim(&mut ledger, prompt(&tokens)));
    ledger.alloc(&twins, &[]).expect("there is room");
    ledger.close_step();
    ledger.step(&twins, &[], None).expect("the step is out");
    // The stored page is the first twin's; it goes, and the second twin computes on behind it.
    release(&mut ledger, twins[0]);
    let other = claim(&mut ledger, prompt(&tokens(50..66)));
    ledger.alloc(&[other], &[]).expect("four pages can be had");
    let chain = keys(&prompt(&tokens(0..8)));
    told(&mut ledger);
    release(&mut ledger, other);
    for token in 5..9 {
        ledger.update(twins[1], token).expect("there is room for a token");
    }
    forward(&mut ledger, twins[1]);
    let stored = told_stored(&mut ledger);
    assert_eq!((stored[0].parent, stored[0].first), (Some(chain[0]), 1));
    assert_eq!(stored[0].keys, chain[1..]);
    let snapshot = ledger.event_snapshot();
    assert_eq!(stored_of(&snapshot), [&stored[0]]);
}

#[test]
fn a_private_twin_is_not_told_and_its_end_removes_nothing() {
    let mut ledger = telling(private(8));
    let first = computed(&mut ledger, &tokens(0..4));
    told(&mut ledger);
    let second = computed(&mut ledger, &tokens(0..4));
    release(&mut ledger, second);
    release(&mut ledger, first);
    assert_eq!(told(&mut ledger), []);
}

#[test]
fn an_evicted_block_is_removed_before_it_is_stored_again() {
    let mut ledger = telling(config(3));
    let prompts = [tokens(0..9), tokens(50..59), tokens(0..9)];
    for prompt in &prompts {
        let slot = computed(&mut ledger, prompt);
        release(&mut ledger, slot);
    }
    let (first, second) = (keys(&prompt(&tokens(0..8))), keys(&prompt(&tokens(50..58))));
    let told = told(&mut ledger).into_iter().map(|kind| match kind {
        EventKind::Stored(stored) => ("stored", stored.keys),
        EventKind::Removed { keys } => ("removed", keys),
        other => panic!("{other:?}"),
    });
    // Evictions go from the tail.
    let (first_back, second_back) = (vec![first[1], first[0]], vec![second[1], second[0]]);
    let expected = [
        ("stored", first.clone()),
        ("removed", first_back),
        ("stored", second),
        ("removed", second_back),
        ("stored", first),
    ];
    assert_eq!(told.collect::<Vec<_>>(), expected);
}

#[test]
fn a_reset_is_told_once_and_what_it_forgot_is_not_removed_later() {
    let mut ledger = telling(config(3));
    let slot = computed(&mut ledger, &tokens(0..9));
    release(&mut ledger, slot);
    told(&mut ledger);
    ledger.reset_prefix_cache();
    assert_eq!(told(&mut ledger), [EventKind::Cleared]);
    let slot = claim(&mut ledger, prompt(&tokens(50..59)));
    ledger.alloc(&[slot], &[]).expect("there is room");
    assert_eq!(told(&mut ledger), []);
}

#[test]
fn tokens_are_told_as_they_are_hashed_and_extra_keys_with_the_blocks_that_have_some() {
    let mut ledger = telling(config(8));
    let mut request = overridden(&tokens(0..12), &[(1, 77), (9, 1 << 40)]);
    request.namespace.adapter = Some(AdapterId::Name("rhyme".into()));
    let extras = request.extras.clone();
    let slot = claim(&mut ledger, request);
    forward(&mut ledger, slot);
    let stored = told_stored(&mut ledger);
    assert_eq!(stored[0].tokens[..4], [0, 77, 2, 3]);
    assert_eq!(stored[0].tokens[8..], [8, 9, 10, 11]);
    let mut wide = Vec::new();
    extras.encode(8, 12, &mut wide);
    assert_eq!(stored[0].extra_keys, [(2, wide)]);
    assert_eq!(stored[0].adapter, Some(AdapterId::Name("rhyme".into())));
    assert_eq!(stored_of(&ledger.event_snapshot()), [&stored[0]]);
}

#[test]
fn plain_blocks_beside_an_image_have_no_extra_keys() {
    let mut ledger = telling(config(8));
    let mut request = prompt(&tokens(0..12));
    let image = block_hash::ContentSpan { start: 5, length: 2, hash: [9; 32] };
    request.extras = ExtraKeys::new(&ExtraInputs { mm_items: &[image], ..ExtraInputs::default() }).unwrap();
    request.chain.clear();
    request.hash_prompt(PAGE);
    let slot = claim(&mut ledger, request);
    forward(&mut ledger, slot);
    let stored = told_stored(&mut ledger);
    assert_eq!(stored[0].extra_keys.iter().map(|&(block, _)| block).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_snapshot_tells_a_run_before_the_runs_that_branch_from_it() {
    let mut ledger = telling(config(16));
    let trunk = tokens(0..12);
    let branch = |at: usize, token: Token| {
        let mut tokens = trunk.clone();
        tokens[at..].fill(token);
        tokens
    };
    // Branches from block 1 and from block 2, computed before and after each other.
    for prompt in [branch(4, 90), trunk.clone(), branch(8, 91)] {
        computed(&mut ledger, &prompt);
    }
    let snapshot = ledger.event_snapshot();
    let mut known = Vec::new();
    for stored in stored_of(&snapshot) {
        assert!(stored.parent.is_none_or(|parent| known.contains(&parent)));
        known.extend(&stored.keys);
    }
    // Block 0 once, two blocks of each of the trunk and the first branch, one of the last.
    assert_eq!(known.len(), 6);
    assert_eq!(snapshot.next_id, ledger.events().next_id());
}

#[test]
fn what_is_removed_after_a_snapshot_is_another_event() {
    let mut ledger = telling(config(3));
    let slot = computed(&mut ledger, &tokens(0..9));
    release(&mut ledger, slot);
    told(&mut ledger);
    let slots = [50..58, 60..64].map(|range| claim(&mut ledger, prompt(&tokens(range))));
    // Of the first two pages one stands for nothing.
    ledger.alloc(&slots[..1], &[]).expect("there is room");
    let included = ledger.event_snapshot();
    ledger.alloc(&slots[1..], &[]).expect("there is room");
    let chain = keys(&prompt(&tokens(0..8)));
    let removed = |key| EventKind::Removed { keys: vec![key] };
    assert_eq!(told(&mut ledger), [removed(chain[1]), removed(chain[0])]);
    assert_eq!(included.next_id, ledger.events().next_id() - 1);
    assert_eq!(stored_of(&included)[0].keys, chain[..1]);
}

#[test]
fn ids_do_not_depend_on_who_reads() {
    let mut ledgers = [telling(config(3)), telling(config(3))];
    for ledger in &mut ledgers {
        let slot = computed(ledger, &tokens(0..9));
        release(ledger, slot);
    }
    // Two calls that evict a block each, with nothing stored in between.
    for range in [50..58, 60..64] {
        for ledger in &mut ledgers {
            let slot = claim(ledger, prompt(&tokens(range.clone())));
            ledger.alloc(&[slot], &[]).expect("there is room");
        }
        told(&mut ledgers[0]);
        assert_eq!(ledgers[0].events().next_id(), ledgers[1].events().next_id());
        assert_eq!(ledgers[0].fingerprint(), ledgers[1].fingerprint());
    }
}

#[test]
fn a_refused_call_tells_nothing() {
    let mut ledger = telling(config(3));
    let slot = computed(&mut ledger, &tokens(0..9));
    release(&mut ledger, slot);
    told(&mut ledger);
    let slots = [50..59, 60..64].map(|range| claim(&mut ledger, prompt(&tokens(range))));
    let before = ledger.fingerprint();
    ledger.alloc(&slots, &[]).expect_err("four pages of three");
    assert_eq!((told(&mut ledger), ledger.fingerprint()), (vec![], before));
}
