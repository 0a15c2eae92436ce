"""A continuous-batching engine: what a serving stack does around PageKeeper's five calls.

Every step takes all running requests that can decode and, with what is left of the token budget, pieces of
prompts. `claim` and `alloc` find the pages, `runtime_inputs` gives the tables that attention reads,
`step` delivers what was sampled, `release` gives the pages back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from pagekeeper import (
    InsufficientBlocksError,
    PagedKVCacheManager,
    RequestID,
    RequestTooLargeError,
    TextContext,
    TokenBuffer,
)
from pagekeeper.tables import KVCacheInputs, VllmTables

from .model import LayerPages, LayerTables, Model


@dataclass(eq=False)
class Request:
    """One prompt and what became of it; the lower half is the engine's own notes."""

    prompt: list[int]
    max_new_tokens: int
    conversation: int = 0
    turn: int = 0
    rejected: str | None = None
    """Why the engine refused it, if it did."""
    tokens: list[int] = field(init=False)
    """The prompt and every token generated so far."""

    context: TextContext = field(init=False)
    slot: int = -1
    """PageKeeper's index of the claimed request."""
    admission: int = 0
    """How often the request gave up its pages; results of an earlier admission are void."""
    prefill_end: int = 0
    """Tokens to compute before sampling: the prompt and, after a preemption, what was generated before it."""
    planned: int = 0
    """Tokens whose KV is computed or under way in this admission."""
    pending: int = 0
    """Sampled tokens that the host has not seen yet."""
    loading: bool = False
    """Whether blocks of its prompt are on their way from host memory or disk."""
    last_token: torch.Tensor = field(init=False)
    """int64 `[1]` on the device: the newest sampled token, which the next forward reads from there."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.context = TextContext(
            request_id=RequestID(),
            max_length=len(self.prompt) + self.max_new_tokens,
            tokens=TokenBuffer(np.array(self.prompt, dtype=np.int32)),
        )

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is computed or under way."""
        return 0 < self.prefill_end <= self.planned


@dataclass
class Stats:
    """What a run did."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    peak_pages: dict[str, int] = field(default_factory=dict)
    """Of each group of layers; those that see all tokens are "full"."""
    evictions: int = 0
    preemptions: int = 0
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens to prefill, again after a preemption too, that the cache had; 0 to 1."""
        return self.reused_tokens / max(self.reused_tokens + self.prefilled_tokens, 1)


@dataclass(frozen=True)
class Row:
    """A request's part in one forward."""

    request: Request
    admission: int
    samples: bool
    """False for a piece of a prompt that is not the last."""


@dataclass(frozen=True)
class Step:
    """A forward that was launched: `sampled` is int64 `[rows that sample]` on the device."""

    rows: list[Row]
    sampled: torch.Tensor


