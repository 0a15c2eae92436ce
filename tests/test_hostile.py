"""What no caller should do: it is a named error or it works, and the books are in order afterwards."""

import copy
import gc
import os
import pickle
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, compute, manager, prefilled, request, store

PROMPT = list(range(10, 30))
HUGE = 2**200
FORMS = ("max", "vllm", "flashinfer")


def int32_at_odd_address(values: list[int]) -> Any:
    """An int32 array whose numbers do not lie at multiples of 4."""
    return np.frombuffer(b"\0" + np.array(values, np.int32).tobytes(), np.uint8)[1:].view(np.int32)


class Index:
    """Something that is an integer, and does something when it is asked for it."""

    def __init__(self, value: int, act: Callable[[], object] = lambda: None) -> None:
        self.value = value
        self.act = act

    def __index__(self) -> int:
        self.act()
        return self.value


def in_threads(*works: Callable[[], object]) -> list[BaseException]:
    """Runs each in a thread of its own, all as mixed up as Python can; gives what they raised."""
    raised: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    return raised


# What is given.

WRONG: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "no batch": ("batch", lambda kv, ctx: kv.alloc(None)),
    "a set of requests": ("batch", lambda kv, ctx: kv.alloc({ctx})),
    "a generator of requests": ("batch", lambda kv, ctx: kv.release(ctx for _ in "a")),
    "slots in a list": ("batch", lambda kv, ctx: kv.release([[ctx.slot]])),
    "slots of int64": ("int64", lambda kv, ctx: kv.release(np.array([ctx.slot]))),
    "slots of another byte order": (">i4", lambda kv, ctx: kv.release(np.array([ctx.slot], ">i4"))),
    "slots in two dimensions": ("2-D", lambda kv, ctx: kv.release(np.array([[ctx.slot]], np.int32))),
    "a slot over and over": ("twice", lambda kv, ctx: kv.release(np.broadcast_to(np.int32(ctx.slot), 2))),
    "no list of batches": ("batches", lambda kv, ctx: kv.runtime_inputs(None)),
    "a dictionary of batches": ("batch", lambda kv, ctx: kv.runtime_inputs({1: [ctx]})),
    "a form that is a list": ("form", lambda kv, ctx: kv.runtime_inputs([[ctx]], form=["max"])),
    "tokens in a set": ("new_tokens", lambda kv, ctx: kv.step(ctx, {1})),
    "tokens in two dimensions": ("new_tokens", lambda kv, ctx: kv.step(ctx, [[1]])),
    "tokens of floats": ("new_tokens", lambda kv, ctx: kv.step(ctx, np.array([1.0]))),
    "tokens of NaN": ("new_tokens", lambda kv, ctx: kv.step(ctx, [float("nan")])),
    "a token beyond 64 bits": ("new_tokens", lambda kv, ctx: kv.step(ctx, [HUGE])),
    "None among tokens": (r"new_tokens\[1\]", lambda kv, ctx: kv.step(ctx, np.array([1, None]))),
    "counts of bools": ("counts", lambda kv, ctx: kv.step(ctx, [1], np.array([True]))),
    "counts beyond 64 bits": ("counts", lambda kv, ctx: kv.step(ctx, [1], [HUGE])),
    "a bound beyond 64 bits": ("num_tokens", lambda kv, ctx: kv.alloc(ctx, HUGE)),
    "a bound that is a string": ("num_tokens", lambda kv, ctx: kv.alloc(ctx, "4")),
    "a length beyond 64 bits": ("length", lambda kv, ctx: ctx.truncate(HUGE)),
    "a float as a position": ("positions", lambda kv, ctx: kv.slot_mapping(ctx, [1.5])),
    "a bool as a position": ("positions", lambda kv, ctx: kv.slot_mapping(ctx, [True])),
    "a position beyond 64 bits": ("positions", lambda kv, ctx: kv.slot_mapping(ctx, [HUGE])),
    "a negative transfer": ("completions", lambda kv, ctx: kv.begin_step(completions=[-1])),
    "a transfer beyond 64 bits": ("completions", lambda kv, ctx: kv.poll_transfers([HUGE])),
    "a time that never ends": ("now", lambda kv, ctx: kv.begin_step(now=float("inf"))),
    "a replica beyond 64 bits": ("replica_idx", lambda kv, ctx: kv.block_count(HUGE)),
    "pages of two requests as of one": ("ctx|batch", lambda kv, ctx: kv.get_cache_indices([ctx, ctx])),
    "pages of no request": ("ctx|batch", lambda kv, ctx: kv.get_cache_indices([])),
    "a request that is nothing": ("ctx", lambda kv, ctx: kv.claim(None)),
    "looking for no request": ("ctx", lambda kv, ctx: kv.contains(None)),
    "padding with nothing": ("ctx", lambda kv, ctx: kv.alloc_dummy(None)),
    "a row in no table": ("out", lambda kv, ctx: kv.copy_block_offsets(None, 0, ctx)),
    "a prompt that is None": ("tokens", lambda kv, ctx: kv.probe_prefix_match_length(None)),
    "an adapter that is true": ("lora_id", lambda kv, ctx: kv.probe_prefix_match_length([1], lora_id=True)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_meant_is_refused_by_name_and_changes_nothing(wrong: str) -> None:
    said, call = WRONG[wrong]
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)
    before = kv.fingerprint()
    with pytest.raises((TypeError, ValueError), match=said):
        call(kv, ctx)
    assert kv.fingerprint() == before
    kv.verify()


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens", "lora_generation", "lora_id"])
@pytest.mark.parametrize("value", [HUGE, -HUGE])
def test_a_context_refuses_numbers_beyond_64_bits_by_name(name: str, value: int) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        pk.TextContext("a", [1], **{name: value})


