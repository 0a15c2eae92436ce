"""The host tier in Rust: copies beside plain ones of the same size, and what the scheduler's thread pays."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import Row
from pagekeeper import BlockKey, MHAKVCacheParams, PagedKVCacheManager
from pagekeeper._native import TieredConnector
from workbench import LONG, prompts, request, serve

ROUNDS = 15
MOVED = 64 << 20
"""Bytes that a round of copies moves."""


def keys(first: int, count: int) -> list[BlockKey]:
    return [BlockKey(n.to_bytes(8, "big"), n.to_bytes(16, "big")) for n in range(first, first + count)]


def in_turns(one: Callable[[], object], other: Callable[[], object]) -> float:
    """The median over rounds of the time of `one` over that of `other`, wall time, in turns."""
    ratios = []
    for number in range(ROUNDS + 1):
        times = {}
        for call in (one, other) if number % 2 else (other, one):
            start = time.perf_counter()
            call()
            times[call] = time.perf_counter() - start
        if number:
            ratios.append(times[one] / times[other])
    return statistics.median(ratios)


class Copies:
    """A pool of pages that go into a tier of as many units, and back, with one lane."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self.pages = list(range(len(pool)))
        self.tier = TieredConnector(pages=[[pool]], host_bytes=pool.nbytes, policy="priority_lru", lanes=1)
        self.keys = keys(0, len(pool))
        self.offload()

    def offload(self) -> None:
        self.tier.reset_prefix_cache()
        self.tier.offload(self.pages, self.keys).result()

    def load(self) -> None:
        self.tier.load(self.pages, self.keys).result()


