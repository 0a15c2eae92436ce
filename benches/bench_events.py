"""What events cost: cold 32k-token cycles with and without them, in turns on the same machine."""

from __future__ import annotations

import itertools
import statistics
import time

import pytest

from conftest import Row
from workbench import LONG, cache, prompts, request, serve

POOL = 4096 * 128
ROUNDS = 60


@pytest.mark.parametrize("page_size", [16, 128])
def test_cold_cycle_with_events_beside_one_without(row: Row, page_size: int) -> None:
    """Every page is an evicted one: a block removed and a block stored for each. The figure is the ratio."""
    caches = [cache(page_size, POOL // page_size, event_buffer_max_size=size) for size in (0, 64)]
    fresh = prompts(LONG)
    for tokens in itertools.islice(fresh, 2 * POOL // LONG):
        for kv in caches:
            serve(kv, request(tokens))
    times: list[list[int]] = [[], []]
    for tokens in itertools.islice(fresh, ROUNDS):
        for kv, taken in zip(caches, times, strict=True):
            ctx = request(tokens)
            start = time.thread_time_ns()
            serve(kv, ctx)
            taken.append(time.thread_time_ns() - start)
            kv.get_latest_events()
    without, with_events = (statistics.median(taken) for taken in times)
    row.benchmark.pedantic(lambda: None, rounds=1)
    row.says(with_events / without, "x")
