"""What the model knows of one request, and what it plans for it."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from model.pool import Content, Limit

Token = int | None
"""A token id, or None while the step that samples it is still out."""


class NoRoom(Exception):
    """The batch does not fit now; `name` is the first request that did not."""

    def __init__(self, name: object) -> None:
        super().__init__(name)
        self.name = name


class NeverRoom(NoRoom):
    """The request needs more pages than the pool has."""


class Step(NamedTuple):
    """One forward of one request: it computes the KV of tokens [start, start + active), and drafts behind."""

    number: int
    start: int
    active: int
    drafts: int = 0
    live: bool = True

    @property
    def end(self) -> int:
        return self.start + self.active


class Kept(NamedTuple):
    """How long a block is kept: a priority, and when that ends."""

    priority: int
    limit: Limit | None = None


@dataclass(frozen=True)
class Retention:
    """What a request says of its blocks.

    `ranges` are (first token, one past the last, what holds for blocks that begin there); `decode` is for
    generated blocks.
    """

    ranges: tuple[tuple[int, int, Kept], ...]
    decode: Kept

    def of(self, token: int, prompt: int) -> Kept | None:
        """What holds for the block that begins at `token`."""
        if token >= prompt:
            return self.decode
        return next((kept for start, end, kept in self.ranges if start <= token < end), None)


@dataclass
class Load:
    """Blocks on the way from another tier: from number `first` on, one a page."""

    copy: int
    first: int
    pages: list[int]
    rest: list[int]
    """Pages for what follows them in the prompt."""
    gain: int
    """Tokens that need no forward once it has landed."""


@dataclass
class Request:
    """A claimed request. Lengths are tokens, `row` is the page of each block."""

    name: object
    namespace: object
    tokens: list[Token]
    no_read: bool = False
    no_store: bool = False
    drafts: int = 0
    retention: Retention | None = None
    prompt: int = 0
    """Tokens that it was claimed with, as far as they are left."""
    context: int = 0
    """Tokens that are computed before the first is generated: the prompt, or all that a preemption took."""
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
    admitted: bool = False
    load: Load | None = None
    load_failed: bool = False

    def __post_init__(self) -> None:
        self.prompt = self.context = len(self.tokens)

    @property
    def known(self) -> list[Token]:
        return [token for token in self.tokens if token is not None]

    @property
    def position(self) -> int:
        """Tokens that have KV once every step that is out has run, if no draft is right."""
        return max([self.processed, *(step.end for step in self.live)])

    @property
    def live(self) -> list[Step]:
        return [step for step in self.out if step.live]

    def content(self, block: int, page_size: int) -> Content:
        return self.namespace, tuple(self.tokens[: (block + 1) * page_size])

    def kept(self, block: int, page_size: int) -> Kept | None:
        """What the request says of one of its blocks, if it says anything."""
        if self.retention is None:
            return None
        return self.retention.of(block * page_size, self.prompt)

    def fork(self, name: object, page_size: int) -> "Request":
        """A request with what this one has computed and knows; steps out and loads stay the parent's."""
        known = self.known
        processed = min(self.processed, len(known))
        child = replace(self, name=name, tokens=known, processed=processed, out=[], load=None)
        child.prompt, child.context = self.prompt, self.context
        child.row = self.row[: -(-processed // page_size)]
        child.private = set(self.private)
        child.cached -= self.load.gain if self.load else 0
        child.load_failed = False
        child.outdated = self.outdated and bool(child.row)
        return child


@dataclass
class Plan:
    """What `alloc` will do for one request."""

    request: Request
    hits: list[int]
    """Pages for the blocks behind those that were offered."""
    start: int
    active: int
    drafts: int
    placeholder: bool
    missed: int
    """At first admission: blocks that could have been reused and were not there."""
    load: int
    """Blocks to load, and the first of them."""
    first_load: int
    fresh: int
    """Pages to take: for the load and the rest of the prompt, or for the forward."""
    copied: bool = False
    """Others may read the page that the first token goes to: the request gets a copy of it."""

    @property
    def replaced(self) -> list[int]:
        """Pages of the request's own that its hits take the place of."""
        offered = self.request.offered
        return self.request.row[offered : offered + len(self.hits)]
