"""Caches above a disk that fails or does not answer: requests are served as without one."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model.faults import PROGRAM, disk_does, needs_faults
from model.host import BYTES, HostCache, prompt_of
from model.on_disk import TENS, closed, disk, found, lossy, opened, reopened, store_of

pytestmark = needs_faults


def healed(cache: HostCache) -> None:
    """The disk works, and has all that it was given and did not refuse."""
    for call in ("read", "write", "sync", "entries"):
        disk_does(cache, call, "work")
    assert cache.kv.flush()


def fill_host(cache: HostCache) -> None:
    """Prompts 10 to 17 take all units of host memory that nobody writes or reads."""
    for number in range(10, 18):
        cache.serve(prompt_of(number, 4))


# The disk does not answer.


def test_a_disk_that_hangs_holds_up_no_call_and_no_page_and_a_bounded_number_of_blocks(
    tmp_path: Path,
) -> None:
    cache = opened(tmp_path, pages=16, units=16, slots=400)
    disk_does(cache, "write", "hold")
    times = []
    for number in range(1, 61):
        begun = time.perf_counter()
        assert cache.serve(prompt_of(number, 3)) == 0
        times.append(time.perf_counter() - begun)
    assert max(times) < 3, "all calls of a request, and a look at the books after each"
    counted = cache.kv.metrics()
    assert (counted["copies_in_flight"], counted["pages_in_flight"]) == (0, 0)
    assert cache.kv.block_count().free == 16
    assert disk(cache, "writes") == 8, "half of the units wait for the disk"
    assert disk(cache, "dropped_busy") == 60 * 3 - 8
    assert (cache.counted("dropped_busy"), cache.counted("dropped_no_unit")) == (0, 0), "others have theirs"
    ctx = cache.computed(prompt_of(70, 3))
    begun = time.perf_counter()
    cache.kv.preempt(ctx)
    cache.settled()
    assert time.perf_counter() - begun < 0.5
    assert cache.kv.block_count().free == 16
    healed(cache)
    cache.serve(prompt_of(80, 3))
    cache = reopened(cache, tmp_path, slots=400)
    assert (disk(cache, "blocks"), found(cache, prompt_of(80, 3))) == (11, (0, 0, 3))


def test_a_block_whose_write_never_ends_is_found_in_the_host_and_others_on_disk(tmp_path: Path) -> None:
    cache = opened(tmp_path, units=8)
    other, stuck = prompt_of(1, 3), prompt_of(2, 3)
    cache.serve(other)
    assert cache.kv.flush()
    disk_does(cache, "write", "hold")
    cache.serve(stuck)
    fill_host(cache)
    cache.kv.truncate_prefix([])
    assert (found(cache, stuck), found(cache, other)) == ((0, 3, 0), (0, 0, 3))
    cache.memory[:] = 0
    assert [cache.serve(prompt) for prompt in (stuck, other, stuck)] == [12, 12, 12]
    cache.kv.reset_prefix_cache()
    assert (found(cache, stuck), cache.serve(stuck)) == ((0, 0, 0), 0), "a miss at once"
    healed(cache)
    cache = reopened(cache, tmp_path)
    assert disk(cache, "blocks") == 0, "what was on its way when the cache was reset was given up"


def test_a_request_whose_read_never_ends_waits_alone(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    slow, quick = prompt_of(1, 3), prompt_of(2, 3)
    cache.serve(slow)
    cache = reopened(cache, tmp_path, pages=16)
    disk_does(cache, "read", "hold")
    waits = cache.claimed(slow)
    cache.kv.alloc(waits)
    ctx = cache.computed(quick)
    assert (waits.active_length, cache.holds(ctx)) == (0, True)
    cache.kv.release(ctx)
    disk_does(cache, "read", "work")
    assert cache.settled() == [waits.request_id]
    cache.run(waits)
    assert waits.cached_prefix_length == 12


def test_blocks_are_read_from_a_disk_that_answers_no_write(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    kept = [prompt_of(number, 2) for number in TENS]
    for prompt in kept:
        cache.serve(prompt)
    cache = reopened(cache, tmp_path, units=64, disk={"num_disk_workers": 4})
    disk_does(cache, "write", "hold")
    for number in range(1, 9):
        cache.serve(prompt_of(number, 3))
    assert disk(cache, "writes") == 24, "many more than four"
    assert [cache.serve(prompt) for prompt in kept] == [8] * 9
    assert disk(cache, "loaded_blocks") == 18
    healed(cache)
    assert disk(cache, "durable_blocks") == 24


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C comes, and ends what is done here within a second."""
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - sent[0] < 1
    timer.join()


@pytest.mark.parametrize("call", ["write", "sync"])
def test_ctrl_c_ends_a_flush_within_a_second_and_the_cache_goes_on(tmp_path: Path, call: str) -> None:
    cache = opened(tmp_path, disk={"fsync": "batch"})
    disk_does(cache, call, "hold")  # type: ignore[arg-type]
    prompt = prompt_of(1, 3)
    cache.serve(prompt)
    with interrupted():
        cache.kv.flush(50)
    assert not cache.kv.flush(0.1), "the disk has not answered"
    cache.kv.truncate_prefix([])
    assert cache.serve(prompt) == 12
    healed(cache)
    assert disk(cache, "durable_blocks") == 3
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompt) == 12


