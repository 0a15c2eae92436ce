"""What a connector is asked and told, and what the manager says of it."""

import logging
from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager
from model.memory import PageMemory
from model.tier import Tier
from model.tiered import PROMPT, Cache, in_tier
from pagekeeper.connectors import NullConnector


def test_the_tier_hears_which_prefix_was_used_on_the_device() -> None:
    cache = Cache()
    cache.serve(PROMPT)
    cache.serve(PROMPT)
    assert [[key.hash for key in keys] for keys in cache.tier.touched] == [pk.hash_blocks(PROMPT, 4)]


@pytest.mark.parametrize("loads", ["late", "now", "refuse"])
def test_the_tier_hears_of_a_prefix_from_its_first_block_on_when_it_is_asked_for_the_rest(loads: str) -> None:
    cache = in_tier()
    cache.tier.loads = "refuse"
    cache.serve(PROMPT[:5])  # the first block is on the device again
    cache.tier.loads = loads
    cache.tier.touched.clear()
    cache.kv.alloc(claimed(cache.kv, PROMPT))
    heard = [[key.hash for key in keys] for keys in cache.tier.touched]
    assert heard == [pk.hash_blocks(PROMPT, 4)]


def test_the_tier_gets_the_requests_hint() -> None:
    cache = Cache()
    ctx = claimed(cache.kv, PROMPT, dkv_cache_hint="peer 7")
    cache.kv.alloc(ctx)
    assert ctx.dkv_cache_hint == cache.tier.hints[-1] == "peer 7"


def test_transfers_posted_are_ordered_around_the_forward() -> None:
    cache = Cache()
    ctx = claimed(cache.kv, PROMPT)
    cache.kv.alloc(ctx)
    cache.kv.runtime_inputs([[ctx]])
    assert cache.tier.calls == ["wait_for_loads"]
    cache.forward(ctx)
    assert cache.tier.calls == ["wait_for_loads", "wait_for_offloads"]


def test_analysis_counts_each_tier_and_probes_count_them_together() -> None:
    cache = in_tier(loads="refuse")
    cache.serve(PROMPT[:5])
    summary = cache.kv.analyze_prefix_reuse([*PROMPT, 14, 15, 16])
    assert (summary.device_blocks, summary.host_blocks, summary.disk_blocks) == (1, 2, 0)
    assert summary.reusable_blocks_all == 3
    assert summary.first_new_block == pk.hash_blocks([*PROMPT, 14, 15, 16], 4)[3]
    assert hit(cache.kv, PROMPT) == 12
    assert hit(cache.kv, PROMPT[:12]) == 8, "the last token is computed"


def test_a_connector_that_raises_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    cache = in_tier(loads="raise")
    with caplog.at_level(logging.ERROR, "pagekeeper"):
        cache.serve(PROMPT)
    assert "load raised" in caplog.text
    assert cache.kv.metrics()["connector_errors"] == 1


def test_a_connector_is_checked_when_the_manager_is_made() -> None:
    bad: Any = object()
    with pytest.raises(TypeError, match="connector"):
        manager(connector=bad)
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        manager(connector=Tier(PageMemory(8, 4)), enable_prefix_caching=False)


def test_bytes_metrics_and_shutdown_are_the_connectors() -> None:
    cache = Cache()
    assert cache.kv.host_byte_count() == pk.ByteCount(7, 10)
    assert cache.kv.disk_byte_count() == pk.ByteCount(0, 0)
    assert cache.kv.metrics()["connector_kept"] == 0
    cache.kv.shutdown()
    assert cache.tier.calls == ["shutdown"]
    assert manager().host_byte_count() == pk.ByteCount(0, 0)


def test_the_pool_is_there_while_the_connector_ends_its_copies() -> None:
    pytest.importorskip("torch")
    seen: list[bool] = []

    class Raw(NullConnector):
        def shutdown(self) -> None:
            seen.append(kv.pages_view().shape[0] == 9)
            raise OSError("the disk is gone")

    kv = manager(connector=Raw(), allocate_pools=True)
    with pytest.raises(OSError, match="gone"):
        kv.shutdown()
    assert seen == [True]
    with pytest.raises(ValueError, match="no pool"):
        kv.pages_view()


def test_after_a_shutdown_the_connector_is_asked_nothing() -> None:
    cache = in_tier()
    waiting = claimed(cache.kv, PROMPT)
    cache.kv.alloc(waiting)
    cache.kv.shutdown()
    asked = len(cache.tier.hints), len(cache.tier.copies), list(cache.tier.calls)
    ctx = claimed(cache.kv, PROMPT)
    assert cache.kv.alloc(ctx).is_complete()
    cache.kv.runtime_inputs([[ctx]])
    cache.forward(ctx)
    assert hit(cache.kv, PROMPT) == 12
    assert (len(cache.tier.hints), len(cache.tier.copies), cache.tier.calls) == asked
    cache.tier.in_flight()[0].fail()
    assert cache.kv.poll_transfers() == [waiting.request_id], "copies in flight still end"


def test_the_null_connector_finds_and_keeps_nothing() -> None:
    kv = manager(connector=NullConnector())
    ctx = claimed(kv, PROMPT)
    compute(kv, ctx)
    kv.release(ctx)
    assert free(kv) == 8
    assert hit(kv, PROMPT) == 12


def test_the_example_connector_serves_what_the_device_lost(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    import host_memory

    host_memory.main()
    assert capsys.readouterr().out.splitlines()[-1] == "512 tokens came from host memory"


def test_the_example_connector_refuses_another_block_under_the_same_hash() -> None:
    pytest.importorskip("torch")
    import torch

    from host_memory import HostMemory

    pool = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    tier = HostMemory(lambda: pool, blocks=2)
    tier.offload([1], [pk.BlockKey(b"h" * 8, b"g" * 16)])
    assert tier.lookup([pk.BlockKey(b"h" * 8, b"x" * 16)]) == [False]
    assert tier.metrics()["guard_mismatches"] == 1
    with pytest.raises(pk.KVLoadRefused):
        tier.load([2], [pk.BlockKey(b"h" * 8, b"x" * 16)])
    assert pool[2].tolist() == [8, 9, 10, 11]
