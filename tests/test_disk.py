"""The disk tier, through the manager: blocks outlive host memory and the process, and are never wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from model.host import BYTES, PAGE_SIZE, HostCache, prompt_of
from pagekeeper import KVLoadFailed
from pagekeeper._native import DiskDirectory

SLOT = 4096
"""Bytes of a slot for a page of `BYTES`; its entry takes some more."""
TENS = range(10, 100, 10)


def gib(slots: int) -> float:
    """Enough for so many slots, and less than twice as many."""
    return (slots + 1) * SLOT * 1.5 / 2**30


def opened(place: Path, pages: int = 8, units: int = 16, slots: int = 64, **options: Any) -> HostCache:
    """A cache with a store in this directory."""
    disk = {"disk_offload_dir": place, "disk_offload_max_gb": gib(slots), "fsync": "none"}
    disk |= options.pop("disk", {})
    return HostCache(pages, units, disk=disk, **{"model_name": "m", **options})


def closed(cache: HostCache) -> None:
    """All was written, and the store is open no more."""
    assert cache.kv.flush()
    cache.kv.shutdown()


def reopened(cache: HostCache, place: Path, **options: Any) -> HostCache:
    """The next life of a cache."""
    closed(cache)
    return opened(place, **options)


def damaged(place: Path, offset: int, **options: Any) -> HostCache:
    """The next life of a cache that was closed, in which a byte of the blocks is another. Loads may fail."""
    with (store_of(place) / "data").open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    return lossy(opened(place, **options))


def lossy(cache: HostCache) -> HostCache:
    cache.may_raise = (KVLoadFailed,)
    return cache


def disk(cache: HostCache, name: str) -> int:
    return cache.kv.metrics()[f"connector_disk_{name}"]


def found(cache: HostCache, prompt: list[int]) -> tuple[int, int, int]:
    """Blocks of a prompt on the device, in the host and on disk."""
    reuse = cache.kv.analyze_prefix_reuse(prompt)
    return reuse.device_blocks, reuse.host_blocks, reuse.disk_blocks


def store_of(place: Path) -> Path:
    return place / "rank-0"


def another_process(program: str) -> subprocess.CompletedProcess[str]:
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_disk import *\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", head + program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


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
    cache = opened(tmp_path, **sizes)
    cache.serve(prompt_of(1, blocks))
    cache = reopened(cache, tmp_path, **sizes)
    assert cache.serve(prompt_of(1, blocks)) == blocks * PAGE_SIZE


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


# The directory.


def test_the_directory_is_its_owners_alone(tmp_path: Path) -> None:
    place = tmp_path / "made" / "here"
    cache = opened(place)
    cache.serve(prompt_of(1, 6))
    assert cache.kv.flush()
    files = sorted(path.name for path in store_of(place).iterdir())
    assert files == ["data", "entries", "lock", "manifest.json"]
    assert {stat.S_IMODE((store_of(place) / name).stat().st_mode) for name in files} == {0o600}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place, store_of(place))] == [0o700, 0o700]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    store_of(tmp_path).mkdir(mode=0o700)
    others = [tmp_path / "notes", store_of(tmp_path) / "notes", store_of(tmp_path) / "data.bak"]
    for path in others:
        path.write_text("mine")
    cache = opened(tmp_path)
    cache.serve(prompt_of(1, 6))
    cache = reopened(cache, tmp_path, slots=2)
    cache.kv.reset_prefix_cache()
    cache.kv.shutdown()
    assert [path.read_text() for path in others] == ["mine"] * 3


def test_a_store_without_a_directory_ends_with_its_cache_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def private() -> HostCache:
        return HostCache(pages=8, units=8, disk={"disk_offload_max_gb": gib(64)})

    cache = private()
    for number in (1, 2, 3):
        cache.serve(prompt_of(number, 4))
        assert cache.kv.flush()
    assert found(cache, prompt_of(1, 4)) == (0, 0, 4)
    cache.memory[:] = 0
    assert cache.serve(prompt_of(1, 4)) == 16
    assert list(tmp_path.iterdir()) == []
    other = private()
    assert found(other, prompt_of(1, 4)) == (0, 0, 0)
    cache.kv.shutdown()
    other.kv.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_second_cache_in_the_directory_is_refused(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    with pytest.raises(OSError, match=f"rank-0: is in use by process {os.getpid()}"):
        opened(tmp_path)
    cache.serve(prompt_of(1, 3))
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompt_of(1, 3)) == 12


def test_a_second_process_in_the_directory_is_refused(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    refused = another_process(f"opened(Path({str(tmp_path)!r}))")
    assert f"in use by process {os.getpid()}" in refused.stderr.splitlines()[-1]
    cache.serve(prompt_of(1, 3))
    closed(cache)
    after = another_process(f"assert opened(Path({str(tmp_path)!r})).serve(prompt_of(1, 3)) == 12")
    assert after.returncode == 0, after.stderr


def test_a_cache_that_is_refused_does_not_lock_its_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one block takes") as refused:
        opened(tmp_path, disk={"disk_offload_max_gb": 1e-7})
    with pytest.raises(ValueError, match="may still be used") as refused_too:
        opened(tmp_path, units=10**13)
    opened(tmp_path).kv.shutdown()
    del refused, refused_too


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disk": {"disk_offload_max_gb": 1e-7}}, r"has 107 bytes, but one block takes \d{4}: give .*=0.01"),
        ({"disk": {"disk_offload_max_gb": 1e6}}, r"takes \d{13,} more bytes, and \d+ are free"),
        ({"model_name": None}, "needs model_name"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **given)


# Identity.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_name": "n"}, "model is m there, n here"),
        ({"weights_revision": "2"}, "weights_revision is  there, 2 here"),
        ({"kv_hash_algo": "sha256"}, "hash is ahash64, format 1 there, sha256, format 1 here"),
        ({"kv_hash_seed": "ab" * 32}, "hashed with another seed"),
    ],
)
def test_a_store_of_another_cache_is_refused_and_kept(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    cache = opened(tmp_path)
    cache.serve(prompt_of(1, 3))
    closed(cache)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **changed)
    assert opened(tmp_path).serve(prompt_of(1, 3)) == 12


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "float16"), ("page_size", "8"), ("page_shape", "1 x 2 x 8 x 1 x 4"), ("shards", "2")],
)
def test_a_store_of_pages_of_another_form_is_refused(tmp_path: Path, name: str, value: str) -> None:
    opened(tmp_path).kv.shutdown()
    store = store_of(tmp_path)
    fingerprint = json.loads((store / "manifest.json").read_text())["fingerprint"]
    shutil.rmtree(store)
    own, fingerprint[name] = fingerprint[name], value
    sizes = {"page_size": PAGE_SIZE, "block_bytes": BYTES}
    DiskDirectory(store, parent=tmp_path, fingerprint=fingerprint, seed=None, **sizes).close()
    with pytest.raises(ValueError, match=f"{name} is {value} there, {own} here"):
        opened(tmp_path)


def test_a_store_that_was_made_with_a_seed_opens_with_that_and_without_any(tmp_path: Path) -> None:
    cache = opened(tmp_path, kv_hash_seed="ab" * 32)
    cache.serve(prompt_of(1, 3))
    cache = reopened(cache, tmp_path, kv_hash_seed="ab" * 32)
    assert cache.serve(prompt_of(1, 3)) == 12
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompt_of(1, 3)) == 12


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


# Damage.


@pytest.mark.parametrize("block", [0, 3, 5])
def test_a_damaged_block_is_computed_counted_and_found_once_it_was_stored_anew(
    tmp_path: Path, block: int
) -> None:
    cache = opened(tmp_path)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    closed(cache)
    cache = damaged(tmp_path, block * SLOT + 7)
    assert found(cache, prompt) == (0, 0, 6)
    assert cache.serve(prompt) == 0
    assert (disk(cache, "damaged_blocks"), disk(cache, "lost_blocks")) == (1, 1)
    assert cache.kv.flush()
    assert disk(cache, "blocks") == 6
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompt) == 24
    assert disk(cache, "damaged_blocks") == 0


def test_blocks_before_a_damaged_one_are_found_by_the_next_request(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    prompt = prompt_of(1, 6)
    cache.serve(prompt)
    closed(cache)
    cache = damaged(tmp_path, 2 * SLOT, pages=24)
    first, second = cache.claimed(prompt), cache.claimed(prompt)
    cache.kv.alloc([first, second])
    assert sorted(map(str, cache.settled())) == sorted([str(first.request_id), str(second.request_id)])
    for ctx in (first, second):
        cache.kv.alloc(ctx)
        assert ctx.cached_prefix_length == 0
    third = cache.claimed(prompt)
    cache.run(third)
    assert third.cached_prefix_length == 8


def test_a_block_in_the_place_of_another_is_none(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.serve(prompt_of(1, 3))
    cache.serve(prompt_of(2, 3))
    closed(cache)
    data = store_of(tmp_path) / "data"
    held = data.read_bytes()
    data.write_bytes(held[3 * SLOT : 6 * SLOT] + held[: 3 * SLOT] + held[6 * SLOT :])
    cache = lossy(opened(tmp_path))
    assert [cache.serve(prompt_of(number, 3)) for number in (1, 2)] == [0, 0]
    assert disk(cache, "damaged_blocks") == 6


@pytest.mark.parametrize("name", ["data", "entries"])
def test_what_a_file_has_lost_is_computed(tmp_path: Path, name: str) -> None:
    cache = opened(tmp_path)
    prompts = [prompt_of(number, 3) for number in (1, 2, 3)]
    for prompt in prompts:
        cache.serve(prompt)
        closed(cache)
    path = store_of(tmp_path) / name
    os.truncate(path, 5 * SLOT if name == "data" else 4096 + 100)
    cache = lossy(opened(tmp_path))
    assert cache.serve(prompts[0]) == (12 if name == "data" else 0)
    assert cache.serve(prompts[2]) == 0
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompts[2]) == 12


def test_a_file_that_is_cut_while_it_is_open_is_a_miss(tmp_path: Path) -> None:
    cache = lossy(opened(tmp_path, units=8))
    for number in TENS:
        cache.serve(prompt_of(number, 4))
        assert cache.kv.flush()
    os.truncate(store_of(tmp_path) / "data", 0)
    assert cache.serve(prompt_of(10, 4)) == 0
    assert disk(cache, "damaged_blocks") == 4
    assert cache.kv.flush()
    for number in (1, 2):
        cache.serve(prompt_of(number, 4))
        assert cache.kv.flush()
    cache.kv.truncate_prefix([])
    assert cache.serve(prompt_of(10, 4)) == 16


def test_files_that_vanish_while_they_are_open_are_there_until_the_end(tmp_path: Path) -> None:
    cache = opened(tmp_path, units=8)
    for number in TENS:
        cache.serve(prompt_of(number, 4))
        assert cache.kv.flush()
    for name in ("data", "entries"):
        (store_of(tmp_path) / name).unlink()
    assert cache.serve(prompt_of(10, 4)) == 16
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompt_of(10, 4)) == 0


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


def test_a_flush_that_takes_long_hears_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path)
    waited = threading.Event()

    def never(timeout: float) -> bool:
        waited.wait(timeout)
        return False

    monkeypatch.setattr(cache.kv._tiers, "flush", never)
    assert not cache.kv.flush(0.2), "the time is over"
    interrupt = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        cache.kv.flush(50)
    interrupt.join()


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
