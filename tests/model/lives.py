"""What requests hold until they end: every way in which they may be served is tried, forward by forward.

A request is served by forwards of at most `chunk` tokens, of which `steps` are out at a time. Which blocks
it holds while they are computed is asked of the mask. The most that a batch holds at one time, beside what it
holds now, is what it takes until it ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from model.windows import Cross, Full, Kind, Lasting, Recurrent, needed_blocks


@dataclass(frozen=True)
class Out:
    """A forward whose result is due: it computes the tokens from `start` to `end`, and drafts behind them."""

    start: int
    end: int
    drafts: int = 0


@dataclass(frozen=True)
class Moment:
    """Where a request stands."""

    known: int
    """Its tokens."""
    processed: int = 0
    """Those that have KV."""
    outs: tuple[Out, ...] = ()

    @property
    def position(self) -> int:
        """Tokens that have KV, or get it by what is out."""
        return self.outs[-1].end if self.outs else self.processed

    @property
    def settled(self) -> int:
        """What is computed again from here on, if it must be."""
        return min(self.processed, self.known)


@dataclass
class Life:
    """A request, and how it is served.

    Attributes:
        now: where it stands.
        rows: its page of each block in each group; 0 for none.
        context: tokens that are computed without drafts.
        longest: tokens that it has in the end.
        hit: blocks that it finds with its next forward, or when it comes back; 0 for nothing.
        found: of each group, the pages of those that it takes.
        copied: of each group, whether the page that its next forward first writes to is another's too.
        twins: of each group, the stored pages of blocks that it has not stored, which it goes over to.
        back: if it is set aside and holds nothing now, the pages of each group that it comes back to.
    """

    name: Hashable
    now: Moment
    rows: list[list[Any]]
    context: int
    longest: int
    drafts: int = 0
    beams: int = 1
    encoder: int = 0
    hit: int = 0
    found: list[dict[int, int]] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    twins: list[dict[int, int]] = field(default_factory=list)
    back: list[frozenset[Hashable]] | None = None

    def holds(self, group: int) -> frozenset[Hashable]:
        """Its pages of a group now."""
        return frozenset() if self.back else frozenset(page for page in self.rows[group] if page)


@dataclass
class Service:
    """How requests are served."""

    kinds: Sequence[Kind]
    page_size: int
    chunk: int
    steps: int
    publishes: bool = True
    whole_prompts: bool = False
    """Whether pages for all of a prompt are taken at once, where a group keeps everything."""

    def most_taken(self, batch: Sequence[Life], group: int, outside: set[int]) -> int:
        """Pages that the batch takes from what is free, at most; others hold those that are `outside`."""
        now = [life.holds(group) for life in batch]
        held = frozenset[Hashable]().union(*now) - outside
        ways = [self.holdings(life, group) for life in batch]
        for life, pages, sets in zip(batch, now, ways, strict=True):
            sets.add(pages)  # the others may be served first
            if life.back:
                sets.add(life.back[group])
        seen = [frozenset[Hashable]().union(*sets) for sets in ways]
        common = {
            page
            for index, pages in enumerate(seen)
            for page in pages
            if self._is_elsewhere(page, index, seen)
        }
        choices = []
        for sets in ways:
            most: dict[frozenset[Hashable], int] = {}
            for pages in sets:
                shared, own = pages & common - outside, len(pages - common - outside)
                most[shared] = max(most.get(shared, 0), own)
            choices.append(list(most.items()))
        sums = (
            len(frozenset[Hashable]().union(*(shared for shared, _ in joint))) + sum(own for _, own in joint)
            for joint in product(*choices)
        )
        return max(sums) - len(held)

    @staticmethod
    def _is_elsewhere(page: Hashable, index: int, seen: Sequence[frozenset[Hashable]]) -> bool:
        return any(page in pages for at, pages in enumerate(seen) if at != index)

    def holdings(self, life: Life, group: int) -> set[frozenset[Hashable]]:
        """What it may hold in a group at one time, while a forward is out that is planned from now on."""
        kind = self.kinds[group]
        if isinstance(kind, Recurrent):
            return {self._states(life, group, kind, moment) for moment in self.moments(life)}
        if isinstance(kind, Lasting):
            return {self._lasting(life, group, kind) for _ in self.moments(life)}
        return {self._blocks(life, group, kind, moment) for moment in self.moments(life)}

    def _lasting(self, life: Life, group: int, kind: Lasting) -> frozenset[Hashable]:
        own = range(kind.lasting(life.encoder, self.page_size))
        pages: list[Hashable] = [*life.rows[group]] or [("page", life.name, at) for at in own]
        beams = 1 if isinstance(kind, Cross) else life.beams
        return frozenset([*pages, *(("beam", life.name, beam) for beam in range(1, beams))])

    def _blocks(self, life: Life, group: int, kind: Kind, moment: Moment) -> frozenset[Hashable]:
        size, row = self.page_size, life.rows[group]
        start = moment.settled
        reach = self._reach(life, moment)
        if self.whole_prompts and isinstance(kind, Full):
            reach = max(reach, life.context)
        end = -(-reach // size)
        blocks = {block for block in needed_blocks(kind, start, size) if block < end}
        blocks |= set(range(start // size, end))
        blocks |= {block for block in range(start // size, len(row)) if row[block]}
        first = self._first(life) // size
        pages: set[Hashable] = set()
        for block in blocks:
            page = row[block] if block < len(row) else 0
            if block < life.hit and block in life.found[group]:
                page = life.found[group][block]
            elif block < moment.settled // size and block in life.twins[group]:
                page = life.twins[group][block]
            elif block == first and life.copied[group]:
                page = 0
            pages.add(page or ("page", life.name, block))
            if block >= life.context // size:
                pages |= {("beam", life.name, block, beam) for beam in range(1, life.beams)}
        return frozenset(pages)

    def _states(self, life: Life, group: int, kind: Recurrent, moment: Moment) -> frozenset[Hashable]:
        """The live one, and those that forwards out went on from and that are kept."""
        row, first = life.rows[group], self._first(life)
        before: Hashable = life.found[group][life.hit - 1] if life.hit else (row or [0])[-1]
        pages: set[Hashable] = {("beam", life.name, beam) for beam in range(1, life.beams)}
        pages.add(("live", life.name))
        for out in moment.outs:
            if not self._keeps(life, kind, out.start) and not (life.hit and out.start == first):
                continue
            if out in life.now.outs:
                pages |= {page for page in row[(out.start - 1) // self.page_size :][:1] if page}
            else:
                pages.add(before if out.start == first else ("kept", life.name, out.start))
        return frozenset(pages)

    def _keeps(self, life: Life, kind: Recurrent, position: int) -> bool:
        return self.publishes and kind.keeps(position, life.context, self.page_size)

    def _reach(self, life: Life, moment: Moment) -> int:
        """One past the last token with a page: drafts may all be right, and a drafter adds as many."""
        before, reach = 0, 0
        for out in moment.outs:
            reach = max(reach, out.end + (before + 2 * life.drafts if life.drafts else 0))
            before += out.drafts
        return reach

    def moments(self, life: Life) -> Iterator[Moment]:
        """Those in which a forward that is planned from now on is out."""
        # What is out when something is found is of tokens that it has.
        found = replace(life.now, processed=self._first(life), outs=())
        open_ = [*self._plans(life, found)] if life.hit else [life.now]
        seen: set[Moment] = set()
        while open_:
            moment = open_.pop()
            if moment in seen:
                continue
            seen.add(moment)
            open_ += [*self._plans(life, moment), *self._deliveries(life, moment)]
            if any(out not in life.now.outs for out in moment.outs):
                yield moment

    def _first(self, life: Life) -> int:
        """Where its next forward starts."""
        return max(life.now.position, life.hit * self.page_size)

    def _plans(self, life: Life, moment: Moment) -> Iterator[Moment]:
        start = moment.position
        length = max(moment.known, start)
        if len(moment.outs) == self.steps or start >= life.longest or (start == length and not moment.outs):
            return
        length += start == length
        for end in range(start + 1, min(length, start + self.chunk) + 1):
            drafts = life.drafts if start >= life.context and end == length else 0
            yield replace(moment, outs=(*moment.outs, Out(start, end, drafts)))

    def _deliveries(self, life: Life, moment: Moment) -> Iterator[Moment]:
        """With each number of drafts that may be right."""
        if not moment.outs:
            return
        out, *later = moment.outs
        new = out.end == moment.known and moment.known < life.longest
        for right in range(min(out.drafts, life.longest - moment.known - 1) + 1 if new else 1):
            moved = tuple(Out(each.start + right, each.end + right, each.drafts) for each in later)
            known = moment.known + (1 + right if new else 0)
            yield Moment(known, max(moment.processed, out.end + right), moved)
