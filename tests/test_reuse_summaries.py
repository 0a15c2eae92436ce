"""Forecasts that are given what `analyze_prefix_reuse` said: the same answers, whenever it was said."""

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled
from model.grouped import grouped
from pagekeeper.params import FullAttention, Recurrent, SlidingWindow

PROMPT = list(range(100, 200))
KINDS: dict[str, dict[str, Any]] = {
    "full": {"full": FullAttention()},
    "window": {"full": FullAttention(), "window": SlidingWindow(window_size=8)},
    "states": {"full": FullAttention(), "states": Recurrent(8, save_last_snapshot=True)},
}


def store(kv: Any, tokens: Any, **options: Any) -> None:
    kv.release(prefilled(kv, tokens, **options))


def answers(kv: Any, batch: Any, summary: Any) -> list[Any]:
    """All that takes a summary."""
    one_step = [kv.get_needed_blocks_one_step(batch, two, None, summary) for two in (False, True)]
    to_the_end = kv.get_remaining_blocks_to_completion(batch, None, summary, num_tokens=6)
    return [np.asarray(each).tolist() for each in (*one_step, to_the_end)]


def waiting(kv: Any) -> pk.TextContext:
    """A request of 40 tokens, of whose blocks 6 are stored and held, and 2 more are stored."""
    store(kv, PROMPT[:32])
    prefilled(kv, PROMPT[:25])
    return claimed(kv, PROMPT[:40], max_new_tokens=20)


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest) -> Any:
    return grouped(KINDS[request.param], 64)


def test_a_summary_of_the_prompt_gives_the_same_numbers(kv: Any) -> None:
    ctx = waiting(kv)
    summary = kv.analyze_prefix_reuse(PROMPT[:40])
    assert summary.device_blocks == 8
    before = kv.fingerprint()
    assert answers(kv, ctx, summary) == answers(kv, ctx, None)
    assert answers(kv, [ctx], [summary]) == answers(kv, [ctx], [None]) == answers(kv, [ctx], None)
    assert kv.fingerprint() == before


def test_what_a_plain_cache_has_is_counted_with_a_summary_as_without() -> None:
    kv = manager(64)
    ctx = waiting(kv)
    summary = kv.analyze_prefix_reuse(PROMPT[:40])
    # 10 blocks, of which 6 are held; of 60 tokens 15.
    assert kv.get_needed_blocks_one_step(ctx, summary=summary) == 4
    assert kv.get_remaining_blocks_to_completion(ctx, summary=summary) == 9


