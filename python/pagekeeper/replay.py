"""Drive the manager with a trace's requests, as a serving loop would, and measure what comes of it.

No model runs: the tokens that it would sample are the trace's. Pages have memory only where there is a host
tier, so that its copies are real; every page that is found, there, on disk or on the device, is then checked.
Requests are served in the order of the trace, so many at a time: a prompt in one piece, then a token a round
for the whole batch. When pages run out, the newest request gives up its own and starts over later.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagekeeper import (
    EvictionPolicy,
    InsufficientBlocksError,
    KVConnectorConfig,
    MHAKVCacheParams,
    PagedKVCacheManager,
    RequestID,
    TextContext,
)
from pagekeeper._native import store_bytes
from pagekeeper.contents import PageContents, prefix_numbers
from pagekeeper.params import HashAlgorithm
from pagekeeper.traces import TraceRequest

__all__ = ["POOL_TOKENS", "CallTimes", "ReplayResult", "ReplaySettings", "replay"]

POOL_TOKENS = 1_000_000
"""Tokens that a pool holds unless its size is given."""

_FLUSH_S = 600.0


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
        host_pages: pages that the host tier has room for, 0 to 2**26; 0: there is none. It needs
            `prefix_caching`, and 8 bytes a token of memory, for the pool too.
        disk_pages: pages that the disk tier behind it has room for, 0 to 2**26; 0: there is none.
        disk_dir: the directory of the disk tier, where a later replay finds what this one stored. None: a
            private one that ends with the replay.

    Raises:
        ValueError: a setting is out of its range.
    """

    page_size: int = 128
    pages: int = POOL_TOKENS // page_size
    concurrency: int = 32
    hash_algo: HashAlgorithm = "ahash64"
    eviction_policy: EvictionPolicy = EvictionPolicy.PRIORITY_LRU
    prefix_caching: bool = True
    host_pages: int = 0
    disk_pages: int = 0
    disk_dir: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        ranges = {
            "page_size": (1, 2**20),
            "pages": (1, 2**26),
            "concurrency": (1, 2**16),
            "host_pages": (0, 2**26),
            "disk_pages": (0, 2**26),
        }
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: must be from {least} to {most}")
        if self.host_pages and not self.prefix_caching:
            raise ValueError(f"host_pages={self.host_pages}: must be 0 without prefix_caching")
        if self.disk_pages and not self.host_pages:
            raise ValueError(f"disk_pages={self.disk_pages}: must be 0 without host_pages")
        if self.disk_dir is not None and not self.disk_pages:
            raise ValueError(f"disk_dir={self.disk_dir!r}: must be None without disk_pages")


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
        hit_tokens: those of them that were on the device.
        host_hit_tokens: those of them that were in host memory.
        disk_hit_tokens: those of them that were on disk.
        prompt_blocks: blocks of the prompts, partial last ones included.
        hit_blocks: those of them that were on the device.
        host_hit_blocks: those of them that were in host memory.
        disk_hit_blocks: those of them that were on disk.
        output_tokens: tokens generated.
        decode_steps: rounds of the running batch.
        preemptions: how often a request gave up its pages.
        resumed_hit_tokens: tokens that preempted requests found on the device when they started over.
        evictions: cached blocks that gave way to others on the device.
        loaded_blocks: blocks that came from host memory or disk, for preempted requests too.
        offloaded_blocks: blocks that were copied to host memory.
        host_evictions: blocks that gave way to others there.
        host_dropped_blocks: blocks that found no room there, or no time.
        disk_stored_blocks: blocks that were written to disk.
        disk_loaded_blocks: blocks that were read from disk, for preempted requests too.
        disk_evictions: blocks that gave way to others there.
        disk_dropped_blocks: blocks that found no room there, no time, or a disk that failed.
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
    host_hit_tokens: int
    disk_hit_tokens: int
    prompt_blocks: int
    hit_blocks: int
    host_hit_blocks: int
    disk_hit_blocks: int
    output_tokens: int
    decode_steps: int
    preemptions: int
    resumed_hit_tokens: int
    evictions: int
    loaded_blocks: int
    offloaded_blocks: int
    host_evictions: int
    host_dropped_blocks: int
    disk_stored_blocks: int
    disk_loaded_blocks: int
    disk_evictions: int
    disk_dropped_blocks: int
    peak_pages: int
    admit: CallTimes
    step: CallTimes
    release: CallTimes
    wall_s: float

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens found anywhere, 0 to 1; 0 without prompts."""
        return _rate(self.hit_tokens + self.host_hit_tokens + self.disk_hit_tokens, self.prompt_tokens)

    @property
    def device_token_hit_rate(self) -> float:
        """Prompt tokens found on the device, 0 to 1; 0 without prompts."""
        return _rate(self.hit_tokens, self.prompt_tokens)

    @property
    def block_hit_rate(self) -> float:
        """Prompt blocks found anywhere, 0 to 1; 0 without prompts."""
        return _rate(self.hit_blocks + self.host_hit_blocks + self.disk_hit_blocks, self.prompt_blocks)

    def as_dict(self) -> dict[str, Any]:
        """Everything, rates included, as plain values that JSON knows."""
        rates = ("token_hit_rate", "device_token_hit_rate", "block_hit_rate")
        return asdict(self) | {rate: getattr(self, rate) for rate in rates}


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


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
        ValueError: this machine has no room for such tiers, the message says what it has; or the directory
            holds blocks of another cache.
        OSError: the directory is in use, or the disk fails.
        WrongPageError: a page that was found did not hold what it should.
    """
    server = _Server(settings, on_request)
    try:
        started = time.perf_counter()
        server.serve(iter(requests))
        result = server.result(time.perf_counter() - started)
        server.flush()
        return result
    finally:
        server.manager.shutdown()


