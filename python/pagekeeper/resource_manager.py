"""The cache as a resource of an engine's iterations: prepared for a forward, updated after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from pagekeeper._native import TextContext
from pagekeeper.calls import flag
from pagekeeper.errors import shown
from pagekeeper.manager import PagedKVCacheManager
from pagekeeper.params import whole_number
from pagekeeper.transfers import KVConnectorTransfer

__all__ = ["KVCacheResourceManager", "ScheduledBatch", "ScheduledRequest"]

_log = logging.getLogger("pagekeeper")

_ALL = 2**31 - 1


class ScheduledRequest(Protocol):
    """What the resource manager asks of an engine's request.

    Attributes:
        chunk_tokens: tokens of its prompt that this iteration computes at most; the resource manager sets it
            to those that it does.
    """

    chunk_tokens: int

    @property
    def context(self) -> TextContext:
        """Its tokens, and its handle in the cache."""

    @property
    def new_tokens(self) -> Sequence[int]:
        """What its forward brought: no token within its prompt, then one and the drafts that were right."""

    @property
    def keeps_chunk(self) -> bool:
        """Whether a chunk must not be cut, as where its KV comes from another engine."""


Request_co = TypeVar("Request_co", bound=ScheduledRequest, covariant=True)


class ScheduledBatch(Protocol[Request_co]):
    """What the resource manager asks of the batch of an iteration."""

    @property
    def context_requests(self) -> Sequence[Request_co]:
        """Requests whose prompt is being computed."""

    @property
    def generation_requests(self) -> Sequence[Request_co]:
        """Requests behind their prompt."""


class KVCacheResourceManager:
    """A `PagedKVCacheManager` in the form of a resource manager, as TensorRT-LLM's executor has them.

    An iteration is::

        resources.prepare_resources(batch)                  # and those of all other resource managers
        resources.fit_token_budget(batch, max_num_tokens)
        ...                                                 # the forward
        resources.update_resources(batch)

    Args:
        kv: the cache.
        chunked_prefill: whether prompts may be computed in chunks; if not, `fit_token_budget` only warns.

    Raises:
        TypeError: no cache, or no flag.
    """

    def __init__(self, kv: PagedKVCacheManager, chunked_prefill: bool = True) -> None:
        if not isinstance(kv, PagedKVCacheManager):
            raise TypeError(f"kv: got {shown(kv)}, must be a PagedKVCacheManager")
        self.kv = kv
        self.chunked_prefill = flag(chunked_prefill, "chunked_prefill")

    def prepare_resources(self, batch: ScheduledBatch[ScheduledRequest]) -> list[KVConnectorTransfer]:
        """Claims the requests that are new, and plans the next forward of all.

        Args:
            batch: the requests.

        Returns:
            A transfer for each request, those with a prompt first: see `PagedKVCacheManager.alloc`.

        Raises:
            InsufficientBlocksError: no room now; nothing is changed.
            RequestTooLargeError: never enough room; nothing is changed.
            ValueError: a request that cannot be planned now, or a chunk below 1 token; nothing is changed.
        """
        prompts, others = batch.context_requests, batch.generation_requests
        contexts = [request.context for request in [*prompts, *others]]
        new: list[TextContext] = []
        try:
            for context in contexts[: len(prompts)]:
                if context.slot is None:
                    self.kv.claim(context)
                    new.append(context)
            bounds = [request.chunk_tokens for request in prompts] + [_ALL] * len(others)
            transfers = self.kv.alloc(contexts, num_tokens=bounds) if contexts else []
        except BaseException:
            self.kv.release(new)
            raise
        for request in prompts:
            request.chunk_tokens = request.context.active_length
        return transfers

    def fit_token_budget(self, batch: ScheduledBatch[ScheduledRequest], max_num_tokens: int) -> int:
        """Makes chunks shorter until the batch computes at most so many tokens, if that can be.

        To be called when all resources are prepared: hits may have been fewer than the scheduler had thought.
        Chunks that end their prompt go first, and among them those at the end of the batch; each is cut at
        the end of a block, and keeps one block of progress. No request is taken out of the batch. Warns when
        that is not enough.

        Args:
            batch: the requests that `prepare_resources` planned.
            max_num_tokens: most tokens of the forward.

        Returns:
            The tokens that it computes, drafts included.

        Raises:
            ValueError: a budget below 1.
        """
        budget = whole_number(max_num_tokens, "max_num_tokens")
        generation = [request.context for request in batch.generation_requests]
        prompts = [request for request in batch.context_requests if request.context.active_length]
        total = sum(context.active_length + context.num_draft_tokens for context in generation)
        total += sum(request.context.active_length for request in prompts)
        if total > budget and self.chunked_prefill:
            total -= self._cut(prompts, total - budget)
        if total > budget:
            _log.warning("the batch computes %d tokens, over the budget of %d", total, budget)
        return total

    def _cut(self, prompts: Sequence[ScheduledRequest], excess: int) -> int:
        """Cuts chunks by `excess` tokens or as many as can be; gives by how many."""
        page_size, shed = self.kv.params.page_size, 0
        cut: list[ScheduledRequest] = []
        last = [request for request in reversed(prompts) if _ends_prompt(request.context)]
        others = [request for request in reversed(prompts) if not _ends_prompt(request.context)]
        for request in [*last, *others]:
            if shed >= excess:
                break
            start = request.context.processed_length
            end = start + request.context.active_length
            least = (start // page_size + 1) * page_size
            shorter = max((end - excess + shed) // page_size * page_size, least)
            if shorter < end and not request.keeps_chunk:
                shed += end - shorter
                request.chunk_tokens = shorter - start
                cut.append(request)
        tokens = [request.chunk_tokens for request in cut]
        self.kv.shorten([request.context for request in cut], np.array(tokens, np.int64))
        return shed

    def update_resources(self, batch: ScheduledBatch[ScheduledRequest]) -> None:
        """Delivers the results of the batch: rejected drafts are dropped, and full blocks are shared.

        Args:
            batch: the requests; those that wait for a load have no result, and are passed over.

        Raises:
            ValueError: new tokens that the forward of a request cannot have brought; nothing is changed.
        """
        requests = [*batch.context_requests, *batch.generation_requests]
        requests = [request for request in requests if request.context.active_length]
        tokens = [token for request in requests for token in request.new_tokens]
        counts = [len(request.new_tokens) for request in requests]
        self.kv.step([request.context for request in requests], tokens, counts)

    def free_resources(self, request: ScheduledRequest, pin_on_release: bool = False) -> int | None:
        """Ends a request and gives its pages back.

        Args:
            request: the request.
            pin_on_release: whether its stored blocks stay until they are unpinned.

        Returns:
            The number for `PagedKVCacheManager.unpin`, if they stay.

        Raises:
            ValueError: the request is not claimed.
        """
        pin = self.kv.pin(request.context) if flag(pin_on_release, "pin_on_release") else None
        self.kv.release(request.context)
        return pin

    def get_max_resource_count(self, group: str | None = None) -> int:
        """Pages that there are.

        Args:
            group: as for `PagedKVCacheManager.block_count`.

        Raises:
            ValueError: there is no such group.
        """
        return self.kv.block_count(group=group).total

    def get_needed_resource_to_completion(self, request: ScheduledRequest) -> int:
        """Pages that a claimed request takes until it ends, over all groups.

        See `PagedKVCacheManager.get_remaining_blocks_to_completion`.

        Args:
            request: the request.

        Raises:
            ValueError: the request is not claimed.
        """
        return int(np.sum(self.kv.get_remaining_blocks_to_completion(request.context)))

    def get_request_kv_block_budget(self, request: ScheduledRequest) -> tuple[int, int] | None:
        """Pages that a claimed request holds in the end, and pages that there are.

        See `PagedKVCacheManager.get_request_kv_block_budget`.

        Args:
            request: the request.

        Raises:
            ValueError: the request is not claimed.
        """
        return self.kv.get_request_kv_block_budget(request.context)


def _ends_prompt(context: TextContext) -> bool:
    """Whether the planned forward computes the last token that is known."""
    return context.processed_length + context.active_length == len(context)
