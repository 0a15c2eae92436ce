"""What the cache keeps and for how long: publication, retention, pins, and what it forgets on purpose."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import inf

from model.events import Told
from model.pool import NULL, Content, Group, Limit, Pool
from model.requests import Kept, Request, Token
from model.slab import SharedSlab
from model.tails import Tails
from model.windows import Lasting, Recurrent, is_usable, release_order


class Keeping(Tails):
    """The pools, the requests that use them, and the verbs that change what is stored."""

    def __init__(
        self,
        page_size: int,
        groups: Sequence[Group],
        *,
        priority: int,
        policy: str,
        on_duplicate: str,
        slab: tuple[Sequence[int], int] | None = None,
    ) -> None:
        self.page_size = page_size
        self.on_duplicate = on_duplicate
        scan_resistant = {"priority_lru": False, "priority_slru": True}[policy]
        self.pools = [Pool(page_size, group, priority, scan_resistant=scan_resistant) for group in groups]
        self.slab = None if slab is None else SharedSlab(self.pools, *slab)
        """Given as the pages of each group in a huge page, and the number of these."""
        leading = [pool for pool in self.pools if not isinstance(pool.kind, Lasting)]
        self.lead = next((pool for pool in leading if pool.keeps_all), leading[0])
        """Whose blocks are counted as the cache's."""
        self.requests: dict[object, Request] = {}
        self.pins: dict[int, list[dict[int, int]]] = {}
        """For each group the pages that a pin holds, by their blocks."""
        self.told = Told(len(self.pools))
        self.counts: Counter[str] = Counter()
        """By the names of the manager's metrics."""

    @property
    def now(self) -> float:
        return self.lead.now

    def match(self, namespace: object, tokens: Sequence[Token], request: Request | None = None) -> int:
        """Blocks of the longest prefix that every group can go on from, among those that the cache knows.

        Whole blocks, and never the last token: it must be computed. What the request has offered is there
        for it as long as its rows have it.
        """
        return self.match_within(namespace, tokens, (len(tokens) - 1) // self.page_size, request)[0]

    def match_within(
        self, namespace: object, tokens: Sequence[Token], limit: int, request: Request | None = None
    ) -> tuple[int, str | None]:
        """The same of at most `limit` blocks, and why there are no more, if the cache knows the next.

        It was evicted, or it is of no use: a window lacks what it reads there, or there is no state.
        """
        offered = request.offered if request else 0
        reach = min(self.reach(namespace, tokens), limit)
        contents = [(namespace, tuple(tokens[: (block + 1) * self.page_size])) for block in range(reach)]
        present = [{block for block in range(reach) if contents[block] in pool.tree} for pool in self.pools]
        if request:
            for pool, row, there in zip(self.pools, request.rows, present, strict=True):
                if isinstance(pool.kind, Lasting):
                    continue
                there -= {block for block in range(offered) if not row[block]}
                there |= {block for block in range(offered) if row[block]}
        groups = list(zip(self.pools, present, strict=True))

        def lacking(blocks: int) -> list[Pool]:
            return [pool for pool, there in groups if not is_usable(pool.kind, there, blocks, self.page_size)]

        found = max(blocks for blocks in range(reach + 1) if not lacking(blocks))
        if found == reach:
            return found, None
        if any(pool.keeps_all for pool in lacking(found + 1)):
            return found, "evicted"
        window = any(pool.has_blocks for pool in lacking(found + 1))
        return found, "window" if window else "no_snapshot"

    def reach(self, namespace: object, tokens: Sequence[Token]) -> int:
        """Leading full blocks of these tokens that the cache knows."""
        size, known = self.page_size, 0
        for other, below in self._remembered():
            if other == namespace:
                full = min(len(tokens), len(below)) // size
                while known < full and below[: (known + 1) * size] == tuple(tokens[: (known + 1) * size]):
                    known += 1
        return known

    def store_computed(self, request: Request) -> list[list[int]]:
        """Offers to the tree what is full, known and computed; gives the blocks that each group has got."""
        computed = min(request.processed, len(request.known)) // self.page_size
        stored: list[list[int]] = [[] for _ in self.pools]
        runs: list[list[int]] = [[] for _ in self.pools]
        """Blocks that each group has got, which are not told yet."""
        first = reused = request.offered
        for block in range(first, computed):
            content = request.content(block, self.page_size)
            kept = request.kept(block, self.page_size)
            if self.is_remembered(content):
                reused = block + 1
            was_whole = self.is_whole(content)
            for pool, row, got, run in zip(self.pools, request.rows, stored, runs, strict=True):
                if not self._offers(request, pool, block) or not row[block]:
                    continue
                page = row[block]
                if content in pool.tree:
                    self._meet(request, pool, row, block, kept)
                    continue
                pool.store(content, page)
                if kept is not None:
                    pool.retain(page, *kept)
                if run and (run[-1] != block - 1 or pool.priority[row[run[-1]]] != pool.priority[page]):
                    self._tell(request, pool, run)
                run.append(block)
                got.append(block)
            if not was_whole and self.is_whole(content):
                self.replace_tail(content)
        for pool, run in zip(self.pools, runs, strict=True):
            if run:
                self._tell(request, pool, run)
        request.offered = max(first, computed)
        for pool in self.pools:
            self.mark_reused(request, pool, range(first, reused))
        self.counts["published_blocks"] += len(stored[self.pools.index(self.lead)])
        return stored

    def _tell(self, request: Request, pool: Pool, run: list[int]) -> None:
        """Tells of blocks that a group got, behind the one before them: of states, the last that it has."""
        contents = [request.content(block, self.page_size) for block in range(run[-1] + 1)]
        before = contents[: run[0]]
        if isinstance(pool.kind, Recurrent):
            before = [content for content in before if content in pool.tree]
        parent = before[-1] if before else None
        priority = pool.priority[pool.tree[contents[-1]]]
        self.told.stored(self.pools.index(pool), parent, contents[run[0] :], priority)
        run.clear()

    def _offers(self, request: Request, pool: Pool, block: int) -> bool:
        """Whether the page of a block is for others too: of states the snapshots are."""
        if isinstance(pool.kind, Recurrent):
            return pool.kind.keeps((block + 1) * self.page_size, request.context, self.page_size)
        return not isinstance(pool.kind, Lasting)

    def _meet(self, request: Request, pool: Pool, row: list[int], block: int, kept: Kept | None) -> None:
        """The request has a page for a block that is stored."""
        page, twin = row[block], pool.tree[request.content(block, self.page_size)]
        self.retain(pool, twin, kept)
        if twin == page:  # stored by a request that shares it
            return
        takes_one_more = pool.is_idle(twin) and not pool.is_unshared(page)
        if self.on_duplicate == "adopt" and not pool.would_open(twin) and not takes_one_more:
            self.counts["adopted_blocks"] += 1
            pool.hold(twin)
            row[block] = twin
            pool.let_go(page)
        else:
            self.counts["private_blocks"] += 1
            request.private.add(block)

    def is_remembered(self, content: Content) -> bool:
        """Whether the block is stored, or was and is not forgotten.

        It is not while a block below it is stored, a request has a page of its own for it, or, where no group
        keeps all blocks, a request goes on from it.
        """
        namespace, tokens = content
        return any(
            other == namespace and below[: len(tokens)] == tokens for other, below in self._remembered()
        )

    def _remembered(self) -> Iterator[Content]:
        for pool in self.pools:
            yield from pool.tree
        for request in self.requests.values():
            if not request.outdated:
                for block in request.private:
                    yield request.content(block, self.page_size)
                if request.offered and not self.lead.keeps_all:
                    yield request.content(request.offered - 1, self.page_size)

    def blocks_of(self, request: Request, pool: Pool) -> list[int | None]:
        """The page that stores each block that the request offered or found; None where there is none."""
        contents = [request.content(block, self.page_size) for block in range(request.offered)]
        return [pool.tree.get(content) for content in contents]

    # How long

    def retain(self, pool: Pool, page: int, kept: Kept | None) -> None:
        if kept is not None:
            before = pool.priority[page]
            pool.retain(page, *kept)
            self.told.updated(self.pools.index(pool), pool.stored[page], before, kept.priority)

    def mark_reused(self, request: Request, pool: Pool, blocks: Collection[int]) -> None:
        """These of the request's blocks were asked for again; where all are needed, so were those above."""
        if pool.keeps_all and blocks:
            blocks = range(max(blocks) + 1)
        pages = self.blocks_of(request, pool)
        pool.reuse(page for block in blocks if (page := pages[block]) is not None)

    def tell_time(self, now: float) -> None:
        for group, pool in enumerate(self.pools):
            for page, before in pool.tell_time(now):
                if not self.is_tail(pool.stored[page]):
                    self.told.updated(group, pool.stored[page], before, pool.default)

    def resume_soon(self, names: Sequence[object], priority: int, seconds: float | None) -> None:
        """Their stored blocks are kept at this priority, but for those that are kept better already."""
        limit = None if seconds is None else Limit(seconds, after_release=True)
        for request in self._current(names):
            for pool in self.pools:
                for page in self.blocks_of(request, pool):
                    if page is not None and not self._kept_better(pool, page, priority, seconds):
                        self.retain(pool, page, Kept(priority, limit))

    def _kept_better(self, pool: Pool, page: int, priority: int, seconds: float | None) -> bool:
        """Whether its priority is higher already, or the same for at least as long from now."""
        limit, now = pool.limits.get(page), pool.now
        end = inf if limit is None else limit.seconds + (now if limit.after_release else 0)
        wanted = inf if seconds is None else now + seconds
        return (pool.priority[page], end) >= (priority, wanted)

    def session_done(self, names: Sequence[object]) -> None:
        """Blocks that no other session shares go first, from the last one up to the first that one does."""
        for name in names:
            self.requests[name].over |= not self.requests[name].outdated
        for request in self._current(names):
            namespace, below = request.namespace, None
            for block in reversed(range(request.offered)):
                content = request.content(block, self.page_size)
                end = len(content[1])
                children = {
                    other[: end + self.page_size]
                    for space, other in self._remembered()
                    if space == namespace and len(other) > end and other[:end] == content[1]
                }
                if children - {below} or self._is_shared(request, block):
                    break
                for pool in self.pools:
                    if content in pool.tree:
                        self.retain(pool, pool.tree[content], Kept(0))
                below = content[1]

    def _is_shared(self, request: Request, block: int) -> bool:
        """Whether in some group another session holds the stored page, or the request a page beside it."""
        content = request.content(block, self.page_size)
        for pool, row in zip(self.pools, request.rows, strict=True):
            own = row[block] if pool.has_blocks or (block < len(row) and row[block] in pool.stored) else NULL
            stored = pool.tree.get(content)
            if own not in (NULL, stored) or (stored and pool.references[stored] > bool(own)):
                return True
        return False

    def _current(self, names: Sequence[object]) -> list[Request]:
        return [self.requests[name] for name in names if not self.requests[name].outdated]

    # Kept and forgotten on purpose

    def pin(self, number: int, name: object) -> None:
        """Keeps the request's stored blocks; where all are needed, as far as they follow each other."""
        request = self.requests[name]
        self.pins[number] = []
        for pool in self.pools:
            held: dict[int, int] = {}
            for block, page in enumerate([] if request.outdated else self.blocks_of(request, pool)):
                if page is not None:
                    held[block] = page
                    pool.hold(page)
                elif pool.keeps_all:
                    break
            self.pins[number].append(held)

    def unpin(self, number: int) -> None:
        for pool, held in reversed(list(zip(self.pools, self.pins.pop(number), strict=True))):
            for block in release_order(pool.kind, max(held, default=-1) + 1, self.page_size):
                if block in held:
                    pool.let_go(held[block])

    def truncate_prefix(
        self, namespace: object, tokens: Sequence[int], orders: Sequence[Sequence[int]]
    ) -> int:
        """Forgets the idle blocks below the full blocks of `tokens`.

        `orders` are those of the idle pages afterwards. Blocks go before those that they follow; the rest is
        the manager's to choose.
        """
        self.told.begin_call()
        prefix = tuple(tokens[: len(tokens) // self.page_size * self.page_size])
        forgotten = set[Content]()
        belows = [self._idle_below(pool, namespace, prefix) for pool in self.pools]
        for group, (pool, below, order) in enumerate(zip(self.pools, belows, orders, strict=True)):
            loose = len(pool.loose)
            gone = [below[page] for page in order[loose : loose + len(below)]]
            for index, content in enumerate(gone):
                assert self.is_tail(content) or not any(
                    later[0] == namespace and later[1][: len(content[1])] == content[1]
                    for later in gone[index + 1 :]
                )
                if not self.is_tail(content):
                    self.told.removed(group, content)
                pool.forget(pool.tree[content])
            forgotten.update(content for content in gone if not self.is_tail(content))
        self.counts["truncated_blocks"] += len(forgotten)
        return len(forgotten)

    def _idle_below(self, pool: Pool, namespace: object, prefix: Sequence[Token]) -> dict[int, Content]:
        """Pages that nobody holds with what they store; of tails, those that nobody holds in any group."""
        return {
            page: content
            for content, page in pool.tree.items()
            if content[0] == namespace and len(content[1]) > len(prefix)
            if content[1][: len(prefix)] == prefix and page in pool.idle
            if not self.is_tail(content)
            or all(self.pools[group].tree[content] in self.pools[group].idle for group in self.of_blocks)
        }

    def reset(self, orders: Sequence[Sequence[int]]) -> None:
        """Forgets every block; requests that hold pages publish and hit no more until they start over.

        `orders` are those of the idle pages afterwards, which are the manager's to choose.
        """
        self.counts["reset_blocks"] += len(self.blocks_in(self.lead))
        self.counts["resets"] += 1
        for group, (pool, order) in enumerate(zip(self.pools, orders, strict=True)):
            pool.forget_all(order)
            self.told.cleared(group)
        for request in self.requests.values():
            request.outdated = request.outdated or request.holds_pages or request.load is not None
