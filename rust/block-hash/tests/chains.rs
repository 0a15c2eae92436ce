//! How a chain grows: whatever the order of calls and the instructions, the hashes are the same.

use block_hash::{
    Adapter, Algo, Chain, ContentSpan, CpuPath, ExtraInputs, ExtraKeys, Guards, HashError, Root, Token,
    narrow,
};
use proptest::prelude::*;

const ALGOS: [Algo; 3] = [Algo::AHash64, Algo::Sha256, Algo::Sha256Trunc64];

fn any_algo() -> impl Strategy<Value = Algo> {
    proptest::sample::select(&ALGOS)
}

fn any_span() -> impl Strategy<Value = ContentSpan> {
    (0..250_u64, 1..60_u64, any::<u8>()).prop_map(|(start, length, byte)| ContentSpan {
        start,
        length,
        hash: [byte; 32],
    })
}

prop_compose! {
    fn any_extras()(
        mm_items in prop::collection::vec(any_span(), 0..3),
        prompt_embeds in prop::collection::vec(any_span(), 0..2),
        extra_ids in prop::collection::vec(prop_oneof![9 => Just(0), 1 => any::<u64>()], 0..40),
        overrides in prop::collection::btree_map(0..250_i64, -(1_i128 << 33)..1 << 33, 0..4),
    ) -> ExtraKeys {
        let overrides: Vec<_> = overrides.into_iter().collect();
        ExtraKeys::new(&ExtraInputs {
            mm_items: &mm_items,
            prompt_embeds: &prompt_embeds,
            extra_ids: &extra_ids,
            overrides: &overrides,
        })
        .unwrap()
    }
}

fn all_identities(chain: &Chain) -> Vec<u8> {
    let mut bytes = Vec::new();
    chain.write_identities(0..chain.len(), &mut bytes);
    bytes
}

proptest! {
    #[test]
    fn guards_fed_in_pieces_and_cut_are_those_of_one_call(
        algo in any_algo(),
        tokens in prop::collection::vec(any::<Token>(), 0..250),
        page_size in 1..40_usize,
        extras in any_extras(),
        calls in prop::collection::vec((0..250_usize, prop::option::of(0..60_usize)), 0..8),
    ) {
        let root = Root([9; 32]);
        let start = || (Chain::new(algo, &root), Guards::new(algo, &root, &[8; 32]));
        let ((mut whole, mut whole_guards), (mut grown, mut guards)) = (start(), start());
        whole.extend(&tokens, page_size, &extras);
        whole_guards.extend(&tokens, page_size, &extras);
        for (fed, kept) in calls {
            let fed = &tokens[..fed.min(tokens.len())];
            grown.extend(fed, page_size, &extras);
            guards.extend(fed, page_size, &extras);
            if let Some(kept) = kept {
                grown.truncate(kept);
                guards.truncate(kept);
            }
        }
        grown.extend(&tokens, page_size, &extras);
        guards.extend(&tokens, page_size, &extras);
        for block in 0..whole.len() {
            prop_assert_eq!(guards.guard(&grown, block), whole_guards.guard(&whole, block));
        }
    }
}

