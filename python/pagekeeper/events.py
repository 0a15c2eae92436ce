"""What a cache stores and forgets, as events, and an index that routers build from them.

A cache made with `event_buffer_max_size` records events; `PagedKVCacheManager.get_latest_events` takes them.
Ids are gapless. Whoever sees a gap has missed events that the full buffer dropped, asks for
`PagedKVCacheManager.event_snapshot`, and goes on with later ids::

    index = BlockIndex()
    if not index.apply(kv.get_latest_events()):
        index.apply_snapshot(kv.event_snapshot())

Blocks are named by the first 8 bytes of their hash, as a big-endian number. Salts and adapters are in the
hash, so an index needs no namespaces; the salt itself is never told. Every manager has a stream of its own:
one that starts again is another stream, for a new index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
        group: the group of layers.
        window: tokens that attention of the group sees; None for all.
    """

    id: int
    dp_rank: int
    group: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Created(_Event):
    """The cache was made: the first event of all.

    Attributes:
        id: see `Stored`, as `dp_rank`, `group` and `window`.
        page_size: tokens a block.
        pages: usable pages of each tier, the device first.
    """

    page_size: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored(_Event):
    """Consecutive blocks of one prefix can be hit from now on.

    Attributes:
        id: counted from 0 without gaps; in a snapshot the id of the newest event that it includes.
        dp_rank: the data-parallel replica, 0.
        group: the group of layers, 0.
        window: tokens that attention of the group sees; None for all.
        parent_hash: hash of the block before the first one, which may be evicted; None at the start of a
            prefix.
        first_block: number of the first block in its prefix, from 0.
        hashes: one a block.
        token_ids: int32 [blocks * page_size], token overrides applied; read-only. Not compared: equal hashes
            stand for equal tokens.
        extra_keys: (place of the block in `hashes`, the bytes that are hashed with its tokens) of each block
            that multimodal items, prompt embeddings, ids or overrides beyond int32 of tokens touch.
        priority: retention priority, 0 (evicted first) to 100.
        tier: 0 is the device, greater numbers are farther away.
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
        """Tokens a block."""
        return len(self.token_ids) // len(self.hashes)


@dataclass(frozen=True, slots=True)
class Removed(_Event):
    """Blocks cannot be hit any more.

    Attributes:
        id: see `Stored`, as `dp_rank`, `group` and `window`.
        hashes: at most 1,024, in the order in which the blocks went.
    """

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Updated(_Event):
    """A stored block changed.

    Attributes:
        id: see `Stored`, as `dp_rank`, `group` and `window`.
        block_hash: the block's hash.
        priority: (old, new) retention priority; None when it is as before.
        tier: (old, new) tier; None when it is as before.
    """

    block_hash: int
    priority: tuple[int, int] | None
    tier: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Cleared(_Event):
    """No block is left: the cache was reset.

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
        events: `Created`, then `Stored` of every cached block, parents before children.
    """

    last_event_id: int
    events: tuple[Event, ...]


class BlockIndex:
    """The blocks that one cache holds, known from its events alone.

    >>> index = BlockIndex()
    >>> index.apply([Removed(7, 0, 0, None, (1,))])  # the first seven were missed
    False
    >>> index.apply_snapshot(EventSnapshot(7, ()))
    >>> index.match_length([]), index.last_event_id
    (0, 7)
    """

    __slots__ = ("_hashes", "_last")

    def __init__(self) -> None:
        self._hashes: set[int] = set()
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
        """
        for event in events:
            if event.id > self._last + 1:
                return False
            if event.id == self._last + 1:
                self._hold(event)
                self._last = event.id
        return True

    def apply_snapshot(self, snapshot: EventSnapshot) -> None:
        """Starts over from a snapshot, unless the index is newer."""
        if snapshot.last_event_id < self._last:
            return
        self._hashes.clear()
        for event in snapshot.events:
            self._hold(event)
        self._last = snapshot.last_event_id

    def match_length(self, hashes: Iterable[bytes | int]) -> int:
        """Leading blocks of a prompt that the cache holds.

        A cache does not reuse the block with a prompt's last token: leave its hash out to get what the cache
        would answer.

        Args:
            hashes: the hashes of the prompt's blocks in order, as bytes from `hash_blocks` or as numbers,
                made with the cache's `page_size`, `kv_hash_algo` and `hash_seed`: others match nothing.

        Raises:
            ValueError: bytes that are no hash.
        """
        length = 0
        for block in hashes:
            if block_key(block) not in self._hashes:
                break
            length += 1
        return length

    def hashes(self) -> frozenset[int]:
        """The hashes of all blocks that the cache holds."""
        return frozenset(self._hashes)

    def __len__(self) -> int:
        return len(self._hashes)

    def _hold(self, event: Event) -> None:
        match event:
            case Stored(hashes=hashes):
                self._hashes.update(hashes)
            case Removed(hashes=hashes):
                self._hashes.difference_update(hashes)
            case Cleared():
                self._hashes.clear()


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


def from_native(rows: Sequence[tuple[Any, ...]], dp_rank: int = 0) -> list[Event]:
    """Events of one replica from what the native ledger gives: (id, kind, fields...)."""
    return [_KINDS[kind](number, dp_rank, 0, None, *fields) for number, kind, *fields in rows]
