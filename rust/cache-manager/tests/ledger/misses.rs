//! Why a look-up found no more, and what is counted of it.

use crate::common::{PAGE, claim, computed, config, forward, prompt, query, salted};
use block_hash::Token;
use block_pool::Step;
use cache_manager::{Histogram, Ledger, Miss, MissReason};
use radix_tree::{AdapterId, NamespaceKey};

fn miss(ledger: &Ledger, tokens: &[Token]) -> Option<Miss> {
    ledger.probe(&query(prompt(tokens))).miss
}

fn reason(ledger: &Ledger, tokens: &[Token]) -> Option<MissReason> {
    miss(ledger, tokens).map(|miss| miss.reason)
}

/// Computes the prompt and releases it.
fn store(ledger: &mut Ledger, tokens: &[Token]) {
    let slot = computed(ledger, tokens);
    ledger.release(&[slot]).expect("the slot is claimed");
}

fn tokens(range: std::ops::Range<Token>) -> Vec<Token> {
    range.collect()
}

/// A histogram of `numbers`.
fn histogram(numbers: &[u32]) -> Histogram {
    let mut histogram = Histogram::default();
    for &number in numbers {
        histogram.add(number);
    }
    histogram
}

#[test]
fn a_prompt_whose_full_blocks_are_all_stored_misses_nothing() {
    let mut ledger = Ledger::new(config(8));
    store(&mut ledger, &tokens(0..8));
    assert_eq!(miss(&ledger, &tokens(0..11)), None);
}

#[test]
fn a_block_that_nobody_stored_was_never_stored() {
    let mut ledger = Ledger::new(config(8));
    store(&mut ledger, &tokens(0..8));
    assert_eq!(
        miss(&ledger, &tokens(0..12)),
        Some(Miss { reason: MissReason::NeverStored, evicted_at: None })
    );
}

#[test]
fn an_evicted_block_is_known_with_the_step_of_its_eviction() {
    let mut ledger = Ledger::new(config(3));
    store(&mut ledger, &tokens(0..9));
    store(&mut ledger, &tokens(50..59));
    let evicted = Miss { reason: MissReason::Evicted, evicted_at: Some(Step(2)) };
    assert_eq!(miss(&ledger, &tokens(0..9)), Some(evicted));
}

#[test]
fn a_block_that_was_evicted_and_stored_again_is_no_miss() {
    let mut ledger = Ledger::new(config(3));
    for range in [0..9, 50..59, 0..9] {
        store(&mut ledger, &tokens(range));
    }
    assert_eq!(miss(&ledger, &tokens(0..9)), None);
}

#[test]
fn a_block_that_was_stored_again_and_truncated_was_not_evicted() {
    let mut ledger = Ledger::new(config(3));
    for range in [0..9, 50..59, 0..9] {
        store(&mut ledger, &tokens(range));
    }
    assert_eq!(ledger.truncate_prefix(&query(prompt(&[]))), 2);
    assert_eq!(reason(&ledger, &tokens(0..9)), Some(MissReason::NeverStored));
}

#[test]
fn a_reset_forgets_what_was_evicted() {
    let mut ledger = Ledger::new(config(3));
    store(&mut ledger, &tokens(0..9));
    store(&mut ledger, &tokens(50..59));
    ledger.reset_prefix_cache();
    assert_eq!(reason(&ledger, &tokens(0..9)), Some(MissReason::NeverStored));
    assert_eq!(ledger.counters().reset_blocks, 2);
}

#[test]
fn a_block_whose_hash_is_another_s_is_a_collision() {
    let mut ledger = Ledger::new(config(8));
    store(&mut ledger, &tokens(0..8));
    // Other tokens under the hashes of the stored ones.
    let mut forged = query(prompt(&tokens(0..8)));
    forged.tokens = tokens(50..58);
    assert_eq!(ledger.probe(&forged).miss, Some(Miss { reason: MissReason::Collision, evicted_at: None }));
}

#[test]
fn other_namespaces_are_looked_into_only_when_asked() {
    let mut ledger = Ledger::new(config(8));
    let slot = claim(&mut ledger, salted(&tokens(0..8), "a", PAGE));
    forward(&mut ledger, slot);
    assert_eq!(reason(&ledger, &tokens(0..8)), Some(MissReason::NeverStored));
    let reasons = |tokens: &[Token], salt: &str| {
        ledger.probe_namespaces(&query(salted(tokens, salt, PAGE))).miss.map(|miss| miss.reason)
    };
    assert_eq!(reasons(&tokens(0..8), ""), Some(MissReason::OtherNamespace));
    assert_eq!(reasons(&tokens(50..58), ""), Some(MissReason::NeverStored));
    assert_eq!(reasons(&tokens(0..8), "a"), None);
}

