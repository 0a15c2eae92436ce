"""What the model tells of its cache, in the order in which it happens."""

from typing import NamedTuple

from model.pool import Content


class Stored(NamedTuple):
    """Consecutive blocks of one prefix can be hit from now on."""

    blocks: tuple[Content, ...]
    priority: int


class Removed(NamedTuple):
    """Blocks cannot be hit any more."""

    blocks: tuple[Content, ...]


class Updated(NamedTuple):
    """A stored block has another priority: the old, the new."""

    block: Content
    old: int
    new: int


class Cleared(NamedTuple):
    """No block is left."""


Event = Stored | Removed | Updated | Cleared


class Told:
    """The events of one cache; the one that tells of its making is counted and not listed."""

    def __init__(self) -> None:
        self.count = 1
        self.new: list[Event] = []
        """Those that nobody has taken yet."""
        self.joins = False
        """Whether a block that goes joins the newest event: it was of the same call, and of blocks that went."""

    def begin_call(self) -> None:
        self.joins = False

    def stored(self, blocks: list[Content], priority: int) -> None:
        self._add(Stored(tuple(blocks), priority))

    def removed(self, block: Content) -> None:
        if self.joins and isinstance(self.new[-1], Removed):
            self.new[-1] = Removed((*self.new[-1].blocks, block))
        else:
            self._add(Removed((block,)))
            self.joins = True

    def updated(self, block: Content, old: int, new: int) -> None:
        if old != new:
            self._add(Updated(block, old, new))

    def cleared(self) -> None:
        self._add(Cleared())

    def take(self) -> list[Event]:
        events, self.new = self.new, []
        self.joins = False
        return events

    def _add(self, event: Event) -> None:
        self.new.append(event)
        self.count += 1
        self.joins = False
