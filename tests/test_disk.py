"""The disk tier, through the manager: blocks outlive host memory and the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.host import BYTES, PAGE_SIZE, HostCache, prompt_of
from model.on_disk import SLOT, TENS, another_process, closed, disk, found, gib, opened, reopened, store_of
from pagekeeper.doctor import examine

# Blocks come back.


def test_what_left_device_and_host_comes_back_from_disk(tmp_path: Path) -> None:
    cache = opened(tmp_path, pages=8, units=8)
    for number in TENS:
        assert cache.serve(prompt_of(number, 4)) == 0
        assert cache.kv.flush()
    cache.memory[:] = 0
    assert found(cache, prompt_of(10, 4)) == (0, 0, 4)
    for number in TENS:
        assert cache.serve(prompt_of(number, 4)) == 16, "every byte was looked at"
    assert disk(cache, "stored_blocks") == 36, "none was written twice"
    assert disk(cache, "loaded_blocks") == cache.counted("filled_blocks") > 0


def test_a_restart_finds_what_was_there_before(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    prompts = [prompt_of(number, 3) for number in TENS]
    for prompt in prompts:
        cache.serve(prompt)
        assert cache.kv.flush()
    cache = reopened(cache, tmp_path)
    assert [found(cache, prompt) for prompt in prompts] == [(0, 0, 3)] * 9
    assert [cache.serve(prompt) for prompt in prompts] == [12] * 9
    assert (disk(cache, "blocks"), disk(cache, "stored_blocks"), disk(cache, "loaded_blocks")) == (27, 0, 27)


def test_blocks_are_told_by_where_they_would_be_read(tmp_path: Path) -> None:
    cache = opened(tmp_path, units=16)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    cache = reopened(cache, tmp_path, units=16)
    cache.serve(prompt[:9])
    cache.kv.truncate_prefix(prompt[:4])
    assert found(cache, prompt) == (1, 1, 4)
    assert cache.serve(prompt) == 24
    cache.kv.truncate_prefix([])
    assert found(cache, prompt) == (0, 6, 0), "what came up is in the host now"


@pytest.mark.parametrize(("pages", "parts", "found"), [(19, 3, 13), (18, 1, 5), (14, 1, 5)])
def test_a_prompt_longer_than_the_host_comes_up_in_parts_while_there_are_pages(
    tmp_path: Path, pages: int, parts: int, found: int
) -> None:
    prompt = prompt_of(1, 13)
    cache = opened(tmp_path, pages=16, units=64)
    cache.serve(prompt)
    cache = reopened(cache, tmp_path, pages=pages, units=5)
    ctx = cache.claimed(prompt)
    loads = 0
    cache.kv.alloc(ctx)
    while ctx.active_length == 0:
        loads += 1
        assert cache.settled() == [ctx.request_id]
        cache.kv.alloc(ctx)
    assert (loads, ctx.cached_prefix_length) == (parts, found * PAGE_SIZE)
    assert cache.kv.metrics()["failed_allocs"] == 0
    cache.compute(ctx)
    assert cache.holds(ctx)


@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_a_prefix_of_any_length_comes_back_whole(tmp_path: Path, blocks: int) -> None:
    sizes = {"pages": 260, "units": 600, "slots": 300}
    cache, prompt = opened(tmp_path, **sizes), prompt_of(1, blocks)
    cache.serve(prompt)
    cache.kv.truncate_prefix([])
    cache.memory[:] = 0
    assert found(cache, prompt) == (0, blocks, 0)
    assert cache.serve(prompt) == blocks * PAGE_SIZE, "from host memory, every byte"
    cache = reopened(cache, tmp_path, **sizes)
    assert found(cache, prompt) == (0, 0, blocks)
    assert cache.serve(prompt) == blocks * PAGE_SIZE, "from disk"


@pytest.mark.parametrize(
    ("num_bytes", "shape"),
    [
        (40, {"dtype": "int8", "head_dim": 5}),
        (1536, {"dtype": "float16", "head_dim": 96}),
        (4608, {"dtype": "float16", "head_dim": 288}),
        (4616, {"dtype": "int8", "head_dim": 577}),
        (8192, {"dtype": "float32", "head_dim": 256}),
    ],
)
def test_pages_that_are_sectors_or_pages_of_a_disk_or_neither_come_back_whole(
    tmp_path: Path, num_bytes: int, shape: dict[str, Any]
) -> None:
    sizes = {**shape, "pages": 30, "slots": 100}
    cache, prompt = opened(tmp_path, **sizes), prompt_of(1, 6)
    assert cache.params.bytes_per_page == num_bytes
    cache.serve(prompt)
    cache = reopened(cache, tmp_path, **sizes)
    cache.memory[:] = 0xEE
    assert cache.serve(prompt) == 24
    quiet = ("damaged_blocks", "read_errors", "write_errors", "undurable_blocks")
    assert [disk(cache, name) for name in quiet] == [0] * 4


def test_a_prefix_that_is_used_on_the_device_does_not_age_out_of_the_disk(tmp_path: Path) -> None:
    cache = opened(tmp_path, pages=16, units=8, slots=16)
    hot = prompt_of(1, 4)
    for number in range(2, 32):
        cache.serve(hot)
        cache.serve(prompt_of(number, 3))
        assert cache.kv.flush()
    assert disk(cache, "evicted_blocks") > 30
    cache.kv.truncate_prefix([])
    device, host, below = found(cache, hot)
    assert device + host + below == 4


@pytest.mark.parametrize("policy", ["selective", "on_evict"])
def test_the_disk_gets_what_a_write_policy_gives_to_the_host(tmp_path: Path, policy: str) -> None:
    cache = opened(tmp_path, pages=16, units=64, write_policy=policy, selective_min_hits=1)
    prompt = prompt_of(1, 3)
    cache.serve(prompt)
    assert cache.kv.flush()
    assert disk(cache, "stored_blocks") == 0
    if policy == "selective":
        cache.serve(prompt)
    else:
        for number in range(2, 30):
            cache.serve([number])
            cache.serve(prompt_of(number, 1))
    cache = reopened(cache, tmp_path, pages=16)
    assert cache.serve(prompt) == 12


# Resets.


def test_after_a_reset_nothing_comes_back_and_what_was_stored_since_does(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.serve(prompt_of(1, 6))
    assert cache.kv.flush()
    cache.kv.reset_prefix_cache()
    assert (disk(cache, "blocks"), found(cache, prompt_of(1, 6))) == (0, (0, 0, 0))
    cache.serve(prompt_of(2, 6))
    cache = reopened(cache, tmp_path)
    assert (found(cache, prompt_of(1, 6)), found(cache, prompt_of(2, 6))) == ((0, 0, 0), (0, 0, 6))


def test_after_a_change_of_weights_the_store_is_one_of_the_new_ones(tmp_path: Path) -> None:
    cache = opened(tmp_path, weights_revision="r1")
    cache.serve(prompt_of(1, 6))
    assert cache.kv.flush()
    cache.kv.reset_prefix_cache(weights_revision="r2")
    cache.serve(prompt_of(2, 6))
    closed(cache)
    with pytest.raises(ValueError, match="weights_revision is r2 there, r1 here"):
        opened(tmp_path, weights_revision="r1")
    cache = opened(tmp_path, weights_revision="r2")
    assert (found(cache, prompt_of(1, 6)), found(cache, prompt_of(2, 6))) == ((0, 0, 0), (0, 0, 6))


def test_a_change_of_weights_after_a_shutdown_leaves_the_store_to_the_old_ones(tmp_path: Path) -> None:
    cache = opened(tmp_path, weights_revision="r1")
    cache.serve(prompt_of(1, 6))
    assert cache.kv.flush()
    cache.kv.shutdown()
    cache.kv.reset_prefix_cache(weights_revision="r2")
    del cache
    with pytest.raises(ValueError, match="weights_revision is r1 there, r2 here"):
        opened(tmp_path, weights_revision="r2")


# Space.


def test_a_smaller_store_keeps_the_newest_blocks(tmp_path: Path) -> None:
    cache = opened(tmp_path, slots=64)
    for number in TENS:
        cache.serve(prompt_of(number, 3))
        assert cache.kv.flush()
    large = (store_of(tmp_path) / "data").stat().st_size
    assert large >= 27 * SLOT
    cache = reopened(cache, tmp_path, slots=10)
    slots = disk(cache, "units")
    assert disk(cache, "blocks") == slots < 27
    assert (store_of(tmp_path) / "data").stat().st_size == slots * SLOT
    assert cache.kv.disk_byte_count().used == cache.kv.disk_byte_count().total == slots * BYTES
    assert [found(cache, prompt_of(number, 3)) for number in (70, 80, 90)] == [(0, 0, 3)] * 3
    assert cache.serve(prompt_of(90, 3)) == 12
    cache.serve(prompt_of(5, 3))
    assert cache.kv.flush()
    assert (disk(cache, "blocks"), disk(cache, "evicted_blocks")) == (slots, 3)
    sizes = [(store_of(tmp_path) / name).stat().st_size for name in ("data", "entries")]
    assert sum(sizes) <= gib(10) * 2**30


def test_the_oldest_blocks_leave_a_full_store_and_its_files_do_not_grow(tmp_path: Path) -> None:
    cache = opened(tmp_path, slots=10)
    slots = disk(cache, "units")
    for number in range(1, 30):
        cache.serve(prompt_of(number, 3))
        assert cache.kv.flush()
        assert disk(cache, "blocks") == min(3 * number, slots)
        assert (store_of(tmp_path) / "data").stat().st_size <= slots * SLOT
    assert disk(cache, "evicted_blocks") == 29 * 3 - slots
    cache = reopened(cache, tmp_path, slots=10)
    assert cache.serve(prompt_of(29, 3)) == 12
    assert found(cache, prompt_of(1, 3)) == (0, 0, 0)


def test_case_77_a_block_on_disk_does_not_give_way_to_the_others_of_its_prompt(tmp_path: Path) -> None:
    cache = opened(tmp_path, units=64, slots=8)
    prompt = prompt_of(1, 4)
    cache.serve(prompt[:5])
    for number in range(2, disk(cache, "units") + 1):
        assert cache.kv.flush()
        cache.serve(prompt_of(number, 1))
    assert cache.kv.flush()
    cache.kv.truncate_prefix([])
    cache.serve(prompt, no_read=True)  # three blocks are new, and the first is the oldest on disk
    cache = reopened(cache, tmp_path, units=64, slots=8)
    assert found(cache, prompt) == (0, 0, 4)
    assert [found(cache, prompt_of(number, 1)) for number in (2, 3, 4, 5)] == [(0, 0, 0)] * 3 + [(0, 0, 1)]


def test_what_is_used_is_what_the_files_hold_after_each_block_that_comes_or_goes(tmp_path: Path) -> None:
    cache = opened(tmp_path, slots=4)
    slots = disk(cache, "units")

    def check(blocks: int) -> None:
        assert cache.kv.flush()
        (store,) = examine(tmp_path).stores
        assert (store.status, store.blocks, disk(cache, "blocks")) == ("sound", blocks, blocks)
        assert cache.kv.disk_byte_count().used == blocks * BYTES
        assert (store_of(tmp_path) / "data").stat().st_size <= slots * SLOT

    twice = prompt_of(1, 1)
    for _ in range(2):
        cache.serve(twice, no_read=True)
        cache.kv.truncate_prefix([])
        check(1)
    for number in range(2, 102):
        cache.serve(prompt_of(number, 1))
        check(min(number, slots))
    counted = [disk(cache, name) for name in ("stored_blocks", "dropped_busy", "dropped_no_unit")]
    assert counted == [101, 0, 0], "all were accepted"
    for number in range(102, 112):
        cache.kv.reset_prefix_cache()
        check(0)
        cache.serve(prompt_of(number, 1))
        check(1)


# Calls and processes.


def test_metrics_tell_what_was_written_and_read(tmp_path: Path) -> None:
    cache = opened(tmp_path, units=16)
    cache.serve(prompt_of(1, 6))
    assert cache.kv.flush()
    names = ("stored_blocks", "durable_blocks", "blocks", "writes", "loaded_blocks")
    assert [disk(cache, name) for name in names] == [6, 6, 6, 0, 0]
    assert cache.kv.disk_byte_count().used == 6 * BYTES
    cache = reopened(cache, tmp_path)
    cache.serve(prompt_of(1, 6))
    assert [disk(cache, name) for name in names] == [0, 0, 6, 0, 6]
    assert cache.counted("filled_blocks") == cache.counted("loaded_blocks") == 6
    quiet = ("damaged_blocks", "read_errors", "write_errors", "undurable_blocks", "collisions")
    assert [disk(cache, name) for name in quiet] == [0] * 5


@pytest.mark.parametrize("fsync", ["batch", "none", "always"])
def test_a_flush_ends_when_all_is_durable(tmp_path: Path, fsync: str) -> None:
    cache = opened(tmp_path, units=64, disk={"fsync": fsync})
    for number in (1, 2, 3, 4):
        cache.serve(prompt_of(number, 6))
        assert cache.kv.flush(30)
        assert disk(cache, "durable_blocks") == 6 * number
    cache.kv.shutdown()
    assert cache.kv.flush(0)


def test_without_a_disk_there_is_nothing_to_flush() -> None:
    cache = HostCache()
    cache.serve(prompt_of(1, 6))
    assert cache.kv.flush(0)
    assert not any("disk" in name for name in cache.kv.metrics())
    with pytest.raises(ValueError, match="timeout=-1"):
        cache.kv.flush(-1)


def test_a_forked_process_is_told_that_the_store_is_elsewhere_and_leaves_it_locked(tmp_path: Path) -> None:
    program = f"""
