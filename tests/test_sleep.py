"""A cache that sleeps has no memory, and says so; what comes back with it."""

from __future__ import annotations

import gc
import weakref

import pytest

import pagekeeper as pk
from model.engine import manager, store
from model.host import HostCache, memory_of, prompt_of
from pagekeeper.events import Updated


def test_a_sleeping_cache_has_no_memory_and_wakes_up_empty() -> None:
    cache = HostCache()
    cache.kv.release(cache.computed(prompt_of(1, 5)))
    memory = weakref.ref(cache.memory)
    cache.memory = memory_of(8)
    cache.kv.sleep()
    gc.collect()
    assert memory() is None, "nobody refers to it"
    cache.kv.verify()
    assert (cache.kv.block_count().free, cache.kv.metrics()["cached_blocks"]) == (8, 0)
    cache.kv.wake(buffers=[cache.memory])
    reuse = cache.kv.analyze_prefix_reuse(prompt_of(1, 5))
    assert (reuse.device_blocks, reuse.host_blocks) == (0, 5)
    ctx = pk.TextContext(request_id="again", tokens=prompt_of(1, 5))
    cache.kv.claim(ctx)
    cache.kv.alloc(ctx).synchronize(10)
    assert cache.settled() == ["again"]
    assert ctx.processed_length == 20
    assert cache.holds(ctx), "the blocks came to the new memory"


def test_what_is_suspended_outlasts_a_sleep_and_is_shared_afterwards() -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 3))
    cache.kv.suspend(ctx)
    cache.kv.sleep()  # waits for the copy
    with pytest.raises(ValueError, match=r"asleep; wake\(\) it first"):
        cache.kv.resume(ctx)
    cache.memory = memory_of(8)
    cache.kv.wake(buffers=[cache.memory])
    assert cache.kv.poll_transfers() == []
    cache.resume(ctx)
    assert cache.holds(ctx)
    assert cache.kv.analyze_prefix_reuse(prompt_of(1, 3)).device_blocks == 3


def test_a_cache_whose_pages_are_held_does_not_sleep() -> None:
    cache = HostCache()
    ctx = cache.computed(prompt_of(1, 3))
    cache.settled()
    pin = cache.kv.pin(ctx)
    before = cache.kv.fingerprint()
    with pytest.raises(ValueError, match=r"4 pages are held, by requests \(1\), pins \(1\) and copies \(0\)"):
        cache.kv.sleep()
    assert cache.kv.fingerprint() == before
    cache.kv.release(ctx)
    with pytest.raises(ValueError, match=r"3 pages are held, by requests \(0\), pins \(1\)"):
        cache.kv.sleep()
    cache.kv.unpin(pin)
    cache.kv.sleep()
    cache.kv.verify()


def test_copies_planned_for_requests_that_let_go_keep_no_cache_awake() -> None:
    cache = HostCache()
    parent = cache.computed(prompt_of(1, 3))
    child = cache.kv.fork(parent)
    child.update(7)
    cache.kv.alloc(child)  # to write beside its parent it gets a copy
    cache.kv.release([parent, child])
    cache.settled()
    cache.kv.sleep()
    cache.memory = memory_of(8)
    cache.kv.wake(buffers=[cache.memory])
    cache.kv.verify()
    assert cache.kv.take_page_copies().shape == (0, 2)


def test_a_sleeping_cache_says_so() -> None:
    cache = HostCache()
    cache.kv.sleep()
    ctx = pk.TextContext(request_id="a", tokens=[1, 2])
    cache.kv.claim(ctx)
    for call in (cache.kv.alloc, cache.kv.alloc_dummy):
        with pytest.raises(ValueError, match="asleep"):
            call(ctx)
    with pytest.raises(ValueError, match="asleep"):
        cache.kv.pages_view()
    with pytest.raises(ValueError, match="asleep"):
        cache.kv.sleep()
    with pytest.raises(ValueError, match="buffers: missing"):
        cache.kv.wake()
    with pytest.raises(ValueError, match=r"must be \[9, \.\.\.\] of uint8"):
        cache.kv.wake(buffers=[memory_of(7)])
    cache.kv.wake(buffers=[cache.memory])
    with pytest.raises(ValueError, match="awake"):
        cache.kv.wake(buffers=[cache.memory])
    cache.forward(ctx)
    assert cache.holds(ctx)


