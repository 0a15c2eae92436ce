"""Three groups of layers, a full one and windows of 64 and 256 tokens, over the full one alone, in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest

from conftest import Row
from pagekeeper import MultiKVCacheParams, PagedKVCacheManager, SlidingWindow
from workbench import parameters, prompts, request

pytestmark = pytest.mark.benchmark(group="three groups over one")

PAGE_SIZE = 16
REQUESTS = 256


def both(pages: int) -> tuple[PagedKVCacheManager, PagedKVCacheManager]:
    """A cache of one group and one of three, without memory of their own; `pages` for each group."""
    full = parameters(PAGE_SIZE)
    several = MultiKVCacheParams(
        {
            "full": full,
            "narrow": parameters(PAGE_SIZE, kind=SlidingWindow(64)),
            "wide": parameters(PAGE_SIZE, kind=SlidingWindow(256)),
        },
        layout="paged",
    )
    counts = dict.fromkeys(several, pages)
    return (
        PagedKVCacheManager(full, None, pages, max_batch_size=REQUESTS, allocate_pools=False),
        PagedKVCacheManager(several, None, counts, max_batch_size=REQUESTS, allocate_pools=False),
    )


def ratio(one: Callable[[], object], three: Callable[[], object], rounds: int) -> float:
    """The median CPU time of the second over that of the first, in turns."""
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(rounds):
        for action, times in zip((one, three), taken, strict=True):
            start = time.thread_time_ns()
            action()
            times.append(time.thread_time_ns() - start)
    return statistics.median(taken[1]) / statistics.median(taken[0])


def test_decode_step_of_256(row: Row) -> None:
    """By arrays of slots."""
    prompt, steps = 1024, 300

    def decoder(kv: PagedKVCacheManager) -> Callable[[], None]:
        drawn = itertools.islice(prompts(prompt), REQUESTS)
        slots = np.array([kv.claim(request(tokens)) for tokens in drawn], np.int32)
        tokens = np.full(REQUESTS, 7, np.int32)

        def step() -> None:
            kv.alloc(slots)
            kv.runtime_inputs([slots])
            kv.step(slots, tokens)

        step()
        return step

    one, three = map(decoder, both(REQUESTS * ((prompt + steps) // PAGE_SIZE + 2)))
    row.says(ratio(one, three, steps), "x")
    row.benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.parametrize("hit", [False, True], ids=["cold", "hit"])
def test_prompt_of_2049_tokens(row: Row, hit: bool) -> None:
    """From claim to release, with one generated token: new, in a full cache, or cached but the last token."""
    length, rounds = 2049, 200

    def server(kv: PagedKVCacheManager) -> Callable[[], None]:
        drawn = prompts(length)
        waiting = itertools.repeat(next(drawn)) if hit else iter(list(itertools.islice(drawn, rounds + 8)))

        def serve() -> None:
            ctx = request(next(waiting))
            kv.claim(ctx)
            kv.alloc(ctx)
            kv.runtime_inputs([[ctx]])
            kv.step(ctx, 7)
            kv.release(ctx)

        for _ in range(8):
            serve()
        return serve

    one, three = map(server, both(4 * (length // PAGE_SIZE + 2)))
    row.says(ratio(one, three, rounds), "x")
    row.benchmark.pedantic(lambda: None, rounds=1)
