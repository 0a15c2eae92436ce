use super::*;
use proptest::prelude::*;

const FULL: GroupKind = GroupKind::Full;

fn window(window: u32, sinks: u32) -> GroupKind {
    GroupKind::Window { window, sinks }
}

/// Whether the token at position `query` reads the token at `key`, by the definition of each kind.
fn reads(kind: GroupKind, query: u32, key: u32) -> bool {
    key <= query
        && match kind {
            GroupKind::Full => true,
            GroupKind::Window { window, sinks } => key < sinks || query - key < window,
            GroupKind::Chunked { chunk } => query / chunk == key / chunk,
            GroupKind::Recurrent(_) => query - key < 2, // the state after the token before it
            GroupKind::Scratch | GroupKind::Cross => query == key,
        }
}

/// Blocks below `hit` that the tokens from there on read: a sinks block is kept whole.
fn read_by_later(kind: GroupKind, page_size: u32, hit: u32, block: u32) -> bool {
    let first = hit * page_size;
    // Whatever is read later than a whole period on is read then too.
    let period = match kind {
        GroupKind::Full | GroupKind::Recurrent(_) | GroupKind::Scratch | GroupKind::Cross => 1,
        GroupKind::Window { window, .. } => window,
        GroupKind::Chunked { chunk } => chunk,
    };
    let tokens = block * page_size..(block + 1) * page_size;
    (first..=first + period).any(|query| tokens.clone().any(|key| key < first && reads(kind, query, key)))
}

fn kinds() -> impl Strategy<Value = GroupKind> {
    prop_oneof![
        Just(FULL),
        (1u32..20, 0u32..7).prop_map(|(tokens, sinks)| window(tokens, sinks)),
        (1u32..20).prop_map(|chunk| GroupKind::Chunked { chunk }),
        Just(GroupKind::Recurrent(Snapshots::default())),
        Just(GroupKind::Scratch),
        Just(GroupKind::Cross),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn a_joint_hit_is_the_longest_prefix_whose_later_tokens_find_what_they_read(
        kinds in prop::collection::vec(kinds(), 1..=5),
        page_size in 1u32..6,
        rows in prop::collection::vec(prop::collection::vec(prop::bool::weighted(0.8), 9), 5),
        most in 0u32..=9,
        least in 0u32..4,
    ) {
        let present = |group: usize, block: u32| rows[group][block as usize];
        let usable = |hit: u32| {
            kinds.iter().enumerate().all(|(group, &kind)| {
                (0..hit).all(|block| !read_by_later(kind, page_size, hit, block) || present(group, block))
            })
        };
        let brute = (least + 1..=most).rev().find(|&hit| usable(hit));
        let hit = joint_hit(&kinds, page_size, least, most, |group, block| present(usize::from(group.0), block));
        prop_assert_eq!(hit, brute);
    }

    #[test]
    fn a_block_is_needed_if_a_token_from_there_on_reads_it(
        kind in kinds(), page_size in 1u32..6, hit in 0u32..9,
    ) {
        let needed = kind.needed(hit * page_size, page_size);
        for block in 0..hit {
            prop_assert_eq!(needed.has(block), read_by_later(kind, page_size, hit, block), "block {}", block);
        }
    }
}

#[test]
fn a_window_of_one_page_and_a_token_needs_one_block_at_a_border() {
    // Window 129 over pages of 128: the token at 256 reads tokens 128 to 256.
    assert_eq!(window(129, 0).needed(256, 128), Needed { sinks: 0, from: 1 });
    // 130: token 127 too.
    assert_eq!(window(130, 0).needed(256, 128), Needed { sinks: 0, from: 0 });
    assert_eq!(window(1, 0).needed(256, 128), Needed { sinks: 0, from: 2 });
}

#[test]
fn a_block_goes_when_its_last_token_leaves_the_window() {
    // A page whose last token is p - 1 may go when p <= n - W + 1: 128 <= n - 499 for n from 627 on.
    assert_eq!(window(500, 0).needed(626, 128).from, 0);
    assert_eq!(window(500, 0).needed(627, 128).from, 1);
}

#[test]
fn a_shorter_prefix_may_lack_the_window_of_a_longer_one() {
    // Full has blocks 0 to 2; the window, which reads one block back, has block 3 alone, then 0.
    let full = [true, true, true, false];
    let hit = |window_has: [bool; 4]| {
        joint_hit(&[FULL, window(2, 0)], 1, 0, 4, |group, block| {
            if group == GroupId::FIRST { full[block as usize] } else { window_has[block as usize] }
        })
    };
    assert_eq!(hit([true, false, false, true]), Some(1));
    assert_eq!(hit([false, false, true, true]), Some(3));
    assert_eq!(hit([false, true, false, true]), Some(2));
}

#[test]
fn nothing_is_needed_where_a_chunk_begins() {
    let absent = |_: GroupId, _: u32| false;
    // Chunks of 8 tokens, pages of 4: after 2, 4, ... blocks.
    assert_eq!(joint_hit(&[GroupKind::Chunked { chunk: 8 }], 4, 0, 5, absent), Some(4));
    // With chunks of 6, at token 12.
    assert_eq!(joint_hit(&[GroupKind::Chunked { chunk: 6 }], 4, 0, 5, absent), Some(3));
}
