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


class Part(NamedTuple):
    """The first tokens of a block, which a request goes on from."""

    content: Content
    run: int
    takes_over: bool
    """The request gets the block's own pages, and the block is no more; else copies of them."""


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
    """Blocks on the way from another tier: from number `first` up to `end`."""

    copy: int
    first: int
    end: int
    pages: list[dict[int, int]]
    """Of each group: the page of each block that it needs, loaded or on the device before."""
    rests: list[list[int]]
    """Of each group: pages for what follows them."""
    spare: list[list[int]]
    """Of each group: pages that are free when it has ended."""
    loaded: int
    """Pages that come from the tier."""
    gain: int
    """Tokens that need no forward once it has landed."""


class Rest(NamedTuple):
    """What a request holds at most from now to its end."""

    key: object
    """It is asked again when this is another."""
    most: list[int]
    """Pages of each group."""


@dataclass
class Request:
    """A claimed request. Lengths are tokens."""

    name: object
    namespace: object
    tokens: list[Token]
    rows: list[list[int]]
    """For each group the page of each block, or NULL where the group does not need it any more."""
    no_read: bool = False
    no_store: bool = False
    drafts: int = 0
    retention: Retention | None = None
    encoder: int = 0
    """Tokens that an encoder made for it."""
    prompt: int = 0
    """Tokens that it was claimed with, as far as they are left."""
    context: int = 0
    """Tokens that are computed before the first is generated: the prompt, or all that a preemption took."""
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
    over: bool = False
    """Its session is over: of a block that it has not filled nothing is kept."""
    load: Load | None = None
    load_failed: bool = False
    most_new: int | None = None
    """Tokens that it is said to generate at most."""
    bound: int | None = None
    """Tokens of its forwards at most, by the last word."""
    rest: "Rest | None" = None
    """What it will hold, as far as that was asked."""

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

    @property
    def holds_pages(self) -> bool:
        return any(self.rows)

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
        child.rows = [row[: -(-processed // page_size)] for row in self.rows]
        child.private = set(self.private)
        child.cached -= self.load.gain if self.load else 0
        child.load_failed = child.over = False
        child.outdated = self.outdated and child.holds_pages
        child.bound = child.rest = None
        return child


@dataclass
class Plan:
    """What `alloc` will do for one request."""

    request: Request
    end: int
    """Blocks of the prefix that the request goes on from; 0 is no hit."""
    start: int
    active: int
    drafts: int
    placeholder: bool
    missed: int
    """At first admission: blocks that could have been reused and were not there."""
    why: str | None
    """Why the first of them was not, if the cache knows it."""
    load: int
    """Blocks to load, and the first of them."""
    first_load: int
    reach: int = 0
    """One past the last token that the forward, its drafts and the drafter may write."""
    part: Part | None = None
    bound: int | None = None
    """Most tokens that it may compute, by the caller's word."""
    # For each group:
    sources: list[int] = field(default_factory=list)
    """The pages that the part is copied from, once they are claimed."""
    hits: list[dict[int, int]] = field(default_factory=list)
    """The pages of its blocks that are needed, behind those that were offered."""
    given_back: list[list[int]] = field(default_factory=list)
    """Pages of the request's own that it does not need after the hit, in this order."""
    fresh: list[int] = field(default_factory=list)
    """Pages to take: for the load and the rest of the prompt, or for the forward."""
    rest: list[int] = field(default_factory=list)
    """Of those behind a load's, how many it needs if it lands."""
    bridge: list[dict[int, int]] = field(default_factory=list)
    """Stored pages that a load leads over, by block."""
    copied: list[bool] = field(default_factory=list)
    """Whether others may read the page that the first token goes to: the request gets a copy of it."""

    def held(self, group: int) -> list[int]:
        """Stored pages that it holds: hits, and those that a load leads over."""
        return [*self.hits[group].values(), *self.bridge[group].values()]

    def taken(self, group: int) -> int:
        """Pages to take, also for copies."""
        return self.fresh[group] + self.copied[group]
