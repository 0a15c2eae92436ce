"""Which bytes of a page each shard reads from those of another cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagekeeper.replica_transfer.heads import HeadRead, HeadShards, plan_reads
from pagekeeper.replica_transfer.shards import GroupShards, check_alike

__all__ = ["PageCopy", "plan_copies"]


@dataclass(frozen=True)
class PageCopy:
    """Runs of bytes of a page that one shard reads from another: the same for every pair of pages.

    Run `i` lies `source_offset + i * source_stride` bytes into the source's region of its page and goes to
    `destination_offset + i * destination_stride` of the destination's. Regions go by their numbers in
    `GroupShards.layout`; where a page is one run of bytes, a region begins at its `offset`.

    Attributes:
        source_rank: the shard that is read.
        source_region: number of the region there.
        source_offset: bytes from the region's beginning to the first run.
        source_stride: bytes from one run to the next.
        destination_region: number of the region in the shard that reads.
        destination_offset: bytes from the region's beginning to the first run.
        destination_stride: bytes from one run to the next.
        run_bytes: bytes of a run.
        runs: how many there are.
    """

    source_rank: int
    source_region: int
    source_offset: int
    source_stride: int
    destination_region: int
    destination_offset: int
    destination_stride: int
    run_bytes: int
    runs: int

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.run_bytes * self.runs


def plan_copies(
    source: GroupShards, destination: GroupShards, turn: int = 0
) -> tuple[tuple[PageCopy, ...], ...]:
    """What each shard of a group reads, for each page, from the shards of the same group elsewhere.

    Shards read as `plan_reads` has it, layer by layer: each byte of each of the destination's regions is read
    once, from one shard. Offsets are those of pages as the manager's pools have them,
    [layers, ..., tokens, heads, values]; an engine whose pages lie otherwise goes by `plan_reads` itself.

    Args:
        source: the shards that are read.
        destination: the shards that read.
        turn: as for `plan_reads`.

    Returns:
        For each rank of the destination its copies. What is one run of bytes on both sides is one.

    Raises:
        TransferMismatchError: the groups differ in more than how many shards divide the heads.
        ValueError: `turn` is out of range.
    """
    check_alike(source, destination)
    copies: list[list[PageCopy]] = [[] for _ in range(destination.tensor_parallel_degree)]
    for stretch in _stretches(source, destination):
        reads = plan_reads(stretch.source.shards, stretch.destination.shards, turn)
        for rank, of_rank in enumerate(reads):
            copies[rank] += [stretch.copy(read) for read in of_rank]
    return tuple(map(tuple, copies))


@dataclass(frozen=True)
class _Place:
    """Where layers that follow each other begin on one side."""

    shards: HeadShards
    region: int
    offset: int
    """Bytes from the region's beginning."""

    def bytes_before(self, heads: range, unit_bytes: int) -> int:
        """Bytes from the region's beginning to the first of some heads, of the first token."""
        return self.offset + heads.start * unit_bytes

    def stride(self, unit_bytes: int) -> int:
        """Bytes of all heads of a token."""
        return self.shards.heads_per_shard * unit_bytes


@dataclass(frozen=True)
class _Stretch:
    """Layers that follow each other on both sides and are read alike."""

    source: _Place
    destination: _Place
    unit_bytes: int
    """Bytes of a head of a token, or of whatever else is read whole."""
    rows: int
    """Such as are read of each head: tokens, of all layers, of keys and of values."""

    def copy(self, read: HeadRead) -> PageCopy:
        """The bytes of a read."""
        run_bytes = len(read.source_heads) * self.unit_bytes
        strides = self.source.stride(self.unit_bytes), self.destination.stride(self.unit_bytes)
        runs = self.rows
        if strides == (run_bytes, run_bytes):
            run_bytes, runs = run_bytes * runs, 1
            strides = run_bytes, run_bytes
        return PageCopy(
            source_rank=read.source_rank,
            source_region=self.source.region,
            source_offset=self.source.bytes_before(read.source_heads, self.unit_bytes),
            source_stride=strides[0],
            destination_region=self.destination.region,
            destination_offset=self.destination.bytes_before(read.destination_heads, self.unit_bytes),
            destination_stride=strides[1],
            run_bytes=run_bytes,
            runs=runs,
        )

    def with_next(self, other: _Stretch) -> _Stretch | None:
        """Both as one; None if `other` does not follow on both sides, or is read otherwise."""
        following = replace(
            other,
            source=self._after(self.source),
            destination=self._after(self.destination),
        )
        return replace(self, rows=self.rows + other.rows) if following == other else None

    def _after(self, place: _Place) -> _Place:
        return replace(place, offset=place.offset + self.rows * place.stride(self.unit_bytes))


def _stretches(source: GroupShards, destination: GroupShards) -> Iterator[_Stretch]:
    """All layers of all regions, in the order of the destination's."""
    last: _Stretch | None = None
    for layer in _layers(source, destination):
        joined = last and last.with_next(layer)
        if last and not joined:
            yield last
        last = joined or layer
    if last:
        yield last


def _layers(source: GroupShards, destination: GroupShards) -> Iterator[_Stretch]:
    for number, region in enumerate(destination.layout.regions):
        layer_bytes = region.nbytes // len(region.layers)
        for index, layer in enumerate(region.layers):
            shards, unit_bytes = destination.units_of(region, layer)
            place = source.layout.find(region.name, layer)
            assert place is not None  # the groups are alike
            there = source.layout.regions[place[0]]
            offset = place[1] * (there.nbytes // len(there.layers))
            yield _Stretch(
                source=_Place(source.units_of(there, layer)[0], place[0], offset),
                destination=_Place(shards, number, index * layer_bytes),
                unit_bytes=unit_bytes,
                rows=layer_bytes // (unit_bytes * shards.heads_per_shard),
            )
