"""The groups of layers of a cache: their names, parameters, pages and pools."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pagekeeper._native import slab_geometry
from pagekeeper.errors import CacheTooSmallError, shown
from pagekeeper.params import (
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GroupKind,
    KVCacheParams,
    MultiKVCacheParams,
    Recurrent,
    Scratch,
    SlidingWindow,
    whole_number,
)
from pagekeeper.pools import Pool, check_apart, pool_for, usable_pages
from pagekeeper.shares import cap_pages, divide, least_bytes, shares_of, warn_of_max_tokens
from pagekeeper.slabs import MAX_HUGE_BYTES, MAX_PADDING, MAX_RATIO, GroupMemory, slab_pools

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["Buffers", "Groups"]

Buffers: TypeAlias = "Sequence[torch.Tensor | NDArray[np.uint8]]"
"""Memory of one pool: a list of tensors, or of numpy arrays."""

_log = logging.getLogger("pagekeeper")

_Value = TypeVar("_Value")


class Groups:
    """The groups of a cache, in the order in which the ledger numbers them.

    A cache of `MultiKVCacheParams` has named groups; one of other parameters has a single group, without a
    name.

    Args:
        params: those of the cache.

    Raises:
        TypeError: no parameters of a cache.
    """

    def __init__(self, params: KVCacheParams | MultiKVCacheParams) -> None:
        self._cache = params
        if isinstance(params, MultiKVCacheParams):
            self.names: tuple[str, ...] = tuple(params)
            self.params: tuple[KVCacheParams, ...] = tuple(params.values())
            self.layout = params.layout
        elif isinstance(params, KVCacheParams):
            self.names, self.params, self.layout = (), (params,), "paged"
        else:
            raise TypeError(
                f"params: got {type(params).__name__}, must be a KVCacheParams or MultiKVCacheParams"
            )
        self.is_plain = len(self.params) == 1 and isinstance(self.params[0].kind, FullAttention)
        """Whether there is one group, which keeps all tokens."""

    @property
    def kinds(self) -> list[GroupKind]:
        """Which blocks the layers of each group read."""
        return [group.kind for group in self.params]

    @property
    def shares(self) -> bool:
        """Whether groups may share a slab."""
        return self.layout != "paged" and len(self.params) > 1

    def index(self, group: str | None) -> int:
        """The number of a group.

        Raises:
            ValueError: there is no such group; a cache without names takes None alone.
        """
        if group is None and not self.names:
            return 0
        if isinstance(group, str) and group in self.names:
            return self.names.index(group)
        if not self.names:
            raise ValueError(f"group={shown(group)}: must be None, the cache has one group")
        raise ValueError(f"group={shown(group)}: must be one of {', '.join(map(repr, self.names))}")

    def memory(
        self,
        total_num_pages: int | Mapping[str, int] | None,
        available_bytes: int | None,
        max_batch_size: int,
        request_pages: Sequence[int] = (),
    ) -> GroupMemory:
        """How much memory each group has, of its own or of a slab that all share.

        Args:
            total_num_pages: usable pages of the only group, or of each by name.
            available_bytes: instead of these, bytes for all pools.
            max_batch_size: requests at a time: as many pages have groups of which each has one for life.
            request_pages: as for `shared_memory`.

        Raises:
            ValueError: what is given is missing, doubled, out of range, too small, or not by group.
        """
        if not self.names or (len(self.names) == 1 and total_num_pages is None):
            if isinstance(total_num_pages, Mapping):
                raise ValueError(f"total_num_pages={shown(total_num_pages)}: must be a number, of one group")
            pages = usable_pages(self.params[0], total_num_pages, available_bytes)
            return GroupMemory((pages if available_bytes is None else cap_pages(self.params[0], pages),))
        if (total_num_pages is None) == (available_bytes is None):
            raise ValueError("give total_num_pages or available_bytes, one of them")
        if available_bytes is not None:
            available_bytes = whole_number(available_bytes, "available_bytes", 0, 2**63 - 1)
            warn_of_max_tokens(self.params[0].max_tokens)
            shared = self.shared_memory(available_bytes, request_pages)
            return shared or self.divided_memory(available_bytes, max_batch_size)
        names = ", ".join(map(repr, self.names))
        must_share = self.layout == "jenga" and self.shares
        if must_share or not isinstance(total_num_pages, Mapping):
            wanted = "None, with layout='jenga'" if must_share else f"a mapping of {names} to pages"
            raise ValueError(f"total_num_pages={shown(total_num_pages)}: must be {wanted}")
        if set(total_num_pages) != set(self.names):
            given = ", ".join(map(repr, total_num_pages))
            raise ValueError(f"total_num_pages: names {given}, must name each of {names}")
        return GroupMemory(
            tuple(whole_number(total_num_pages[name], f"total_num_pages[{name!r}]") for name in self.names)
        )

    def pages_of_each(self, given: object, name: str) -> list[int]:
        """Pages of each group, in their order; none where none are given.

        Args:
            given: a mapping of the groups' names to pages, or None.
            name: what they are called, for errors.

        Raises:
            ValueError: it is no number of pages for each group.
        """
        if given is None:
            return []
        if not isinstance(given, Mapping) or not self.names or set(given) != set(self.names):
            names = ", ".join(map(repr, self.names)) or "no group: there is only one, without a name"
            raise ValueError(f"{name}={shown(given)}: must be a mapping of pages for each of {names}")
        return [whole_number(given[group], f"{name}[{group!r}]", 0) for group in self.names]

    def shared_memory(
        self, available_bytes: int, request_pages: Sequence[int] = (), *, tell: bool = True
    ) -> GroupMemory | None:
        """A slab that all groups share; None where each is to have memory of its own.

        With the layout "auto" that is so too if no huge page holds whole pages of all of them.

        Args:
            available_bytes: bytes of the slab at most.
            request_pages: pages of each group that a request holds, or nothing: one of each. The slab is cut
                so that most such requests fit.
            tell: whether that is logged, and a refusal has the bytes that are enough: they take long to find.

        Raises:
            CacheTooSmallError: there is not one huge page beside the null one.
            ValueError: the groups must share memory, and their pages have no huge page.
        """
        if not self.shares:
            return None
        try:
            huge_bytes, huge_pages, tilings = self._geometry(available_bytes, request_pages)
        except ValueError as error:
            if self.layout == "jenga":
                raise
            if tell:
                _log.warning("groups get memory of their own: %s", error)
            return None
        if huge_pages < 1:

            def has_one(size: int) -> bool:
                return self._geometry(size, request_pages)[1] > 0

            needed = least_bytes(available_bytes, has_one, "a huge page") if tell else 0
            raise CacheTooSmallError(
                f"available_bytes={available_bytes}: has no room for a huge page beside the null one, which "
                f"{needed} bytes have",
                needed=needed,
                available=available_bytes,
            )
        ratios, strides = zip(*tilings, strict=True)
        return GroupMemory(ratios, huge_pages, huge_bytes, strides)

    def divided_memory(
        self,
        available_bytes: int,
        max_batch_size: int,
        shares: Mapping[str, Fraction] | None = None,
        encoder_length: int | None = None,
    ) -> GroupMemory:
        """Memory of its own for each group, by `shares`; None: by those of the parameters.

        Raises:
            CacheTooSmallError: there is no page for a group.
            ValueError: the environment says something else than shares.
        """
        cache = self._cache
        assert isinstance(cache, MultiKVCacheParams)
        shares = shares or shares_of(cache)
        pages = divide(cache, available_bytes, max_batch_size, shares, encoder_length)
        return GroupMemory(tuple(pages.values()))

    def _geometry(
        self, available_bytes: int, request_pages: Sequence[int]
    ) -> tuple[int, int, list[tuple[int, int]]]:
        """Bytes of a huge page, usable ones, and for each group pages in one and bytes from page to page."""
        pages = []
        for group, held in zip(self.params, request_pages or [1] * len(self.params), strict=True):
            rows = [region.shape[-1] * region.dtype.size_in_bytes for region in group.page_layout.regions]
            pages.append((group.bytes_per_page, math.gcd(group.bytes_per_page, *rows), held))
        return slab_geometry(
            pages,
            available_bytes,
            max_padding=MAX_PADDING,
            max_huge_bytes=MAX_HUGE_BYTES,
            max_ratio=MAX_RATIO,
        )

    def native(self, memory: GroupMemory) -> list[tuple[str, int, int, int]]:
        """What the ledger is told of each group: its kind, two numbers of that kind, and its pages.

        They are tokens of the window and sinks, or of the chunk and 0, or between snapshots, and 1 for a last
        one.
        """
        told = []
        for group, count in zip(self.params, memory.pages, strict=True):
            match group.kind:
                case SlidingWindow(window_size=window, sink_tokens=sinks):
                    told.append(("window", window, sinks, count))
                case ChunkedLocal(chunk_size=chunk):
                    told.append(("chunked", chunk, 0, count))
                case Recurrent(snapshot_interval=interval, save_last_snapshot=last):
                    told.append(("recurrent", interval or 0, int(last), count))
                case CrossAttention():
                    told.append(("cross", 0, 0, count))
                case Scratch():
                    told.append(("scratch", 0, 0, count))
                case _:
                    told.append(("full", 0, 0, count))
        return told

    def make_pools(
        self, memory: GroupMemory, buffers: Buffers | Mapping[str, Buffers] | None
    ) -> tuple[Pool, ...]:
        """A new pool for each group, or pools that adopt `buffers`: by name, where groups have names.

        Raises:
            ImportError: torch is needed and not installed.
            TypeError: buffers that are no list of tensors or arrays.
            ValueError: buffers that do not fit, are missing for a group, or have bytes in common; groups that
                share memory.
        """
        counts = memory.usable_pages
        if not self.names:
            if isinstance(buffers, Mapping):
                raise TypeError("buffers: got a mapping, must be a list: the cache has one group")
            return (pool_for(self.params[0], counts[0], buffers),)
        if buffers is None:
            if memory.huge_pages is not None:
                return slab_pools(self.params, memory)
            return tuple(pool_for(*group, None) for group in zip(self.params, counts, strict=True))
        if memory.huge_pages is not None:
            raise ValueError(
                "buffers: must be None where groups share memory, by available_bytes; give total_num_pages, "
                "and each group has pages of its own"
            )
        if not isinstance(buffers, Mapping) or set(buffers) != set(self.names):
            raise ValueError(f"buffers: must be a mapping of {', '.join(map(repr, self.names))} to lists")
        pools = []
        for name, group, count in zip(self.names, self.params, counts, strict=True):
            if buffers[name] is None:
                raise ValueError(f"buffers[{name!r}]: missing; each group needs a pool")
            try:
                pools.append(pool_for(group, count, buffers[name]))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name!r}: {error}") from error
        check_apart(pools, [f"buffers[{name!r}]" for name in self.names])
        return tuple(pools)

    def by_name(self, values: Sequence[_Value]) -> dict[str, _Value]:
        """One value a group, under its name."""
        return dict(zip(self.names, values, strict=True))
