"""Events of blocks that move between device, host memory and disk, of one group and of two (EVT-1, EVT-3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pagekeeper as pk
from model.host import HostCache, prompt_of
from model.on_disk import opened, reopened
from model.two_groups import Hybrid, prompt
from pagekeeper.events import BlockIndex, Cleared, Created, Event, Removed, Stored, Updated, block_key

DEVICE, HOST, DISK = 0, 1, 2
FULL, WINDOW = 0, 1
"""The groups of `Hybrid`."""


def host_cache(pages: int = 8, units: int = 16, **options: Any) -> HostCache:
    return HostCache(pages, units, event_buffer_max_size=1000, **options)


def keys(kv: pk.PagedKVCacheManager, tokens: list[int]) -> tuple[int, ...]:
    """The hashes of a prompt's full blocks of 4 tokens, as events have them."""
    hashes = pk.hash_blocks(tokens, 4, algo=kv.params.kv_hash_algo, seed=kv.hash_seed)
    return tuple(map(block_key, hashes))


def moves(events: list[Event]) -> list[tuple[int, int, tuple[int, int]]]:
    """Group, hash, and from where to where."""
    assert all(isinstance(event, Updated) for event in events), events
    told = (event for event in events if isinstance(event, Updated))
    return [(event.group, event.block_hash, event.tier) for event in told if event.tier]


class Router:
    """An index that knows of a cache by events alone, and checks them against what is there."""

    def __init__(self, kv: pk.PagedKVCacheManager) -> None:
        self.kv, self.index = kv, BlockIndex()

    def hear(self) -> list[Event]:
        """What was told since the last time. A new index has the same blocks on the same tiers."""
        self.kv.verify()
        events = self.kv.get_latest_events()
        if not self.index.apply(events):
            self.index.apply_snapshot(self.kv.event_snapshot())
        late = BlockIndex()
        late.apply_snapshot(self.kv.event_snapshot())
        for group in (FULL, WINDOW):
            for tier in (DEVICE, HOST, DISK):
                assert late.hashes(group, tier) == self.index.hashes(group, tier)
        return events


# One group


def test_the_first_event_tells_the_size_of_every_tier() -> None:
    cache = host_cache(8, 16, disk={"disk_offload_max_gb": 2**20 / 2**30})
    [created] = cache.kv.get_latest_events()
    assert isinstance(created, Created)
    assert created.pages == (8, 16, cache.kv.metrics()["connector_disk_units"])
    cache.kv.shutdown()


def test_a_copy_in_host_memory_is_told_of_when_the_device_loses_the_block() -> None:
    cache = host_cache()
    router, tokens = Router(cache.kv), prompt_of(1, 3)
    cache.serve(tokens)
    first, second, third = keys(cache.kv, tokens)
    _, stored = router.hear()
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.tier) == ((first, second, third), DEVICE)
    cache.kv.truncate_prefix(tokens[:4])
    assert moves(router.hear()) == [(0, third, (DEVICE, HOST)), (0, second, (DEVICE, HOST))]
    assert router.index.match_length([first, second, third], tier=DEVICE) == 1
    assert router.index.match_length([first, second, third]) == 3
    cache.serve(tokens)  # loads them
    assert moves(router.hear()) == [(0, second, (HOST, DEVICE)), (0, third, (HOST, DEVICE))]
    cache.kv.shutdown()


def test_a_block_is_removed_when_its_last_copy_is_gone() -> None:
    cache = host_cache(8, 4)
    router, tokens, other = Router(cache.kv), prompt_of(1, 3), prompt_of(2, 3)
    cache.serve(tokens)
    cache.kv.truncate_prefix([])
    router.hear()
    cache.serve(other)  # one unit is free, two are taken from the tail of the first prompt
    first, second, third = keys(cache.kv, tokens)
    events = router.hear()
    assert [type(event) for event in events] == [Stored, Removed]
    assert [event.hashes for event in events if isinstance(event, Removed)] == [(third, second)]
    assert router.index.hashes(0, HOST) == {first}
    assert router.index.hashes(0, DEVICE) == set(keys(cache.kv, other))
    cache.kv.shutdown()


