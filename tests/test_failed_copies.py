"""Copies between the device and host memory that do not end well, each kind of copy in each way.

Pins end once, counters say what happened, the request computes what it did not get, and nothing is left over.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

import pagekeeper as pk
from model.faults import lanes, lose_memory, needs_faults
from model.host import HostCache, prompt_of
from pagekeeper.transfers import LoadTransfer

pytestmark = needs_faults

PAGES = 8
PROMPT = prompt_of(1, 3)
"""Three full blocks and a token: four pages."""


@dataclass
class Begun:
    """A request, and a copy of its blocks that lanes hold."""

    cache: HostCache
    ctx: pk.TextContext
    transfer: pk.KVConnectorTransfer | None
    """None: nobody waits for an offload."""


def load() -> Begun:
    cache = HostCache(PAGES)
    cache.serve(PROMPT)
    cache.kv.truncate_prefix([])
    cache.memory[:] = 0
    lanes(cache, "hold")
    ctx = cache.claimed(PROMPT)
    return Begun(cache, ctx, cache.kv.alloc(ctx))


def offload() -> Begun:
    cache = HostCache(PAGES)
    lanes(cache, "hold")
    return Begun(cache, cache.computed(PROMPT), None)


def suspension() -> Begun:
    cache = HostCache(PAGES)
    ctx = cache.computed(PROMPT, no_store=True)
    lanes(cache, "hold")
    return Begun(cache, ctx, cache.kv.suspend(ctx))


def resumption() -> Begun:
    cache = HostCache(PAGES)
    ctx = cache.computed(PROMPT, no_store=True)
    cache.suspend(ctx)
    cache.memory[:] = 0
    lanes(cache, "hold")
    return Begun(cache, ctx, cache.kv.resume(ctx))


WAITED_FOR: list[Any] = [load, suspension, resumption]
"""The copies that somebody has a handle of."""


def fails(begun: Begun) -> str:
    lanes(begun.cache, "fail")
    return "^forced$"


def panics(begun: Begun) -> str:
    lanes(begun.cache, "panic")
    return "the copy panicked"


def is_cancelled(begun: Begun) -> str:
    assert begun.transfer is not None
    assert begun.transfer.cancel()
    return "cancelled"


def outlasts_the_tier(begun: Begun) -> str:
    begun.cache.kv._connector.shutdown(timeout=0.05)  # type: ignore[union-attr, call-arg]
    return "cancelled"


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        *product([load, offload, suspension, resumption], [fails, panics, outlasts_the_tier]),
        *product(WAITED_FOR, [is_cancelled]),
    ],
)
def test_a_copy_that_does_not_end_well_leaves_nothing_behind(kind: Any, end: Any) -> None:
    begun = kind()
    cache, ctx = begun.cache, begun.ctx
    assert cache.kv.metrics()["copies_in_flight"] == 1
    why = end(begun)
    ready = cache.settled()
    if begun.transfer is not None:
        assert ready == [ctx.request_id]
        with pytest.raises(pk.KVLoadFailed, match=why):
            begun.transfer.result()
    counted = cache.kv.metrics()
    assert (counted["copies_failed"], counted["copies_refused"], counted["pages_in_flight"]) == (1, 0, 0)
    before = cache.kv.fingerprint()
    assert cache.kv.poll_transfers() == [], "it ends once"
    assert cache.kv.fingerprint() == before

    if kind is offload:
        assert (counted["connector_host_unstored_blocks"], counted["connector_host_blocks"]) == (3, 0)
        assert cache.kv.probe_prefix_match_length(PROMPT) == 12, "the device has them"
    else:
        assert (ctx.processed_length, cache.kv.block_count().free) == (0, PAGES)
        assert counted["suspensions_lost"] == (kind is not load)
        assert counted["connector_host_unloaded_blocks"] == (3 if kind is load else 0)
        assert counted["connector_host_blocks"] == (3 if kind is load else 0), "what was there is still there"
        assert cache.counted("private_units") == 0
        lanes(cache, "copy")
        cache.forward(ctx)
        assert ctx.processed_length == 13, "all is computed, and nothing is loaded"
    assert cache.holds(ctx)
    cache.kv.release(ctx)
    assert cache.settled() == []
    assert (cache.kv.block_count().free, cache.counted("jobs")) == (PAGES, 0)
    cache.kv._connector.verify()


@pytest.mark.parametrize("how", ["release", "preempt"])
@pytest.mark.parametrize("kind", WAITED_FOR)
def test_a_copy_may_fail_after_its_request_was_given_up(kind: Any, how: str) -> None:
    begun = kind()
    cache, ctx = begun.cache, begun.ctx
    getattr(cache.kv, how)(ctx)
    assert cache.kv.metrics()["pages_in_flight"] == (3 if kind is load else 4)
    lanes(cache, "fail")
    assert cache.settled() == [], "nobody waits any more"
    lanes(cache, "copy")
    if how == "preempt":
        cache.run(ctx)
        cache.kv.release(ctx)
    counted = cache.kv.metrics()
    assert (counted["pages_in_flight"], counted["suspended"], counted["suspensions_lost"]) == (0, 0, 0)
    assert (cache.kv.block_count().free, cache.counted("private_units")) == (PAGES, 0)


def test_stores_are_refused_when_lanes_have_fallen_behind_and_what_waits_is_stored_later() -> None:
    cache = HostCache(pages=400, units=400, lanes=1)
    lanes(cache, "hold")
    for number in range(300):
        cache.kv.release(cache.computed(prompt_of(number, 1)))
    # 256 wait; whether another one runs depends on when the lane took it.
    jobs, dropped = cache.counted("jobs"), cache.counted("dropped_busy")
    assert jobs in (256, 257)
    assert (dropped, cache.kv.metrics()["copies_refused"]) == (300 - jobs, 300 - jobs)
    assert cache.kv.metrics()["pages_in_flight"] == jobs, "pages of what was refused are free"
    lanes(cache, "copy")
    cache.settled()
    assert (cache.counted("stored_blocks"), cache.kv.block_count().free) == (jobs, 400)
    assert cache.kv.probe_prefix_match_length(prompt_of(299, 1)) == 4, "it is on the device"


def test_a_load_that_the_tier_refuses_is_computed_in_the_same_call() -> None:
    cache = HostCache(PAGES)
    cache.serve(PROMPT)
    cache.kv.truncate_prefix([])
    cache.kv._connector.shutdown()  # type: ignore[union-attr]
    ctx = cache.claimed(PROMPT)
    assert cache.kv.alloc(ctx).is_complete()
    assert (ctx.cached_prefix_length, ctx.active_length) == (0, 13)
    cache.compute(ctx)
    assert cache.holds(ctx)
    cache.kv.release(ctx)
    counted = cache.kv.metrics()
    # The load, a second try in case the first was too long, and the offload of what was computed instead.
    assert counted["copies_refused"] == 3
    assert (counted["copies_failed"], counted["copies_in_flight"], counted["pages_free"]) == (0, 0, PAGES)


def test_blocks_of_lost_memory_are_misses_and_offers_are_dropped() -> None:
    cache = HostCache(PAGES)
    cache.serve(PROMPT)
    cache.kv.truncate_prefix([])
    lose_memory(cache)
    assert cache.serve(PROMPT) == 0
    lost = cache.kv.metrics()
    assert (lost["connector_host_losses"], lost["connector_host_dropped_lost"]) == (1, 3)
    assert (lost["connector_host_blocks"], lost["connector_host_dropped_busy"]) == (0, 0)
    assert (lost["copies_refused"], lost["loaded_blocks"]) == (1, 0)


def test_of_memory_that_comes_back_what_it_still_holds_is_found() -> None:
    cache = HostCache(PAGES)
    cache.serve(PROMPT)  # in units 0, 1 and 2
    cache.kv.truncate_prefix([])
    lose_memory(cache)
    assert cache.kv.analyze_prefix_reuse(PROMPT).host_blocks == 0
    lose_memory(cache, held=[0, 1])
    assert cache.kv.analyze_prefix_reuse(PROMPT).host_blocks == 2
    back = cache.kv.metrics()
    assert (back["connector_host_losses"], back["connector_host_lost_blocks"]) == (1, 1)
    assert (back["connector_host_dropped_lost"], back["connector_host_blocks"]) == (0, 2)
    cache.memory[:] = 0
    assert cache.serve(PROMPT) == 8


def test_a_suspended_request_whose_memory_was_lost_computes_again() -> None:
    cache = HostCache(PAGES)
    ctx = cache.computed(PROMPT, no_store=True)
    cache.suspend(ctx)
    lose_memory(cache)
    lose_memory(cache, held=[])
    transfer = cache.kv.resume(ctx)
    assert cache.settled() == [ctx.request_id]
    with pytest.raises(pk.KVLoadFailed, match="memory of a unit was lost"):
        transfer.result()
    assert (cache.counted("private_units"), cache.kv.metrics()["suspensions_lost"]) == (0, 1)
    cache.forward(ctx)
    assert cache.holds(ctx)


def test_a_shutdown_ends_within_its_bound_whatever_is_in_flight() -> None:
    cache = HostCache(pages=16)
    cache.serve(PROMPT)
    cache.kv.truncate_prefix([])
    away, leaving = (cache.computed(prompt_of(number, 2), no_store=True) for number in (2, 3))
    cache.suspend(away)
    lanes(cache, "hold")
    cache.kv.release(cache.computed(prompt_of(4, 1)))
    loading = cache.claimed(PROMPT)
    transfers = [cache.kv.alloc(loading), cache.kv.resume(away), cache.kv.suspend(leaving)]
    assert all(isinstance(transfer, LoadTransfer) for transfer in transfers)
    ends: list[str] = []

    def wait() -> None:
        try:
            transfers[0].result()
        except pk.KVLoadFailed as error:
            ends.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    begun = time.monotonic()
    cache.kv.shutdown()
    assert 5 <= time.monotonic() - begun < 7, "copies get 5 s"
    waiter.join(10)
    assert ends == ["the transfer was cancelled"]
    assert set(cache.settled()) == {ctx.request_id for ctx in (loading, away, leaving)}
    for ctx in (loading, away, leaving):
        cache.forward(ctx)
        assert cache.holds(ctx)
    cache.kv.release([loading, away, leaving])
    assert cache.kv.block_count().free == 16
    cache.kv.verify()


@pytest.mark.parametrize("moment", range(12))
def test_a_shutdown_may_come_at_any_moment_of_copies_that_run(moment: int) -> None:
    cache = HostCache(pages=400, units=400)
    batch = [cache.computed(prompt_of(number, 40)) for number in range(8)]
    cache.kv.release(batch[:4])
    cache.kv.suspend(batch[4:6])
    time.sleep(moment * 0.0002)
    begun = time.monotonic()
    cache.kv._connector.shutdown(timeout=0.0)  # type: ignore[union-attr, call-arg]
    assert time.monotonic() - begun < 2
    assert set(cache.settled()) <= {ctx.request_id for ctx in batch[4:6]}
    cache.kv.preempt(batch[4:6])
    for ctx in batch[4:6]:
        cache.forward(ctx)
    assert all(cache.holds(ctx) for ctx in batch[4:])
    cache.kv.release(batch[4:])
    assert (cache.kv.block_count().free, cache.counted("jobs"), cache.counted("private_units")) == (400, 0, 0)
