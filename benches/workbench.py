"""What the benchmarks work on: prompts, requests and caches, the same ones on every run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagekeeper import MHAKVCacheParams, PagedKVCacheManager, TextContext, TokenBuffer
from pagekeeper.params import HashAlgorithm

LONG = 32_768
"""Tokens of the prompt that most rows use."""

VOCABULARY = 128_000

_ids = itertools.count()


def prompts(length: int, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """Prompts without end, of `length` tokens each; two different seeds share no block."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(0, VOCABULARY, size=length, dtype=np.int64)


def parameters(page_size: int, **given: Any) -> MHAKVCacheParams:
    """One small layer."""
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 1, "num_layers": 1}
    return MHAKVCacheParams(**shape, page_size=page_size, devices=["cpu"], **given)


def cache(
    page_size: int,
    pages: int,
    algo: HashAlgorithm = "ahash64",
    event_buffer_max_size: int = 0,
    partial_reuse: bool = True,
) -> PagedKVCacheManager:
    """A cache without memory of its own, so that only bookkeeping is timed."""
    params = parameters(
        page_size,
        kv_hash_algo=algo,
        event_buffer_max_size=event_buffer_max_size,
        enable_partial_reuse=partial_reuse,
    )
    return PagedKVCacheManager(params=params, total_num_pages=pages, max_batch_size=256, allocate_pools=False)


def request(tokens: NDArray[np.integer]) -> TextContext:
    """A new request for these tokens."""
    return TextContext(request_id=next(_ids), tokens=TokenBuffer(tokens))


def serve(kv: PagedKVCacheManager, ctx: TextContext) -> None:
    """A request's whole life, with one generated token."""
    kv.claim(ctx)
    kv.alloc(ctx)
    kv.take_page_copies()
    ctx.update(42)
    kv.step(ctx)
    kv.release(ctx)
