"""Requests one after the other on a device pool before a host tier, on real bytes.

Blocks are found where a model in dictionaries finds them: on the device, in host memory, or nowhere. Every
page that is found holds the number of its prefix. Each copy is over before the next call, so that the outcome
does not depend on threads.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import islice, product
from pathlib import Path

import pytest

import pagekeeper as pk
from model.pair import Pair, Request, agent_requests, conversation_requests
from model.visits import NAMED, Names
from model.writing import WRITE_POLICIES

CONVERSATION = [(160_000, 500_000), (500_000, 2_000_000), (1_000_000, 6_000_000)]
"""Tokens of device and host; the longest request has 126,527."""
AGENTS = [(300_000, 450_000), (300_000, 1_200_000), (600_000, 900_000)]
"""Likewise; the longest prompt has 260,625."""


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
