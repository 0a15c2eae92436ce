"""The contract of the ledger for one group, in dictionaries and lists.

Written from the specification, for reading: no hashing, no tree, no links. What a block holds is named by its
namespace and every token up to its end; `tree` maps that name to the page that stores it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Token = int | None
"""A token id, or None while the step that samples it is still out."""

Content = tuple[object, tuple[Token, ...]]
"""A block's identity: (namespace, all tokens from the first to the block's last)."""


class NoRoom(Exception):
    """The batch does not fit now; `name` is the first request that did not."""

    def __init__(self, name: object) -> None:
        super().__init__(name)
        self.name = name


class NeverRoom(NoRoom):
    """The request needs more pages than the pool has."""


class Step(NamedTuple):
    """One forward of one request: it computes the KV of tokens [start, start + active)."""

    number: int
    start: int
    active: int
    live: bool = True

    @property
    def end(self) -> int:
        return self.start + self.active


@dataclass
class Request:
    """A claimed request. Lengths are tokens, `row` is the page of each block."""

    name: object
    namespace: object
    tokens: list[Token]
    prompt: int
    no_read: bool = False
    no_store: bool = False
    row: list[int] = field(default_factory=list)
    processed: int = 0
    cached: int = 0
    offered: int = 0
    """Leading blocks that were offered to the tree already, or came from it."""
    private: set[int] = field(default_factory=set)
    """Of these, blocks that stayed on a page of the request's own beside a stored twin."""
    out: list[Step] = field(default_factory=list)
    outdated: bool = False
    """The prefix cache was reset while this request held pages."""

    @property
    def known(self) -> list[Token]:
        return [token for token in self.tokens if token is not None]

    @property
    def position(self) -> int:
        """Tokens that have KV once every step that is out has run."""
        return max([self.processed, *(step.end for step in self.live)])

    @property
    def live(self) -> list[Step]:
        return [step for step in self.out if step.live]

    def content(self, block: int, page_size: int) -> Content:
        return self.namespace, tuple(self.tokens[: (block + 1) * page_size])


@dataclass
class Plan:
    """What `alloc` will do for one request."""

    request: Request
    hits: list[int]
    """Pages for the blocks behind those that were offered."""
    start: int
    active: int
    placeholder: bool
    copied: bool
    """A mover reads the page that the first token goes to: the request gets a copy of it."""
    fresh: int

    @property
    def replaced(self) -> list[int]:
        """Pages of the request's own that its hits take the place of."""
        offered = self.request.offered
        return self.request.row[offered : offered + len(self.hits)]


