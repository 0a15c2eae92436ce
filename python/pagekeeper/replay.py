"""Drive the manager with a trace's requests, as a serving loop would, and measure what comes of it.

No model runs: the pages have no memory behind them, and the tokens that a model would sample are the trace's.
Requests are served in the order of the trace, so many at a time: a prompt in one piece, then a token a round
for the whole batch. When pages run out, the newest request gives up its own and starts over later.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagekeeper import (
    EvictionPolicy,
    InsufficientBlocksError,
    MHAKVCacheParams,
    PagedKVCacheManager,
    RequestID,
    TextContext,
)
from pagekeeper.params import HashAlgorithm
from pagekeeper.traces import TraceRequest

__all__ = ["POOL_TOKENS", "CallTimes", "ReplayResult", "ReplaySettings", "replay"]

POOL_TOKENS = 1_000_000
"""Tokens that a pool holds unless its size is given."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """The cache and the server that a trace is replayed on.

    Attributes:
        page_size: tokens of a block and its page, 1 to 2**20.
        pages: pages in the pool, 1 to 2**26; by default as many of the default size as hold `POOL_TOKENS`.
        concurrency: most requests served at a time, 1 to 2**16.
        hash_algo: "ahash64", "sha256" or "sha256_64".
        eviction_policy: which cached block gives way to a new one.
        prefix_caching: whether requests reuse what others computed.

    Raises:
        ValueError: a setting is out of its range.
    """

    page_size: int = 128
    pages: int = POOL_TOKENS // page_size
    concurrency: int = 32
    hash_algo: HashAlgorithm = "ahash64"
    eviction_policy: EvictionPolicy = EvictionPolicy.PRIORITY_LRU
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, most in {"page_size": 2**20, "pages": 2**26, "concurrency": 2**16}.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 1 to {most}")


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """CPU time that the calling thread spent in the manager, for one kind of call.

    Attributes:
        calls: how many there were.
        median_us: the median of one, in microseconds; 0 without any.
        total_ms: all of them, in milliseconds.
    """

    calls: int
    median_us: float
    total_ms: float

    @classmethod
    def of(cls, nanoseconds: array[int]) -> CallTimes:
        """Summarise the durations of single calls."""
        median = statistics.median(nanoseconds) if nanoseconds else 0
        return cls(calls=len(nanoseconds), median_us=median / 1e3, total_ms=sum(nanoseconds) / 1e6)


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What a replay did. A prompt is counted once, when its request is first admitted.

    Attributes:
        settings: the cache and the server.
        requests: requests served to their end.
        rejected: requests that the pool could never hold; counted nowhere else.
        prompt_tokens: tokens of the prompts.
        hit_tokens: those of them that were in the cache.
        prompt_blocks: blocks of the prompts, partial last ones included.
        hit_blocks: those of them that were in the cache.
        output_tokens: tokens generated.
        decode_steps: rounds of the running batch.
        preemptions: how often a request gave up its pages.
        resumed_hit_tokens: tokens that preempted requests found in the cache when they started over.
        evictions: cached blocks that gave way to others.
        peak_pages: most pages held by running requests at the end of a round.
        admit: claim, alloc, tables and step of a prompt.
        step: alloc, tables and step of the running batch.
        release: release of the requests that finished together.
        wall_s: duration in seconds, the making of tokens included.
    """

    settings: ReplaySettings
    requests: int
    rejected: int
    prompt_tokens: int
    hit_tokens: int
    prompt_blocks: int
    hit_blocks: int
    output_tokens: int
    decode_steps: int
    preemptions: int
    resumed_hit_tokens: int
    evictions: int
    peak_pages: int
    admit: CallTimes
    step: CallTimes
    release: CallTimes
    wall_s: float

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens found in the cache, 0 to 1; 0 without prompts."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Prompt blocks found in the cache, 0 to 1; 0 without prompts."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything, rates included, as plain values that JSON knows."""
        return asdict(self) | {"token_hit_rate": self.token_hit_rate, "block_hit_rate": self.block_hit_rate}


def replay(
    requests: Iterable[TraceRequest],
    settings: ReplaySettings,
    on_request: Callable[[], object] = lambda: None,
) -> ReplayResult:
    """Serve requests in order on a new manager.

    Args:
        requests: read one at a time, as there is room.
        settings: the cache and the server.
        on_request: called whenever a request was served or rejected.

    Raises:
        TraceError: `requests` come from a trace that cannot be read.
    """
    server = _Server(settings, on_request)
    started = time.perf_counter()
    server.serve(iter(requests))
    return server.result(time.perf_counter() - started)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request that was taken up."""

    context: TextContext
    session: str | None
    output: npt.NDArray[np.int32]
    slot: int | None = None  # from the first attempt to admit it
    sampled: int = 0  # tokens of the output that are known
    admission_ns: int = 0  # spent on attempts so far


