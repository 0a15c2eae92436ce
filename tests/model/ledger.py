"""The contract of the ledger for one group, in dictionaries and lists.

Written from the specification, for reading: no hashing, no tree, no links. What a block holds is named by its
namespace and every token up to its end; the pool's `tree` maps that name to the page that stores it.
`Keeping` has what is stored and for how long, `Copying` what moves, this class the life of a request.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from model.copying import Copying
from model.requests import NeverRoom, NoRoom, Plan, Request, Retention, Step, Token


class Ledger(Copying):
    """Requests, pages and stored prefixes of one pool."""

    def __init__(
        self,
        page_size: int,
        pages: int,
        *,
        on_duplicate: str = "adopt",
        policy: str = "priority_lru",
        priority: int = 35,
        caching: bool = True,
        chunk: int | None = None,
        reserve: str = "chunk",
        tier: bool = False,
        write_policy: str = "write_through",
        min_hits: int = 1,
        min_priority: int | None = None,
    ) -> None:
        super().__init__(
            page_size,
            pages,
            on_duplicate=on_duplicate,
            policy=policy,
            priority=priority,
            tier=tier,
            write_policy=write_policy,
            min_hits=min_hits,
            min_priority=min_priority,
        )
        self.caching = caching
        self.chunk = chunk
        self.reserve = reserve
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
    ) -> None:
        request = Request(name, namespace, list(tokens), no_read, no_store, drafts, retention)
        self.requests[name] = request
        self.counts["claims"] += 1

    def unclaim(self, name: object) -> None:
        """As if it had not been claimed."""
        del self.requests[name]
        self.counts["claims"] -= 1

    def fork(self, name: object, child: object) -> None:
        """The child holds every page of its parent that has computed tokens."""
        self.requests[child] = self.requests[name].fork(child, self.page_size)
        for page in self.requests[child].row:
            self.pool.hold(page)
        self.counts["claims"] += 1
        self.counts["forks"] += 1

    # Planning

    def alloc(
        self,
        names: Sequence[object],
        bounds: Sequence[int | None] | None = None,
        loads: Sequence[int] | None = None,
    ) -> dict[object, int]:
        """Plans the next forward of every request, or raises and changes nothing.

        All hits of the batch are taken before the first page is handed out: no page of one request can be a
        hit of another. A request with blocks to load gets no forward; gives these and their copies.
        """
        bounds, loads = bounds or [None] * len(names), loads or [0] * len(names)
        try:
            plans = self._fitting(
                [
                    self._plan(self.requests[name], bound, load)
                    for name, bound, load in zip(names, bounds, loads, strict=True)
                ]
            )
        except NoRoom:
            self.counts["failed_allocs"] += 1
            raise
        self.told.begin_call()
        if not self.step_open:
            self.open_step()
        for plan in plans:
            for page in plan.hits:
                self.pool.hold(page)
        for plan in plans:
            self._splice(plan)
        begun = {plan.request.name: self.begin_load(plan) for plan in plans if self._carry_out(plan)}
        self.offload_ahead(sum(plan.fresh + plan.copied for plan in plans))
        return begun

    def _carry_out(self, plan: Plan) -> bool:
        """Gives the request its pages and its step, and counts it; True when it loads instead."""
        request = plan.request
        self._count_admission(plan)
        if plan.load:
            return True
        if plan.copied:
            self.copy_on_write(request, plan.start // self.page_size)
        request.row += [self.take_page() for _ in range(plan.fresh)]
        request.tokens += [None] * plan.placeholder
        request.out.append(Step(self.step_number, plan.start, plan.active, plan.drafts))
        self.step_joined = True
        return False

    def _fitting(self, plans: list[Plan]) -> list[Plan]:
        room, hits, refusal = self.pool.free, set[int](), None
        leaving: Counter[int] = Counter()
        for plan in plans:
            request = plan.request
            if self._blocks(len(request.tokens) + plan.placeholder + 2 * request.drafts) > self.pool.pages:
                raise NeverRoom(request.name)
            for page in request.row[plan.start // self.page_size :][:1]:
                if not plan.load and self.must_copy(page, leaving[page]):
                    plan.copied = True
                    leaving[page] += 1
            hits |= {page for page in plan.hits if page in self.pool.idle}
            room += len([page for page in plan.replaced if self.pool.is_writable(page)])
            room -= plan.fresh + plan.copied
            if room < len(hits):
                refusal = refusal or NoRoom(request.name)
        # Pages that a later request's hits give back may be what an earlier one lacked: the sum decides.
        if refusal and room < len(hits):
            raise refusal
        return plans

    def _plan(self, request: Request, bound: int | None, load: int) -> Plan:
        position, offered = request.position, request.offered
        hits: list[int] = []
        missed = 0
        first_load = offered
        if self.caching and self.reads(request):
            hits = self.match(request.namespace, request.known, offered)
            first_load = offered + len(hits)
            if not request.admitted:
                missed = (len(request.known) - 1) // self.page_size - first_load
        if (offered + len(hits)) * self.page_size <= position:
            hits = []
        start = (offered + len(hits)) * self.page_size if hits else position
        first_load = max(first_load, start // self.page_size)
        placeholder = start == len(request.tokens)
        rest = len(request.tokens) + placeholder - start
        active = min(rest, bound or rest, self.chunk or rest)
        drafts = request.drafts if start >= request.context and active == rest else 0
        # All drafts that are out may be right; then this step has its own, and the drafter adds as many.
        room = 2 * request.drafts and sum(step.drafts for step in request.live) + 2 * request.drafts
        end = max(start + active + room, request.context if self.reserve == "prompt" else 0)
        held = max(len(request.row), offered + len(hits))
        fresh = max(0, self._blocks(end) - held)
        if load:
            whole = self._blocks(len(request.tokens) + 2 * request.drafts)
            fresh = load + max(0, whole - max(held, first_load + load))
        return Plan(request, hits, start, active, drafts, placeholder, missed, load, first_load, fresh)

    def _splice(self, plan: Plan) -> None:
        """Puts the hit pages, already held, into the row and gives the replaced back, last first."""
        request = plan.request
        if not plan.hits:
            return
        replaced, first = plan.replaced, request.offered
        served = plan.start - request.position
        request.row[first : first + len(plan.hits)] = plan.hits
        request.offered += len(plan.hits)
        request.processed = plan.start
        for page in reversed(replaced):
            self.pool.let_go(page)
            self.pool.refresh_above(page)
        request.cached += served
        self.counts["late_reused_tokens" if request.admitted else "reused_tokens"] += served
        self.counts["reused_blocks"] += 0 if request.admitted else len(plan.hits)
        self.mark_reused(request, request.offered)
        self.offload(self.writing.hit(plan.hits))
        for block in range(first, request.offered):
            self.retain(request.row[block], request.kept(block, self.page_size))

    def _count_admission(self, plan: Plan) -> None:
        request = plan.request
        if request.admitted:
            return
        request.admitted = True
        self.counts["admissions"] += 1
        self.counts["prompt_tokens"] += request.context
        self.counts["context_blocks"] += self._blocks(request.context)
        self.counts["missed_blocks"] += plan.missed

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    # Steps

    def begin_step(self, now: float | None = None) -> int:
        """Tells the time, and opens the next step unless the newest is open and empty."""
        if now is not None and not self.has_clock:
            self.pool.start_clock(now)
            self.has_clock = True
        self.tell_time(self.pool.now if now is None else now)
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
        """Delivers the oldest step of every request, then publishes what is full, known and computed."""
        for name, tokens in zip(names, new_tokens, strict=True):
            request = self.requests[name]
            done = request.out.pop(0)
            if not done.live:
                self.counts["dropped_results"] += 1
                continue
            if done.number == self.step_number:
                self.close_step()
            self._deliver(request, done, tokens)
        for name in names:
            self.publish(name)

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

    def release(self, names: Sequence[object]) -> None:
        for name in names:
            request = self.requests[name]
            self.drop_load(request)
            self._give_back(request)
            del self.requests[name]
            self.counts["releases"] += 1

    def preempt(self, names: Sequence[object]) -> None:
        """Gives up every page; what is known so far becomes the prompt of the next admission."""
        for name in names:
            request = self.requests[name]
            self._drop_steps(request)
            self.drop_load(request)
            self._give_back(request)
            request.context = len(request.tokens)
            request.processed = request.cached = request.offered = 0
            request.outdated = False
            self.counts["preemptions"] += 1

    def truncate(self, name: object, rest: Sequence[Token]) -> None:
        """Drops the tokens behind `rest`, their pages, and the page of a cut block that others may read.

        `rest` differs from the tokens that were there where an item that ends in the dropped part began: from
        there on the blocks are others, and computed again.
        """
        request = self.requests[name]
        length = len(rest)
        if length == len(request.tokens):
            return
        self._drop_steps(request)
        self.drop_load(request)
        same = next((i for i, token in enumerate(rest) if token != request.tokens[i]), length)
        whole, keep = same // self.page_size, self._blocks(length)
        if same < length or not all(self.pool.is_writable(page) for page in request.row[whole:keep]):
            keep = whole
        self._give_back(request, keep, whole)
        request.tokens = list(rest)
        request.offered = min(request.offered, whole)
        request.processed = min(request.processed, length, keep * self.page_size)
        request.prompt = min(request.prompt, length)
        if not request.row:
            request.outdated = False  # it holds nothing that is older than the reset
        request.context = min(request.context, length)

    def _give_back(self, request: Request, keep: int = 0, whole: int = 0) -> None:
        """Drops the pages behind the first `keep`, and private twins behind `whole`, the tail first.

        Stored twins of private blocks count as used until now, and so do blocks above a page that somebody
        else stored: no block is evicted before one below it.
        """
        for block in reversed(range(len(request.row))):
            if block >= keep:
                page = request.row.pop()
                self.pool.let_go(page)
                if block >= request.offered:
                    self.pool.refresh_above(page)
            if block in request.private and not request.outdated:
                self.pool.refresh(self.pool.tree.get(request.content(block, self.page_size)))
        request.private = {block for block in request.private if block < whole}

    def _drop_steps(self, request: Request) -> None:
        """Results of steps that are out will not count; tokens that only they could tell are gone.

        The step that is open has not run: it has no results to wait for.
        """
        ran = [step for step in request.out if step.number < self.step_number or not self.step_open]
        request.out = [step._replace(live=False) for step in ran]
        request.tokens = list(request.known)
