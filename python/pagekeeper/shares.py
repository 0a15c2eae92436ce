"""How much of a number of bytes each group of a cache gets, where groups have memory of their own."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import cast, get_args

from pagekeeper.errors import CacheTooSmallError, shown
from pagekeeper.params import (
    CrossAttention,
    KVCacheParams,
    MemoryLayout,
    MultiKVCacheParams,
    Recurrent,
    Scratch,
)
from pagekeeper.params.multi import parse_shares, shares_in_text

__all__ = [
    "LAYOUT_VARIABLE",
    "SHARES_VARIABLE",
    "cap_pages",
    "divide",
    "lasting_pages",
    "least_bytes",
    "shares_of",
    "with_layout",
]

SHARES_VARIABLE = "PAGEKEEPER_WINDOW_SIZE_SHARES"
LAYOUT_VARIABLE = "PAGEKEEPER_KV_LAYOUT"

_log = logging.getLogger("pagekeeper")


def lasting_pages(group: KVCacheParams, encoder_length: int | None = None) -> int | None:
    """Pages of a group that each request has for life, where nothing of them is reused; None elsewhere.

    Args:
        group: the group.
        encoder_length: tokens that an encoder makes for each request. None: that is not known.
    """
    match group.kind:
        case Recurrent(snapshot_interval=interval, save_last_snapshot=last):
            return None if group.enable_prefix_caching and (interval is not None or last) else 1
        case Scratch():
            return 1
        case CrossAttention() if encoder_length is not None:
            return -(-encoder_length // group.page_size)
        case _:
            return None


def shares_of(params: MultiKVCacheParams) -> dict[str, Fraction]:
    """The share of each group: what the parameters say, else the environment, else equal ones.

    Raises:
        ValueError: the environment says something else than shares; the message shows the groups.
    """
    shares = params.window_size_shares
    if shares is None and (given := os.environ.get(SHARES_VARIABLE)):
        try:
            numbers = shares_in_text(given)
            shares = None if numbers is None else parse_shares(numbers, params)
        except ValueError as error:
            raise ValueError(f"{SHARES_VARIABLE}={shown(given)}: {error}") from None
    return {
        name: Fraction(repr(share))  # as it is written: 0.1 is a tenth
        for name, share in zip(params.by_window, shares or [1.0] * len(params), strict=True)
    }


def with_layout(
    params: KVCacheParams | MultiKVCacheParams, layout: str
) -> KVCacheParams | MultiKVCacheParams:
    """The parameters with a layout; of "auto" with their own, or, if that is "auto", the environment's.

    Raises:
        ValueError: the layout, or the environment's, is none.
    """
    where = "layout"
    if layout == "auto" and isinstance(params, MultiKVCacheParams):
        layout = params.layout
    if layout == "auto" and (given := os.environ.get(LAYOUT_VARIABLE)):
        where, layout = LAYOUT_VARIABLE, given
    if layout not in get_args(MemoryLayout):
        allowed = ", ".join(map(repr, get_args(MemoryLayout)))
        raise ValueError(f"{where}={shown(layout)}: must be one of {allowed}")
    if layout == "auto" or not isinstance(params, MultiKVCacheParams):
        return params
    return replace(params, layout=cast(MemoryLayout, layout))


def divide(
    params: MultiKVCacheParams,
    available_bytes: int,
    max_batch_size: int,
    shares: Mapping[str, Fraction],
    encoder_length: int | None = None,
) -> dict[str, int]:
    """Usable pages of each group, its null page not counted.

    Groups of which requests have pages for life get them for each request. The others divide the rest by
    their shares.

    Raises:
        CacheTooSmallError: there is no page for a group.
    """
    lasting = {name: lasting_pages(group, encoder_length) for name, group in params.items()}
    pages = {name: max_batch_size * count for name, count in lasting.items() if count is not None}
    for name, count in pages.items():
        if count >= 2**31:
            raise ValueError(
                f"max_batch_size={max_batch_size}: takes {count} pages of {name!r}, {lasting[name]} for each "
                "request; must take up to 2**31 - 1"
            )
    reserved = sum((count + 1) * params[name].bytes_per_page for name, count in pages.items())
    parts = {name: share for name, share in shares.items() if name not in pages}
    if none := [name for name, part in parts.items() if not part]:
        raise ValueError(f"window_size_shares: {none[0]!r} has a share of 0, and no page; must be above 0")
    whole = sum(parts.values())
    for name, part in parts.items():
        share = int(max(available_bytes - reserved, 0) * part / whole)
        pages[name] = min(share // params[name].bytes_per_page - 1, 2**31 - 1)
    if reserved > available_bytes or min(pages.values()) < 1:
        told = ", ".join(f"{name!r} {max(pages[name], 0)}" for name in params)
        least = [2 * params[name].bytes_per_page * whole / part for name, part in parts.items()]
        raise CacheTooSmallError(
            f"available_bytes={available_bytes}: makes pages of the groups {told} beside their null pages, "
            "must make 1 of each at least; give more, or other window_size_shares",
            needed=reserved + math.ceil(max(least, default=0)),
            available=available_bytes,
        )
    return {name: pages[name] for name in params}


def least_bytes(above: int, enough: Callable[[int], bool], what: str) -> int:
    """The least number of bytes above another that is enough for `what`, where more is enough too.

    Raises:
        ValueError: no number of bytes is.
    """
    low, high, most = above, above + 1, 2**63 - 1
    while high > most or not enough(high):
        if high >= most:
            raise ValueError(f"{what}: no number of bytes up to 2**63 - 1 is enough")
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def cap_pages(params: KVCacheParams, pages: int) -> int:
    """As many pages as fit, or as `max_tokens` asks for: the smaller limit wins, and a warning says which."""
    if params.max_tokens is None:
        return pages
    if params.bytes_per_token == 0:
        warn_of_max_tokens(params.max_tokens)
        return pages
    asked = -(-params.max_tokens // params.page_size)
    if asked < pages:
        _log.warning(
            "max_tokens=%d limits the pool to %d pages; memory has room for %d",
            params.max_tokens,
            asked,
            pages,
        )
    else:
        _log.warning(
            "memory limits the pool to %d pages; max_tokens=%d asks for %d", pages, params.max_tokens, asked
        )
    return min(asked, pages)


def warn_of_max_tokens(max_tokens: int | None) -> None:
    """Says that there is no one window that the number could be of."""
    if max_tokens is not None:
        _log.warning("max_tokens=%d has no effect: the cache is not one window", max_tokens)
