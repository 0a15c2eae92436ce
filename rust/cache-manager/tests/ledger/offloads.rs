//! Blocks on their way to other tiers.

use crate::common::{PAGE, claim, config, finish_copies, forward, private, prompt};
use block_hash::{Algo, Chain, Guards, Token};
use block_pool::{GroupId, PageId, Priority};
use cache_manager::{
    BlockKey, CopyEnd, CopyJob, Ledger, LedgerConfig, NewSequence, OffloadJob, OuterTier, SlotId,
    WritePolicy, content_bytes,
};
use completion::Completion;
use radix_tree::{AdapterId, NamespaceKey};
use tiered_connector::job::Origin;

/// A prompt whose blocks go to other tiers.
fn guarded(tokens: &[Token]) -> NewSequence {
    let root = NamespaceKey::default().root(None);
    let guards = Some(Guards::new(Algo::AHash64, &root, &[0; 32]));
    let mut request = NewSequence { guards, ..prompt(tokens) };
    request.hash_prompt(PAGE);
    request
}

/// A request that holds so many pages and stores nothing.
fn holding(ledger: &mut Ledger, pages: u32) -> SlotId {
    let tokens: Vec<Token> = (0..pages * PAGE).map(|token| 100 + token as Token).collect();
    let slot = claim(ledger, NewSequence { no_store: true, no_read: true, ..prompt(&tokens) });
    forward(ledger, slot);
    slot
}

/// The pages that are copied ahead of their eviction.
fn demoted(ledger: &mut Ledger) -> (u64, Vec<PageId>) {
    let mut jobs = ledger.take_offloads();
    let job = jobs.pop().expect("a copy begins");
    assert!(jobs.is_empty(), "one begins a call");
    (job.copy.id.0, job.copy.pages)
}

#[test]
fn blocks_that_are_going_to_be_evicted_are_offered_in_the_order_of_their_prefix() {
    let write_policy = WritePolicy::OnEvict { min_priority: Priority::DEFAULT };
    let mut ledger = Ledger::new(LedgerConfig { write_policy, ..config(17) });
    let tokens: Vec<Token> = (0..65).collect();
    let slot = claim(&mut ledger, guarded(&tokens));
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    assert!(ledger.take_offloads().is_empty(), "all pages were in use when the call took them");

    let slot = claim(&mut ledger, guarded(&[-1]));
    ledger.alloc(&[slot], &[]).unwrap(); // page 17, which stood for nothing

    let jobs = ledger.take_offloads();
    let again = claim(&mut ledger, guarded(&tokens));
    let wanted = ledger.wanted(again).unwrap().expect("it may ask other tiers");
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0].copy.pages, [PageId(15), PageId(16)], "an eighth of 16 idle pages: the tail");
    assert_eq!(jobs[0].keys, wanted.keys[14..]);
    ledger.verify().unwrap();
}

#[test]
fn a_block_that_is_used_while_it_is_copied_ahead_of_its_eviction_goes_after_the_block_below_it() {
    let write_policy = WritePolicy::OnEvict { min_priority: Priority::LOWEST };
    let mut ledger = Ledger::new(LedgerConfig { write_policy, ..private(21) });
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    let twins = [(); 2].map(|()| claim(&mut ledger, guarded(&tokens)));
    ledger.alloc(&twins, &[]).unwrap();
    ledger.close_step();
    ledger.step(&twins, &[], None).unwrap();
    let [first, second] = [PageId(1), PageId(2)];
    let (large, small) = (holding(&mut ledger, 8), holding(&mut ledger, 7));
    ledger.release(&[twins[0], small]).unwrap();
    // With 9 evictable pages one may be copied, with 16 two: first the block that goes first, then the one above it.
    holding(&mut ledger, 1);
    let (copy, pages) = demoted(&mut ledger);
    assert_eq!(pages, [second]);
    finish_copies(&mut ledger, &[copy]).unwrap();
    ledger.release(&[large]).unwrap();
    holding(&mut ledger, 1);
    let (copy, pages) = demoted(&mut ledger);
    assert_eq!(pages, [first]);

    ledger.release(&[twins[1]]).unwrap(); // counts as a use of both blocks
    finish_copies(&mut ledger, &[copy]).unwrap();

    let order: Vec<PageId> = ledger.pool().eviction_order().collect();
    assert_eq!(order[order.len() - 2..], [second, first]);
    ledger.verify().unwrap();
}

#[test]
fn a_reset_refuses_offloads_that_nobody_has_taken() {
    let mut ledger = Ledger::new(config(4));
    let slot = claim(&mut ledger, guarded(&[1, 2, 3, 4, 5]));
    forward(&mut ledger, slot);
    assert_eq!(ledger.copies_in_flight(), 1, "the full block is on its way");

    ledger.reset_prefix_cache();

    assert!(ledger.take_offloads().is_empty(), "it is of before the reset");
    assert_eq!((ledger.copies_in_flight(), ledger.counters().copies_refused), (0, 1));
    ledger.verify().unwrap();
}

/// A tier that only notes where blocks come from.
#[derive(Default)]
struct Origins(Vec<Origin>);

impl OuterTier for Origins {
    fn leading(&mut self, _: &mut dyn Iterator<Item = BlockKey>) -> usize {
        0
    }

    fn has(&mut self, _: GroupId, _: &BlockKey) -> bool {
        false
    }

    fn load(&mut self, _: &[BlockKey], _: &CopyJob) -> Option<Completion> {
        None
    }

    fn offload(&mut self, job: &OffloadJob, origin: &dyn Fn(usize) -> Origin) -> bool {
        self.0.extend((0..job.keys.len()).map(origin));
        false
    }

    fn touch(&mut self, _: &[u64]) {}

    fn take_ended(&mut self) -> Vec<(u64, CopyEnd)> {
        Vec::new()
    }
}

#[test]
fn a_tier_is_told_what_each_block_was_made_of() {
    let adapter = Some(AdapterId::Name("ab".into()));
    let namespace = NamespaceKey { adapter, generation: 3, ..NamespaceKey::default() };
    let root = namespace.root(None);
    let guards = Some(Guards::new(Algo::AHash64, &root, &[0; 32]));
    let chain = Chain::new(Algo::AHash64, &root);
    let tokens = vec![1, 2, 3, 4, 5, 6, 7, -8, 9];
    let mut request = NewSequence { guards, ..NewSequence::new(tokens, 64, namespace, chain) };
    request.hash_prompt(PAGE);
    let first = request.chain.keys()[0];
    let mut ledger = Ledger::new(config(4));
    let slot = claim(&mut ledger, request);
    forward(&mut ledger, slot);

    let mut tier = Origins::default();
    ledger.offload_to(&mut tier).unwrap();

    let content = |tokens: [i32; 4]| {
        let tokens = tokens.map(i32::to_le_bytes).concat();
        let adapter = b"\x02\x02\0\0\0ab\x03\0\0\0\0\0\0\0";
        [b"\x04\0\0\0", &tokens[..], b"\0\0\0\0", adapter].concat()
    };
    let expected = [
        Origin { parent: 0, position: 0, content: content([1, 2, 3, 4]) },
        Origin { parent: first, position: 1, content: content([5, 6, 7, -8]) },
    ];
    assert_eq!(tier.0, expected);
    assert!(tier.0.iter().all(|origin| origin.content.len() <= content_bytes(PAGE)));
    assert_eq!(ledger.copies_in_flight(), 0, "it took nothing");
}
