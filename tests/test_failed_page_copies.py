"""Copies and fills of pages that fail before a forward: none counts as done, and the next call does all.

Pages have 4 tokens; six are computed, on pages 1 and 2, so that a fork that goes on gets a copy of page 2.
"""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import pagekeeper as pk
from model.engine import claimed, copy_pages, manager, prefilled, row
from model.grouped import grouped, rows
from pagekeeper.params import FullAttention, Recurrent, SlidingWindow

pytest.importorskip("torch")

PROMPT = range(10, 16)


def fails(kv: pk.PagedKVCacheManager, verb: str, done: int, group: int = 0) -> Any:
    """While this is entered a pool's verb fails when it has done so many pages or copies."""
    pool = kv._pools[group]
    carry_out = getattr(pool, verb)

    def broken(pages: np.ndarray) -> None:
        carry_out(pages[:done])
        raise OSError("no copy today")

    return patch.object(pool, verb, broken)


def family(kv: pk.PagedKVCacheManager) -> list[pk.TextContext]:
    """Three requests that go on from the same six tokens, and two copies that are planned for it."""
    parent = prefilled(kv, PROMPT)
    beams = [parent, kv.fork(parent), kv.fork(parent)]
    for token, beam in enumerate(beams):
        beam.update(token)
    kv.alloc(beams)
    return beams


@pytest.mark.parametrize("done", [0, 1, 2])
def test_copies_that_fail_are_all_made_by_the_next_call(done: int) -> None:
    kv = manager(allocate_pools=True)
    beams = family(kv)
    kv.pages_view()[2] = 7
    before = kv.fingerprint()
    with fails(kv, "copy_pages", done), pytest.raises(OSError, match="no copy today"):
        kv.runtime_inputs([beams])
    assert kv.fingerprint() == before
    kv.runtime_inputs([beams])
    assert sorted(row(kv, beam)[1] for beam in beams) == [2, 3, 4]
    assert kv.pages_view()[2:5, 0].tolist() == [7, 7, 7]
    assert len(kv.take_page_copies()) == 0
    kv.step(beams, new_tokens=[1, 2, 3])
    kv.verify()


def test_a_step_whose_copies_failed_is_refused() -> None:
    kv = manager(allocate_pools=True)
    beams = family(kv)
    with fails(kv, "copy_pages", 1), pytest.raises(OSError, match="no copy today"):
        kv.runtime_inputs([beams])
    before = kv.fingerprint()
    with pytest.raises(ValueError, match="page copies that go before this forward were never taken"):
        kv.step(beams, new_tokens=[1, 2, 3])
    assert kv.fingerprint() == before


def test_a_forward_whose_copies_failed_has_no_result_to_wait_for() -> None:
    kv = manager(allocate_pools=True)
    beams = family(kv)
    with fails(kv, "copy_pages", 1), pytest.raises(OSError, match="no copy today"):
        kv.runtime_inputs([beams])
    kv.preempt(beams[0])
    kv.alloc(beams[0])
    kv.runtime_inputs([beams])
    kv.step(beams, new_tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="no step out"):
        kv.step(beams[0], new_tokens=[1])
    kv.verify()


def test_what_a_request_leaves_that_never_got_its_copy_is_right_when_it_is_found() -> None:
    kv = manager(allocate_pools=True, enable_partial_reuse=True)
    parent = prefilled(kv, PROMPT)
    child = kv.fork(parent)
    child.update(1)
    kv.alloc(child)
    kv.pages_view()[2] = 7
    with fails(kv, "copy_pages", 0), pytest.raises(OSError, match="no copy today"):
        kv.runtime_inputs([[child]])
    assert kv.release(child) == 3, "its two tokens of the second block stay cached"
    kv.release(parent)
    other = claimed(kv, [*PROMPT, 1])
    kv.alloc(other)
    assert (other.cached_prefix_length, row(kv, other)[1]) == (6, 4), "page 3 waits for its copy"
    kv.runtime_inputs([[other]])
    assert kv.pages_view()[[3, 4], 0].tolist() == [7, 7]
    kv.verify()


def test_a_failure_in_one_group_leaves_the_copies_of_all_to_the_next_call() -> None:
    kinds = {"full": FullAttention(), "window": SlidingWindow(8)}
    kv = grouped(kinds, allocate_pools=True, enable_partial_reuse=False)
    beams = family(kv)
    for name in kinds:
        kv.get_buffers(0, group=name)[2] = 7
    with fails(kv, "copy_pages", 1, group=1), pytest.raises(OSError, match="no copy today"):
        kv.runtime_inputs([beams])
    assert [kv._core.planned_page_copies(group).tolist() for group in (0, 1)] == [[[2, 3], [2, 4]]] * 2
    kv.runtime_inputs([beams])
    for name in kinds:
        assert (kv.get_buffers(0, group=name)[2:5] == 7).all()
        assert len(kv.take_page_copies(name)) == 0


def test_a_new_state_whose_page_was_not_zeroed_is_zeroed_by_the_next_call() -> None:
    kinds = {"full": FullAttention(), "states": Recurrent(8)}
    kv = grouped(kinds, allocate_pools=True)
    batch = [claimed(kv, range(100 * number, 100 * number + 3)) for number in range(3)]
    kv.alloc(batch)
    states = kv.get_buffers(0, name="state", group="states")
    states[:] = 7
    with fails(kv, "fill_pages", 1, group=1), pytest.raises(OSError, match="no copy today"):
        kv.runtime_inputs([batch])
    kv.release(batch[0])
    kv.runtime_inputs([batch[1:]])
    held = [rows(kv, ctx)["states"][0] for ctx in batch[1:]]
    assert not states[held].any()
    assert [len(kv.take_page_fills(name)) for name in kinds] == [0, 0]
    kv.verify()


def test_inputs_that_cannot_be_made_leave_an_engines_copies_and_fills_to_the_next_call() -> None:
    kv = grouped({"full": FullAttention(), "states": Recurrent(8)})
    beams, new = family(kv), claimed(kv, [1])
    copy_pages(kv)
    kv.take_page_fills("states")
    kv.step(beams, new_tokens=[1, 2, 3])
    last = kv.fork(beams[0])
    batch = [*beams, last, new]
    kv.alloc(batch)
    with patch("pagekeeper.request_calls._inputs", side_effect=MemoryError), pytest.raises(MemoryError):
        kv.runtime_inputs([batch])
    inputs = kv.runtime_inputs([batch])
    planned = {
        name: (len(inputs[name].page_copies), len(inputs[name].page_fills)) for name in ("full", "states")
    }
    assert planned == {"full": (1, 0), "states": (1, 1)}
    assert [len(kv.take_page_copies(name)) for name in planned] == [0, 0]