@pytest.mark.parametrize("name", ["total_num_pages", "max_batch_size", "max_seq_len", "max_num_input_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2**31, HUGE, 1.0, float("nan"), True, "4", [4], np.array(["a"])])
def test_a_manager_refuses_sizes_that_are_none_by_name(name: str, value: Any) -> None:
    params = manager().params
    sizes = {"total_num_pages": 4, "max_batch_size": 2} | {name: value}
    with pytest.raises((TypeError, ValueError), match=name):
        pk.PagedKVCacheManager(params, allocate_pools=False, **sizes)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint64])
def test_sizes_of_numpy_are_ints_to_the_manager(dtype: Any) -> None:
    kv = manager(pages=dtype(100), max_batch_size=dtype(2), max_seq_len=dtype(90), page_size=256)
    ctx = claimed(kv, range(80))
    kv.alloc(ctx)
    assert kv.runtime_inputs([[ctx]], form="vllm")[0].slot_mapping.tolist() == list(range(256, 336))


@pytest.mark.parametrize(
    "tokens",
    [
        np.array(PROMPT, ">i8"),
        np.repeat(PROMPT, 2)[::2],
        np.array(PROMPT[::-1])[::-1],
        np.array(PROMPT, object),
        int32_at_odd_address(PROMPT),
        tuple(map(np.uint8, PROMPT)),
        [Index(token) for token in PROMPT],
    ],
    ids=["big-endian", "strided", "backwards", "objects", "unaligned", "numpy scalars", "by __index__"],
)
def test_tokens_are_the_same_however_they_lie_in_memory(tokens: Any) -> None:
    kv = manager()
    store(kv, PROMPT[:8])
    assert kv.probe_prefix_match_length(tokens) == 8
    assert pk.TextContext("a", tokens).tokens.all.tolist() == PROMPT
    assert pk.hash_blocks(tokens, 4) == pk.hash_blocks(PROMPT, 4)


def test_one_number_may_be_numpys() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx, num_tokens=np.int64(5))
    kv.step(ctx, new_tokens=np.int32(7), counts=np.uint8(1))
    assert ctx.tokens.all.tolist() == [*PROMPT[:5], 7]


def test_slots_may_lie_anywhere_in_memory() -> None:
    kv = manager()
    ctx, other = claimed(kv, PROMPT[:5]), claimed(kv, PROMPT)
    slots = int32_at_odd_address([ctx.slot, 99, other.slot])[::-2]
    slots.flags.writeable = False
    kv.release(slots)
    assert (ctx.slot, other.slot) == (None, None)


# Code of the caller's that runs in the middle of a call.


def test_a_request_that_is_released_while_its_bound_is_read_is_not_planned() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    with pytest.raises(ValueError, match="slot"):
        kv.alloc(ctx, [Index(4, lambda: kv.release(ctx))])
    kv.verify()
    assert kv.block_count().free == 8


def test_an_array_that_is_made_on_demand_may_call_the_manager() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)

    class Sampler:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            kv.verify()
            return np.array([kv.probe_prefix_match_length(PROMPT)])

    kv.step(ctx, new_tokens=Sampler())
    assert ctx.tokens.all.tolist() == [*PROMPT[:5], 0]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError, KeyError])