place = Path({str(tmp_path)!r})
cache = opened(place)
cache.serve(prompt_of(1, 6))
child = os.fork()
if child == 0:
    try:
        cache.kv.flush()
    except RuntimeError as error:
        del cache
        os._exit(17 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
refused = another_process(f"opened(Path({{str(place)!r}}))")
assert f"in use by process {{os.getpid()}}" in refused.stderr, refused.stderr
assert cache.kv.flush()
cache.kv.truncate_prefix([])
assert cache.serve(prompt_of(1, 6)) == 24
"""
    run = another_process(program)
    assert run.returncode == 0, run.stderr


def test_a_process_that_ends_without_a_shutdown_ends_and_leaves_a_store(tmp_path: Path) -> None:
    sizes = "pages=200, units=320, slots=400"
    first = f"cache = opened(Path({str(tmp_path)!r}), {sizes})\ncache.serve(prompt_of(1, 150))\n"
    run = another_process(first + "cache.kv.flush()\ncache.serve(prompt_of(2, 150))")
    assert (run.returncode, run.stderr) == (0, "")
    cache = opened(tmp_path, pages=200, units=320, slots=400)
    assert cache.serve(prompt_of(1, 150)) == 600
    cache.serve(prompt_of(2, 150))


def test_a_shutdown_brings_what_was_stored_to_the_disk(tmp_path: Path) -> None:
    cache = opened(tmp_path, units=64)
    cache.serve(prompt_of(1, 6))
    cache.kv.shutdown()
    del cache
    cache = opened(tmp_path)
    assert cache.serve(prompt_of(1, 6)) == 24
