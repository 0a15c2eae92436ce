"""Copies in flight: those that only read, loads from other tiers, offloads to them, and copies on write."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from model.keeping import Keeping
from model.pool import Content, Group, Pool
from model.requests import Load, Plan, Request
from model.writing import WRITE_POLICIES


@dataclass
class Copy:
    """A copy in flight."""

    pages: list[int]
    blocks: list[Content]
    """What an offload or a load moves; nothing else is told of other copies."""
    loads: object = None
    """The request that waits for it."""
    stale: bool = False
    """The cache was reset since it began: the tier keeps nothing of it."""
    ahead: bool = False
    """It is of blocks that were going to be evicted, which nobody used for it."""


class Copying(Keeping):
    """The pools beside the movers; those that go to a tier or come from there know the first pool alone."""

    def __init__(
        self,
        page_size: int,
        groups: Sequence[Group],
        *,
        tier: bool,
        write_policy: str,
        min_hits: int,
        min_priority: int | None,
        **options: Any,
    ) -> None:
        super().__init__(page_size, groups, **options)
        self.pool = self.pools[0]
        self.writing = WRITE_POLICIES[write_policy](self._priority, min_hits, min_priority)
        self.tier: set[Content] | None = set() if tier else None
        """Blocks that are kept beyond the device, if anything is."""
        self.copies: dict[int, Copy] = {}
        self.page_copies: list[tuple[Pool, list[int]]] = []
        """Where, and [source, destination], of each copy that goes before the next forward."""
        self.new_offloads: list[int] = []

    def _priority(self, page: int) -> int:
        """Of a page's block; a tail matters to no tier."""
        return -1 if self.is_tail(self.pool.stored[page]) else self.pool.priority[page]

    def start_copy(self, pages: Iterable[int], blocks: Sequence[Content] = (), loads: object = None) -> int:
        copy = self.counts["copies_started"]
        self.counts["copies_started"] += 1
        self.copies[copy] = Copy(list(pages), list(blocks), loads)
        for page in self.copies[copy].pages:
            self.pool.touch(page)
        return copy

    def end_copy(self, copy: int, end: str = "finished") -> bool:
        """`end` is "finished", "failed" or "refused". True when a request waited for it.

        Pages that only this copy held become free now, the tail of the sequence first.
        """
        ended = self.copies.pop(copy)
        self.counts[f"copies_{end}"] += 1
        for page in reversed(ended.pages):
            if ended.ahead:
                self.pool.end_touch_in_place(page)
            else:
                self.pool.end_touch(page)
        if ended.ahead and end != "finished":
            self.writing.not_copied(ended.pages)
        request = self.requests.get(ended.loads)
        if request is None or request.load is None or request.load.copy != copy:
            return False
        if end == "finished":
            self._land(request)
        else:
            request.load_failed = request.load_failed or end == "failed"
            self.drop_load(request)
            request.outdated = request.outdated and request.holds_pages
        return True

    def reset(self, orders: Sequence[Sequence[int]]) -> None:
        """Loads on the way land unpublished, offloads on the way are dropped."""
        super().reset(orders)
        for copy in self.copies.values():
            copy.stale = True
        if self.tier is not None:
            self.tier.clear()

    def keep(self, copy: int) -> None:
        """The tier has what the offload brought it, unless it was reset meanwhile."""
        assert self.tier is not None
        if not self.copies[copy].stale:
            self.tier.update(self.copies[copy].blocks)

    # Loads

    def loadable(self, name: object) -> int:
        """Blocks that the tier has without a gap behind those on the device, if the request may ask."""
        request = self.requests[name]
        if self.tier is None or not self.reads(request) or request.load_failed or request.live:
            return 0
        on_device = self.match(request.namespace, request.known, request)
        on_device = max(on_device, request.processed // self.page_size)
        reusable = (len(request.known) - 1) // self.page_size
        found = 0
        while on_device + found < reusable and self._in_tier(request, on_device + found):
            found += 1
        return found

    def _in_tier(self, request: Request, block: int) -> bool:
        assert self.tier is not None
        return request.content(block, self.page_size) in self.tier

    def reads(self, request: Request) -> bool:
        """Whether hits may serve the request where it stands."""
        return request.position < request.context and not request.no_read and not request.outdated

    def begin_load(self, plan: Plan) -> int:
        """Its pages are the load's until it has landed."""
        request = plan.request
        taken = [self.take_page(self.pool) for _ in range(plan.fresh[0])]
        pages, rest = taken[: plan.load], taken[plan.load :]
        blocks = range(plan.first_load, plan.first_load + plan.load)
        contents = [request.content(block, self.page_size) for block in blocks]
        copy = self.start_copy(pages, contents, request.name)
        gain = blocks.stop * self.page_size - request.processed
        request.cached += gain
        request.load = Load(copy, plan.first_load, pages, rest, gain)
        return copy

    def _land(self, request: Request) -> None:
        load = request.load
        assert load is not None
        request.load = None
        end = load.first + len(load.pages)
        [row] = request.rows
        for page in reversed(row[load.first : end]):
            self.pool.let_go(page)
        request.rows = [row[: load.first] + load.pages + row[end:] + load.rest]
        self.counts["loaded_blocks"] += len(load.pages)
        self.counts["loaded_tokens"] += load.gain
        request.processed = end * self.page_size
        if self.publishes(request):
            self._store_computed(request)  # the tier has these blocks
        if not request.outdated:
            self.mark_reused(request, self.pool, range(min(end, request.offered)))

    def drop_load(self, request: Request) -> None:
        """Pages of the load are in flight until the copy ends, then free."""
        load, request.load = request.load, None
        if load is not None:
            request.cached -= load.gain
            for page in [*reversed(load.rest), *reversed(load.pages)]:
                self.pool.let_go(page)

    # Publication, and what goes to other tiers then

    def publishes(self, request: Request) -> bool:
        return self.caching and not request.no_store and not request.outdated

    caching = True

    def publish(self, name: object) -> None:
        request = self.requests[name]
        if not self.publishes(request):
            return
        self.offload(self._store_computed(request))

    def _store_computed(self, request: Request) -> Sequence[int]:
        """Gives the pages of those blocks that go to the tier now."""
        new = self.store_computed(request)
        return [] if self.tier is None else self.writing.published([request.rows[0][block] for block in new])

    def offload_ahead(self, taken: int) -> None:
        """A call took so many pages."""
        if taken:
            pool = self.pool
            going = self.writing.took(
                taken,
                unused=len(pool.pristine),
                idle=len(pool.loose) + len(pool.idle),
                next_to_go=pool.order()[len(pool.loose) :],
                in_copies=sum(len(copy.pages) for copy in self.copies.values() if copy.ahead),
            )
            self.offload(going, ahead=True)

    def offload(self, pages: Sequence[int], *, ahead: bool = False) -> None:
        """Copies stored pages to the tier."""
        if pages and self.tier is not None:
            self.new_offloads.append(self.start_copy(pages, [self.pool.stored[page] for page in pages]))
            self.copies[self.new_offloads[-1]].ahead = ahead

    # Copies on write

    def must_copy(self, pool: Pool, page: int, leaving: int) -> bool:
        """Whether a forward may not write to the page.

        The block is stored, or another request holds it (`leaving` get copies in the same batch), or a mover
        reads it. Copies planned before go before the forward.
        """
        planned = sum(pair.count(page) for where, pair in self.page_copies if where is pool)
        return page in pool.stored or pool.references[page] - leaving > 1 or pool.touched[page] > planned

    def copy_on_write(self, pool: Pool, row: list[int], block: int) -> None:
        source, row[block] = row[block], self.take_page(pool)
        pair = [source, row[block]]
        for page in pair:
            pool.touch(page)
        pool.let_go(source)
        self.page_copies.append((pool, pair))
        self.counts["page_copies"] += 1

    def take_page_copies(self, pool: Pool) -> list[list[int]]:
        """They are carried out now. Their pages count as used until now."""
        copies = [pair for where, pair in self.page_copies if where is pool]
        self.page_copies = [copy for copy in self.page_copies if copy[0] is not pool]
        for page in [page for pair in copies for page in pair]:
            pool.hold(page)
            pool.end_touch(page)
            pool.let_go(page)
            pool.refresh_above(page)
        return copies

    def take_page(self, pool: Pool) -> int:
        self.counts["pages_allocated"] += 1
        self.counts["pages_allocated_new"] += not pool.loose and bool(pool.pristine)
        page, evicted = pool.take()
        if evicted is not None:
            self.counts["evictions"] += 1
            if self.is_tail(evicted):
                self.drop_tail(evicted)  # of no use without one of its pages
            else:
                self.told.removed(self.pools.index(pool), evicted)
        return page
