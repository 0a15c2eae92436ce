"""A tier beyond the device for tests: its copies are late, fail, or are refused, as the test says."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

import pagekeeper as pk
from model.memory import PageMemory


class LateCopy:
    """A copy that ends when the test says so."""

    def __init__(self, tier: Tier, kind: str, pages: list[int], keys: list[pk.BlockKey]) -> None:
        self.tier, self.kind, self.pages, self.keys = tier, kind, pages, keys
        self.end: str | None = None
        self.seen = tier.memory.cells[pages].copy()
        """What the pages held when the copy began."""
        self.source = [tier.kept[key] for key in keys] if kind == "load" else []
        self.resets = tier.resets

    @property
    def stale(self) -> bool:
        """Whether the tier was reset since."""
        return self.resets < self.tier.resets

    def finish(self) -> None:
        """The bytes move now, as late as they can."""
        assert self.end is None
        cells = self.tier.memory.cells
        if self.kind == "load":
            for page, block in zip(self.pages, self.source, strict=True):
                cells[page] = block
        else:
            assert (cells[self.pages] == self.seen).all(), "a page changed under an offload"
            for page, key in zip(self.pages, self.keys, strict=True):
                if not self.stale:
                    self.tier.kept[key] = cells[page].copy()
        self.end = "done"

    def fail(self) -> None:
        """Some of the bytes moved, nobody knows which."""
        assert self.end is None
        if self.kind == "load":
            self.tier.memory.cells[self.pages] = -1
        self.end = "failed"

    @property
    def block_ids(self) -> list[int]:
        return self.pages

    def is_complete(self) -> bool:
        return self.end is not None

    def result(self) -> None:
        assert self.end is not None, "the manager never waits"
        if self.end == "failed":
            raise pk.KVLoadFailed("the test says so")

    def synchronize(self, timeout: float | None = None) -> None:
        self.result()

    def cancel(self) -> bool:
        return False

    def __await__(self) -> Generator[Any, None, None]:
        self.result()
        yield from ()


class Tier:
    """Keeps every block that reached it. `loads` and `offloads` say how such copies go.

    "late": the test ends them; "now": at once; "fail": they fail at once; "refuse": declined; "raise": the
    call itself raises something unforeseen; "blind": so does the look-up.
    """

    def __init__(self, memory: PageMemory, loads: str = "late", offloads: str = "now") -> None:
        self.memory, self.loads, self.offloads = memory, loads, offloads
        self.kept: dict[pk.BlockKey, np.ndarray[Any, Any]] = {}
        self.copies: list[LateCopy] = []
        """Every copy that was begun, oldest first."""
        self.touched: list[list[pk.BlockKey]] = []
        self.hints: list[object] = []
        self.calls: list[str] = []
        self.resets = 0

    def in_flight(self) -> list[LateCopy]:
        return [copy for copy in self.copies if copy.end is None]

    def lookup(
        self, block_hashes: Sequence[pk.BlockKey], replica_idx: int = 0, hint: object = None
    ) -> list[bool]:
        self.hints.append(hint)
        if self.loads == "blind":
            raise OSError("lookup is broken")
        return [key in self.kept for key in block_hashes]

    def count_cached_prefix(
        self, block_hashes: Sequence[pk.BlockKey], replica_idx: int = 0, hint: object = None
    ) -> tuple[int, int]:
        present = [key in self.kept for key in block_hashes]
        return ([*present, False].index(False), 0)

    def load(
        self,
        block_ids: Sequence[int],
        block_hashes: Sequence[pk.BlockKey],
        replica_idx: int = 0,
        hint: object = None,
    ) -> LateCopy:
        return self._begin("load", self.loads, block_ids, block_hashes)

    def offload(
        self, block_ids: Sequence[int], block_hashes: Sequence[pk.BlockKey], replica_idx: int = 0
    ) -> LateCopy:
        return self._begin("offload", self.offloads, block_ids, block_hashes)

    def _begin(
        self, kind: str, manner: str, block_ids: Sequence[int], block_hashes: Sequence[pk.BlockKey]
    ) -> LateCopy:
        if manner == "refuse":
            raise pk.KVLoadRefused("the test says so")
        if manner == "raise":
            raise OSError("the tier is broken")
        copy = LateCopy(self, kind, list(block_ids), list(block_hashes))
        self.copies.append(copy)
        if manner == "now":
            copy.finish()
        elif manner == "fail":
            copy.fail()
        return copy

    def touch(self, block_hashes: Sequence[pk.BlockKey], replica_idx: int = 0) -> None:
        self.touched.append(list(block_hashes))

    def wait_for_loads(self) -> None:
        self.calls.append("wait_for_loads")

    def wait_for_offloads(self) -> None:
        self.calls.append("wait_for_offloads")

    def host_byte_count(self, replica_idx: int = 0) -> pk.ByteCount:
        return pk.ByteCount(7, 10)

    def disk_byte_count(self, replica_idx: int = 0) -> pk.ByteCount:
        return pk.ByteCount(0, 0)

    def metrics(self) -> Mapping[str, int]:
        return {"kept": len(self.kept)}

    def reset_prefix_cache(self) -> None:
        self.kept.clear()
        self.resets += 1

    def shutdown(self) -> None:
        self.calls.append("shutdown")
