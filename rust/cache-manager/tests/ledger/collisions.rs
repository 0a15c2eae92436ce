//! Requests whose hashes are forced to those of other blocks: a miss, counted, wherever hashes are compared.

use crate::common::{PAGE, claim, config, forward, hit, overridden, prompt, salted};
use block_hash::{Algo, Chain, ExtraKeys, Token};
use cache_manager::{Ledger, NewSequence, PrefixQuery};

const PROMPT: [Token; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];
const SECOND_BLOCK: [Token; 4] = [5, 6, 7, 8];

/// A value beyond int32, and another one of which 64 bits are equal.
const WIDE: i128 = -(1 << 40);
const WIDE_UNSIGNED: i128 = (1 << 64) - (1 << 40);

/// A request whose two blocks are stored, and one whose first block has the hash of one of them.
struct Case {
    name: &'static str,
    owner: fn() -> NewSequence,
    forged: fn() -> NewSequence,
}

const CASES: [Case; 6] = [
    Case {
        name: "other tokens",
        owner: || prompt(&PROMPT),
        forged: || with_chain(prompt(&[1, 2, 3, 99, 5, 6, 7, 8, 9]), prompt(&PROMPT).chain),
    },
    Case {
        name: "the same tokens below another parent",
        owner: || prompt(&PROMPT),
        forged: || {
            let first = prompt(&PROMPT).chain.identity(0).to_vec();
            let root = prompt(&PROMPT).namespace.root(None);
            let mut chain = Chain::with_parent(Algo::AHash64, &root, &first).expect("a hash of 8 bytes");
            chain.extend(&SECOND_BLOCK, PAGE as usize, &ExtraKeys::default());
            assert_eq!(chain.keys(), &prompt(&PROMPT).chain.keys()[1..]);
            with_chain(prompt(&[5, 6, 7, 8, 9]), chain)
        },
    },
    Case {
        name: "the same tokens of another tenant",
        owner: || prompt(&PROMPT),
        forged: || with_chain(salted(&PROMPT, "tenant", PAGE), prompt(&PROMPT).chain),
    },
    Case {
        name: "overrides with 64 equal bits",
        owner: || overridden(&PROMPT, &[(1, WIDE)]),
        forged: || {
            with_chain(overridden(&PROMPT, &[(1, WIDE_UNSIGNED)]), overridden(&PROMPT, &[(1, WIDE)]).chain)
        },
    },
    Case {
        name: "overrides with 32 equal bits",
        owner: || overridden(&PROMPT, &[(1, -1)]),
        forged: || {
            let chain = overridden(&PROMPT, &[(1, -1)]).chain;
            with_chain(overridden(&PROMPT, &[(1, i128::from(u32::MAX))]), chain)
        },
    },
    Case {
        name: "no override where the other has one",
        owner: || overridden(&PROMPT, &[(1, WIDE)]),
        forged: || with_chain(prompt(&PROMPT), overridden(&PROMPT, &[(1, WIDE)]).chain),
    },
];

fn with_chain(request: NewSequence, chain: Chain) -> NewSequence {
    NewSequence { chain, ..request }
}

/// A ledger in which the owner was computed and released.
fn stored(case: &Case) -> Ledger {
    let mut ledger = Ledger::new(config(16));
    let slot = claim(&mut ledger, (case.owner)());
    forward(&mut ledger, slot);
    ledger.release(&[slot]).unwrap();
    assert_eq!((ledger.cached_blocks(), ledger.counters().collisions), (2, 0), "{}", case.name);
    ledger
}

#[test]
fn without_force_the_blocks_have_other_hashes_and_do_not_meet() {
    for case in &CASES {
        let mut ledger = stored(case);
        let mut honest = (case.forged)();
        honest.chain = Chain::new(Algo::AHash64, &honest.namespace.root(None));
        honest.hash_prompt(PAGE);
        assert_eq!(hit(&mut ledger, honest), 0, "{}", case.name);
        assert_eq!(ledger.counters().collisions, 0, "{}", case.name);
    }
}

#[test]
fn a_look_up_that_meets_another_blocks_hash_is_a_counted_miss() {
    for case in &CASES {
        let mut ledger = stored(case);
        assert_eq!(hit(&mut ledger, (case.forged)()), 0, "{}", case.name);
        assert_eq!(ledger.counters().collisions, 1, "{}", case.name);
        assert_eq!(ledger.counters().reused_tokens, 0, "{}", case.name);
        ledger.verify().unwrap();
    }
}

#[test]
fn a_probe_that_meets_another_blocks_hash_finds_nothing() {
    for case in &CASES {
        let NewSequence { tokens, namespace, extras, chain, .. } = (case.forged)();
        let query = PrefixQuery { tokens, namespace, extras, chain };
        let reuse = stored(case).probe(&query);
        assert_eq!((reuse.allocated, reuse.all), (0, 0), "{}", case.name);
        assert!(reuse.first_new_block == Some(query.chain.identity(0)), "{}", case.name);
    }
}

#[test]
fn a_publication_that_meets_another_blocks_hash_is_counted_and_leaves_the_stored_block_alone() {
    for case in &CASES {
        let mut ledger = stored(case);
        // It does not look the block up: only the publication meets it.
        let slot = claim(&mut ledger, NewSequence { no_read: true, ..(case.forged)() });
        forward(&mut ledger, slot);
        assert_eq!((ledger.counters().collisions, ledger.cached_blocks()), (1, 2), "{}", case.name);
        ledger.verify().unwrap();
        ledger.release(&[slot]).unwrap();
        assert_eq!(hit(&mut ledger, (case.owner)()), 8, "{}", case.name);
        ledger.verify().unwrap();
    }
}

#[test]
fn a_collision_in_the_middle_of_a_prompt_ends_the_hit_before_it() {
    let mut ledger = stored(&CASES[0]);
    let forged = || with_chain(prompt(&[1, 2, 3, 4, 5, 6, 7, 99, 9]), prompt(&PROMPT).chain);
    assert_eq!(hit(&mut ledger, forged()), 4);
    assert_eq!(ledger.counters().collisions, 1);
    ledger.verify().unwrap();
}