class _Server:
    """One manager, and the requests that wait for it and run on it."""

    def __init__(self, settings: ReplaySettings, on_request: Callable[[], object]) -> None:
        params = MHAKVCacheParams(
            dtype="float32",
            n_kv_heads=1,
            head_dim=1,
            num_layers=1,
            page_size=settings.page_size,
            enable_prefix_caching=settings.prefix_caching,
            kv_hash_algo=settings.hash_algo,
            eviction_policy=settings.eviction_policy,
        )
        self.manager = PagedKVCacheManager(
            params=params,
            total_num_pages=settings.pages,
            max_batch_size=settings.concurrency,
            allocate_pools=False,
        )
        self.settings = settings
        self.on_request = on_request
        self.waiting: deque[_Sequence] = deque()  # preempted ones, then the next of the trace
        self.running: list[_Sequence] = []  # oldest first
        self.out_of_pages = False  # until a request finishes
        self.rejected = self.served = self.output_tokens = self.peak_pages = 0
        self.admit_ns, self.step_ns, self.release_ns = array("q"), array("q"), array("q")

    def serve(self, requests: Iterator[TraceRequest]) -> None:
        """Admit and decode in turns, until everything is served."""
        while True:
            self._admit(requests)
            if not self.running:
                return
            self._decode()
            self._finish()

    def result(self, wall_s: float) -> ReplayResult:
        counted = self.manager.metrics()
        return ReplayResult(
            settings=self.settings,
            requests=self.served,
            rejected=self.rejected,
            prompt_tokens=int(counted["prompt_tokens"]),
            hit_tokens=int(counted["reused_tokens"]),
            prompt_blocks=int(counted["context_blocks"]),
            hit_blocks=int(counted["reused_blocks"]),
            output_tokens=self.output_tokens,
            decode_steps=len(self.step_ns),
            preemptions=int(counted["preemptions"]),
            resumed_hit_tokens=int(counted["late_reused_tokens"]),
            evictions=int(counted["evictions"]),
            peak_pages=self.peak_pages,
            admit=CallTimes.of(self.admit_ns),
            step=CallTimes.of(self.step_ns),
            release=CallTimes.of(self.release_ns),
            wall_s=wall_s,
        )

    def _admit(self, requests: Iterator[TraceRequest]) -> None:
        """Admit waiting requests in order, as long as there is room and the first one's session is idle."""
        while len(self.running) < self.settings.concurrency and not self.out_of_pages:
            if not self.waiting and not self._take_up(requests):
                return
            first = self.waiting[0]
            if first.session is not None and any(first.session == other.session for other in self.running):
                return
            if self._prefill(first):
                self.running.append(self.waiting.popleft())
                self._finish()

    def _take_up(self, requests: Iterator[TraceRequest]) -> bool:
        """Let the next request wait that the pool can serve to its end; False at the end of the trace."""
        for request in requests:
            # The last token of the output is never computed with, so it needs no page.
            computed = len(request.prompt) + max(len(request.output) - 1, 0)
            if computed > self.settings.pages * self.settings.page_size:
                self.rejected += 1
                self.on_request()
                continue
            context = TextContext(
                request_id=RequestID(),
                max_length=computed + 1,
                tokens=request.prompt.array(),
                cache_salt=request.salt,
            )
            self.waiting.append(_Sequence(context, request.session, request.output.array()))
            return True
        return False

    def _prefill(self, sequence: _Sequence) -> bool:
        """Compute all known tokens and sample the next; False when pages are short."""
        token = sequence.output[sequence.sampled :][:1]
        started = time.thread_time_ns()
        try:
            if sequence.slot is None:
                sequence.slot = self.manager.claim(sequence.context)
            slots = np.array([sequence.slot], np.int32)
            self.manager.alloc(slots)
            self.manager.runtime_inputs([slots])
            self.manager.step(slots, token if len(token) else None)
        except InsufficientBlocksError:
            if not self.running:
                raise
            self.out_of_pages = True
            return False
        finally:
            sequence.admission_ns += time.thread_time_ns() - started
        sequence.sampled += len(token)
        self.admit_ns.append(sequence.admission_ns)
        sequence.admission_ns = 0
        return True

    def _decode(self) -> None:
        """Compute the newest token of every running request and sample the next, preempting where needed."""
        slots = np.array([sequence.slot for sequence in self.running], np.int32)
        tokens = np.array([sequence.output[sequence.sampled] for sequence in self.running], np.int32)
        started = time.thread_time_ns()
        while True:
            try:
                self.manager.alloc(slots)
                break
            except InsufficientBlocksError:
                if len(slots) == 1:
                    raise
                self.manager.preempt(slots[-1:])
                slots, tokens = slots[:-1], tokens[:-1]
        self.manager.runtime_inputs([slots])
        self.manager.step(slots, tokens)
        self.step_ns.append(time.thread_time_ns() - started)
        while len(self.running) > len(slots):
            self.waiting.appendleft(self.running.pop())
            self.out_of_pages = True
        for sequence in self.running:
            sequence.sampled += 1

    def _finish(self) -> None:
        """Release the requests whose output is complete."""
        self.peak_pages = max(self.peak_pages, self.manager.block_count().used)
        finished = [sequence for sequence in self.running if sequence.sampled == len(sequence.output)]
        if not finished:
            return
        slots = np.array([sequence.slot for sequence in finished], np.int32)
        started = time.thread_time_ns()
        self.manager.release(slots)
        self.release_ns.append(time.thread_time_ns() - started)
        self.running = [sequence for sequence in self.running if sequence not in finished]
        self.out_of_pages = False
        self.served += len(finished)
        self.output_tokens += sum(len(sequence.output) for sequence in finished)
        for _ in finished:
            self.on_request()
