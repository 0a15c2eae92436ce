"""A group of layers as shards hold it, and what two of them must have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagekeeper.errors import TransferMismatchError, shown
from pagekeeper.params import KVCacheGroupId, KVCacheParams, MHAKVCacheParams, MLAKVCacheParams, PageLayout
from pagekeeper.params.checks import whole_number
from pagekeeper.params.layout import PageRegion
from pagekeeper.replica_transfer.heads import MAX_DEGREE, HeadShards

__all__ = ["GroupShards", "check_alike"]

_OF_EACH_HEAD = ("kv", "kv_scales")
"""Regions that shards divide by heads: their last axes are heads, and values or scales of one."""


@dataclass(frozen=True)
class GroupShards:
    """One group of layers as the shards of a tensor-parallel group hold it. `of` makes it from parameters.

    Attributes:
        name: of the group in its cache.
        group_id: which blocks its layers read.
        page_size: tokens of a block.
        num_layers: layers whose KV or states a page holds.
        tensor_parallel_degree: shards, from 1 to 65536.
        kv_heads: KV heads of each layer in the whole model, 1 for latents; empty for groups of states.
        replicated: whether every shard holds the same bytes, as of latents.
        layout: what lies where in a page of a shard.

    Raises:
        ValueError: they do not fit each other.
    """

    name: str
    group_id: KVCacheGroupId
    page_size: int
    num_layers: int
    tensor_parallel_degree: int
    kv_heads: tuple[int, ...]
    replicated: bool
    layout: PageLayout

    @classmethod
    def of(
        cls,
        params: KVCacheParams,
        tensor_parallel_degree: int = 1,
        *,
        whole: KVCacheParams | None = None,
        name: str | None = None,
    ) -> GroupShards:
        """The shards of a group.

        Args:
            params: those of one shard, as its manager has them.
            tensor_parallel_degree: shards, from 1 to 65536.
            whole: the parameters that were divided, of which the heads are read. Needed where one head lies
                on several shards; None: the model has as many heads as all shards together.
            name: of the group. None: its type, such as "full".

        Raises:
            ValueError: the heads of `whole` are not those of so many shards, or a value is out of range.

        >>> gqa = MHAKVCacheParams(
        ...     dtype="bfloat16", n_kv_heads=4, head_dim=128, num_layers=2, allow_kv_head_replication=True
        ... )
        >>> shards = GroupShards.of(gqa.shard(8), 8, whole=gqa)
        >>> shards.kv_heads, shards.heads_of_layer(0).replicas
        ((4, 4), 2)
        """
        degree = whole_number(tensor_parallel_degree, "tensor_parallel_degree", most=MAX_DEGREE)
        heads = _heads(whole or params)
        if whole is None and not params.replicated:
            heads = tuple(count * degree for count in heads)
        if len(heads) != len(_heads(params)):
            raise ValueError(
                f"whole: {type(whole).__name__} with heads of {len(heads)} layers, must be what was divided "
                f"into {type(params).__name__} of {params.num_layers}"
            )
        return cls(
            name=params.group_id.type if name is None else name,
            group_id=params.group_id,
            page_size=params.page_size,
            num_layers=params.num_layers,
            tensor_parallel_degree=degree,
            kv_heads=heads,
            replicated=params.replicated,
            layout=params.page_layout,
        )

    def __post_init__(self) -> None:
        whole_number(self.page_size, "page_size")
        whole_number(self.num_layers, "num_layers")
        whole_number(self.tensor_parallel_degree, "tensor_parallel_degree", most=MAX_DEGREE)
        if len(self.kv_heads) != (0 if self.holds_states else self.num_layers):
            raise ValueError(
                f"kv_heads: {len(self.kv_heads)} given, must be one for each of {self.num_layers} layers, "
                "none for states"
            )
        if self.replicated and set(self.kv_heads) != {1}:
            raise ValueError("replicated=True: must be False where layers have more than one head, or states")
        _check_layout(self.layout, self.num_layers)
        for region in self.layout.regions:
            for layer in region.layers if region.name in _OF_EACH_HEAD and self.kv_heads else ():
                heads = self.heads_of_layer(layer).heads_per_shard
                if region.shape[-2] != heads or len(region.shape) < 3:
                    raise ValueError(
                        f"{region.name!r} of layer {layer}: its shape {list(region.shape)} does not have the "
                        f"{heads} heads of a shard on the last axis but one"
                    )

    @property
    def holds_states(self) -> bool:
        """Whether pages hold states, of which only their owner knows how shards divide them."""
        return self.group_id.type in ("recurrent", "scratch")

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page of one shard."""
        return self.layout.bytes_per_page

    def heads_of_layer(self, layer: int) -> HeadShards:
        """How a layer's heads lie on the shards.

        Raises:
            ValueError: there is no such layer, or it has states.
        """
        layer = whole_number(layer, "layer", 0, len(self.kv_heads) - 1)
        return HeadShards(self.kv_heads[layer], self.tensor_parallel_degree)

    def units_of(self, region: PageRegion, layer: int) -> tuple[HeadShards, int]:
        """What is read whole of a layer's part of a region: how it lies on the shards, and bytes of one.

        It is a token's part of a head; an indexer's key, of which all shards have the same; or a state, of
        which each shard has its own.
        """
        degree = self.tensor_parallel_degree
        if self.holds_states:
            return HeadShards(degree, degree), region.nbytes // len(region.layers)
        shards = self.heads_of_layer(layer) if region.name in _OF_EACH_HEAD else HeadShards(1, degree)
        return shards, region.shape[-1] * region.dtype.size_in_bytes


