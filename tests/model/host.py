"""A cache on plain memory with a host tier, perhaps above a disk; its forward writes f(prefix) into pages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pagekeeper as pk

PAGE_SIZE = 4
BYTES = 2 * PAGE_SIZE * 4 * 4
"""Bytes of a page: K and V of 4 tokens, one head of 4 float32, unless a cache says otherwise."""


def prompt_of(number: int, blocks: int) -> list[int]:
    """So many full blocks and a token, of which no other number has any."""
    return [number * 1000 + token for token in range(blocks * PAGE_SIZE + 1)]


def memory_of(pages: int, num_bytes: int = BYTES) -> NDArray[np.uint8]:
    """A pool of so many pages and the null page."""
    return np.zeros((pages + 1, num_bytes), np.uint8)


class HostCache:
    """The cache, its memory and its engine.

    Args:
        pages: on the device.
        units: in host memory.
        lanes: threads that copy.
        host: how its host memory is kept, in the fields of `KVConnectorConfig`.
        disk: how blocks go to a disk too, likewise.
        model_name: of the cache.
        weights_revision: of the cache.
        params: of the cache; also the shape of its pages.
    """

    may_raise: tuple[type[Exception], ...] = ()
    """What a load may raise: its blocks are computed then."""

    def __init__(
        self,
        pages: int = 8,
        units: int = 32,
        lanes: int = 2,
        *,
        host: Mapping[str, Any] = MappingProxyType({}),
        disk: Mapping[str, Any] = MappingProxyType({}),
        model_name: str | None = None,
        weights_revision: str | None = None,
        **params: Any,
    ) -> None:
        given: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 4, "num_layers": 1}
        given["enable_partial_reuse"] = False  # what is found is counted in blocks
        given = {**given, "page_size": PAGE_SIZE, **params}
        num_bytes = pk.MHAKVCacheParams(**given).bytes_per_page
        size = units * num_bytes / 2**30
        config = pk.KVConnectorConfig(
            type="rust_tiered", host_offload_max_gb=size, num_copy_lanes=lanes, **host, **disk
        )
        self.params = pk.MHAKVCacheParams(**given, kv_connector_config=config)
        self.memory = memory_of(pages, num_bytes)
        self.kv = pk.PagedKVCacheManager(
            self.params,
            total_num_pages=pages,
            max_batch_size=8,
            buffers=[self.memory],
            model_name=model_name,
            weights_revision=weights_revision,
        )

    def serve(self, prompt: list[int], **options: Any) -> int:
        """A request from its claim to its release, and the end of its offloads. Tokens that were cached."""
        ctx = self.claimed(prompt, **options)
        self.run(ctx)
        cached = ctx.cached_prefix_length
        self.kv.release(ctx)
        self.settled()
        return cached

    def run(self, ctx: pk.TextContext) -> None:
        """Computes what has no KV yet, after all loads that there are."""
        transfer = self.kv.alloc(ctx)
        while ctx.active_length == 0:
            with suppress(*self.may_raise):
                transfer.synchronize(10)
            assert self.kv.poll_transfers() == [ctx.request_id]
            transfer = self.kv.alloc(ctx)
        self.compute(ctx)
        assert self.holds(ctx)

    def claimed(self, prompt: list[int], **options: Any) -> pk.TextContext:
        ctx = pk.TextContext(request_id=pk.RequestID(), tokens=prompt, **options)
        self.kv.claim(ctx)
        return ctx

    def computed(self, prompt: list[int], chunk: int | None = None, **options: Any) -> pk.TextContext:
        """A claimed request of which so many tokens have KV; None: all."""
        ctx = self.claimed(prompt, **options)
        self.forward(ctx, chunk)
        return ctx

    def forward(self, ctx: pk.TextContext, chunk: int | None = None) -> None:
        """A forward of a chunk, or of all that has no KV yet."""
        self.kv.alloc(ctx, num_tokens=chunk)
        self.compute(ctx)

    def compute(self, ctx: pk.TextContext) -> None:
        """The forward that `alloc` planned."""
        first, last = ctx.processed_length, ctx.processed_length + ctx.active_length
        self.kv.runtime_inputs([[ctx]])
        (row,) = self.kv.get_cache_indices(ctx)
        for block in range(first // PAGE_SIZE, -(-last // PAGE_SIZE)):
            self.memory[row[block]] = self.content(ctx.tokens.all.tolist(), block)
        self.kv.step(ctx, counts=0)

    def holds(self, ctx: pk.TextContext) -> bool:
        """Whether every block with KV has the bytes of its prefix."""
        (row,) = self.kv.get_cache_indices(ctx)
        blocks = range(-(-ctx.processed_length // PAGE_SIZE))
        tokens = ctx.tokens.all.tolist()
        return bool(blocks) and all((self.memory[row[n]] == self.content(tokens, n)).all() for n in blocks)

    def content(self, tokens: list[int], block: int) -> NDArray[np.uint8]:
        """What stands in the page of a block: bytes of the whole prefix up to it, another at each place."""
        first = hash(tuple(tokens[: (block + 1) * PAGE_SIZE])) % 251
        return (np.arange(first, first + self.memory.shape[1]) % 251 + 1).astype(np.uint8)

    def suspend(self, ctx: pk.TextContext) -> None:
        self.kv.suspend(ctx).synchronize(10)
        assert self.settled() == []

    def resume(self, ctx: pk.TextContext) -> None:
        self.kv.resume(ctx).synchronize(10)
        assert self.settled() == [ctx.request_id]

    def settled(self) -> list[object]:
        """Waits for every copy; the requests that became ready."""
        ready = self.kv.poll_transfers()
        while self.kv.metrics()["copies_in_flight"]:
            ready += self.kv.poll_transfers()
        self.kv.verify()
        return ready

    def counted(self, name: str) -> int:
        """What the tier counts under this name."""
        return self.kv.metrics()[f"connector_host_{name}"]

    def fail_copies(self) -> None:
        """From now on there is no memory to copy from or to."""
        self.kv._connector.release_pages()  # type: ignore[union-attr]
