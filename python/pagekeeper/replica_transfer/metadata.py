"""What two sides of a transfer tell each other of their caches before the first page: the handshake."""

from __future__ import annotations

from collections.abc import Mapping

from pagekeeper.dtypes import DType
from pagekeeper.errors import TransferMetadataError, TransferMismatchError, shown
from pagekeeper.params import (
    KVCacheGroupId,
    KVCacheParams,
    MultiKVCacheParams,
    PageLayout,
    PageRegion,
    whole_number,
)
from pagekeeper.replica_transfer.shards import GroupShards, check_alike

try:
    import msgspec
except ModuleNotFoundError as error:
    raise ImportError("msgspec is needed for a handshake: pip install 'pagekeeper[transfer]'") from error

__all__ = ["MAX_BYTES", "VERSION", "KVGroupMetadata", "KVRegionMetadata", "KVTransferEngineMetadata"]

VERSION = 1
"""Of the form that `KVTransferEngineMetadata.to_bytes` writes. Any change of a field is a new one."""

MAX_BYTES = 1 << 20
"""Bytes of the longest message that is read. A cache of a hundred layers takes a few thousand."""

_TYPE = "kv_transfer_engine_metadata"


class KVRegionMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some layers' bytes of one kind in a page of a shard: a `PageRegion` on the wire.

    Attributes:
        name: "kv", "kv_scales", "indexer_k", or the name of a state.
        layers: the layers of the group that it has.
        shape: stored elements of a page along each axis; the first is `layers`.
        dtype: name of a `DType`.
        offset: bytes from the beginning of the page.
    """

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    offset: int


class KVGroupMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of layers as one side holds it: `GroupShards` on the wire.

    Attributes:
        name: of the group in its cache.
        type: "full", "sliding_window", "chunked_local", "cross", "recurrent" or "scratch".
        window_size: tokens of the window or chunk; -1 where there is none.
        page_size: tokens of a block.
        num_layers: layers whose KV or states a page holds.
        num_pages: usable pages of each shard.
        bytes_per_page: bytes of a page of one shard.
        replicated: whether every shard holds the same bytes.
        kv_heads: KV heads of each layer in the whole model; empty for groups of states.
        regions: what lies where in a page of a shard.
    """

    name: str
    type: str
    window_size: int
    page_size: int
    num_layers: int
    num_pages: int
    bytes_per_page: int
    replicated: bool
    kv_heads: tuple[int, ...]
    regions: tuple[KVRegionMetadata, ...]


