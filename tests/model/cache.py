"""A cache that serves one request after the other, in dictionaries: which blocks are hits, and which go.

It knows neither tokens nor hashes: the caller numbers the full blocks, one number for one whole prefix.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple


class Served(NamedTuple):
    """What serving a request came to, in page ids but for the hits, which are blocks."""

    hits: int
    taken: list[int]
    """Pages that the request was given, in order: each that stood for a block evicted it."""
    row: list[int]
    """The page of each block in the end."""


class Cache:
    """Blocks by name, and the pages that hold them; `policy` is the manager's `eviction_policy`."""

    def __init__(self, page_size: int, pages: int, policy: str) -> None:
        self.page_size = page_size
        self.scan_resistant = {"priority_lru": False, "priority_slru": True}[policy]
        self.stored: dict[int, int] = {}
        self.names: dict[int, int] = {}
        """What a page stands for: the reverse of `stored`."""
        self.unused = deque(range(1, pages + 1))
        self.loose: deque[int] = deque()
        """Released pages that stand for nothing, least recently released first."""
        self.once: OrderedDict[int, int] = OrderedDict()
        """Idle pages whose block was asked for once, and when they were released."""
        self.again: OrderedDict[int, int] = OrderedDict()
        """Idle pages whose block was asked for again; empty under plain LRU."""
        self.found: set[int] = set()
        self.releases = 0
        self.evictions = 0

    def serve(self, names: Sequence[int], prompt: int, output: int = 0) -> Served:
        """Computes a prompt, then its output in one forward, and lets the request go.

        Args:
            names: those of the full blocks of prompt and output.
            prompt: its tokens. The last is always computed, so its block is no hit.
            output: tokens that follow.
        """
        row = self.match(names[: (prompt - 1) // self.page_size])
        hits, taken = len(row), list[int]()
        for page in row:
            self.acquire(page)
            self.found.add(page)
        shared = hits
        for tokens in (prompt, prompt + output):
            fresh = [self.take() for _ in range(-(-tokens // self.page_size) - len(row))]
            taken += fresh
            row += fresh
            full = tokens // self.page_size
            for block in range(shared, full):
                page = row[block]
                row[block] = self.share(names[block], page)
                if row[block] != page:  # computed again, and so is all that leads to it
                    self.found.update(row[: block + 1])
            shared = max(shared, full)
        for page in reversed(row):
            self.give_back(page)
        return Served(hits, taken, row)

    def match(self, names: Sequence[int]) -> list[int]:
        """Pages of the longest stored prefix."""
        pages: list[int] = []
        for name in names:
            page = self.stored.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, name: int, page: int) -> int:
        """Stores a computed block; gives the page to go on with: its own, or that of the stored twin."""
        twin = self.stored.get(name)
        if twin is None:
            self.stored[name] = page
            self.names[page] = name
            return page
        self.acquire(twin)
        self.give_back(page)
        return twin

    def acquire(self, page: int) -> None:
        """Takes a stored page out of its queue."""
        if self.once.pop(page, None) is None:
            del self.again[page]

    def give_back(self, page: int) -> None:
        """Queues a page behind all that were released before it."""
        self.releases += 1
        if page not in self.names:
            self.loose.append(page)
        elif self.scan_resistant and page in self.found:
            self.again[page] = self.releases
        else:
            self.once[page] = self.releases

    def take(self) -> int:
        """A page for new KV: one that stands for nothing if there is any, else the next victim."""
        if self.loose:
            return self.loose.popleft()
        if self.unused:
            return self.unused.popleft()
        page = self.victim()
        del self.stored[self.names.pop(page)]
        self.found.discard(page)
        self.evictions += 1
        return page

    def victim(self) -> int:
        """The least recently released block that was never found again, as long as there is one.

        When more than a third of the idle blocks were found again, that protects none: the least
        recently released of all goes.
        """
        crowded = 3 * len(self.again) > len(self.once) + len(self.again)
        if not self.once or (crowded and oldest(self.again) < oldest(self.once)):
            return self.again.popitem(last=False)[0]
        return self.once.popitem(last=False)[0]


def oldest(queue: OrderedDict[int, int]) -> int:
    """When the first page of a queue was released."""
    return next(iter(queue.values()))
