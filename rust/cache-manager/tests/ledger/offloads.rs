//! Blocks on their way to other tiers.

use crate::common::{PAGE, claim, config, forward, prompt};
use block_hash::{Algo, Guards};
use cache_manager::{Ledger, NewSequence};
use radix_tree::NamespaceKey;

#[test]
fn a_reset_refuses_offloads_that_nobody_has_taken() {
    let root = NamespaceKey::default().root(None);
    let guards = Some(Guards::new(Algo::AHash64, &root, &[0; 32]));
    let mut request = NewSequence { guards, ..prompt(&[1, 2, 3, 4, 5]) };
    request.hash_prompt(PAGE);
    let mut ledger = Ledger::new(config(4));
    let slot = claim(&mut ledger, request);
    forward(&mut ledger, slot);
    assert_eq!(ledger.copies_in_flight(), 1, "the full block is on its way");

    ledger.reset_prefix_cache();

    assert!(ledger.take_offloads().is_empty(), "it is of before the reset");
    assert_eq!((ledger.copies_in_flight(), ledger.counters().copies_refused), (0, 1));
    ledger.verify().unwrap();
}
