//! What needs a look inside: full blocks that both sides of a fork have yet to publish.

use crate::config::LedgerConfig;
use crate::ledger::Ledger;
use crate::sequence::NewSequence;
use block_hash::{Algo, Chain};
use block_pool::PageId;
use radix_tree::NamespaceKey;

#[test]
fn the_second_to_publish_a_shared_block_finds_its_own_page_stored() {
    let mut ledger = Ledger::new(LedgerConfig::new(4, 4));
    let namespace = NamespaceKey::default();
    let chain = Chain::new(Algo::AHash64, &namespace.root(None));
    let request = NewSequence { no_store: true, ..NewSequence::new((0..9).collect(), 100, namespace, chain) };
    let parent = ledger.claim(request).map_err(|refused| refused.error).unwrap();
    ledger.alloc(&[parent], &[]).unwrap();
    ledger.step(&[parent], &[], None).unwrap();
    let child = ledger.fork(parent).unwrap();
    for slot in [parent, child] {
        ledger.slots.get_mut(slot).unwrap().no_store = false;
        ledger.commit(slot).unwrap();
        ledger.verify().unwrap();
    }
    let counters = ledger.counters();
    let published = (counters.published_blocks, counters.adopted_blocks, counters.private_blocks);
    assert_eq!(published, (2, 0, 0));
    assert_eq!([1, 2, 3].map(|page| ledger.pool().refs(PageId(page))), [2, 2, 2]);
    ledger.release(&[parent, child]).unwrap();
    ledger.verify().unwrap();
    assert_eq!(ledger.pool().available(), 4);
}
