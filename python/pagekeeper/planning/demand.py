"""How many pages a request takes: what the ledger itself plans with, asked before there is a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagekeeper._native import Ledger, TextContext
from pagekeeper.groups import Groups
from pagekeeper.params import CrossAttention, KVCacheParams, MultiKVCacheParams, whole_number
from pagekeeper.slabs import GroupMemory

__all__ = ["LONGEST", "Demand"]

LONGEST = 2**24
"""Most tokens of a request, or of its encoder, that are planned for: more would only take time and memory."""


class Demand:
    """Pages that a request holds at one time, at most, in each group of a cache.

    It is alone, finds nothing that is cached, and forwards are planned before the results of the one before
    are known. However its tokens are divided into prompt and output, it holds no more.

    Args:
        params: those of the cache.
        max_num_input_tokens: most tokens of one request that one forward computes. None: no limit.
        num_draft_tokens: draft tokens that each of its decode steps verifies.
        encoder_length: tokens that an encoder makes for it. Groups of cross attention need it.

    Raises:
        ValueError: a number is out of range, drafts are not there beside one of the groups, or the encoder's
            tokens are missing.
    """

    def __init__(
        self,
        params: KVCacheParams | MultiKVCacheParams,
        max_num_input_tokens: int | None = None,
        num_draft_tokens: int = 0,
        encoder_length: int | None = None,
    ) -> None:
        self._groups = Groups(params)
        self._chunk = max_num_input_tokens
        if max_num_input_tokens is not None:
            self._chunk = whole_number(max_num_input_tokens, "max_num_input_tokens")
        self._drafts = whole_number(num_draft_tokens, "num_draft_tokens", 0, 255)
        self.encoder_length = encoder_length
        if encoder_length is None and any(isinstance(kind, CrossAttention) for kind in self._groups.kinds):
            raise ValueError("encoder_length: missing; pages of cross attention are for an encoder's tokens")
        if encoder_length is not None:
            self.encoder_length = whole_number(encoder_length, "encoder_length", most=LONGEST)
        self._known: dict[int, tuple[int, ...]] = {}

    def pages(self, tokens: int) -> tuple[int, ...]:
        """Pages in each group, in their order, of a request that ends with so many tokens.

        Raises:
            ValueError: `tokens` is no number from 1 to `LONGEST`.
        """
        tokens = whole_number(tokens, "tokens", most=LONGEST)
        if tokens not in self._known:
            prompts = {max(tokens - 1, 1), 1}
            held = [self._held(np.zeros(prompt, np.int32), tokens) for prompt in prompts]
            self._known[tokens] = tuple(max(of_group) for of_group in zip(*held, strict=True))
        return self._known[tokens]

    def _held(self, prompt: Any, tokens: int) -> list[int]:
        params = self._groups.params[0]
        enough = max(tokens + 4 * self._drafts, self.encoder_length or 0) // params.page_size + 2
        memory = GroupMemory((min(enough, 2**31 - 1),) * len(self._groups.params))
        core = Ledger(
            page_size=params.page_size,
            groups=self._groups.native(memory),
            huge_pages=None,
            request_pages=[],
            max_batch_size=1,
            prefix_caching=params.enable_prefix_caching,
            partial_reuse=False,
            copy_on_partial_reuse=False,
            store_partial_tails=False,
            algo="ahash64",
            seed=None,
            on_duplicate="private",
            reserve="chunk",
            policy=params.eviction_policy.value,
            priority=params.default_retention_priority,
            max_seq_len=max(tokens, len(prompt)),
            max_num_input_tokens=self._chunk,
            guard_secret=None,
            tier=None,
            write_policy="write_through",
            min_hits=1,
            min_priority=None,
            event_buffer_max_size=0,
        )
        context = TextContext(
            "request",
            prompt,
            max(tokens, len(prompt)),
            no_read=True,
            num_draft_tokens=self._drafts,
            encoder_length=self.encoder_length,
        )
        core.claim(context)
        return [int(pages) for pages in core.needed_blocks(context, None, True, True)[0]]
