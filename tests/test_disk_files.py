"""The files of the disk tier: whose directory they lie in, whose blocks they hold, and what damages them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from model.host import BYTES, PAGE_SIZE, HostCache, prompt_of
from model.on_disk import (
    SLOT,
    TENS,
    another_process,
    closed,
    damaged,
    disk,
    found,
    gib,
    lossy,
    opened,
    reopened,
    store_of,
)
from pagekeeper._native import DiskDirectory
from pagekeeper.doctor import examine
from pagekeeper.params import KVCacheQuantizationConfig

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


def test_ranks_have_stores_of_their_own_in_one_directory(tmp_path: Path) -> None:
    prompt = prompt_of(1, 3)
    other_rank = f"""
import numpy as np

class OtherRank(HostCache):
    def content(self, tokens, block):
        return np.flip(super().content(tokens, block))

cache = opened(Path({str(tmp_path)!r}), disk={{"disk_rank": 1}})
cache.__class__ = OtherRank  # as many blocks of the same keys, and other bytes
print(cache.serve({prompt}))
assert cache.kv.flush()
"""
    cache = opened(tmp_path)
    cache.serve(prompt)
    assert cache.kv.flush()
    for cached in (0, 12):
        run = another_process(other_rank)
        assert (run.stdout, run.stderr) == (f"{cached}\n", "")
        cache = reopened(cache, tmp_path)
        assert cache.serve(prompt) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]


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
        # As many bytes a page, in another form:
        ({"dtype": "bfloat16"}, "dtype is float16 there, bfloat16 here"),
        ({"page_size": 8, "head_dim": 4}, "page_size is 4 there, 8 here"),
        ({"n_kv_heads": 2, "head_dim": 4}, "page_shape is 1 x 2 x 4 x 1 x 8 there, 1 x 2 x 4 x 2 x 4 here"),
        ({"num_layers": 2, "head_dim": 4}, "page_shape is 1 x 2 x 4 x 1 x 8 there, 2 x 2 x 4 x 1 x 4 here"),
    ],
)
def test_a_store_of_another_cache_is_refused_and_kept(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    own: dict[str, Any] = {"dtype": "float16", "head_dim": 8}
    cache = opened(tmp_path, **own)
    cache.serve(prompt_of(1, 3))
    closed(cache)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **{**own, **changed})
    assert opened(tmp_path, **own).serve(prompt_of(1, 3)) == 12


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "dtype is float8_e4m3fn \\+ bfloat16 there, float8_e4m3fn here"),
        # As many bytes a page, in scales of another type, and in fewer ones of more bytes each:
        (("float16", 4), "dtype is float8_e4m3fn \\+ bfloat16 there, float8_e4m3fn \\+ float16 here;"),
        (("float32", 8), "page_shape is .* 1 x 2 x 4 x 1 x 4 there, .* 1 x 2 x 4 x 1 x 2 here"),
        (("bfloat16", 8), "page_shape is .* 1 x 2 x 4 x 1 x 4 there, .* 1 x 2 x 4 x 1 x 2 here"),
    ],
)
def test_a_store_of_values_with_other_scales_is_refused_and_kept(
    tmp_path: Path, scales: tuple[str, int] | None, message: str
) -> None:
    shape: dict[str, Any] = {"dtype": "float8_e4m3fn", "head_dim": 16}
    own = {**shape, "kvcache_quant_config": KVCacheQuantizationConfig("bfloat16", 4)}
    changed = {**shape, "kvcache_quant_config": scales and KVCacheQuantizationConfig(*scales)}
    cache = opened(tmp_path, **own)
    cache.serve(prompt_of(1, 3))
    closed(cache)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **changed)
    assert opened(tmp_path, **own).serve(prompt_of(1, 3)) == 12


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


def test_requests_that_share_a_load_that_fails_compute_all_and_the_next_one_finds_what_is_good(
    tmp_path: Path,
) -> None:
    cache = opened(tmp_path)
    prompt = prompt_of(1, 4)
    cache.serve(prompt)
    closed(cache)
    cache = damaged(tmp_path, 2 * SLOT, pages=24)
    cache.memory[:] = 0xEE
    both = [cache.claimed(prompt), cache.claimed(prompt)]
    cache.kv.alloc(both)
    assert set(cache.settled()) == {ctx.request_id for ctx in both}
    assert found(cache, prompt) == (0, 2, 0)
    for ctx in both:
        cache.kv.alloc(ctx)
        assert (ctx.cached_prefix_length, ctx.active_length) == (0, 17)
    third = cache.claimed(prompt)
    cache.run(third)
    assert third.cached_prefix_length == 8
    for ctx in both:
        cache.compute(ctx)
        assert cache.holds(ctx)
    cache.kv.release([*both, third])
    cache.settled()
    cache = reopened(cache, tmp_path)
    assert cache.serve(prompt) == 16


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


def test_what_a_file_has_lost_while_it_is_open_is_looked_for_once_and_is_a_hit_when_it_was_stored_anew(
    tmp_path: Path,
) -> None:
    cache = lossy(opened(tmp_path, units=8, slots=30))
    prompt = prompt_of(10, 4)
    for number in TENS:
        cache.serve(prompt_of(number, 4))
        assert cache.kv.flush()
    os.truncate(store_of(tmp_path) / "data", 0)
    assert found(cache, prompt) == (0, 0, 4)
    ctx = cache.claimed(prompt)
    cache.kv.alloc(ctx)
    assert cache.settled() == [ctx.request_id]
    assert (found(cache, prompt), cache.kv.metrics()["copies_failed"]) == ((0, 0, 0), 1)
    cache.run(ctx)
    assert ctx.cached_prefix_length == 0
    cache.kv.release(ctx)
    cache.settled()
    assert (disk(cache, "damaged_blocks"), disk(cache, "lost_blocks")) == (4, 4)
    assert cache.kv.flush()
    for number in range(1, 3):
        cache.serve(prompt_of(number, 4))
        assert cache.kv.flush()
    cache.kv.truncate_prefix([])
    assert (found(cache, prompt), cache.serve(prompt)) == ((0, 0, 4), 16)
    for number in range(200, 212):  # all others give way: nobody misses their bytes
        cache.serve(prompt_of(number, 4))
        assert cache.kv.flush()
    (store,) = examine(tmp_path).stores
    assert (store.status, store.blocks, disk(cache, "blocks")) == ("sound", store.slots, store.slots)


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
