"""What all caches have, whatever they hold: how they behave, and where."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypedDict, Unpack, get_args

from pagekeeper.dtypes import DeviceLike, parse_device
from pagekeeper.errors import hidden
from pagekeeper.params.checks import keep, parse_choice, parse_count, parse_flag, parse_length, parse_priority
from pagekeeper.params.groups import FullAttention, GroupKind, KVCacheGroupId, Recurrent

if TYPE_CHECKING:
    from pagekeeper.connector_config import KVConnectorConfig
    from pagekeeper.params.layout import PageLayout

__all__ = [
    "CommonArguments",
    "CommonKVCacheParams",
    "EvictionPolicy",
    "HashAlgorithm",
    "KVCacheParams",
    "OnDuplicate",
    "Priority",
    "WritePolicy",
]

HashAlgorithm: TypeAlias = Literal["ahash64", "sha256", "sha256_64"]
OnDuplicate: TypeAlias = Literal["adopt", "private"]
WritePolicy: TypeAlias = Literal["write_through", "on_evict", "selective"]
Priority: TypeAlias = int | Literal["low", "medium", "high"]


class EvictionPolicy(StrEnum):
    """Which cached block goes when a page is wanted and none is free. Equal to its own name as a string.

    Attributes:
        PRIORITY_LRU: "priority_lru". Of the lowest priority, the least recently released.
        PRIORITY_SLRU: "priority_slru". Of the lowest priority first what was never hit, so that prompts that
            come once do not drive out what is used again. Once hit blocks are over a third of a level, the
            least recently released goes.
    """

    PRIORITY_LRU = "priority_lru"
    PRIORITY_SLRU = "priority_slru"


class CommonArguments(TypedDict, total=False):
    """Arguments that all parameters take; `KVCacheParams` says what each is."""

    page_size: int
    devices: DeviceLike | Sequence[DeviceLike]
    data_parallel_degree: int
    enable_prefix_caching: bool
    enable_partial_reuse: bool
    copy_on_partial_reuse: bool
    store_partial_tails: bool
    kv_hash_algo: HashAlgorithm
    kv_hash_seed: str | None
    on_duplicate: OnDuplicate
    eviction_policy: EvictionPolicy | str
    default_retention_priority: Priority
    event_buffer_max_size: int
    write_policy: WritePolicy
    selective_min_hits: int
    selective_min_priority: Priority | None
    secondary_offload_min_priority: Priority
    kv_connector_config: KVConnectorConfig | Mapping[str, object] | str | None
    max_tokens: int | None


@dataclass(frozen=True, init=False)
class CommonKVCacheParams(ABC):
    """What a cache has once, whatever its groups of layers: pages of one size, devices, behaviour."""

    page_size: int
    devices: tuple[str, ...]
    data_parallel_degree: int
    enable_prefix_caching: bool
    enable_partial_reuse: bool
    copy_on_partial_reuse: bool
    store_partial_tails: bool
    kv_hash_algo: HashAlgorithm
    kv_hash_seed: str | None = field(repr=False)  # whoever knows it can make blocks collide
    on_duplicate: OnDuplicate
    eviction_policy: EvictionPolicy
    default_retention_priority: int
    event_buffer_max_size: int
    write_policy: WritePolicy
    selective_min_hits: int
    selective_min_priority: int | None
    secondary_offload_min_priority: int
    kv_connector_config: KVConnectorConfig | None
    max_tokens: int | None

    __signature__: ClassVar[inspect.Signature]

    def __init__(
        self,
        *,
        page_size: int = 128,
        devices: DeviceLike | Sequence[DeviceLike] = "cpu",
        data_parallel_degree: int = 1,
        enable_prefix_caching: bool = True,
        enable_partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
        store_partial_tails: bool = True,
        kv_hash_algo: HashAlgorithm = "ahash64",
        kv_hash_seed: str | None = None,
        on_duplicate: OnDuplicate = "adopt",
        eviction_policy: EvictionPolicy | str = EvictionPolicy.PRIORITY_LRU,
        default_retention_priority: Priority = 35,
        event_buffer_max_size: int = 0,
        write_policy: WritePolicy = "write_through",
        selective_min_hits: int = 2,
        selective_min_priority: Priority | None = None,
        secondary_offload_min_priority: Priority = 35,
        kv_connector_config: KVConnectorConfig | Mapping[str, object] | str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        keep(self, "page_size", page_size, parse_count)
        keep(self, "devices", devices, _parse_devices)
        keep(self, "data_parallel_degree", data_parallel_degree, _parse_degree)
        keep(self, "enable_prefix_caching", enable_prefix_caching, parse_flag)
        keep(self, "enable_partial_reuse", enable_partial_reuse, parse_flag)
        keep(self, "copy_on_partial_reuse", copy_on_partial_reuse, parse_flag)
        keep(self, "store_partial_tails", store_partial_tails, parse_flag)
        keep(self, "kv_hash_algo", kv_hash_algo, parse_choice(get_args(HashAlgorithm)))
        keep(self, "kv_hash_seed", kv_hash_seed, parse_seed, hidden)
        keep(self, "on_duplicate", on_duplicate, parse_choice(get_args(OnDuplicate)))
        keep(self, "eviction_policy", eviction_policy, _parse_policy)
        keep(self, "default_retention_priority", default_retention_priority, parse_priority)
        keep(self, "event_buffer_max_size", event_buffer_max_size, parse_length)
        keep(self, "write_policy", write_policy, parse_choice(get_args(WritePolicy)))
        keep(self, "selective_min_hits", selective_min_hits, parse_count)
        keep(self, "selective_min_priority", selective_min_priority, _parse_priority_or_none)
        keep(self, "secondary_offload_min_priority", secondary_offload_min_priority, parse_priority)
        keep(self, "max_tokens", max_tokens, _parse_count_or_none)
        connector = None if kv_connector_config is None else _parse_connector(kv_connector_config)
        object.__setattr__(self, "kv_connector_config", connector)  # past the freeze
        if connector is not None and connector.type == "rust_tiered" and not self.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching=False: kv_connector_config.type='rust_tiered' needs it to be True, "
                "for it keeps blocks that later requests reuse"
            )

    def __init_subclass__(cls) -> None:
        """Shows the common arguments, which `cls` only passes on, in its signature."""
        arguments = [
            argument
            for function in (cls.__init__, CommonKVCacheParams.__init__)
            for argument in list(inspect.signature(function).parameters.values())[1:]
            if argument.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        cls.__signature__ = inspect.Signature(arguments)

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes that the KV of one token takes in all layers, while it is kept; states take none."""

    @property
    @abstractmethod
    def bytes_per_token_kept(self) -> int:
        """Of `bytes_per_token` those that last as long as the request: of layers that read all tokens.

        By so much a request grows with each token, however long it is.
        """

    @property
    @abstractmethod
    def chunk_alignment_tokens(self) -> int:
        """Tokens at whose multiples chunks of a prompt should end; 0 if they may end anywhere.

        Snapshots of states are taken there, and only the state that a forward ends with can be kept: a chunk
        that reaches over a multiple leaves no snapshot at it.
        """


