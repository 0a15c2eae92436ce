//! Guards tell blocks apart that hashes do not.

use block_hash::{Algo, Chain, ContentSpan, ExtraInputs, ExtraKeys, Guards, Root, Token};

const ALGOS: [Algo; 3] = [Algo::AHash64, Algo::Sha256, Algo::Sha256Trunc64];
const PAGE: usize = 16;

/// The hashes and the guards of a prompt's blocks.
fn hashed(
    algo: Algo,
    root: &Root,
    secret: [u8; 32],
    tokens: &[Token],
    extras: &ExtraKeys,
) -> (Vec<u64>, Vec<[u8; 16]>) {
    let (mut chain, mut guards) = (Chain::new(algo, root), Guards::new(algo, root, &secret));
    chain.extend(tokens, PAGE, extras);
    guards.extend(tokens, PAGE, extras);
    let all = (0..chain.len()).map(|block| guards.guard(&chain, block)).collect();
    (chain.keys().to_vec(), all)
}

fn of_zeros(algo: Algo, root: &Root, secret: u8) -> Vec<[u8; 16]> {
    hashed(algo, root, [secret; 32], &[0; 3 * PAGE], &ExtraKeys::default()).1
}

#[test]
fn blocks_that_somebody_made_with_one_ahash64_have_other_guards() {
    // Without a seed the hasher's third key is a known constant. Two tokens that equal it make the product
    // that they enter 0, whatever the next two are.
    let third_key = 0xA409_3822_299F_31D0_u64;
    let made = |third: Token| {
        let mut tokens: [Token; 2 * PAGE] = std::array::from_fn(|i| i as Token);
        (tokens[0], tokens[1]) = (third_key as u32 as Token, (third_key >> 32) as Token);
        tokens[2] = third;
        hashed(Algo::AHash64, &Root([0; 32]), [7; 32], &tokens, &ExtraKeys::default())
    };
    let ((hashes, guards), (same_hashes, other_guards)) = (made(1), made(2));
    assert_eq!(hashes, same_hashes);
    for block in 0..2 {
        assert_ne!(guards[block][..8], other_guards[block][..8], "block {block}");
        assert_ne!(guards[block][8..], other_guards[block][8..], "block {block}");
    }
}

#[test]
fn another_secret_gives_other_guards_to_ahash64_alone() {
    let root = Root([0; 32]);
    for algo in ALGOS {
        let [guards, others] = [1, 2].map(|secret| of_zeros(algo, &root, secret));
        for (guard, other) in guards.iter().zip(&others) {
            assert_eq!(guard == other, algo != Algo::AHash64, "{algo}");
        }
    }
}

#[test]
fn the_halves_of_a_keyed_guard_differ_from_each_other_and_from_the_hash() {
    let (hashes, guards) = hashed(Algo::AHash64, &Root([0; 32]), [0; 32], &[0; PAGE], &ExtraKeys::default());
    let hash = hashes[0].to_be_bytes();
    assert!(guards[0][..8] != guards[0][8..] && guards[0][..8] != hash && guards[0][8..] != hash);
}

#[test]
fn another_namespace_gives_other_guards() {
    for algo in ALGOS {
        let [plain, salted] = [None, Some("tenant-a")].map(|salt| Root::new(None, salt, None, 0));
        let [guards, others] = [plain, salted].map(|root| of_zeros(algo, &root, 1));
        assert!(guards.iter().zip(&others).all(|(guard, other)| guard != other), "{algo}");
    }
}

#[test]
fn an_extra_key_changes_the_guards_from_its_block_on() {
    let image = [ContentSpan { start: PAGE as u64, length: 1, hash: [5; 32] }];
    let extras = ExtraKeys::new(&ExtraInputs { mm_items: &image, ..Default::default() }).unwrap();
    for algo in ALGOS {
        let root = Root([0; 32]);
        let (_, others) = hashed(algo, &root, [1; 32], &[0; 3 * PAGE], &extras);
        let equal: Vec<bool> =
            of_zeros(algo, &root, 1).iter().zip(&others).map(|(guard, other)| guard == other).collect();
        assert_eq!(equal, [true, false, false], "{algo}");
    }
}
