"""A cache that serves one request after the other, in dictionaries: which blocks are hits, and which go.

It knows neither tokens nor hashes: the caller numbers the full blocks, one number for one whole prefix.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Served(NamedTuple):
    """What serving a request came to, in page ids but for the hits, which are blocks."""

    hits: int
    taken: list[int]
    """Pages that the request was given, in order: each that stood for a block evicted it."""
    row: list[int]
    """The page of each block in the end."""


class Order(Generic[T]):
    """Idle blocks in the order in which they go; `policy` is the manager's `eviction_policy`."""

    def __init__(self, policy: str) -> None:
        self.scan_resistant = {"priority_lru": False, "priority_slru": True}[policy]
        self.once: OrderedDict[T, int] = OrderedDict()
        """Blocks that were asked for once, and when they were released."""
        self.again: OrderedDict[T, int] = OrderedDict()
        """Blocks that were asked for again; empty under plain LRU."""
        self.found: set[T] = set()
        """Blocks that were asked for again, idle or not."""
        self.turns = 0

    def __len__(self) -> int:
        return len(self.once) + len(self.again)

    def __contains__(self, block: T) -> bool:
        return block in self.once or block in self.again

    def push(self, block: T) -> None:
        """Queues a block behind all that were released before it."""
        self.turns += 1
        queue = self.again if self.scan_resistant and block in self.found else self.once
        queue[block] = self.turns

    def remove(self, block: T) -> None:
        """Takes a block out: somebody uses it."""
        if self.once.pop(block, None) is None:
            del self.again[block]

    @contextmanager
    def kept(self, blocks: Sequence[T]) -> Iterator[int]:
        """None of these goes meanwhile; gives how many they are. Afterwards they are where they were."""
        queues = (self.once, self.again)
        held = [{block: queue.pop(block) for block in blocks if block in queue} for queue in queues]
        yield sum(map(len, held))
        for queue, places in zip(queues, held, strict=True):
            if places:
                in_order = sorted([*queue.items(), *places.items()], key=lambda place: place[1])
                queue.clear()
                queue.update(in_order)

    def pop(self) -> T:
        """Takes out the block that goes next."""
        block = next(self.next_to_go())
        self.remove(block)
        self.found.discard(block)
        return block

    def next_to_go(self) -> Iterator[T]:
        """The least recently released block that was never found again, as long as there is one; and so on.

        When more than a third of the idle blocks were found again, that protects none: the least
        recently released of all goes.
        """
        once, again = iter(self.once.items()), iter(self.again.items())
        spared, left, kept = next(again, None), len(self), len(self.again)
        for block, turn in once:
            while spared and 3 * kept > left and spared[1] < turn:
                yield spared[0]
                spared, left, kept = next(again, None), left - 1, kept - 1
            yield block
            left -= 1
        if spared:
            yield spared[0]
        yield from (block for block, _ in again)


class Cache:
    """Blocks by name, and the pages that hold them; `policy` is the manager's `eviction_policy`."""

    def __init__(self, page_size: int, pages: int, policy: str) -> None:
        self.page_size = page_size
        self.stored: dict[int, int] = {}
        self.names: dict[int, int] = {}
        """What a page stands for: the reverse of `stored`."""
        self.unused = deque(range(1, pages + 1))
        self.loose: deque[int] = deque()
        """Released pages that stand for nothing, least recently released first."""
        self.idle: Order[int] = Order(policy)
        """Released pages that stand for a block."""
        self.evictions = 0

    def serve(self, names: Sequence[int], prompt: int, output: int = 0) -> Served:
        """Computes a prompt, then its output in one forward, and lets the request go.

        Args:
            names: those of the full blocks of prompt and output.
            prompt: its tokens. The last is always computed, so its block is no hit.
            output: tokens that follow.
        """
        row, taken = list[int](), list[int]()
        hits = self.reuse(names[: (prompt - 1) // self.page_size], row)
        shared = hits
        for tokens in (prompt, prompt + output):
            taken += self.extend(row, tokens)
            full = tokens // self.page_size
            self.publish(names, row, shared, full)
            shared = max(shared, full)
        for page in reversed(row):
            self.give_back(page)
        return Served(hits, taken, row)

    def reuse(self, names: Sequence[int], row: list[int]) -> int:
        """Adds the pages of the longest stored prefix; gives their number."""
        hits = self.match(names)
        for page in hits:
            self.acquire(page)
            self.idle.found.add(page)
        row += hits
        return len(hits)

    def match(self, names: Sequence[int]) -> list[int]:
        """Pages of the longest stored prefix."""
        pages: list[int] = []
        for name in names:
            page = self.stored.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def extend(self, row: list[int], tokens: int) -> list[int]:
        """Takes pages so that the row holds so many tokens; gives the new ones."""
        fresh = [self.take() for _ in range(-(-tokens // self.page_size) - len(row))]
        row += fresh
        return fresh

    def publish(self, names: Sequence[int], row: list[int], first: int, end: int) -> list[int]:
        """Stores computed blocks; gives those that are new. A row goes on with the pages of stored twins."""
        new = []
        for block in range(first, end):
            page = row[block]
            row[block] = self.share(names[block], page)
            if row[block] == page:
                new.append(block)
            else:  # computed again, and so is all that leads to it
                self.idle.found.update(row[: block + 1])
        return new

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
        self.idle.remove(page)

    def give_back(self, page: int) -> None:
        """Queues a page behind all that were released before it."""
        if page in self.names:
            self.idle.push(page)
        else:
            self.loose.append(page)

    def take(self) -> int:
        """A page for new KV: one that stands for nothing if there is any, else the next victim."""
        if self.loose:
            return self.loose.popleft()
        if self.unused:
            return self.unused.popleft()
        page = self.idle.pop()
        del self.stored[self.names.pop(page)]
        self.evictions += 1
        return page
