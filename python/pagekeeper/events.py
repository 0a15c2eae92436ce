"""What a cache stores and forgets, as events, and an index that routers build from them.

A cache made with `event_buffer_max_size` records events; `PagedKVCacheManager.get_latest_events` takes them.
Ids are gapless. Whoever sees a gap has missed events that the full buffer dropped, asks for
`PagedKVCacheManager.event_snapshot`, and goes on with later ids::

    index = BlockIndex()
    if not index.apply(kv.get_latest_events()):
        index.apply_snapshot(kv.event_snapshot())

Each group of layers is told of by itself, because groups lose blocks apart: a window those that it has
passed, a group of states all but its snapshots. Groups have numbers, in the order of the cache's parameters,
and their first events say of which kind they are.

A block lies on tiers: the device (0), host memory (1), disk (2). It is told of by its nearest copy. `Stored`
is for one that was nowhere, `Updated` for one whose nearest copy is on another tier from now on, `Removed`
for one whose last copy is gone. Tiers of a connector in Python, or of others' stores, are not told of.

Blocks are named by the first 8 bytes of their hash, as a big-endian number. Salts and adapters are in the
hash, so an index needs no namespaces; the salt itself is never told. Every manager has a stream of its own:
one that starts again is another stream, for a new index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from pagekeeper.params.groups import (
    ChunkedLocal,
    FullAttention,
    GroupKind,
    KVCacheGroupId,
    Recurrent,
    SlidingWindow,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BlockIndex",
    "Cleared",
    "Created",
    "Event",
    "EventSnapshot",
    "Removed",
    "Stored",
    "Updated",
    "block_key",
]


@dataclass(frozen=True, slots=True)
class _Event:
    """What every event says.

    Attributes:
        id: counted from 0 without gaps; in a snapshot the id of the newest event that it includes.
        dp_rank: the data-parallel replica.
        group: the number of the group of layers.
        window: tokens of the group's window or chunk; None for kinds that have none.
    """

    id: int
    dp_rank: int
    group: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Created(_Event):
    """The cache was made: the first events, one a group.

    Attributes:
        id: see `Stored`, as `dp_rank`, `group` and `window`.
        page_size: tokens a block.
        pages: pages of each tier that the group can use, the device first, then host memory and disk, if they
            are there. Groups that share memory can use as many only while the others use none.
        kind: which blocks the group's layers read.
    """

    page_size: int
    pages: tuple[int, ...]
    kind: GroupKind


@dataclass(frozen=True, slots=True)
class Stored(_Event):
    """The group has consecutive blocks of one prefix from now on, which it had on no tier.

    Attributes:
        id: counted from 0 without gaps; in a snapshot the id of the newest event that it includes.
        dp_rank: the data-parallel replica, 0.
        group: the number of the group of layers, from 0, in the order of the parameters.
        window: tokens of the group's window or chunk; None for kinds that have none.
        parent_hash: hash of the block before the first one, which may be evicted; None at the start of a
            prefix. Of a group of states: hash of the last snapshot before it that the group has, None without
            one, because the blocks between are none of its.
        first_block: number of the first block in its prefix, from 0.
        hashes: one a block.
        token_ids: int32 [blocks * page_size], token overrides applied; read-only. Not compared: equal hashes
            stand for equal tokens. [0] of blocks that were on disk before the start and whose extra keys were
            too long to be kept there.
        extra_keys: (place of the block in `hashes`, the bytes that are hashed with its tokens) of each block
            that multimodal items, prompt embeddings, ids or overrides beyond int32 of tokens touch.
        priority: retention priority, 0 (evicted first) to 100.
        tier: the nearest that has them: 0 is the device, 1 host memory, 2 disk.
        lora_id: the adapter that computed the blocks; None is the base model.
    """

    parent_hash: int | None
    first_block: int
    hashes: tuple[int, ...]
    token_ids: NDArray[np.int32] = field(compare=False)
    extra_keys: tuple[tuple[int, bytes], ...]
    priority: int
    tier: int
    lora_id: str | int | None

    @property
    def page_size(self) -> int:
        """Tokens a block; 0 where they are not known."""
        return len(self.token_ids) // len(self.hashes)


@dataclass(frozen=True, slots=True)
class Removed(_Event):
    """The group has lost blocks: they are on no tier any more.

    Attributes:
        id: see `Stored`, as `dp_rank`, `group` and `window`.
        hashes: at most 1,024, in the order in which the blocks went.
    """

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Updated(_Event):
    """A block that the group has changed.

    Attributes:
        id: see `Stored`, as `dp_rank`, `group` and `window`.
        block_hash: the block's hash.
        priority: (old, new) retention priority; None when it is as before.
        tier: (old, new) nearest tier; None when it is as before.
    """

    block_hash: int
    priority: tuple[int, int] | None
    tier: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Cleared(_Event):
    """The group has no block left, on no tier: the cache was reset.

    Attributes:
        id: see `Stored`, as `dp_rank`, `group` and `window`.
    """


Event: TypeAlias = Created | Stored | Removed | Updated | Cleared
"""One entry of a cache's stream."""


