"""Room in a shared slab that is kept for what is there to run to its end.

While there is such room pages are taken as if the rest of it were taken next, and requests go on from less
than is stored, or nothing, where their hits would spoil it. What requests will hold is asked of every forward
that may come, one by one.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from model.planning import Planning
from model.pool import Group, Pool
from model.requests import NeverRoom, NoRoom, Plan, Request, Rest
from model.windows import Full, Kind, Lasting, Recurrent, needed_blocks

UNBOUNDED = 2**31
STEPS = 2
"""Forwards of a request that are out at a time."""


class Circle(NamedTuple):
    """Whom room is kept for."""

    expected: bool
    """Those too that the slab was planned for and that have not come."""
    all: bool
    """Those too that hold nothing yet."""
    unbounded: bool
    """Whether forwards compute as much as they may, rather than what they were last bounded to."""


CIRCLES = [
    Circle(expected=True, all=True, unbounded=True),
    Circle(expected=False, all=True, unbounded=True),
    Circle(expected=False, all=False, unbounded=True),
    Circle(expected=False, all=False, unbounded=False),
]
"""The first one that there is room for counts."""


class Ahead(NamedTuple):
    """Where a request goes on, and what it computes there."""

    start: int
    most: int
    """Tokens of a forward."""
    hit_end: int
    """Blocks of a hit that it goes on from; 0 without one."""


class Promise(Planning):
    """Plans with regard to what comes later.

    Args:
        expected: how many equal requests the slab is planned for, and the pages of each group that one holds.
    """

    def __init__(
        self,
        page_size: int,
        groups: Sequence[Group],
        *,
        expected: tuple[int, Sequence[int]] = (0, ()),
        longest: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(page_size, groups, **options)
        self.longest = longest
        """Tokens of a request at most."""
        most, pages = expected
        while self.slab is not None and most and pages:
            if self.slab.capacity().fits([most * of_one for of_one in pages]):
                break
            most -= 1
        self.expected = most, pages or [0] * len(self.pools)
        shares_all = self.slab is not None and any(pool.keeps_all for pool in self.pools)
        self.most_blocks_alone = self._most_blocks_alone() if shares_all else 0

    def plan_batch(
        self, names: Sequence[object], bounds: Sequence[int | None], loads: Sequence[int]
    ) -> list[Plan]:
        """With as much of what is stored as leaves the room that there could be."""
        plans, refusal = self.try_plans(names, bounds, loads)
        less, halvings = plans, 0
        if self._spoils(plans, refusal):
            while any(plan.end or plan.part for plan in less):
                halvings += 1
                less, too_little = self.try_plans(names, bounds, loads, halvings)
                if not self._spoils(less, too_little) and too_little is None:
                    return less
            self._spoils(plans, refusal)  # for `left`
        if refusal is not None:
            raise refusal
        return plans

    def _spoils(self, plans: Sequence[Plan], refusal: NoRoom | None) -> bool:
        """Whether there is less room in the end than there could be. Notes what there is to be room for."""
        if self.slab is None or isinstance(refusal, NeverRoom):
            return False
        demand = [sum(plan.taken(group) for plan in plans) for group in range(len(self.pools))]
        if not any(demand) and not any(plan.end or plan.part for plan in plans):
            return False
        before = [pool.idle_pages for pool in self.pools]
        after = before
        for idle in self.idle_after(plans):
            after = idle
        claimed = [len(some) - len(others) for some, others in zip(before, after, strict=True)]
        self._look_at_rests()
        room, capacity, spoils = self.slab.room(after), self.slab.capacity(), False
        for circle in CIRCLES:
            to_come = self._to_come(plans, claimed, circle)
            self.left = [max(pages) for pages in zip(demand, to_come, strict=True)]
            if room.fits(self.left):
                return spoils
            held = [self.slab.held(group) + claimed[group] for group in range(len(self.pools))]
            spoils |= capacity.fits([max(0, sum(pages)) for pages in zip(self.left, held, strict=True)])
        self.left = demand
        return spoils

    def _to_come(self, plans: Sequence[Plan], claimed: Sequence[int], circle: Circle) -> list[int]:
        """Pages of each group that are taken until all in the circle have ended, at most."""
        assert self.slab is not None
        planned = {plan.request.name: plan for plan in plans}
        rests = []
        for name, request in self.requests.items():
            included = circle.all or request.holds_pages or request.load is not None
            plan = planned.get(name)
            if plan is not None and (not included or plan.start > request.position):
                rests.append(self._rest_of(request, plan, circle))
            elif included:
                rests.append(self._rest_of(request, None, circle))
        if circle.expected:
            most, pages = self.expected
            rests += [list(pages)] * (most - len(self.requests))
        sums = [sum(rest[group] for rest in rests) for group in range(len(self.pools))]
        for group, pool in enumerate(self.pools):
            if gives_back(pool.kind):
                sums[group] -= self.slab.held(group) - pool.in_flight + claimed[group]
        return [max(0, pages) for pages in sums]

    def _rest_of(self, request: Request, plan: Plan | None, circle: Circle) -> list[int]:
        """Pages that one request counts for: of a group that gives pages back, all that it will hold."""
        in_prompt = request.position < request.context
        hit_end = 0
        if plan is not None or (in_prompt and not circle.unbounded):
            bound = plan.bound if plan is not None else request.bound
            ahead = self._ahead(request, plan, None if circle.unbounded else bound)
            hit_end = ahead.hit_end
            most = [self._most_pages(request, pool, row, ahead) for pool, row in self._rows(request)]
        else:
            assert request.rest is not None
            most = request.rest.most
        rest = []
        for group, (pool, row) in enumerate(self._rows(request)):
            if gives_back(pool.kind):
                rest.append(most[group])
            elif isinstance(pool.kind, Lasting):
                rest.append(0 if row else pool.kind.lasting(request.encoder, self.page_size))
            else:
                held = len(row)
                if request.load is not None:
                    held = max(held, request.load.end) + len(request.load.rests[group])
                here = row[request.position // self.page_size :][:1] if request.load is None else []
                copies = sum(self.must_copy(pool, page, 0) for page in here)
                rest.append(max(0, most[group] - max(held, hit_end)) + copies)
        return rest

    def _rows(self, request: Request) -> list[tuple[Pool, list[int]]]:
        return list(zip(self.pools, request.rows, strict=True))

    def _look_at_rests(self) -> None:
        """Asks anew what requests will hold that have come further in their prompts, or to their ends."""
        for request in self.requests.values():
            in_prompt = request.processed < request.context
            key = in_prompt and (request.processed, request.position), request.context
            if request.rest is None or request.rest.key != key:
                ahead = self._ahead(request, None, None)
                rows = self._rows(request)
                request.rest = Rest(key, [self._most_pages(request, pool, row, ahead) for pool, row in rows])

    # What a request will hold

    def _ahead(self, request: Request, plan: Plan | None, bound: int | None) -> Ahead:
        start = request.load.end * self.page_size if request.load else request.position
        if plan is not None:
            start = plan.start
        hit_end = start // self.page_size if plan is not None and plan.end else 0
        return Ahead(start, min(bound or UNBOUNDED, self.chunk or UNBOUNDED), hit_end)

    def _most_pages(self, request: Request, pool: Pool, row: Sequence[int], ahead: Ahead) -> int:
        """Of a group at one time, from now to the end."""
        tokens = self._most_tokens(request)
        if ahead.start >= tokens:
            return sum(page != 0 for page in row) + self._loading(request, pool)
        if isinstance(pool.kind, Lasting):
            return 0  # taken once, and counted as such
        if isinstance(pool.kind, Recurrent):
            return self._most_states(pool.kind)
        if isinstance(pool.kind, Full):
            covered = max(tokens + 3 * request.drafts, request.context)
            return min(self.blocks(covered), self.most_blocks_alone)
        return self._most_at_once(request, pool.kind, ahead, tokens)

    def _loading(self, request: Request, pool: Pool) -> int:
        if request.load is None:
            return 0
        group, load = self.pools.index(pool), request.load
        return len(load.pages[group]) + len(load.rests[group]) + len(load.spare[group])

    def _most_states(self, kind: Recurrent) -> int:
        """The live one, and those that two steps out went on from, if any are kept."""
        return 1 + STEPS if self.caching and (kind.interval or kind.last) else 1

    def _most_at_once(self, request: Request, kind: Kind, ahead: Ahead, tokens: int) -> int:
        """Pages of a group that forgets, while one forward or two of those to come are computed."""
        size, live, drafts = self.page_size, request.live, request.drafts
        length, context, most = len(request.tokens), request.context, ahead.most
        known = min(request.processed, len(request.known)) if live and not ahead.hit_end else ahead.start
        if len(live) == STEPS and not ahead.hit_end:
            known = max(known, live[0].end)  # the next is planned when this is known
        peaks = [0]
        if len(live) < STEPS:
            reach = min(self._reach(request, ahead, two=not live), tokens + 3 * drafts)
            peaks.append(held(kind, known, reach, size))
        given = max(context, length)
        if known < given:
            last = max(given - STEPS * most, known)
            peaks.append(fullest(kind, known, last, STEPS * most, given, 2 * drafts, size))
            last = max(given - most, known)
            peaks.append(held(kind, last, min(given + STEPS - 1, tokens) + 2 * drafts, size))
        first = max(known, context)
        if first < tokens:
            peaks.append(held(kind, tokens - 1, tokens + 3 * drafts, size))
            last = max(tokens - STEPS, first)
            peaks.append(fullest(kind, first, last, STEPS, tokens, 3 * drafts, size))
        return max(peaks)

    def _reach(self, request: Request, ahead: Ahead, *, two: bool) -> int:
        """One past the last token that the next forward may write, or the next two."""
        length, drafts = len(request.tokens), request.drafts
        length += ahead.start == length
        end = min(length, ahead.start + ahead.most)
        room = 2 * drafts and sum(step.drafts for step in request.live) + 2 * drafts
        if not two:
            return end + room
        verified = drafts if ahead.start >= request.context and end == length else 0
        after = min(length + (end == length), end + ahead.most)
        return max(end + room, min(after + room + verified, self._most_tokens(request) + 3 * drafts))

    def _most_tokens(self, request: Request) -> int:
        """That the request will have, by what is said of it and of all, and as there is memory."""
        length = len(request.tokens)
        said = self.longest if request.most_new is None else request.prompt + request.most_new
        room = max(0, self._most_blocks(request.drafts) * self.page_size - 3 * request.drafts)
        return max(length, min(self.longest, said, room))

    def _most_blocks(self, drafts: int) -> int:
        slack = 3 * drafts + 1 if drafts else 0
        return min([self.blocks(self.longest + slack), *(p.pages for p in self.pools if p.keeps_all)])

    def _most_blocks_alone(self) -> int:
        """Of a request without drafts: each group has what it needs while two tokens are computed."""
        assert self.slab is not None
        blocks = 0
        while blocks < self._most_blocks(0):
            tokens = (blocks + 1) * self.page_size
            pages = []
            for pool in self.pools:
                if isinstance(pool.kind, Full | Lasting):
                    pages.append(blocks + 1 if pool.keeps_all else 1)
                elif isinstance(pool.kind, Recurrent):
                    pages.append(self._most_states(pool.kind))
                else:
                    pages.append(fullest(pool.kind, 0, tokens - 1, STEPS, tokens, 0, self.page_size))
            if not self.slab.capacity().fits(pages):
                break
            blocks += 1
        return blocks


def gives_back(kind: Kind) -> bool:
    """Whether requests give pages of the group back before they end: what all of them hold counts as one."""
    return not isinstance(kind, Full | Lasting)


@cache
def held(kind: Kind, start: int, end: int, page_size: int) -> int:
    """Pages that a request holds while the tokens from `start` up to `end` are computed."""
    written = range(start // page_size, -(-end // page_size))
    return len(needed_blocks(kind, start, page_size).union(written))


@cache
def fullest(kind: Kind, first: int, last: int, tokens: int, end: int, beyond: int, page_size: int) -> int:
    """The most of the forwards of so many tokens, up to `end`, that start at `first` to `last`."""
    starts = range(first, last + 1)
    return max(held(kind, start, min(start + tokens, end) + beyond, page_size) for start in starts)
