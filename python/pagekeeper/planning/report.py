"""What fits of a model on a machine, as an operator asks it: memory, pages, requests at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from pagekeeper.errors import CacheTooSmallError
from pagekeeper.models import HuggingFaceModel
from pagekeeper.params import KVCacheParams, MultiKVCacheParams
from pagekeeper.planning.plan import CachePlan, plan_cache
from pagekeeper.shares import with_layout

__all__ = ["DeviceMemory", "GroupReport", "LengthReport", "PlanReport", "WeightsSource", "report"]

WeightsSource: TypeAlias = Literal["files", "given", "estimated", "none"]

HOST_FACTOR, DISK_FACTOR = 1.5, 2.0
"""A host tier and a disk that no size is given for, in device pools: as `KVConnectorConfig` has them."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of each device, in bytes.

    Attributes:
        free: what is free before anything is loaded; None if the size of the pools was given.
        utilization: the part of it that may be used.
        weights: the device's part of the weights.
        weights_from: how that is known; "none" if it was not asked.
        cache: what is left for the pools.
    """

    free: int | None
    utilization: float
    weights: int
    weights_from: WeightsSource
    cache: int

    @classmethod
    def of(
        cls, free: int, utilization: float, weights: int, weights_from: WeightsSource, devices: int
    ) -> DeviceMemory:
        """What is left on each of some devices that divide the weights.

        Raises:
            CacheTooSmallError: nothing.
        """
        part, usable = -(-weights // devices), int(free * utilization)
        if part >= usable:
            raise CacheTooSmallError(
                f"weights of {part} bytes on each device leave nothing of the {usable} that may be used",
                needed=part + 1,
                available=usable,
            )
        return cls(
            free=free, utilization=utilization, weights=part, weights_from=weights_from, cache=usable - part
        )


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """A group of layers on one device.

    Attributes:
        name: what it is called.
        reads: the type of the group, and its window.
        layers: how many.
        bytes_per_page: of one page.
        bytes_per_token: of a token, while it is kept; 0 of states.
        pages: usable pages; where groups share memory, those that it has when no other has any.
    """

    name: str
    reads: str
    layers: int
    bytes_per_page: int
    bytes_per_token: int
    pages: int


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Requests of one length.

    Attributes:
        tokens: prompt and output together.
        bytes_per_request: of the pages that one holds, at most.
        requests: how many fit at a time.
    """

    tokens: int
    bytes_per_request: int
    requests: int


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What fits. All is of one device; devices that divide a model have equal parts.

    Attributes:
        model_type: the model's type.
        is_known: whether the type is known.
        notes: what was assumed of the model.
        warnings: what serves worse than may be expected.
        devices: among how many devices it is divided.
        page_size: tokens of a page.
        max_seq_len: tokens of the longest request.
        fits: whether one such request fits.
        longest: tokens of the longest request that fits.
        memory: the device's memory.
        is_shared: whether groups share their memory.
        bytes_per_token: of a token in all groups, while no window has passed it.
        bytes_per_token_kept: by how much a request grows with each token.
        fixed_bytes_per_request: what a request of `max_seq_len` has beside, in windows, states and an
            encoder's pages.
        capacity_tokens: tokens that the pool holds of requests of `max_seq_len`, or of the longest that fits.
        groups: the groups.
        lengths: requests of the lengths that were asked for.
        host_gb: GiB of host memory that a tier has if no size is given, on all devices together.
        disk_gb: GiB of its disk.
    """

    model_type: str
    is_known: bool
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    devices: int
    page_size: int
    max_seq_len: int
    fits: bool
    longest: int
    memory: DeviceMemory
    is_shared: bool
    bytes_per_token: int
    bytes_per_token_kept: int
    fixed_bytes_per_request: int
    capacity_tokens: int
    groups: tuple[GroupReport, ...]
    lengths: tuple[LengthReport, ...]
    host_gb: float
    disk_gb: float

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON knows."""
        return asdict(self)


def report(
    model: HuggingFaceModel,
    params: KVCacheParams | MultiKVCacheParams,
    memory: DeviceMemory,
    *,
    devices: int,
    max_seq_len: int,
    max_batch_size: int,
    max_num_input_tokens: int | None,
    num_draft_tokens: int,
    encoder_length: int | None,
    lengths: Sequence[int],
) -> PlanReport:
    """What fits of a model in the memory that is left for its cache.

    Raises:
        CacheTooSmallError: no request fits; with the bytes that are enough for one of `max_seq_len`.
        ValueError: a number is out of range.
    """
    params = with_layout(params, "auto")
    plan_for = partial(
        plan_cache,
        params,
        memory.cache,
        max_batch_size,
        max_num_input_tokens=max_num_input_tokens,
        num_draft_tokens=num_draft_tokens,
        encoder_length=encoder_length,
    )
    try:
        plan = plan_for()
    except CacheTooSmallError:
        plan = plan_for(max_seq_len=max_seq_len)  # refuses too, and says what that needs
    longest = plan.longest(max_seq_len)
    plan = plan.planned_for(longest)
    stored_once = all(group.replicated for group in plan.groups.values())
    gib = plan.pool_bytes * (1 if stored_once else devices) / 2**30
    return PlanReport(
        model_type=model.model_type,
        is_known=model.is_known,
        notes=model.notes,
        warnings=plan.warnings,
        devices=devices,
        page_size=params.page_size,
        max_seq_len=max_seq_len,
        fits=longest == max_seq_len,
        longest=longest,
        memory=memory,
        is_shared=plan.is_shared,
        bytes_per_token=params.bytes_per_token,
        bytes_per_token_kept=params.bytes_per_token_kept,
        fixed_bytes_per_request=plan.fixed_bytes(max_seq_len),
        capacity_tokens=plan.concurrency(longest) * longest,
        groups=tuple(
            GroupReport(
                name=name,
                reads=str(group.group_id),
                layers=group.num_layers,
                bytes_per_page=group.bytes_per_page,
                bytes_per_token=group.bytes_per_token,
                pages=plan.num_pages[name],
            )
            for name, group in plan.groups.items()
        ),
        lengths=tuple(_of_length(plan, tokens) for tokens in lengths),
        host_gb=round(HOST_FACTOR * gib, 1),
        disk_gb=round(DISK_FACTOR * gib, 1),
    )


def _of_length(plan: CachePlan, tokens: int) -> LengthReport:
    pages = plan.pages(tokens)
    size = sum(pages[name] * group.bytes_per_page for name, group in plan.groups.items())
    return LengthReport(tokens=tokens, bytes_per_request=size, requests=plan.concurrency(tokens))