class Engine:
    """Serves requests greedily on one model and one cache."""

    def __init__(
        self,
        model: Model,
        kv: PagedKVCacheManager,
        *,
        max_batch_size: int,
        max_num_input_tokens: int,
        overlap: bool = False,
    ) -> None:
        """Sets up an idle engine.

        Args:
            model: computes and samples.
            kv: keeps the KV; its pools must have the model's shape.
            max_batch_size: requests in one forward.
            max_num_input_tokens: tokens in one forward; decodes come first, the oldest before the others.
            overlap: plan each step before the tokens of the one before it are known, as engines do that never
                let the device wait for the scheduler.
        """
        self.stats = Stats()
        self._model = model
        self._kv = kv
        # Of each layer: its group, and its place among the layers of that group.
        self._places = sorted(
            (layer, name, index)
            for name, layers in model.config.groups.items()
            for index, layer in enumerate(layers)
        )
        self._pages = [self._layer_pages(name, index) for _, name, index in self._places]
        self._max_batch_size = max_batch_size
        self._max_num_input_tokens = max_num_input_tokens
        self._overlap = overlap
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rejected: list[Request] = []
        self._in_flight: Step | None = None
        self._crowded = False

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or a result has not been delivered yet."""
        return bool(self._waiting or self._running or self._rejected or self._in_flight)

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self.stats.requests += 1
        self.stats.prompt_tokens += len(request.prompt)
        length, longest = len(request.prompt) + request.max_new_tokens, self._model.config.max_positions
        if length > longest:
            self._reject(request, f"{length} tokens are more than the model's {longest} positions")
        else:
            self._waiting.append(request)

    def step(self) -> list[Request]:
        """One iteration of the loop; returns the requests that ended in it, finished or rejected."""
        began = perf_counter()
        batch = self._plan()
        launched = self._launch(batch) if batch else None
        due = launched
        if self._overlap:  # the host now sees the step before this one, while the device works on this one
            due, self._in_flight = self._in_flight, launched
        ended = self._deliver(due) if due else []
        ended += self._rejected
        self._rejected = []
        self.stats.seconds += perf_counter() - began
        return ended

    # Planning: which requests take part, and pages for them.

    def _plan(self) -> list[Request]:
        """The requests of the next forward, in batch order, with pages for it.

        Prompts are served in the order of arrival. One whose blocks are being loaded lets others go ahead.
        """
        loaded = set(self._kv.poll_transfers())
        for request in self._running:
            request.loading = request.loading and request.context.request_id not in loaded
        batch = self._plan_decodes()
        budget = self._max_num_input_tokens - len(batch)
        for request in [one for one in self._running if not one.decoding and not one.loading]:
            budget = self._plan_prompt(request, batch, budget)
        while self._waiting and not self._crowded and budget and len(self._running) < self._max_batch_size:
            request = self._waiting.popleft()
            if not self._kv.contains(request.context):
                request.slot = self._kv.claim(request.context)
            self._running.append(request)
            budget = self._plan_prompt(request, batch, budget)
        for name in self._model.config.groups:
            used, peaks = self._kv.block_count(group=name).used, self.stats.peak_pages
            peaks[name or "full"] = max(peaks.get(name or "full", 0), used)
        return batch

    def _plan_decodes(self) -> list[Request]:
        """Room for the next token of every request past its prompt, if need be at the newest one's cost."""
        while True:
            decodes = [
                request
                for request in self._running
                if request.decoding and len(request.output) + request.pending < request.max_new_tokens
            ]
            decodes = decodes[: self._max_num_input_tokens]
            if not decodes:
                return []
            try:
                self._kv.alloc(_slots(decodes))
                return decodes
            except InsufficientBlocksError:
                self._preempt(self._running[-1])

    def _plan_prompt(self, request: Request, batch: list[Request], budget: int) -> int:
        """Pages for the next piece of a prompt; returns what is left of the token budget."""
        if budget == 0:
            return 0
        try:
            # Where layers have states, no further than to where one is kept.
            chunk = self._kv.chunk_tokens(request.context, num_tokens=budget)
            self._kv.alloc(request.context, num_tokens=chunk)
        except RequestTooLargeError as error:
            self._leave(request)
            self._kv.release(request.context)
            self._reject(request, str(error))
            return budget
        except InsufficientBlocksError:
            if self._running == [request] and self._in_flight:
                return 0  # windows and states give pages back when the step before is delivered
            if self._running == [request] and not self._kv.metrics()["copies_in_flight"]:
                raise  # nothing else holds pages, so waiting would be for ever
            self._preempt(request)
            return 0
        request.loading = request.context.active_length == 0
        if request.loading:
            return budget
        request.prefill_end = len(request.tokens)
        self.stats.prefilled_tokens += request.context.active_length
        batch.append(request)
        return budget - request.context.active_length

    def _preempt(self, request: Request) -> None:
        """Takes back a request's pages; it starts over, often from cached blocks, once another has ended."""
        started = request.planned > 0 or request.loading
        self._leave(request)
        if started:
            self._kv.preempt(request.context)
            self.stats.preemptions += 1
        self._waiting.appendleft(request)
        self._crowded = bool(self._running)

    def _leave(self, request: Request) -> None:
        """Takes a request out of the running ones and voids what is still under way for it."""
        self.stats.reused_tokens += request.context.cached_prefix_length
        self._running.remove(request)
        self._crowded = False
        request.admission += 1
        request.prefill_end = request.planned = request.pending = 0
        request.loading = False

    def _reject(self, request: Request, reason: str) -> None:
        request.rejected = reason
        self._rejected.append(request)
        self.stats.rejected += 1

    def _layer_pages(self, group: str | None, index: int) -> LayerPages:
        """What the layer of that place in its group reads and writes."""
        if group == "mamba":
            return [self._kv.get_buffers(index, name=name, group=group) for name in ("conv", "ssm")]
        return self._kv.get_buffers(index, group=group)

    # One forward, and its results.

    def _launch(self, batch: list[Request]) -> Step:
        """Queues the forward of a planned batch; nothing here waits for a sampled token."""
        inputs = self._kv.runtime_inputs([_slots(batch)], form="vllm")
        tables = [_tables(inputs if name is None else inputs[name]) for _, name, _ in self._places]
        # What is computed is the same in all groups; which pages hold it is not.
        attention = next(table for table in tables if isinstance(table, VllmTables))
        query_starts, ends = attention.query_start_loc.tolist(), attention.seq_lens.tolist()
        rows, tokens, positions = [], [], []
        for request, (first_row, last_row), end in zip(batch, pairwise(query_starts), ends, strict=True):
            start = end - (last_row - first_row)
            if request.decoding:
                tokens.append(request.last_token)
            else:
                tokens.append(torch.tensor(request.tokens[start:end]))
            positions.append(torch.arange(start, end))
            rows.append(Row(request, request.admission, samples=end >= request.prefill_end))
            request.planned = end

        hidden = self._model.forward(torch.cat(tokens), torch.cat(positions), tables, self._pages)
        newest = [last - 1 for last, row in zip(query_starts[1:], rows, strict=True) if row.samples]
        sampled = self._model.logits(hidden[newest]).argmax(-1)
        for index, row in enumerate(row for row in rows if row.samples):
            row.request.last_token = sampled[index : index + 1]
            row.request.pending += 1
        self.stats.steps += 1
        return Step(rows, sampled)

    def _deliver(self, step: Step) -> list[Request]:
        """Hands a step's tokens to the cache and to their requests; returns the requests that finished."""
        sampled = iter(step.sampled.tolist())  # the one place where the host waits for the device
        news = [(row, [next(sampled)] if row.samples else []) for row in step.rows]
        # The whole step is delivered: the cache itself drops what came too late for a request.
        self._kv.step(
            _slots([row.request for row in step.rows]),
            new_tokens=np.array([token for _, tokens in news for token in tokens], dtype=np.int32),
            counts=np.array([len(tokens) for _, tokens in news], dtype=np.int32),
        )
        finished = []
        for row, tokens in news:
            request = row.request
            if row.admission != request.admission:
                continue
            request.tokens += tokens
            request.pending -= len(tokens)
            self.stats.generated_tokens += len(tokens)
            ended = not self._model.config.eos_token_ids.isdisjoint(tokens)
            if ended or len(request.output) == request.max_new_tokens:
                finished.append(request)
        for request in finished:
            self._leave(request)
        if finished:
            self._kv.release(_slots(finished))
        return finished


def _tables(inputs: KVCacheInputs[VllmTables]) -> LayerTables:
    """The tables of one group's layers."""
    return inputs.states[0] if inputs.states else inputs[0]


def _slots(requests: list[Request]) -> npt.NDArray[np.int32]:
    return np.array([request.slot for request in requests], dtype=np.int32)
