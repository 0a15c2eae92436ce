"""What is counted of reuse, against hand counts, and what a tier that gives nothing changes: nothing.

Pages have 4 tokens.
"""

import random

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled, row
from model.memory import PageMemory
from model.tier import Tier
from model.tiered import Cache
from pagekeeper.connectors import NullConnector

PROMPT = list(range(10, 30))
COUNTED = (
    "context_blocks",
    "reused_blocks",
    "reused_tokens",
    "missed_never_stored",
    "missed_evicted",
    "pages_allocated",
    "pages_allocated_new",
)


def counts(kv: pk.PagedKVCacheManager) -> dict[str, int]:
    counted = kv.metrics()
    return {name: counted[name] for name in COUNTED}


def test_requests_reuse_and_miss_what_a_hand_count_says() -> None:
    kv = manager(pages=4)
    kv.release(prefilled(kv, PROMPT[:8]))
    # Two blocks, of which none is there. That of the last token is always computed, and so not missed.
    assert counts(kv) == {
        "context_blocks": 2,
        "reused_blocks": 0,
        "reused_tokens": 0,
        "missed_never_stored": 1,
        "missed_evicted": 0,
        "pages_allocated": 2,
        "pages_allocated_new": 2,
    }
    ctx = claimed(kv, [*PROMPT[:8], 1, 2, 3, 4, 5])
    compute(kv, ctx, new_tokens=[6])
    compute(kv, ctx)  # generated tokens are no context
    # Four blocks, of which two are there.
    assert counts(kv) == {
        "context_blocks": 6,
        "reused_blocks": 2,
        "reused_tokens": 8,
        "missed_never_stored": 2,
        "missed_evicted": 0,
        "pages_allocated": 4,
        "pages_allocated_new": 4,
    }
    kv.release(ctx)
    kv.release(prefilled(kv, range(50, 66)))  # takes every page
    kv.release(prefilled(kv, [*PROMPT[:8], 1]))
    # Four blocks, of which three may be missed; then three, of which two were there before.
    assert counts(kv) == {
        "context_blocks": 13,
        "reused_blocks": 2,
        "reused_tokens": 8,
        "missed_never_stored": 5,
        "missed_evicted": 2,
        "pages_allocated": 11,
        "pages_allocated_new": 4,
    }


# A connector that has nothing, or little


@pytest.mark.parametrize("connector", ["none", "null", "one that declines"])
def test_a_request_takes_the_same_pages_whether_a_connector_that_gives_nothing_is_there_or_not(
    connector: str,
) -> None:
    def rows(given: pk.KVConnector | None) -> list[list[int]]:
        kv, draw, seen = manager(12, connector=given), random.Random(5), []
        for _ in range(60):
            ctx = claimed(kv, [*range(draw.randrange(0, 20, 4)), *(draw.randrange(90, 93) for _ in range(9))])
            for token in range(draw.randint(1, 6)):
                kv.alloc(ctx)
                kv.take_page_copies()
                kv.step(ctx, new_tokens=[token])
                kv.poll_transfers()
                seen.append(row(kv, ctx))
            kv.release(ctx)
        assert kv.metrics()["reused_blocks"] > 0
        return seen

    memory = PageMemory(12, 4)
    chosen: dict[str, pk.KVConnector | None] = {
        "none": None,
        "null": NullConnector(),
        "one that declines": Tier(memory, loads="refuse", offloads="refuse"),
    }
    assert rows(chosen[connector]) == rows(None)


def test_a_decode_takes_its_next_page_at_the_border_with_a_connector_that_has_nothing() -> None:
    cache = Cache(offloads="refuse")
    ctx = claimed(cache.kv, PROMPT[:4])
    held = []
    for token in range(3):
        cache.run(ctx)
        held.append(len(row(cache.kv, ctx)))
        ctx.update(token)
    assert held == [1, 2, 2]


def test_a_prompt_of_which_the_tier_has_four_tokens_takes_all_its_pages_and_begins_behind_them() -> None:
    cache = Cache()
    cache.serve(PROMPT[:5])
    cache.forget_device()
    ctx = claimed(cache.kv, PROMPT[:15])
    cache.kv.alloc(ctx)
    assert cache.kv.block_count().used == 4  # 15 tokens: one page to load to, and three for the rest
    (load,) = cache.tier.in_flight()
    assert len(load.pages) == 1
    load.finish()
    cache.kv.poll_transfers()
    assert (ctx.cached_prefix_length, ctx.processed_length) == (4, 4)
    cache.run(ctx)
    assert (ctx.processed_length, len(row(cache.kv, ctx))) == (15, 4)