def test_ctrl_c_ends_a_reset_that_waits_for_the_disk_and_what_was_there_is_gone_all_the_same(
    tmp_path: Path,
) -> None:
    cache = opened(tmp_path)
    cache.serve(prompt_of(1, 3))
    assert cache.kv.flush()
    disk_does(cache, "entries", "hold")
    with interrupted():
        cache.kv.reset_prefix_cache()
    cache.kv.truncate_prefix([])
    assert found(cache, prompt_of(1, 3)) == (0, 0, 0)
    assert cache.serve(prompt_of(2, 3)) == 0
    healed(cache)
    cache = reopened(cache, tmp_path)
    assert [found(cache, prompt_of(number, 3))[2] for number in (1, 2)] == [0, 3]


def test_requests_are_served_while_a_reset_waits_for_the_disk(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.serve(prompt_of(1, 3))
    assert cache.kv.flush()
    disk_does(cache, "entries", "hold")
    reset = threading.Thread(target=cache.kv.reset_prefix_cache)
    reset.start()
    while disk(cache, "blocks"):
        time.sleep(0.001)
    assert cache.serve(prompt_of(2, 3)) == 0
    assert cache.serve(prompt_of(2, 3)) == 12
    assert reset.is_alive()
    healed(cache)
    reset.join(10)
    assert not reset.is_alive()
    assert found(cache, prompt_of(2, 3))[0] == 0, "the device forgets when the disk has"


def test_a_process_that_exits_while_the_disk_hangs_ends_and_leaves_a_store(tmp_path: Path) -> None:
    program = f"""{PROGRAM}
import atexit, time
from model.faults import disk_does
from model.on_disk import opened
cache = opened(Path({str(tmp_path)!r}))
cache.serve(prompt_of(1, 3))
assert cache.kv.flush()
disk_does(cache, "write", "hold")
cache.serve(prompt_of(2, 3))
atexit.register(lambda: print(time.monotonic()))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert time.monotonic() - float(ended.stdout) < 5
    cache = opened(tmp_path)
    assert [cache.serve(prompt_of(number, 3)) for number in (1, 2)] == [12, 0]


# The disk fails.


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_disk_that_refuses_direct_io_is_used_through_the_page_cache_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    cache = opened(tmp_path)
    if not disk(cache, "direct"):
        pytest.skip("the file system of the test has no direct I/O")
    prompts = [prompt_of(number, 3) for number in (1, 2)]
    if call == "read":
        cache.serve(prompts[0])
        cache = reopened(cache, tmp_path)
    assert caplog.messages == []
    disk_does(cache, call, "refuse")  # type: ignore[arg-type]
    for prompt in prompts:
        cache.serve(prompt)
        assert cache.kv.flush()
        cache.settled()
    assert (disk(cache, "direct"), disk(cache, "read_errors"), disk(cache, "write_errors")) == (0, 0, 0)
    assert caplog.messages == [
        "disk: the file system refuses direct I/O; blocks go through the page cache, "
        "which takes memory beside the tier's"
    ]
    cache = reopened(cache, tmp_path)
    assert [cache.serve(prompt) for prompt in prompts] == [12, 12], "every byte was looked at"


def test_of_three_blocks_the_one_that_could_not_be_written_is_absent_and_nothing_is_left_of_it(
    tmp_path: Path,
) -> None:
    cache = opened(tmp_path)
    prompts = [prompt_of(number, 1) for number in (1, 2, 3)]
    for prompt, does in zip(prompts, ("work", "fail", "work"), strict=True):
        disk_does(cache, "write", does)  # type: ignore[arg-type]
        cache.serve(prompt)
        assert cache.kv.flush()
    gc.collect()
    names = ("write_errors", "unstored_blocks", "blocks", "writes", "undurable_blocks")
    assert [disk(cache, name) for name in names] == [1, 1, 2, 0, 0]
    assert cache.kv.disk_byte_count().used == 2 * BYTES
    files = sorted(path.name for path in store_of(tmp_path).iterdir())
    assert files == ["data", "entries", "lock", "manifest.json"]
    fill_host(cache)
    assert cache.counted("dropped_no_unit") == 0, "nobody holds a unit"
    cache = reopened(cache, tmp_path)
    assert [found(cache, prompt)[2] for prompt in prompts] == [1, 0, 1]


def test_blocks_that_cannot_be_read_are_computed_and_those_that_can_are_found(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    prompts = [prompt_of(number, 3) for number in (1, 2)]
    for prompt in prompts:
        cache.serve(prompt)
    cache = lossy(reopened(cache, tmp_path))
    disk_does(cache, "read", "fail")
    ctx = cache.claimed(prompts[0])
    cache.kv.alloc(ctx)
    assert cache.settled() == [ctx.request_id]
    assert found(cache, prompts[0]) == (0, 0, 0), "it is not looked for again"
    cache.run(ctx)
    assert ctx.cached_prefix_length == 0
    assert (disk(cache, "read_errors"), disk(cache, "lost_blocks")) == (3, 3)
    disk_does(cache, "read", "work")
    assert cache.serve(prompts[1]) == 12
    cache.kv.release(ctx)
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompts[0]) == 12, "it was stored anew"
    closed(cache)
