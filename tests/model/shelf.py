"""Small caches whose blocks have priorities, and what can be seen of these."""

from typing import Any

import pagekeeper as pk
from model.engine import hit, manager, store
from pagekeeper.events import Event, Stored, block_key

PROMPT = list(range(10, 30))
"""Twenty tokens: five blocks."""
A, B, C = list(range(100, 104)), list(range(200, 204)), list(range(300, 304))
"""A block each."""

MADE: list[pk.PagedKVCacheManager] = []
"""Caches of the test that runs."""


def cache(pages: int = 16, **options: Any) -> pk.PagedKVCacheManager:
    kv = manager(pages, event_buffer_max_size=100, **options)
    kv.begin_step(now=0.0)
    MADE.append(kv)
    return kv


def kept(*ranges: pk.TokenRangeRetention, **decode: Any) -> pk.RetentionConfig:
    return pk.RetentionConfig(ranges, **decode)


def whole(priority: Any, **limit: Any) -> pk.RetentionConfig:
    """This priority for all of a prompt."""
    return kept(pk.TokenRangeRetention(0, priority=priority, **limit))


def hashes(tokens: list[int], **options: Any) -> tuple[int, ...]:
    return tuple(map(block_key, pk.hash_blocks(tokens, 4, **options)))


def priorities(kv: pk.PagedKVCacheManager, tokens: list[int]) -> list[int | None]:
    """The priority of each full block of the prompt; None for one that is not cached."""
    stored = [event for event in kv.event_snapshot().events if isinstance(event, Stored)]
    of = {key: event.priority for event in stored for key in event.hashes}
    return [of.get(key) for key in hashes(tokens)]


def news(kv: pk.PagedKVCacheManager) -> list[Event]:
    """Events since the last call."""
    return kv.get_latest_events()


def cached(kv: pk.PagedKVCacheManager, *prompts: list[int]) -> list[bool]:
    """Which of these prompts of one block are cached."""
    return [hit(kv, [*prompt, 0]) == 4 for prompt in prompts]


def evict(kv: pk.PagedKVCacheManager, pages: int = 1) -> None:
    """Takes pages, which stand for nothing afterwards."""
    store(kv, range(1000, 1000 + 4 * pages), no_store=True)
