"""What a later request may reuse: limits, identity, twins, edits, and mere looking."""

import threading
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import SEED, claimed, compute, free, hit, manager, prefilled, row, store

PROMPT = list(range(10, 30))
"""Twenty tokens: five blocks of four."""
IMAGE, OTHER_IMAGE = b"\x01" * 30 + b"\xab\xcd", b"\x02" * 30 + b"\xab\xcd"
"""Content hashes whose last 16 bits are equal."""


# The last token is always computed (TREE-5)


@pytest.mark.parametrize(("length", "found"), [(17, 16), (16, 12), (13, 12), (12, 8), (5, 4), (4, 0), (1, 0)])
def test_a_match_is_whole_blocks_and_never_reaches_the_last_token(length: int, found: int) -> None:
    kv = manager()
    store(kv, PROMPT[:16])
    assert hit(kv, PROMPT[:length]) == found


def test_no_tokens_match_nothing() -> None:
    kv = manager()
    store(kv, PROMPT[:16])
    assert hit(kv, []) == 0


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again() -> None:
    kv = manager(pages=8)
    stored = store(kv, PROMPT[:16])
    ctx = claimed(kv, PROMPT[:16])
    kv.alloc(ctx)
    assert (ctx.cached_prefix_length, ctx.active_length) == (12, 4)
    kv.step(ctx)
    assert row(kv, ctx) == stored  # the recomputed block is a twin of the stored one
    assert free(kv) == 4


def test_a_match_ends_where_the_tokens_differ() -> None:
    kv = manager()
    store(kv, PROMPT[:16])
    assert hit(kv, [*PROMPT[:9], 0, *PROMPT[10:]]) == 8
    assert hit(kv, [0, *PROMPT[1:]]) == 0


def test_a_block_in_the_middle_of_another_sequence_is_no_hit() -> None:
    kv = manager()
    store(kv, PROMPT[:16])
    assert hit(kv, PROMPT[4:]) == 0


def test_a_match_that_left_a_branch_does_not_go_on_in_another() -> None:
    kv = manager(page_size=1)
    store(kv, [1, 2, 3, 4])
    store(kv, [1, 2, 9, 9])
    assert [hit(kv, [*tokens, 0]) for tokens in ([1, 2, 3, 7, 9, 9], [1], [1, 2], [1, 2, 9, 9])] == [
        3,
        1,
        2,
        4,
    ]


def test_prompts_that_differ_inside_a_block_share_nothing_of_it() -> None:
    kv = manager(page_size=3)
    store(kv, [1, 2, 3])
    store(kv, [1, 2, 4])
    assert [hit(kv, tokens) for tokens in ([1, 2, 3, 0], [1, 2, 4, 0], [1, 2, 5, 0])] == [3, 3, 0]


def test_a_chain_of_a_hundred_thousand_blocks_is_found() -> None:
    length = 100_000
    kv = manager(pages=length + 1, page_size=1)
    tokens = np.arange(length, dtype=np.int32)
    store(kv, tokens)
    assert hit(kv, np.append(tokens, 7)) == length
    kv.verify()


# A wrong hit is impossible: everything that makes KV is part of the identity (TREE-4, HASH-6)


NAMESPACES: dict[str, dict[str, Any]] = {
    "none": {},
    "salt a": {"salt": "a"},
    "salt ab": {"salt": "ab"},
    "salt 1": {"salt": "1"},
    "adapter a": {"lora_id": "a"},
    "adapter '1'": {"lora_id": "1"},
    "adapter 1": {"lora_id": 1},
    "adapter a, reloaded": {"lora_id": "a", "lora_generation": 1},
    "generation 1": {"lora_generation": 1},
    "salt a, adapter b": {"salt": "a", "lora_id": "b"},
    "salt b, adapter a": {"salt": "b", "lora_id": "a"},
    "salt ab, adapter ''": {"salt": "ab", "lora_id": ""},
}


