"""Copies in flight: those that only read, loads from other tiers, offloads to them, and copies on write."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from model.keeping import Keeping
from model.pool import NULL, Content, Group, Pool
from model.requests import Load, Plan, Request
from model.windows import Cross, Lasting, Recurrent, blocks_behind, is_usable, needed_blocks, release_order
from model.writing import WRITE_POLICIES


@dataclass
class Copy:
    """A copy in flight."""

    parts: list[list[int]]
    """Pages of each group."""
    blocks: list[list[Content]]
    """What an offload or a load moves; nothing else is told of other copies."""
    loads: object = None
    """The request that waits for it."""
    stale: bool = False
    """The cache was reset since it began: the tier keeps nothing of it."""
    ahead: bool = False
    """It is of blocks that were going to be evicted, which nobody used for it."""

    @property
    def pages(self) -> list[int]:
        """All of them, group by group."""
        return [page for pages in self.parts for page in pages]


class Copying(Keeping):
    """The pools beside the movers: to a tier and from there goes what each group has and needs."""

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
        policy = WRITE_POLICIES[write_policy]
        priorities = [partial(self._priority, pool) for pool in self.pools]
        self.writings = [policy(priority, min_hits, min_priority) for priority in priorities]
        self.is_plain = len(self.pools) == 1 and self.pools[0].keeps_all
        self.tier: set[tuple[int, Content]] | None = set() if tier else None
        """Blocks of groups that are kept beyond the device, if anything is."""
        self.offloads_hits = tier and write_policy == "selective"
        self.copies: dict[int, Copy] = {}
        self.page_copies: list[tuple[Pool, list[int]]] = []
        """Where, and [source, destination], of each copy that goes before the next forward."""
        self.page_fills: list[tuple[Pool, int]] = []
        """Pages that are zeroed before the next forward."""
        self.new_offloads: list[int] = []
        self.left = [0] * len(self.pools)
        """Pages of each group that a shared slab is to have room for, those taken next among them."""

    def _priority(self, pool: Pool, page: int) -> int:
        """Of a page's block; a tail matters to no tier."""
        return -1 if self.is_tail(pool.stored[page]) else pool.priority[page]

    def start_copy(
        self,
        parts: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[Content]] | None = None,
        loads: object = None,
    ) -> int:
        """Of pages of each group; a copy that does not say so has pages of the first one alone."""
        copy = self.counts["copies_started"]
        self.counts["copies_started"] += 1
        pages = [list(part) for part in parts] + [[] for _ in self.pools[len(parts) :]]
        contents = [list(part) for part in blocks or [[] for _ in self.pools]]
        self.copies[copy] = Copy(pages, contents, loads)
        for pool, part in zip(self.pools, pages, strict=True):
            for page in part:
                pool.touch(page)
        return copy

    def end_copy(self, copy: int, end: str = "finished") -> bool:
        """`end` is "finished", "failed" or "refused". True when a request waited for it.

        Pages that only this copy held become free now, the tail of the sequence first, or a window's head.
        """
        ended = self.copies.pop(copy)
        self.counts[f"copies_{end}"] += 1
        for pool, writing, pages, blocks in zip(
            self.pools, self.writings, ended.parts, ended.blocks, strict=True
        ):
            if ended.ahead:
                for page in reversed(pages):
                    pool.end_touch_in_place(page)
                if end != "finished":
                    writing.not_copied(pages)
                continue
            order = list(reversed(pages))
            if not pool.keeps_all:
                named = zip(blocks, pages, strict=True)
                places = {len(content[1]) // self.page_size - 1: page for content, page in named}
                last = release_order(pool.kind, max(places, default=-1) + 1, self.page_size)
                order = [places[block] for block in last if block in places]
            for page in order:
                pool.end_touch(page)
        request = self.requests.get(ended.loads)
        if request is None or request.load is None or request.load.copy != copy:
            return False
        if end == "finished":
            parts = zip(self.pools, ended.blocks, strict=True)
            self.counts["loaded_states"] += sum(
                len(blocks) for pool, blocks in parts if isinstance(pool.kind, Recurrent)
            )
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
            for group, blocks in enumerate(self.copies[copy].blocks):
                self.tier.update((group, block) for block in blocks)

    # Loads

    def loadable(self, name: object) -> int:
        """Blocks that could be had of the tier behind those on the device, if the request may ask.

        Of one group that keeps all those without a gap. Else as many as make, with what is on the device, the
        longest prefix that all groups can go on from; of these some may be on the device.
        """
        request = self.requests[name]
        if self.tier is None or not self.reads(request) or request.load_failed or request.live:
            return 0
        first = self.match(request.namespace, request.known, request)
        first = max(first, request.offered, request.processed // self.page_size)
        reusable = (len(request.known) - 1) // self.page_size
        there = [
            {
                block
                for block in range(reusable)
                if block < first
                or (group, content := request.content(block, self.page_size)) in self.tier
                or (not self.is_plain and content in pool.tree)
            }
            for group, pool in enumerate(self.pools)
        ]
        ends = [
            blocks
            for blocks in range(first, reusable + 1)
            if all(
                is_usable(pool.kind, present, blocks, self.page_size)
                for pool, present in zip(self.pools, there, strict=True)
            )
        ]
        end = max(ends, default=first)
        return end - first if any(self.to_load(request, first, end)) else 0

    def to_load(self, request: Request, first: int, end: int) -> list[list[int]]:
        """The blocks of these that each group needs behind them and that the device does not have."""
        return [
            [
                block
                for block in self._needed_behind(pool, first, end)
                if self.is_plain or request.content(block, self.page_size) not in pool.tree
            ]
            for pool in self.pools
        ]

    def on_device(self, request: Request, first: int, end: int) -> list[dict[int, int]]:
        """The pages of those that the device has."""
        return [
            {
                block: pool.tree[content]
                for block in self._needed_behind(pool, first, end)
                if not self.is_plain and (content := request.content(block, self.page_size)) in pool.tree
            }
            for pool in self.pools
        ]

    def _needed_behind(self, pool: Pool, first: int, end: int) -> list[int]:
        needed = needed_blocks(pool.kind, end * self.page_size, self.page_size)
        return [block for block in range(first, end) if block in needed]

    def reads(self, request: Request) -> bool:
        """Whether hits may serve the request where it stands."""
        return request.position < request.context and not request.no_read and not request.outdated

    def begin_load(self, plan: Plan) -> int:
        """Its pages are the load's until it has landed."""
        request = plan.request
        end = plan.first_load + plan.load
        blocks = self.to_load(request, plan.first_load, end)
        pages: list[dict[int, int]] = []
        rests: list[list[int]] = []
        spare: list[list[int]] = []
        for pool, fresh, rest, wanted in zip(self.pools, plan.fresh, plan.rest, blocks, strict=True):
            taken = self.take_pages(pool, fresh)
            end_of_rest = len(wanted) + rest
            pages.append(dict(zip(wanted, taken, strict=False)))
            rests.append(taken[len(wanted) : end_of_rest])
            spare.append(taken[end_of_rest:])
        contents = [[request.content(block, self.page_size) for block in wanted] for wanted in blocks]
        copy = self.start_copy([list(part.values()) for part in pages], contents, request.name)
        for pool, part in zip(self.pools, pages, strict=True):
            self.leave_to_copy(pool, list(part.values()))
        loaded = sum(map(len, blocks))
        for part, held in zip(pages, plan.bridge, strict=True):
            part |= held
        gain = end * self.page_size - request.processed
        request.cached += gain
        request.load = Load(copy, plan.first_load, end, pages, rests, spare, loaded, gain)
        return copy

    def _land(self, request: Request) -> None:
        load = request.load
        assert load is not None
        request.load = None
        for group, (pool, row) in enumerate(zip(self.pools, request.rows, strict=True)):
            rest = load.rests[group]
            if isinstance(pool.kind, Lasting):
                row += rest
                if not isinstance(pool.kind, Cross):
                    self.fill(pool, rest)
                continue
            for page in reversed(row[load.first : load.end]):
                pool.let_go(page)
            pages = [load.pages[group].get(block, NULL) for block in range(load.first, load.end)]
            request.rows[group] = row[: load.first] + pages + row[load.end :] + rest
            for page in load.spare[group]:
                pool.let_go(page)
        self.counts["loaded_blocks"] += load.loaded
        self.counts["loaded_tokens"] += load.gain
        request.processed = load.end * self.page_size
        if self.publishes(request):
            self._store_computed(request)  # the tier has these blocks
        self.slide(request)
        if not request.outdated:
            for pool in self.pools:
                blocks = range(0 if pool.keeps_all else load.first, min(load.end, request.offered))
                self.mark_reused(request, pool, blocks)

    def drop_load(self, request: Request) -> None:
        """Pages of the load are in flight until the copy ends, then free."""
        load, request.load = request.load, None
        if load is not None:
            request.cached -= load.gain
            parts = zip(self.pools, load.pages, load.rests, load.spare, strict=True)
            for pool, pages, rest, spare in parts:
                for page in reversed([*rest, *spare]):
                    pool.let_go(page)
                for block in release_order(pool.kind, load.end, self.page_size):
                    if block in pages:
                        pool.let_go(pages[block])
                        pool.refresh_above(pages[block])

    def slide(self, request: Request) -> None:
        """Gives back what no token reads that is still to be computed."""
        position = min(request.processed, len(request.known))
        for pool, row in zip(self.pools, request.rows, strict=True):
            if isinstance(pool.kind, Lasting):
                continue
            for block in sorted(blocks_behind(pool.kind, position, self.page_size)):
                if row[block]:
                    pool.let_go(row[block])
                    row[block] = NULL

    # Publication, and what goes to other tiers then

    def publishes(self, request: Request) -> bool:
        return self.caching and not request.no_store and not request.outdated

    caching = True

    def publish(self, name: object) -> None:
        request = self.requests[name]
        if not self.publishes(request):
            return
        self.offload(self._store_computed(request))

    def _store_computed(self, request: Request) -> list[Sequence[int]]:
        """Gives the pages of each group of those blocks that go to the tier now."""
        new = self.store_computed(request)
        if self.tier is None:
            return []
        return [
            writing.published([row[block] for block in blocks])
            for writing, row, blocks in zip(self.writings, request.rows, new, strict=True)
        ]

    def offload_hits(self, hits: Sequence[dict[int, int]]) -> None:
        """Blocks of each group, with their pages, were hit."""
        pairs = zip(self.writings, hits, strict=True)
        self.offload([writing.hit(list(pages.values())) for writing, pages in pairs])

    def offload_ahead(self, taken: Sequence[int]) -> None:
        """A call took so many pages of each group."""
        for group, (pool, writing) in enumerate(zip(self.pools, self.writings, strict=True)):
            if taken[group]:
                ahead = [copy.parts[group] for copy in self.copies.values() if copy.ahead]
                going = writing.took(
                    taken[group],
                    unused=len(pool.pristine),
                    idle=len(pool.loose) + len(pool.idle),
                    next_to_go=pool.order()[len(pool.loose) :],
                    in_copies=sum(map(len, ahead)),
                )
                self.offload([going if pool is other else [] for other in self.pools], ahead=True)

    def offload(self, parts: Sequence[Sequence[int]], *, ahead: bool = False) -> None:
        """Copies stored pages of each group to the tier."""
        if any(parts) and self.tier is not None:
            blocks = [
                [pool.stored[page] for page in part] for pool, part in zip(self.pools, parts, strict=True)
            ]
            self.new_offloads.append(self.start_copy(parts, blocks))
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
        source = row[block]
        (row[block],) = self.take_pages(pool, 1)
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

    def take_pages(self, pool: Pool, wanted: int) -> list[int]:
        group = self.pools.index(pool)
        self.left[group] = max(0, self.left[group] - wanted)
        taken, lost = pool.take(wanted, self.left)
        self.counts["pages_allocated"] += wanted
        self.counts["pages_allocated_new"] += sum(one.is_new for one in taken)
        for loser, block in lost:
            self._evicted(loser, [block])
        self._evicted(group, [one.evicted for one in taken if one.evicted is not None])
        self.fill(pool, [one.page for one in taken if one.page in pool.foreign])
        return [one.page for one in taken]

    def fill(self, pool: Pool, pages: Sequence[int]) -> None:
        """They are zeroed before the next forward."""
        self.page_fills += [(pool, page) for page in pages]
        pool.foreign.difference_update(pages)

    def leave_to_copy(self, pool: Pool, pages: Sequence[int]) -> None:
        """A copy fills them, so they are not zeroed: that might come behind it.

        Nobody knows what is there if it fails. Whoever takes them next has them zeroed.
        """
        left = [fill for fill in self.page_fills if fill[0] is pool and fill[1] in pages]
        self.page_fills = [fill for fill in self.page_fills if fill not in left]
        pool.foreign.update(page for _, page in left)

    def _evicted(self, group: int, blocks: Sequence[Content]) -> None:
        self.counts["evictions"] += len(blocks)
        for block in blocks:
            if not self.is_tail(block):
                self.told.removed(group, block)
        for block in filter(self.is_tail, blocks):
            self.drop_tail(block)  # of no use without one of its pages
