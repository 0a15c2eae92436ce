"""A tier beyond the device for tests: its copies are late, fail, or are refused, as the test says."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

import pagekeeper as pk
from model.memory import PageMemory


class LateCopy:
    """A copy that ends when the test says so."""

    def __init__(self, tier: Tier, kind: str, parts: list[list[int]], keys: list[list[pk.BlockKey]]) -> None:
        self.tier, self.kind, self.parts = tier, kind, parts
        self.pages = [page for pages in parts for page in pages]
        self.keys = [tier.name(group, key) for group, part in enumerate(keys) for key in part]
        self.end: str | None = None
        self.seen = self.cells()
        """What the pages held when the copy began."""
        self.source = [tier.kept[key] for key in self.keys] if kind == "load" else []
        self.resets = tier.resets

    def cells(self) -> list[np.ndarray[Any, Any]]:
        """What the pages hold."""
        memories = zip(self.tier.memories, self.parts, strict=True)
        return [memory.cells[page].copy() for memory, pages in memories for page in pages]

    def fill(self, blocks: Sequence[Any]) -> None:
        blocks = list(blocks)
        for memory, pages in zip(self.tier.memories, self.parts, strict=True):
            for page in pages:
                memory.cells[page] = blocks.pop(0)

    @property
    def stale(self) -> bool:
        """Whether the tier was reset since."""
        return self.resets < self.tier.resets

    def finish(self) -> None:
        """The bytes move now, as late as they can."""
        assert self.end is None
        if self.kind == "load":
            self.fill(self.source)
        else:
            cells = self.cells()
            same = (now == then for now, then in zip(cells, self.seen, strict=True))
            assert all(one.all() for one in same), "a page changed under an offload"
            for key, block in zip(self.keys, cells, strict=True):
                if not self.stale:
                    self.tier.kept[key] = block
        self.end = "done"

    def fail(self) -> None:
        """Some of the bytes moved, nobody knows which."""
        assert self.end is None
        if self.kind == "load":
            self.fill([-1] * len(self.pages))
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

    def __init__(
        self, memories: PageMemory | Sequence[PageMemory], loads: str = "late", offloads: str = "now"
    ) -> None:
        self.memories = [memories] if isinstance(memories, PageMemory) else list(memories)
        self.loads, self.offloads = loads, offloads
        self.kept: dict[Any, np.ndarray[Any, Any]] = {}
        """By key; of several groups by group and key."""
        self.copies: list[LateCopy] = []
        """Every copy that was begun, oldest first."""
        self.touched: list[list[pk.BlockKey]] = []
        self.hints: list[object] = []
        self.calls: list[str] = []
        self.resets = 0

    def name(self, group: int, key: pk.BlockKey) -> Any:
        return key if len(self.memories) == 1 else (group, key)

    def lists(self, given: Sequence[Any]) -> list[list[Any]]:
        """One a group."""
        return [list(given)] if len(self.memories) == 1 else [list(part) for part in given]

    def in_flight(self) -> list[LateCopy]:
        return [copy for copy in self.copies if copy.end is None]

    def lookup(self, block_hashes: Sequence[Any], replica_idx: int = 0, hint: object = None) -> list[Any]:
        self.hints.append(hint)
        if self.loads == "blind":
            raise OSError("lookup is broken")
        there = [
            [self.name(group, key) in self.kept for key in keys]
            for group, keys in enumerate(self.lists(block_hashes))
        ]
        return there[0] if len(self.memories) == 1 else there

    def count_cached_prefix(
        self, block_hashes: Sequence[Any], replica_idx: int = 0, hint: object = None
    ) -> tuple[int, int]:
        there = [
            all(self.name(group, key) in self.kept for group, key in enumerate(keys))
            for keys in zip(*self.lists(block_hashes), strict=True)
        ]
        return ([*there, False].index(False), 0)

    def load(
        self,
        block_ids: Sequence[Any],
        block_hashes: Sequence[Any],
        replica_idx: int = 0,
        hint: object = None,
    ) -> LateCopy:
        return self._begin("load", self.loads, block_ids, block_hashes)

    def offload(
        self, block_ids: Sequence[Any], block_hashes: Sequence[Any], replica_idx: int = 0
    ) -> LateCopy:
        return self._begin("offload", self.offloads, block_ids, block_hashes)

    def _begin(
        self, kind: str, manner: str, block_ids: Sequence[Any], block_hashes: Sequence[Any]
    ) -> LateCopy:
        if manner == "refuse":
            raise pk.KVLoadRefused("the test says so")
        if manner == "raise":
            raise OSError("the tier is broken")
        copy = LateCopy(self, kind, self.lists(block_ids), self.lists(block_hashes))
        self.copies.append(copy)
        if manner == "now":
            copy.finish()
        elif manner == "fail":
            copy.fail()
        return copy

    def touch(self, block_hashes: Sequence[Any], replica_idx: int = 0) -> None:
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
