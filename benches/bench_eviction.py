"""Evicting a page: the price must not grow with the number of evictable pages."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import Row
from pagekeeper import PagedKVCacheManager
from workbench import cache, prompts, request

pytestmark = [
    pytest.mark.benchmark(group="eviction", timer=time.thread_time),
    pytest.mark.timeout(300),  # filling the largest cache takes a while
]

PAGE_SIZE = 16
EVICTED = 512
"""Pages that one round evicts."""

ROUNDS = 30


class FullCache:
    """A cache of which every page is evictable, least recently released first.

    Requests of one page each were released in a shuffled order, so that an evicted page and the one after it
    lie anywhere in memory. Without partial reuse: with it, blocks that follow the same one, as all of these
    do and few of others, are found by their tokens too, and taken out there.
    """

    def __init__(self, pages: int) -> None:
        self.kv: PagedKVCacheManager = cache(PAGE_SIZE, pages, partial_reuse=False)
        self._order = np.random.default_rng(0)
        self._fresh = prompts(PAGE_SIZE)
        slots = self.claim(pages)
        self.kv.alloc(slots)
        self.store(slots)

    def claim(self, count: int) -> NDArray[np.int32]:
        """Slots of new requests of one page each."""
        fresh = itertools.islice(self._fresh, count)
        return np.array([self.kv.claim(request(tokens)) for tokens in fresh], np.int32)

    def store(self, slots: NDArray[np.int32]) -> None:
        """Ends these requests: their pages are cached, and evictable after all others."""
        self.kv.step(slots, np.zeros(len(slots), np.int32))
        self.kv.release(self._order.permutation(slots))
        count = self.kv.block_count()
        assert count.free == count.total


@pytest.fixture(scope="module", params=[1_000, 10_000, 100_000, 1_000_000], ids=["1k", "10k", "100k", "1M"])
def full(request: pytest.FixtureRequest) -> FullCache:
    return FullCache(request.param)


def test_evict_a_page_a_call(row: Row, full: FullCache) -> None:
    """`alloc` of one slot that needs one page; the price of the call is in it."""
    slots = np.empty(0, np.int32)

    def claim() -> tuple[tuple[list[NDArray[np.int32]]], dict[str, object]]:
        nonlocal slots
        slots = full.claim(EVICTED)
        return (np.split(slots, EVICTED),), {}

    def alloc_each(batches: list[NDArray[np.int32]]) -> None:
        for batch in batches:
            full.kv.alloc(batch)

    row.time(
        alloc_each,
        setup=claim,
        teardown=lambda _: full.store(slots),
        unit="ns/page",
        units=EVICTED,
        rounds=ROUNDS,
    )


def test_evict_the_pages_of_a_long_prompt(row: Row, full: FullCache) -> None:
    """`alloc` of one request that needs 512 pages."""
    fresh = prompts(EVICTED * PAGE_SIZE, seed=1)

    def claim() -> tuple[tuple[NDArray[np.int32]], dict[str, object]]:
        return (np.array([full.kv.claim(request(next(fresh)))], np.int32),), {}

    row.time(full.kv.alloc, setup=claim, teardown=full.store, unit="ns/page", units=EVICTED, rounds=ROUNDS)
