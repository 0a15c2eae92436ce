"""Requests one after the other on a device pool before a host tier, on real bytes.

Blocks are found where a model in dictionaries finds them: on the device, in host memory, or nowhere. Every
page that is found holds the number of its prefix. Each copy is over before the next call, so that the outcome
does not depend on threads.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import manager
from model.two_tiers import Found, TwoTiers
from model.visits import NAMED, Names, conversation
from model.writing import WRITE_POLICIES
from pagekeeper.traces import read_trace

CONVERSATION = [(160_000, 500_000), (500_000, 2_000_000), (1_000_000, 6_000_000)]
"""Tokens of device and host; the longest request has 126,527."""
AGENTS = [(300_000, 450_000), (300_000, 1_200_000), (600_000, 900_000)]
"""Likewise; the longest prompt has 260,625."""


@dataclass
class Request:
    """Prompt and output as tokens, and a name for each full block of both."""

    tokens: Any
    prompt: int
    names: list[int]

    @property
    def output(self) -> int:
        return len(self.tokens) - self.prompt


class Pair:
    """A manager with a host tier, and the model of both; `min_hits` is for "selective"."""

    def __init__(
        self, page_size: int, pages: int, units: int, policy: str, write_policy: str, min_hits: int = 2
    ) -> None:
        self.page_size = page_size
        self.name = f"{policy}, {pages} pages, {units} units"
        self.memory = np.full((pages + 1, page_size), -1)
        memory = self.memory.view(np.uint8)
        config = pk.KVConnectorConfig(type="rust_tiered", host_offload_max_gb=units * memory.shape[1] / 2**30)
        self.kv = manager(
            pages,
            page_size,
            n_kv_heads=1,
            head_dim=1,
            num_layers=1,
            kv_connector_config=config,
            buffers=[memory],
            eviction_policy=policy,
            write_policy=write_policy,
            selective_min_hits=min_hits,
        )
        self.model = TwoTiers(page_size, pages, units, policy, write_policy, min_hits)
        self.found = Found(0, 0)
        """In all requests together."""

    def serve(self, request: Request) -> None:
        """The model and the manager find the same blocks in the same places."""
        expected = self.model.serve(request.names, request.prompt, request.output)
        assert self.serve_for_real(request) == expected, self.name
        counted = self.kv.metrics()
        assert counted["evictions"] == self.model.device.evictions, self.name
        assert counted["connector_host_evicted_blocks"] == self.model.host.evictions, self.name
        self.found = Found(self.found.device + expected.device, self.found.host + expected.host)

    def serve_for_real(self, request: Request) -> Found:
        """The prompt in one forward, all of the output in a second, as accepted drafts would be."""
        ctx = pk.TextContext("one", request.tokens[: request.prompt])
        self.kv.claim(ctx)
        found = self.find(ctx)
        first = ctx.processed_length // self.page_size
        assert (self.memory[self.row(ctx)[:first]] == np.array(request.names[:first])[:, None]).all()
        output = request.tokens[request.prompt :]
        self.compute(ctx, request.names, first)
        self.kv.step(ctx, output, len(output))
        self.settle()
        if len(output):
            self.kv.alloc(ctx)
            self.settle()
            self.compute(ctx, request.names, request.prompt // self.page_size)
            self.kv.step(ctx, (), 0)
            self.settle()
        self.kv.release(ctx)
        return found

    def find(self, ctx: pk.TextContext) -> Found:
        """Plans the prompt's forward, after all loads that there are."""
        device = host = known = 0
        while True:
            blocks = self.kv.alloc(ctx).block_ids
            loaded = 0 if ctx.active_length else len(blocks)
            host += loaded
            device += (ctx.cached_prefix_length - known) // self.page_size - loaded
            known = ctx.cached_prefix_length
            ready = self.settle()
            if ctx.active_length:
                return Found(device, host)
            assert ready == [ctx.request_id]

    def compute(self, ctx: pk.TextContext, names: list[int], first: int) -> None:
        """Writes the number of each full block's prefix into its page, and -1 into a partial one."""
        pages = np.array(self.row(ctx)[first:])
        values = [*names[first : first + len(pages)], -1][: len(pages)]
        self.memory[pages] = np.array(values)[:, None]

    def row(self, ctx: pk.TextContext) -> list[int]:
        pages: list[int] = self.kv.get_cache_indices(ctx)[0]
        return pages

    def settle(self) -> list[object]:
        """Waits for every copy; gives the requests that waited for one."""
        ready: list[object] = []
        while self.kv.metrics()["copies_in_flight"]:
            ready += self.kv.poll_transfers()
        return ready

    def check(self) -> None:
        """The books of both agree in the end, and the manager's with themselves."""
        counted, device, host = self.kv.metrics(), self.model.device, self.model.host
        assert counted["cached_blocks"] == len(device.stored)
        assert counted["loaded_blocks"] == counted["connector_host_loaded_blocks"] == host.loaded
        assert counted["connector_host_stored_blocks"] == host.stored
        assert counted["connector_host_blocks"] == len(host.blocks)
        self.kv.verify()


