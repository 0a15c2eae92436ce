"""What the cache keeps and for how long: publication, retention, pins, and what it forgets on purpose."""

from collections import Counter
from collections.abc import Iterator, Sequence

from model.events import Told
from model.pool import Content, Limit, Pool
from model.requests import Kept, Request, Token


class Keeping:
    """The pool, the requests that use it, and the verbs that change what is stored."""

    def __init__(self, page_size: int, pages: int, *, priority: int, policy: str, on_duplicate: str) -> None:
        self.page_size = page_size
        self.on_duplicate = on_duplicate
        scan_resistant = {"priority_lru": False, "priority_slru": True}[policy]
        self.pool = Pool(page_size, pages, priority, scan_resistant=scan_resistant)
        self.requests: dict[object, Request] = {}
        self.pins: dict[int, list[int]] = {}
        self.told = Told()
        self.counts: Counter[str] = Counter()
        """By the names of the manager's metrics."""

    def match(self, namespace: object, tokens: Sequence[Token], held: int = 0) -> list[int]:
        """Pages of the longest stored prefix behind the first `held` blocks, which the request has.

        Whole blocks, and never the last token: it must be computed.
        """
        found: list[int] = []
        for end in range((held + 1) * self.page_size, len(tokens), self.page_size):
            page = self.pool.tree.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def store_computed(self, request: Request) -> list[int]:
        """Offers to the tree what is full, known and computed; gives the blocks that are new there."""
        computed = min(request.processed, len(request.known)) // self.page_size
        new: list[int] = []
        run: list[Content] = []
        priority = self.pool.default
        first = reused = request.offered
        for block in range(first, computed):
            content, page = request.content(block, self.page_size), request.row[block]
            kept = request.kept(block, self.page_size)
            if self.is_remembered(content):
                reused = block + 1
            twin = self.pool.tree.get(content)
            if twin is None:
                self.pool.store(content, page)
                if kept is not None:
                    self.pool.retain(page, *kept)
                follows = bool(new) and new[-1] == block - 1 and priority == self.pool.priority[page]
                if run and not follows:
                    self.told.stored(run, priority)
                    run = []
                run.append(content)
                priority = self.pool.priority[page]
                new.append(block)
                continue
            self.retain(twin, kept)
            if twin == page:  # stored by a request that shares it
                continue
            if self.on_duplicate == "adopt":
                self.counts["adopted_blocks"] += 1
                self.pool.hold(twin)
                request.row[block] = twin
                self.pool.let_go(page)
            else:
                self.counts["private_blocks"] += 1
                request.private.add(block)
        if run:
            self.told.stored(run, priority)
        request.offered = max(first, computed)
        if reused > first:
            self.mark_reused(request, reused)
        self.counts["published_blocks"] += len(new)
        return new

    def is_remembered(self, content: Content) -> bool:
        """Whether the block is stored, or was, and one below it is, or a request has it beside a stored twin."""
        namespace, tokens = content
        return any(
            other == namespace and below[: len(tokens)] == tokens for other, below in self._remembered()
        )

    def _remembered(self) -> Iterator[Content]:
        yield from self.pool.tree
        for request in self.requests.values():
            if not request.outdated:
                for block in request.private:
                    yield request.content(block, self.page_size)

    def blocks_of(self, request: Request) -> list[int | None]:
        """The page that stores each block that the request offered or found; None where it was evicted."""
        contents = [request.content(block, self.page_size) for block in range(request.offered)]
        return [self.pool.tree.get(content) for content in contents]

    # How long

    def retain(self, page: int, kept: Kept | None) -> None:
        if kept is not None:
            before = self.pool.priority[page]
            self.pool.retain(page, *kept)
            self.told.updated(self.pool.stored[page], before, kept.priority)

    def mark_reused(self, request: Request, end: int) -> None:
        """The request's block before `end` was asked for again, and so were those above it."""
        self.pool.reused.update(page for page in self.blocks_of(request)[:end] if page is not None)

    def tell_time(self, now: float) -> None:
        for page, before in self.pool.tell_time(now):
            self.told.updated(self.pool.stored[page], before, self.pool.default)

    def resume_soon(self, names: Sequence[object], priority: int, seconds: float | None) -> None:
        """Their stored blocks are kept at this priority at least."""
        limit = None if seconds is None else Limit(seconds, after_release=True)
        for request in self._current(names):
            for page in self.blocks_of(request):
                if page is not None and self.pool.priority[page] <= priority:
                    self.retain(page, Kept(priority, limit))

    def session_done(self, names: Sequence[object]) -> None:
        """Blocks that no other session shares go first, from the last one up to the first that one does."""
        for request in self._current(names):
            namespace, below = request.namespace, None
            for block, page in reversed(list(enumerate(self.blocks_of(request)))):
                tokens = request.content(block, self.page_size)[1]
                end = len(tokens)
                children = {
                    other[: end + self.page_size]
                    for space, other in self._remembered()
                    if space == namespace and len(other) > end and other[:end] == tokens
                }
                own = 0 if block in request.private else 1
                if page is None or children - {below} or self.pool.references[page] != own:
                    break
                self.retain(page, Kept(0))
                below = tokens

    def _current(self, names: Sequence[object]) -> list[Request]:
        return [self.requests[name] for name in names if not self.requests[name].outdated]

    # Kept and forgotten on purpose

    def pin(self, number: int, name: object) -> None:
        """Keeps the request's stored blocks as far as they follow each other."""
        request = self.requests[name]
        pages: list[int] = []
        for page in [] if request.outdated else self.blocks_of(request):
            if page is None:
                break
            pages.append(page)
            self.pool.hold(page)
        self.pins[number] = pages

    def unpin(self, number: int) -> None:
        for page in reversed(self.pins.pop(number)):
            self.pool.let_go(page)

    def truncate_prefix(self, namespace: object, tokens: Sequence[int], order: Sequence[int]) -> int:
        """Forgets the idle blocks below the full blocks of `tokens`.

        `order` is that of the idle pages afterwards. Blocks go before those that they follow; the rest of it
        is the manager's to choose.
        """
        self.told.begin_call()
        prefix = tuple(tokens[: len(tokens) // self.page_size * self.page_size])
        below = {
            page: content
            for content, page in self.pool.tree.items()
            if content[0] == namespace and len(content[1]) > len(prefix)
            if content[1][: len(prefix)] == prefix and page in self.pool.idle
        }
        loose = len(self.pool.loose)
        gone = [below[page] for page in order[loose : loose + len(below)]]
        for index, content in enumerate(gone):
            assert not any(
                later[0] == namespace and later[1][: len(content[1])] == content[1]
                for later in gone[index + 1 :]
            )
            self.told.removed(content)
            self.pool.forget(self.pool.tree[content])
        self.counts["truncated_blocks"] += len(below)
        return len(below)

    def reset(self, order: Sequence[int]) -> None:
        """Forgets every block; requests that hold pages publish and hit no more until they start over.

        `order` is that of the idle pages afterwards, which is the manager's to choose.
        """
        self.counts["reset_blocks"] += len(self.pool.tree)
        self.counts["resets"] += 1
        self.pool.forget_all(order)
        self.told.cleared()
        for request in self.requests.values():
            request.outdated = request.outdated or bool(request.row) or request.load is not None
