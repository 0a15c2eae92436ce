"""What an `alloc` will do for each request, and whether there is room for all of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from model.parts import Parts
from model.pool import NULL, Content, Group, Pool
from model.requests import NeverRoom, NoRoom, Plan, Request
from model.states import States
from model.windows import Lasting, Recurrent, blocks_behind, needed_blocks


class Planning(Parts, States):
    """Plans, which change nothing."""

    def __init__(
        self,
        page_size: int,
        groups: Sequence[Group],
        *,
        caching: bool = True,
        chunk: int | None = None,
        reserve: str = "chunk",
        **options: Any,
    ) -> None:
        super().__init__(page_size, groups, **options)
        self.caching = caching
        self.chunk = chunk
        self.reserve = reserve
        self.only_loads = False
        """Whether requests that load nothing are not planned."""

    def plan_batch(
        self, names: Sequence[object], bounds: Sequence[int | None], loads: Sequence[int]
    ) -> list[Plan]:
        """The plans of a batch, or raises why it is refused."""
        plans, refusal = self.try_plans(names, bounds, loads)
        if refusal is not None:
            raise refusal
        return plans

    def try_plans(
        self,
        names: Sequence[object],
        bounds: Sequence[int | None],
        loads: Sequence[int],
        halvings: int = 0,
    ) -> tuple[list[Plan], NoRoom | None]:
        """With parts of blocks, if there is room for them and none takes another's hit away.

        With `halvings` requests find half as much as there is, or a quarter, and so on, and no parts.
        A refusal comes with the plans that were made.
        """
        ways = [True, False] if self.parts and not halvings else [False]
        for parts in ways:
            plans = self._plans(names, bounds, loads, parts=parts, halvings=halvings)
            plans, refusal = self.fitting(plans)
            if isinstance(refusal, NeverRoom) or not parts:
                break
            if not (any(plan.part for plan in plans) if refusal else self.takes_over_a_hit(plans)):
                break
        return plans, refusal

    def _plans(
        self,
        names: Sequence[object],
        bounds: Sequence[int | None],
        loads: Sequence[int],
        *,
        parts: bool,
        halvings: int,
    ) -> list[Plan]:
        plans: list[Plan] = []
        for name, bound, load in zip(names, bounds, loads, strict=True):
            taken = {plan.part.content for plan in plans if plan.part and plan.part.takes_over}
            request = self.requests[name]
            plan = self.plan(request, bound, load, parts=parts, halvings=halvings, taken=taken)
            if self.only_loads and not plan.load:
                continue
            self.enter_part(plan, plans)
            plans.append(plan)
        return plans

    def fitting(self, plans: list[Plan]) -> tuple[list[Plan], NoRoom | None]:
        """Says which pages are copied, and why there is no room for the plans together, if there is none."""
        leaving: Counter[tuple[int, int]] = Counter()
        for index, plan in enumerate(plans):
            if not self._can_ever_fit(plan):
                return plans[:index], NeverRoom(plan.request.name)
            for group, (pool, row) in enumerate(zip(self.pools, plan.request.rows, strict=True)):
                if plan.load:
                    continue
                if not pool.has_blocks:
                    block = self.state_block(plan.start)
                    page = row[block] if block < len(row) else 0
                    plan.copied[group] = self.must_copy_state(plan, group, leaving[group, page])
                    leaving[group, page] += plan.copied[group]
                    continue
                for page in row[plan.start // self.page_size :][:1]:
                    if self.must_copy(pool, page, leaving[group, page]):
                        plan.copied[group] = True
                        leaving[group, page] += 1
        # Pages that a later request's hits give back may be what an earlier one lacked: all together count.
        demand = [0] * len(self.pools)
        fits = []
        for plan, idle in zip(plans, self.idle_after(plans), strict=True):
            demand = [pages + plan.taken(group) for group, pages in enumerate(demand)]
            fits.append(self.fits(demand, idle))
        return plans, None if all(fits[-1:]) else NoRoom(plans[fits.index(False)].request.name)

    def fits(self, demand: Sequence[int], idle: Sequence[set[int]]) -> bool:
        """Whether so many pages of each group can be had if these are idle, beside those never used."""
        if self.slab is not None:
            return self.slab.room(idle).fits(demand)
        groups = zip(self.pools, demand, idle, strict=True)
        return all(pages <= len(pool.pristine) + len(those) for pool, pages, those in groups)

    def _can_ever_fit(self, plan: Plan) -> bool:
        """Whether there could be room for this forward, and for that of the request's last token."""
        request = plan.request
        tokens = len(request.tokens) + plan.placeholder + 2 * request.drafts
        written = range(plan.start // self.page_size, self.blocks(plan.reach))
        now, last = list[int](), list[int]()
        for pool in self.pools:
            at_last = len(needed_blocks(pool.kind, tokens - 1, self.page_size))
            at_first = len(needed_blocks(pool.kind, plan.start, self.page_size).union(written))
            if isinstance(pool.kind, Recurrent):
                snapshots = pool.kind.interval or pool.kind.last
                at_first = at_last = 2 if self.caching and snapshots else 1
            elif isinstance(pool.kind, Lasting):
                at_first = at_last = pool.kind.lasting(request.encoder, self.page_size)
            now.append(at_last if pool.keeps_all else at_first)
            last.append(at_last)
        return self._fits_alone(now) and self._fits_alone(last)

    def _fits_alone(self, pages: Sequence[int]) -> bool:
        """Whether so many pages of each group can be had if nothing else is in use."""
        if self.slab is not None:
            return self.slab.capacity().fits(pages)
        return all(wanted <= pool.pages for pool, wanted in zip(self.pools, pages, strict=True))

    def idle_after(self, plans: Sequence[Plan]) -> Iterator[list[set[int]]]:
        """The idle pages of each group when the hits of the first plan are taken, of the first two, ..."""
        idle = [pool.idle_pages for pool in self.pools]
        parts = [
            {plan.request.name: pool.tree[plan.part.content] for plan in plans if plan.part}
            if pool.has_blocks
            else {}
            for pool in self.pools
        ]
        kept = [
            {page for plan in plans for page in plan.held(group)} | set(part.values())
            for group, part in enumerate(parts)
        ]
        for plan in plans:
            for group, pool in enumerate(self.pools):
                claimed, leaving = self._at_start(plan, group)
                held = [*claimed, *plan.bridge[group].values(), parts[group].get(plan.request.name)]
                idle[group].difference_update(page for page in held if page in pool.idle)
                idle[group] |= {page for page in leaving if pool.is_unshared(page)} - kept[group]
            yield idle

    def _at_start(self, plan: Plan, group: int) -> tuple[list[int], list[int]]:
        """Hits that the request keeps, and pages of its own that it gives back, where it starts.

        A part behind the last full block may leave less to need. A hit that its tier may want is held anyway.
        """
        hits, given_back = plan.hits[group], plan.given_back[group]
        if plan.part is None or not self.pools[group].has_blocks:
            return list(hits.values()), given_back
        behind = blocks_behind(self.pools[group].kind, plan.start, self.page_size)
        row = plan.request.rows[group]
        own = {row[block] for block in behind if block < min(plan.request.offered, len(row))}
        kept = [page for block, page in hits.items() if block not in behind or self.offloads_hits]
        return kept, list({*given_back, *own} - {NULL})

    def plan(
        self,
        request: Request,
        bound: int | None,
        load: int,
        *,
        parts: bool,
        halvings: int,
        taken: set[Content],
    ) -> Plan:
        """For a forward of at most `bound` tokens, or for so many blocks to load."""
        position, offered = request.position, request.offered
        found = missed = 0
        why = None
        if self.caching and self.reads(request):
            limit = (len(request.known) - 1) // self.page_size
            rest = max(0, limit - offered)
            most = limit - rest + (rest >> halvings)
            found, why = self.match_within(request.namespace, request.known, most, request)
            if not request.admitted:
                missed = limit - found
        end = found if found * self.page_size > position else 0
        start = max(position, end * self.page_size)
        first_load = max(offered, found, start // self.page_size)
        if load and halvings:  # up to the same block, as far as it is not there
            all_found, _ = self.match_within(request.namespace, request.known, limit, request)
            load += max(offered, all_found, position // self.page_size) - first_load
        part = None
        if parts and self.caching and self.reads(request) and not load:
            part = self.find_part(request, start, end, taken)
        start += part.run if part else 0
        placeholder = start == len(request.tokens)
        rest = len(request.tokens) + placeholder - start
        active = min(rest, bound or rest, self.chunk or rest)
        drafts = request.drafts if start >= request.context and active == rest else 0
        # All drafts that are out may be right; then this step has its own, and the drafter adds as many.
        room = 2 * request.drafts and sum(step.drafts for step in request.live) + 2 * request.drafts
        plan = Plan(request, end, start, active, drafts, placeholder, missed, why, load, first_load)
        plan.part, plan.bound = part, bound
        plan.reach = start + active + room
        if load and not self.is_plain and not self._load_fits(plan, bound):
            plan.load = load = 0
        last = first_load + load
        loaded = self.to_load(request, first_load, last)
        plan.bridge = self.on_device(request, first_load, last)
        for group, (pool, row) in enumerate(zip(self.pools, request.rows, strict=True)):
            plan.hits.append(self._hits(request, pool, end))
            plan.given_back.append(self._given_back(request, row, pool, end))
            plan.copied.append(False)
            if not pool.has_blocks:
                fresh = self.fresh_states(request, pool, row, start)
                plan.rest.append(fresh if isinstance(pool.kind, Lasting) else 0)
                if load and isinstance(pool.kind, Recurrent):
                    fresh = len(loaded[group]) + 1  # to copy the state to
                plan.fresh.append(fresh)
                continue
            held = max(len(row), end) + bool(part and part.takes_over)
            prompt = request.context if self.reserve == "prompt" and pool.keeps_all else 0
            wanted = self.blocks(max(plan.reach, prompt))
            fresh = max(0, wanted - held)
            plan.rest.append(fresh)
            if load:
                plan.rest[-1], fresh = self._behind_load(plan, group, bound, fresh)
            plan.fresh.append(fresh)
        return plan

    def _reach_behind(self, plan: Plan, pool: Pool, bound: int | None) -> int:
        """One past the last token that a load has pages for: of a window those of one forward."""
        tokens = len(plan.request.tokens)
        if not pool.keeps_all:
            behind = (plan.first_load + plan.load) * self.page_size
            tokens = min(tokens, behind + min(bound or tokens, self.chunk or tokens))
        return tokens + 2 * plan.request.drafts

    def _behind_load(self, plan: Plan, group: int, bound: int | None, without: int) -> tuple[int, int]:
        """Pages of a group for what follows a load, and with those of the load itself.

        With these there is room for the forward `without` it too, which takes so many, if nothing comes.
        """
        request, pool, row = plan.request, self.pools[group], plan.request.rows[group]
        last = plan.first_load + plan.load
        loaded = len(self.to_load(request, plan.first_load, last)[group])
        wanted = self.blocks(self._reach_behind(plan, pool, bound))
        rest = max(0, wanted - max(len(row), plan.end, last))
        copied = [page for page in row[plan.start // self.page_size :][:1] if self.must_copy(pool, page, 0)]
        return rest, max(loaded + rest, without + len(copied))

    def _load_fits(self, plan: Plan, bound: int | None) -> bool:
        """Whether there could be room for it beside what the request has then."""
        first, last = plan.first_load, plan.first_load + plan.load
        loaded, bridge = (of(plan.request, first, last) for of in (self.to_load, self.on_device))
        pages = []
        for group, (pool, row) in enumerate(zip(self.pools, plan.request.rows, strict=True)):
            if isinstance(pool.kind, Lasting):
                pages.append(pool.kind.lasting(plan.request.encoder, self.page_size))
                continue
            held = max(len(row), plan.end)
            behind = blocks_behind(pool.kind, plan.start, self.page_size)
            if isinstance(pool.kind, Recurrent):
                new = len(loaded[group]) + 1
            else:
                prompt = plan.request.context if self.reserve == "prompt" and pool.keeps_all else 0
                without = max(0, self.blocks(max(plan.reach, prompt)) - held)
                new = self._behind_load(plan, group, bound, without)[1]
            pages.append(held - len(behind) + len(bridge[group]) + new)
        return self._fits_alone(pages)

    def _hits(self, request: Request, pool: Pool, end: int) -> dict[int, int]:
        """The blocks behind those offered that the group needs to go on from block `end`."""
        needed = needed_blocks(pool.kind, end * self.page_size, self.page_size)
        blocks = (block for block in range(request.offered, end) if block in needed)
        return {block: pool.tree[request.content(block, self.page_size)] for block in blocks}

    def _given_back(self, request: Request, row: Sequence[int], pool: Pool, end: int) -> list[int]:
        """Pages whose place the hits take, the last first; then those that are out of the window there."""
        if isinstance(pool.kind, Lasting):
            return []
        behind = blocks_behind(pool.kind, end * self.page_size, self.page_size)
        blocks = [
            *reversed(range(request.offered, min(end, len(row)))),
            *sorted(behind & set(range(request.offered))),
        ]
        return [row[block] for block in blocks if row[block]]