def test_what_an_integer_raises_when_it_is_asked_goes_through(raised: type[BaseException]) -> None:
    kv = manager()
    before = kv.fingerprint()

    def fail() -> None:
        raise raised

    with pytest.raises(raised):
        kv.probe_prefix_match_length([1, Index(2, fail)])
    assert kv.fingerprint() == before


# Threads.


def test_of_two_threads_that_claim_one_id_one_gets_it() -> None:
    kv = manager()
    turns = threading.Barrier(2)
    contexts = [[pk.TextContext(f"request {index}", PROMPT) for index in range(100)] for _ in range(2)]

    def claim_all(mine: list[Any]) -> None:
        for ctx in mine:
            turns.wait()
            with suppress(ValueError):
                kv.claim(ctx)

    assert in_threads(*(partial(claim_all, mine) for mine in contexts)) == []
    assert [(a.slot is None) + (b.slot is None) for a, b in zip(*contexts, strict=True)] == [1] * 100
    kv.verify()


def test_threads_with_requests_of_their_own_do_not_meet() -> None:
    kv = manager(pages=100)

    def live(first: int) -> None:
        for turn in range(200):
            batch = [claimed(kv, [first, *PROMPT[: turn % 7 + size]]) for size in (1, 4, 8)]
            compute(kv, *batch, new_tokens=[1, 2, 3])
            assert [ctx.tokens.all[-1] for ctx in batch] == [1, 2, 3]
            kv.release(batch)

    assert in_threads(*(partial(live, first) for first in range(3))) == []
    kv.verify()
    assert (kv.block_count().free, kv.metrics()["requests"]) == (100, 0)


# The process around the cache.


def test_a_fork_has_a_cache_of_its_own() -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)
    before = kv.fingerprint()
    child = os.fork()
    if child == 0:
        kv.release(ctx)
        kv.verify()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert kv.fingerprint() == before


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_request_cannot_be_copied(act: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="TextContext"):
        act(claimed(manager(), PROMPT))


def test_a_manager_and_its_contexts_are_gone_with_their_last_name() -> None:
    kv = manager()
    ctx = prefilled(kv, PROMPT)
    gone = weakref.ref(kv), weakref.ref(ctx)
    del kv, ctx
    gc.collect()
    assert [name() for name in gone] == [None, None]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's account of memory")
def test_requests_that_come_and_go_leave_no_memory_behind() -> None:
    kv = manager()

    def live(times: int) -> int:
        for index in range(times):
            ctx = claimed(kv, [*PROMPT[:5], index], cache_salt=str(index))
            kv.alloc(ctx)
            kv.runtime_inputs([[ctx]])
            kv.release(ctx)  # the results are due and never come
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = live(5_000)
    assert live(20_000) - before < 4 << 20


def test_a_pool_beyond_memory_is_an_error_of_python() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from pagekeeper import *\n"
        "params = MHAKVCacheParams(dtype='uint8', n_kv_heads=1, head_dim=1, num_layers=1, page_size=1)\n"
        "try: PagedKVCacheManager(params, None, 2**31 - 1, 1, allocate_pools=False)\n"
        "except (MemoryError, ValueError) as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "2147483647" in said


# Contexts, slots and managers that do not belong together.


def test_a_context_lives_again_under_other_pages_and_hashes() -> None:
    first, second = manager(page_size=4), manager(page_size=3, kv_hash_algo="sha256", kv_hash_seed="0" * 64)
    ctx = prefilled(first, PROMPT)
    first.release(ctx)
    second.claim(ctx)
    compute(second, ctx)
    assert second.commit_and_get_block_hashes(ctx) == pk.hash_blocks(PROMPT, 3, algo="sha256", seed="0" * 64)
    second.verify()


def test_results_from_another_manager_reach_nobody() -> None:
    first, second = manager(), manager()
    ctx = claimed(first, PROMPT[:5])
    first.alloc(ctx)
    first.runtime_inputs([[ctx]])
    first.release(ctx)
    bystander = claimed(second, PROMPT[:5])
    second.alloc(bystander)
    with pytest.raises(ValueError, match="released"):
        second.step(ctx, 1)
    assert bystander.processed_length == 0


