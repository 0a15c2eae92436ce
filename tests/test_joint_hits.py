"""A new prompt's hit is the longest prefix that every group can go on from (TREE-6, TREE-7).

Which blocks a group needs is asked of its mask, token by token; which are there, of the reference model, that
agrees with the manager up to that moment.
"""

import numpy as np
import pytest

import pagekeeper as pk
from model.driver import Session
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
    for seed in range(first_seed + part, first_seed + (12_000 if long_run else 400), PARTS):
        session = Session(seed, several=True)
        if len(session.groups) < 2 or not session.model.caching:
            continue
        session.play(calls=16)
        for _ in range(PROMPTS):
            tokens = session.prompt()
            known, expected = prefixes(session, tokens)
            where = f"seed {seed}, {session.groups}, {tokens}"
            found = session.kv.probe_prefix_match_length(tokens)
            assert found == expected * session.page_size, where
            narrowed += 0 < expected < known
        start = modelled(session, tokens)
        assert taken(session, tokens) == start, where
        assert start is None or start // session.page_size == expected, where
    assert narrowed > 4, "groups that lack blocks of others were hardly met"


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
