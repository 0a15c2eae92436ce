"""The manager's calls for schedulers: what requests will need, and passes over what is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, overload

import numpy as np

from pagekeeper._native import Ledger, PrefixWalk
from pagekeeper.calls import Batch, Request, Requests, flag, is_one
from pagekeeper.counts import PrefixReuseSummary
from pagekeeper.errors import shown
from pagekeeper.groups import Groups
from pagekeeper.params import KVCacheParams, MultiKVCacheParams

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["Blocks", "Demand", "SchedulerCalls", "Summary"]

Blocks: TypeAlias = "int | NDArray[np.int32]"
"""Pages: a number, or int32 of [requests], [groups] or [requests, groups]."""

Demand: TypeAlias = "int | Mapping[str, int] | ArrayLike"
"""Pages of the only group, of each group by name, or of each in the order of the groups."""

Summary: TypeAlias = PrefixReuseSummary | Sequence[PrefixReuseSummary | None] | None
"""What the prompt of a request would reuse, or those of several; None where nobody has asked."""


class SchedulerCalls:
    """The part of `PagedKVCacheManager` that answers schedulers.

    The numbers follow the rules of `alloc`, and asking changes nothing. Pages that are cached and not in use
    are free here as everywhere, so that a stored block which nobody holds costs a page, and one that somebody
    holds costs none. What is found counts for the next `alloc`: later it may have been evicted.
    """

    params: KVCacheParams | MultiKVCacheParams
    _groups: Groups
    _core: Ledger

    @overload
    def get_needed_blocks_one_step(
        self,
        batch: Request,
        two_step_lookahead: bool = False,
        group: str | None = None,
        summary: PrefixReuseSummary | None = None,
        *,
        num_tokens: int | None = None,
    ) -> Blocks: ...

    @overload
    def get_needed_blocks_one_step(
        self,
        batch: Requests,
        two_step_lookahead: bool = False,
        group: str | None = None,
        summary: Sequence[PrefixReuseSummary | None] | None = None,
        *,
        num_tokens: int | ArrayLike | None = None,
    ) -> NDArray[np.int32]: ...

    def get_needed_blocks_one_step(
        self,
        batch: Batch,
        two_step_lookahead: bool = False,
        group: str | None = None,
        summary: Summary = None,
        *,
        num_tokens: int | ArrayLike | None = None,
    ) -> Blocks:
        """Pages that the next forward of each request takes from those that are free.

        Each request of a batch counts for what it adds to those before it, so that the sum is the batch's;
        ask for all at once. A request that waits for a load, or is on its way back, has its pages; one that
        is suspended needs what `resume` takes now, and the forward behind that.

        Args:
            batch: the requests.
            two_step_lookahead: whether to look two forwards ahead, as when the second is planned before the
                first one's results are known.
            group: the group of layers. None is the only one, or all of several.
            summary: what `analyze_prefix_reuse` said of the prompt; for several requests a list with one, or
                None, for each. The answer is the same, and its blocks are not looked for again; they are
                if a block was dropped from the cache since, or the prompt is another.
            num_tokens: most tokens to compute, one number or one a request, as for `alloc`.

        Returns:
            For one request a number, or int32 [groups] where there are several and none is named. For a list
            or an array int32 [requests], or [requests, groups].

        Raises:
            ValueError: a request is not claimed or twice in the batch, no such group, `num_tokens` out of
                range, or not as many summaries as requests.
            TypeError: no summary.
        """
        two_steps = flag(two_step_lookahead, "two_step_lookahead")
        walks = _walks(batch, summary)
        return self._pick(batch, self._core.needed_blocks(batch, num_tokens, two_steps, False, walks), group)

    @overload
    def get_remaining_blocks_to_completion(
        self,
        batch: Request,
        group: str | None = None,
        summary: PrefixReuseSummary | None = None,
        *,
        two_step_lookahead: bool = False,
        num_tokens: int | None = None,
    ) -> Blocks: ...

    @overload
    def get_remaining_blocks_to_completion(
        self,
        batch: Requests,
        group: str | None = None,
        summary: Sequence[PrefixReuseSummary | None] | None = None,
        *,
        two_step_lookahead: bool = False,
        num_tokens: int | ArrayLike | None = None,
    ) -> NDArray[np.int32]: ...

    def get_remaining_blocks_to_completion(
        self,
        batch: Batch,
        group: str | None = None,
        summary: Summary = None,
        *,
        two_step_lookahead: bool = False,
        num_tokens: int | ArrayLike | None = None,
    ) -> Blocks:
        """Pages that each request takes from those that are free until it ends, beside what it has.

        A request ends with its `max_new_tokens`, or at its or the manager's length limit. In a group that
        forgets it counts as many as it holds at one time, at most. A request of a `beam_width` counts for its
        beams until it is forked into them; then each counts for itself. Requests that share pages are counted
        best together: a scheduler that admits a request only if all that run and the new one fit
        (`can_satisfy` of the sum) never runs out, provided that it plans at once what it admits, or resumes
        it, and prompts as soon as they can be.

        The sum is the most that the requests may hold at one time beside what they hold now, however they are
        served: prompts cut anywhere up to `num_tokens`, drafts right or wrong. It is above that by at most a
        page of each group for each beam of a request, and a huge page of each group that shares a slab.

        Args:
            batch: the requests.
            group: the group of layers. None is the only one, or all of several.
            summary: as for `get_needed_blocks_one_step`.
            two_step_lookahead: whether forwards are planned before the results of the last one are known.
            num_tokens: most tokens that any forward will compute, one number or one a request. What a window
                holds depends on it.

        Returns:
            As `get_needed_blocks_one_step`.

        Raises:
            ValueError: as there.
            TypeError: no summary.
        """
        two_steps = flag(two_step_lookahead, "two_step_lookahead")
        walks = _walks(batch, summary)
        return self._pick(batch, self._core.needed_blocks(batch, num_tokens, two_steps, True, walks), group)

    def can_alloc(self, batch: Batch, num_tokens: int | ArrayLike | None = None) -> bool:
        """Whether `alloc` would find room for the batch now, to the page and over all groups.

        Blocks that tiers have are not looked for: `alloc`, which loads them, may lack room for these.

        Args:
            batch: the requests.
            num_tokens: as for `alloc`.

        Raises:
            RequestTooLargeError: never enough room.
            ValueError: what `alloc` refuses for other reasons.
        """
        return self._core.can_alloc(batch, num_tokens)

    def can_satisfy(self, blocks: Demand, at_capacity: bool = False) -> bool:
        """Whether so many pages of each group can be had together, evicting what is not in use.

        Args:
            blocks: pages: a number of the only group, a mapping of groups' names to numbers (0 for others),
                or one number for each group in their order.
            at_capacity: whether nothing is in use then.

        Raises:
            ValueError: no such group, or numbers that are out of range or do not match the groups.
        """
        return self._core.can_satisfy(self._demand(blocks), flag(at_capacity, "at_capacity"))

    @overload
    def reuse_adjusted_compute(self, batch: Request, num_tokens: int | None = None) -> int: ...

    @overload
    def reuse_adjusted_compute(
        self, batch: Requests, num_tokens: int | ArrayLike | None = None
    ) -> NDArray[np.int32]: ...

    def reuse_adjusted_compute(
        self, batch: Batch, num_tokens: int | ArrayLike | None = None
    ) -> int | NDArray[np.int32]:
        """What the next forward of each request costs, in tokens.

        A chunk that is not the last of its prompt costs its size, since what is stored moves it; the last
        costs what is left of the prompt without the tokens that are stored
        (`TextContext.estimated_reusable_tokens`). After the prompt it is a token and the drafts; 0 when the
        request has all its tokens.

        Args:
            batch: the requests.
            num_tokens: most tokens to compute, one number or one a request.

        Returns:
            A number for one request, int32 [requests] for a list or an array.

        Raises:
            ValueError: a request is not claimed or twice in the batch, or `num_tokens` is out of range.
        """
        costs = self._core.reuse_adjusted_compute(batch, num_tokens)
        return int(costs[0]) if is_one(batch) else costs

    @property
    def chunk_alignment_tokens(self) -> int:
        """Tokens at whose multiples all groups with states take snapshots; 0 if there are none.

        A chunk of a prompt that ends elsewhere leaves none. `chunk_tokens` says where the next should end.
        """
        return self.params.chunk_alignment_tokens

    @overload
    def chunk_tokens(self, batch: Request, num_tokens: int | None = None) -> int: ...

    @overload
    def chunk_tokens(
        self, batch: Requests, num_tokens: int | ArrayLike | None = None
    ) -> NDArray[np.int32]: ...

    def chunk_tokens(
        self, batch: Batch, num_tokens: int | ArrayLike | None = None
    ) -> int | NDArray[np.int32]:
        """Tokens that the next forward of each request should compute, to be given to `alloc`.

        As many as it may, but no more than to the next place where snapshots of states are taken: a multiple
        of `chunk_alignment_tokens`, or the last page boundary of the prompt. A longer chunk is right too, and
        leaves no snapshot on its way. Without groups of states it is what the forward would compute anyway.
        What is stored is counted on, as in all answers: call `alloc` next.

        Args:
            batch: the requests.
            num_tokens: most tokens to compute, one number or one a request.

        Returns:
            A number for one request, int32 [requests] for a list or an array. 0 for a request that computes
            nothing more.

        Raises:
            ValueError: a request is not claimed or twice in the batch, or `num_tokens` is out of range.
        """
        chunks = self._core.chunk_tokens(batch, num_tokens)
        return int(chunks[0]) if is_one(batch) else chunks

    def get_request_kv_block_budget(self, ctx: Request) -> tuple[int, int] | None:
        """Pages that a request holds in the end, all its beams together, and pages that there are.

        With more of the first than of the second it can never be served, and is best rejected at once. None
        where two numbers do not say that: unless one group keeps all tokens and every window is as long as
        `max_seq_len`, and for a request without a limit.

        Args:
            ctx: a claimed request.

        Raises:
            ValueError: the request is not claimed.
        """
        return self._core.block_budget(ctx)

    def shorten(self, batch: Batch, num_tokens: int | ArrayLike) -> None:
        """Makes chunks of prompts shorter that `alloc` has planned and whose forward was not begun.

        For schedulers that have counted on more hits than there were. `active_length` says how long they are;
        the pages stay with the requests, whose next chunks need them.

        Args:
            batch: the requests.
            num_tokens: tokens to compute instead, 1 to those that are planned, for each request.

        Raises:
            ValueError: a request is not claimed, twice in the batch, not planned in the open step, or behind
                its prompt; numbers that are out of range, or not as many as requests.
        """
        self._core.shorten(batch, num_tokens)

    # Passes.

    def start_scheduling(self, now: float | None = None) -> None:
        """Opens a scheduling pass, in which all is free that is free now.

        It costs the same whatever the cache holds. A pass says what would be free if some requests were
        preempted and others got pages; nothing is changed by it. It ends when a request is planned, delivered
        or let go: open another then.

        Args:
            now: seconds of the clock of `begin_step`; None leaves it as it was.

        Raises:
            ValueError: `now` is before an earlier time.
        """
        self._core.start_scheduling(now)

    def scheduling_reserve(self, ctx: Request, blocks: Demand, group: str | None = None) -> bool:
        """Sets pages aside for a request in the open pass, if they are there.

        Args:
            ctx: the request.
            blocks: pages, as for `can_satisfy`; of `group`, if one is named.
            group: the group of layers that a number is of.

        Returns:
            Whether they were there; if not, nothing is set aside.

        Raises:
            ValueError: the request is not claimed, no pass is open, or as for `can_satisfy`.
        """
        return self._core.scheduling_reserve(ctx, self._demand(blocks, group))

    def scheduling_remove(self, ctx: Request) -> None:
        """Counts the pages that a request has reserved, and those that it holds, as free in the open pass.

        What others hold too is free when the last of them is removed. Removing it again changes nothing.

        Args:
            ctx: the request.

        Raises:
            ValueError: the request is not claimed, or no pass is open.
        """
        self._core.scheduling_remove(ctx)

    def scheduling_has_free_blocks(self, blocks: Demand, group: str | None = None) -> bool:
        """Whether so many pages are free in the open pass, beside those that are reserved.

        Args:
            blocks: pages, as for `can_satisfy`; of `group`, if one is named.
            group: the group of layers that a number is of.

        Raises:
            ValueError: no pass is open, or as for `can_satisfy`.
        """
        return self._core.scheduling_has_free_blocks(self._demand(blocks, group))

    def _pick(self, batch: Batch, blocks: NDArray[np.int32], group: str | None) -> Blocks:
        """The answer for one request or for several, of one group or of all."""
        columns: int | slice = slice(None)
        if group is not None:
            columns = self._groups.index(group)
        elif len(self._groups.params) == 1:
            columns = 0
        if not is_one(batch):
            return blocks[:, columns]
        return blocks[0] if isinstance(columns, slice) else int(blocks[0, columns])

    def _demand(self, blocks: Demand, group: str | None = None) -> ArrayLike:
        """Pages of each group."""
        names = self._groups.names
        if group is not None:
            index = self._groups.index(group)
            if isinstance(blocks, bool) or not isinstance(blocks, int | np.integer):
                raise ValueError(f"blocks={shown(blocks)}: must be a number of pages of group {group!r}")
            return [int(blocks) if index == at else 0 for at in range(len(self._groups.params))]
        if isinstance(blocks, Mapping):
            unknown = [name for name in blocks if name not in names]
            if unknown:
                raise ValueError(f"blocks: names the group {shown(unknown[0])}, which there is not")
            return [blocks.get(name, 0) for name in names]
        return blocks


def _walks(batch: Batch, summary: Summary) -> list[PrefixWalk | None] | None:
    """Where the blocks of each request were found, as far as a summary says."""
    if summary is None:
        return None
    summaries = [summary] if is_one(batch) else summary
    if not isinstance(summaries, list | tuple):
        raise TypeError(f"summary: got {shown(summary)}, must be a list with one for each request")
    walks: list[PrefixWalk | None] = []
    for one in summaries:
        if not isinstance(one, PrefixReuseSummary | None):
            raise TypeError(f"summary: got {shown(one)}, must be what analyze_prefix_reuse gives")
        walks.append(one.walk if one else None)
    return walks
