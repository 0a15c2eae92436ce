"""Requests that load: what they hold while they wait, and what a load never does."""

from typing import Any

import pytest

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled, row, store
from model.memory import PageMemory
from model.tier import Tier

PROMPT = list(range(1, 14))
"""Three full blocks of four, and a token."""


def stored_beyond(pages: int, **options: Any) -> tuple[pk.PagedKVCacheManager, Tier]:
    """A manager whose tier alone has the blocks of the prompt."""
    tier = Tier(PageMemory(pages, 4))
    kv = manager(pages, connector=tier, **options)
    store(kv, PROMPT)
    tier.loads = "late"
    assert kv.truncate_prefix([]) == 3
    return kv, tier


@pytest.mark.parametrize("loads", ["now", "refuse", "fail"])
def test_after_a_load_that_ends_at_once_there_is_room_for_the_forward_and_its_drafts(loads: str) -> None:
    # 13 tokens and 2 x 2 drafts: five pages, but the other request leaves four.
    kv, tier = stored_beyond(pages=8)
    tier.loads = loads
    prefilled(kv, range(100, 113))
    ctx = claimed(kv, PROMPT, num_draft_tokens=2)
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(ctx)
    assert kv.fingerprint() == before


@pytest.mark.parametrize("loads", ["now", "refuse", "fail"])
def test_after_a_load_that_ends_at_once_there_is_room_for_tokens_behind_the_prompt(loads: str) -> None:
    kv, tier = stored_beyond(pages=8)
    tier.loads = loads
    prefilled(kv, range(100, 113))
    ctx = claimed(kv, PROMPT)
    for token in range(50, 54):
        ctx.update(token)
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(ctx)
    assert kv.fingerprint() == before


def test_what_a_request_has_computed_and_not_stored_is_not_loaded() -> None:
    kv, tier = stored_beyond(pages=8)
    tier.loads = "refuse"
    ctx = claimed(kv, PROMPT, no_store=True)
    compute(kv, ctx, num_tokens=8)
    tier.loads = "late"
    transfer = kv.alloc(ctx)
    [load] = tier.in_flight()
    assert load.pages == list(transfer.block_ids)
    assert len(load.pages) == 1
    load.finish()
    assert kv.poll_transfers() == [ctx.request_id]
    assert ctx.processed_length == 12


def test_a_prefetch_plans_no_forward_where_the_tier_has_only_what_was_computed() -> None:
    kv, tier = stored_beyond(pages=8)
    for key in list(tier.kept)[2:]:
        del tier.kept[key]
    tier.loads = "refuse"
    ctx = claimed(kv, PROMPT, no_store=True)
    compute(kv, ctx, num_tokens=8)
    tier.loads = "late"
    before = kv.fingerprint()
    assert kv.prefetch(ctx).is_complete()
    assert kv.fingerprint() == before


def test_a_fork_of_a_request_that_waits_has_nothing_from_the_cache() -> None:
    kv, _ = stored_beyond(pages=8)
    ctx = claimed(kv, PROMPT)
    kv.alloc(ctx)
    child = kv.fork(ctx)
    assert (ctx.cached_prefix_length, child.cached_prefix_length) == (12, 0)


def test_a_load_that_lands_after_a_reset_marks_no_block_of_others_as_reused() -> None:
    kv, tier = stored_beyond(pages=12, eviction_policy="priority_slru")
    tier.loads = "refuse"
    store(kv, PROMPT[:5])
    tier.loads = "late"
    waiting = claimed(kv, PROMPT)
    kv.alloc(waiting)
    assert len(tier.in_flight()[0].pages) == 2  # behind a hit
    kv.reset_prefix_cache()
    [first] = store(kv, range(100, 104))
    others = [store(kv, range(start, start + 4))[0] for start in (200, 300)]
    tier.in_flight()[0].finish()
    kv.poll_transfers()
    kv.release(waiting)
    taken = row(kv, prefilled(kv, range(400, 437)))
    assert len(taken) == 10
    assert first in taken
    assert not {*others} <= {*taken}
