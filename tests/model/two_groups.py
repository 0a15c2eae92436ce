"""A cache of two groups of layers with tiers beyond them; its forwards check and write the bytes of pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

import pagekeeper as pk
from pagekeeper.params import FullAttention, MultiKVCacheParams, SlidingWindow

PAGE = 4
PAGES = 24
ALL, NEAR = "all", "near"
"""A group of full attention, and one of a window of 6 tokens: of a hit's blocks it needs the last two."""


def params_of(heads: int, kind: Any, **options: Any) -> pk.MHAKVCacheParams:
    return pk.MHAKVCacheParams(
        dtype="float16",
        n_kv_heads=heads,
        head_dim=4,
        num_layers=1,
        page_size=PAGE,
        devices=["cpu"],
        kind=kind,
        kv_hash_algo="sha256",
        **options,
    )


class Hybrid:
    """A cache of two groups, whose forwards write into each page what it is to hold."""

    ids = count()

    def __init__(self, connector: Any = None, model_name: str | None = None, **options: Any) -> None:
        if connector is None:
            config = {"type": "rust_tiered", "host_offload_max_gb": 0.001, **options.pop("config", {})}
            options["kv_connector_config"] = config
        groups = {
            ALL: params_of(1, FullAttention(), **options),
            NEAR: params_of(2, SlidingWindow(6), **options),
        }
        self.pools = {
            name: np.zeros((PAGES + 1, group.bytes_per_page), np.uint8) for name, group in groups.items()
        }
        if connector is not None:
            connector.pools = list(self.pools.values())
        self.kv = pk.PagedKVCacheManager(
            MultiKVCacheParams(groups),
            total_num_pages=dict.fromkeys(groups, PAGES),
            max_batch_size=4,
            max_seq_len=4 * PAGES,
            buffers={name: [pool] for name, pool in self.pools.items()},
            connector=connector,
            model_name=model_name,
        )

    def claim(self, tokens: Sequence[int]) -> pk.TextContext:
        ctx = pk.TextContext(request_id=next(self.ids), tokens=np.array(tokens, np.int32))
        self.kv.claim(ctx)
        return ctx

    def content(self, name: str, tokens: Sequence[int], block: int) -> np.ndarray[Any, Any]:
        """What a group's page of a block holds: it depends on the group and the whole prefix."""
        seed = hash((name, tuple(tokens[: (block + 1) * PAGE]))) % 2**32
        return np.random.default_rng(seed).integers(0, 256, self.pools[name].shape[1], np.uint8)

    def compute(self, ctx: pk.TextContext, tokens: Sequence[int]) -> int:
        """Checks what is cached, writes the rest and delivers it. Gives the tokens that were cached."""
        cached = ctx.processed_length
        for name, pool in self.pools.items():
            [row] = self.kv.get_cache_indices(ctx, name)
            for block, page in enumerate(row):
                right = self.content(name, tokens, block)
                if page and block < cached // PAGE:
                    assert (pool[page] == right).all(), f"block {block} of group {name}"
                elif page:
                    pool[page] = right
        self.kv.step(ctx)
        return cached

    def serve(self, tokens: Sequence[int]) -> int:
        """All of a prompt, after its load if there is one. Gives the tokens that were cached."""
        ctx = self.claim(tokens)
        self.kv.alloc(ctx)
        if not ctx.active_length:
            self.settle()
            self.kv.alloc(ctx)
        cached = self.compute(ctx, tokens)
        self.settle()
        self.kv.release(ctx)
        self.kv.verify()
        return cached

    def settle(self) -> None:
        for _ in range(100_000):
            if not self.kv.metrics()["copies_in_flight"]:
                return
            self.kv.poll_transfers()
        raise AssertionError("copies do not end")

    def forget(self) -> None:
        """The device loses what nobody uses."""
        self.kv.truncate_prefix([])

    def loaded(self) -> int:
        return self.kv.metrics()["loaded_blocks"]


def prompt(first: int, blocks: int) -> list[int]:
    return [first + token for token in range(blocks * PAGE + 1)]
