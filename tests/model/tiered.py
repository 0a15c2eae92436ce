"""A manager whose pages have contents, and a tier beyond them, for tests that work out values by hand."""

from collections.abc import Sequence
from typing import Any

import pagekeeper as pk
from model.engine import claimed, manager, row
from model.memory import PageMemory, prefix_values
from model.tier import Tier

PROMPT = list(range(1, 14))
"""Three full blocks of four, and a token."""


class Cache:
    """A manager whose pages have contents, with a tier."""

    def __init__(self, pages: int = 8, loads: str = "late", offloads: str = "now", **options: Any) -> None:
        self.memory = PageMemory(pages, 4)
        self.tier = Tier(self.memory, loads, offloads)
        self.kv = manager(pages, connector=self.tier, **options)

    def run(self, ctx: pk.TextContext, num_tokens: int | None = None) -> None:
        """`alloc` and a forward that checks what it reads and writes f(prefix)."""
        self.kv.alloc(ctx, num_tokens=num_tokens)
        self.forward(ctx)

    def forward(self, ctx: pk.TextContext) -> None:
        start, end = ctx.processed_length, ctx.processed_length + ctx.active_length
        values = prefix_values(0, list(map(int, ctx.tokens.all[:end])))
        assert (self.memory.read(row(self.kv, ctx), start) == values[:start]).all()
        self.memory.write(row(self.kv, ctx), start, values[start:])
        self.kv.step(ctx)
        self.kv.verify()

    def serve(self, tokens: Sequence[int]) -> int:
        """One request from claim to release; gives the tokens that were there."""
        ctx = claimed(self.kv, tokens)
        self.run(ctx)
        cached = ctx.cached_prefix_length
        self.kv.release(ctx)
        return cached

    def forget_device(self) -> None:
        """Other prompts take all pages: what was stored is in the tier alone."""
        loads, self.tier.loads = self.tier.loads, "refuse"
        pages = self.kv.block_count().total
        ctx = claimed(self.kv, range(1000, 1000 + pages * 4))
        self.run(ctx)
        self.kv.release(ctx)
        self.tier.loads = loads

    def stored_only_in_the_tier(self) -> None:
        self.serve(PROMPT)
        self.forget_device()


def in_tier(**options: Any) -> Cache:
    cache = Cache(**options)
    cache.stored_only_in_the_tier()
    return cache
