"""A cache before it is made: how its memory is divided, and which requests it has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pagekeeper.errors import CacheTooSmallError, shown
from pagekeeper.groups import Groups
from pagekeeper.params import FullAttention, KVCacheParams, MultiKVCacheParams
from pagekeeper.params.checks import finite_number, whole_number
from pagekeeper.planning.demand import LONGEST, Demand
from pagekeeper.planning.reuse import reuse_warnings
from pagekeeper.shares import lasting_pages, least_bytes, shares_of, warn_of_max_tokens
from pagekeeper.slabs import GroupMemory

__all__ = ["CachePlan", "calculate_max_num_blocks", "plan_cache"]


@dataclass(frozen=True)
class _Division:
    """How any number of bytes is divided among the groups of a cache."""

    params: KVCacheParams | MultiKVCacheParams
    max_batch_size: int
    demand: Demand
    length_mix: Mapping[int, float] | None
    max_seq_len: int
    """Tokens of the requests that groups which share memory are to have room for, as many as possible."""

    def plan(self, available_bytes: int) -> CachePlan:
        """The plan with so many bytes.

        Raises:
            CacheTooSmallError: there is not one page for each group.
        """
        return CachePlan(*self.memory(available_bytes), available_bytes, self)

    def memory(
        self, available_bytes: int, *, tell: bool = True
    ) -> tuple[GroupMemory, Mapping[str, Fraction] | None]:
        """The groups' memory, and the shares by which they divide it; None where they do not.

        Raises:
            CacheTooSmallError: there is not one page for each group.
        """
        params, groups = self.params, Groups(self.params)
        if not isinstance(params, MultiKVCacheParams) or len(params) == 1:
            return groups.memory(None, available_bytes, self.max_batch_size), None
        held = self.demand.pages(self.max_seq_len)
        if memory := groups.shared_memory(available_bytes, held, tell=tell):
            return memory, None
        if self.length_mix is None:
            shares = shares_of(params)
        else:
            shares = _shares_for(params, available_bytes, self.max_batch_size, self.demand, self.length_mix)
        encoder = self.demand.encoder_length
        return groups.divided_memory(available_bytes, self.max_batch_size, shares, encoder), shares

    def needed_bytes(self, tokens: int, requests: int = 1, above: int = 0) -> int:
        """The least bytes above others that have room for some requests, without `max_tokens`.

        Raises:
            ValueError: none have.
        """
        batch = max(self.max_batch_size, whole_number(requests, "requests"))
        params = replace(self.params, max_tokens=None)
        division = replace(self, params=params, max_batch_size=batch, max_seq_len=tokens)
        pages = [count * requests for count in self.demand.pages(tokens)]

        def enough(size: int) -> bool:
            try:
                return _has_room(division.memory(size, tell=False)[0], pages)
            except CacheTooSmallError:
                return False

        groups = zip(Groups(self.params).params, pages, strict=True)
        least = sum(count * group.bytes_per_page for group, count in groups)
        return least_bytes(max(above, least), enough, f"{requests} requests of {tokens} tokens")


@dataclass(frozen=True)
class CachePlan:
    """How the memory of a cache is divided, and which requests it has room for.

    The counts are those of requests that share nothing, as the ledger itself plans them, with forwards that
    are planned before the results of the one before are known.

    Attributes:
        memory: pages of each group, or huge pages that they share.
        shares: parts by which groups divide the memory that is not set aside; None where they do not.
        available_bytes: bytes that were given for the pools.
    """

    memory: GroupMemory
    shares: Mapping[str, Fraction] | None
    available_bytes: int
    _division: _Division

    @property
    def params(self) -> KVCacheParams | MultiKVCacheParams:
        """The parameters of the cache."""
        return self._division.params

    @property
    def demand(self) -> Demand:
        """What requests take."""
        return self._division.demand

    @property
    def groups(self) -> dict[str, KVCacheParams]:
        """The groups by name; one without a name is called by its type."""
        if isinstance(self.params, MultiKVCacheParams):
            return dict(self.params)
        return {self.params.kind.type: self.params}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What serves worse than users may expect, as sentences: prefixes that are found in large steps."""
        return reuse_warnings(self.groups)

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
        groups = zip(self.groups.values(), self.memory.pages, strict=True)
        return sum((pages + 1) * group.bytes_per_page for group, pages in groups)

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

        Where groups share memory, a plan for that length may have room for more (`planned_for`). Where blocks
        are cached too, a manager from `load_kv_manager` keeps room for requests of its `max_seq_len`. Of
        more, shorter ones, one may have to be preempted on the way.

        Args:
            tokens: the length of each.
        """
        held = self.demand.pages(tokens)
        fits = min(there // pages for there, pages in zip(self.memory.usable_pages, held, strict=True))
        if not self.is_shared:
            return fits
        low, high = 0, fits + 1  # enough, and too many
        while high - low > 1:
            middle = (low + high) // 2
            enough = _has_room(self.memory, [pages * middle for pages in held])
            low, high = (middle, high) if enough else (low, middle)
        return low

    def planned_for(self, tokens: int) -> CachePlan:
        """The plan for requests of another length, which cuts memory that groups share for these.

        Args:
            tokens: their length, as `max_seq_len` of `plan_cache`.
        """
        tokens = whole_number(tokens, "tokens", most=LONGEST)
        if not self.is_shared:
            return self
        return replace(self._division, max_seq_len=tokens).plan(self.available_bytes)

    def longest(self, most: int = LONGEST) -> int:
        """Tokens of the longest request that there is room for, where it is planned for; 0 if there is none.

        Args:
            most: the longest that is asked about.
        """
        whole = [
            (self.available_bytes // group.bytes_per_page if self.is_shared else pages) * group.page_size
            for group, pages in zip(self.groups.values(), self.memory.usable_pages, strict=True)
            if isinstance(group.kind, FullAttention)
        ]
        most = min([whole_number(most, "most", most=LONGEST), *whole])
        if self.planned_for(most).concurrency(most):
            return most
        low, high = 0, most  # one that fits, and one that does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.planned_for(middle).concurrency(middle) else (low, middle)
        return low

    def check(self, max_seq_len: int) -> None:
        """Refuses a cache that has no room for one request of a length, where it is planned for.

        Raises:
            CacheTooSmallError: with the numbers.
        """
        plan = self.planned_for(max_seq_len)
        if plan.concurrency(max_seq_len):
            return
        fits, held = self.longest(max_seq_len), self.pages(max_seq_len)
        told = [f"{pages} of {plan.num_pages[name]} of {name!r}" for name, pages in held.items()]
        (name, one), *others = self.groups.items()
        allowed, limit = (held[name] - 1) * one.page_size, None if others else one.max_tokens
        capped = limit is not None and limit <= allowed
        needed = self._division.needed_bytes(max_seq_len, above=0 if capped else self.available_bytes)
        raise CacheTooSmallError(
            f"max_seq_len={max_seq_len}: one request takes more than there is: {', '.join(told)} pages; "
            + (f"max_tokens={limit}: must be {allowed + 1} at least, or None; " if capped else "")
            + f"with null pages it needs {needed} bytes, and {self.available_bytes} are there; "
            + (f"max_seq_len={fits} fits" if fits else "not one token fits"),
            needed=needed,
            available=self.available_bytes,
            max_seq_len_that_fits=fits,
        )

    def needed_bytes(self, tokens: int, requests: int = 1) -> int:
        """The least bytes of pools that have room for some requests, where they are planned for.

        Args:
            tokens: the length of each.
            requests: how many at a time.

        Raises:
            ValueError: no memory has room for so many.
        """
        return self._division.needed_bytes(tokens, requests)

    def without_surplus(self, tokens: int, requests: int) -> CachePlan:
        """The plan with no more than some requests take, for caches that keep nothing beside them.

        Args:
            tokens: the length of each.
            requests: how many at a time.
        """
        if not self.is_shared:
            held = zip(self.memory.pages, self.demand.pages(tokens), strict=True)
            pages = tuple(min(there, pages * requests) for there, pages in held)
            return replace(self, memory=replace(self.memory, pages=pages))
        plan = self.planned_for(tokens)
        if plan.concurrency(tokens) < requests:
            return plan
        least = min(self.needed_bytes(tokens, requests), self.available_bytes)
        return replace(self._division, max_seq_len=tokens).plan(least)


def _has_room(memory: GroupMemory, pages: Sequence[int]) -> bool:
    """Whether so many pages of each group can be had at a time."""
    if memory.huge_pages is None:
        return all(there >= count for there, count in zip(memory.pages, pages, strict=True))
    return memory.huge_pages >= sum(
        -(-count // ratio) for ratio, count in zip(memory.pages, pages, strict=True)
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
    max_seq_len: int = 1,
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
        max_seq_len: tokens of a request that has to fit. Memory that groups share is cut so that most such
            requests fit at a time; with more of it no fewer do.

    Raises:
        CacheTooSmallError: such a request does not fit; with the bytes that are enough for it.
        ValueError: a number is out of range.
    """
    demand = Demand(params, max_num_input_tokens, num_draft_tokens, encoder_length)
    available_bytes = whole_number(available_bytes, "available_bytes", 0, 2**63 - 1)
    max_batch_size = whole_number(max_batch_size, "max_batch_size", most=2**20)
    mix = None if length_mix is None else _parse_mix(length_mix)
    max_seq_len = whole_number(max_seq_len, "max_seq_len", most=LONGEST)
    if isinstance(params, MultiKVCacheParams) and len(params) > 1:
        warn_of_max_tokens(params.max_tokens)
    division = _Division(params, max_batch_size, demand, mix, max_seq_len)
    try:
        plan = division.plan(available_bytes)
    except CacheTooSmallError as error:
        needed = division.needed_bytes(max_seq_len, above=available_bytes)
        raise CacheTooSmallError(
            f"{error}; max_seq_len={max_seq_len}: one request needs {needed} bytes with null pages",
            needed=needed,
            available=available_bytes,
        ) from None
    plan.check(max_seq_len)
    return plan


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
        CacheTooSmallError: no request fits.
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
