"""Requests one after the other on device, host memory and disk, with restarts in between.

Blocks are found where a model in dictionaries finds them: on the device, in the host, on disk, or nowhere.
`test_device_and_host` is the same without a disk.
"""

import random
from collections.abc import Iterable
from itertools import islice, product
from pathlib import Path

import pytest

import pagekeeper as pk
from model.pair import Pair, Request, agent_requests, conversation_requests
from model.visits import NAMED, Names
from model.writing import WRITE_POLICIES

CONVERSATION = [(160_000, 300_000, 1_000_000), (500_000, 600_000, 6_000_000)]
"""Tokens of device, host and disk; the longest request has 126,527."""
AGENTS = [(300_000, 550_000, 900_000), (300_000, 800_000, 4_000_000)]
"""Likewise; the longest prompt has 260,625."""


def pairs(
    folder: Path, page_size: int, sizes: list[tuple[int, int, int]], write_policy: str, min_hits: int = 2
) -> list[Pair]:
    """Every eviction policy at every size of device, host and disk, in tokens."""
    made = []
    for number, (policy, size) in enumerate(product(pk.EvictionPolicy, sizes)):
        device, host, disk = (tokens // page_size for tokens in size)
        made.append(Pair(page_size, device, host, policy, write_policy, min_hits, folder / str(number), disk))
    return made


def serve_all(requests: Iterable[Request], pairs: list[Pair], restarts: int) -> None:
    """All of them, with so many restarts at equal distances; each pair finds something on its disk."""
    requests = list(requests)
    every = len(requests) // (restarts + 1)
    for pair in pairs:
        for number, request in enumerate(requests, 1):
            pair.serve(request)
            if number % every == 0 and number < len(requests):
                pair.restart()
        pair.check()
        assert pair.found.device > 0, pair.name
        assert pair.found.disk > 0, pair.name
    larger = [pair for pair in pairs if pair.model.host.units > len(pair.memory)]
    assert not larger or any(pair.found.host for pair in larger), "a host that has more than the device"


@pytest.mark.timeout(7200)  # the long form: all 12,031 requests
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_the_conversation_trace_is_found_where_the_model_finds_it(
    shared_dir: Path, tmp_path: Path, long_run: bool, write_policy: str
) -> None:
    page_size, first = (128, None) if long_run else (NAMED, 1_500 if write_policy == "selective" else 800)
    requests = islice(conversation_requests(shared_dir, page_size), first)
    serve_all(requests, pairs(tmp_path, page_size, CONVERSATION, write_policy, min_hits=1), restarts=1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_the_agent_traces_are_found_where_the_model_finds_them(
    shared_dir: Path, tmp_path: Path, long_run: bool, write_policy: str
) -> None:
    sizes = AGENTS if long_run else AGENTS[:1]
    made = pairs(tmp_path, 64, sizes, write_policy, min_hits=1)
    requests = list(agent_requests(shared_dir, 64))
    serve_all(requests if long_run else requests[: len(requests) // 3], made, restarts=1)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("policy", list(pk.EvictionPolicy))
@pytest.mark.parametrize(("pages", "units", "slots"), [(9, 20, 30), (13, 30, 60), (40, 12, 100)])
def test_short_prompts_are_found_where_the_model_finds_them(
    tmp_path: Path, first_seed: int, pages: int, units: int, slots: int, policy: str, write_policy: str
) -> None:
    chosen, names, requests = random.Random(first_seed), Names(), []
    for number in range(600):
        prompt, output = chosen.randint(1, 24), chosen.choice([0, 0, 1, 9])
        ids = [chosen.randrange(3) for _ in range(-(-prompt // 4))]
        visit = names.visit(number, ids, 4, prompt, output, 4)
        requests.append(Request(visit.tokens(), prompt, visit.names))
    serve_all(requests, [Pair(4, pages, units, policy, write_policy, 2, tmp_path, slots)], restarts=5)
