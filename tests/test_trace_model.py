"""A real conversation trace, whole: the manager finds, evicts and keeps what a model in dictionaries does."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pagekeeper as pk
from model.cache import Cache, Served
from model.engine import manager
from pagekeeper.params import EvictionPolicy
from pagekeeper.traces import TraceRequest, read_trace

NAMED = 512
"""Tokens that one id of the trace names."""

POOLS = (160_000, 1_000_000, 6_000_000)
"""Tokens; the longest request has 126,527."""


class Visit(NamedTuple):
    """A request of the trace, and a name for each full block of its prompt and output."""

    request: TraceRequest
    names: list[int]

    def tokens(self) -> Any:
        return np.concatenate([self.request.prompt.array(), self.request.output.array()])


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


def visits(trace: Path, page_size: int, names: Names) -> list[Visit]:
    """The requests of a trace, their blocks named by its ids and not by their tokens."""
    found = []
    pages_of_id = NAMED // page_size
    with trace.open() as lines:
        for number, (request, line) in enumerate(zip(read_trace([trace]), lines, strict=True)):
            ids = json.loads(line)["hash_ids"]
            prompt = len(request.prompt) // page_size
            every = (len(request.prompt) + len(request.output)) // page_size
            shared = [(ids[block // pages_of_id], block % pages_of_id) for block in range(prompt)]
            alone = [("of one request", number)] * (every - prompt)
            found.append(Visit(request, names.chain([*shared, *alone])))
    return found


@dataclass
class Pair:
    """A manager, and the model of it."""

    kv: Any
    model: Cache

    def serve(self, visit: Visit, tokens: Any) -> None:
        """The model and the manager find the same hits, and take and hold the same pages.

        A page that is taken is the victim if it stood for a block. So equal pages at every request are
        equal victims in equal order.
        """
        prompt, output = len(visit.request.prompt), len(visit.request.output)
        assert self.serve_for_real(tokens, prompt) == self.model.serve(visit.names, prompt, output)

    def serve_for_real(self, tokens: Any, prompt: int) -> Served:
        """The prompt in one forward, all of the output in a second, as accepted drafts would be."""
        ctx = pk.TextContext(pk.RequestID(), tokens[:prompt])
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", EvictionPolicy)
def test_the_whole_conversation_trace_is_served_as_the_model_serves_it(
    policy: str, shared_dir: Path, long_run: bool
) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl"
    page_size = 128 if long_run else NAMED
    names = Names()
    requests = visits(trace, page_size, names)
    assert len(requests) == 12_031
    pairs = [
        Pair(
            manager(size // page_size, page_size, eviction_policy=policy),
            Cache(page_size, size // page_size, policy),
        )
        for size in POOLS
    ]
    last = dict[int, int]()
    for number, visit in enumerate(requests):
        tokens = visit.tokens()
        for pair in pairs:
            pair.serve(visit, tokens)
        last |= dict.fromkeys(visit.names, number)
    for pair in pairs:
        assert pair.model.evictions > 0
        counted = pair.kv.metrics()
        assert counted["evictions"] == pair.model.evictions
        assert counted["cached_blocks"] == len(pair.model.stored)
        stored = set(pair.model.stored)
        for leaf in stored - {names.parents[name] for name in stored}:
            visit = requests[last[leaf]]
            length = (visit.names.index(leaf) + 1) * page_size
            assert pair.kv.probe_prefix_match_length([*visit.tokens()[:length], 0]) == length
        pair.kv.verify()
