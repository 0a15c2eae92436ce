"""Caches above a disk in a directory, one life after the other, and what is seen of their blocks there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from model.host import HostCache
from pagekeeper import KVLoadFailed

SLOT = 4096
"""Bytes of a slot for a page of `BYTES`; its entry takes some more."""
TENS = range(10, 100, 10)


def gib(slots: int) -> float:
    """Enough for so many slots, and less than twice as many."""
    return (slots + 1) * SLOT * 1.5 / 2**30


def opened(place: Path, pages: int = 8, units: int = 16, slots: int = 64, **options: Any) -> HostCache:
    """A cache with a store in this directory; `kind` is its class."""
    disk = {"disk_offload_dir": place, "disk_offload_max_gb": gib(slots), "fsync": "none"}
    disk |= options.pop("disk", {})
    kind: type[HostCache] = options.pop("kind", HostCache)
    return kind(pages, units, disk=disk, **{"model_name": "m", **options})


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
    """Runs a program that has all names of this module and those of `model.host`."""
    tests = Path(__file__).parents[1]
    head = f"""
import os, sys
sys.path.insert(0, {str(tests)!r})
from pathlib import Path
from model.host import *
from model.on_disk import *
"""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", head + program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
