"""A cache above a disk that is killed at any moment, and what it has told of itself until then.

As a program it is that cache: `python killed.py PLACE REPORT SEED EPOCH FSYNC SLOTS`. It serves prompts until
it is killed, looks at every byte that it finds, and reports in a file, whose lines are each written whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from model.host import BYTES, PAGE_SIZE, HostCache
from pagekeeper import KVLoadFailed

BlockPath: TypeAlias = tuple[int, ...]
"""A prefix of whole blocks: a number for each."""
PAGES, UNITS = 24, 256
PROMPTS = 8
"""Served between two flushes; all their blocks may wait for the disk at once."""
LONGEST = 10


def tokens_of(path: BlockPath) -> list[int]:
    """The blocks of a path, and a token more."""
    return [token for number in path for token in range(number, number + PAGE_SIZE)] + [0]


def drawn_path(chosen: random.Random) -> BlockPath:
    """Paths share beginnings: blocks but for the first are one of two."""
    rest = (chosen.randrange(2) for _ in range(chosen.randrange(LONGEST)))
    return (chosen.randrange(60), *rest)


class KilledCache(HostCache):
    """Its pages hold a digest of their prefix and of the epoch: how often the cache was reset before.

    Args:
        place: the directory of its store.
        epoch: that in which it begins.
        fsync: when its store syncs.
        slots: how many blocks its store has room for, at least.
    """

    may_raise = (KVLoadFailed,)  # what was being written over when the last life ended is damaged

    def __init__(self, place: Path, epoch: int, fsync: str, slots: int) -> None:
        size = (slots + 1) * 4096 * 1.5 / 2**30
        disk = {"disk_offload_dir": place, "disk_offload_max_gb": size, "fsync": fsync}
        super().__init__(PAGES, UNITS, disk=disk, model_name="m")
        self.epoch = epoch

    def content(self, tokens: list[int], block: int) -> NDArray[np.uint8]:
        prefix = np.array([self.epoch, *tokens[: (block + 1) * PAGE_SIZE]])
        digest = hashlib.blake2b(prefix.tobytes(), digest_size=64).digest()
        return np.frombuffer(digest * (BYTES // 64), np.uint8)

    def found(self, path: BlockPath) -> int:
        """How many blocks of a path are found. All of them are looked at, and nothing is stored."""
        ctx = self.claimed(tokens_of(path), no_store=True)
        while ctx.active_length == 0:
            self.kv.alloc(ctx)
            self.settled()
        found = ctx.cached_prefix_length // PAGE_SIZE
        assert not found or self.holds(ctx), (self.epoch, path)
        self.kv.release(ctx)
        return found

    def lost(self) -> int:
        """Blocks that did not reach the disk, or were evicted there."""
        counted = self.kv.metrics()
        names = ("dropped_busy", "dropped_no_unit", "unstored_blocks", "undurable_blocks", "evicted_blocks")
        return sum(counted[f"connector_disk_{name}"] for name in names)


def live(cache: KilledCache, report: Path, chosen: random.Random) -> None:
    """Serves, flushes and resets until it is killed."""
    file = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def tell(**line: Any) -> None:
        os.write(file, (json.dumps({"at": time.monotonic(), **line}) + "\n").encode())

    tell(began=cache.epoch)
    while True:
        new, before = set[BlockPath](), cache.lost()
        for _ in range(PROMPTS):
            path = drawn_path(chosen)
            cache.serve(tokens_of(path))
            new.update(path[:end] for end in range(1, len(path) + 1))
        if chosen.random() < 0.8 and cache.kv.flush(30) and cache.lost() == before:
            tell(durable=sorted(new))
        if chosen.random() < 0.01:
            tell(resetting=cache.epoch + 1)
            cache.kv.reset_prefix_cache()
            cache.epoch += 1
            tell(reset=cache.epoch)


def told(report: Path) -> Iterator[dict[str, Any]]:
    """Lines of a report; the last may be torn, if one can be."""
    for line in report.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


if __name__ == "__main__":
    place, report, seed, epoch, fsync, slots = sys.argv[1:]
    cache = KilledCache(Path(place), int(epoch), fsync, int(slots))
    live(cache, Path(report), random.Random(int(seed)))
