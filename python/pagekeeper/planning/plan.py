"""A cache before it is made: how its memory is divided, and which requests it has room for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from pagekeeper.errors import CacheTooSmallError, shown
from pagekeeper.groups import Groups
from pagekeeper.params import FullAttention, KVCacheParams, MultiKVCacheParams
from pagekeeper.params.checks import finite_number, whole_number
from pagekeeper.planning.demand import LONGEST, Demand
from pagekeeper.shares import lasting_pages, shares_of, warn_of_max_tokens
from pagekeeper.slabs import GroupMemory

__all__ = ["CachePlan", "calculate_max_num_blocks", "plan_cache"]


@dataclass(frozen=True)
class CachePlan:
    """How the memory of a cache is divided, and which requests it has room for.

    The counts are those of requests that share nothing, as the ledger itself plans them, with forwards that
    are planned before the results of the one before are known.

    Attributes:
        params: those of the cache.
        memory: pages of each group, or huge pages that they share.
        available_bytes: bytes that were given for the pools.
        demand: what requests take.
        shares: parts by which groups divide the memory that is not set aside; None where they do not.
    """

    params: KVCacheParams | MultiKVCacheParams
    memory: GroupMemory
    available_bytes: int
    demand: Demand
    shares: Mapping[str, Fraction] | None = None

    @property
    def groups(self) -> dict[str, KVCacheParams]:
        """The groups by name; one without a name is called by its type."""
        if isinstance(self.params, MultiKVCacheParams):
            return dict(self.params)
        return {self.params.kind.type: self.params}

    @property
    def num_pages(self) -> dict[str, int]:
        """Usable pages of each group; where groups share memory, those it has when no other has any."""
        return dict(zip(self.groups, self.memory.usable_pages, strict=True))

    @property
    def is_shared(self) -> bool:
        """Whether groups share memory."""
        return self.memory.huge_pages is not None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools, null pages included."""
        if self.memory.huge_pages is not None:
            return (self.memory.huge_pages + 1) * self.memory.huge_bytes
        return sum(self._bytes_with_null(self.memory.pages))

    def pages(self, tokens: int) -> dict[str, int]:
        """Pages that a request holds at one time in each group, at most.

        Args:
            tokens: its length, prompt and output, at least 1.
        """
        return dict(zip(self.groups, self.demand.pages(tokens), strict=True))

    def fixed_bytes(self, tokens: int) -> int:
        """Bytes of a request that do not grow once windows are full: of these, states, an encoder's pages.

        Beside them it has `params.bytes_per_token_kept` bytes a token, in whole pages.

        Args:
            tokens: its length.
        """
        held = zip(self.groups.values(), self.demand.pages(tokens), strict=True)
        return sum(
            pages * group.bytes_per_page for group, pages in held if not isinstance(group.kind, FullAttention)
        )

    def concurrency(self, tokens: int) -> int:
        """Requests that there is room for at a time.

        Where groups share memory, and blocks are cached that lie scattered over it, one may have to be
        preempted on the way.

        Args:
            tokens: the length of each.
        """
        held = self.demand.pages(tokens)
        fits = min(there // pages for there, pages in zip(self.memory.usable_pages, held, strict=True))
        if self.memory.huge_pages is None:
            return fits
        low, high = 0, fits + 1  # enough, and too many
        while high - low > 1:
            middle = (low + high) // 2
            enough = self._huge_pages(held, middle) <= self.memory.huge_pages
            low, high = (middle, high) if enough else (low, middle)
        return low

    def longest(self, most: int = LONGEST) -> int:
        """Tokens of the longest request that there is room for; 0 if there is none.

        Args:
            most: the longest that is asked about.
        """
        groups = zip(self.groups.values(), self.memory.usable_pages, strict=True)
        whole = [pages * group.page_size for group, pages in groups if isinstance(group.kind, FullAttention)]
        most = min([most, *whole])
        if self.concurrency(most):
            return most
        low, high = 0, most  # one that fits, and one that does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.concurrency(middle) else (low, middle)
        return low

    def check(self, max_seq_len: int) -> None:
        """Refuses a cache that has no room for one request of a length.

        Raises:
            CacheTooSmallError: with the numbers.
        """
        if self.concurrency(max_seq_len):
            return
        fits, needed = self.longest(max_seq_len), self.needed_bytes(max_seq_len)
        held = [
            f"{pages} of {self.num_pages[name]} of {name!r}"
            for name, pages in self.pages(max_seq_len).items()
        ]
        one = next(iter(self.groups.values()))
        capped = f" (max_tokens={one.max_tokens})" if one.max_tokens is not None and len(held) == 1 else ""
        raise CacheTooSmallError(
            f"max_seq_len={max_seq_len}: one request takes more than there is: "
            f"{', '.join(held)} pages{capped}; "
            f"with null pages it needs {needed} bytes, and {self.available_bytes} are there; "
            + (f"max_seq_len={fits} fits" if fits else "not one token fits"),
            needed=needed,
            available=self.available_bytes,
            max_seq_len_that_fits=fits,
        )

    def needed_bytes(self, tokens: int, requests: int = 1) -> int:
        """Bytes of pools that have room for some requests, divided as these are.

        Args:
            tokens: the length of each.
            requests: how many at a time.
        """
        held = self.demand.pages(tokens)
        if self.memory.huge_pages is not None:
            return (self._huge_pages(held, requests) + 1) * self.memory.huge_bytes
        wanted = dict(
            zip(self.groups, self._bytes_with_null([pages * requests for pages in held]), strict=True)
        )
        if self.shares is None:
            return sum(wanted.values())
        encoder = self.demand.encoder_length
        lasting = {name for name, group in self.groups.items() if lasting_pages(group, encoder) is not None}
        divided = {name: share for name, share in self.shares.items() if name not in lasting}
        whole = sum(divided.values())
        rest = max((wanted[name] * whole / share for name, share in divided.items()), default=0)
        reserved = dict(zip(self.groups, self._bytes_with_null(self.memory.pages), strict=True))
        return math.ceil(rest) + sum(
            max(wanted[name], reserved[name]) for name in wanted if name not in divided
        )

    def without_surplus(self, tokens: int, requests: int) -> CachePlan:
        """The plan with no more than some requests take, for caches that keep nothing beside them.

        Args:
            tokens: the length of each.
            requests: how many at a time.
        """
        held = self.demand.pages(tokens)
        if self.memory.huge_pages is None:
            pages = tuple(
                min(there, pages * requests) for there, pages in zip(self.memory.pages, held, strict=True)
            )
            return replace(self, memory=replace(self.memory, pages=pages))
        least = self.needed_bytes(tokens, requests)
        if least >= self.available_bytes:
            return self
        memory = Groups(self.params).shared_memory(least)
        smaller = self if memory is None else replace(self, memory=memory, available_bytes=least)
        return smaller if smaller.concurrency(tokens) >= requests else self  # huge pages may differ in size

    def _bytes_with_null(self, pages: tuple[int, ...] | list[int]) -> list[int]:
        groups = zip(self.groups.values(), pages, strict=True)
        return [(count + 1) * group.bytes_per_page for group, count in groups]

    def _huge_pages(self, held: tuple[int, ...], requests: int) -> int:
        return sum(
            -(-pages * requests // ratio) for pages, ratio in zip(held, self.memory.pages, strict=True)
        )


def plan_cache(
    params: KVCacheParams | MultiKVCacheParams,
    available_bytes: int,
    max_batch_size: int,
    *,
    max_num_input_tokens: int | None = None,
    num_draft_tokens: int = 0,
    encoder_length: int | None = None,
    length_mix: Mapping[int, float] | None = None,
) -> CachePlan:
    """How a cache of so many bytes is divided, and what fits in it. No memory is taken.

    Args:
        params: those of the cache.
        available_bytes: bytes for the pools, null pages included.
        max_batch_size: requests at a time.
        max_num_input_tokens: most tokens of one request that one forward computes. None: no limit; windows
            hold a whole prompt then, while it is computed.
        num_draft_tokens: draft tokens that decode steps verify.
        encoder_length: tokens that an encoder makes for each request. Groups of cross attention need it.
        length_mix: lengths of requests in tokens, and how often each comes. Groups with memory of their own
            divide it so that most requests of this mix fit at a time. None: by `window_size_shares`.

    Raises:
        CacheTooSmallError: there is not one page for each group.
        ValueError: a number is out of range.
    """
    groups = Groups(params)
    demand = Demand(params, max_num_input_tokens, num_draft_tokens, encoder_length)
    available_bytes = whole_number(available_bytes, "available_bytes", 0, 2**63 - 1)
    max_batch_size = whole_number(max_batch_size, "max_batch_size", most=2**20)
    mix = None if length_mix is None else _parse_mix(length_mix)
    if not isinstance(params, MultiKVCacheParams) or len(params) == 1:
        return CachePlan(
            params, groups.memory(None, available_bytes, max_batch_size), available_bytes, demand
        )
    warn_of_max_tokens(params.max_tokens)
    if memory := groups.shared_memory(available_bytes):
        return CachePlan(params, memory, available_bytes, demand)
    shares = shares_of(params)
    if mix is not None:
        shares = _shares_for(params, available_bytes, max_batch_size, demand, mix)
    memory = groups.divided_memory(available_bytes, max_batch_size, shares, encoder_length)
    return CachePlan(params, memory, available_bytes, demand, shares)


def calculate_max_num_blocks(
    params: MultiKVCacheParams,
    available_bytes: int,
    max_batch_size: int,
    *,
    length_mix: Mapping[int, float] | None = None,
    max_num_input_tokens: int | None = None,
    num_draft_tokens: int = 0,
    encoder_length: int | None = None,
) -> dict[str, int]:
    """Usable pages of each group, where all have memory of their own: `total_num_pages` of a manager.

    They divide it equally, by `window_size_shares`, by the environment's `PAGEKEEPER_WINDOW_SIZE_SHARES`, or
    for a mix of lengths. Groups whose requests have one page for life, as of states without reuse, get one
    for each request first.

    Args:
        params: the groups, whatever their `layout`.
        available_bytes: as for `plan_cache`, and so are the others.
        max_batch_size: requests at a time.
        length_mix: lengths of requests and their weights.
        max_num_input_tokens: most tokens of one request that one forward computes.
        num_draft_tokens: draft tokens that decode steps verify.
        encoder_length: tokens that an encoder makes for each request.

    Raises:
        CacheTooSmallError: there is not one page for each group.
        ValueError: a number is out of range.
    """
    plan = plan_cache(
        replace(params, layout="paged"),
        available_bytes,
        max_batch_size,
        length_mix=length_mix,
        max_num_input_tokens=max_num_input_tokens,
        num_draft_tokens=num_draft_tokens,
        encoder_length=encoder_length,
    )
    return plan.num_pages


def _parse_mix(given: object) -> dict[int, float]:
    mix = dict(given) if isinstance(given, Mapping) else {}
    lengths = {
        whole_number(length, "length_mix", most=LONGEST): finite_number(weight)
        for length, weight in mix.items()
    }
    if not lengths or not all(weight >= 0 for weight in lengths.values()) or sum(lengths.values()) == 0:
        raise ValueError(
            f"length_mix={shown(given)}: must be a mapping of tokens to weights from 0, one above 0"
        )
    return lengths


def _shares_for(
    params: MultiKVCacheParams,
    available_bytes: int,
    max_batch_size: int,
    demand: Demand,
    mix: Mapping[int, float],
) -> dict[str, Fraction]:
    """Shares with which equally many requests of a mix fit in each group: more of one group would serve none.

    Each group has room for the longest of them.
    """
    lasting = {name: lasting_pages(group, demand.encoder_length) for name, group in params.items()}
    static = {name: max_batch_size * pages for name, pages in lasting.items() if pages is not None}
    rest = available_bytes - sum((pages + 1) * params[name].bytes_per_page for name, pages in static.items())
    columns = dict(zip(params, zip(*map(demand.pages, mix), strict=True), strict=True))
    null = {name: params[name].bytes_per_page for name in params if name not in static}
    mean = {
        name: sum(pages * Fraction(weight) for pages, weight in zip(columns[name], mix.values(), strict=True))
        * params[name].bytes_per_page
        for name in null
    }
    least = {name: max(columns[name]) * size for name, size in null.items()}
    sizes: dict[str, Fraction] = {}
    open_bytes, open_groups = Fraction(rest - sum(null.values())), set(null)
    while (
        open_groups
    ):  # who has less than the longest request takes gets that, and the others divide the rest
        whole = sum(mean[name] for name in open_groups)
        for name in open_groups:
            sizes[name] = open_bytes * mean[name] / whole
        short = {name for name in open_groups if sizes[name] < least[name]}
        if not short:
            break
        for name in short:
            sizes[name] = Fraction(least[name])
        open_bytes -= sum(least[name] for name in short)
        open_groups -= short
    return {name: Fraction(0) for name in static} | {name: sizes[name] + null[name] for name in null}