@dataclass(frozen=True, init=False)
class KVCacheParams(CommonKVCacheParams):
    """What one group of layers keeps, and what it has in common with all groups of its cache.

    Equal parameters describe equal caches.

    Args:
        num_layers: layers whose KV or states one page holds.
        kind: which blocks the layers read, and so which pages a request keeps.
        page_size: tokens in a block, and in the page that holds its KV.
        devices: where the pages live; anything that `parse_device` understands. One device for now.
        data_parallel_degree: copies of the cache, each with requests of its own. 1 for now.
        enable_prefix_caching: whether a request may reuse blocks that earlier requests computed.
        enable_partial_reuse: whether it may go on from the first tokens of a block too, where its prompt goes
            another way inside it or ends there. Not where layers keep states.
        copy_on_partial_reuse: whether it gets a copy of such a block. If not, it takes the block's own page,
            if nobody uses it and nothing that is cached follows it: the block is lost then.
        store_partial_tails: whether the last block of a request is cached at its release though it is not
            full, so that a next turn goes on from it. No effect without `enable_partial_reuse`.
        kv_hash_algo: how blocks are identified. "ahash64" is the fastest and not cryptographic; "sha256" is;
            "sha256_64" keeps the first 64 bits of it.
        kv_hash_seed: 32 bytes as 64 hexadecimal digits, the same wherever hashes are to be equal. None is no
            seed for "ahash64" and a random one in each process for the SHA family.
        on_duplicate: what happens to a request that computed a block which is cached by then: "adopt" moves
            it to the cached page and frees its own, "private" leaves it on its own page.
        eviction_policy: an `EvictionPolicy`, or its name: "priority_lru" or "priority_slru".
        default_retention_priority: 0 (evicted first) to 100, or "low" (20), "medium" (35), "high" (80).
        event_buffer_max_size: most events kept until `get_latest_events` takes them; the oldest are dropped
            first. 0 records none. An event of stored blocks holds their tokens: 4 bytes each.
        write_policy: when blocks go to the tiers of `kv_connector_config`: "write_through" all when they are
            published; "selective" those of a high priority then, others when they were hit often; "on_evict"
            shortly before the device evicts them.
        selective_min_hits: for "selective", the hit, from 1, at which a block goes.
        selective_min_priority: for "selective", the retention priority from which a block goes without a
            hit. None is no such priority.
        secondary_offload_min_priority: for "on_evict", the retention priority from which a block goes; others
            are dropped.
        kv_connector_config: where blocks go beyond the device: a `KVConnectorConfig`, a mapping of its
            fields, or the name of a `KVConnectorType`. "rust_tiered" needs `enable_prefix_caching`. None is
            nowhere.
        max_tokens: most tokens that a pool has pages for which is sized by bytes. None is as many as fit. No
            effect, but for a warning, in a cache of several groups.

    Raises:
        TypeError: an argument is unknown or missing.
        ValueError: a value is not allowed; the message says which, and what is.
    """

    num_layers: int
    kind: GroupKind

    _kinds: ClassVar[tuple[type[GroupKind], ...]]
    replicated: ClassVar[bool] = False
    """Whether all shards of a tensor-parallel group hold the same bytes. Outer tiers store them once."""

    def __init__(self, *, num_layers: int, kind: GroupKind, **common: Unpack[CommonArguments]) -> None:
        super().__init__(**common)
        keep(self, "num_layers", num_layers, parse_count)
        keep(self, "kind", kind, self._parse_kind)

    def _parse_kind(self, value: object) -> object:
        if not isinstance(value, self._kinds):
            raise ValueError(f"must be a {', a '.join(kind.__name__ for kind in self._kinds)}")
        return value

    @property
    @abstractmethod
    def page_layout(self) -> PageLayout:
        """What lies where in a page."""

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: a block's KV in all layers and what belongs to it, or the layers' states."""
        return self.page_layout.bytes_per_page

    @property
    def bytes_per_token_kept(self) -> int:
        """`bytes_per_token` if the layers read all tokens, else 0: windows give their pages back."""
        return self.bytes_per_token if isinstance(self.kind, FullAttention) else 0

    @property
    def chunk_alignment_tokens(self) -> int:
        """Tokens at whose multiples chunks of a prompt should end: the snapshot interval, or 0."""
        if not isinstance(self.kind, Recurrent) or not self.enable_prefix_caching:
            return 0
        return self.kind.snapshot_interval or 0

    @property
    def group_id(self) -> KVCacheGroupId:
        """The type of the group and its window."""
        return KVCacheGroupId.of(self.kind)


def _parse_degree(value: object) -> int:
    degree = parse_count(value)
    if degree > 1:
        raise ValueError("must be 1: one replica is supported for now")
    return degree


def _parse_devices(value: DeviceLike | Sequence[DeviceLike]) -> tuple[str, ...]:
    devices = tuple(
        parse_device(device) for device in (value if isinstance(value, list | tuple) else (value,))
    )
    if len(devices) != 1:
        raise ValueError("must name one device: a cache on one device is supported for now")
    return devices


def _parse_policy(value: object) -> EvictionPolicy:
    names = tuple(policy.value for policy in EvictionPolicy)
    return EvictionPolicy(parse_choice(names)(value))


def parse_seed(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise ValueError("must be 64 hexadecimal digits (the .hex() of 32 bytes) or None")
    return value.lower()


def _parse_connector(given: KVConnectorConfig | Mapping[str, object] | str) -> KVConnectorConfig:
    """The configuration that is meant; this alone needs pydantic."""
    from pydantic import ValidationError

    from pagekeeper.config_model import told
    from pagekeeper.connector_config import KVConnectorConfig

    try:
        return KVConnectorConfig.of(given)
    except ValidationError as error:
        refusals = [f"kv_connector_config.{refusal['msg']}" for refusal in error.errors()]
        raise ValueError("; ".join(refusals)) from error
    except TypeError as error:
        raise ValueError(f"kv_connector_config={told(given)}: {error}") from error


def _parse_priority_or_none(value: object) -> int | None:
    return None if value is None else parse_priority(value)


def _parse_count_or_none(value: object) -> int | None:
    return None if value is None else parse_count(value)
