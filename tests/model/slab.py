"""A slab that groups share: huge pages, each of which is cut into the pages of one group at a time."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from model.pool import Content, Pool

Rank = tuple[int, int]
"""When a block goes: the lower priority first, then the earlier turn."""
BLANK = (-1, 0)
"""The line of huge pages in which nothing is cached."""


class Taken(NamedTuple):
    """A page that is handed out."""

    page: int
    evicted: Content | None
    """The block that it stood for until now."""
    is_new: bool
    """Whether its bytes were never handed out before."""


class Lost(NamedTuple):
    """A block whose page another group took away."""

    group: int
    block: Content


class Room(NamedTuple):
    """What can be had at some time."""

    ratios: Sequence[int]
    own: Sequence[int]
    """Idle pages of each group in huge pages that nobody else can have."""
    open: int
    """Huge pages that any group can have."""

    def opened(self, group: int, demand: int) -> int:
        """Huge pages that the group has to open for so many pages."""
        return -(-max(0, demand - self.own[group]) // self.ratios[group])

    def spare(self, demand: Sequence[int]) -> int:
        """Huge pages that are left when each group has its demand; below 0 it cannot."""
        return self.open - sum(self.opened(group, pages) for group, pages in enumerate(demand))

    def fits(self, demand: Sequence[int]) -> bool:
        return self.spare(demand) >= 0


class Parked:
    """Huge pages of one group that it has and nobody uses.

    They get their places when another group asks for a victim. Those in which nothing is cached go first, the
    one that got its place first before the others; of several at once the one with the least number.
    """

    def __init__(self) -> None:
        self.unplaced: set[int] = set()
        self.lines: dict[Rank, list[Rank]] = {}
        """By priority, each with the turn at which it goes. A second line has those that came out of turn."""

    def leave(self, huge: int) -> None:
        for line in self.lines.values():
            line[:] = [place for place in line if place[1] != huge]

    def place(self, ranks: dict[int, Rank | None]) -> None:
        """Places those that have none, each by the priority and the turn of what is cached there."""
        places = ((*(rank or BLANK), huge) for huge, rank in ranks.items())
        for priority, turn, huge in sorted(places, key=lambda place: place[1:]):
            line = self.lines.setdefault((priority, 0), [])
            if line and turn and line[-1] > (turn, huge):
                line = self.lines.setdefault((priority, 1), [])
                insort(line, (turn, huge))
            else:
                line.append((turn, huge))
        self.unplaced.clear()

    def first(self) -> tuple[int, Rank | None] | None:
        """The one that goes next, and when; None for one that stands for nothing."""
        if blank := self.lines.get(BLANK):
            return blank[0][1], None
        ranks = (((key[0], line[0][0]), line[0][1]) for key, line in self.lines.items() if line)
        return next(((huge, rank) for rank, huge in sorted(ranks)), None)

    def forget_all(self) -> None:
        """Nothing is cached in any: they go in the order in which the lines have them."""
        self.lines = {BLANK: [(0, huge) for key in sorted(self.lines) for _, huge in self.lines[key]]}


class SharedSlab:
    """Who has which huge page.

    A huge page is parked while all of its pages are idle: it stays its group's, with all that is cached
    there, until another group takes it.
    """

    def __init__(self, pools: Sequence[Pool], ratios: Sequence[int], huge_pages: int) -> None:
        self.pools = pools
        self.ratios = ratios
        self.huge_pages = huge_pages
        self.owners: dict[int, int] = {}
        """The group of each huge page that was ever used: 1, 2, 3 …"""
        self.parked = [Parked() for _ in pools]
        turns = count(1)
        for group, pool in enumerate(pools):
            pool.slab, pool.group, pool.clock, pool.pristine = self, group, turns, []

    # Room

    @property
    def unused(self) -> int:
        """Huge pages that nobody ever had."""
        return self.huge_pages - len(self.owners)

    @property
    def free(self) -> int:
        """Huge pages that any group can have."""
        return self.room().open

    def capacity(self) -> Room:
        """With nothing in use."""
        return Room(self.ratios, [0] * len(self.pools), self.huge_pages)

    def room(self, idle: Sequence[set[int]] | None = None) -> Room:
        """As it is, or if these pages of each group were idle."""
        idle = idle or [pool.idle_pages for pool in self.pools]
        own, parked = [len(pages) for pages in idle], 0
        for huge, group in self.owners.items():
            if idle[group].issuperset(self.pages(group, huge)):
                own[group] -= self.ratios[group]
                parked += 1
        return Room(self.ratios, own, self.unused + parked)

    def available(self, group: int) -> int:
        """Pages that a group can have if no other takes any."""
        room = self.room()
        return room.own[group] + room.open * self.ratios[group]

    def pages(self, group: int, huge: int) -> range:
        return range(huge * self.ratios[group], (huge + 1) * self.ratios[group])

    def huge_of(self, group: int, page: int) -> int:
        return page // self.ratios[group]

    def held(self, group: int) -> int:
        """Pages of a group that are not idle."""
        owned = sum(owner == group for owner in self.owners.values())
        return owned * self.ratios[group] - len(self.pools[group].idle_pages)

    # Pages come and go

    def is_parked(self, group: int, huge: int) -> bool:
        return all(map(self.pools[group].is_idle, self.pages(group, huge)))

    def entered(self, group: int, page: int) -> None:
        """The page is idle now."""
        huge = self.huge_of(group, page)
        if self.is_parked(group, huge):
            self.parked[group].unplaced.add(huge)

    def left(self, group: int, page: int) -> None:
        """The page is idle no more."""
        self.parked[group].leave(self.huge_of(group, page))

    def take(self, group: int, wanted: int, left: Sequence[int]) -> tuple[list[Taken], list[Lost]]:
        """So many pages of a group, where `left` of each are taken afterwards: there stays room for these."""
        pool, taken, lost = self.pools[group], list[Taken](), list[Lost]()
        while len(taken) < wanted:
            demand = list(left)
            demand[group] += wanted - len(taken)
            room = self.room()
            assert room.fits(demand), "there was room for all that is taken"
            if room.opened(group, demand[group]) + room.spare(demand) == 0:
                # Of its huge pages in use: the others need what else there is.
                used = [page for page in pool.order() if not self.is_parked(group, self.huge_of(group, page))]
                taken += [pool.hand_out(page) for page in used[: wanted - len(taken)]]
            else:
                taken.append(pool.hand_out(self._next(group, lost)))
        return taken, lost

    def _next(self, group: int, lost: list[Lost]) -> int:
        """The page that goes next; of what other groups lose by it a note is made."""
        pool = self.pools[group]
        if pool.loose:
            return pool.loose[0]
        if self.unused:
            huge = len(self.owners) + 1
            self._claim(group, huge)
            pool.fresh.update(self.pages(group, huge))
            return pool.loose[0]
        own = pool.victim(pool.idle) if pool.idle else None
        best: tuple[Rank, int, int] | None = None
        for other in range(len(self.pools)):
            found = self._first_parked(other) if other != group else None
            if found is not None and found[1] is None:
                best = BLANK, other, found[0]
                break
            if found is not None and found[1] is not None and (best is None or found[1] < best[0]):
                best = found[1], other, found[0]
        if own is not None and (best is None or pool.rank(own) < best[0]):
            return own
        assert best is not None
        lost += self._give_up(best[1], best[2])
        self._claim(group, best[2])
        return pool.loose[0]

    def _first_parked(self, group: int) -> tuple[int, Rank | None] | None:
        parked = self.parked[group]
        new = [huge for huge in parked.unplaced if self.is_parked(group, huge)]
        parked.place({huge: self._rank(group, huge) for huge in new})
        return parked.first()

    def _rank(self, group: int, huge: int) -> Rank | None:
        """A huge page goes when its best block would: highest priority and latest turn inside."""
        pool = self.pools[group]
        ranks = [pool.rank(page) for page in self.pages(group, huge) if page in pool.stored]
        return (max(priority for priority, _ in ranks), max(turn for _, turn in ranks)) if ranks else None

    def _claim(self, group: int, huge: int) -> None:
        if huge in self.owners:
            self.pools[group].foreign.update(self.pages(group, huge))
        self.owners[huge] = group
        self.pools[group].loose += self.pages(group, huge)

    def _give_up(self, group: int, huge: int) -> list[Lost]:
        self.parked[group].leave(huge)
        lost = []
        for page in self.pages(group, huge):
            block = self.pools[group].give_up(page)
            lost += [Lost(group, block)] if block is not None else []
        return lost