def test_a_sleep_tells_what_host_memory_has_alone_now() -> None:
    cache = HostCache(event_buffer_max_size=100)
    cache.serve(prompt_of(1, 5))
    cache.kv.get_latest_events()
    cache.kv.sleep()
    cache.kv.wake(buffers=[cache.memory])
    events = cache.kv.get_latest_events()
    assert [event.tier for event in events if isinstance(event, Updated)] == [(0, 1)] * 5
    assert len(events) == 5


def test_one_event_tells_of_a_sleep_without_tiers() -> None:
    kv = manager(event_buffer_max_size=100)
    store(kv, range(20))
    kv.get_latest_events()
    kv.sleep()
    assert [type(event).__name__ for event in kv.get_latest_events()] == ["Cleared"]


def test_a_cache_without_a_pool_only_forgets() -> None:
    kv = manager()
    ctx = pk.TextContext(request_id="a", tokens=list(range(8)))
    kv.claim(ctx)
    kv.alloc(ctx)
    kv.step(ctx)
    kv.release(ctx)
    kv.sleep()
    with pytest.raises(ValueError, match="allocate_pools=False"):
        kv.wake(buffers=[memory_of(8)])
    kv.wake()
    assert kv.probe_prefix_match_length(list(range(9))) == 0
    kv.verify()


def test_a_pool_of_its_own_comes_and_goes() -> None:
    pytest.importorskip("torch")
    kv = manager(allocate_pools=True)
    kv.pages_view()[1] = 3
    kv.sleep()
    kv.wake()
    assert kv.pages_view().sum() == 0


def test_a_connector_that_cannot_let_go_of_the_pool_keeps_the_cache_awake() -> None:
    pytest.importorskip("torch")
    kv = manager(allocate_pools=True, connector=pk.connectors.NullConnector())
    with pytest.raises(ValueError, match="cannot be told"):
        kv.sleep()


def test_a_copy_that_does_not_end_keeps_the_cache_awake() -> None:
    kv = manager()
    ctx = pk.TextContext(request_id="a", tokens=list(range(8)))
    kv.claim(ctx)
    kv.alloc(ctx)
    kv.step(ctx)
    kv._core.start_copy(ctx, 0, 1)
    kv.release(ctx)
    with pytest.raises(TimeoutError, match="1 copies are still in flight"):
        kv.sleep(timeout=0.01)
    kv.verify()


def test_a_request_that_holds_nothing_but_placeholders_goes_on_after_a_sleep() -> None:
    # A token sees itself alone: what was computed is needed no more, and no page is held.
    kv = manager(page_size=1, kind=pk.SlidingWindow(1), max_seq_len=60)
    ctx = pk.TextContext(request_id="a", tokens=[1, 2, 3])
    kv.claim(ctx)
    kv.alloc(ctx)
    kv.step(ctx, counts=0)
    assert kv.get_cache_indices(ctx) == [[0, 0, 0]]
    kv.sleep()
    kv.wake()
    kv.verify()
    for token in (5, 6):
        ctx.update(token)
        kv.alloc(ctx)
        assert (ctx.processed_length, ctx.active_length) == (len(ctx) - 1, 1)
        kv.step(ctx, counts=0)
        kv.verify()
    kv.preempt(ctx)  # then it takes part in the cache again
    kv.alloc(ctx)
    kv.step(ctx, counts=0)
    kv.verify()
    assert kv.probe_prefix_match_length([1, 2, 3, 5, 6, 7]) == 5
    kv.release(ctx)
    assert kv.block_count() == pk.BlockCount(free=8, total=8)