@pytest.mark.parametrize("direction", ["offload", "load"])
@pytest.mark.parametrize("page", [256 << 10, 1 << 20, 4 << 20, 16 << 20], ids=lambda page: f"{page >> 10}KiB")
def test_speed_of_one_lane_over_a_plain_copy(row: Row, page: int, direction: str) -> None:
    """Pages in one piece; beside it numpy copies as many pieces of the same size. 1 is as fast."""
    source = np.random.default_rng(0).integers(0, 256, (MOVED // page, page), np.uint8)
    target, copies = np.ones_like(source), Copies(source.copy())

    def plain() -> None:
        for number in range(len(source)):
            target[number] = source[number]

    row.says(1 / in_turns(getattr(copies, direction), plain), "x")
    row.benchmark.pedantic(plain, rounds=1)


@pytest.mark.parametrize("direction", ["offload", "load"])
def test_speed_of_one_lane_with_small_pieces(row: Row, direction: str) -> None:
    """16 KiB of a page in each of 64 layers; beside it a plain copy of all pages in one piece."""
    layers, pages = 64, MOVED // (64 * (16 << 10))
    pool = np.random.default_rng(0).integers(0, 256, (layers, pages, 16 << 10), np.uint8)
    source, target = pool.copy(), np.ones_like(pool)
    copies = Copies(pool.transpose(1, 0, 2))
    row.says(1 / in_turns(getattr(copies, direction), lambda: np.copyto(target, source)), "x")
    row.benchmark.pedantic(lambda: None, rounds=1)


def test_speed_of_a_python_thread_beside_a_busy_lane(row: Row) -> None:
    """Loops of plain Python a second beside a lane that copies, over loops alone. Needs a core for each."""
    pool = np.ones((64, 1 << 20), np.uint8)
    copies, stop = Copies(pool), threading.Event()

    def loops() -> float:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < 0.1:
            count += sum(range(100)) > 0
        return count / (time.perf_counter() - start)

    ratios = []
    for _ in range(ROUNDS):
        alone = loops()
        stop.clear()
        transfer = copies.tier.load(copies.pages, copies.keys)
        busy_until = time.perf_counter() + 0.1
        rates = []
        while time.perf_counter() < busy_until:
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < 0.01:
                count += sum(range(100)) > 0
            rates.append(count / (time.perf_counter() - start))
            if transfer.is_complete():
                transfer = copies.tier.load(copies.pages, copies.keys)
        transfer.result()
        ratios.append(statistics.median(rates) / alone)
    row.says(statistics.median(ratios), "x")
    row.benchmark.pedantic(lambda: None, rounds=1)


def test_time_from_the_end_of_a_copy_to_its_flag(row: Row) -> None:
    """How much longer a waiting thread sees a small load in flight than a plain copy of as much takes."""
    pool = np.ones((2, 64 << 10), np.uint8)
    copies = Copies(pool)

    def one() -> None:
        copies.tier.load(copies.pages[:1], copies.keys[:1]).result()

    row.time(one, unit="µs", rounds=200)


def managers(page_size: int, pages: int, *tiers: dict[str, object] | None) -> list[PagedKVCacheManager]:
    """A manager of so many pages for each of these configurations."""
    made = []
    for config in tiers:
        params = MHAKVCacheParams(
            dtype="float32",
            n_kv_heads=1,
            head_dim=1,
            num_layers=1,
            page_size=page_size,
            kv_connector_config=config,
        )
        memory = np.zeros((pages + 1, params.bytes_per_page), np.uint8)
        made.append(PagedKVCacheManager(params, total_num_pages=pages, max_batch_size=1, buffers=[memory]))
    return made


def host_of(page_size: int, units: int) -> dict[str, object]:
    return {"type": "rust_tiered", "host_offload_max_gb": units * page_size * 8 / 2**30}


def with_and_without(page_size: int, pages: int) -> list[PagedKVCacheManager]:
    """Two managers of so many pages, the second with a tier of half as many units and one lane."""
    return managers(page_size, pages, None, host_of(page_size, pages // 2))


def with_and_without_disk(page_size: int, pages: int) -> list[PagedKVCacheManager]:
    """The same with a host of twice as many units, the second with a disk of twice as many slots too."""
    host = host_of(page_size, 2 * pages)
    return managers(page_size, pages, host, {**host, "disk_offload_max_gb": 2 * pages * 4500 / 2**30})


def alloc_times(both: list[PagedKVCacheManager], *, hits: bool) -> float:
    """`alloc` of 32k tokens, by the second over the first; CPU time of the thread.

    With `hits` its blocks are on the device. Between two of them the tiers get what is new.
    """
    fresh = prompts(LONG)
    for tokens in itertools.islice(fresh, 2 * 16):
        for kv in both:
            serve(kv, request(tokens))
            kv.poll_transfers()
    taken: list[list[int]] = [[], []]
    for tokens in itertools.islice(fresh, 60):
        for kv, times in zip(both, taken, strict=True):
            if hits:
                serve(kv, request(tokens))
                kv.poll_transfers()
            ctx = request(tokens)
            kv.claim(ctx)
            start = time.thread_time_ns()
            kv.alloc(ctx)
            times.append(time.thread_time_ns() - start)
            kv.take_page_copies()
            ctx.update(42)
            kv.step(ctx)
            kv.release(ctx)
            kv.poll_transfers()
    first, second = (statistics.median(times) for times in taken)
    return second / first


@pytest.mark.parametrize("page_size", [16, 128])
def test_cold_alloc_beside_one_without_a_tier(row: Row, page_size: int) -> None:
    """`alloc` of 32k new tokens, the tier full and its lane busy; the ratio."""
    row.says(alloc_times(with_and_without(page_size, 4096 * 128 // page_size), hits=False), "x")
    row.benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.parametrize("hits", [False, True], ids=["cold", "hits"])
@pytest.mark.parametrize("page_size", [16, 128])
def test_alloc_beside_one_without_a_disk(row: Row, page_size: int, hits: bool) -> None:
    """`alloc` of 32k tokens, the disk busy with what came before, over that with a host tier alone."""
    row.says(alloc_times(with_and_without_disk(page_size, 4096 * 128 // page_size), hits=hits), "x")
    row.benchmark.pedantic(lambda: None, rounds=1)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_bookkeeping_of_a_block(row: Row, tier: str) -> None:
    """`step` that publishes 2,048 blocks, and the end of their offloads, less one without that tier."""
    page_size, pages = 16, 1 << 15
    both = with_and_without(page_size, pages) if tier == "host" else with_and_without_disk(page_size, pages)
    fresh = prompts(LONG)
    taken: list[list[int]] = [[], []]
    for number, tokens in enumerate(itertools.islice(fresh, 90)):
        for kv, times in zip(both, taken, strict=True):
            ctx = request(tokens)
            kv.claim(ctx)
            kv.alloc(ctx)
            kv.take_page_copies()
            ctx.update(42)
            start = time.thread_time_ns()
            kv.step(ctx)
            while kv.metrics()["copies_in_flight"]:
                kv.poll_transfers()
            if number >= 30:
                times.append(time.thread_time_ns() - start)
            kv.release(ctx)
            kv.flush()
    without, with_tier = (statistics.median(times) for times in taken)
    row.says((with_tier - without) / (LONG // page_size), "ns/block")
    row.benchmark.pedantic(lambda: None, rounds=1)