class Ledger:
    """Requests, pages and stored prefixes of one pool."""

    def __init__(
        self,
        page_size: int,
        pages: int,
        *,
        on_duplicate: str = "adopt",
        caching: bool = True,
        chunk: int | None = None,
        reserve: str = "chunk",
    ) -> None:
        self.page_size = page_size
        self.pages = pages
        self.on_duplicate = on_duplicate
        self.caching = caching
        self.chunk = chunk
        self.reserve = reserve
        self.requests: dict[object, Request] = {}
        self.tree: dict[Content, int] = {}
        self.stored: dict[int, Content] = {}
        self.references: dict[int, int] = {}
        self.pristine = list(range(1, pages + 1))
        self.loose: list[int] = []
        """Released pages that the tree does not know, least recently released first."""
        self.cached: list[int] = []
        """Released pages that the tree knows, least recently released first."""
        self.copies: dict[int, list[int]] = {}
        """Pages that a mover still reads, by copy."""
        self.page_copies: list[list[int]] = []
        """[source, destination] of each copy that goes before the next forward."""
        self.step_number = 0
        self.step_open = False
        self.hit_tokens = 0
        self.evictions = 0

    # The life of a request

    def claim(
        self,
        name: object,
        tokens: Iterable[int],
        namespace: object = None,
        *,
        no_read: bool = False,
        no_store: bool = False,
    ) -> None:
        log: list[Token] = list(tokens)
        self.requests[name] = Request(name, namespace, log, len(log), no_read, no_store)

    def alloc(self, names: Sequence[object], bounds: Sequence[int | None] | None = None) -> None:
        """Plans the next forward of every request, or raises and changes nothing.

        All hits of the batch are taken before the first page is handed out: no page of one request can be a
        hit of another.
        """
        bounds = bounds or [None] * len(names)
        plans = [self._plan(self.requests[name], bound) for name, bound in zip(names, bounds, strict=True)]
        room, hits, refusal = self.free, set[int](), None
        for plan in plans:
            if self._blocks(len(plan.request.tokens) + plan.placeholder) > self.pages:
                raise NeverRoom(plan.request.name)
            hits |= set(plan.hits).intersection(self.cached)
            room += len([page for page in plan.replaced if not self._copied(page)])
            room -= plan.fresh + plan.copied
            if room < len(hits):
                refusal = refusal or NoRoom(plan.request.name)
        # Pages that a later request's hits give back may be what an earlier one lacked: the sum decides.
        if refusal and room < len(hits):
            raise refusal
        if not self.step_open:
            self.open_step()
        for plan in plans:
            for page in plan.hits:
                self._take_reference(page)
        for plan in plans:
            self._splice(plan)
        for plan in plans:
            request = plan.request
            if plan.copied:
                self._copy_on_write(request, plan.start // self.page_size)
            request.row += [self._take_page() for _ in range(plan.fresh)]
            request.tokens += [None] * plan.placeholder
            request.out.append(Step(self.step_number, plan.start, plan.active))

    def open_step(self) -> None:
        self.step_number += 1
        self.step_open = True

    def close_step(self) -> None:
        """The next `alloc` opens another step."""
        self.step_open = False

    def update(self, name: object, token: int) -> None:
        """Fills the oldest placeholder, or appends."""
        tokens = self.requests[name].tokens
        if None in tokens:
            tokens[tokens.index(None)] = token
        else:
            tokens.append(token)

    def step(self, names: Sequence[object], new_tokens: Sequence[Sequence[int]]) -> None:
        """Delivers the oldest step of every request, then publishes what is full, known and computed."""
        for name, tokens in zip(names, new_tokens, strict=True):
            request = self.requests[name]
            done = request.out.pop(0)
            if not done.live:
                continue
            if done.number == self.step_number:
                self.close_step()
            # A hit may have moved beyond the end of this step meanwhile.
            request.processed = max(request.processed, done.end)
            for token in tokens:
                self.update(name, token)
        for name in names:
            self.publish(name)

    def release(self, names: Sequence[object]) -> None:
        for name in names:
            self._give_back(self.requests.pop(name))

    def preempt(self, names: Sequence[object]) -> None:
        """Gives up every page; what is known so far becomes the prompt of the next admission."""
        for name in names:
            request = self.requests[name]
            self._drop_steps(request)
            self._give_back(request)
            request.prompt = len(request.tokens)
            request.processed = request.cached = request.offered = 0
            request.outdated = False

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
        same = next((i for i, token in enumerate(rest) if token != request.tokens[i]), length)
        whole, keep = same // self.page_size, self._blocks(length)
        if same < length or not all(self._is_private(page) for page in request.row[whole:keep]):
            keep = whole
        self._give_back(request, keep, whole)
        request.tokens = list(rest)
        request.offered = min(request.offered, whole)
        request.processed = min(request.processed, length, keep * self.page_size)
        request.prompt = min(request.prompt, length)

    # The prefix cache

    def publish(self, name: object) -> None:
        request = self.requests[name]
        if not self.caching or request.no_store or request.outdated:
            return
        computed = min(request.processed, len(request.known)) // self.page_size
        for block in range(request.offered, computed):
            content, page = request.content(block, self.page_size), request.row[block]
            twin = self.tree.setdefault(content, page)
            if twin == page:
                self.stored[page] = content
            elif self.on_duplicate == "adopt":
                self._take_reference(twin)
                request.row[block] = twin
                self._drop_reference(page)
            else:
                request.private.add(block)
        request.offered = max(request.offered, computed)

    def match(self, namespace: object, tokens: Sequence[Token], held: int = 0) -> list[int]:
        """Pages of the longest stored prefix behind the first `held` blocks, which the request has.

        Whole blocks, and never the last token: it must be computed.
        """
        found: list[int] = []
        for end in range((held + 1) * self.page_size, len(tokens), self.page_size):
            page = self.tree.get((namespace, tuple(tokens[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def reset(self) -> None:
        """Forgets every prefix; requests that hold pages publish and hit no more until they start over."""
        self.tree.clear()
        self.stored.clear()
        self.loose += self.cached
        self.cached.clear()
        for request in self.requests.values():
            request.outdated = request.outdated or bool(request.row)

    # Copies in flight

    def start_copy(self, copy: int, pages: Iterable[int]) -> None:
        self.copies[copy] = list(pages)

    def finish_copy(self, copy: int) -> None:
        """Pages that only this copy held become free now, the tail of the sequence first.

        Idle blocks above such a page count as used until now.
        """
        for page in reversed(self.copies.pop(copy)):
            if page not in self.references and not self._copied(page):
                self._enqueue(page)
                if page in self.stored:
                    namespace, tokens = self.stored[page]
                    for end in range(len(tokens) - self.page_size, 0, -self.page_size):
                        if not self._refresh(self.tree.get((namespace, tokens[:end]))):
                            break

    # Pages

    @property
    def free(self) -> int:
        """Pages that a request may be given: never used, or held by nobody."""
        return len(self.pristine) + len(self.loose) + len(self.cached)

    def is_writable(self, page: int) -> bool:
        """Whether one request holds the page and nobody can find it."""
        return self.references.get(page) == 1 and page not in self.stored

    def _is_private(self, page: int) -> bool:
        return self.is_writable(page) and not self._copied(page)

    def _plan(self, request: Request, bound: int | None) -> Plan:
        position, offered = request.position, request.offered
        hits: list[int] = []
        if self.caching and position < request.prompt and not request.no_read and not request.outdated:
            hits = self.match(request.namespace, request.known, offered)
        if (offered + len(hits)) * self.page_size <= position:
            hits = []
        start = (offered + len(hits)) * self.page_size if hits else position
        placeholder = start == len(request.tokens)
        rest = len(request.tokens) + placeholder - start
        active = min(rest, bound or rest, self.chunk or rest)
        end = max(start + active, request.prompt if self.reserve == "prompt" else 0)
        held = max(len(request.row), offered + len(hits))
        fresh = max(0, self._blocks(end) - held)
        copied = any(self._copied(page) for page in request.row[start // self.page_size :][:1])
        return Plan(request, hits, start, active, placeholder, copied, fresh)

    def _copy_on_write(self, request: Request, block: int) -> None:
        source, request.row[block] = request.row[block], self._take_page()
        self._drop_reference(source)
        self.page_copies.append([source, request.row[block]])

    def _splice(self, plan: Plan) -> None:
        """Puts the hit pages, already referenced, into the row and gives the replaced back, last first."""
        request = plan.request
        if not plan.hits:
            return
        replaced = plan.replaced
        served = plan.start - request.position
        request.row[request.offered : request.offered + len(plan.hits)] = plan.hits
        request.offered += len(plan.hits)
        request.processed = plan.start
        for page in reversed(replaced):
            self._drop_reference(page)
        request.cached += served
        self.hit_tokens += served

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take_page(self) -> int:
        """Released pages the tree does not know go first, then unused ones, then stored ones."""
        if self.loose:
            page = self.loose.pop(0)
        elif self.pristine:
            page = self.pristine.pop(0)
        else:
            page = self.cached.pop(0)
            del self.tree[self.stored.pop(page)]
            self.evictions += 1
        self.references[page] = 1
        return page

    def _take_reference(self, page: int) -> None:
        if page in self.cached:
            self.cached.remove(page)
        self.references[page] = self.references.get(page, 0) + 1

    def _drop_reference(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0:
            del self.references[page]
            if not self._copied(page):
                self._enqueue(page)

    def _copied(self, page: int) -> bool:
        return any(page in pages for pages in self.copies.values())

    def _enqueue(self, page: int) -> None:
        (self.cached if page in self.stored else self.loose).append(page)

    def _refresh(self, page: int | None) -> bool:
        """Counts an idle stored page as used until now; whether it was one."""
        if page is None or page not in self.cached:
            return False
        self.cached.remove(page)
        self.cached.append(page)
        return True

    def _give_back(self, request: Request, keep: int = 0, whole: int = 0) -> None:
        """Drops the pages behind the first `keep`, and private twins behind `whole`, the tail first.

        Stored twins of private blocks count as used until now: no block is evicted before one below it.
        """
        for block in reversed(range(len(request.row))):
            if block >= keep:
                self._drop_reference(request.row.pop())
            if block in request.private and not request.outdated:
                self._refresh(self.tree.get(request.content(block, self.page_size)))
        request.private = {block for block in request.private if block < whole}

    def _drop_steps(self, request: Request) -> None:
        """Results of steps that are out will not count; tokens that only they could tell are gone.

        The step that is open has not run: it has no results to wait for.
        """
        ran = [step for step in request.out if step.number < self.step_number or not self.step_open]
        request.out = [step._replace(live=False) for step in ran]
        request.tokens = list(request.known)