def of_request(keys: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a context that mean the same as these of a probe."""
    names = {"salt": "cache_salt", "overrides": "token_overrides"}
    return {names.get(name, name): value for name, value in keys.items()}


@pytest.mark.parametrize("stored", NAMESPACES)
@pytest.mark.parametrize("algo", ["ahash64", "sha256"])
def test_a_namespace_finds_its_own_blocks_and_no_others(stored: str, algo: str) -> None:
    kv = manager(kv_hash_algo=algo)
    store(kv, PROMPT[:8], **of_request(NAMESPACES[stored]))
    found = {name: hit(kv, PROMPT, **keys) for name, keys in NAMESPACES.items()}
    assert found == {name: 8 if name == stored else 0 for name in NAMESPACES}


def test_an_empty_salt_is_no_salt() -> None:
    kv = manager()
    store(kv, PROMPT[:8], cache_salt="")
    assert hit(kv, PROMPT) == 8
    assert hit(kv, PROMPT, salt="") == 8


EXTRAS: dict[str, dict[str, Any]] = {
    "image": {"mm_items": [(IMAGE, 6, 4)]},
    "other image": {"mm_items": [(OTHER_IMAGE, 6, 4)]},
    "image a token later": {"mm_items": [(IMAGE, 7, 4)]},
    "embeddings": {"prompt_embeds": [(IMAGE, 6, 4)]},
    "other embeddings": {"prompt_embeds": [(OTHER_IMAGE, 6, 4)]},
    "embeddings on fewer rows": {"prompt_embeds": [(IMAGE, 6, 3)]},
    "extra id": {"extra_ids": [0] * 6 + [5] + [0] * 13},
    "another extra id": {"extra_ids": [0] * 6 + [6] + [0] * 13},
    "extra id a token later": {"extra_ids": [0] * 7 + [5] + [0] * 12},
    "override beyond int32": {"overrides": [(6, 2**31)]},
    "another override": {"overrides": [(6, 2**31 + 1)]},
    "override a token later": {"overrides": [(7, 2**31)]},
}


@pytest.mark.parametrize("stored", EXTRAS)
def test_a_hit_ends_before_the_first_block_whose_extra_keys_differ(stored: str) -> None:
    kv = manager()
    store(kv, PROMPT[:16], **of_request(EXTRAS[stored]))
    found = {name: hit(kv, PROMPT, **keys) for name, keys in EXTRAS.items()}
    assert found == {name: 16 if name == stored else 4 for name in EXTRAS}  # token 6 lies in block 1
    assert hit(kv, PROMPT) == 4


def test_an_extra_key_and_an_adapter_must_both_agree() -> None:
    kv = manager()
    ids = {value: [0] * 6 + [value] + [0] * 13 for value in (5, 6)}
    store(kv, PROMPT[:16], extra_ids=ids[5], lora_id="a")
    found = {
        (value, adapter): hit(kv, PROMPT, extra_ids=ids[value], lora_id=adapter)
        for value in ids
        for adapter in ("a", "b", None)
    }
    assert found == {(5, "a"): 16, (6, "a"): 4} | {
        (value, other): 0 for value in ids for other in ("b", None)
    }


def test_a_hit_may_end_within_an_image() -> None:
    kv = manager()
    image = [(IMAGE, 2, 9)]  # in blocks 0 to 2
    store(kv, PROMPT[:16], mm_items=image)
    assert hit(kv, [*PROMPT[:8], *range(8)], mm_items=image) == 8
    assert hit(kv, [*PROMPT[:11], 0], mm_items=image) == 8


def test_frames_of_a_video_are_told_apart_one_by_one() -> None:
    kv = manager()
    frames = [(bytes([number]) * 32, 4 * number, 4) for number in range(4)]
    store(kv, [7] * 16, mm_items=frames)
    for changed in range(4):
        others = [(OTHER_IMAGE, *frame[1:]) if frame[1] == 4 * changed else frame for frame in frames]
        assert hit(kv, [7] * 17, mm_items=others) == 4 * changed


def test_an_image_that_begins_in_the_first_block_leaves_nothing_to_another() -> None:
    kv = manager(page_size=16, pages=4)
    placeholders = [7] * 40
    store(kv, placeholders, mm_items=[(IMAGE, 3, 37)])
    assert hit(kv, placeholders, mm_items=[(IMAGE, 3, 37)]) == 32
    assert hit(kv, placeholders, mm_items=[(OTHER_IMAGE, 3, 37)]) == 0


def test_an_override_within_int32_is_the_token_it_puts_in() -> None:
    kv = manager()
    store(kv, [1, 0, 3, 4], token_overrides=[(1, 2)])
    assert hit(kv, [1, 2, 3, 4, 5]) == 4
    assert hit(kv, [1, 0, 3, 4, 5]) == 0


def test_an_override_outside_the_sequence_is_ignored() -> None:
    kv = manager()
    store(kv, PROMPT[:4], token_overrides=[(99, 2)])
    assert hit(kv, PROMPT) == 4


def test_negative_tokens_are_not_their_unsigned_twins() -> None:
    kv = manager()
    store(kv, [-1, -2, -3, -4])
    assert hit(kv, [-1, -2, -3, -4, 0]) == 4
    assert hit(kv, [-2, -1, -3, -4, 0]) == 0


# Twins (TREE-11)


def test_the_second_of_two_twins_adopts_the_stored_pages() -> None:
    kv = manager(pages=8)
    a, b = claimed(kv, PROMPT[:9]), claimed(kv, PROMPT[:9])
    kv.alloc([a, b])
    assert (row(kv, a), row(kv, b)) == ([1, 2, 3], [4, 5, 6])
    kv.step([a, b])
    assert (row(kv, a), row(kv, b)) == ([1, 2, 3], [1, 2, 6])
    assert free(kv) == 4


def test_pages_that_a_twin_gave_up_go_to_others_and_stand_in_no_table_any_more() -> None:
    kv = manager(pages=8)
    a, b = claimed(kv, PROMPT[:8]), claimed(kv, PROMPT[:8])
    kv.alloc([a, b])
    kv.step([a, b])
    c = claimed(kv, range(50, 74))
    kv.alloc(c)
    assert sorted(row(kv, c)) == [3, 4, 5, 6, 7, 8]
    assert row(kv, a) == row(kv, b) == [1, 2]


def test_a_private_twin_keeps_its_row() -> None:
    kv = manager(pages=8, on_duplicate="private")
    a, b = claimed(kv, PROMPT[:9]), claimed(kv, PROMPT[:9])
    kv.alloc([a, b])
    kv.step([a, b])
    assert (row(kv, a), row(kv, b)) == ([1, 2, 3], [4, 5, 6])


def test_a_private_copy_goes_first_and_the_stored_one_still_hits() -> None:
    kv = manager(pages=4, on_duplicate="private")
    a, b = claimed(kv, PROMPT[:8]), claimed(kv, PROMPT[:8])
    kv.alloc([a, b])
    kv.step([a, b])
    kv.release([a, b])
    newcomer = claimed(kv, [1, 2, 3])
    kv.alloc(newcomer)
    assert row(kv, newcomer) == [4]  # the last page of b, released before its first
    assert hit(kv, PROMPT) == 8


def test_evicting_the_stored_twin_ends_the_hits() -> None:
    kv = manager(pages=4, on_duplicate="private")
    a, b = claimed(kv, PROMPT[:8]), claimed(kv, PROMPT[:8])
    kv.alloc([a, b])
    kv.step([a, b])
    kv.release([a, b])
    store(kv, range(50, 66))
    assert hit(kv, PROMPT) == 0
    kv.verify()


def test_a_twin_of_an_idle_block_takes_it_out_of_the_queue() -> None:
    kv = manager(pages=4)
    assert store(kv, PROMPT[:4]) == [1]
    ctx = claimed(kv, PROMPT[:4])  # one block, whose last token must be computed
    compute(kv, ctx)
    assert row(kv, ctx) == [1]
    assert free(kv) == 3


# Edited sessions (TREE-14, MGR-4)


def test_a_truncated_token_leaves_nothing_under_its_hash() -> None:
    kv = manager()
    ctx = claimed(kv, [1, 2, 3])
    compute(kv, ctx, new_tokens=[99])
    ctx.truncate(3)
    ctx.update(4)
    compute(kv, ctx)
    kv.release(ctx)
    assert hit(kv, [1, 2, 3, 99, 7]) == 0
    assert hit(kv, [1, 2, 3, 4, 7]) == 4


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 11, 12])
def test_hashes_after_an_edit_are_those_of_a_fresh_request(length: int) -> None:
    kv = manager(pages=12, kv_hash_seed=SEED)
    ctx = prefilled(kv, PROMPT[:12], mm_items=[(IMAGE, 6, 4)])
    ctx.truncate(length)
    image = [(IMAGE, 6, min(4, length - 6))] if length > 6 else []  # what is left of it
    for token in range(50, 58):
        ctx.update(token)
    compute(kv, ctx)
    edited = [*PROMPT[:length], *range(50, 58)]
    assert kv.commit_and_get_block_hashes(ctx) == pk.hash_blocks(edited, 4, seed=SEED, mm_items=image)
    assert hit(kv, [*edited, 0], mm_items=image) == len(edited) // 4 * 4


@pytest.mark.parametrize("claimed_meanwhile", [True, False])
def test_an_item_that_an_edit_cut_is_cut_in_the_next_life_of_its_context(claimed_meanwhile: bool) -> None:
    kv = manager(pages=12, kv_hash_seed=SEED)
    ctx = prefilled(kv, PROMPT[:12], mm_items=[(IMAGE, 6, 4)])
    if not claimed_meanwhile:
        kv.release(ctx)
    ctx.truncate(7)
    for token in range(50, 56):
        ctx.update(token)
    if claimed_meanwhile:
        kv.release(ctx)
    kv.claim(ctx)
    compute(kv, ctx)
    edited = [*PROMPT[:7], *range(50, 56)]
    left = [(IMAGE, 6, 1)]
    assert kv.commit_and_get_block_hashes(ctx) == pk.hash_blocks(edited, 4, seed=SEED, mm_items=left)


def test_truncation_inside_a_stored_block_leaves_the_block_to_others() -> None:
    kv = manager(pages=8)
    ctx = prefilled(kv, PROMPT[:8])
    ctx.truncate(6)
    assert ctx.processed_length == 4  # block 1 is computed again, on a page of its own
    for token in (50, 51):
        ctx.update(token)
    compute(kv, ctx)
    assert row(kv, ctx)[1] != 2
    assert hit(kv, PROMPT) == 8
    assert hit(kv, [*PROMPT[:6], 50, 51, 0]) == 8


def test_truncation_inside_a_block_of_its_own_keeps_what_was_computed() -> None:
    kv = manager(pages=8)
    ctx = prefilled(kv, PROMPT[:11])
    ctx.truncate(9)
    assert ctx.processed_length == 9
    assert row(kv, ctx) == [1, 2, 3]


def test_truncation_gives_back_the_pages_behind_it() -> None:
    kv = manager(pages=8)
    ctx = prefilled(kv, PROMPT)
    ctx.truncate(8)
    assert row(kv, ctx) == [1, 2]
    assert free(kv) == 6
    assert ctx.tokens.all.tolist() == PROMPT[:8]


def test_pages_that_truncation_and_release_give_back_are_given_back_once() -> None:
    kv = manager(pages=4, page_size=8)
    ctx = prefilled(kv, PROMPT)  # three pages, the cut lies in the second
    ctx.truncate(13)
    kv.release(ctx)
    assert free(kv) == 4
    heirs = [prefilled(kv, range(first, first + 16)) for first in (100, 200)]
    assert sorted(row(kv, heirs[0]) + row(kv, heirs[1])) == [1, 2, 3, 4]


# Looking without touching (TREE-12, TREE-13, TREE-15)


def test_the_summary_tells_referenced_from_present_blocks() -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:16])
    user = claimed(kv, PROMPT[:9])
    kv.alloc(user)  # references blocks 0 and 1
    summary = kv.analyze_prefix_reuse([*PROMPT[:16], 90, 91, 92, 93, 94])
    assert (summary.reusable_blocks_allocated, summary.reusable_blocks_all) == (2, 4)


def test_the_summary_names_the_first_full_block_that_is_missing() -> None:
    kv = manager(pages=8, kv_hash_seed=SEED)
    store(kv, PROMPT[:8])
    summary = kv.analyze_prefix_reuse(PROMPT[:17])
    assert summary.first_new_block == pk.hash_blocks(PROMPT[:17], 4, seed=SEED)[2]


@pytest.mark.parametrize("length", [3, 9])
def test_the_summary_names_no_block_when_every_full_block_is_present(length: int) -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:8])
    assert kv.analyze_prefix_reuse(PROMPT[:length]).first_new_block is None


def test_the_summary_counts_a_namespace_by_itself() -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:8], cache_salt="a")
    assert kv.analyze_prefix_reuse(PROMPT).reusable_blocks_all == 0
    assert kv.analyze_prefix_reuse(PROMPT, salt="a").reusable_blocks_all == 2


def test_looking_changes_nothing() -> None:
    kv = manager(pages=8)
    store(kv, PROMPT[:16])
    prefilled(kv, PROMPT[:9])
    before = kv.fingerprint()
    for tokens in (PROMPT, PROMPT[:9], [1, 2, 3], []):
        hit(kv, tokens)
        hit(kv, tokens, salt="never seen")
        kv.analyze_prefix_reuse(tokens)
    assert kv.fingerprint() == before


def test_routers_may_probe_from_other_threads_while_the_scheduler_works() -> None:
    kv = manager(pages=40)
    pinned = prefilled(kv, PROMPT[:16])
    answers: set[int] = set()
    done = threading.Event()

    def router() -> None:
        while not done.is_set():
            answers.add(hit(kv, PROMPT))

    routers = [threading.Thread(target=router) for _ in range(3)]
    for thread in routers:
        thread.start()
    for start in range(300):
        store(kv, range(start, start + 80))
    done.set()
    for thread in routers:
        thread.join()
    assert answers == {16}
    assert row(kv, pinned) == [1, 2, 3, 4]
    kv.verify()
