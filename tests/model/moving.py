"""Copies of a random session: a mover that reads, and a tier that loads and keeps blocks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import pagekeeper as pk
from model.live import Live
from model.requests import NoRoom
from model.serving import Serving
from model.tier import LateCopy

ENDS = {"now": "finished", "fail": "failed", "raise": "failed", "refuse": "refused"}
"""How a copy ends at once, by how the tier behaves."""


class Moving(Serving):
    """Copies begin, and end late, badly, or not at all, in any order."""

    def __init__(self, seed: int, **options: bool) -> None:
        super().__init__(seed, **options)
        self.read: dict[int, np.ndarray[Any, Any]] = {}
        """The computed cells of each copy that only reads, as they were when it began."""
        self.moved: dict[int, LateCopy] = {}
        """The tier's late copies."""
        self.prefetches: dict[int, object] = {}
        """Requests that only bring blocks in, by their copy."""
        self.ready: list[object] = []

    # Copies that read

    def start_copy(self) -> None:
        """A mover, late on purpose, begins to read blocks that are computed, the last perhaps in part."""
        if not self.model.pools[0].keeps_all:
            return
        for one in self.pick(lambda one: self.request(one).processed > 0, most=1):
            request = self.request(one)
            blocks = -(-request.processed // self.page_size)
            first = self.random.randrange(blocks)
            count = self.random.randint(1, blocks - first)
            copy, pages, _ = self.kv._core.start_copy(one.ctx, first, count)
            self.note(f"copy {copy} of {self.places([one])}, blocks {first} to {first + count}")
            assert pages == request.rows[0][first : first + count]
            assert copy == self.model.start_copy([pages])
            self.read[copy] = self.memories[0].read(pages, request.processed - first * self.page_size)

    def end_copy(self) -> None:
        """What the mover read last is what was there when it began: nobody wrote there meanwhile."""
        if not self.read:
            return
        copy = self.random.choice(list(self.read))
        self.note(f"end of copy {copy}")
        seen = self.read.pop(copy)
        assert (self.memories[0].read(self.model.copies[copy].pages, len(seen)) == seen).all()
        self.model.end_copy(copy)
        self.check_ready(self.kv.poll_transfers(completions=[copy]))

    # Loads and offloads

    def behave(self) -> None:
        """The tier changes its manners."""
        if self.tier is not None:
            self.tier.loads = self.random.choice(["late"] * 4 + ["now", "fail", "refuse", "raise", "blind"])
            self.tier.offloads = self.random.choice(["now", "now", "late", "late", "fail", "refuse", "raise"])
            self.note(f"tier: loads {self.tier.loads}, offloads {self.tier.offloads}")

    def plan(self, names: Sequence[object], bounds: Sequence[int | None]) -> set[object] | NoRoom:
        loads = [self.loadable(name) for name in names]
        try:
            waiting = self.begin_loads(self.model.alloc(names, bounds, loads))
        except NoRoom as refusal:
            return refusal
        ended = [
            (name, bound)
            for name, bound, load in zip(names, bounds, loads, strict=True)
            if load and name not in waiting and not self.model.requests[name].live
        ]
        if ended:
            self.model.alloc(*zip(*ended, strict=True))  # there is room: the load held it
        self.offload()
        return waiting

    def loadable(self, name: object) -> int:
        return 0 if self.tier is None or self.tier.loads == "blind" else self.model.loadable(name)

    def begin_loads(self, loads: dict[object, int]) -> set[object]:
        """Those that wait."""
        assert self.tier is not None or not loads
        waiting = set[object]()
        for name, copy in loads.items():
            assert self.tier is not None
            if self.tier.loads == "late":
                waiting.add(name)
            else:
                self.model.end_copy(copy, ENDS[self.tier.loads])
        return waiting

    def offload(self) -> None:
        assert self.tier is not None or not self.model.new_offloads
        for copy in self.model.new_offloads:
            assert self.tier is not None
            if self.tier.offloads == "now":
                self.model.keep(copy)
            if self.tier.offloads != "late":
                self.model.end_copy(copy, ENDS[self.tier.offloads])
        self.model.new_offloads.clear()

    def prefetch(self) -> None:
        if self.random.random() < 0.5:
            self.prefetch_request()
        else:
            self.prefetch_tokens()

    def prefetch_request(self) -> None:
        for one in self.pick(self.can_plan, most=1):
            name = one.ctx.request_id
            self.note(f"prefetch {self.places([one])}")
            load = self.loadable(name)
            if not load:
                assert self.kv.prefetch(one.ctx).is_complete()
                continue
            try:
                self.begin_loads(self.model.alloc([name], None, [load], only_loads=True))
            except NoRoom:
                self.refused(pk.InsufficientBlocksError, partial(self.kv.prefetch, one.ctx))
                continue
            self.offload()
            self.kv.prefetch(one.ctx)

    def prefetch_tokens(self) -> None:
        namespace, tokens, keys = self.prefix()
        self.note(f"prefetch {keys} {tokens}")
        name, known = object(), [*tokens, tokens[-1]]
        self.model.claim(name, known, namespace)
        blocks = self.model.match(namespace, known) + self.loadable(name)
        self.model.unclaim(name)
        known = known[: min(blocks, self.kv.total_num_pages - 1) * self.page_size + 1]
        self.model.claim(name, known, namespace)  # what the tier has, and a token
        load = self.loadable(name)
        if not load:
            self.model.unclaim(name)
            assert self.kv.prefetch(tokens, **keys).is_complete()
            return
        try:
            loads = self.model.alloc([name], None, [load], only_loads=True)
        except NoRoom:
            self.model.unclaim(name)
            self.refused(pk.InsufficientBlocksError, lambda: self.kv.prefetch(tokens, **keys))
            return
        if not loads:
            self.model.unclaim(name)
            assert self.kv.prefetch(tokens, **keys).is_complete()
            return
        waiting = self.begin_loads(loads)
        self.offload()
        self.prefetches |= {copy: name for copy in loads.values() if waiting}
        self.kv.prefetch(tokens, **keys)
        if not waiting:
            self.model.release([name])

    def poll(self) -> None:
        """Some of the tier's copies end, and the manager hears of it."""
        if self.tier is None:
            return
        self.match_copies()
        flying = [copy for copy, late in self.moved.items() if late.end is None]
        for copy in self.random.sample(flying, self.random.randint(0, len(flying))):
            if self.random.random() < 0.2:
                self.moved[copy].fail()
                continue
            self.moved[copy].finish()
            if self.moved[copy].kind == "offload":
                self.model.keep(copy)
        over = self.ended()
        if self.random.random() < 0.5:
            over = self.random.sample(over, self.random.randint(0, len(over)))
            self.note(f"poll_transfers {over}")
            self.settle(over)
            self.check_ready(self.kv.poll_transfers(completions=over))
        else:
            self.note(f"poll_transfers, {over} have ended")
            self.settle(over)
            self.check_ready(self.kv.poll_transfers())

    def ended(self) -> list[int]:
        """The tier's copies that have ended, loads first."""
        over = [copy for copy, late in self.moved.items() if late.end is not None]
        return sorted(over, key=lambda copy: self.moved[copy].kind)

    def settle_ended(self) -> None:
        self.settle(self.ended())

    def match_copies(self) -> None:
        """The tier's new copies, by the model's numbers. A call begins loads before offloads."""
        assert self.tier is not None
        known = list(self.moved.values())
        new = [late for late in self.tier.in_flight() if late not in known]
        new.sort(key=lambda late: late.kind == "offload")
        numbers = [copy for copy in self.model.copies if copy not in self.read and copy not in self.moved]
        numbers.sort(key=lambda copy: self.model.copies[copy].loads is None)
        for copy, late in zip(numbers, new, strict=True):
            assert late.pages == self.model.copies[copy].pages
            self.moved[copy] = late

    def settle(self, copies: Sequence[int]) -> None:
        """What the model makes of these ends."""
        over = []
        for number in copies:
            late = self.moved.pop(number)
            name = self.model.copies[number].loads
            waited = self.model.end_copy(number, "finished" if late.end == "done" else "failed")
            if number in self.prefetches:
                over.append(self.prefetches.pop(number))
            elif waited:
                self.ready.append(name)
        self.model.release(over)

    def release(self, batch: Sequence[Live] | None = None) -> None:
        super().release(batch)
        claimed = {one.ctx.request_id for one in self.live}
        self.ready = [name for name in self.ready if name in claimed]

    def check_ready(self, names: Sequence[object]) -> None:
        assert names == self.ready
        self.ready = []

    def end_all(self) -> None:
        """Every copy ends."""
        while self.read:
            self.end_copy()
        while self.tier is not None and self.model.copies:
            self.poll()
