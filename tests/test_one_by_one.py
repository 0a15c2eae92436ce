"""Requests one after the other: the manager finds, evicts and keeps what a model in dictionaries does.

The requests are those of a real conversation trace, all of them. `--long` cuts it into smaller pages.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.cache import Cache, Served
from model.engine import manager
from model.visits import NAMED, Names, Visit, conversation

POOLS = (160_000, 1_000_000, 6_000_000)
"""Tokens; the longest request has 126,527."""


@dataclass
class Pair:
    """A manager, and the model of it."""

    policy: pk.EvictionPolicy
    kv: Any
    model: Cache

    def serve(self, visit: Visit, tokens: Any) -> None:
        """The model and the manager find the same hits, and take and hold the same pages.

        A page that is taken is the victim if it stood for a block. So equal pages at every request are
        equal victims in equal order.
        """
        expected = self.model.serve(visit.names, visit.prompt, visit.output)
        assert self.serve_for_real(tokens, visit.prompt) == expected, (
            f"{self.policy}, {self.kv.total_num_pages} pages"
        )

    def serve_for_real(self, tokens: Any, prompt: int) -> Served:
        """The prompt in one forward, all of the output in a second, as accepted drafts would be."""
        ctx = pk.TextContext("one", tokens[:prompt])
        output = tokens[prompt:]
        self.kv.claim(ctx)
        self.kv.alloc(ctx)
        hits = ctx.cached_prefix_length // self.kv.params.page_size
        taken = self.row(ctx)[hits:]
        self.kv.step(ctx, output, len(output))
        if len(output):
            held = len(self.row(ctx))
            self.kv.alloc(ctx)
            taken += self.row(ctx)[held:]
            self.kv.step(ctx, (), 0)
        row = self.row(ctx)
        self.kv.release(ctx)
        return Served(hits, taken, row)

    def row(self, ctx: Any) -> list[int]:
        pages: list[int] = self.kv.get_cache_indices(ctx)[0]
        return pages


def pairs(page_size: int, pools: Iterable[int]) -> list[Pair]:
    """Every policy at every number of pages."""
    return [
        Pair(policy, manager(pages, page_size, eviction_policy=policy), Cache(page_size, pages, policy))
        for policy, pages in product(pk.EvictionPolicy, pools)
    ]


@pytest.mark.timeout(1200)
def test_the_whole_conversation_trace_is_served_as_the_model_serves_it(
    shared_dir: Path, long_run: bool
) -> None:
    page_size = 128 if long_run else NAMED
    names = Names()
    requests = list(conversation(shared_dir, names, page_size))
    assert len(requests) == 12_031
    last_use = dict[int, int]()
    caches = pairs(page_size, [size // page_size for size in POOLS])
    for number, visit in enumerate(requests):
        tokens = visit.tokens()
        for pair in caches:
            pair.serve(visit, tokens)
        last_use |= dict.fromkeys(visit.names, number)
    for pair in caches:
        counted = pair.kv.metrics()
        assert counted["evictions"] == pair.model.evictions > 0
        assert counted["cached_blocks"] == len(pair.model.stored)
        stored = set(pair.model.stored)
        for leaf in stored - {names.parents[name] for name in stored}:
            visit = requests[last_use[leaf]]
            length = (visit.names.index(leaf) + 1) * page_size
            assert pair.kv.probe_prefix_match_length(np.append(visit.tokens()[:length], 0)) == length
        pair.kv.verify()


def test_short_prompts_that_come_back_whole_are_served_as_the_model_serves_them(first_seed: int) -> None:
    """A prompt that is cached to its last token has its last block computed twice."""
    chosen, names = random.Random(first_seed), Names()
    caches = pairs(4, [9, 13, 40])
    for number in range(3_000):
        prompt, output = chosen.randint(1, 24), chosen.choice([0, 0, 1, 9])
        ids = [chosen.randrange(3) for _ in range(-(-prompt // 4))]
        visit = names.visit(number, ids, 4, prompt, output, 4)
        for pair in caches:
            pair.serve(visit, visit.tokens())
            pair.kv.verify()
    for pair in caches:
        assert pair.kv.metrics()["adopted_blocks"] > 100
