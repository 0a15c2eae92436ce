//! Probes from other threads beside a scheduler loop, also under `ThreadSanitizer` (`make test-threads`).

use block_hash::{Algo, Chain, ExtraKeys, Token};
use cache_manager::{Ledger, LedgerConfig, NewSequence, PrefixQuery, SlotId};
use parking_lot::Mutex;
use radix_tree::NamespaceKey;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const PAGE: u32 = 4;
const BLOCKS: u32 = 8;
const PROBERS: usize = 4;
const ROUNDS: Token = 2000;

/// Whole blocks and one token, which is always computed.
fn prompt(first: Token) -> Vec<Token> {
    (first..=first + (BLOCKS * PAGE) as Token).collect()
}

fn chain() -> Chain {
    Chain::new(Algo::AHash64, &NamespaceKey::default().root(None))
}

fn claim(ledger: &Mutex<Ledger>, tokens: Vec<Token>) -> SlotId {
    let mut request = NewSequence::new(tokens, 1000, NamespaceKey::default(), chain());
    request.hash_prompt(PAGE);
    ledger.lock().claim(request).map_err(|refused| refused.error).unwrap()
}

/// Computes the prompt, all of it in one step, and releases it.
fn serve(ledger: &Mutex<Ledger>, tokens: Vec<Token>) {
    let slot = claim(ledger, tokens);
    ledger.lock().alloc(&[slot], &[]).unwrap();
    ledger.lock().close_step();
    ledger.lock().step(&[slot], &[], None).unwrap();
    ledger.lock().release(&[slot]).unwrap();
}

fn query(tokens: Vec<Token>) -> PrefixQuery {
    let mut chain = chain();
    chain.extend(&tokens, PAGE as usize, &ExtraKeys::default());
    PrefixQuery { tokens, namespace: NamespaceKey::default(), extras: ExtraKeys::default(), chain }
}

/// The answers that a prober got until `done`, as (blocks that are held, blocks).
fn answers(ledger: &Mutex<Ledger>, done: &AtomicBool) -> BTreeSet<(u32, u32)> {
    let query = query(prompt(0));
    let mut answers = BTreeSet::new();
    loop {
        let last = done.load(Ordering::Acquire);
        let reuse = ledger.lock().probe(&query);
        answers.insert((reuse.allocated, reuse.all));
        if last {
            return answers;
        }
        thread::yield_now();
    }
}

#[test]
fn probes_beside_the_scheduler_see_states_between_two_calls_and_no_other() {
    let ledger = Mutex::new(Ledger::new(LedgerConfig::new(PAGE, 3 * (BLOCKS + 1))));
    let done = AtomicBool::new(false);
    let seen: Vec<_> = thread::scope(|scope| {
        let probers = [(); PROBERS].map(|()| scope.spawn(|| answers(&ledger, &done)));
        for round in 1..=ROUNDS {
            serve(&ledger, prompt(0));
            serve(&ledger, prompt(round * 1000));
            ledger.lock().reset_prefix_cache();
        }
        serve(&ledger, prompt(0));
        done.store(true, Ordering::Release);
        probers.map(|prober| prober.join().unwrap()).into()
    });
    // The prompt's blocks come and go together: none of them, all held, or all idle.
    let possible = BTreeSet::from([(0, 0), (BLOCKS, BLOCKS), (0, BLOCKS)]);
    for answers in seen {
        assert!(answers.is_subset(&possible), "{answers:?}");
        assert!(answers.contains(&(0, BLOCKS)), "the last state is seen by all");
    }
    let ledger = ledger.into_inner();
    ledger.verify().unwrap();
    assert_eq!(ledger.counters().resets, u64::from(ROUNDS.cast_unsigned()));
}
