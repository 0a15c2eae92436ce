"""A real conversation trace: the manager's share of serving its first 600 requests."""

from __future__ import annotations

import itertools
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from conftest import Row
from pagekeeper import TextContext
from pagekeeper.traces import read_trace
from workbench import cache, request

pytestmark = pytest.mark.benchmark(group="trace", timer=time.thread_time)

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/mooncake_conversation_trace.jsonl"
REQUESTS = 600
RUNNING = 32
PAGE_SIZE = 128
POOL = 1_000_000
HIT_TOKENS = 364_800  # what vLLM and MAX find in whole blocks on this trace with these numbers


@pytest.mark.skipif(not TRACE.is_file(), reason="needs ../shared/traces, which is not beside this checkout")
def test_conversation_trace(row: Row) -> None:
    """Each request is prefilled whole, then all that run decode one token; over 32, the oldest leaves."""
    prompts = [each.prompt.array() for each in itertools.islice(read_trace([TRACE]), REQUESTS)]
    contexts: list[TextContext] = []

    def make_contexts() -> None:
        contexts[:] = map(request, prompts)

    def replay() -> None:
        kv = cache(PAGE_SIZE, POOL // PAGE_SIZE, partial_reuse=False)
        running: deque[TextContext] = deque()
        for ctx in contexts:
            if len(running) == RUNNING:
                kv.release(running.popleft())
            kv.claim(ctx)
            kv.alloc(ctx)
            kv.step(ctx, 7)
            running.append(ctx)
            batch = list(running)
            kv.alloc(batch)
            kv.runtime_inputs([batch])
            kv.step(batch, np.full(len(batch), 7, np.int32))

    row.time(replay, setup=make_contexts, unit="ms", rounds=3)
    assert sum(ctx.cached_prefix_length for ctx in contexts) == HIT_TOKENS
