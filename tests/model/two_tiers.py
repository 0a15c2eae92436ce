"""Device and host memory that serve one request after the other, in dictionaries, by what the documents say.

Like `Cache`, which is its device, it knows neither tokens nor bytes, and the caller names the blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from model.cache import Cache, Order
from model.writing import WRITE_POLICIES

PRIORITY = 35
"""Of every block."""


class Found(NamedTuple):
    """Where the blocks of a prompt were found; the rest was computed."""

    device: int
    host: int


class Host:
    """Blocks by name, in so many units. Copies begin one after the other, and all end at `end_copies`."""

    def __init__(self, units: int, policy: str) -> None:
        self.units = units
        self.blocks: Order[int] = Order(policy)
        self.read: list[int] = []
        self.written: list[int] = []
        """Blocks that are being read and written, which stay where they are."""
        self.loaded = self.stored = self.evictions = 0

    def leading(self, names: Sequence[int]) -> int:
        """How many of these are here before the first that is not."""
        return next((place for place, name in enumerate(names) if name not in self.blocks), len(names))

    def touch(self, names: Sequence[int]) -> None:
        """A prefix was used on the device. The block at its end goes before those that lead to it."""
        for name in reversed(names):
            if name in self.blocks:
                self.blocks.remove(name)
                self.blocks.push(name)

    def load(self, names: Sequence[int]) -> None:
        """They are found again, and not evicted while they are read."""
        self.blocks.found.update(names)
        for name in names:
            self.blocks.remove(name)
        self.read += names

    def store(self, names: Sequence[int]) -> None:
        """Keeps what is not here yet, as far as there are units for it."""
        read = set(self.read)
        for name in names:
            if name in self.blocks or name in read:
                continue
            if len(self.blocks) + len(self.read) + len(self.written) == self.units:
                if not self.blocks:
                    break
                self.blocks.pop()
                self.evictions += 1
            self.written.append(name)

    def end_copies(self) -> None:
        """What was read was used just now, and then what was written."""
        for name in [*reversed(self.read), *reversed(self.written)]:
            self.blocks.push(name)
        self.loaded += len(self.read)
        self.stored += len(self.written)
        self.read, self.written = [], []


class TwoTiers:
    """A device of `pages` pages before a host of `units` units.

    `policy` is the manager's `eviction_policy`; `write_policy` and `min_hits` are its own too, and say when
    blocks go to the host. No block is kept longer than others. The copies of a call are over before the next.
    """

    def __init__(
        self, page_size: int, pages: int, units: int, policy: str, write_policy: str, min_hits: int
    ) -> None:
        self.device = Cache(page_size, pages, policy)
        self.host = Host(units, policy)
        self.writing = WRITE_POLICIES[write_policy](
            lambda block: PRIORITY, min_hits, PRIORITY if write_policy == "on_evict" else None
        )

    def serve(self, names: Sequence[int], prompt: int, output: int = 0) -> Found:
        """Computes what of a prompt is found nowhere, then its output, each in one forward, and lets go.

        Args:
            names: those of the full blocks of prompt and output.
            prompt: its tokens. The last is always computed, so its block is found nowhere.
            output: tokens that follow.
        """
        device, page_size = self.device, self.device.page_size
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
        """What is on the device, then what follows in the host, and so on: neither has the next block."""
        on_device = in_host = 0
        while True:
            first = on_device + in_host
            hits = self.hit(names, first, row)
            on_device += hits
            first += hits
            loads = self.host.leading(names[first:])
            self.host.load(names[first : first + loads])
            self.host.store(self.writing.hit(names[first - hits : first]))
            if not loads:
                return Found(on_device, in_host)
            self.land(names, first, first + loads, prompt, row)
            in_host += loads

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
        rest = [self.device.take() for _ in range(-(-prompt // self.device.page_size) - max(len(row), end))]
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
