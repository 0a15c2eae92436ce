"""Drafts (MGR-7, STEP-1): what is reserved for them, and what is left of them when they were wrong."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, hit, manager, prefilled, row, store
from tiny_model import cache, forward, greedy

PROMPT = list(range(10, 30))


def decoding(kv: pk.PagedKVCacheManager, length: int, drafts: int) -> pk.TextContext:
    """A request whose prompt has KV, and whose next token, 7, is known."""
    ctx = claimed(kv, PROMPT[:length], num_draft_tokens=drafts)
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[7])
    return ctx


# Speculative decoding


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(4))
def test_speculative_decoding_gives_the_tokens_of_plain_decoding(seed: int) -> None:
    prompt, drafts, wanted = [5, 17, 3, 88, 41, 9, 12], 3, 24
    truth = greedy(prompt, wanted + drafts + 1)
    guess = random.Random(seed)
    kv = cache(pages=16)
    ctx = claimed(kv, prompt, num_draft_tokens=drafts)
    kv.alloc(ctx)
    output = forward(kv, [ctx], [prompt])[0][-1:]
    kv.step(ctx, new_tokens=output)
    steps = 0
    while len(output) < wanted:
        kv.alloc(ctx)
        ahead = truth[len(output) : len(output) + drafts]
        guesses = [token if guess.random() < 0.7 else guess.randrange(101) for token in ahead]
        (given,) = forward(kv, [ctx], [[output[-1], *guesses]])
        right = next((at for at, token in enumerate(guesses) if token != given[at]), drafts)
        kv.step(ctx, new_tokens=given[: right + 1], counts=right + 1)
        kv.verify()
        output += given[: right + 1]
        steps += 1
    assert output == truth[: len(output)]
    assert steps < len(output) - 1  # some guesses were right
    # What is stored is what a request with these tokens finds.
    whole = [*prompt, *output]
    assert hit(kv, whole) == (len(whole) - 1) // 4 * 4


# Pages and tables


def test_a_step_has_pages_for_two_rounds_of_drafts() -> None:
    kv = manager()
    ctx = decoding(kv, 4, drafts=2)
    assert row(kv, ctx) == [1, 2]  # 4 tokens + 2 * 2
    kv.alloc(ctx)
    assert (row(kv, ctx), ctx.active_length) == ([1, 2, 3], 1)  # 5 tokens + 2 * 2


def test_without_drafts_nothing_is_reserved_behind_a_step() -> None:
    kv = manager()
    ctx = decoding(kv, 3, drafts=0)
    kv.alloc(ctx)
    assert row(kv, ctx) == [1]


def test_tables_of_the_max_form_cover_the_drafts_of_decode_steps_alone() -> None:
    kv = manager()
    decode = decoding(kv, 6, drafts=2)
    prompt = claimed(kv, range(50, 52), num_draft_tokens=2)
    kv.alloc([decode, prompt])
    tables = kv.runtime_inputs([[decode, prompt]])[0]
    assert tables.cache_lengths.tolist() == [6, 0]
    assert (tables.max_prompt_length, tables.max_cache_length) == (3, 9)


def test_tables_of_the_vllm_form_cover_the_drafts_of_decode_steps_alone() -> None:
    kv = manager()
    decode = decoding(kv, 6, drafts=2)
    prompt = claimed(kv, range(50, 52), num_draft_tokens=2)
    kv.alloc([decode, prompt])
    tables = kv.runtime_inputs([[decode, prompt]], form="vllm")[0]
    (_, second, third), other = row(kv, decode), row(kv, prompt)[0]
    assert tables.seq_lens.tolist() == [9, 2]
    assert tables.query_start_loc.tolist() == [0, 3, 5]
    cells = [second * 4 + 2, second * 4 + 3, third * 4, other * 4, other * 4 + 1]
    assert tables.slot_mapping.tolist() == cells
    assert (tables.max_query_len, tables.max_seq_len) == (3, 9)


def test_tables_of_the_flashinfer_form_cover_the_drafts_of_decode_steps_alone() -> None:
    kv = manager()
    decode = decoding(kv, 6, drafts=2)
    prompt = claimed(kv, range(50, 52), num_draft_tokens=2)
    kv.alloc([decode, prompt])
    tables = kv.runtime_inputs([[decode, prompt]], form="flashinfer")[0]
    assert tables.kv_indptr.tolist() == [0, 3, 4]
    assert tables.kv_indices.tolist() == [*row(kv, decode)[:3], row(kv, prompt)[0]]
    assert tables.kv_last_page_len.tolist() == [1, 2]
    assert tables.qo_indptr.tolist() == [0, 3, 5]


def test_a_row_has_room_for_drafts_behind_the_longest_sequence() -> None:
    kv = manager(pages=20, max_seq_len=32)
    plain = prefilled(kv, PROMPT[:4])
    plain.update(7)
    kv.alloc(plain)
    assert kv.runtime_inputs([[plain]])[0].lookup_table.shape == (1, 24)  # 8 pages
    ctx = claimed(kv, range(100, 131), num_draft_tokens=3)
    kv.alloc(ctx)
    table = kv.runtime_inputs([[ctx]])[0].lookup_table
    assert table.shape == (1, 32)  # 32 tokens + 3 * 3 + 1 are 11 pages
    assert table[0, :11].tolist() == [*row(kv, ctx), 0]  # 31 tokens + 2 * 3 are 10 pages


def test_a_forward_may_compute_drafts_beyond_max_num_input_tokens() -> None:
    kv = manager(max_num_input_tokens=2, max_batch_size=1)
    ctx = claimed(kv, PROMPT[:2], num_draft_tokens=5)
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[7])
    kv.alloc(ctx)
    assert kv.runtime_inputs([[ctx]], form="vllm")[0].slot_mapping.shape == (6,)


# Slots of tokens (case 12: they are not the ones that follow the last)


@pytest.mark.parametrize("seed", range(5))
def test_slots_come_from_the_table_also_behind_hits_on_scattered_pages(seed: int) -> None:
    draw = random.Random(seed)
    kv = manager(pages=24)
    # One prompt is stored piece by piece while others give up their pages: its blocks lie anywhere.
    held = [prefilled(kv, [1000 + index]) for index in range(6)]
    draw.shuffle(held)
    store(kv, PROMPT[:4])
    for index in range(3):
        kv.release(held.pop())
        store(kv, PROMPT[: 4 * index + 8])
    ctx = claimed(kv, PROMPT[:18], num_draft_tokens=3)
    kv.alloc(ctx)
    assert ctx.cached_prefix_length == 16
    kv.step(ctx, new_tokens=[7])
    kv.release(held)
    kv.alloc(ctx)
    table = row(kv, ctx)
    assert any(after != before + 1 for before, after in pairwise(table))
    expected = [table[position // 4] * 4 + position % 4 for position in range(len(table) * 4)]
    assert kv.slot_mapping(ctx, list(range(len(expected)))).tolist() == expected
    mapping = kv.runtime_inputs([[ctx]], form="vllm")[0].slot_mapping
    assert mapping.tolist() == expected[18:22]  # the token, and three drafts


# Results


def test_accepted_drafts_have_kv_and_the_newest_token_has_none() -> None:
    kv = manager()
    ctx = decoding(kv, 4, drafts=2)
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[61, 62, 63], counts=3)
    assert (ctx.processed_length, len(ctx)) == (7, 8)
    kv.alloc(ctx)
    assert ctx.active_length == 1


def test_rejected_drafts_are_written_over() -> None:
    kv = manager()
    ctx = decoding(kv, 4, drafts=2)
    kv.alloc(ctx)
    first = kv.runtime_inputs([[ctx]], form="vllm")[0].slot_mapping.tolist()
    kv.step(ctx, new_tokens=[61])
    pages = row(kv, ctx)
    kv.alloc(ctx)
    second = kv.runtime_inputs([[ctx]], form="vllm")[0].slot_mapping.tolist()
    assert (second[:2], row(kv, ctx)) == (first[1:], pages)


def test_nothing_of_a_rejected_draft_is_stored() -> None:
    kv = manager()
    ctx = decoding(kv, 6, drafts=2)
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[61])
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[62, 63], counts=[2])
    log = [*PROMPT[:6], 7, 61, 62, 63]
    assert ctx.tokens.all.tolist() == log
    assert hit(kv, log) == 8


def test_a_step_planned_ahead_moves_when_drafts_of_the_one_before_it_are_accepted() -> None:
    kv = manager()
    ctx = decoding(kv, 4, drafts=2)
    for _ in range(2):
        kv.alloc(ctx)
        tables = kv.runtime_inputs([[ctx]])[0]
    assert tables.cache_lengths.tolist() == [5]
    kv.step(ctx, new_tokens=[61, 62, 63], counts=3)
    assert kv.runtime_inputs([[ctx]])[0].cache_lengths.tolist() == [7]
    kv.step(ctx, new_tokens=[64])
    assert (ctx.processed_length, ctx.tokens.all.tolist()) == (8, [*PROMPT[:4], 7, 61, 62, 63, 64])
    kv.verify()


def test_more_tokens_than_a_step_can_have_given_are_refused() -> None:
    kv = manager()
    ctx = decoding(kv, 4, drafts=2)
    kv.alloc(ctx)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match=r"request .*: slot 0: 4 tokens .* verified 2 drafts: at most 3"):
        kv.step(ctx, new_tokens=[1, 2, 3, 4], counts=4)
    assert kv.fingerprint() == before


def test_accepted_drafts_beyond_max_length_are_refused() -> None:
    kv = manager()
    ctx = pk.TextContext("a", PROMPT[:4], 6, num_draft_tokens=2)
    kv.claim(ctx)
    kv.alloc(ctx)
    kv.step(ctx, new_tokens=[7])
    kv.alloc(ctx)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="request 'a': slot 0: 7 tokens: over the limit of 6"):
        kv.step(ctx, new_tokens=[61, 62], counts=2)
    assert kv.fingerprint() == before
    kv.step(ctx, new_tokens=[61])


# The argument


@pytest.mark.parametrize("given", [-1, 256, 2**70])
def test_a_number_of_drafts_out_of_range_is_refused(given: int) -> None:
    with pytest.raises(ValueError, match=f"num_draft_tokens: {given} is out of range, must be 0 to 255"):
        pk.TextContext("a", [1], num_draft_tokens=given)


@pytest.mark.parametrize("given", [1.0, "1", None, True])
def test_a_number_of_drafts_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="num_draft_tokens"):
        pk.TextContext("a", [1], num_draft_tokens=given)


def test_an_engines_own_request_may_have_drafts() -> None:
    class Own:
        request_id = "own"
        tokens = np.arange(4)
        num_draft_tokens = 2

    kv = manager()
    slot = kv.claim(Own())
    kv.alloc(slot)
    kv.step(slot, new_tokens=[7])
    kv.alloc(slot)
    assert kv.runtime_inputs([slot])[0].max_prompt_length == 3
