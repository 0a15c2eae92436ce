"""Replays on the real manager, with counts that are worked out by hand or by brute force over tokens."""

import json
import subprocess
import sys
from array import array
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagekeeper import EvictionPolicy
from pagekeeper.contents import PageContents, WrongPageError, prefix_numbers
from pagekeeper.replay import CallTimes, ReplayResult, ReplaySettings, replay
from pagekeeper.traces import KnownTokens, TraceRequest, read_trace
from pagekeeper.workloads import ChatWorkload


def ask(
    prompt: Iterable[int], output: Iterable[int], session: str | None = None, salt: str | None = None
) -> TraceRequest:
    asked, answered = (KnownTokens(np.array(list(tokens), np.int32)) for tokens in (prompt, output))
    return TraceRequest(0.0, asked, answered, session=session, salt=salt)


def serve(*requests: TraceRequest, **settings: Any) -> ReplayResult:
    given: dict[str, Any] = dict(page_size=4, pages=100, concurrency=2)
    return replay(requests, ReplaySettings(**(given | settings)))


# What is found in the cache


def test_a_prompt_that_was_served_before_is_found_up_to_its_last_whole_block() -> None:
    result = serve(ask(range(10), [99]), ask(range(10), [99]))
    assert (result.prompt_tokens, result.hit_tokens) == (20, 8)
    assert (result.prompt_blocks, result.hit_blocks) == (6, 2)
    assert (result.token_hit_rate, result.block_hit_rate) == (8 / 20, 2 / 6)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert serve(ask(range(8), [99]), ask(range(8), [99])).hit_tokens == 4


def test_the_next_turn_of_a_session_waits_for_the_answer_and_finds_it_in_the_cache() -> None:
    question, answer = list(range(4)), [50, 51, 52, 53, 54]  # 8 tokens have KV in the end, the newest none
    follow_up = [*question, *answer, 60, 61, 62]
    result = serve(ask(question, answer, session="a"), ask(follow_up, [70], session="a"))
    assert result.hit_tokens == 8


def test_requests_of_no_session_do_not_wait_for_each_other() -> None:
    question, answer = list(range(4)), [50, 51, 52, 53, 54]
    result = serve(ask(question, answer), ask([*question, *answer, 60, 61, 62], [70]))
    assert result.hit_tokens == 4


def test_requests_of_different_salts_share_nothing() -> None:
    prompts = [ask(range(10), [99], salt=salt) for salt in ("red", "blue", "red")]
    assert serve(*prompts).hit_tokens == 8


def test_without_prefix_caching_nothing_is_found() -> None:
    result = serve(ask(range(10), [99]), ask(range(10), [99]), prefix_caching=False)
    assert (result.prompt_tokens, result.hit_tokens, result.hit_blocks) == (20, 0, 0)


