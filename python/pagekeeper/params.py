"""What a cache is: the shape of its pages and how it behaves.

Parameters check themselves when they are made, so that whoever receives them need not.
"""

from __future__ import annotations

import math
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, get_args

from pagekeeper.dtypes import DeviceLike, DType, DTypeLike, parse_device
from pagekeeper.errors import shown

if TYPE_CHECKING:
    from pagekeeper.connector_config import KVConnectorConfig

__all__ = [
    "EvictionPolicy",
    "HashAlgorithm",
    "KVCacheParams",
    "MHAKVCacheParams",
    "OnDuplicate",
    "Priority",
    "WritePolicy",
    "parse_priority",
    "whole_number",
]

HashAlgorithm: TypeAlias = Literal["ahash64", "sha256", "sha256_64"]
OnDuplicate: TypeAlias = Literal["adopt", "private"]
WritePolicy: TypeAlias = Literal["write_through", "on_evict", "selective"]
Priority: TypeAlias = int | Literal["low", "medium", "high"]

_Given = TypeVar("_Given")


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


@dataclass(frozen=True, init=False)
class KVCacheParams(ABC):
    """The geometry and behaviour that caches of every kind have. Equal parameters describe equal caches.

    Args:
        dtype: element type of the pages; anything that `DType.parse` understands.
        num_layers: layers whose KV one page holds.
        page_size: tokens in a block, and in the page that holds its KV.
        devices: where the pages live; anything that `parse_device` understands. One device for now.
        data_parallel_degree: copies of the cache, each with requests of its own. 1 for now.
        enable_prefix_caching: whether a request may reuse blocks that earlier requests computed.
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

    Raises:
        TypeError: an argument is unknown or missing.
        ValueError: a value is not allowed; the message says which, and what is.
    """

    dtype: DType
    num_layers: int
    page_size: int
    devices: tuple[str, ...]
    data_parallel_degree: int
    enable_prefix_caching: bool
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

    def __init__(
        self,
        *,
        dtype: DTypeLike,
        num_layers: int,
        page_size: int = 128,
        devices: DeviceLike | Sequence[DeviceLike] = "cpu",
        data_parallel_degree: int = 1,
        enable_prefix_caching: bool = True,
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
    ) -> None:
        self._keep("dtype", dtype, DType.parse)
        self._keep("num_layers", num_layers, _parse_count)
        self._keep("page_size", page_size, _parse_count)
        self._keep("devices", devices, _parse_devices)
        self._keep("data_parallel_degree", data_parallel_degree, _parse_degree)
        self._keep("enable_prefix_caching", enable_prefix_caching, _parse_flag)
        self._keep("kv_hash_algo", kv_hash_algo, _parse_choice(get_args(HashAlgorithm)))
        self._keep("kv_hash_seed", kv_hash_seed, _parse_seed)
        self._keep("on_duplicate", on_duplicate, _parse_choice(get_args(OnDuplicate)))
        self._keep("eviction_policy", eviction_policy, _parse_policy)
        self._keep("default_retention_priority", default_retention_priority, parse_priority)
        self._keep("event_buffer_max_size", event_buffer_max_size, partial(_parse_count, least=0))
        self._keep("write_policy", write_policy, _parse_choice(get_args(WritePolicy)))
        self._keep("selective_min_hits", selective_min_hits, _parse_count)
        self._keep("selective_min_priority", selective_min_priority, _parse_priority_or_none)
        self._keep("secondary_offload_min_priority", secondary_offload_min_priority, parse_priority)
        connector = None if kv_connector_config is None else _parse_connector(kv_connector_config)
        object.__setattr__(self, "kv_connector_config", connector)  # past the freeze
        if connector is not None and connector.type == "rust_tiered" and not self.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching=False: kv_connector_config.type='rust_tiered' needs it to be True, "
                "for it keeps blocks that later requests reuse"
            )

    def _keep(self, field: str, given: _Given, parse: Callable[[_Given], object]) -> None:
        """Sets a field to what `given` says, or raises a ValueError that names both."""
        try:
            kept = parse(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{field}={shown(given)}: {error}") from error
        object.__setattr__(self, field, kept)  # past the freeze

    @property
    @abstractmethod
    def page_shape(self) -> tuple[int, ...]:
        """Stored elements of one page along each axis, the slowest first."""

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: the KV of `page_size` tokens in all layers."""
        return math.prod(self.page_shape) * self.dtype.size_in_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the KV of one token takes in all layers."""
        return self.bytes_per_page // self.page_size


@dataclass(frozen=True, init=False)
class MHAKVCacheParams(KVCacheParams):
    """A cache of multi-head, grouped-query or multi-query attention: a key and a value for each KV head.

    Args:
        n_kv_heads: KV heads in each layer (not query heads).
        head_dim: values in one head's key or value. Even for `float4_e2m1fn`, which packs two into a byte.

    The other arguments and the errors are those of `KVCacheParams`.

    >>> params = MHAKVCacheParams(dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=16)
    >>> params.bytes_per_token  # key and value x 8 heads x 128 values x 2 bytes x 32 layers
    131072
    """

    n_kv_heads: int
    head_dim: int

    def __init__(
        self,
        *,
        dtype: DTypeLike,
        n_kv_heads: int,
        head_dim: int,
        num_layers: int,
        page_size: int = 128,
        devices: DeviceLike | Sequence[DeviceLike] = "cpu",
        data_parallel_degree: int = 1,
        enable_prefix_caching: bool = True,
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
    ) -> None:
        super().__init__(
            dtype=dtype,
            num_layers=num_layers,
            page_size=page_size,
            devices=devices,
            data_parallel_degree=data_parallel_degree,
            enable_prefix_caching=enable_prefix_caching,
            kv_hash_algo=kv_hash_algo,
            kv_hash_seed=kv_hash_seed,
            on_duplicate=on_duplicate,
            eviction_policy=eviction_policy,
            default_retention_priority=default_retention_priority,
            event_buffer_max_size=event_buffer_max_size,
            write_policy=write_policy,
            selective_min_hits=selective_min_hits,
            selective_min_priority=selective_min_priority,
            secondary_offload_min_priority=secondary_offload_min_priority,
            kv_connector_config=kv_connector_config,
        )
        self._keep("n_kv_heads", n_kv_heads, _parse_count)
        self._keep("head_dim", head_dim, _parse_count)
        if self.head_dim % self.dtype.values_per_element:
            raise ValueError(
                f"head_dim={head_dim}: must be even for {self.dtype}, which packs two values a byte"
            )

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Stored elements of one page: [layers, 2 (key, value), page_size, heads, head_dim].

        The last axis is half as long for `float4_e2m1fn`, whose elements hold two values.
        """
        packed = self.head_dim // self.dtype.values_per_element
        return (self.num_layers, 2, self.page_size, self.n_kv_heads, packed)


def whole_number(value: object, name: str, least: int = 1, most: int = 2**31 - 1) -> int:
    """A number that was given as `name`, as an `int`; numpy's integers are accepted.

    Raises:
        ValueError: it is no whole number from `least` to `most`; a bool is none.
    """
    try:
        return _parse_count(value, least, most)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)}: {error}") from None


def _parse_count(value: object, least: int = 1, most: int = 2**31 - 1) -> int:
    count = _integer(value)
    if count is None or not least <= count <= most:
        upper = "2**31 - 1" if most == 2**31 - 1 else most
        raise ValueError(f"must be a whole number from {least} to {upper}")
    return count


def _parse_degree(value: object) -> int:
    degree = _parse_count(value)
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


def _parse_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def _parse_choice(allowed: tuple[str, ...]) -> Callable[[object], object]:
    def parse(value: object) -> object:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(map(repr, allowed))}")
        return value

    return parse


def _parse_policy(value: object) -> EvictionPolicy:
    names = tuple(policy.value for policy in EvictionPolicy)
    return EvictionPolicy(str(_parse_choice(names)(value)))


def _parse_seed(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise ValueError("must be 64 hexadecimal digits (the .hex() of 32 bytes) or None")
    return value.lower()


def _parse_connector(given: KVConnectorConfig | Mapping[str, object] | str) -> KVConnectorConfig:
    """The configuration that is meant; this alone needs pydantic."""
    from pydantic import ValidationError

    from pagekeeper.connector_config import KVConnectorConfig

    try:
        return KVConnectorConfig.of(given)
    except ValidationError as error:
        refusals = [f"kv_connector_config.{refusal['msg']}" for refusal in error.errors()]
        raise ValueError("; ".join(refusals)) from error
    except TypeError as error:
        raise ValueError(f"kv_connector_config={shown(given)}: {error}") from error


def parse_priority(value: object) -> int:
    """A retention priority, 0 to 100, given as a number or a name.

    Raises:
        ValueError: it is neither.
    """
    priority = _PRIORITIES.get(value) if isinstance(value, str) else _integer(value)
    if priority is None or not 0 <= priority <= 100:
        raise ValueError("must be a whole number from 0 to 100, 'low' (20), 'medium' (35) or 'high' (80)")
    return priority


def _parse_priority_or_none(value: object) -> int | None:
    return None if value is None else parse_priority(value)


def _integer(value: object) -> int | None:
    """The value as an `int`, numpy's integers included; None for a bool and for what is no integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


_PRIORITIES = {"low": 20, "medium": 35, "high": 80}