proptest! {
    #[test]
    fn chunked_and_truncated_growth_gives_what_one_call_gives(
        algo in any_algo(),
        tokens in prop::collection::vec(any::<Token>(), 0..250),
        page_size in 1..40_usize,
        extras in any_extras(),
        calls in prop::collection::vec((0..250_usize, prop::option::of(0..60_usize)), 0..8),
    ) {
        let root = Root([9; 32]);
        let mut whole = Chain::new(algo, &root);
        whole.extend(&tokens, page_size, &extras);
        let mut grown = Chain::new(algo, &root);
        for (fed, kept) in calls {
            grown.extend(&tokens[..fed.min(tokens.len())], page_size, &extras);
            if let Some(kept) = kept {
                grown.truncate(kept);
            }
        }
        grown.extend(&tokens, page_size, &extras);
        prop_assert_eq!(grown.len(), tokens.len() / page_size);
        prop_assert_eq!(grown.keys(), whole.keys());
        prop_assert_eq!(all_identities(&grown), all_identities(&whole));
    }

    #[test]
    fn every_cpu_path_gives_the_same_hashes(
        algo in any_algo(),
        tokens in prop::collection::vec(any::<Token>(), 0..600),
        page_size in 1..140_usize,
        extras in any_extras(),
        seed in any::<[u8; 32]>(),
    ) {
        let on = |path| {
            let mut chain = Chain::new(algo, &Root(seed)).on(path);
            chain.extend(&tokens, page_size, &extras);
            all_identities(&chain)
        };
        let portable = on(CpuPath::PORTABLE);
        for path in CpuPath::available() {
            prop_assert_eq!(&on(path), &portable, "{}", path);
        }
    }

    #[test]
    fn a_block_hash_covers_every_token_before_its_end(
        algo in any_algo(),
        tokens in prop::collection::vec(any::<Token>(), 1..200),
        page_size in 1..20_usize,
        at in any::<prop::sample::Index>(),
        flip in 0..32_u32,
    ) {
        let at = at.index(tokens.len());
        let keys_of = |tokens: &[Token]| {
            let mut chain = Chain::new(algo, &Root([0; 32]));
            chain.extend(tokens, page_size, &ExtraKeys::default());
            chain.keys().to_vec()
        };
        let mut changed = tokens.clone();
        changed[at] ^= 1 << flip;
        let (before, after) = (keys_of(&tokens), keys_of(&changed));
        for (block, (before, after)) in before.iter().zip(&after).enumerate() {
            prop_assert_eq!(before == after, (block + 1) * page_size <= at, "block {}", block);
        }
    }

    #[test]
    fn an_earlier_chain_is_continued_by_its_last_link(
        algo in prop::sample::select(&[Algo::AHash64, Algo::Sha256]),
        tokens in prop::collection::vec(any::<Token>(), 48..49),
        blocks in 1..12_usize,
    ) {
        let root = Root([5; 32]);
        let none = ExtraKeys::default();
        let mut whole = Chain::new(algo, &root);
        whole.extend(&tokens, 4, &none);
        let parent = whole.identity(blocks - 1);
        let mut rest = Chain::with_parent(algo, &root, &parent).unwrap();
        rest.extend(&tokens[4 * blocks..], 4, &none);
        prop_assert_eq!(rest.keys(), &whole.keys()[blocks..]);
    }
}

fn hashed(algo: Algo, root: Root, tokens: &[Token], page_size: usize) -> Chain {
    let mut chain = Chain::new(algo, &root);
    chain.extend(tokens, page_size, &ExtraKeys::default());
    chain
}

#[test]
fn canonical_bytes_have_the_length_of_the_algorithm() {
    for (algo, length) in ALGOS.into_iter().zip([8, 32, 8]) {
        let chain = hashed(algo, Root([0; 32]), &[1, 2], 2);
        assert_eq!(algo.identity_len(), length);
        assert_eq!(chain.identity(0).len(), length);
        assert_eq!(all_identities(&chain), *chain.identity(0));
        assert_eq!(chain.keys()[0].to_be_bytes(), chain.identity(0)[..8]);
    }
}

#[test]
fn sha256_64_publishes_the_first_8_bytes_of_the_sha256_chain() {
    let tokens: Vec<Token> = (0..100).collect();
    let long = hashed(Algo::Sha256, Root([1; 32]), &tokens, 16);
    let short = hashed(Algo::Sha256Trunc64, Root([1; 32]), &tokens, 16);
    for block in 0..6 {
        assert_eq!(*short.identity(block), long.identity(block)[..8]);
    }
}

#[test]
fn a_partial_block_has_no_hash() {
    let chain = hashed(Algo::AHash64, Root([0; 32]), &[1; 31], 16);
    assert_eq!(chain.len(), 1);
}

