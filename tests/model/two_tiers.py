"""Device and host memory that serve one request after the other, in dictionaries, by what the documents say.

Like `Cache`, which is its device, it knows neither tokens nor bytes, and the caller names the blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

from model.cache import Cache, Order


class Found(NamedTuple):
    """Where the blocks of a prompt were found; the rest was computed."""

    device: int
    host: int


class Host:
    """Blocks by name, in so many units. Every copy is over when the next one begins."""

    def __init__(self, units: int, policy: str) -> None:
        self.units = units
        self.blocks: Order[int] = Order(policy)
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
        """They are read: used now, and found again."""
        self.blocks.found.update(names)
        self.touch(names)
        self.loaded += len(names)

    def store(self, names: Sequence[int]) -> None:
        """Keeps what is not here yet. Blocks that are on their way do not give way to those behind them."""
        new: list[int] = []
        for name in names:
            if name in self.blocks:
                continue
            if len(self.blocks) + len(new) == self.units:
                if not self.blocks:
                    break
                self.blocks.pop()
                self.evictions += 1
            new.append(name)
        for name in reversed(new):
            self.blocks.push(name)
        self.stored += len(new)


class TwoTiers:
    """A device of `pages` pages before a host of `units` units.

    `policy` is the manager's `eviction_policy`, `write_policy` the tier's: when blocks go to the host.
    """

    def __init__(self, page_size: int, pages: int, units: int, policy: str, write_policy: str) -> None:
        self.device = Cache(page_size, pages, policy)
        self.host = Host(units, policy)
        self.after_publication = {"write_through": self.host.store}[write_policy]

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
            device.extend(row, tokens)
            new = device.publish(names, row, first, tokens // page_size)
            first = max(first, tokens // page_size)
            self.after_publication([names[block] for block in new])
        self.host.touch(names[: (prompt + output) // page_size])
        for page in reversed(row):
            device.give_back(page)
        return found

    def reuse(self, names: Sequence[int], prompt: int, row: list[int]) -> Found:
        """What is on the device, then what follows in the host, and so on: neither has the next block."""
        on_device = in_host = 0
        while True:
            first = on_device + in_host
            hits = self.hit(names[first:], first, row)
            on_device += hits
            first += hits
            if hits:
                self.host.touch(names[:first])
            loads = self.host.leading(names[first:])
            if not loads:
                return Found(on_device, in_host)
            self.land(names, first, first + loads, prompt, row)
            in_host += loads

    def hit(self, names: Sequence[int], first: int, row: list[int]) -> int:
        """Puts the stored pages of these blocks into the row, in place of what it holds there."""
        pages = self.device.match(names)
        for page in pages:
            self.device.acquire(page)
            self.device.idle.found.add(page)
        self.replace(row, first, pages)
        return len(pages)

    def land(self, names: Sequence[int], first: int, end: int, prompt: int, row: list[int]) -> None:
        """Loads blocks into pages of their own; pages for all of the prompt are taken with them."""
        pages = [self.device.take() for _ in range(end - first)]
        rest = [self.device.take() for _ in range(-(-prompt // self.device.page_size) - max(len(row), end))]
        self.host.load(names[first:end])
        self.replace(row, first, pages)
        row += rest
        self.device.publish(names, row, first, end)
        self.device.idle.found.update(row[first:end])

    def replace(self, row: list[int], first: int, pages: list[int]) -> None:
        """Puts pages into a row from block `first` on, and gives back those that were there."""
        for page in reversed(row[first : first + len(pages)]):
            self.device.give_back(page)
        row[first : first + len(pages)] = pages