@pytest.mark.parametrize("hash_algo", ["ahash64", "sha256", "sha256_64"])
def test_every_hash_finds_the_same(hash_algo: str) -> None:
    assert serve(ask(range(10), [99]), ask(range(10), [99]), hash_algo=hash_algo).hit_tokens == 8


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_generated_chat_hits_what_brute_force_over_its_tokens_finds(page_size: int) -> None:
    chat = ChatWorkload(requests=40, users=4, turns=5, system_tokens=150, message_tokens=60, answer_tokens=40)
    computed: set[tuple[int, ...]] = set()  # every prefix that ends at the end of a block
    expected = 0
    for request in chat:
        prompt = tuple(request.prompt.array().tolist())
        ends = range(page_size, len(prompt), page_size)  # the last token is never taken from the cache
        expected += max((end for end in ends if prompt[:end] in computed), default=0)
        text = prompt + tuple(request.output.array().tolist())[:-1]
        computed |= {text[:end] for end in range(page_size, len(text) + 1, page_size)}
    result = replay(chat, ReplaySettings(page_size=page_size, pages=60_000 // page_size, concurrency=1))
    assert expected > 0
    assert result.hit_tokens == expected


def test_a_real_trace_hits_what_its_ids_say_when_nothing_is_evicted(shared_dir: Path) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl"
    stored: set[tuple[int, int]] = set()  # an id, and which quarter of its 512 tokens
    expected = total = 0
    with trace.open() as lines:
        for row in map(json.loads, islice(lines, 200)):
            pages = [(row["hash_ids"][page // 4], page % 4) for page in range(row["input_length"] // 128)]
            findable = pages[: (row["input_length"] - 1) // 128]
            missing = (index for index, page in enumerate(findable) if page not in stored)
            expected += 128 * next(missing, len(findable))
            total += row["input_length"]
            stored |= set(pages)
    result = replay(islice(read_trace([trace]), 200), ReplaySettings(pages=25_000))
    assert (result.prompt_tokens, result.evictions) == (total, 0)
    assert result.hit_tokens == expected


@pytest.mark.timeout(180)
def test_the_peers_replay_finds_as_many_tokens_as_the_peers_do(shared_dir: Path) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl"
    script = shared_dir / "peers" / "trace_replay.py"
    command: list[str | Path] = [sys.executable, script, "pagekeeper", trace, "--requests", "600", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["hit_tokens"] == 364_800  # vLLM's and MAX's figure


# How requests are served


def test_a_token_a_round_is_generated_for_every_running_request() -> None:
    requests = [ask([1], range(10, 13)), ask([2], range(20, 25))]  # the first tokens come with the prompts
    assert serve(*requests, concurrency=2).decode_steps == 4
    assert serve(*requests, concurrency=1).decode_steps == 2 + 4


def test_a_request_without_output_is_served_by_its_prompt_alone() -> None:
    result = serve(ask(range(6), []), ask(range(6), []))
    assert (result.requests, result.output_tokens, result.decode_steps, result.hit_tokens) == (2, 0, 0, 4)


def test_a_request_is_rejected_only_when_the_pool_can_never_hold_it() -> None:
    fitting = ask(range(8), [99])  # 8 tokens with KV: two pages
    too_large = ask(range(8), [99, 100])
    result = serve(too_large, fitting, too_large, pages=2)
    assert (result.requests, result.rejected, result.prompt_tokens) == (1, 2, 8)


def test_a_request_that_does_not_fit_now_waits_until_another_is_done() -> None:
    long_answer = ask(range(4), range(10, 18))  # holds one page at first, three in the end
    large = ask(range(100, 112), [99])  # three pages at once
    result = serve(long_answer, large, pages=3)
    assert (result.requests, result.preemptions) == (2, 0)


def test_when_pages_run_out_the_newest_request_starts_over_with_what_is_left_of_its_blocks() -> None:
    # Each has 12 tokens with KV in the end, three pages, and the pool has four. At the ninth token the
    # younger gives up its two pages, both published, and the older takes the one with the younger's second
    # block. Afterwards the younger finds its first block, and evicts two of the older's three for the others.
    older, younger = ask(range(4), range(10, 19)), ask(range(50, 54), range(60, 69))
    result = serve(older, younger, pages=4)
    assert (result.requests, result.output_tokens) == (2, 18)
    assert (result.preemptions, result.resumed_hit_tokens) == (1, 4)
    assert (result.evictions, result.hit_tokens) == (3, 0)


def test_cached_blocks_give_way_to_new_ones_and_are_counted() -> None:
    result = serve(ask(range(8), [99]), ask(range(50, 58), [99]), pages=2)
    assert (result.requests, result.evictions) == (2, 2)


def test_the_peak_counts_the_pages_of_running_requests_only() -> None:
    requests = [ask(range(start, start + 4), [99, 100]) for start in (0, 10, 20, 30)]  # two pages each
    assert serve(*requests, concurrency=2).peak_pages == 4
    assert serve(*requests, concurrency=1).peak_pages == 2


def test_a_small_pool_serves_a_whole_chat() -> None:
    chat = ChatWorkload(requests=60, users=6, turns=5, system_tokens=40, message_tokens=20, answer_tokens=20)
    result = replay(chat, ReplaySettings(page_size=8, pages=50, concurrency=6))
    assert (result.requests, result.rejected) == (60, 0)
    assert result.output_tokens == sum(len(request.output) for request in chat)
    assert result.preemptions > 0
    assert result.evictions > 0
    assert result.peak_pages <= 50


# Host memory

APART = [ask(range(start, start + 9), [99]) for start in (0, 50, 100)]
"""Prompts of three pages, two of which are full."""


def test_what_left_the_device_is_found_in_host_memory() -> None:
    result = serve(*APART, *APART, pages=3, concurrency=1, host_pages=20)
    assert (result.hit_tokens, result.host_hit_tokens) == (0, 24)
    assert (result.token_hit_rate, result.device_token_hit_rate, result.block_hit_rate) == (
        24 / 54,
        0,
        6 / 18,
    )
    assert (result.offloaded_blocks, result.loaded_blocks) == (6, 6)
    assert (result.host_evictions, result.host_dropped_blocks) == (0, 0)


def test_host_memory_that_is_full_evicts_the_tail_of_what_was_used_longest_ago() -> None:
    # Four units: the third prompt evicts both blocks of the first.
    result = serve(*APART, APART[0], pages=3, concurrency=1, host_pages=4)
    assert (result.host_hit_tokens, result.host_evictions) == (0, 4)


def test_blocks_that_find_no_room_in_host_memory_are_counted() -> None:
    result = serve(ask(range(21), [99]), pages=6, host_pages=3)  # five full blocks
    assert (result.offloaded_blocks, result.host_dropped_blocks) == (3, 2)


def test_without_evictions_host_memory_changes_nothing() -> None:
    chat = ChatWorkload(requests=60, users=6, turns=5, system_tokens=40, message_tokens=20, answer_tokens=20)
    settings = ReplaySettings(page_size=8, pages=5_000, concurrency=6)
    without = replay(chat, settings)
    result = replay(chat, replace(settings, host_pages=5_000))
    assert (result.hit_tokens, result.host_hit_tokens) == (without.hit_tokens, 0)


@pytest.mark.parametrize("policy", list(EvictionPolicy))
def test_a_small_pool_before_host_memory_serves_a_whole_chat(policy: EvictionPolicy) -> None:
    chat = ChatWorkload(requests=60, users=6, turns=5, system_tokens=40, message_tokens=20, answer_tokens=20)
    settings = ReplaySettings(page_size=8, pages=50, concurrency=6, host_pages=2_000, eviction_policy=policy)
    result = replay(chat, settings)
    everything = replay(chat, replace(settings, pages=5_000, host_pages=0))
    assert (result.requests, result.output_tokens) == (60, everything.output_tokens)
    assert result.preemptions > 0
    assert result.loaded_blocks > result.host_hit_blocks > 0, "preempted requests load too"
    assert everything.token_hit_rate >= result.token_hit_rate > result.device_token_hit_rate


def test_requests_of_different_salts_find_nothing_of_each_other_in_host_memory() -> None:
    requests = [ask(range(9), [99], salt=salt) for salt in ("red", "blue", "red")]
    assert serve(*requests, pages=3, concurrency=1, host_pages=20).host_hit_tokens == 8


def test_a_page_with_other_bytes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    write = PageContents.write

    def spoil(self: PageContents, places: Any, numbers: Any) -> None:
        write(self, places, numbers)
        self.memory[2, 16] ^= 1  # of the second block the third token

    monkeypatch.setattr(PageContents, "write", spoil)
    with pytest.raises(WrongPageError, match=r"page \d+ was given for block 1 .* token 6 differs"):
        serve(*APART[:2], APART[0], pages=3, concurrency=1, host_pages=20)


def test_a_number_of_a_prefix_depends_on_every_token_and_the_salt() -> None:
    tokens = np.arange(8, dtype=np.int32)
    numbers = prefix_numbers(tokens)
    assert len(set(numbers.tolist())) == 8
    for place in range(8):
        other = tokens.copy()
        other[place] -= 100
        assert (prefix_numbers(other) == numbers).tolist() == [index < place for index in range(8)]
    assert (prefix_numbers(tokens[[1, 0, *range(2, 8)]]) != numbers).all(), "their order counts"
    assert (prefix_numbers(tokens, "red") != numbers).all()


# What is reported


@pytest.mark.parametrize("host_pages", [0, 100])
def test_two_replays_differ_in_their_times_only(host_pages: int) -> None:
    def timeless(result: ReplayResult) -> ReplayResult:
        never = CallTimes(calls=0, median_us=0.0, total_ms=0.0)
        return replace(result, admit=never, step=never, release=never, wall_s=0.0)

    chat = ChatWorkload(requests=30, users=5, system_tokens=40, message_tokens=20, answer_tokens=20)
    settings = ReplaySettings(page_size=8, pages=60, concurrency=5, host_pages=host_pages)
    assert timeless(replay(chat, settings)) == timeless(replay(chat, settings))


def test_served_and_rejected_requests_are_announced() -> None:
    announced: list[None] = []
    requests = [ask(range(4), [99]), ask(range(50), [99]), ask(range(6), [])]
    replay(requests, ReplaySettings(page_size=4, pages=2), lambda: announced.append(None))
    assert len(announced) == 3


def test_calls_are_counted_by_kind() -> None:
    result = serve(ask([1], range(10, 13)), ask([2], range(20, 23)))  # both end in the same round
    assert (result.admit.calls, result.step.calls, result.release.calls) == (2, 2, 1)
    assert min(result.admit.total_ms, result.step.total_ms, result.release.total_ms) > 0


def test_call_times_are_summed_up_in_readable_units() -> None:
    times = CallTimes.of(array("q", [1_000, 9_000, 2_000]))
    assert times == CallTimes(calls=3, median_us=2.0, total_ms=0.012)


def test_no_calls_take_no_time() -> None:
    assert CallTimes.of(array("q")) == CallTimes(calls=0, median_us=0.0, total_ms=0.0)


def test_an_empty_trace_has_rates_of_zero() -> None:
    result = serve()
    assert (result.requests, result.token_hit_rate, result.block_hit_rate) == (0, 0.0, 0.0)


@pytest.mark.parametrize("field", ["page_size", "pages", "concurrency"])
@pytest.mark.parametrize("value", [0, 2**27])
def test_a_setting_out_of_range_is_named(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}: must be from 1 to "):
        serve(**{field: value})
