"""The contract of the ledger, in dictionaries and lists.

Written from the specification, for reading: no hashing, no tree, no links. What a block holds is named by its
namespace and every token up to its end; each pool's `tree` maps that name to the page that stores it.
`Keeping` has what is stored and for how long, `Copying` what moves, `Planning` what a forward needs, this
class the life of a request.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from model.pool import NULL, Group
from model.promise import Promise
from model.requests import NoRoom, Plan, Request, Retention, Step, Token
from model.windows import Cross, Lasting, Scratch, blocks_behind, needed_blocks, release_order


class Ledger(Promise):
    """Requests, pages and stored prefixes of a model whose layers form some groups."""

    def __init__(self, page_size: int, groups: Sequence[Group], **options: Any) -> None:
        super().__init__(page_size, groups, **options)
        self.step_number = 0
        self.step_open = False
        self.step_joined = False
        self.has_clock = False

    def claim(
        self,
        name: object,
        tokens: Iterable[int],
        namespace: object = None,
        *,
        no_read: bool = False,
        no_store: bool = False,
        drafts: int = 0,
        retention: Retention | None = None,
        encoder: int = 0,
        most_new: int | None = None,
    ) -> None:
        rows: list[list[int]] = [[] for _ in self.pools]
        request = Request(name, namespace, list(tokens), rows, no_read, no_store, drafts, retention, encoder)
        request.most_new = most_new
        self.requests[name] = request
        self._keep_private(request)
        self.counts["claims"] += 1

    def _keep_private(self, request: Request) -> None:
        """What depends on an encoder is shared if an image on the first token stands for its input."""
        named = any(isinstance(token, tuple) for token in request.tokens[:1])
        if any(isinstance(pool.kind, Cross) for pool in self.pools) and named != (request.encoder > 0):
            request.no_read = request.no_store = True

    def unclaim(self, name: object) -> None:
        """As if it had not been claimed."""
        del self.requests[name]
        self.counts["claims"] -= 1

    def fork(self, name: object, child: object) -> None:
        """The child holds every page of its parent that has computed tokens."""
        parent = self.requests[name]
        self.requests[child] = forked = parent.fork(child, self.page_size)
        if not self.has_states(parent, forked.processed, newest=parent.position):
            forked.rows, forked.private = [[] for _ in self.pools], set()
            self._start_over(forked)
        else:
            for pool, row, shared in zip(self.pools, forked.rows, parent.rows, strict=True):
                if isinstance(pool.kind, Cross):
                    row[:] = shared
        for pool, row in zip(self.pools, forked.rows, strict=True):
            if isinstance(pool.kind, Scratch):
                row.clear()
        for pool, row in zip(self.pools, self.requests[child].rows, strict=True):
            for page in filter(None, row):
                pool.hold(page)
        self.counts["claims"] += 1
        self.counts["forks"] += 1

    # Planning

    def alloc(
        self,
        names: Sequence[object],
        bounds: Sequence[int | None] | None = None,
        loads: Sequence[int] | None = None,
        *,
        only_loads: bool = False,
    ) -> dict[object, int]:
        """Plans the next forward of every request, or raises and changes nothing.

        All hits of the batch are taken before the first page is handed out: no page of one request can be a
        hit of another. A request with blocks to load gets no forward; gives these and their copies. With
        `only_loads` the others get none either.
        """
        bounds, loads = bounds or [None] * len(names), loads or [0] * len(names)
        self.only_loads = only_loads
        try:
            plans = self.plan_batch(names, bounds, loads)
        except NoRoom:
            self.counts["failed_allocs"] += 1
            raise
        if not plans:
            return {}
        self.told.begin_call()
        if not self.step_open:
            self.open_step()
        for plan in plans:
            for pool, hits in zip(self.pools, plan.hits, strict=True):
                for page in hits.values():
                    pool.hold(page)
            for pool, bridge in zip(self.pools, plan.bridge, strict=True):
                for page in bridge.values():
                    pool.hold(page)
                pool.reuse(bridge.values())
        for plan in plans:
            self._splice(plan)
        self.claim_parts(plans)
        begun = {plan.request.name: self.begin_load(plan) for plan in plans if self._carry_out(plan)}
        groups = range(len(self.pools))
        self.offload_ahead([sum(plan.taken(group) for plan in plans) for group in groups])
        return begun

    def _carry_out(self, plan: Plan) -> bool:
        """Gives the request its pages and its step, and counts it; True when it loads instead."""
        request = plan.request
        self._count_admission(plan)
        if plan.load:
            return True
        for group, (pool, row) in enumerate(zip(self.pools, request.rows, strict=True)):
            if not pool.has_blocks:
                self.take_states(plan, group)
                continue
            if plan.copied[group]:
                self.copy_on_write(pool, row, plan.start // self.page_size)
            row += self.take_pages(pool, plan.fresh[group])
            if plan.sources:
                self.copy_part(pool, plan.sources[group], row[plan.start // self.page_size])
        request.tokens += [None] * plan.placeholder
        request.bound = plan.bound
        request.out.append(Step(self.step_number, plan.start, plan.active, plan.drafts))
        self.step_joined = True
        return False

    def _splice(self, plan: Plan) -> None:
        """Puts the hit pages, already held, into the rows and gives back what they replace."""
        request = plan.request
        if not plan.end:
            return
        first, start = request.offered, plan.end * self.page_size
        served = start - request.position
        # What the hits replace goes first, in every group, then what is out of the window there.
        for replaced in (True, False):
            for pool, row, given_back in zip(self.pools, request.rows, plan.given_back, strict=True):
                for page in given_back:
                    if (page in row[first:]) == replaced:
                        pool.let_go(page)
                        pool.refresh_above(page)
        for pool, row, hits in zip(self.pools, request.rows, plan.hits, strict=True):
            if isinstance(pool.kind, Lasting):
                continue
            row[first : plan.end] = [hits.get(block, NULL) for block in range(first, plan.end)]
            for block in blocks_behind(pool.kind, start, self.page_size):
                row[block] = NULL
        request.offered, request.processed = plan.end, start
        request.cached += served
        self.counts["late_reused_tokens" if request.admitted else "reused_tokens"] += served
        self.counts["reused_blocks"] += 0 if request.admitted else plan.end - first
        for pool, hits in zip(self.pools, plan.hits, strict=True):
            self.mark_reused(request, pool, hits)
        self.offload_hits(plan.hits)
        for pool in self.pools:
            for block, stored in enumerate(self.blocks_of(request, pool)):
                if block >= first and stored is not None:
                    self.retain(pool, stored, request.kept(block, self.page_size))

    def _count_admission(self, plan: Plan) -> None:
        request = plan.request
        if request.admitted:
            return
        request.admitted = True
        self.counts["admissions"] += 1
        self.counts["prompt_tokens"] += request.context
        self.counts["context_blocks"] += self.blocks(request.context)
        self.counts["missed_blocks"] += plan.missed
        if plan.why in ("window", "no_snapshot"):
            self.counts[f"missed_{plan.why}"] += plan.missed

    # Steps

    def begin_step(self, now: float | None = None) -> int:
        """Tells the time, and opens the next step unless the newest is open and empty."""
        if now is not None and not self.has_clock:
            for pool in self.pools:
                pool.start_clock(now)
            self.has_clock = True
        self.tell_time(self.now if now is None else now)
        if not self.step_open or self.step_joined:
            self.open_step()
        return self.step_number

    def open_step(self) -> None:
        self.step_number += 1
        self.step_open, self.step_joined = True, False

    def close_step(self) -> None:
        """The next `alloc` opens another step."""
        self.step_open = False

    def step(self, names: Sequence[object], new_tokens: Sequence[Sequence[int]]) -> None:
        """Delivers the oldest step of every request, publishes what is full, known, computed, and slides."""
        for name, tokens in zip(names, new_tokens, strict=True):
            request = self.requests[name]
            done = request.out.pop(0)
            if not done.live:
                self.counts["dropped_results"] += 1
                continue
            if done.number == self.step_number:
                self.close_step()
            self._deliver(request, done, tokens)
            self.publish(name)
            self.slide(request)

    def _deliver(self, request: Request, done: Step, tokens: Sequence[int]) -> None:
        """All but the last token are drafts that were right; they have KV, and a later step moves."""
        tells = done.drafts and done.end == len(request.known)
        accepted = max(0, len(tokens) - 1) if tells else 0
        request.out = [step._replace(start=step.start + accepted) for step in request.out]
        # A hit may have moved beyond the end of this step meanwhile.
        request.processed = max(request.processed, done.end + accepted)
        for token in tokens:
            self.update(request.name, token)

    def update(self, name: object, token: int) -> None:
        """Fills the oldest placeholder, or appends."""
        tokens = self.requests[name].tokens
        if None in tokens:
            tokens[tokens.index(None)] = token
        else:
            tokens.append(token)

    # Letting go

    def release(self, names: Sequence[object]) -> list[int | None]:
        """Gives the page of each one's last block, if that stays though it is not full."""
        tails = []
        for name in names:
            request = self.requests[name]
            tails.append(self.store_tail(request))
            self.drop_load(request)
            self._give_back(request)
            del self.requests[name]
            self.counts["releases"] += 1
        return tails

    def preempt(self, names: Sequence[object]) -> None:
        """Gives up every page; what is known so far becomes the prompt of the next admission."""
        for name in names:
            request = self.requests[name]
            self.store_tail(request)
            self._drop_steps(request)
            self.drop_load(request)
            self._give_back(request)
            self._start_over(request)
            self.counts["preemptions"] += 1

    def _start_over(self, request: Request) -> None:
        """It holds no page now, and all its tokens are a prompt."""
        request.context = len(request.tokens)
        request.processed = request.cached = request.offered = 0
        request.outdated = False

    def truncate(self, name: object, rest: Sequence[Token]) -> None:
        """Drops the tokens behind `rest`, their pages, and the page of a cut block that others may read.

        `rest` differs from the tokens that were there where an item that ends in the dropped part began: from
        there on the blocks are others, and computed again. So is everything where a window has let go of what
        the tokens behind `rest` read.
        """
        request = self.requests[name]
        length = len(rest)
        if length == len(request.tokens):
            return
        newest = request.position
        self._drop_steps(request)
        self.drop_load(request)
        same = next((i for i, token in enumerate(rest) if token != request.tokens[i]), length)
        whole, keep = same // self.page_size, self.blocks(length)
        rest_is_own = all(
            pool.is_writable(page)
            for pool, row in zip(self.pools, request.rows, strict=True)
            if pool.has_blocks
            for page in row[whole:keep]
        )
        if same < length or not rest_is_own:
            keep = whole
        processed = min(request.processed, length, keep * self.page_size)
        goes_on = self._can_go_on(request, processed) and self.has_states(request, processed, newest)
        self.drop_states(request, processed)
        self._give_back(request, keep if goes_on else 0, whole if goes_on else 0)
        request.tokens = list(rest)
        self._keep_private(request)
        if goes_on:
            request.offered = min(request.offered, whole)
            request.processed = processed
        else:
            self._start_over(request)
        request.prompt = min(request.prompt, length)
        if not request.holds_pages:
            request.outdated = False  # it holds nothing that is older than the reset
        request.context = min(request.context, length)

    def _can_go_on(self, request: Request, position: int) -> bool:
        """Whether there is all that a token at `position` reads, and the rest of the page that it goes to."""
        return all(
            row[block]
            for pool, row in zip(self.pools, request.rows, strict=True)
            if pool.has_blocks
            for block in needed_blocks(pool.kind, position, self.page_size)
            if block < self.blocks(position)
        )

    def _give_back(self, request: Request, keep: int = 0, whole: int = 0) -> None:
        """Drops the pages behind the first `keep`, and private twins behind `whole`.

        Where the tail goes first, stored twins of private blocks count as used until now, and so do blocks
        above a page that somebody else stored: no block is evicted before one below it.
        """
        for pool, row in zip(self.pools, request.rows, strict=True):
            if keep and isinstance(pool.kind, Lasting):
                continue
            for block in release_order(pool.kind, len(row), self.page_size):
                if block >= keep and row[block]:
                    pool.let_go(row[block])
                    if block >= request.offered:
                        pool.refresh_above(row[block])
                if pool.keeps_all and block in request.private and not request.outdated:
                    pool.refresh(pool.tree.get(request.content(block, self.page_size)))
            del row[keep:]
        request.private = {block for block in request.private if block < whole}

    def _drop_steps(self, request: Request) -> None:
        """Results of steps that are out will not count; tokens that only they could tell are gone.

        The step that is open has not run: it has no results to wait for.
        """
        ran = [step for step in request.out if step.number < self.step_number or not self.step_open]
        request.out = [step._replace(live=False) for step in ran]
        request.tokens = list(request.known)