OTHERS: dict[str, Callable[[Any], Any]] = {
    "a longer prompt": lambda kv: kv.analyze_prefix_reuse(PROMPT[:60]),
    "a shorter prompt": lambda kv: kv.analyze_prefix_reuse(PROMPT[:14]),
    "a prompt that parts": lambda kv: kv.analyze_prefix_reuse([*PROMPT[:12], 7, 8, 9, 10, 11, 12, 13]),
    "a prompt that is not there": lambda kv: kv.analyze_prefix_reuse([7] * 40),
    "a prompt of a token": lambda kv: kv.analyze_prefix_reuse([7]),
    "another salt": lambda kv: kv.analyze_prefix_reuse(PROMPT[:40], salt="a"),
    "another adapter": lambda kv: kv.analyze_prefix_reuse(PROMPT[:40], lora_id=1),
    "other tokens under the same blocks": lambda kv: kv.analyze_prefix_reuse(PROMPT[:40], overrides=[(5, 1)]),
    "a dummy's": lambda kv: pk.DummyKVCache(kv.params).analyze_prefix_reuse(PROMPT),
    "one that was made by hand": lambda kv: pk.PrefixReuseSummary(9, 9, None, 9),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_summary_of_something_else_changes_nothing(kv: Any, other: str) -> None:
    ctx = waiting(kv)
    store(kv, [*PROMPT[:12], 7, 8, 9, 10, 11, 12, 13])
    store(kv, PROMPT[:40], cache_salt="a")
    store(kv, PROMPT[:40], lora_id=1)
    store(kv, PROMPT[:40], token_overrides=[(5, 1)])
    assert answers(kv, ctx, OTHERS[other](kv)) == answers(kv, ctx, None)


def test_a_summary_of_another_cache_changes_nothing(kv: Any) -> None:
    ctx = waiting(kv)
    other = grouped(KINDS["full"], 64)
    for first in (0, 50):
        store(other, range(first, first + 40))
    store(other, PROMPT)
    assert answers(kv, ctx, other.analyze_prefix_reuse(PROMPT[:40])) == answers(kv, ctx, None)


def test_copies_of_a_summary_are_as_good_and_equal(kv: Any) -> None:
    ctx = waiting(kv)
    summary = kv.analyze_prefix_reuse(PROMPT[:40])
    copies = [
        pickle.loads(pickle.dumps(summary)),
        copy.deepcopy(summary),
        copy.copy(summary),
        dataclasses.replace(summary),
    ]
    assert copies == [summary] * 4
    assert [each.walk is None for each in copies] == [True, True, False, False]
    assert dataclasses.asdict(summary)["walk"] is None
    for each in copies:
        assert answers(kv, ctx, each) == answers(kv, ctx, None)


LATER = [
    "more is stored",
    "everything is forgotten",
    "its end is forgotten",
    "its end is forgotten and stored again",
    "it is evicted",
    "it is shorter",
    "it goes on otherwise",
    "a part of it is computed",
    "it is computed",
    "it is preempted",
    "it is forked",
]


def come_to_pass(what: str, kv: Any, ctx: pk.TextContext) -> None:
    if what == "more is stored":
        store(kv, PROMPT[:38])
    elif what == "everything is forgotten":
        kv.reset_prefix_cache()
    elif what.startswith("its end is forgotten"):
        assert kv.truncate_prefix(PROMPT[:12]) > 0
        if what.endswith("stored again"):
            store(kv, range(300, 330))
            store(kv, PROMPT[:32])
    elif what == "it is evicted":
        for first in range(300, 1500, 60):
            store(kv, range(first, first + 60))
    elif what == "it is shorter":
        ctx.truncate(18)
    elif what == "it goes on otherwise":
        ctx.truncate(18)
        for _ in range(22):
            ctx.update(7)
    elif what == "a part of it is computed":
        compute(kv, ctx, num_tokens=3)
    else:
        compute(kv, ctx, new_tokens=[7])
        if what == "it is preempted":
            kv.preempt(ctx)
        elif what == "it is forked":
            kv.fork(ctx)


@pytest.mark.parametrize("later", LATER)
def test_a_summary_that_is_old_changes_nothing(kv: Any, later: str) -> None:
    ctx = waiting(kv)
    summary = kv.analyze_prefix_reuse(PROMPT[:40])
    come_to_pass(later, kv, ctx)
    assert answers(kv, ctx, summary) == answers(kv, ctx, None)


def test_summaries_of_random_ages_never_change_a_number() -> None:
    draw = random.Random(5)
    asked = 0
    for kinds in [*KINDS.values()] * 4:
        kv = grouped(kinds, 40)
        seen: list[Any] = [None]
        contexts: list[pk.TextContext] = []
        for _ in range(60):
            tokens = PROMPT[: draw.randrange(1, 50)] + [draw.randrange(4)] * draw.randrange(1, 9)
            salt = draw.choice([None, None, "a"])
            seen.append(kv.analyze_prefix_reuse(tokens, salt=salt))
            if len(contexts) < 3:
                contexts.append(claimed(kv, tokens, cache_salt=salt, max_new_tokens=draw.randrange(1, 9)))
            ctx = draw.choice(contexts)
            if kv.can_alloc(ctx, 7):
                compute(kv, ctx, num_tokens=7)
            if ctx.processed_length == len(ctx):
                kv.release(ctx)
                contexts.remove(ctx)
            elif draw.random() < 0.1:
                kv.preempt(ctx)
            elif draw.random() < 0.03:
                kv.reset_prefix_cache()
            summaries = [draw.choice(seen[-8:]) for _ in contexts]
            assert answers(kv, contexts, summaries) == answers(kv, contexts, None)
            asked += len(contexts)
    assert asked > 1000


@pytest.mark.parametrize(
    ("summary", "error", "message"),
    [
        (lambda s: [s, s], ValueError, "summary has 2 entries for 1 requests"),
        (lambda s: [], ValueError, "summary has 0 entries for 1 requests"),
        (lambda s: s, TypeError, "summary: got PrefixReuseSummary"),
        (lambda s: [3], TypeError, "summary: got 3, must be what analyze_prefix_reuse gives"),
        (lambda s: [dataclasses.replace(s, walk=3)], TypeError, "walk"),
    ],
)
def test_what_is_no_summary_of_the_batch_is_refused(summary: Any, error: Any, message: str) -> None:
    kv: Any = manager(64)
    ctx = waiting(kv)
    given = summary(kv.analyze_prefix_reuse(PROMPT[:40]))
    for ask in (kv.get_needed_blocks_one_step, kv.get_remaining_blocks_to_completion):
        with pytest.raises(error, match=message):
            ask([ctx], summary=given)


def test_one_request_has_no_list_of_summaries() -> None:
    kv: Any = manager(64)
    ctx = waiting(kv)
    with pytest.raises(TypeError, match="summary: got "):
        kv.get_needed_blocks_one_step(ctx, summary=[kv.analyze_prefix_reuse(PROMPT[:40])])
