"""A new prompt's hit is the longest prefix that every group can go on from (TREE-6, TREE-7).

Which blocks a group needs is asked of its mask, token by token; which are there, of the reference model, that
agrees with the manager up to that moment. With tiers a block is there if the device or its group's tier has.
"""

from collections import Counter

import numpy as np
import pytest

import pagekeeper as pk
from model.driver import Session
from model.live import Live
from model.requests import NoRoom
from model.windows import is_usable

PARTS = 8
PROMPTS = 12


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_new_prompt_finds_the_longest_prefix_that_every_group_can_use(
    part: int, first_seed: int, long_run: bool
) -> None:
    narrowed = 0
    for seed in range(first_seed + part, first_seed + (12_000 if long_run else 560), PARTS):
        session = Session(seed, several=True)
        if len(session.groups) < 2 or not session.model.caching:
            continue
        session.play(calls=16)
        if session.tier is not None:
            session.tier.loads = "late"  # and not blind
        for _ in range(PROMPTS):
            tokens = session.prompt()
            known, expected = prefixes(session, tokens)
            narrowed += 0 < expected < known
            if session.tier is not None:
                expected = from_everywhere(session, tokens)
            where = f"seed {seed}, {session.groups}, {tokens}"
            found = session.kv.probe_prefix_match_length(tokens)
            assert found == expected * session.page_size, where
        if session.tier is not None:
            continue
        start = modelled(session, tokens)
        assert taken(session, tokens) == start, where
        assert start is None or start // session.page_size == expected, where
    assert narrowed > 4, "groups that lack blocks of others were hardly met"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_new_prompt_finds_the_longest_prefix_that_device_and_tiers_have_together(
    part: int, first_seed: int, long_run: bool
) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first_seed + part, first_seed + (30_000 if long_run else 400), PARTS):
        session = Session(seed, several=True)
        if session.tier is None:
            continue
        session.play(calls=16)
        session.release_all()
        session.tier.loads, session.tier.offloads = "late", "now"
        for _ in range(4):
            tokens = session.prompt()
            if session.random.random() < 0.5:
                session.forget()
            device, together = prefixes(session, tokens)[1], from_everywhere(session, tokens)
            one = claimed(session, tokens)
            session.alloc()
            request = session.request(one) if one in session.live else None
            where = f"seed {seed}, {session.groups}, {tokens}"
            if request is not None and request.load is not None:
                assert one.ctx.cached_prefix_length == together * session.page_size > 0, where
                happened["loads"] += 1
                happened["bridges"] += any(map(any, session.model.on_device(request, device, together)))
                happened["narrowed"] += together < (len(tokens) - 1) // session.page_size
            elif request is not None and request.live:
                assert one.ctx.cached_prefix_length // session.page_size == device, where
                # What could never fit beside what the request holds then is not loaded.
                happened["too large" if together > device else "on the device"] += 1
            for call in (session.end_all, session.compare, session.alloc, session.step, session.release_all):
                call()
    assert {"loads", "bridges", "narrowed", "on the device"} <= happened.keys(), happened
    # How many, the reference model says of each call; here that they are few.
    assert happened["too large"] < (happened["loads"] + happened["on the device"]) / 10, happened


def claimed(session: Session, tokens: list[int]) -> Live:
    """The only request of a session."""
    ctx = pk.TextContext(pk.RequestID(), np.array(tokens), 1000)
    session.note(f"claim {tokens}")
    session.kv.claim(ctx)
    session.model.claim(ctx.request_id, tokens, 0)
    session.live = [Live(ctx, 0, None, tokens)]
    return session.live[0]


def from_everywhere(session: Session, tokens: list[int]) -> int:
    """Blocks of the longest prefix of which every group has what it needs, on the device or in its tier."""
    size, model = session.page_size, session.model
    assert model.tier is not None
    contents = [(0, tuple(tokens[:end])) for end in range(size, len(tokens), size)]
    there = [
        {b for b, content in enumerate(contents) if content in pool.tree or (group, content) in model.tier}
        for group, pool in enumerate(model.pools)
    ]
    pairs = list(zip(model.pools, there, strict=True))
    lengths = range(len(contents) + 1)
    return max(
        blocks for blocks in lengths if all(is_usable(pool.kind, has, blocks, size) for pool, has in pairs)
    )


def prefixes(session: Session, tokens: list[int]) -> tuple[int, int]:
    """Blocks of the longest prefix that is known at all, and of the longest that every group can use."""
    size, model = session.page_size, session.model
    contents = [(0, tuple(tokens[:end])) for end in range(size, len(tokens), size)]
    known = [content for content in contents if model.is_remembered(content)]
    present = [{block for block, content in enumerate(known) if content in pool.tree} for pool in model.pools]
    groups = list(zip(model.pools, present, strict=True))
    usable = [
        blocks
        for blocks in range(len(known) + 1)
        if all(is_usable(pool.kind, there, blocks, size) for pool, there in groups)
    ]
    return len(known), max(usable)


def modelled(session: Session, tokens: list[int]) -> int | None:
    """Tokens that the model goes on from: of the block behind the prefix perhaps some too."""
    session.model.claim("new", tokens, 0)
    try:
        session.model.alloc(["new"], [1])
    except NoRoom:
        return None
    return session.model.requests["new"].cached


def taken(session: Session, tokens: list[int]) -> int | None:
    """Tokens that a new request goes on from; None where there is no room for it."""
    ctx = pk.TextContext(pk.RequestID(), np.array(tokens), 1000)
    session.kv.claim(ctx)
    try:
        session.kv.alloc(ctx, num_tokens=1)
    except pk.InsufficientBlocksError:
        return None
    return ctx.cached_prefix_length