#[test]
fn a_parent_of_the_wrong_length_is_refused() {
    for (algo, given, text) in [
        (Algo::AHash64, 32, "parent: 32 bytes given, ahash64 takes 8 bytes"),
        (Algo::Sha256, 8, "parent: 8 bytes given, sha256 takes 32 bytes"),
        (Algo::Sha256Trunc64, 8, "parent: 8 bytes given, sha256_64 takes 32 bytes"),
    ] {
        let error = Chain::with_parent(algo, &Root([0; 32]), &vec![0; given]).unwrap_err();
        assert_eq!(error, HashError::ParentLength { algo, given });
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn a_parent_replaces_the_root_for_sha_and_not_for_ahash() {
    let keys = |algo: Algo, root: [u8; 32]| {
        let mut chain = Chain::with_parent(algo, &Root(root), &vec![7; algo.parent_len()]).unwrap();
        chain.extend(&[1, 2, 3], 3, &ExtraKeys::default());
        chain.keys().to_vec()
    };
    assert_eq!(keys(Algo::Sha256, [1; 32]), keys(Algo::Sha256, [2; 32]));
    assert_ne!(keys(Algo::AHash64, [1; 32]), keys(Algo::AHash64, [2; 32]));
}

#[test]
fn algorithms_have_names() {
    for (algo, name) in ALGOS.into_iter().zip(["ahash64", "sha256", "sha256_64"]) {
        assert_eq!(algo.to_string(), name);
        assert_eq!(name.parse(), Ok(algo));
    }
    let unknown = "SHA256".parse::<Algo>().unwrap_err();
    assert_eq!(unknown, HashError::UnknownAlgo { given: "SHA256".to_owned() });
}

/// [`CpuPath::chosen`] reads the environment once a process: the interesting half runs in a second one.
#[test]
fn the_environment_switches_hardware_off() {
    if std::env::var("PAGEKEEPER_CPU").as_deref() == Ok("portable") {
        return assert_eq!(CpuPath::chosen(), CpuPath::PORTABLE);
    }
    assert_eq!(CpuPath::chosen(), CpuPath::available()[0]);
    let again = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_environment_switches_hardware_off"])
        .env("PAGEKEEPER_CPU", "portable")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&again.stdout);
    assert!(again.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn no_two_namespaces_share_a_root() {
    let seed = Some(&[3; 32]);
    let name = |name| Some(Adapter::Name(name));
    let roots = [
        Root::new(None, None, None, 0),
        Root::new(seed, None, None, 0),
        Root::new(None, Some("x"), None, 0),
        Root::new(None, None, name("x"), 0),
        Root::new(None, Some("x"), name("x"), 0),
        Root::new(seed, Some("x"), name("x"), 0),
        Root::new(None, None, name("x"), 1),
        Root::new(None, None, name("x"), 2),
        Root::new(None, None, None, 1),
        Root::new(None, None, name(""), 0),
        Root::new(None, None, name("7"), 0),
        Root::new(None, None, Some(Adapter::Number(7)), 0),
        Root::new(None, None, Some(Adapter::Number(0)), 0),
        Root::new(None, Some("org_1"), name("2345"), 0),
        Root::new(None, Some("org_12345"), name(""), 0),
    ];
    for (i, root) in roots.iter().enumerate() {
        assert!(!roots[..i].contains(root), "root {i} is a repetition");
    }
}

#[test]
fn an_empty_salt_is_no_salt() {
    assert_eq!(Root::new(None, Some(""), None, 0), Root::new(None, None, None, 0));
}

#[test]
fn the_root_alone_is_the_seed() {
    assert_eq!(Root::new(Some(&[8; 32]), None, None, 0), Root([8; 32]));
}

#[test]
fn numbers_of_64_bits_are_narrowed_when_all_of_them_are_tokens() {
    let edges = [i64::from(i32::MIN), -1, 0, 1, i64::from(i32::MAX)];
    for len in [0, 1, 3, 4, 7, 8, 9, 100] {
        let values: Vec<i64> = edges.into_iter().cycle().take(len).collect();
        let mut tokens = vec![5];
        assert!(narrow(&values, &mut tokens));
        assert_eq!(tokens[0], 5);
        assert!(tokens[1..].iter().map(|&token| i64::from(token)).eq(values.iter().copied()));
        for wrong in [i64::from(i32::MAX) + 1, i64::from(i32::MIN) - 1, 1 << 32, i64::MAX, i64::MIN] {
            for place in 0..len {
                let mut values = values.clone();
                values[place] = wrong;
                assert!(!narrow(&values, &mut Vec::new()), "{wrong} at {place} of {len}");
            }
        }
    }
}