@dataclass(frozen=True, slots=True)
class EventSnapshot:
    """What a cache holds, as the events that lead there.

    Attributes:
        last_event_id: id of the newest event that the snapshot includes; -1 when none was ever recorded.
        events: `Created` of each group, then `Stored` of every block that the first group has, parents before
            children, of the second, and so on.
    """

    last_event_id: int
    events: tuple[Event, ...]


class _Group:
    """What an index knows of a group: its kind, and the nearest tier of each of its blocks."""

    __slots__ = ("kind", "page_size", "tiers")

    def __init__(self, kind: GroupKind, page_size: int) -> None:
        self.kind = kind
        self.page_size = page_size
        self.tiers: dict[int, int] = {}

    def up_to(self, tier: int | None) -> Container[int]:
        """The hashes of its blocks on tiers up to one; None for all."""
        if tier is None:
            return self.tiers
        return {key for key, nearest in self.tiers.items() if nearest <= tier}

    def longest_hit(self, keys: Sequence[int], held: Container[int]) -> int:
        """Blocks of the longest prefix of a prompt that the group can go on from with these blocks."""
        sinks = -(-self.kind.sink_tokens // self.page_size) if isinstance(self.kind, SlidingWindow) else 0
        hit = sum(1 for _ in takewhile(held.__contains__, keys[:sinks]))
        if hit == min(sinks, len(keys)):
            hit = len(keys)
        while hit:
            needed = range(hit - 1, self._first_needed(hit * self.page_size) - 1, -1)
            missing = next((block for block in needed if keys[block] not in held), None)
            if missing is None:
                break
            hit = missing  # a longer prefix that does without it was no hit
        return hit

    def _first_needed(self, position: int) -> int:
        """From this block on the token at a position reads all, its sinks apart."""
        match self.kind:
            case SlidingWindow(window_size=tokens):
                return max(0, position + 1 - tokens) // self.page_size
            case ChunkedLocal(chunk_size=tokens):
                return position // tokens * tokens // self.page_size
            case Recurrent():
                return (position - 1) // self.page_size
            case FullAttention():
                return 0
            case _:  # nothing of a prompt
                return position // self.page_size


class BlockIndex:
    """The blocks that one cache holds, known from its events alone.

    >>> index = BlockIndex()
    >>> index.apply([Removed(7, 0, 0, None, (1,))])  # the first seven were missed
    False
    >>> index.apply_snapshot(EventSnapshot(7, ()))
    >>> index.match_length([]), index.last_event_id
    (0, 7)
    """

    __slots__ = ("_groups", "_last")

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._last = -1

    @property
    def last_event_id(self) -> int:
        """Id of the newest event that the index includes; -1 for none."""
        return self._last

    def apply(self, events: Iterable[Event]) -> bool:
        """Brings the index up to date. Events that it includes already change nothing.

        Returns:
            True, or False at a gap: the events from there on are not applied, now or later, until
            `apply_snapshot` has closed it.

        Raises:
            TypeError: what is no event, as a message that was not read; those before it are applied.
        """
        for event in events:
            if not isinstance(event, _Event):
                raise TypeError(f"events: got {type(event).__name__}; give events of one cache")
            if event.id > self._last + 1:
                return False
            if event.id == self._last + 1:
                self._hold(event)
                self._last = event.id
        return True

    def apply_snapshot(self, snapshot: EventSnapshot) -> None:
        """Starts over from a snapshot, unless the index is newer.

        Raises:
            TypeError: no snapshot.
        """
        if not isinstance(snapshot, EventSnapshot):
            raise TypeError(f"snapshot: got {type(snapshot).__name__}; must be an EventSnapshot")
        if snapshot.last_event_id < self._last:
            return
        self._groups.clear()
        for event in snapshot.events:
            self._hold(event)
        self._last = snapshot.last_event_id

    def match_length(self, hashes: Iterable[bytes | int], tier: int | None = None) -> int:
        """Leading blocks of a prompt that a request would reuse: those that every group can go on from.

        A cache does not reuse the block with a prompt's last token: leave its hash out to get what the cache
        would answer. Where no group needs the last block of a prefix, as between two chunks of a model
        without other layers, the cache may go on from more.

        Args:
            hashes: the hashes of the prompt's blocks in order, as bytes from `hash_blocks` or as numbers,
                made with the cache's `page_size`, `kv_hash_algo` and `hash_seed`: others match nothing.
            tier: the farthest tier whose blocks count, 0 for the device alone; None for all. With a tier it
                takes longer the larger the index is.

        Raises:
            ValueError: bytes that are no hash.
        """
        groups = [(group, group.up_to(tier)) for group in self._groups.values()]
        keys: Iterator[int] = map(block_key, hashes)
        if whole := [held for group, held in groups if isinstance(group.kind, FullAttention)]:
            keys = takewhile(lambda key: all(key in held for held in whole), keys)
        found = list(keys)
        while found and not any(found[-1] in held for _, held in groups):
            found.pop()  # a group that needs none of these would go on from anywhere
        others = [(group, held) for group, held in groups if not isinstance(group.kind, FullAttention)]
        before = -1
        while before != len(found):  # what one group does without another may need
            before = len(found)
            for group, held in others:
                del found[group.longest_hit(found, held) :]
        return len(found)

    def hashes(self, group: int | None = None, tier: int | None = None) -> frozenset[int]:
        """The hashes of the blocks that a group has.

        Args:
            group: its number; None for all blocks that any group has.
            tier: the nearest tier that has them: 0 is the device, 1 host memory, 2 disk; None for any.
        """
        groups = [known.tiers for number, known in self._groups.items() if group in (None, number)]
        if tier is None:
            return frozenset().union(*groups)
        return frozenset(key for known in groups for key, nearest in known.items() if nearest == tier)

    def __len__(self) -> int:
        """Blocks that any group has."""
        groups = list(self._groups.values())
        return len(groups[0].tiers if len(groups) == 1 else self.hashes())

    def _hold(self, event: Event) -> None:
        match event:
            case Created():
                self._groups[event.group] = _Group(event.kind, event.page_size)
            case Stored():
                if event.group not in self._groups:
                    self._groups[event.group] = _Group(FullAttention(), event.page_size)
                self._groups[event.group].tiers.update(dict.fromkeys(event.hashes, event.tier))
            case Removed() if event.group in self._groups:
                for key in event.hashes:
                    self._groups[event.group].tiers.pop(key, None)
            case Updated(tier=(_, tier)) if event.group in self._groups:
                self._groups[event.group].tiers[event.block_hash] = tier
            case Cleared() if event.group in self._groups:
                self._groups[event.group].tiers.clear()


def block_key(block_hash: bytes | int) -> int:
    """The number that stands for a block in events.

    >>> block_key(bytes.fromhex("0000000000000102"))
    258

    Args:
        block_hash: 8 or 32 bytes from `hash_blocks`, or the number itself.

    Raises:
        ValueError: bytes of another length.
    """
    if isinstance(block_hash, bytes):
        if len(block_hash) not in {8, 32}:
            raise ValueError(f"block hash: {len(block_hash)} bytes given, must be 8 or 32")
        return int.from_bytes(block_hash[:8], "big")
    return block_hash


_KINDS: dict[str, type[Any]] = {
    "created": Created,
    "stored": Stored,
    "removed": Removed,
    "updated": Updated,
    "cleared": Cleared,
}


def from_native(rows: Sequence[tuple[Any, ...]], kinds: Sequence[GroupKind], dp_rank: int = 0) -> list[Event]:
    """Events of a replica, whose groups are of these kinds, from the native (id, group, kind, fields...)."""
    windows = [KVCacheGroupId.of(kind).window_size for kind in kinds]
    events = []
    for number, group, what, *fields in rows:
        if what == "created":
            fields.append(kinds[group])
        window = None if windows[group] < 0 else windows[group]
        events.append(_KINDS[what](number, dp_rank, group, window, *fields))
    return events
