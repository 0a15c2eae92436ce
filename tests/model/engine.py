"""Small managers and requests, and what an engine does with them, for tests that work out values by hand."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import pagekeeper as pk

MANAGER_OPTIONS = {
    "max_batch_size",
    "max_seq_len",
    "max_num_input_tokens",
    "reserve",
    "allocate_pools",
    "connector",
    "buffers",
    "model_name",
}
SEED = "0123456789abcdef" * 4


def manager(pages: int = 8, page_size: int = 4, **options: Any) -> pk.PagedKVCacheManager:
    """A ledger without pools; options of the manager and of its parameters may be mixed.

    Hits are full blocks, unless `enable_partial_reuse` is given: most tests count these.
    """
    chosen = {name: options.pop(name) for name in MANAGER_OPTIONS & options.keys()}
    shape: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 2, "head_dim": 4, "num_layers": 3}
    params = pk.MHAKVCacheParams(
        **(shape | {"page_size": page_size, "devices": ["cpu"]} | {"enable_partial_reuse": False} | options)
    )
    return pk.PagedKVCacheManager(
        params=params,
        total_num_pages=pages,
        **({"max_batch_size": 16, "allocate_pools": False} | chosen),
    )


def request(tokens: Iterable[int], **options: Any) -> pk.TextContext:
    log = pk.TokenBuffer(np.fromiter(tokens, np.int64))
    return pk.TextContext(request_id=pk.RequestID(), max_length=1_000_000, tokens=log, **options)


def claimed(kv: pk.PagedKVCacheManager, tokens: Iterable[int], **options: Any) -> pk.TextContext:
    ctx = request(tokens, **options)
    kv.claim(ctx)
    return ctx


def copy_pages(kv: pk.PagedKVCacheManager) -> list[list[int]]:
    """Takes the page copies that go before the next forward: [source, destination] of all groups."""
    groups = range(len(kv._groups.params))
    return [pair for group in groups for pair in kv._core.take_page_copies(group).tolist()]


def compute(
    kv: pk.PagedKVCacheManager,
    *batch: pk.TextContext,
    new_tokens: Sequence[int] | None = None,
    num_tokens: int | None = None,
) -> None:
    """One forward of the batch, its results delivered: one new token each, or none."""
    kv.alloc(list(batch), num_tokens=num_tokens)
    copy_pages(kv)
    kv.step(list(batch), new_tokens=new_tokens)


def decode_and_prompt(kv: pk.PagedKVCacheManager) -> list[pk.TextContext]:
    """A decode behind six computed tokens (pages 1 and 2), and a prompt of five (pages 3 and 4)."""
    decode = claimed(kv, range(10, 16))
    compute(kv, decode, new_tokens=[7])
    prompt = claimed(kv, range(50, 55))
    kv.alloc([decode, prompt])
    return [decode, prompt]


def prefilled(kv: pk.PagedKVCacheManager, tokens: Iterable[int], **options: Any) -> pk.TextContext:
    """A running request whose whole prompt has KV."""
    ctx = claimed(kv, tokens, **options)
    compute(kv, ctx)
    return ctx


def store(kv: pk.PagedKVCacheManager, tokens: Iterable[int], **options: Any) -> list[int]:
    """Computes the tokens and releases them, so that their full blocks stay cached; gives their pages."""
    ctx = prefilled(kv, tokens, **options)
    pages = row(kv, ctx)
    kv.release(ctx)
    return pages


def row(kv: pk.PagedKVCacheManager, ctx: pk.TextContext) -> list[int]:
    """The page of each block of the request."""
    return list(kv.get_cache_indices(ctx)[0])


def free(kv: pk.PagedKVCacheManager) -> int:
    return kv.block_count().free


def hit(kv: pk.PagedKVCacheManager, tokens: Iterable[int], **options: Any) -> int:
    """Tokens that a request with this prompt would find."""
    return kv.probe_prefix_match_length(np.fromiter(tokens, np.int64), **options)