def check_alike(
    one: GroupShards, other: GroupShards, sides: tuple[str, str] = ("the source", "the destination")
) -> None:
    """Refuses groups between which no page can be copied head by head.

    Args:
        one: a group of one side.
        other: that of the other side.
        sides: what messages call the two.

    Raises:
        TransferMismatchError: they differ in more than how many shards divide the heads.
    """
    # Facts that are alike up to one have the same names up to the next.
    for (field, value), (_, there) in zip(_facts(one), _facts(other), strict=True):
        if value != there:
            why = "; states are read by shards of as many" if field == "tensor_parallel_degree" else ""
            raise TransferMismatchError.of(field, one.name, (value, there), sides, why)
    same_degree = one.tensor_parallel_degree == other.tensor_parallel_degree
    if same_degree and one.bytes_per_page != other.bytes_per_page:
        sizes = (one.bytes_per_page, other.bytes_per_page)
        raise TransferMismatchError.of("bytes_per_page", one.name, sizes, sides)


def _facts(group: GroupShards) -> Iterator[tuple[str, object]]:
    """What both sides must have alike, by the names of the fields."""
    yield "kind", str(group.group_id)
    yield "page_size", group.page_size
    yield "num_layers", group.num_layers
    yield "replicated", group.replicated
    if group.holds_states:
        yield "tensor_parallel_degree", group.tensor_parallel_degree
    for layer in range(group.num_layers):
        if group.kv_heads:
            yield f"layers[{layer}].kv_heads", group.kv_heads[layer]
        regions = [region for region in group.layout.regions if layer in region.layers]
        regions.sort(key=lambda region: region.name)
        yield f"layers[{layer}].regions", [region.name for region in regions]
        for region in regions:
            field = f"layers[{layer}].{region.name}"
            yield f"{field}.dtype", region.dtype.value
            shape = list(region.shape[1:])
            if region.name in _OF_EACH_HEAD and group.kv_heads:
                yield f"{field}.head_size", shape.pop()
                shape.pop()  # the heads, which shards divide
            yield f"{field}.shape", shape


def _heads(params: KVCacheParams) -> tuple[int, ...]:
    match params:
        case MHAKVCacheParams(n_kv_heads=tuple(heads)):
            return heads
        case MHAKVCacheParams(n_kv_heads=int(heads)):
            return (heads,) * params.num_layers
        case MLAKVCacheParams():
            return (1,) * params.num_layers
        case _:
            return ()


def _check_layout(layout: PageLayout, num_layers: int) -> None:
    """Refuses what is no layout of a page; it may be a peer's."""
    if not layout.regions:
        raise ValueError("regions: none given, must be one at least")
    end, seen = 0, set[tuple[str, int]]()
    for region in layout.regions:
        parts = {(region.name, layer) for layer in region.layers}
        if (
            not region.name
            or not parts
            or len(parts) < len(region.layers)
            or parts & seen
            or not all(0 <= layer < num_layers for layer in region.layers)
        ):
            raise ValueError(
                f"region {shown(region.name)}: must have a name, and some of {num_layers} layers once each, "
                f"not {shown(list(region.layers))}"
            )
        seen |= parts
        if len(region.shape) < 2 or region.shape[0] != len(region.layers) or min(region.shape) < 1:
            raise ValueError(
                f"region {shown(region.name)}: shape {shown(list(region.shape))} must be "
                f"[{len(region.layers)}, ...], of lengths from 1"
            )
        if region.offset < end or region.offset % region.dtype.size_in_bytes:
            raise ValueError(
                f"region {shown(region.name)}: offset {region.offset} must be at least {end}, where the one "
                f"before ends, and a multiple of its element's {region.dtype.size_in_bytes} bytes"
            )
        end = region.offset + region.nbytes
