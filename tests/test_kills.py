"""Caches that are killed at random moments: the next one finds what was durable, and nothing else."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from model import killed
from model.killed import BlockPath, KilledCache, told

GRACE = 0.1
"""Seconds before the kill; what was durable by then is found."""


class Lives:
    """One store, in which one cache lives after the other.

    Args:
        folder: where it lies.
        fsync: when it syncs.
        slots: blocks that it has room for, at least.
    """

    def __init__(self, folder: Path, fsync: str, slots: int) -> None:
        self.folder, self.fsync, self.slots = folder, fsync, slots
        self.epoch = 0
        self.durable = set[BlockPath]()
        self.expected = self.found = self.served = 0

    def live(self, chosen: random.Random, *, right_after_a_reset: bool) -> None:
        """A life to its violent end, and a look at what it left."""
        report = self.folder / f"report-{chosen.randrange(2**40)}"
        given = [self.folder / "store", report, chosen.randrange(2**40), self.epoch, self.fsync, self.slots]
        program = [sys.executable, killed.__file__, *map(str, given)]
        with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as life:
            try:
                self.wait(life, report, "reset" if right_after_a_reset else "began")
                if not right_after_a_reset:
                    time.sleep(chosen.uniform(0.1, 1.0))
                when = time.monotonic()
            finally:
                life.kill()
            _, problems = life.communicate()
        assert life.returncode == -9, problems
        self.look(report, when)

    def follow(self, chosen: random.Random, lives: int, enough: Callable[[], bool]) -> None:
        """So many lives, and more where a slow disk lets so few blocks come about that they show little."""
        for number in range(4 * lives):
            if number < lives or not enough():
                self.live(chosen, right_after_a_reset=number % 5 == 0)

    def wait(self, life: subprocess.Popen[str], report: Path, for_what: str) -> None:
        deadline = time.monotonic() + 30
        while life.poll() is None and time.monotonic() < deadline:
            if report.exists() and any(for_what in line for line in told(report)):
                return
            time.sleep(0.005)

    def look(self, report: Path, when: float) -> None:
        """Every block that is found holds what it must. Counts those that must be, and those that are."""
        begun, forgotten = self.epoch, set[BlockPath]()
        for line in told(report):
            if "resetting" in line:
                begun = line["resetting"]
            elif "reset" in line:
                self.epoch = line["reset"]
                forgotten |= self.durable
                self.durable.clear()
            elif "durable" in line and line["at"] < when - GRACE:
                self.durable.update(map(tuple, line["durable"]))
        cache = KilledCache(self.folder / "store", self.epoch, self.fsync, self.slots)
        paths = sorted(self.durable)
        lengths = {path: cache.found(path) for path in self.ends(paths)}
        # A reset that did not return may have come about.
        if begun == self.epoch:
            self.expected += len(paths)
            self.found += sum(self.is_found(path, lengths) for path in paths)
        others = [*self.ends(sorted(forgotten)), *map(killed.drawn_path, [random.Random(0)] * 100)]
        self.served += sum(lengths.values()) + sum(map(cache.found, others))
        assert cache.lost() == 0
        if begun != self.epoch:
            cache.kv.reset_prefix_cache()
            self.epoch = begun
            self.durable.clear()
        assert cache.kv.flush()
        cache.kv.shutdown()

    @staticmethod
    def ends(paths: list[BlockPath]) -> list[BlockPath]:
        """Those that lead to none of the others, which come right behind them."""
        after = [*paths[1:], ()]
        return [path for path, next in zip(paths, after, strict=False) if next[: len(path)] != path]

    @staticmethod
    def is_found(path: BlockPath, lengths: dict[BlockPath, int]) -> bool:
        return any(length >= len(path) and end[: len(path)] == path for end, length in lengths.items())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fsync", ["batch", "none", "always"])
def test_what_was_durable_before_a_kill_is_found_after_it(
    tmp_path: Path, first_seed: int, long_run: bool, fsync: str
) -> None:
    lives, chosen = Lives(tmp_path, fsync, slots=20_000), random.Random(first_seed)
    lives.follow(chosen, 80 if long_run else 5, lambda: lives.expected >= 1_000)
    print(f"{lives.found} of {lives.expected} durable blocks were found; {lives.served} were looked at")
    assert lives.expected >= 1_000
    assert lives.found >= lives.expected * (1 if fsync == "always" else 0.99)


@pytest.mark.timeout(600)
def test_a_full_store_that_is_killed_while_blocks_give_way_is_never_wrong(
    tmp_path: Path, first_seed: int, long_run: bool
) -> None:
    lives, chosen = Lives(tmp_path, "batch", slots=100), random.Random(first_seed + 1)
    lives.follow(chosen, 60 if long_run else 5, lambda: lives.served > 100)
    assert lives.served > 100
