"""A 32k-token request from claim to release, and its look-up alone."""

from __future__ import annotations

import itertools
import time

import pytest

from conftest import Row
from pagekeeper import TextContext
from pagekeeper.params import HashAlgorithm
from workbench import LONG, cache, prompts, request, serve

pytestmark = pytest.mark.benchmark(group="request cycle", timer=time.thread_time)

POOL = 4096 * 128
ROUNDS = 60


@pytest.mark.parametrize("algo", ["ahash64", "sha256"])
@pytest.mark.parametrize("page_size", [16, 128])
def test_cold_cycle(row: Row, page_size: int, algo: HashAlgorithm) -> None:
    """Nothing is cached of the prompt and the pool is full, so every page is an evicted one."""
    kv = cache(page_size, POOL // page_size, algo)
    fresh = prompts(LONG)
    for tokens in itertools.islice(fresh, 2 * POOL // LONG):
        serve(kv, request(tokens))
    made = [request(tokens) for tokens in itertools.islice(fresh, ROUNDS + 1)]
    waiting = iter(made)
    row.time(lambda ctx: serve(kv, ctx), setup=lambda: ((next(waiting),), {}), unit="µs", rounds=ROUNDS)
    assert all(ctx.cached_prefix_length == 0 for ctx in made)


@pytest.mark.parametrize("algo", ["ahash64", "sha256"])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("reused", ["blocks", "tokens"])
def test_warm_cycle(row: Row, reused: str, page_size: int, algo: HashAlgorithm) -> None:
    """All of the prompt is cached. All but the last block is reused; or all but the last token, by a copy."""
    partly = reused == "tokens"
    kv = cache(page_size, POOL // page_size, algo, partial_reuse=partly)
    tokens = next(prompts(LONG))
    serve(kv, request(tokens))
    made = [request(tokens) for _ in range(ROUNDS + 1)]
    waiting = iter(made)
    row.time(lambda ctx: serve(kv, ctx), setup=lambda: ((next(waiting),), {}), unit="µs", rounds=ROUNDS)
    assert all(ctx.cached_prefix_length == LONG - (1 if partly else page_size) for ctx in made)


def test_warm_look_up_among_100k_blocks(row: Row) -> None:
    """`alloc` of a cached prompt in 16-token blocks: match, pin, page ids. `claim` hashed it before.

    The prompts take turns, so that none is in the processor's caches from the round before.
    """
    page_size = 16
    count = -(-100_000 // (LONG // page_size))
    kv = cache(page_size, (count + 1) * LONG // page_size)
    stored = list(itertools.islice(prompts(LONG), count))
    for tokens in stored:
        serve(kv, request(tokens))
    turns = itertools.cycle(stored)

    def claimed() -> tuple[tuple[TextContext], dict[str, object]]:
        ctx = request(next(turns))
        kv.claim(ctx)
        return (ctx,), {}

    def release(ctx: TextContext) -> None:
        assert ctx.cached_prefix_length == LONG - 1
        kv.release(ctx)

    row.time(kv.alloc, setup=claimed, teardown=release, unit="µs", rounds=2 * count)
