"""Which head of a layer lies on which shard, and from which shard another one reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagekeeper.errors import TransferMismatchError
from pagekeeper.params.checks import keep, parse_count, whole_number

__all__ = ["MAX_DEGREE", "HeadRead", "HeadShards", "plan_reads"]

MAX_DEGREE = 2**16
"""Most shards of a tensor-parallel group: what a peer says of itself bounds what is planned for it."""


@dataclass(frozen=True)
class HeadShards:
    """How the KV heads of a layer lie on the shards of a tensor-parallel group.

    Shards have consecutive heads, in the order of their ranks. With more shards than heads each head lies on
    several shards, its replicas, whose ranks are consecutive too. Latents are one head, which lies on all.

    Args:
        heads: KV heads of the layer in the whole model, from 1.
        tensor_parallel_degree: shards, from 1 to 65536.

    Raises:
        ValueError: a number is out of range, or neither divides the other.

    >>> shards = HeadShards(heads=4, tensor_parallel_degree=8)
    >>> shards.heads_per_shard, shards.replicas, list(shards.heads_of(5))
    (1, 2, [2])
    """

    heads: int
    tensor_parallel_degree: int

    def __post_init__(self) -> None:
        keep(self, "heads", self.heads, parse_count)
        keep(self, "tensor_parallel_degree", self.tensor_parallel_degree, _parse_degree)
        if self.heads % self.tensor_parallel_degree and self.tensor_parallel_degree % self.heads:
            raise ValueError(
                f"tensor_parallel_degree={self.tensor_parallel_degree}: {self.heads} KV heads do not divide "
                "among so many"
            )

    @property
    def heads_per_shard(self) -> int:
        """Heads of a shard, from 1."""
        return max(1, self.heads // self.tensor_parallel_degree)

    @property
    def replicas(self) -> int:
        """Shards that hold the same heads, from 1."""
        return max(1, self.tensor_parallel_degree // self.heads)

    def heads_of(self, rank: int) -> range:
        """The heads of a shard, by their numbers in the whole model.

        Raises:
            ValueError: there is no such rank.
        """
        rank = whole_number(rank, "rank", 0, self.tensor_parallel_degree - 1)
        first = rank // self.replicas * self.heads_per_shard
        return range(first, first + self.heads_per_shard)


@dataclass(frozen=True)
class HeadRead:
    """Heads that one shard reads from another.

    Attributes:
        source_rank: the shard that they are read from.
        source_heads: which of its heads, by their index there.
        destination_heads: where they go, by their index in the shard that reads; as many.
    """

    source_rank: int
    source_heads: range
    destination_heads: range


def plan_reads(
    source: HeadShards, destination: HeadShards, turn: int = 0
) -> tuple[tuple[HeadRead, ...], ...]:
    """What each shard of one tensor-parallel group reads from those of another.

    Each head of each destination is read once, from one shard. Between groups of one size that is the shard
    of the same rank. Otherwise, where a head has replicas, its readers are spread over them, so that of any
    two shards one gives at most one head more than the other.

    Args:
        source: the shards that are read.
        destination: the shards that read.
        turn: a number, from 0, that goes up from transfer to transfer. Where a head has more replicas than
            readers, the next transfer reads others of them, so that in time all shards give as much.

    Returns:
        For each rank of the destination its reads, in the order of its heads.

    Raises:
        TransferMismatchError: the heads are not as many on both sides.
        ValueError: `turn` is out of range.

    >>> for reads in plan_reads(HeadShards(4, 8), HeadShards(4, 2)):  # heads 0 and 1; heads 2 and 3
    ...     print([read.source_rank for read in reads])
    [0, 2]
    [4, 6]
    """
    if source.heads != destination.heads:
        raise TransferMismatchError.of("heads", None, (source.heads, destination.heads))
    turn = 0 if source == destination else whole_number(turn, "turn", 0, 2**63 - 1)
    ranks = range(destination.tensor_parallel_degree)
    return tuple(tuple(_reads(source, destination, rank, turn)) for rank in ranks)


def _reads(source: HeadShards, destination: HeadShards, rank: int, turn: int) -> Iterator[HeadRead]:
    wanted, size = destination.heads_of(rank), source.heads_per_shard
    number = rank % destination.replicas  # of those who want these heads
    replica = (number * source.replicas // destination.replicas + turn) % source.replicas
    for shard in range(wanted.start // size, (wanted.stop - 1) // size + 1):
        first, end = max(wanted.start, shard * size), min(wanted.stop, (shard + 1) * size)
        yield HeadRead(
            source_rank=shard * source.replicas + replica,
            source_heads=range(first - shard * size, end - shard * size),
            destination_heads=range(first - wanted.start, end - wanted.start),
        )


def _parse_degree(value: object) -> int:
    return parse_count(value, most=MAX_DEGREE)
