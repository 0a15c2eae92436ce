"""Managers of several groups of layers, and what can be seen of each group."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pagekeeper as pk
from model import windows
from model.engine import prefilled
from pagekeeper.params import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    MultiKVCacheParams,
    Recurrent,
    RecurrentKVCacheParams,
    RecurrentState,
    Scratch,
    SlidingWindow,
)
from pagekeeper.params.groups import GroupKind

MANAGER_OPTIONS = {
    "allocate_pools",
    "connector",
    "max_batch_size",
    "max_num_input_tokens",
    "max_seq_len",
    "reserve",
}


def grouped(
    kinds: Mapping[str, Any],
    pages: int | Mapping[str, int] = 16,
    page_size: int = 4,
    **options: Any,
) -> pk.PagedKVCacheManager:
    """A ledger of a group of each kind, with pages of its own; options of manager and groups may be mixed."""
    chosen: dict[str, Any] = {name: options.pop(name) for name in MANAGER_OPTIONS & options.keys()}
    attention: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 1, "head_dim": 8, "num_layers": 1}
    states: dict[str, Any] = {"states": [RecurrentState("state", (8,), "float32")], "num_layers": 1}
    groups: dict[str, pk.KVCacheParams] = {}
    for name, kind in kinds.items():
        given = {"page_size": page_size, "kind": kind} | options
        if isinstance(kind, Recurrent | Scratch):
            groups[name] = RecurrentKVCacheParams(**(states | given))
        else:
            groups[name] = pk.MHAKVCacheParams(**(attention | given))
    total = dict.fromkeys(kinds, pages) if isinstance(pages, int) else dict(pages)
    chosen = {"max_batch_size": 16, "allocate_pools": False} | chosen
    return pk.PagedKVCacheManager(MultiKVCacheParams(groups), None, total, **chosen)


def kind_argument(kind: windows.Kind) -> GroupKind:
    """How the parameters of a group say it."""
    match kind:
        case windows.Window(tokens, sinks):
            return SlidingWindow(tokens, sinks)
        case windows.Chunked(tokens):
            return ChunkedLocal(tokens)
        case windows.Recurrent(interval, last):
            return Recurrent(interval or None, save_last_snapshot=last)
        case windows.Scratch():
            return Scratch()
        case windows.Cross():
            return CrossAttention()
    return FullAttention()


def rows(kv: pk.PagedKVCacheManager, ctx: pk.TextContext) -> dict[str, list[int]]:
    """The page of each block of the request, by group; 0 for a block without one."""
    assert isinstance(kv.params, MultiKVCacheParams)
    return {name: kv.get_cache_indices(ctx, name)[0] for name in kv.params}


def store(kv: pk.PagedKVCacheManager, tokens: Iterable[int], **options: Any) -> dict[str, list[int]]:
    """Computes the tokens and releases them; gives the pages that they had at the end."""
    ctx = prefilled(kv, tokens, **options)
    pages = rows(kv, ctx)
    kv.release(ctx)
    return pages


def used(kv: pk.PagedKVCacheManager) -> dict[str, int]:
    """Pages in use, by group."""
    assert isinstance(kv.params, MultiKVCacheParams)
    return {name: kv.block_count(group=name).used for name in kv.params}


def next_to_go(kv: pk.PagedKVCacheManager) -> list[list[int]]:
    """Idle pages of each group, the first to go first."""
    lines: Iterable[str] = re.findall(r"the next to go first: \[(.*)\]", kv.debug_dump())
    return [[int(page) for page in re.findall(r"\d+", line)] for line in lines]
