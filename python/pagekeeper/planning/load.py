"""The one door to a manager: parameters, memory and limits in, a cache that fits out, or a refusal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pagekeeper.calls import flag
from pagekeeper.dummy import DummyKVCache
from pagekeeper.manager import PagedKVCacheManager
from pagekeeper.params import (
    ChunkedLocal,
    FullAttention,
    KVCacheParams,
    MemoryLayout,
    MultiKVCacheParams,
    SlidingWindow,
    whole_number,
)
from pagekeeper.planning.demand import LONGEST
from pagekeeper.planning.plan import CachePlan, plan_cache
from pagekeeper.shares import with_layout

__all__ = ["load_kv_manager"]


def load_kv_manager(
    params: KVCacheParams | MultiKVCacheParams | None,
    max_batch_size: int | None,
    max_seq_len: int | None,
    session: object = None,
    available_cache_memory: int | Sequence[int] | None = None,
    is_di_enabled: bool = False,
    model_name: str | None = None,
    weights_revision: str | None = None,
    page_size_multiple_of: int = 1,
    max_num_input_tokens: int | None = None,
    layout: MemoryLayout = "auto",
    *,
    num_draft_tokens: int = 0,
    encoder_length: int | None = None,
    length_mix: Mapping[int, float] | None = None,
    allocate_pools: bool = True,
) -> PagedKVCacheManager:
    """The manager of a cache that one request of `max_seq_len` fits in, or a refusal with the numbers.

    A window as long as `max_seq_len` is none: its group reads all tokens then. Without prefix caching the
    pools are no larger than `max_batch_size` requests of `max_seq_len` take.

    Args:
        params: those of the cache. None gives a `DummyKVCache`, a mock a mock, and so do devices called
            "meta".
        max_batch_size: requests at a time.
        max_seq_len: most tokens of one request, prompt and output, up to 2**24.
        session: accepted for code written for other engines; not used.
        available_cache_memory: bytes for the pools, null pages included; of several devices a list, of which
            the least counts.
        is_di_enabled: whether blocks move between replicas; False for now.
        model_name: whose KV it is.
        weights_revision: which weights' KV it is.
        page_size_multiple_of: tokens of which the kernels' pages are multiples.
        max_num_input_tokens: most tokens of one request that one forward computes. None: no limit; windows
            hold a whole prompt then, while it is computed.
        layout: how several groups get their memory, as in `MultiKVCacheParams`. "auto" is what the
            parameters say, and if they say "auto" too, what the environment's `PAGEKEEPER_KV_LAYOUT` does.
        num_draft_tokens: draft tokens that decode steps verify, for which a request has pages behind its last
            token.
        encoder_length: tokens that an encoder makes for each request, at most. Groups of cross attention need
            it.
        length_mix: lengths of requests and their weights, as in `plan_cache`.
        allocate_pools: False gives the ledger and tables without memory of our own.

    Raises:
        CacheTooSmallError: a `ValueError`. A request of `max_seq_len` does not fit.
        TypeError: `params` is something else.
        ValueError: a size is missing or out of range, or the page size is no multiple; the message says
            which.
    """
    if params is None:
        return DummyKVCache(None, session, max_batch_size=max_batch_size, max_seq_len=max_seq_len)
    if _is_mock(params):
        return cast(PagedKVCacheManager, _mock())
    if not isinstance(params, KVCacheParams | MultiKVCacheParams):
        raise TypeError(f"params: got {type(params).__name__}, must be parameters of a cache, or None")
    if "meta" in params.devices:
        return cast(PagedKVCacheManager, _mock(PagedKVCacheManager))
    batch = whole_number(_given(max_batch_size, "max_batch_size"), "max_batch_size", most=2**20)
    longest = whole_number(_given(max_seq_len, "max_seq_len"), "max_seq_len", most=LONGEST)
    available = _least_memory(available_cache_memory)
    if flag(is_di_enabled, "is_di_enabled"):
        raise ValueError("is_di_enabled=True: must be False, blocks do not move between replicas yet")
    multiple = whole_number(page_size_multiple_of, "page_size_multiple_of")
    if params.page_size % multiple:
        below, above = params.page_size // multiple * multiple, -(-params.page_size // multiple) * multiple
        raise ValueError(
            f"page_size={params.page_size}: must be a multiple of page_size_multiple_of={multiple}, as the "
            f"kernels' pages are (try {f'{below} or ' if below else ''}{above})"
        )
    params = with_layout(params, layout)
    plan = plan_cache(
        params,
        available,
        batch,
        max_num_input_tokens=max_num_input_tokens,
        num_draft_tokens=num_draft_tokens,
        encoder_length=encoder_length,
        length_mix=length_mix,
        max_seq_len=longest,
    )
    if not params.enable_prefix_caching:
        plan = plan.without_surplus(longest, batch)
    return PagedKVCacheManager(
        _without_long_windows(params, longest),
        session,
        max_batch_size=batch,
        max_seq_len=longest,
        max_num_input_tokens=max_num_input_tokens,
        model_name=model_name,
        weights_revision=weights_revision,
        allocate_pools=allocate_pools,
        **_sizes(plan, longest),
    )


def _sizes(plan: CachePlan, longest: int) -> dict[str, Any]:
    """What a manager is told of its memory."""
    if plan.memory.huge_pages is not None:
        return {"available_bytes": plan.available_bytes, "request_pages": plan.pages(longest)}
    pages = plan.num_pages
    return {"total_num_pages": pages if isinstance(plan.params, MultiKVCacheParams) else sum(pages.values())}


def _without_long_windows(
    params: KVCacheParams | MultiKVCacheParams, longest: int
) -> KVCacheParams | MultiKVCacheParams:
    """The parameters in which groups whose windows no request outgrows read all tokens."""
    if isinstance(params, MultiKVCacheParams):
        groups = tuple((name, _without_long_window(group, longest)) for name, group in params.items())
        return replace(params, groups=groups, max_tokens=None)  # of which the plan has spoken
    return _without_long_window(params, longest)


def _without_long_window(group: KVCacheParams, longest: int) -> KVCacheParams:
    match group.kind:
        case SlidingWindow(window_size=size) | ChunkedLocal(chunk_size=size) if size >= longest:
            return replace(group, kind=FullAttention())
        case _:
            return group


def _given(value: object, name: str) -> object:
    if value is None:
        raise ValueError(f"{name}: missing")
    return value


def _least_memory(given: int | Sequence[int] | None) -> int:
    name = "available_cache_memory"
    _given(given, name)
    amounts = given if isinstance(given, list | tuple) else [given]
    if not amounts:
        raise ValueError(f"{name}=[]: must have the bytes of one device at least")
    return min(whole_number(amount, name, most=2**63 - 1) for amount in amounts)


def _is_mock(params: object) -> bool:
    """Tells without `unittest.mock`, which takes long to import and is there if there is a mock."""
    mocks = sys.modules.get("unittest.mock")
    return mocks is not None and isinstance(params, mocks.NonCallableMock)


def _mock(spec: type | None = None) -> Any:
    from unittest.mock import MagicMock

    return MagicMock(spec=spec)