def test_a_block_that_host_memory_loses_is_told_to_be_on_disk() -> None:
    cache = host_cache(8, 4, disk={"disk_offload_max_gb": 2**20 / 2**30})
    router, tokens = Router(cache.kv), prompt_of(1, 2)
    cache.serve(tokens)
    assert cache.kv.flush()
    cache.kv.truncate_prefix([])
    router.hear()
    for number in (2, 3):
        cache.serve(prompt_of(number, 2))
        assert cache.kv.flush()
    first, second = keys(cache.kv, tokens)
    told = [event for event in router.hear() if isinstance(event, Updated)]
    assert moves([*told]) == [(0, second, (HOST, DISK)), (0, first, (HOST, DISK))]
    cache.serve(tokens)  # from disk to host memory to the device
    assert {first, second} <= router.index.hashes(0, DISK)
    told = [event for event in router.hear() if isinstance(event, Updated) and event.block_hash == first]
    assert moves([*told]) == [(0, first, (DISK, HOST)), (0, first, (HOST, DEVICE))]
    assert {first, second} <= router.index.hashes(0, DEVICE)
    cache.kv.shutdown()


def test_a_block_that_is_computed_again_comes_back_with_its_new_priority() -> None:
    cache = host_cache()
    router, tokens = Router(cache.kv), prompt_of(1, 1)
    cache.serve(tokens)
    cache.kv.truncate_prefix([])
    router.hear()
    retention = pk.RetentionConfig([pk.TokenRangeRetention(0, priority=80)])
    cache.serve(tokens, retention=retention)
    [key] = keys(cache.kv, tokens)
    events = [event for event in router.hear() if isinstance(event, Updated)]
    assert [(event.block_hash, event.tier, event.priority) for event in events] == [
        (key, (HOST, DEVICE), None),
        (key, None, (35, 80)),
    ]
    cache.kv.shutdown()


def one_in_the_tier_and_one_on_the_device() -> tuple[HostCache, Router]:
    """Prompt 1 is in the host alone, prompt 2 on the device too; the router knows."""
    cache = host_cache()
    router = Router(cache.kv)
    cache.serve(prompt_of(1, 3))
    cache.kv.truncate_prefix([])
    cache.serve(prompt_of(2, 3))
    router.hear()
    return cache, router


def test_a_reset_clears_every_tier_at_once() -> None:
    cache, router = one_in_the_tier_and_one_on_the_device()
    cache.kv.reset_prefix_cache()
    assert [type(event) for event in router.hear()] == [Cleared]
    assert len(router.index) == 0
    cache.kv.shutdown()


def test_a_cache_that_sleeps_has_what_its_tiers_have() -> None:
    cache = host_cache(8, 2)
    router, tokens = Router(cache.kv), prompt_of(1, 3)
    cache.serve(tokens)
    router.hear()
    cache.kv.sleep()
    first, second, third = keys(cache.kv, tokens)
    assert [event.hashes for event in router.hear() if isinstance(event, Removed)] == [(third,)]
    assert router.index.hashes(0, HOST) == router.index.hashes() == {first, second}
    cache.kv.shutdown()


def test_without_its_tiers_a_cache_has_what_the_device_has() -> None:
    cache, router = one_in_the_tier_and_one_on_the_device()
    cache.kv.shutdown()
    [removed] = router.hear()
    assert isinstance(removed, Removed)
    assert set(removed.hashes) == set(keys(cache.kv, prompt_of(1, 3)))
    assert router.index.hashes() == router.index.hashes(0, DEVICE) == set(keys(cache.kv, prompt_of(2, 3)))


# After a restart


