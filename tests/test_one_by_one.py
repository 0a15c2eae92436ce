"""Requests one after the other: the manager finds, evicts and keeps what a model in dictionaries does.

The requests are those of a real conversation trace, all of them. `--long` cuts it into smaller pages.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pagekeeper as pk
from model.cache import Cache, Served
from model.engine import manager

NAMED = 512
"""Tokens that one id of the trace names."""

LONGEST_OUTPUT = 2_000

POOLS = (160_000, 1_000_000, 6_000_000)
"""Tokens; the longest request has 126,527."""


class Visit(NamedTuple):
    """A request, each of whose ids is a text, and a name for each full block of its prompt and output."""

    number: int
    ids: list[int]
    text: int
    """Tokens of an id's text, a multiple of the page size."""
    prompt: int
    output: int
    names: list[int]

    def tokens(self) -> Any:
        """Prompt and output; outputs are negative tokens, and the request's alone."""
        named = np.array(self.ids, np.int32)[:, None] * self.text + np.arange(self.text, dtype=np.int32)
        output = -1 - self.number * LONGEST_OUTPUT - np.arange(self.output, dtype=np.int32)
        return np.concatenate([named.ravel()[: self.prompt], output])


class Names:
    """Numbers for prefixes: equal ones for blocks that have the same text and follow the same prefix."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, object], int] = {}
        self.parents: list[int] = []

    def chain(self, texts: Iterable[object]) -> list[int]:
        """Names the blocks of one sequence, each by its text and the name of the block before."""
        name, names = -1, []
        for text in texts:
            parent, name = name, self.numbers.setdefault((name, text), len(self.parents))
            if name == len(self.parents):
                self.parents.append(parent)
            names.append(name)
        return names

    def visit(
        self, number: int, ids: list[int], text: int, prompt: int, output: int, page_size: int
    ) -> Visit:
        """A request whose blocks are named by its ids, and not by its tokens."""
        pages = text // page_size
        shared = [(ids[page // pages], page % pages) for page in range(prompt // page_size)]
        alone = [("output", number)] * ((prompt + output) // page_size - len(shared))
        return Visit(number, ids, text, prompt, output, self.chain([*shared, *alone]))


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
    requests = []
    with (shared_dir / "traces" / "mooncake_conversation_trace.jsonl").open() as lines:
        for number, row in enumerate(map(json.loads, lines)):
            ids, prompt, output = row["hash_ids"], row["input_length"], row["output_length"]
            requests.append(names.visit(number, ids, NAMED, prompt, output, page_size))
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