class _Stopwatch:
    """Adds up CPU time of the calling thread while it runs."""

    def __init__(self) -> None:
        self.ns = 0
        self.started = 0

    def start(self) -> None:
        self.started = time.thread_time_ns()

    def stop(self) -> None:
        self.ns += time.thread_time_ns() - self.started


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request that was taken up."""

    context: TextContext
    session: str | None
    output: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.uint64]  # what stands in the place of each token; none without memory
    slot: int | None = None  # from the first attempt to admit it
    sampled: int = 0  # tokens of the output that are known
    admission: _Stopwatch = field(default_factory=_Stopwatch)  # for attempts so far


class _Server:
    """One manager, and the requests that wait for it and run on it."""

    def __init__(self, settings: ReplaySettings, on_request: Callable[[], object]) -> None:
        self.contents: PageContents | None = None
        config: KVConnectorConfig | None = None
        if settings.host_pages:
            self.contents = PageContents(settings.pages, settings.page_size)
            bytes_a_page = self.contents.memory.shape[1]
            config = KVConnectorConfig(
                type="rust_tiered",
                host_offload_max_gb=settings.host_pages * bytes_a_page / 2**30,
                disk_offload_dir=settings.disk_dir,
                disk_offload_max_gb=(
                    settings.disk_pages
                    and store_bytes(settings.page_size, bytes_a_page, settings.disk_pages) / 2**30
                ),
            )
        params = MHAKVCacheParams(
            dtype="float32",
            n_kv_heads=1,
            head_dim=1,
            num_layers=1,
            page_size=settings.page_size,
            enable_prefix_caching=settings.prefix_caching,
            enable_partial_reuse=False,  # hits are counted in blocks, as traces tell of blocks
            kv_hash_algo=settings.hash_algo,
            eviction_policy=settings.eviction_policy,
            kv_connector_config=config,
        )
        self.manager = PagedKVCacheManager(
            params=params,
            total_num_pages=settings.pages,
            max_batch_size=settings.concurrency,
            allocate_pools=False,
            buffers=None if self.contents is None else [self.contents.memory],
            model_name="replay",
        )
        self.settings = settings
        self.on_request = on_request
        self.waiting: deque[_Sequence] = deque()  # preempted ones, then the next of the trace
        self.running: list[_Sequence] = []  # oldest first
        self.out_of_pages = False  # until a request finishes
        self.rejected = self.served = self.output_tokens = self.peak_pages = 0
        self.host_hit_blocks = self.disk_hit_blocks = 0
        self.loaded = self.filled = 0  # blocks, until the newest load
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

        def tier(name: str) -> int:
            return int(counted.get(f"connector_{name}", 0))

        return ReplayResult(
            settings=self.settings,
            requests=self.served,
            rejected=self.rejected,
            prompt_tokens=int(counted["prompt_tokens"]),
            hit_tokens=int(counted["reused_tokens"]),
            host_hit_tokens=self.host_hit_blocks * self.settings.page_size,
            disk_hit_tokens=self.disk_hit_blocks * self.settings.page_size,
            prompt_blocks=int(counted["context_blocks"]),
            hit_blocks=int(counted["reused_blocks"]),
            host_hit_blocks=self.host_hit_blocks,
            disk_hit_blocks=self.disk_hit_blocks,
            output_tokens=self.output_tokens,
            decode_steps=len(self.step_ns),
            preemptions=int(counted["preemptions"]),
            resumed_hit_tokens=int(counted["late_reused_tokens"]),
            evictions=int(counted["evictions"]),
            loaded_blocks=int(counted["loaded_blocks"]),
            offloaded_blocks=tier("host_stored_blocks"),
            host_evictions=tier("host_evicted_blocks"),
            host_dropped_blocks=tier("host_dropped_no_unit") + tier("host_dropped_busy"),
            disk_stored_blocks=tier("disk_stored_blocks"),
            disk_loaded_blocks=tier("host_filled_blocks"),
            disk_evictions=tier("disk_evicted_blocks"),
            disk_dropped_blocks=(
                tier("disk_dropped_no_unit") + tier("disk_dropped_busy") + tier("disk_unstored_blocks")
            ),
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
            prompt, output = request.prompt.array(), request.output.array()
            context = TextContext(
                request_id=RequestID(), max_length=computed + 1, tokens=prompt, cache_salt=request.salt
            )
            numbers = np.empty(0, np.uint64)
            if self.contents is not None:
                numbers = prefix_numbers(np.concatenate([prompt, output[:-1]]), request.salt)
            self.waiting.append(_Sequence(context, request.session, output, numbers))
            return True
        return False

    def _prefill(self, sequence: _Sequence) -> bool:
        """Compute all known tokens and sample the next; False when pages are short."""
        token = sequence.output[sequence.sampled :][:1]
        sequence.admission.start()
        try:
            if sequence.slot is None:
                sequence.slot = self.manager.claim(sequence.context)
            slots = np.array([sequence.slot], np.int32)
            self._plan(sequence, slots)
            self._forward([sequence], slots, sequence.admission, check=True)
            self.manager.step(slots, token if len(token) else None)
        except InsufficientBlocksError:
            if not self.running:
                raise
            self.out_of_pages = True
            return False
        finally:
            sequence.admission.stop()
        sequence.sampled += len(token)
        self.admit_ns.append(sequence.admission.ns)
        sequence.admission = _Stopwatch()
        self._settle()
        return True

    def _plan(self, sequence: _Sequence, slots: npt.NDArray[np.int32]) -> None:
        """Plan the forward of a prompt, behind all that can be loaded. The wait is not counted."""
        [transfer] = self.manager.alloc(slots)
        while sequence.context.active_length == 0:
            sequence.admission.stop()
            transfer.synchronize()
            sequence.admission.start()
            self.manager.poll_transfers()
            sequence.admission.stop()
            self._count_load(of_a_prompt=sequence.sampled == 0)
            sequence.admission.start()
            [transfer] = self.manager.alloc(slots)

    def _count_load(self, *, of_a_prompt: bool) -> None:
        """Count the blocks of the load that has ended, those that were read from disk apart."""
        counted = self.manager.metrics()
        loaded, filled = counted["loaded_blocks"], counted.get("connector_host_filled_blocks", 0)
        if of_a_prompt:
            self.disk_hit_blocks += filled - self.filled
            self.host_hit_blocks += (loaded - self.loaded) - (filled - self.filled)
        self.loaded, self.filled = loaded, filled

    def _decode(self) -> None:
        """Compute the newest token of every running request and sample the next, preempting where needed."""
        slots = np.array([sequence.slot for sequence in self.running], np.int32)
        tokens = np.array([sequence.output[sequence.sampled] for sequence in self.running], np.int32)
        watch = _Stopwatch()
        watch.start()
        while True:
            try:
                self.manager.alloc(slots)
                break
            except InsufficientBlocksError:
                if len(slots) == 1:
                    raise
                self.manager.preempt(slots[-1:])
                slots, tokens = slots[:-1], tokens[:-1]
        self._forward(self.running[: len(slots)], slots, watch)
        self.manager.step(slots, tokens)
        watch.stop()
        self.step_ns.append(watch.ns)
        while len(self.running) > len(slots):
            self.waiting.appendleft(self.running.pop())
            self.out_of_pages = True
        for sequence in self.running:
            sequence.sampled += 1
        self._settle()

    def _forward(
        self, batch: list[_Sequence], slots: npt.NDArray[np.int32], watch: _Stopwatch, *, check: bool = False
    ) -> None:
        """Make the tables; where pages have memory, check what was found, if told to, and compute.

        `watch` runs while the manager works.
        """
        if self.contents is None:
            self.manager.runtime_inputs([slots])
            return
        [tables] = self.manager.runtime_inputs([slots], form="vllm")
        watch.stop()
        computed = []
        for sequence, row in zip(batch, np.asarray(tables.block_table), strict=True):
            start = sequence.context.processed_length
            computed.append(sequence.numbers[start : start + sequence.context.active_length])
            if check:
                self.contents.check(row, sequence.numbers[:start])
        self.contents.write(np.asarray(tables.slot_mapping), np.concatenate(computed))
        watch.start()

    def _settle(self) -> None:
        """Wait until no copy is in flight, so that what is found does not depend on threads."""
        while self.contents is not None:
            counted = self.manager.metrics()
            if not counted["copies_in_flight"] and not counted.get("connector_disk_writes"):
                return
            self.manager.poll_transfers()

    def flush(self) -> None:
        """Wait until a later replay would find what this one stored.

        Raises:
            OSError: the disk does not take it.
        """
        if self.settings.disk_dir is not None and not self.manager.flush(_FLUSH_S):
            raise TimeoutError(f"the disk has not taken what was written for {_FLUSH_S} s")

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