def test_a_store_that_is_opened_again_announces_its_blocks(tmp_path: Path) -> None:
    cache = opened(tmp_path, event_buffer_max_size=1000)
    trunk = prompt_of(1, 3)
    cache.serve(trunk, lora_id="rhyme", mm_items=[(bytes(32), 5, 2)])
    cache.serve([*trunk[:8], *prompt_of(2, 1)], lora_id="rhyme", mm_items=[(bytes(32), 5, 2)])
    before = [event for event in cache.kv.event_snapshot().events if isinstance(event, Stored)]
    cache = reopened(cache, tmp_path, event_buffer_max_size=1000)
    router = Router(cache.kv)
    created, *stored = router.hear()
    assert isinstance(created, Created)
    assert all(isinstance(event, Stored) and event.tier == DISK for event in stored)

    def blocks(events: list[Any]) -> dict[int, tuple[Any, ...]]:
        """What is told of each block."""
        told = {}
        for event in events:
            parents = [event.parent_hash, *event.hashes]
            extra = dict(event.extra_keys)
            for place, key in enumerate(event.hashes):
                tokens = event.token_ids[4 * place : 4 * place + 4].tolist()
                where = event.first_block + place
                told[key] = parents[place], where, tokens, extra.get(place), event.priority, event.lora_id
        return told

    assert blocks(stored) == blocks(before)
    assert len(blocks(stored)) == 4
    assert [event.first_block for event in stored if isinstance(event, Stored)] == [0, 2]
    cache.kv.shutdown()


def test_a_router_that_missed_the_announcement_takes_a_snapshot(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    for number in (1, 2, 3):
        cache.serve(prompt_of(number, 2))
    cache = reopened(cache, tmp_path, event_buffer_max_size=2)
    router = Router(cache.kv)
    # One event tells of the making, and one of each prompt.
    assert [event.id for event in router.hear()] == [2, 3]
    assert len(router.index.hashes(0, DISK)) == 6
    cache.serve(prompt_of(2, 2))
    router.hear()
    assert router.index.hashes(0, DEVICE) == set(keys(cache.kv, prompt_of(2, 2)))
    cache.kv.shutdown()


def test_blocks_whose_content_the_store_has_no_room_for_are_announced_without(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    items = [(bytes([item] * 32), item, 1) for item in range(4)]  # 56 bytes each
    cache.serve(prompt_of(1, 1), mm_items=items)
    cache = reopened(cache, tmp_path, event_buffer_max_size=10)
    _, stored = cache.kv.get_latest_events()
    assert isinstance(stored, Stored)
    assert (len(stored.hashes), len(stored.token_ids), stored.page_size) == (1, 0, 0)
    cache.kv.shutdown()


# Two groups


@pytest.fixture
def hybrid() -> Iterator[Hybrid]:
    cache = Hybrid(event_buffer_max_size=1000)
    yield cache
    cache.kv.shutdown()


def test_each_group_tells_how_its_own_blocks_move(hybrid: Hybrid) -> None:
    router, tokens = Router(hybrid.kv), prompt(100, 4)
    hybrid.serve(tokens)
    chain = keys(hybrid.kv, tokens)
    router.hear()
    hybrid.forget()
    there = moves(router.hear())
    assert sorted(there) == sorted((group, key, (DEVICE, HOST)) for group in (FULL, WINDOW) for key in chain)
    assert hybrid.serve(tokens) == 16
    # The window of 6 tokens needs the last two blocks.
    needed = [(FULL, key) for key in chain] + [(WINDOW, key) for key in chain[2:]]
    back = [(group, key, (HOST, DEVICE)) for group, key in needed]
    assert sorted(moves(router.hear())) == sorted(back)
    assert router.index.match_length(chain, tier=DEVICE) == 4
    assert router.index.match_length(chain[:2], tier=DEVICE) == 0
    assert router.index.match_length(chain[:2]) == 2


def test_the_groups_of_a_store_announce_their_blocks(tmp_path: Path) -> None:
    config = {"disk_offload_dir": str(tmp_path), "disk_offload_max_gb": 0.01}
    cache = Hybrid(model_name="m", config=config)
    tokens = prompt(100, 4)
    cache.serve(tokens)
    assert cache.kv.flush(10.0)
    cache.kv.shutdown()
    cache = Hybrid(model_name="m", config=config, event_buffer_max_size=1000)
    router = Router(cache.kv)
    events = router.hear()
    assert [type(event) for event in events] == [Created, Created, Stored, Stored]
    assert [event.group for event in events] == [FULL, WINDOW, FULL, WINDOW]
    assert all(len(event.pages) == 3 for event in events if isinstance(event, Created))
    chain = keys(cache.kv, tokens)
    assert router.index.hashes(FULL, DISK) == router.index.hashes(WINDOW, DISK) == set(chain)
    assert router.index.match_length(chain) == 4
    cache.kv.shutdown()
