"""Kinds of groups: which blocks of a request the layers of a group read, and so which pages they keep.

A model has one group of layers or several. The layers of a group read the same blocks, so that they share a
page a block; groups have pages of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from pagekeeper.params.checks import keep, parse_choice, parse_count, parse_flag, parse_length

__all__ = [
    "AttentionKind",
    "ChunkedLocal",
    "CrossAttention",
    "FullAttention",
    "GroupKind",
    "GroupType",
    "KVCacheGroupId",
    "Recurrent",
    "Scratch",
    "SlidingWindow",
    "StateKind",
]

GroupType: TypeAlias = Literal["full", "sliding_window", "chunked_local", "cross", "recurrent", "scratch"]


@dataclass(frozen=True)
class FullAttention:
    """Each token reads all tokens before it: a request keeps all of its blocks."""

    type: ClassVar[GroupType] = "full"


@dataclass(frozen=True)
class SlidingWindow:
    """Each token reads the newest tokens alone: pages whose tokens left the window are given back.

    Args:
        window_size: tokens that a token reads, itself included; from 1. A token at position p reads
            p - window_size + 1 to p.
        sink_tokens: leading tokens that every token reads besides. The pages that they touch are kept.

    Raises:
        ValueError: a number is out of range.
    """

    type: ClassVar[GroupType] = "sliding_window"
    window_size: int
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        keep(self, "window_size", self.window_size, parse_count)
        keep(self, "sink_tokens", self.sink_tokens, parse_length)


@dataclass(frozen=True)
class ChunkedLocal:
    """Each token reads its own chunk alone: pages of earlier chunks are given back.

    Args:
        chunk_size: tokens of a chunk, from 1. A token at position p reads p - p % chunk_size to p.

    Raises:
        ValueError: the number is out of range.
    """

    type: ClassVar[GroupType] = "chunked_local"
    chunk_size: int

    def __post_init__(self) -> None:
        keep(self, "chunk_size", self.chunk_size, parse_count)


@dataclass(frozen=True)
class CrossAttention:
    """Each token reads what an encoder made: pages for its tokens are taken once, and never more."""

    type: ClassVar[GroupType] = "cross"


@dataclass(frozen=True)
class Recurrent:
    """A request has one state, which each forward overwrites; a prefix is reused where a snapshot was taken.

    Args:
        snapshot_interval: tokens between two snapshots, a multiple of the page size. None takes none on the
            way.
        save_last_snapshot: whether a prompt leaves one more, at its last page boundary before its last token.

    Raises:
        ValueError: a value is not allowed.
    """

    type: ClassVar[GroupType] = "recurrent"
    snapshot_interval: int | None = None
    save_last_snapshot: bool = True

    def __post_init__(self) -> None:
        if self.snapshot_interval is not None:
            keep(self, "snapshot_interval", self.snapshot_interval, parse_count)
        keep(self, "save_last_snapshot", self.save_last_snapshot, parse_flag)


@dataclass(frozen=True)
class Scratch:
    """A request has one page for life, which is never reused: memory that kernels work in."""

    type: ClassVar[GroupType] = "scratch"


AttentionKind: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | CrossAttention
"""Kinds of groups whose pages hold keys and values, of `page_size` tokens each."""

StateKind: TypeAlias = Recurrent | Scratch
"""Kinds of groups whose pages hold one state each."""

GroupKind: TypeAlias = AttentionKind | StateKind


@dataclass(frozen=True)
class KVCacheGroupId:
    """What a group is called where groups of many models meet, as in events: its type and its window.

    Args:
        type: "full", "sliding_window", "chunked_local", "cross", "recurrent" or "scratch".
        window_size: tokens of the window or of the chunk; -1 for types that have none.

    Raises:
        ValueError: an unknown type, or a window where there is none or none where there is one.

    >>> str(KVCacheGroupId.of(SlidingWindow(1024, sink_tokens=4)))
    'sliding_window(1024)'
    """

    type: GroupType
    window_size: int = -1

    def __post_init__(self) -> None:
        keep(self, "type", self.type, parse_choice(get_args(GroupType)))
        if self.type in ("sliding_window", "chunked_local"):
            keep(self, "window_size", self.window_size, parse_count)
        elif self.window_size != -1:
            raise ValueError(f"window_size={self.window_size}: must be -1, a {self.type} group has no window")

    @classmethod
    def of(cls, kind: GroupKind) -> KVCacheGroupId:
        """The id of groups of a kind."""
        match kind:
            case SlidingWindow():
                return cls(kind.type, kind.window_size)
            case ChunkedLocal():
                return cls(kind.type, kind.chunk_size)
            case _:
                return cls(kind.type)

    def __str__(self) -> str:
        return self.type if self.window_size == -1 else f"{self.type}({self.window_size})"
