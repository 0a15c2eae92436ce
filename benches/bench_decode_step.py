"""One decode step of 256 running requests: pages, tables, the new tokens, and publishing full blocks."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from conftest import Row
from pagekeeper.params import HashAlgorithm
from workbench import cache, prompts, request

pytestmark = pytest.mark.benchmark(group="decode step", timer=time.thread_time)

REQUESTS = 256
PROMPT = 1024
STEPS = 300


@pytest.mark.parametrize("algo", ["ahash64", "sha256"])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("form", ["arrays", "lists", "updates"])
def test_decode_step(row: Row, form: str, page_size: int, algo: HashAlgorithm) -> None:
    """By arrays of slots, by lists of contexts, or by lists with one `ctx.update` a request."""
    kv = cache(page_size, REQUESTS * (-(-(PROMPT + STEPS + 3) // page_size)), algo)
    contexts = [request(tokens) for tokens in itertools.islice(prompts(PROMPT), REQUESTS)]
    slots = np.array([kv.claim(ctx) for ctx in contexts], np.int32)
    batch = slots if form == "arrays" else contexts
    tokens = np.full(REQUESTS, 7, np.int32)
    kv.alloc(batch)
    kv.step(batch, tokens)

    def step() -> None:
        kv.alloc(batch)
        kv.runtime_inputs([batch])
        if form == "updates":
            for ctx in contexts:
                ctx.update(7)
            kv.step(batch)
        else:
            kv.step(batch, tokens)

    row.time(step, unit="µs", rounds=STEPS)
