"""What the model tells of its cache, each group by its number, in the order in which it happens."""

from typing import NamedTuple

from model.pool import Content


class Stored(NamedTuple):
    """The group has consecutive blocks of one prefix from now on."""

    group: int
    parent: Content | None
    """The block before them that the event names."""
    blocks: tuple[Content, ...]
    priority: int


class Removed(NamedTuple):
    """The group has lost blocks."""

    group: int
    blocks: tuple[Content, ...]


class Updated(NamedTuple):
    """A block that the group has has another priority: the old, the new."""

    group: int
    block: Content
    old: int
    new: int


class Cleared(NamedTuple):
    """The group has no block left."""

    group: int


Event = Stored | Removed | Updated | Cleared


class Told:
    """The events of a cache of some groups; those that tell of its making are counted and not listed."""

    def __init__(self, groups: int) -> None:
        self.count = groups
        self.new: list[Event] = []
        """Those that nobody has taken yet."""
        self.joins = False
        """Whether a block that goes joins the newest event, if that is its group's: both are of one call."""

    def begin_call(self) -> None:
        self.joins = False

    def stored(self, group: int, parent: Content | None, blocks: list[Content], priority: int) -> None:
        self._add(Stored(group, parent, tuple(blocks), priority))

    def removed(self, group: int, block: Content) -> None:
        newest = self.new[-1] if self.joins else None
        if isinstance(newest, Removed) and newest.group == group:
            self.new[-1] = Removed(group, (*newest.blocks, block))
        else:
            self._add(Removed(group, (block,)))
            self.joins = True

    def updated(self, group: int, block: Content, old: int, new: int) -> None:
        if old != new:
            self._add(Updated(group, block, old, new))

    def cleared(self, group: int) -> None:
        self._add(Cleared(group))

    def take(self) -> list[Event]:
        events, self.new = self.new, []
        self.joins = False
        return events

    def _add(self, event: Event) -> None:
        self.new.append(event)
        self.count += 1
        self.joins = False
