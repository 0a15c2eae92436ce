"""A bad call is a named error that says what was wrong, and leaves everything as it was."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, free, hit, manager, prefilled, request, row, store

PROMPT = list(range(10, 30))


@dataclass
class Bench:
    """A manager with a running request, an idle one, a stranger, and the slot of a released request."""

    kv: Any
    running: Any
    idle: Any
    stranger: Any
    released: Any
    stale: Any


@pytest.fixture
def bench() -> Bench:
    kv = manager(pages=8, max_batch_size=2)
    released = request(PROMPT[:5])
    stale = np.array([kv.claim(released)], np.int32)
    compute(kv, released)
    kv.release(released)
    running, idle = prefilled(kv, PROMPT[:6]), claimed(kv, PROMPT[:3])
    return Bench(kv, running, idle, request([1]), released, stale)


def same_id(ctx: Any) -> Any:
    return pk.TextContext(request_id=ctx.request_id, max_length=9, tokens=pk.TokenBuffer(np.array([1])))


WRONG: dict[str, tuple[str, Callable[[Bench], object]]] = {
    "claiming twice": ("claimed already", lambda b: b.kv.claim(b.running)),
    "claiming a request id that is in use": ("claimed already", lambda b: b.kv.claim(same_id(b.running))),
    "claiming on a replica that is not there": (
        "replica_idx=1",
        lambda b: b.kv.claim(b.stranger, replica_idx=1),
    ),
    "claiming on a negative replica": ("replica_idx=-1", lambda b: b.kv.claim(b.stranger, replica_idx=-1)),
    "alloc of a request that is not claimed": ("not claimed", lambda b: b.kv.alloc(b.stranger)),
    "alloc of a released request": ("released", lambda b: b.kv.alloc(b.released)),
    "alloc of a stale slot": ("slot 0", lambda b: b.kv.alloc(b.stale)),
    "alloc of a slot that was never given": ("slot 77", lambda b: b.kv.alloc(np.array([77], np.int32))),
    "alloc of a negative slot": ("slot -1", lambda b: b.kv.alloc(np.array([-1], np.int32))),
    "alloc of one request twice": ("twice", lambda b: b.kv.alloc([b.idle, b.idle])),
    "alloc with a stranger behind a good request": (
        "not claimed",
        lambda b: b.kv.alloc([b.idle, b.stranger]),
    ),
    "alloc with nothing left to compute": ("compute", lambda b: b.kv.alloc(b.running)),
    "alloc of no tokens": ("num_tokens=0", lambda b: b.kv.alloc(b.idle, num_tokens=0)),
    "alloc of a negative number of tokens": ("-3", lambda b: b.kv.alloc(b.idle, num_tokens=-3)),
    "alloc with too many bounds": ("num_tokens", lambda b: b.kv.alloc([b.idle], num_tokens=[1, 1])),
    "step of a request that is not claimed": ("not claimed", lambda b: b.kv.step(b.stranger)),
    "step of a request that was not planned": ("no step out", lambda b: b.kv.step(b.idle)),
    "release of a request that is not claimed": ("not claimed", lambda b: b.kv.release(b.stranger)),
    "releasing again": ("released", lambda b: b.kv.release(b.released)),
    "release of a stale slot": ("slot 0", lambda b: b.kv.release(b.stale)),
    "release of one request twice": ("twice", lambda b: b.kv.release([b.idle, b.idle])),
    "release with a stranger behind a good request": (
        "not claimed",
        lambda b: b.kv.release([b.running, b.stranger]),
    ),
    "preempting a request that is not claimed": ("not claimed", lambda b: b.kv.preempt(b.stranger)),
    "preempting one request twice": ("twice", lambda b: b.kv.preempt([b.idle, b.idle])),
    "tables of more requests than max_batch_size": (
        "max_batch_size=2",
        lambda b: b.kv.runtime_inputs([[b.running] * 3]),
    ),
    "tables for a replica that is not there": (
        "2 given",
        lambda b: b.kv.runtime_inputs([[b.running], [b.idle]]),
    ),
    "tables in an unknown form": ("flashinfer", lambda b: b.kv.runtime_inputs([[b.running]], form="paper")),
    "indices of a request that is not claimed": ("not claimed", lambda b: b.kv.get_cache_indices(b.stranger)),
    "hashes of a request that is not claimed": (
        "not claimed",
        lambda b: b.kv.commit_and_get_block_hashes(b.stranger),
    ),
    "truncating to more than there is": ("length=7", lambda b: b.running.truncate(7)),
    "truncating to a negative length": ("length=-1", lambda b: b.running.truncate(-1)),
    "appending a token out of range": ("2147483648", lambda b: b.running.update(2**31)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_is_a_value_error_that_says_what_was_wrong_and_changes_nothing(
    bench: Bench, wrong: str
) -> None:
    said, call = WRONG[wrong]
    before = bench.kv.fingerprint()
    with pytest.raises(ValueError, match=said):
        call(bench)
    assert bench.kv.fingerprint() == before
    bench.kv.verify()


WRONG_RESULTS: dict[str, dict[str, Any]] = {
    "too few counts": {"new_tokens": [1], "counts": []},
    "too many counts": {"new_tokens": [1, 1], "counts": [1, 1]},
    "more tokens than counted": {"new_tokens": [1, 1], "counts": [1]},
    "fewer tokens than counted": {"new_tokens": [1], "counts": [2]},
    "a negative count": {"new_tokens": [], "counts": [-1]},
    "two tokens for one request": {"new_tokens": [1, 1]},
    "a token out of range": {"new_tokens": [2**31]},
    "a float": {"new_tokens": [1.5]},
    "a bool": {"new_tokens": [True]},
}


@pytest.mark.parametrize("wrong", WRONG_RESULTS)
def test_wrong_results_are_a_value_error_and_deliver_nothing(bench: Bench, wrong: str) -> None:
    bench.kv.alloc(bench.idle)
    before = bench.kv.fingerprint()
    with pytest.raises(ValueError, match=r"counts|new_tokens"):
        bench.kv.step([bench.idle], **WRONG_RESULTS[wrong])
    assert bench.kv.fingerprint() == before
    assert bench.idle.processed_length == 0


@pytest.mark.parametrize(
    ("tokens", "position"),
    [([2**31], 0), ([5, -(2**31) - 1], 1), ([5, 5, 2**63], 2), ([1.0], 0), ([1, True], 1), ([0, "a"], 1)],
)
def test_a_context_refuses_what_is_no_token_and_says_where(tokens: list[Any], position: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{position}\b"):
        pk.TextContext(request_id=pk.RequestID(), max_length=9, tokens=pk.TokenBuffer(tokens))


def test_a_context_needs_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        pk.TextContext(request_id=pk.RequestID(), max_length=9, tokens=pk.TokenBuffer([]))


@pytest.mark.parametrize(
    "argument",
    [{"lora_generation": -1}, {"max_new_tokens": -1}],
    ids=lambda given: next(iter(given)),
)
def test_a_context_refuses_numbers_out_of_range_by_name(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(ValueError, match=name):
        request([1], **argument)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"cache_salt": 5}, "cache_salt: got int, must be a str"),
        ({"token_overrides": [(0, 1), (0, 2)]}, "token_overrides: token index 0 is given twice"),
        ({"token_overrides": [(0, 2**64)]}, r"token_overrides\[0\]: value 18446744073709551616"),
        ({"token_overrides": [(0,)]}, r"token_overrides\[0\]: must be"),
    ],
)
def test_a_context_names_its_own_arguments_in_errors(argument: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{said}"):
        request([1], **argument)


@pytest.mark.parametrize(
    "size", ["total_num_pages", "max_batch_size", "max_seq_len", "max_num_input_tokens", "page_size"]
)
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**33, True, 1.0, "4"])
def test_a_size_that_is_no_whole_number_in_range_is_refused_by_name(size: str, value: Any) -> None:
    sizes: dict[str, Any] = {"page_size": 4, "pages": 8, "max_batch_size": 2}
    sizes[{"total_num_pages": "pages"}.get(size, size)] = value
    with pytest.raises(ValueError, match=rf"^{size}={value!r}: must be a whole number from 1 to "):
        manager(**sizes)


@pytest.mark.parametrize("call", ["begin_step", "poll_transfers"])
@pytest.mark.parametrize(
    ("completions", "said"),
    [
        ([-1], r"completions\[0\]: -1"),
        ([2**64], r"completions\[0\]"),
        ([0.5], r"completions\[0\]"),
        ([7], "7"),
    ],
)
def test_a_completion_that_is_no_copy_is_a_value_error_and_changes_nothing(
    call: str, completions: list[Any], said: str
) -> None:
    kv = manager()
    before = kv.fingerprint()
    with pytest.raises(ValueError, match=said):
        getattr(kv, call)(completions=completions)
    assert kv.fingerprint() == before


def test_a_token_for_a_step_that_left_prompt_to_compute_is_refused() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:8])
    kv.alloc(ctx, num_tokens=4)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="count must be 0"):
        kv.step(ctx, new_tokens=[1])
    assert kv.fingerprint() == before


def test_an_item_behind_the_prompt_is_refused_at_claim() -> None:
    kv = manager()
    ctx = request(PROMPT[:8], mm_items=[(bytes(32), 6, 4)])
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="10"):
        kv.claim(ctx)
    assert kv.fingerprint() == before
    assert not kv.contains(ctx)


def test_an_unknown_argument_of_a_context_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        request([1], salt="a")


def test_a_full_pool_tells_what_is_needed_and_what_is_there() -> None:
    kv = manager(pages=6)
    store(kv, PROMPT[:8])
    prefilled(kv, range(50, 59))  # three pages held, two cached, one unused
    ctx = claimed(kv, range(70, 86))
    with pytest.raises(pk.InsufficientBlocksError) as refused:
        kv.alloc(ctx)
    error = refused.value
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, pk.RequestTooLargeError)
    assert error.request_id == ctx.request_id
    assert (error.needed, error.free, error.evictable, error.pinned) == (4, 3, 2, 3)
    assert str(ctx.request_id) in str(error)


def test_a_request_beyond_the_pool_is_a_room_error_of_its_own_kind() -> None:
    kv = manager(pages=2)
    ctx = claimed(kv, PROMPT[:9])
    with pytest.raises(pk.RequestTooLargeError) as refused:
        kv.alloc(ctx)
    assert isinstance(refused.value, pk.InsufficientBlocksError)
    assert (refused.value.request_id, refused.value.needed) == (ctx.request_id, 3)


def test_a_request_that_outgrows_the_pool_is_told_so_while_others_wait() -> None:
    kv = manager(pages=2)
    ctx = claimed(kv, PROMPT[:8])
    compute(kv, ctx, new_tokens=[1])
    with pytest.raises(pk.RequestTooLargeError):
        kv.alloc(ctx)


def test_after_a_refusal_the_same_call_works_once_there_is_room() -> None:
    kv = manager(pages=3)
    holder = prefilled(kv, PROMPT[:8])
    waiting = claimed(kv, range(50, 58))
    with pytest.raises(pk.InsufficientBlocksError):
        kv.alloc(waiting)
    kv.release(holder)
    kv.alloc(waiting)
    assert len(row(kv, waiting)) == 2


def test_a_second_release_gives_no_page_to_two_requests() -> None:
    kv = manager(pages=4)
    ctx = prefilled(kv, PROMPT[:8])
    kv.release(ctx)
    with pytest.raises(ValueError, match="release"):
        kv.release(ctx)
    assert free(kv) == 4
    a, b = prefilled(kv, range(50, 58)), prefilled(kv, range(60, 68))
    assert sorted(row(kv, a) + row(kv, b)) == [1, 2, 3, 4]


def test_a_slot_that_is_used_again_does_not_answer_to_its_old_number() -> None:
    kv = manager(pages=4)
    old = request(PROMPT[:4])
    stale = np.array([kv.claim(old)], np.int32)
    kv.release(old)
    heir = request(range(50, 54))
    slot = kv.claim(heir)
    assert slot != stale[0]
    with pytest.raises(ValueError, match="slot"):
        kv.release(stale)
    assert kv.contains(heir)


def test_a_failed_call_costs_no_hit() -> None:
    kv = manager(pages=4)
    store(kv, PROMPT[:8])
    reader = claimed(kv, PROMPT[:9])
    with pytest.raises(ValueError, match="claimed"):
        kv.alloc([reader, request([1])])
    assert hit(kv, PROMPT) == 8
    assert free(kv) == 4


def test_batches_over_max_batch_size_are_planned_and_only_their_tables_refused() -> None:
    kv = manager(pages=8, max_batch_size=2)
    batch = [claimed(kv, [index]) for index in range(3)]
    kv.alloc(batch)
    with pytest.raises(ValueError, match="max_batch_size"):
        kv.runtime_inputs([batch])
    kv.step(batch)
    assert [ctx.processed_length for ctx in batch] == [1, 1, 1]


def test_pages_of_nobody_are_never_given_out_as_the_null_page() -> None:
    kv = manager(pages=3, page_size=1)
    ctx = claimed(kv, [1, 2, 3])
    kv.alloc(ctx)
    assert sorted(row(kv, ctx)) == [1, 2, 3]


@pytest.mark.parametrize("pages", [0, -1])
def test_a_pool_without_pages_is_refused(pages: int) -> None:
    with pytest.raises(ValueError, match="total_num_pages"):
        manager(pages=pages)
