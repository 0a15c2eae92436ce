"""A store of 20 GiB, which is opened and found from at once. Only in the long form: it takes the space."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from model.host import HostCache, prompt_of
from model.on_disk import closed, disk, found, opened

GIB = 2**30
PAGE = 2**24
BLOCKS = 8
"""Of a prompt."""
PROMPTS = 20 * GIB // PAGE // BLOCKS
COUNTER = np.arange(PAGE // 8, dtype=np.uint64)


class LargePages(HostCache):
    """Each page counts on from a number of its prefix, which is fast to make."""

    def content(self, tokens: list[int], block: int) -> NDArray[np.uint8]:
        return (COUNTER + np.uint64(tokens[0] * 10_000_019 + block * 1_000_003)).view(np.uint8)


@pytest.fixture
def place(tmp_path: Path, long_run: bool) -> Iterator[Path]:
    """A directory with enough space; nothing of it is left behind."""
    if not long_run:
        pytest.skip("writes 20 GiB: only with --long")
    if (free := shutil.disk_usage(tmp_path).free) < 26 * GIB:
        pytest.skip(f"needs 26 GiB in {tmp_path}, {free / GIB:.1f} are free")
    yield tmp_path
    shutil.rmtree(tmp_path)


def large(place: Path) -> LargePages:
    cache = opened(
        place,
        pages=2 * BLOCKS,
        units=64,
        n_kv_heads=32,
        head_dim=128,
        num_layers=128,
        disk={"disk_offload_max_gb": 20.25, "fsync": "batch"},
        kind=LargePages,
    )
    assert cache.params.bytes_per_page == PAGE
    assert isinstance(cache, LargePages)
    return cache


@pytest.mark.timeout(1800)
def test_a_store_of_20_gib_is_opened_and_found_from_at_once(place: Path, first_seed: int) -> None:
    cache, begun = large(place), time.monotonic()
    for number in range(PROMPTS):
        assert cache.serve(prompt_of(number, BLOCKS)) == 0
        if disk(cache, "writes") > 16:
            assert cache.kv.flush(), "as many wait for the disk as it takes"
    assert cache.kv.flush()
    written = time.monotonic() - begun
    assert (disk(cache, "durable_blocks"), disk(cache, "dropped_busy")) == (PROMPTS * BLOCKS, 0)
    closed(cache)
    del cache

    begun = time.monotonic()
    cache = large(place)
    ready = time.monotonic() - begun
    assert disk(cache, "blocks") == PROMPTS * BLOCKS
    chosen = random.Random(first_seed).sample(range(PROMPTS), 20)
    assert cache.serve(prompt_of(chosen[0], BLOCKS)) == BLOCKS * 4, "every byte was looked at"
    first = time.monotonic() - begun
    for number in chosen[1:]:
        assert found(cache, prompt_of(number, BLOCKS)) == (0, 0, BLOCKS)
        assert cache.serve(prompt_of(number, BLOCKS)) == BLOCKS * 4
    took = time.monotonic() - begun - first
    assert [disk(cache, name) for name in ("damaged_blocks", "read_errors")] == [0, 0]
    cache.kv.shutdown()
    rate = 20 * 1024 / written, 19 * BLOCKS * PAGE / 2**20 / took
    print(f"written at {rate[0]:.0f} MiB/s; opened in {ready:.3f} s, first hit after {first:.3f} s")
    print(f"served from disk and compared at {rate[1]:.0f} MiB/s")
    assert ready < 5
    assert first < 10