def test_a_late_result_reaches_nobody_after_thousands_of_requests() -> None:
    kv = manager()
    late = claimed(kv, PROMPT[:5])
    kv.alloc(late)
    kv.runtime_inputs([[late]])
    kv.release(late)
    for _ in range(2_047):
        kv.release(claimed(kv, [1]))
    ctx = claimed(kv, PROMPT[:5])
    kv.alloc(ctx)
    kv.step(late, 1)
    assert (ctx.processed_length, len(ctx)) == (0, 5)


def test_a_late_result_is_given_once_a_batch() -> None:
    kv = manager()
    late = claimed(kv, PROMPT[:5])
    kv.alloc(late)
    kv.runtime_inputs([[late]])
    kv.release(late)
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="twice"):
        kv.step([late, late])
    assert kv.fingerprint() == before


@pytest.mark.parametrize("edit", [lambda kv, ctx: ctx.truncate(2), lambda kv, ctx: kv.preempt(ctx)])
def test_an_edit_without_a_forward_makes_no_result_due(edit: Callable[[Any, Any], object]) -> None:
    kv = manager()
    ctx = claimed(kv, PROMPT[:5])
    edit(kv, ctx)
    with pytest.raises(ValueError, match="no step out"):
        kv.step(ctx, 1)


# Memory of tables.


@pytest.mark.parametrize(
    ("form", "name"),
    [("vllm", "seq_lens"), ("flashinfer", "kv_indices"), ("flashinfer", "qo_indptr")],
)
def test_a_batch_that_lies_in_the_memory_of_its_tables_is_an_error(form: Any, name: str) -> None:
    kv = manager()
    ctx = claimed(kv, [1])
    kv.alloc(ctx)
    tables = [kv.runtime_inputs([[ctx]], form=form)[0] for _ in range(2)]
    with pytest.raises(ValueError, match="batch"):
        kv.runtime_inputs([getattr(tables[0], name)], form=form)
    kv.verify()


@pytest.mark.parametrize("form", FORMS)
def test_a_table_cannot_be_written_by_its_reader(form: Any) -> None:
    kv = manager()
    ctx = claimed(kv, [1])
    kv.alloc(ctx)
    tables = kv.runtime_inputs([[ctx]], form=form)[0]
    first = getattr(tables, {"max": "lookup_table", "vllm": "block_table", "flashinfer": "kv_indices"}[form])
    with pytest.raises(ValueError, match="read-only"):
        first[...] = 7


@pytest.mark.parametrize("form", FORMS)
def test_tables_stand_through_calls_that_fail_and_calls_in_other_forms(form: Any) -> None:
    kv = manager(pages=40, max_batch_size=4)
    batch = [claimed(kv, range(size, 2 * size)) for size in (3, 5, 9)]
    kv.alloc(batch)
    kept = kv.runtime_inputs([batch], form=form)[0]
    copies = {name: np.copy(getattr(kept, name)) for name in kept.__slots__}
    kv.runtime_inputs([batch[::-1]], form=form)
    for wrong in ([batch[0]] * 2, [*batch, request([1])], batch * 2, np.array([7], np.int32), None):
        with pytest.raises((TypeError, ValueError)):
            kv.runtime_inputs([wrong], form=form)
    for other in set(FORMS) - {form}:
        kv.runtime_inputs([batch[:1]], form=other)
    for name, copied in copies.items():
        np.testing.assert_array_equal(getattr(kept, name), copied)


def test_padding_obeys_the_limits_of_a_request() -> None:
    kv = manager(pages=2)
    before = kv.block_count(), kv.metrics()["requests"]
    with pytest.raises((ValueError, pk.RequestTooLargeError)):
        kv.alloc_dummy(request(range(200)))
    assert (kv.block_count(), kv.metrics()["requests"]) == before


# Sizes.


def test_a_page_may_be_larger_than_any_prompt() -> None:
    kv = manager(pages=1, page_size=2**31 - 1)
    ctx = prefilled(kv, PROMPT)
    assert kv.slot_mapping(ctx, [0, 19]).tolist() == [2**31 - 1, 2**31 + 18]


@pytest.mark.parametrize(("room", "pages"), [(2.0, 1), (2.99, 1), (3.0, 2)])
def test_bytes_buy_whole_pages_and_the_null_page(room: float, pages: int) -> None:
    params = manager().params
    given = int(room * params.bytes_per_page)
    kv = pk.PagedKVCacheManager(params, max_batch_size=1, available_bytes=given, allocate_pools=False)
    assert kv.block_count().total == pages
