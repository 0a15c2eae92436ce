"""Device, host memory and disk that serve requests in turn, in dictionaries, by what the documents say.

Like `Cache`, which is its device, it knows neither tokens nor bytes, and the caller names the blocks.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from model.cache import Cache, Order
from model.disk import Disk
from model.writing import WRITE_POLICIES

PRIORITY = 35
"""Of every block."""


class Found(NamedTuple):
    """Where the blocks of a prompt were found; the rest was computed."""

    device: int
    host: int
    disk: int = 0


class Host:
    """Blocks by name, in so many units, before a disk.

    Copies begin one after the other, and all end at `end_copies`. No more blocks may come at once than half
    of the units: the disk would not get them all.
    """

    def __init__(self, units: int, policy: str, disk: Disk) -> None:
        self.units, self.disk = units, disk
        self.blocks: Order[int] = Order(policy)
        self.read: list[list[int]] = []
        """Blocks that are being read, in runs."""
        self.written: list[int] = []
        """Blocks that are being written. Both stay where they are."""
        self.loaded = self.stored = self.evictions = 0

    def leading(self, names: Sequence[int]) -> int:
        """How many of these can be read before the first that cannot.

        What comes from the disk comes through a unit, so that all fit into the host then.
        """
        gaps = (n for n, name in enumerate(names) if name not in self.blocks and name not in self.disk)
        run = next(gaps, len(names))
        return run if all(name in self.blocks for name in names[:run]) else min(run, self.units)

    def touch(self, names: Sequence[int]) -> None:
        """A prefix was used on the device. The block at its end goes before those that lead to it."""
        for name in reversed(names):
            if name in self.blocks:
                self.blocks.remove(name)
                self.blocks.push(name)
        self.disk.touch(names)

    def load(self, names: Sequence[int]) -> int:
        """Reads what is here, then what comes up from the disk. Gives how many are here.

        What is here is found again, and what comes from the disk is new. All stays while it is read, one run
        of blocks after the other.
        """
        runs = [(here, list(run)) for here, run in groupby(names, key=lambda name: name in self.blocks)]
        found = [run for here, run in runs if here]
        for run in found:
            self.blocks.found.update(run)
            for name in run:
                self.blocks.remove(name)
        self.read += found
        if coming := [name for here, run in runs if not here for name in run]:
            self.disk.load(coming)
            self.read.append([])
            for name in coming:
                self.make_room()
                self.read[-1].append(name)
        return sum(map(len, found))

    def store(self, names: Sequence[int]) -> None:
        """Keeps what is not here yet, as far as there are units for it beside what is."""
        here = {name for run in self.read for name in run}
        here.update(name for name in names if name in self.blocks)
        with self.blocks.kept(names) as kept, self.disk.blocks.kept(names):
            new = list[int]()
            for name in names:
                if name in here:
                    continue
                if not self.make_room(beside=kept):
                    break
                new.append(name)
                self.written.append(name)
            self.disk.write(new)

    def make_room(self, beside: int = 0) -> bool:
        """Whether there is a unit beside so many that stay, perhaps after an eviction."""
        if beside + len(self.blocks) + sum(map(len, self.read)) + len(self.written) < self.units:
            return True
        if self.blocks:
            self.blocks.pop()
            self.evictions += 1
            return True
        return False

    def end_copies(self) -> None:
        """What was read was used just now, and then what was written."""
        for run in [*self.read, self.written]:
            for name in reversed(run):
                self.blocks.push(name)
        self.loaded += sum(map(len, self.read))
        self.stored += len(self.written)
        self.disk.end_copies()
        self.read, self.written = [], []


class ThreeTiers:
    """A device of `pages` pages before a host of `units` units, before a disk of `slots` slots, or none.

    `policy` is the manager's `eviction_policy`; `write_policy` and `min_hits` are its own too, and say when
    blocks go to the host. No block is kept longer than others. The copies of a call are over before the next.
    """

    def __init__(
        self,
        page_size: int,
        pages: int,
        units: int,
        policy: str,
        write_policy: str,
        min_hits: int,
        slots: int = 0,
    ) -> None:
        self.disk = Disk(slots, policy)
        self.new_device = partial(Cache, page_size, pages, policy)
        self.new_host = partial(Host, units, policy, self.disk)
        self.new_writing = partial(
            WRITE_POLICIES[write_policy],
            lambda block: PRIORITY,
            min_hits,
            PRIORITY if write_policy == "on_evict" else None,
        )
        self.restart()

    def restart(self) -> None:
        """Only the disk keeps its blocks."""
        self.device, self.host, self.writing = self.new_device(), self.new_host(), self.new_writing()
        self.disk.restart()

    def serve(self, names: Sequence[int], prompt: int, output: int = 0) -> Found:
        """Computes what of a prompt is found nowhere, then its output, each in one forward, and lets go.

        Args:
            names: those of the full blocks of prompt and output.
            prompt: its tokens. The last is always computed, so its block is found nowhere.
            output: tokens that follow.
        """
        device, page_size = self.device, self.device.page_size
        self.disk.learn(names)
        row = list[int]()
        found = self.reuse(names[: (prompt - 1) // page_size], prompt, row)
        first = sum(found)
        for tokens in (prompt, prompt + output):
            self.end_alloc(device.extend(row, tokens))
            self.publish(names, row, first, tokens // page_size)
            first = max(first, tokens // page_size)
        self.host.touch(names[: (prompt + output) // page_size])
        for page in reversed(row):
            device.give_back(page)
        return found

    def reuse(self, names: Sequence[int], prompt: int, row: list[int]) -> Found:
        """What is on the device, then what follows beyond it, and so on, until the next block is nowhere."""
        on_device = in_host = on_disk = 0
        while True:
            first = on_device + in_host + on_disk
            hits = self.hit(names, first, row)
            on_device += hits
            first += hits
            loads = self.host.leading(names[first:])
            if not self.has_room(loads, first, prompt, row):
                loads = 0
            here = self.host.load(names[first : first + loads])
            self.host.store(self.writing.hit(names[first - hits : first]))
            if not loads:
                return Found(on_device, in_host, on_disk)
            self.land(names, first, first + loads, prompt, row)
            in_host += here
            on_disk += loads - here

    def has_room(self, loads: int, first: int, prompt: int, row: list[int]) -> bool:
        """Whether there are pages for a load of so many blocks beside those that its request has."""
        free = len(self.device.unused) + len(self.device.loose) + len(self.device.idle)
        return loads + self.rest_of(prompt, first + loads, row) <= free

    def rest_of(self, prompt: int, end: int, row: list[int]) -> int:
        """Pages that a prompt takes with a load up to block `end`."""
        return -(-prompt // self.device.page_size) - max(len(row), end)

    def hit(self, names: Sequence[int], first: int, row: list[int]) -> int:
        """Puts the stored pages of blocks from `first` on into the row, in place of what it holds there."""
        pages = self.device.match(names[first:])
        for page in pages:
            self.device.acquire(page)
            self.device.idle.found.add(page)
        self.replace(row, first, pages)
        if pages:
            self.host.touch(names[: first + len(pages)])
        return len(pages)

    def land(self, names: Sequence[int], first: int, end: int, prompt: int, row: list[int]) -> None:
        """Loads blocks into pages of their own; pages for all of the prompt are taken with them."""
        pages = [self.device.take() for _ in range(end - first)]
        rest = [self.device.take() for _ in range(self.rest_of(prompt, end, row))]
        self.end_alloc([*pages, *rest])
        self.replace(row, first, pages)
        row += rest
        self.publish(names, row, first, end)
        self.device.idle.found.update(row[first:end])

    def end_alloc(self, taken: Sequence[int]) -> None:
        """The call took these pages, perhaps none."""
        if taken:
            device = self.device
            next_to_go = (device.names[page] for page in device.idle.next_to_go())
            idle = len(device.idle) + len(device.loose)
            self.host.store(
                self.writing.took(len(taken), unused=len(device.unused), idle=idle, next_to_go=next_to_go)
            )
        self.host.end_copies()

    def publish(self, names: Sequence[int], row: list[int], first: int, end: int) -> None:
        """Blocks are on the device from now on: those that were computed, or come from the host."""
        new = self.device.publish(names, row, first, end)
        self.host.store(self.writing.published([names[block] for block in new]))
        self.host.end_copies()

    def replace(self, row: list[int], first: int, pages: list[int]) -> None:
        """Puts pages into a row from block `first` on, and gives back those that were there."""
        for page in reversed(row[first : first + len(pages)]):
            self.device.give_back(page)
        row[first : first + len(pages)] = pages
