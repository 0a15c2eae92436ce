"""Caches of several groups of layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, Unpack, get_args

from pagekeeper.errors import shown
from pagekeeper.params.base import CommonArguments, CommonKVCacheParams, KVCacheParams
from pagekeeper.params.checks import finite_number, keep, parse_choice
from pagekeeper.params.groups import (
    ChunkedLocal,
    CrossAttention,
    GroupKind,
    Recurrent,
    Scratch,
    SlidingWindow,
)

__all__ = ["MemoryLayout", "MultiKVCacheParams", "parse_share_list", "parse_shares"]

MemoryLayout: TypeAlias = Literal["auto", "jenga", "paged"]


@dataclass(frozen=True, init=False)
class MultiKVCacheParams(CommonKVCacheParams, Mapping[str, KVCacheParams]):
    """One cache of several groups of layers: sliding and full, attention and states, target and draft.

    It is a mapping of their names to their parameters, in the order that they were given in. All groups have
    pages of as many tokens: block n of a request is the same tokens in each.

    Args:
        groups: the groups by name, or pairs of a name and a group.
        layout: "jenga" lets groups share one slab of memory, of which each takes what its requests need;
            "paged" gives each group memory of its own; "auto" is "jenga" for several groups.
        window_size_shares: how groups with memory of their own divide what is given in bytes: a number from 0
            to 1 for each group, groups of states first, then windows ascending, then those that read all
            tokens. They need not sum to 1. None is the environment's `PAGEKEEPER_WINDOW_SIZE_SHARES`
            ("0.4,0.6"), or equal shares.
        common: arguments that all groups have, as in `KVCacheParams`. What is given here holds for every
            group; what is not has to be equal in all of them.

    Raises:
        TypeError: an argument is unknown or missing.
        ValueError: a value is not allowed, or groups differ where they may not; the message names group and
            field.

    >>> from pagekeeper.params import MHAKVCacheParams, SlidingWindow
    >>> shape = dict(dtype="bfloat16", n_kv_heads=8, head_dim=128)
    >>> params = MultiKVCacheParams({
    ...     "full": MHAKVCacheParams(**shape, num_layers=10),
    ...     "sliding": MHAKVCacheParams(**shape, num_layers=50, kind=SlidingWindow(1024)),
    ... }, enable_prefix_caching=False)
    >>> params["sliding"].enable_prefix_caching
    False
    >>> params.bytes_per_token, params.bytes_per_token_kept  # 4,096 bytes a layer; 60 layers, and 10
    (245760, 40960)
    """

    groups: tuple[tuple[str, KVCacheParams], ...]
    layout: MemoryLayout
    window_size_shares: tuple[float, ...] | None

    def __init__(
        self,
        groups: Mapping[str, KVCacheParams] | Sequence[tuple[str, KVCacheParams]],
        *,
        layout: MemoryLayout = "auto",
        window_size_shares: Sequence[float] | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        named = [(name, _with(group, common, name)) for name, group in _pairs(groups)]
        first_name, first = named[0]
        shared = {field.name: getattr(first, field.name) for field in fields(CommonKVCacheParams)}
        for name, group in named[1:]:
            for field, value in shared.items():
                if getattr(group, field) != value:
                    raise ValueError(
                        f"groups[{name!r}].{field}={_told(field, group)}: must be as in "
                        f"groups[{first_name!r}], {_told(field, first)}; {field}=... beside groups sets all"
                    )
        super().__init__(**{**shared, **common})
        object.__setattr__(self, "groups", tuple(named))  # past the freeze
        keep(self, "layout", layout, parse_choice(get_args(MemoryLayout)))
        keep(self, "window_size_shares", window_size_shares, self._parse_shares)

    def __getitem__(self, name: str) -> KVCacheParams:
        for other, group in self.groups:
            if other == name:
                return group
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def by_window(self) -> tuple[str, ...]:
        """The names of the groups in the order of their windows: states first, what reads all tokens last."""
        return tuple(sorted(self, key=lambda name: _window(self[name].kind)))

    def _parse_shares(self, value: object) -> tuple[float, ...] | None:
        return None if value is None else parse_shares(value, self)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the KV of one token takes in all groups, while no window has passed it.

        What does not grow with a request is not counted: states, and the KV of an encoder.
        """
        return sum(g.bytes_per_token for g in self.values() if not isinstance(g.kind, CrossAttention))

    @property
    def bytes_per_token_kept(self) -> int:
        """Of `bytes_per_token` those that last as long as the request: of groups with full attention."""
        return sum(group.bytes_per_token_kept for group in self.values())

    @property
    def chunk_alignment_tokens(self) -> int:
        """Tokens at whose multiples all groups with states take snapshots; 0 if one takes none."""
        states = [group for group in self.values() if isinstance(group.kind, Recurrent)]
        return math.lcm(*(group.chunk_alignment_tokens for group in states)) if states else 0


def _pairs(groups: object) -> list[tuple[str, KVCacheParams]]:
    given = list(groups.items()) if isinstance(groups, Mapping) else groups
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(
            f"groups={shown(groups)}: must be a mapping of names to KVCacheParams, of one at least"
        )
    pairs: dict[str, KVCacheParams] = {}
    for pair in given:
        name, group = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
        if not isinstance(name, str) or not name:
            raise ValueError(f"groups: name {shown(name)} must be a str that is not empty")
        if not isinstance(group, KVCacheParams):
            raise ValueError(f"groups[{shown(name)}]: got {type(group).__name__}, must be KVCacheParams")
        if name in pairs:
            raise ValueError(f"groups[{shown(name)}]: given twice, names must differ")
        pairs[name] = group
    return list(pairs.items())


def parse_shares(value: object, groups: MultiKVCacheParams) -> tuple[float, ...]:
    """Shares of memory, one for each of `groups`.

    Raises:
        ValueError: something else; the message shows the groups.
    """
    try:
        shares = parse_share_list(value)
    except ValueError:
        shares = ()
    if len(shares) != len(groups):
        named = ", ".join(f"{name!r} ({groups[name].group_id})" for name in groups.by_window)
        raise ValueError(
            f"must be numbers from 0 to 1, one above 0 at least: one for each of the groups {named}, "
            "in this order"
        )
    return shares


def parse_share_list(value: object) -> tuple[float, ...]:
    """Shares of memory of groups that are not known yet.

    Raises:
        ValueError: no list of numbers from 0 to 1, or of nothing but 0.
    """
    shares = [math.nan]
    if isinstance(value, list | tuple) and value:
        shares = [finite_number(share) for share in value]
    if not all(0 <= share <= 1 for share in shares) or sum(shares) == 0:
        raise ValueError("must be a list of numbers from 0 to 1, of which one at least is above 0")
    return tuple(shares)


def _window(kind: GroupKind) -> float:
    """Tokens that a token reads: what groups are ordered by."""
    match kind:
        case Recurrent() | Scratch():
            return 0
        case SlidingWindow():
            return kind.window_size
        case ChunkedLocal():
            return kind.chunk_size
        case _:
            return math.inf


def _with(group: KVCacheParams, common: CommonArguments, name: str) -> KVCacheParams:
    """The group with what is given for all of them."""
    try:
        changes: dict[str, Any] = {**common}
        return replace(group, **changes) if changes else group
    except ValueError as error:
        raise ValueError(f"groups[{name!r}]: {error}") from error


def _told(field: str, params: KVCacheParams) -> str:
    """A field's value as messages tell it; a seed is a secret."""
    return "another seed" if field == "kv_hash_seed" else shown(getattr(params, field))
