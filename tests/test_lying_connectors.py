"""Connectors that lie, raise and interrupt: the scheduler goes on, and no page is lost or served wrongly."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, manager, store
from model.memory import PageMemory
from model.tier import Tier
from pagekeeper.transfers import CompletedTransfer

PROMPT = list(range(1, 14))  # three full blocks of four, and a token


class Liar(Tier):
    """A tier of which a test replaces single calls."""

    def say(self, **calls: Any) -> None:
        for name, call in calls.items():
            setattr(self, name, call)


def stored_in_the_tier(pages: int = 8, **options: Any) -> tuple[pk.PagedKVCacheManager, Liar]:
    """A cache whose tier has `PROMPT` and whose device does not."""
    tier = Liar(PageMemory(pages, 4))
    kv = manager(pages, connector=tier, **options)
    store(kv, PROMPT)
    kv.truncate_prefix([])
    assert free(kv) == pages
    return kv, tier


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


class Unsure:
    """Has no truth."""

    def __bool__(self) -> bool:
        raise ValueError("neither")


def endless() -> Iterator[bool]:
    while True:
        yield True


@pytest.mark.parametrize(
    ("answer", "blocks"),
    [
        ([True], 1),
        ([True] * 99, 3),
        ("endless", 3),
        (np.array([True, True, False]), 2),
        ([True, Unsure()], 0),
        (np.ones((3, 2), bool), 0),
        (None, 0),
        (7, 0),
    ],
)
def test_a_look_up_is_believed_as_far_as_it_answers_for_blocks(answer: Any, blocks: int) -> None:
    kv, tier = stored_in_the_tier()
    tier.say(lookup=lambda *_: endless() if isinstance(answer, str) else answer)
    ctx = claimed(kv, PROMPT)
    kv.alloc(ctx)
    kv.verify()
    assert [len(copy.pages) for copy in tier.in_flight()] == ([blocks] if blocks else [])
    assert ctx.cached_prefix_length == 4 * blocks


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ((2, 1), (2, 1)),
        ((2, 10**30), (0, 0)),
        ((4, 0), (0, 0)),
        ((-1, 2), (0, 0)),
        (("1", "1"), (0, 0)),
        ((1.5, 0), (0, 0)),
        (3, (0, 0)),
        (None, (0, 0)),
    ],
)
def test_a_count_that_cannot_be_is_no_count(answer: Any, found: tuple[int, int]) -> None:
    kv, tier = stored_in_the_tier()
    tier.say(count_cached_prefix=lambda *_: answer)
    summary = kv.analyze_prefix_reuse(PROMPT)
    assert (summary.host_blocks, summary.disk_blocks) == found
    assert summary.reusable_blocks_all == sum(found)


class Transfer(CompletedTransfer):
    """Complete at once, in a way that a test says."""

    def __init__(self, **calls: Any) -> None:
        super().__init__()
        self.calls = calls

    def is_complete(self) -> bool:
        answer: bool = self.calls.get("is_complete", lambda: True)()
        return answer

    def result(self) -> None:
        self.calls.get("result", lambda: None)()
        return self.calls.get("value")  # type: ignore[return-value]


async def no_answer() -> None:
    """What calling a coroutine without awaiting it gives."""


@pytest.mark.parametrize(
    "transfer",
    [
        None,
        True,
        Transfer(result=raising(OSError())),
        Transfer(is_complete=raising(OSError()), result=raising(OSError())),
        Transfer(value=OSError("an error is not raised but given")),
        Transfer(value=False),
    ],
)
def test_a_load_that_does_not_say_how_it_ended_has_failed(transfer: Any) -> None:
    kv, tier = stored_in_the_tier()
    tier.say(load=lambda *_: transfer)
    ctx = claimed(kv, PROMPT)
    kv.alloc(ctx)
    kv.verify()
    assert (ctx.cached_prefix_length, ctx.active_length) == (0, 13)
    assert kv.metrics()["copies_failed"] == 1


@pytest.mark.parametrize("call", ["load", "offload"])
def test_a_copy_without_a_transfer_is_told_by_the_call_that_gave_none(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv, tier = stored_in_the_tier()
    tier.say(**{call: lambda *_: None})
    if call == "load":
        kv.alloc(claimed(kv, PROMPT))
    else:
        store(kv, range(100, 109))
    assert f"{call} returned None, must be a KVConnectorTransfer" in caplog.text
    assert kv.metrics()["connector_errors"] == 1
    assert kv.metrics()["copies_failed"] == 1


def test_a_look_up_that_answers_for_fewer_blocks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    kv, tier = stored_in_the_tier()
    tier.say(lookup=lambda *_: [True])
    kv.alloc(claimed(kv, PROMPT))
    assert "lookup answered for 1 of 3 blocks" in caplog.text
    assert kv.metrics()["connector_errors"] == 1


def test_a_failure_is_counted_once_however_often_its_end_is_asked_for() -> None:
    kv, tier = stored_in_the_tier()
    ended = iter([False])
    broken = Transfer(is_complete=lambda: next(ended), result=raising(OSError()))
    tier.say(load=lambda *_: broken)
    first: Any = kv.alloc(claimed(kv, PROMPT))
    tier.say(load=lambda *_: Transfer(is_complete=lambda: False))
    second: Any = kv.alloc(claimed(kv, PROMPT[:9]))
    for _ in range(2):
        with pytest.raises(ValueError, match="in flight"):
            kv.poll_transfers(completions=[first.id, second.id])
    kv.poll_transfers(completions=[first.id])
    assert kv.metrics()["connector_errors"] == 2, "is_complete, and result"
    assert kv.metrics()["copies_failed"] == 1


def test_a_transfer_that_takes_its_end_back_has_ended_all_the_same() -> None:
    kv, tier = stored_in_the_tier()
    answers = iter([False, True, False])
    tier.say(load=lambda *_: Transfer(is_complete=lambda: next(answers)))
    ctx = claimed(kv, PROMPT)
    kv.alloc(ctx)
    assert kv.poll_transfers() == [ctx.request_id]
    assert ctx.processed_length == 12


def test_a_prompt_is_computed_when_the_tier_declines_to_keep_it() -> None:
    kv, tier = stored_in_the_tier()
    tier.offloads = "refuse"
    store(kv, range(100, 109))
    assert kv.metrics()["copies_refused"] == 1
    assert kv.metrics()["connector_errors"] == 0


def test_an_interrupt_in_an_offload_leaves_no_page_pinned() -> None:
    kv, tier = stored_in_the_tier()
    first, second = claimed(kv, range(100, 109)), claimed(kv, range(200, 209))
    kv.alloc([first, second])
    tier.say(offload=raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        kv.step([first, second])
    kv.verify()
    assert first.processed_length == second.processed_length == 9
    kv.release([first, second])
    assert kv.metrics()["pages_in_flight"] == 0
    assert free(kv) == 8


def test_an_interrupt_after_an_offload_began_does_not_free_its_pages() -> None:
    kv, tier = stored_in_the_tier()
    began = Transfer(is_complete=raising(KeyboardInterrupt()))
    tier.say(offload=lambda *_: began)
    ctx = claimed(kv, range(100, 109))
    kv.alloc(ctx)
    with pytest.raises(KeyboardInterrupt):
        kv.step(ctx)
    kv.release(ctx)
    assert kv.metrics()["pages_in_flight"] == 2
    began.calls = {}
    kv.poll_transfers()
    kv.verify()
    assert kv.metrics()["pages_in_flight"] == 0


def test_an_interrupt_after_a_load_began_does_not_free_its_pages() -> None:
    kv, tier = stored_in_the_tier()
    began = Transfer(is_complete=raising(KeyboardInterrupt()))
    tier.say(load=lambda *_: began)
    ctx = claimed(kv, PROMPT)
    with pytest.raises(KeyboardInterrupt):
        kv.alloc(ctx)
    kv.release(ctx)
    assert kv.metrics()["pages_in_flight"] == 3
    began.calls = {}
    kv.poll_transfers()
    kv.verify()
    assert free(kv) == 8


def test_requests_that_nobody_polls_for_are_not_remembered_after_they_end() -> None:
    kv, tier = stored_in_the_tier()
    for _ in range(3):
        ctx = claimed(kv, PROMPT)
        kv.alloc(ctx)
        tier.in_flight()[0].finish()
        kv.begin_step()
        kv.release(ctx)
        kv.truncate_prefix([])
    assert kv.poll_transfers() == []


def test_metrics_answer_when_the_connectors_do_not() -> None:
    kv, tier = stored_in_the_tier()
    tier.say(metrics=raising(OSError()))
    assert kv.metrics()["connector_errors"] == 1


@pytest.mark.parametrize("call", ["wait_for_loads", "wait_for_offloads", "reset_prefix_cache"])
def test_a_call_whose_order_or_reset_fails_changes_nothing(call: str) -> None:
    kv, tier = stored_in_the_tier()
    ctx = claimed(kv, range(100, 109))
    kv.alloc(ctx)
    before = kv.fingerprint()
    tier.say(**{call: raising(OSError(call))})
    calls: dict[str, Callable[[], object]] = {
        "wait_for_loads": lambda: kv.runtime_inputs([[ctx]]),
        "wait_for_offloads": lambda: kv.step(ctx),
        "reset_prefix_cache": kv.reset_prefix_cache,
    }
    with pytest.raises(OSError, match=call):
        calls[call]()
    assert kv.fingerprint() == before


def test_a_connector_that_does_not_shut_down_does_not_keep_the_pool() -> None:
    pytest.importorskip("torch")
    tier = Liar(PageMemory(8, 4))
    kv = manager(8, connector=tier, allocate_pools=True)
    tier.say(shutdown=raising(OSError("busy")))
    with pytest.raises(OSError, match="busy"):
        kv.shutdown()
    with pytest.raises(ValueError, match="no pool"):
        kv.pages_view()


def test_bounds_are_checked_with_a_connector_as_without_one() -> None:
    kv, _ = stored_in_the_tier()
    ctx = claimed(kv, PROMPT)
    with pytest.raises(ValueError, match="num_tokens: empty"):
        kv.alloc(ctx, [])  # type: ignore[call-overload]


def test_a_fork_of_a_request_that_waits_counts_no_token_of_the_load_as_cached() -> None:
    kv, _ = stored_in_the_tier(pages=16)
    ctx = claimed(kv, PROMPT)
    kv.alloc(ctx)
    child = kv.fork(ctx)
    assert (ctx.cached_prefix_length, child.cached_prefix_length) == (12, 0)
    kv.alloc(child)
    assert child.cached_prefix_length == 12
    kv.preempt(child)
    kv.verify()


def test_a_refused_prefetch_changes_nothing() -> None:
    kv, _ = stored_in_the_tier()
    busy = claimed(kv, range(100, 128))
    compute(kv, busy)
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError):
        kv.prefetch(PROMPT)
    assert kv.fingerprint() == before


def test_a_prefetch_of_a_request_that_waits_does_not_say_that_its_pages_may_be_read() -> None:
    kv, _ = stored_in_the_tier()
    ctx = claimed(kv, PROMPT)
    kv.prefetch(ctx)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="waits for a load"):
        kv.prefetch(ctx)
    assert kv.fingerprint() == before


@pytest.mark.parametrize("loads", ["now", "fail", "refuse"])
def test_a_batch_with_a_load_fits_or_is_refused_as_a_whole(loads: str) -> None:
    """The request has more tokens than its prompt: all of them are planned for when its load is."""
    kv, tier = stored_in_the_tier(pages=10)
    tier.loads = loads
    other, ctx = claimed(kv, range(100, 120)), claimed(kv, PROMPT)
    for token in range(14, 33):
        ctx.update(token)
    before = kv.fingerprint()
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc([other, ctx])
    assert kv.fingerprint() == before
