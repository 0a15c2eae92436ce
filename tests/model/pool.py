"""Pages and the blocks that they stand for: who holds a page, and which one goes next."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from model.slab import Lost, Rank, SharedSlab, Taken
from model.windows import Full, Kind, Lasting, Recurrent

Content = tuple[object, tuple[int | None, ...]]
"""A block's identity: (namespace, all tokens from the first to the block's last)."""


class Limit(NamedTuple):
    """When a priority ends: `seconds` after the last release, or at that time."""

    seconds: float
    after_release: bool


class Group(NamedTuple):
    """Layers that keep the same tokens, in pages of their own."""

    kind: Kind
    pages: int


NULL = 0
"""Stands in a row where a group needs no page."""


class Pool:
    """The pages of one group, 1 to `pages`, and the stored blocks by what they are.

    In a slab that groups share it has the pages of those huge pages that it was given.
    """

    def __init__(self, page_size: int, group: Group, priority: int, *, scan_resistant: bool) -> None:
        self.page_size = page_size
        self.kind, self.pages = group
        self.default = priority
        self.scan_resistant = scan_resistant
        self.now = 0.0
        self.tree: dict[Content, int] = {}
        self.stored: dict[int, Content] = {}
        """What a page stands for: the reverse of `tree`."""
        self.priority: dict[int, int] = {}
        """Of stored pages, like the next three."""
        self.limits: dict[int, Limit] = {}
        self.reused: set[int] = set()
        self.references: Counter[int] = Counter()
        self.touched: Counter[int] = Counter()
        """Copies in flight that read or write a page."""
        self.places: dict[int, int] = {}
        """Of pages that only copies hold, the turn at which they were released."""
        self.released: dict[int, float] = {}
        """When the last holder of a page let go."""
        self.slab: SharedSlab | None = None
        """Where other groups have pages too, and the group's number there."""
        self.group = 0
        self.pristine = list(range(1, self.pages + 1))
        """Of a pool of its own, pages that were never handed out; of a shared slab `fresh` has them."""
        self.fresh: set[int] = set()
        self.foreign: set[int] = set()
        """Pages with bytes of another group's."""
        self.loose: list[int] = []
        """Idle pages that stand for nothing, the next one first."""
        self.idle: dict[int, int] = {}
        """Idle pages that stand for a block, with the turn at which they were released."""
        self.clock: Iterator[int] = count(1)
        """Turns, which all groups of a slab take together."""

    @property
    def keeps_all(self) -> bool:
        """Whether no block goes before its request does."""
        return isinstance(self.kind, Full)

    @property
    def has_blocks(self) -> bool:
        """Whether a page is a block with its tokens' KV."""
        return not isinstance(self.kind, Recurrent | Lasting)

    @property
    def free(self) -> int:
        """Pages that a request may be given: never used, or held by nobody."""
        if self.slab is not None:
            return self.slab.available(self.group)
        return len(self.pristine) + len(self.loose) + len(self.idle)

    @property
    def idle_pages(self) -> set[int]:
        return {*self.loose, *self.idle}

    @property
    def in_flight(self) -> int:
        """Pages that only copies hold."""
        return sum(1 for page, copies in self.touched.items() if copies and not self.references[page])

    def is_idle(self, page: int) -> bool:
        return page in self.idle or page in self.loose

    def is_writable(self, page: int) -> bool:
        """Whether one request holds the page, nobody can find it and no copy reads it."""
        return self.is_unshared(page) and page not in self.stored

    def is_unshared(self, page: int) -> bool:
        """Whether the page can be had when its one holder lets go."""
        return self.references[page] == 1 and not self.touched[page]

    # Holders

    def take(self, wanted: int, left: Sequence[int]) -> tuple[list[Taken], list[Lost]]:
        """Pages for new KV, and blocks that other groups of the slab lose for them.

        Released pages that stand for nothing go first, then unused ones, then victims.
        """
        if self.slab is not None:
            return self.slab.take(self.group, wanted, left)
        return [self.hand_out(self._next()) for _ in range(wanted)], []

    def _next(self) -> int:
        if self.loose or self.pristine:
            return (self.loose or self.pristine)[0]
        return self.victim(self.idle)

    def hand_out(self, page: int) -> Taken:
        is_new = page in self.fresh or page in self.pristine[:1]
        self.fresh.discard(page)
        if page in self.pristine[:1]:
            self.pristine.remove(page)
        self._leave_queue(page)
        self.references[page] = 1
        return Taken(page, self.forget(page) if page in self.stored else None, is_new)

    def give_up(self, page: int) -> Content | None:
        """The idle page is another group's now; gives the block that it stood for."""
        block = self.stored.get(page)
        if block is not None:
            self.forget(page)
        self.loose.remove(page)
        self.fresh.discard(page)
        return block

    def rank(self, page: int) -> Rank:
        """When an idle page goes that stands for a block."""
        return self.priority[page], self.idle[page]

    def would_open(self, page: int) -> bool:
        """Whether other groups could not have the page's huge page any more if somebody held it."""
        return self.slab is not None and self.slab.is_parked(self.group, self.slab.huge_of(self.group, page))

    def victim(self, idle: dict[int, int]) -> int:
        """Of the lowest priority the least recently released page.

        When scans are resisted, pages that were never reused go before those that were, as long as these are
        at most a third of their priority's.
        """
        lowest = min(self.priority[page] for page in idle)
        level = [page for page in idle if self.priority[page] == lowest]
        if self.scan_resistant:
            once = [page for page in level if page not in self.reused]
            if 2 * (len(level) - len(once)) <= len(once):
                level = once
        return min(level, key=lambda page: idle[page])

    def order(self) -> list[int]:
        """All idle pages, the next to go first."""
        order, idle = list(self.loose), dict(self.idle)
        while idle:
            order.append(self.victim(idle))
            del idle[order[-1]]
        return order

    def hold(self, page: int) -> None:
        if not self.references[page]:
            self.released.pop(page, None)
            self._leave_queue(page)
        self.references[page] += 1

    def let_go(self, page: int) -> None:
        assert self.references[page] > 0
        self.references[page] -= 1
        if not self.references[page]:
            self.released[page] = self.now
            if not self.touched[page]:
                self._enqueue(page)
            else:
                self.places[page] = next(self.clock)

    def touch(self, page: int) -> None:
        """A copy begins to read or write the page."""
        if not self.references[page] and not self.touched[page]:
            self.places[page] = self.idle.get(page, 0)
            self._leave_queue(page)
        self.touched[page] += 1

    def end_touch(self, page: int) -> None:
        """The copy has ended. Idle blocks above a page that becomes idle count as used until now."""
        self.touched[page] -= 1
        if not self.touched[page] and not self.references[page]:
            self._enqueue(page)
            self.refresh_above(page)

    def end_touch_in_place(self, page: int) -> None:
        """The copy has ended, and nobody used the page for it: a block goes when it would have gone."""
        self.touched[page] -= 1
        if not self.touched[page] and not self.references[page]:
            self._enqueue(page)
            if page in self.idle:
                self.idle[page] = self.places[page]

    def refresh(self, page: int | None) -> None:
        """Counts a stored page that nobody holds, but perhaps copies, as used until now."""
        if page is None or not self._is_let_go(page):
            return
        self.released[page] = self.now
        if page in self.idle:
            self._leave_queue(page)
            self._enqueue(page)
        else:
            self.places[page] = next(self.clock)

    def _is_let_go(self, page: int) -> bool:
        """Whether the page stands for a block and no request holds it."""
        return page in self.stored and not self.references[page]

    def refresh_above(self, page: int) -> None:
        """Counts the blocks above an idle page as used until now, as far as no request holds them.

        So no block goes before one below it, unless its priority is lower. A window goes head to tail.
        """
        if page not in self.idle or not self.keeps_all:
            return
        namespace, tokens = self.stored[page]
        above_it = (len(tokens) - 1) // self.page_size * self.page_size
        for end in range(above_it, 0, -self.page_size):
            above = self.tree.get((namespace, tokens[:end]))
            if above is None or not self._is_let_go(above):
                return
            self.refresh(above)

    def _enqueue(self, page: int) -> None:
        if page in self.stored:
            self.idle[page] = next(self.clock)
        else:
            self.loose.append(page)
        self._entered(page)

    def _leave_queue(self, page: int) -> None:
        if self.idle.pop(page, None) is None and page in self.loose:
            self.loose.remove(page)
        self._left(page)

    def _entered(self, page: int) -> None:
        if self.slab is not None:
            self.slab.entered(self.group, page)

    def _left(self, page: int) -> None:
        if self.slab is not None:
            self.slab.left(self.group, page)

    # Blocks

    def store(self, content: Content, page: int) -> None:
        self.tree[content] = page
        self.stored[page] = content
        self.priority[page] = self.default

    def forget(self, page: int) -> Content:
        """The page stands for nothing any more; gives the block that it stood for."""
        content = self.stored.pop(page)
        del self.tree[content]
        del self.priority[page]
        self.limits.pop(page, None)
        self.reused.discard(page)
        if page in self.idle:
            self._leave_queue(page)
            self._enqueue(page)
        return content

    def reuse(self, pages: Iterable[int]) -> None:
        """These stored pages were asked for again."""
        for page in pages:
            if page not in self.reused:
                self.reused.add(page)
                self._moved(page, moves=self.scan_resistant)

    def _moved(self, page: int, *, moves: bool) -> None:
        """If the idle page goes with others now, its huge page gets a place anew."""
        if moves and page in self.idle:
            self._left(page)
            self._entered(page)

    def forget_all(self, order: Sequence[int]) -> None:
        """Every idle page is loose. `order` is the manager's: it may leave those of one call as they were."""
        assert sorted(order) == sorted([*self.loose, *self.idle])
        assert list(order[: len(self.loose)]) == self.loose
        self.loose = list(order)
        for book in (self.tree, self.stored, self.priority, self.limits, self.reused, self.idle):
            book.clear()
        if self.slab is not None:
            self.slab.parked[self.group].forget_all()

    # Time

    def retain(self, page: int, priority: int, limit: Limit | None) -> None:
        """Gives a stored page another priority. If it waits it keeps its turn; a duration counts from now."""
        moves, self.priority[page] = self.priority[page] != priority, priority
        self._moved(page, moves=moves)
        self.limits.pop(page, None)
        if limit is not None:
            self.limits[page] = limit
        if not self.references[page]:
            self.released[page] = self.now

    def start_clock(self, now: float) -> None:
        """The first time is told: durations that run count from it."""
        self.released = dict.fromkeys(self.released, now)

    def tell_time(self, now: float) -> Iterator[tuple[int, int]]:
        """Pages whose priority has ended by `now`, with that priority: the one that ended first first."""
        self.now = now
        ends = {page: self._end(page, limit) for page, limit in self.limits.items()}
        over = sorted((end, page) for page, end in ends.items() if end is not None and end <= now)
        for _, page in over:
            del self.limits[page]
            before, self.priority[page] = self.priority[page], self.default
            self._moved(page, moves=before != self.default)
            yield page, before

    def _end(self, page: int, limit: Limit) -> float | None:
        if not limit.after_release:
            return limit.seconds
        return None if self.references[page] else self.released[page] + limit.seconds