#[test]
fn another_namespace_must_have_the_block_that_is_missed() {
    let mut ledger = Ledger::new(config(8));
    store(&mut ledger, &tokens(0..4));
    let slot = claim(&mut ledger, salted(&tokens(0..4), "a", PAGE));
    forward(&mut ledger, slot);
    let longer = query(prompt(&tokens(0..8)));
    assert_eq!(ledger.probe_namespaces(&longer).miss.map(|miss| miss.reason), Some(MissReason::NeverStored));
}

#[test]
fn another_adapter_is_another_namespace() {
    let mut ledger = Ledger::new(config(8));
    store(&mut ledger, &tokens(0..8));
    let namespace = NamespaceKey { adapter: Some(AdapterId::Number(3)), ..NamespaceKey::default() };
    let mut asked = query(prompt(&tokens(0..8)));
    asked.chain = block_hash::Chain::new(ledger.config().algo, &namespace.root(None));
    asked.chain.extend(&asked.tokens, PAGE as usize, &asked.extras);
    asked.namespace = namespace;
    assert_eq!(
        ledger.probe_namespaces(&asked).miss.map(|miss| miss.reason),
        Some(MissReason::OtherNamespace)
    );
}

#[test]
fn missed_blocks_are_counted_once_by_why_the_first_was_missed() {
    let mut ledger = Ledger::new(config(4));
    // 3 blocks before the one of the last token, then all 4 pages go to another prompt, then back.
    for range in [0..13, 50..63, 0..13] {
        store(&mut ledger, &tokens(range));
    }
    let counters = ledger.counters();
    assert_eq!((counters.missed_never_stored, counters.missed_evicted), (6, 3));
    // The context blocks but for one a prompt, the block of its last token.
    assert_eq!(counters.context_blocks - counters.admissions, counters.reused_blocks + 9);
}

#[test]
fn a_hit_leaves_only_the_rest_of_the_prompt_to_miss() {
    let mut ledger = Ledger::new(config(8));
    store(&mut ledger, &tokens(0..8));
    store(&mut ledger, &tokens(0..17));
    let counters = ledger.counters();
    // One block before that of token 7; then blocks 2 and 3, since 0 and 1 are hits.
    assert_eq!((counters.reused_blocks, counters.missed_never_stored), (2, 3));
}

#[test]
fn a_resumed_request_misses_nothing_again() {
    let mut ledger = Ledger::new(config(8));
    let slot = computed(&mut ledger, &tokens(0..9));
    ledger.reset_prefix_cache();
    ledger.preempt(&[slot]).expect("the slot is claimed");
    forward(&mut ledger, slot);
    assert_eq!(ledger.counters().missed_never_stored, 2);
}

#[test]
fn steps_from_the_writing_of_a_block_to_its_eviction_are_counted() {
    let mut ledger = Ledger::new(config(3));
    store(&mut ledger, &tokens(0..9)); // step 1
    store(&mut ledger, &tokens(20..21)); // step 2, on the page that stands for nothing
    store(&mut ledger, &tokens(50..59)); // step 3, evicts both blocks
    assert_eq!(ledger.counters().residency, histogram(&[2, 2]));
}

#[test]
fn steps_from_the_last_use_of_a_block_to_its_next_hit_are_counted() {
    let mut ledger = Ledger::new(config(8));
    store(&mut ledger, &tokens(0..9)); // step 1
    store(&mut ledger, &tokens(50..51)); // step 2
    let slot = computed(&mut ledger, &tokens(0..9)); // step 3
    assert_eq!(ledger.counters().reuse_gap, histogram(&[2, 2]));
    // A block that somebody holds has no gap.
    computed(&mut ledger, &tokens(0..9));
    assert_eq!(ledger.counters().reuse_gap, histogram(&[2, 2]));
    assert!(ledger.contains(slot));
}

#[test]
fn a_histogram_counts_by_powers_of_two() {
    let counts = *histogram(&[0, 1, 2, 3, 4, 16_383, 16_384, u32::MAX]).counts();
    let mut expected = [0; Histogram::BUCKETS];
    for (bucket, count) in [(0, 1), (1, 1), (2, 2), (3, 1), (14, 1), (15, 2)] {
        expected[bucket] = count;
    }
    assert_eq!(counts, expected);
}
