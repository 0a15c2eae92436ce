"""A million tokens: every verb takes them, and no cost grows with the square of their number."""

import time

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import compute, free, manager, row

PAGE_SIZE = 16
LENGTH = 2**20


def prefill(chunk: int) -> float:
    """CPU seconds that a prompt takes from its claim to its release, and a look-up that finds it."""
    kv = manager(pages=LENGTH // PAGE_SIZE, page_size=PAGE_SIZE, max_num_input_tokens=chunk)
    tokens = np.arange(LENGTH)
    ctx = pk.TextContext("a", tokens)
    started = time.thread_time()
    kv.claim(ctx)
    while ctx.processed_length < LENGTH:
        compute(kv, ctx)
    kv.release(ctx)
    assert kv.probe_prefix_match_length(tokens) == LENGTH - PAGE_SIZE
    return time.thread_time() - started


@pytest.mark.alone
def test_a_prompt_in_five_hundred_chunks_is_hashed_and_looked_up_once() -> None:
    whole, chunked = (min(prefill(chunk) for _ in range(3)) for chunk in (LENGTH, LENGTH // 512))
    assert chunked < 4 * whole  # 256 times, if each chunk began at the first token


@pytest.mark.parametrize("algo", ["ahash64", "sha256"])
def test_a_prompt_of_a_million_tokens_lives_like_any_other(algo: str) -> None:
    kv = manager(pages=LENGTH // PAGE_SIZE + 1, page_size=PAGE_SIZE, kv_hash_algo=algo, kv_hash_seed="a" * 64)
    tokens = np.arange(LENGTH)
    first, second = pk.TextContext("a", tokens), pk.TextContext("b", tokens)
    kv.claim(first)
    compute(kv, first, new_tokens=[7])
    assert len(kv.commit_and_get_block_hashes(first)) == len(row(kv, first)) == LENGTH // PAGE_SIZE
    kv.claim(second)
    kv.alloc(second)
    assert (second.cached_prefix_length, second.active_length) == (LENGTH - PAGE_SIZE, PAGE_SIZE)
    tables = kv.runtime_inputs([[second]], form="vllm")[0]
    assert (tables.max_seq_len, int(tables.block_table[0, 0])) == (LENGTH, 1)
    kv.step(second)
    first.truncate(1)
    kv.preempt(second)
    assert free(kv) == LENGTH // PAGE_SIZE + 1  # the cut lies in a stored block, which others may read
    kv.release([first, second])
    kv.verify()
