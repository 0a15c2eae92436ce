"""What a layer of a model keeps of the tokens that it has seen, and the groups that such layers make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pagekeeper.params import ChunkedLocal, SlidingWindow
from pagekeeper.params.groups import AttentionKind

__all__ = ["Channels", "Keep", "KeysAndValues", "Latents", "Layer", "StateTensor", "States", "group_layers"]


@dataclass(frozen=True)
class KeysAndValues:
    """A key and a value for each KV head.

    Attributes:
        kind: which tokens the layer reads.
        heads: KV heads.
        head_dim: values of a key, and of a value.
    """

    kind: AttentionKind
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Latents:
    """One latent for all heads, and a key part with the position.

    Attributes:
        kind: which tokens the layer reads.
        kv_lora_rank: values of the latent.
        qk_rope_head_dim: values of the key part.
        query_heads: query heads of the layer.
        index_head_dim: values of the key of an indexer; None without one.
    """

    kind: AttentionKind
    kv_lora_rank: int
    qk_rope_head_dim: int
    query_heads: int
    index_head_dim: int | None = None


@dataclass(frozen=True)
class Channels:
    """A part of a state's first axis: `count` heads, groups or channels of `width` values each.

    Attributes:
        count: heads, groups or channels, which the shards of a tensor-parallel group divide.
        width: values of each along the axis.
        repeatable: whether several shards may have the same one, as they may have the same KV head.
    """

    count: int
    width: int = 1
    repeatable: bool = False

    def of_shard(self, degree: int) -> int:
        """Values along the axis that one of `degree` shards has.

        Raises:
            ValueError: they do not divide.
        """
        if self.count % degree == 0:
            return self.count // degree * self.width
        if self.repeatable and degree % self.count == 0:
            return self.width
        raise ValueError(
            f"tensor_parallel_degree={degree}: a state's {self.count} heads, groups or channels do not "
            "divide among so many"
        )


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's state.

    Attributes:
        name: "conv" for the inputs that a convolution still needs, or "ssm" for what a recurrence carries on.
        channels: the parts of the first axis, which shards divide.
        rest: values along the other axes.
    """

    name: str
    channels: tuple[Channels, ...]
    rest: tuple[int, ...]

    def shape(self, degree: int = 1) -> tuple[int, ...]:
        """Values along each axis that one of `degree` shards has."""
        return (sum(part.of_shard(degree) for part in self.channels), *self.rest)


@dataclass(frozen=True)
class States:
    """A state of the same size after any number of tokens: Mamba's, linear attention's, a convolution's."""

    tensors: tuple[StateTensor, ...]


Keep: TypeAlias = KeysAndValues | Latents | States


@dataclass(frozen=True)
class Layer:
    """What one layer keeps.

    Attributes:
        keeps: its own KV and states: none in a layer without attention, two where it reads itself and an
            encoder, or has attention and states.
        shares_with: the earlier layer whose KV it reads instead of its own. None: it has its own.
    """

    keeps: tuple[Keep, ...] = ()
    shares_with: int | None = None


def group_layers(layers: Mapping[int, Layer]) -> dict[str, list[tuple[int, Keep]]]:
    """The groups of a model by name: layers that read the same tokens, by number, and what each keeps."""
    members: dict[Keep, list[tuple[int, Keep]]] = {}
    for number, layer in layers.items():
        for keep in layer.keeps:
            members.setdefault(_representative(keep), []).append((number, keep))
    return dict(zip(_names(members), members.values(), strict=True))


def _representative(keep: Keep) -> Keep:
    """The same for layers of one group: layers with keys and values may differ in heads and their size."""
    match keep:
        case KeysAndValues():
            return replace(keep, heads=1, head_dim=1)
        case Latents():
            return replace(keep, index_head_dim=None)
        case States():
            return keep


def _names(groups: Iterable[Keep]) -> list[str]:
    """Names of groups by their kinds; where several are of one kind, by their windows or numbered."""
    kinds = [_kind_name(keep) for keep in groups]
    windows = [_window(keep) for keep in groups]
    names: list[str] = []
    for kind, window in zip(kinds, windows, strict=True):
        name = kind if kinds.count(kind) == 1 or window is None else f"{kind}_{window}"
        again = sum(other == name or other.startswith(f"{name}_") for other in names)
        names.append(f"{name}_{again + 1}" if name in names else name)
    return names


def _kind_name(keep: Keep) -> str:
    if isinstance(keep, States):
        return "states"
    return {"sliding_window": "sliding", "chunked_local": "chunked"}.get(keep.kind.type, keep.kind.type)


def _window(keep: Keep) -> int | None:
    match keep:
        case (
            KeysAndValues(kind=SlidingWindow(window_size=size))
            | Latents(kind=SlidingWindow(window_size=size))
        ):
            return size
        case KeysAndValues(kind=ChunkedLocal(chunk_size=size)) | Latents(kind=ChunkedLocal(chunk_size=size)):
            return size
        case _:
            return None