def conversation_requests(shared_dir: Path, page_size: int) -> Iterator[Request]:
    for visit in conversation(shared_dir, Names(), page_size):
        yield Request(visit.tokens(), visit.prompt, visit.names)


def agent_requests(shared_dir: Path, page_size: int) -> Iterator[Request]:
    """The agents' requests by time; a block's name comes from its tokens themselves."""
    names = Names()
    for request in read_trace([shared_dir / "traces" / "agent"]):
        tokens = np.concatenate([request.prompt.array(), request.output.array()])
        blocks = tokens[: len(tokens) // page_size * page_size].reshape(-1, page_size)
        yield Request(tokens, len(request.prompt), names.chain(block.tobytes() for block in blocks))


def pairs(
    page_size: int, sizes: Sequence[tuple[int, int]], write_policy: str, min_hits: int = 2
) -> list[Pair]:
    """Every eviction policy at every size of device and host, in tokens."""
    return [
        Pair(page_size, device // page_size, host // page_size, policy, write_policy, min_hits)
        for policy, (device, host) in product(pk.EvictionPolicy, sizes)
    ]


def serve_all(requests: Iterable[Request], pairs: list[Pair]) -> None:
    """Each finds something on the device, and some in the host too: how often depends on the write policy."""
    for request in requests:
        for pair in pairs:
            pair.serve(request)
    for pair in pairs:
        pair.check()
        assert pair.found.device > 0, pair.name
    assert any(pair.found.host for pair in pairs)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_the_conversation_trace_is_found_where_the_model_finds_it(
    shared_dir: Path, long_run: bool, write_policy: str
) -> None:
    page_size, first = (128, None) if long_run else (NAMED, 1_500 if write_policy == "selective" else 800)
    requests = islice(conversation_requests(shared_dir, page_size), first)
    # Few prefixes come a third time while they are on the device.
    serve_all(requests, pairs(page_size, CONVERSATION, write_policy, min_hits=1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_the_agent_traces_are_found_where_the_model_finds_them(shared_dir: Path, write_policy: str) -> None:
    serve_all(agent_requests(shared_dir, 64), pairs(64, AGENTS, write_policy))


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("policy", list(pk.EvictionPolicy))
@pytest.mark.parametrize(("pages", "units"), [(9, 6), (9, 20), (13, 30), (40, 12)])
def test_short_prompts_are_found_where_the_model_finds_them(
    first_seed: int, pages: int, units: int, policy: str, write_policy: str
) -> None:
    chosen, names = random.Random(first_seed), Names()
    pair = Pair(4, pages, units, policy, write_policy)
    for number in range(1_500):
        prompt, output = chosen.randint(1, 24), chosen.choice([0, 0, 1, 9])
        ids = [chosen.randrange(3) for _ in range(-(-prompt // 4))]
        visit = names.visit(number, ids, 4, prompt, output, 4)
        pair.serve(Request(visit.tokens(), prompt, visit.names))
        pair.kv.verify()
    pair.check()
    assert pair.found.device > 100
    assert pair.found.host > 100 or units < pages