class KVTransferEngineMetadata(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=_TYPE, tag_field="type"
):
    """The cache of one side of a transfer, as the other side has to know it. `of` makes it from parameters.

    It holds nothing but numbers and names, so that threads may share it; `to_bytes` and `from_bytes` take it
    to other processes.

    Attributes:
        version: of the form on the wire.
        name: what this side is called.
        tensor_parallel_degree: shards of the cache.
        groups: its groups of layers, the main one first, then others such as that of a draft model.

    Raises:
        ValueError: the values do not fit each other.
    """

    version: int = VERSION
    name: str
    tensor_parallel_degree: int
    groups: tuple[KVGroupMetadata, ...]

    @classmethod
    def of(
        cls,
        name: str,
        params: KVCacheParams | MultiKVCacheParams,
        num_pages: int | Mapping[str, int],
        *,
        tensor_parallel_degree: int = 1,
        whole: KVCacheParams | MultiKVCacheParams | None = None,
    ) -> KVTransferEngineMetadata:
        """What a side tells of its cache.

        Args:
            name: what the side is called.
            params: those of one shard, as its manager or its `CachePlan` has them; the main group first. One
                group without a name is called by its type, as in `CachePlan.groups`.
            num_pages: usable pages of a shard: of the only group, or by group, as in `CachePlan.num_pages`.
            tensor_parallel_degree: shards, from 1 to 65536.
            whole: the parameters that were divided among the shards, of the same groups. Needed where one
                head lies on several shards.

        Raises:
            ValueError: a value is out of range, or what is given is not of the same groups.
        """
        groups = _groups(params)
        wholes = dict.fromkeys(groups, None) if whole is None else _groups(whole)
        pages = num_pages if isinstance(num_pages, Mapping) else dict.fromkeys(groups, num_pages)
        if len(groups) > 1 and pages is not num_pages:
            raise ValueError(f"num_pages={shown(num_pages)}: must be a mapping, a number for each group")
        for given, by_group in (("num_pages", pages), ("whole", wholes)):
            if set(by_group) != set(groups):
                names = ", ".join(map(repr, groups))
                raise ValueError(f"{given}: of the groups {shown(list(by_group))}, must be of {names}")
        return cls(
            name=name,
            tensor_parallel_degree=tensor_parallel_degree,
            groups=tuple(
                _on_wire(
                    GroupShards.of(group, tensor_parallel_degree, whole=wholes[label], name=label),
                    pages[label],
                )
                for label, group in groups.items()
            ),
        )

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version={shown(self.version)}: must be {VERSION}")
        if not isinstance(self.name, str) or not self.name:  # type: ignore[redundant-expr]
            raise ValueError(f"name={shown(self.name)}: must be a str that is not empty")
        names = [group.name for group in self.groups]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"groups: {shown(names)} given, must be one at least, of different names")
        for group, shards in zip(self.groups, self.shards.values(), strict=True):
            whole_number(group.num_pages, f"groups[{group.name!r}].num_pages")
            if group.bytes_per_page != shards.bytes_per_page:
                raise ValueError(
                    f"groups[{group.name!r}].bytes_per_page={shown(group.bytes_per_page)}: its regions take "
                    f"{shards.bytes_per_page}"
                )

    @property
    def shards(self) -> dict[str, GroupShards]:
        """The groups by name, for `plan_copies`."""
        return {group.name: _off_wire(group, self.tensor_parallel_degree) for group in self.groups}

    @property
    def num_pages_per_group(self) -> tuple[int, ...]:
        """Usable pages of each group on each shard."""
        return tuple(group.num_pages for group in self.groups)

    @property
    def bytes_per_group(self) -> tuple[int, ...]:
        """Bytes of a page of each group on one shard."""
        return tuple(group.bytes_per_page for group in self.groups)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page of all groups on one shard."""
        return sum(self.bytes_per_group)

    @property
    def replicated_per_group(self) -> tuple[bool, ...]:
        """Of each group whether all shards hold the same bytes."""
        return tuple(group.replicated for group in self.groups)

    def check_peer(self, peer: KVTransferEngineMetadata) -> None:
        """Refuses a peer with which no pages can be exchanged.

        The two may have different numbers of pages, and different tensor-parallel degrees where they keep no
        states. All else has to be alike: the names of the groups in their order; and of each group which
        blocks its layers read, tokens of a block, layers, heads in the whole model, and shapes and types in a
        page. That both serve the same model is for them to know.

        Args:
            peer: what the other side told.

        Raises:
            TransferMismatchError: names the first field that differs, its group, and both values.
        """
        sides = repr(self.name), repr(peer.name)
        names = [group.name for group in self.groups], [group.name for group in peer.groups]
        if names[0] != names[1]:
            raise TransferMismatchError.of("groups", None, names, sides)
        for one, other in zip(self.shards.values(), peer.shards.values(), strict=True):
            check_alike(one, other, sides)

    def to_bytes(self) -> bytes:
        """This as MessagePack, for the other side."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> KVTransferEngineMetadata:
        """What the other side's `to_bytes` wrote.

        Raises:
            TransferMetadataError: it is something else, is of a version that is not read here, or says what
                cannot be.
            TypeError: no bytes.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data: got {type(data).__name__}, must be bytes")
        if memoryview(data).nbytes > MAX_BYTES:
            raise TransferMetadataError(f"data: {len(data)} bytes, must be at most {MAX_BYTES}")
        try:
            envelope = msgspec.msgpack.decode(data, type=_Envelope)
            if (envelope.type, envelope.version) == (_TYPE, VERSION):
                return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # `__post_init__`'s too
            raise TransferMetadataError(f"data: no metadata of a transfer engine: {error}") from error
        if envelope.type != _TYPE:
            raise TransferMetadataError(f"data: type {shown(envelope.type)}, must be {_TYPE!r}")
        raise TransferMetadataError(f"data: version {envelope.version}, this side reads version {VERSION}")


class _Envelope(msgspec.Struct):
    """What metadata of every version has."""

    type: str
    version: int


def _groups(params: KVCacheParams | MultiKVCacheParams) -> dict[str, KVCacheParams]:
    if isinstance(params, MultiKVCacheParams):
        return dict(params)
    if isinstance(params, KVCacheParams):
        return {params.group_id.type: params}
    raise TypeError(f"params: got {type(params).__name__}, must be a KVCacheParams or MultiKVCacheParams")


def _on_wire(shards: GroupShards, num_pages: int) -> KVGroupMetadata:
    return KVGroupMetadata(
        name=shards.name,
        type=shards.group_id.type,
        window_size=shards.group_id.window_size,
        page_size=shards.page_size,
        num_layers=shards.num_layers,
        num_pages=whole_number(num_pages, f"num_pages of {shards.name!r}"),
        bytes_per_page=shards.bytes_per_page,
        replicated=shards.replicated,
        kv_heads=shards.kv_heads,
        regions=tuple(
            KVRegionMetadata(
                region.name, tuple(region.layers), region.shape, region.dtype.value, region.offset
            )
            for region in shards.layout.regions
        ),
    )


def _off_wire(group: KVGroupMetadata, tensor_parallel_degree: int) -> GroupShards:
    """What is meant; refuses what cannot be."""
    try:
        return GroupShards(
            name=group.name,
            group_id=KVCacheGroupId(group.type, group.window_size),  # type: ignore[arg-type]
            page_size=group.page_size,
            num_layers=group.num_layers,
            tensor_parallel_degree=tensor_parallel_degree,
            kv_heads=group.kv_heads,
            replicated=group.replicated,
            layout=PageLayout(
                tuple(
                    PageRegion(
                        region.name, region.layers, region.shape, DType.parse(region.dtype), region.offset
                    )
                    for region in group.regions
                )
            ),
        )
    except ValueError as error:
        raise ValueError(f"groups[{shown(group.name)}]: {error}") from None
