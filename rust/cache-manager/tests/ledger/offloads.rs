//! Blocks on their way to other tiers.

use crate::common::{PAGE, claim, config, forward};
use block_hash::{Algo, Chain, Guards, Token};
use block_pool::{PageId, Priority};
use cache_manager::{Ledger, LedgerConfig, NewSequence, SlotId, WritePolicy};
use radix_tree::NamespaceKey;

/// Claims a prompt whose blocks other tiers may have.
fn claim_guarded(ledger: &mut Ledger, tokens: &[Token]) -> SlotId {
    let namespace = NamespaceKey::default();
    let root = namespace.root(None);
    let guards = Some(Guards::new(Algo::Sha256, &root, &[0; 32]));
    let chain = Chain::new(Algo::Sha256, &root);
    let mut request = NewSequence { guards, ..NewSequence::new(tokens.to_vec(), 1 << 20, namespace, chain) };
    request.hash_prompt(PAGE);
    claim(ledger, request)
}

#[test]
fn blocks_that_are_going_to_be_evicted_are_offered_in_the_order_of_their_prefix() {
    let write_policy = WritePolicy::OnEvict { min_priority: Priority::DEFAULT };
    let mut ledger = Ledger::new(LedgerConfig { write_policy, ..config(17) });
    let tokens: Vec<Token> = (0..65).collect();
    let slot = claim_guarded(&mut ledger, &tokens);
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    assert!(ledger.take_offloads().is_empty(), "all pages were in use when the call took them");

    let slot = claim_guarded(&mut ledger, &[-1]);
    ledger.alloc(&[slot], &[]).unwrap(); // page 17, which stood for nothing

    let jobs = ledger.take_offloads();
    let again = claim_guarded(&mut ledger, &tokens);
    let wanted = ledger.wanted(again).unwrap().expect("it may ask other tiers");
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0].copy.pages, [PageId(15), PageId(16)], "an eighth of 16 idle pages: the tail");
    assert_eq!(jobs[0].keys, wanted.keys[14..]);
    ledger.verify().unwrap();
}

#[test]
fn a_reset_refuses_offloads_that_nobody_has_taken() {
    let mut ledger = Ledger::new(config(4));
    let slot = claim_guarded(&mut ledger, &[1, 2, 3, 4, 5]);
    forward(&mut ledger, slot);
    assert_eq!(ledger.copies_in_flight(), 1, "the full block is on its way");

    ledger.reset_prefix_cache();

    assert!(ledger.take_offloads().is_empty(), "it is of before the reset");
    assert_eq!((ledger.copies_in_flight(), ledger.counters().copies_refused), (0, 1));
    ledger.verify().unwrap();
}
