"""Which connector a cache has, and how large its tiers are.

It needs pydantic, so the package loads it when a configuration is first named or given, and not before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from pydantic import Field, model_validator

from pagekeeper.config_model import (
    Configuration,
    Parser,
    Unit,
    callers_level,
    flag,
    gibibytes,
    one_of,
    optional,
    path,
    refusal,
    text,
)
from pagekeeper.errors import hidden
from pagekeeper.params import whole_number

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Fsync", "KVConnectorConfig", "KVConnectorType"]

Fsync: TypeAlias = Literal["batch", "none", "always"]


class KVConnectorType(StrEnum):
    """Where blocks go beyond the device. Equal to its own name as a string.

    Attributes:
        null: "null". Nowhere.
        rust_tiered: "rust_tiered". To host memory and disks of this machine, copied by native threads.
        tiered: "tiered". A deprecated name of `rust_tiered`, which a configuration turns into that.
        dkv: "dkv". To a distributed store.
    """

    null = "null"
    rust_tiered = "rust_tiered"
    tiered = "tiered"
    dkv = "dkv"


class KVConnectorConfig(Configuration, frozen=True):
    """The connector of a cache: its type, and the sizes and ways of its tiers.

    Configurations are frozen; equal ones hash alike. Fields that a type has no use for are checked and kept.
    Numbers may be numpy's; a bool and a string are none.

    Args:
        type: a `KVConnectorType` or its name. None is "null": no connector.
        host_offload_max_gb: host memory for blocks, in GiB (2**30 bytes), above 0. None is 1.5 times the
            device pool, at most half of the memory that the process may still use.
        disk_offload_dir: a directory for blocks (str or `os.PathLike`), which survives a restart. It is made
            if it is not there, and belongs to one model: the manager needs `model_name`. None is a private
            temporary one if `disk_offload_max_gb` is above 0, and no disk tier otherwise.
        disk_offload_max_gb: disk space for blocks, in GiB. 0 is no disk tier. None is 2 times the device pool
            if a directory is named, at most nine tenths of what is free there.
        disk_rank: which of the processes that serve one model this is, from 0. Each has a store of its own in
            the directory, as `rank-0`.
        num_disk_workers: most reads, and most writes, of the disk in flight, at least 1; more than 1024
            are not used.
        fsync: when what was written to disk is synced: "batch" many blocks at a time, "always" each block,
            "none" whenever the system does.
        block_store_endpoint: address of the distributed store, such as "tcp://host:port" or "ipc:///path".
            "dkv" needs one. It may hold a password: the printed form leaves it out.
        num_copy_lanes: threads that copy between device and host, 1 to 64.
        host_pin_memory: whether host memory is pinned, so that the system does not swap it. What cannot be
            pinned is used all the same, with a warning in the log.
        host_numa_node: the NUMA node, from 0, that host memory is taken from and that the tier's threads run
            on. None is wherever the system puts them.

    Raises:
        pydantic.ValidationError: a `ValueError`. A value is not allowed, a field is unknown, or "dkv" has no
            endpoint. The message says which, and what is allowed.

    >>> KVConnectorConfig(type="rust_tiered", host_offload_max_gb=8).host_offload_max_gb
    8.0
    """

    type: KVConnectorType = KVConnectorType.null
    host_offload_max_gb: Annotated[float | None, Unit("GiB")] = None
    disk_offload_dir: str | None = None
    disk_offload_max_gb: Annotated[float | None, Unit("GiB")] = None
    disk_rank: int = 0
    num_disk_workers: Annotated[int, Unit("operations")] = 32
    fsync: Fsync = "batch"
    block_store_endpoint: str | None = Field(default=None, repr=False)
    num_copy_lanes: Annotated[int, Unit("threads")] = 1
    host_pin_memory: bool = False
    host_numa_node: int | None = None

    if TYPE_CHECKING:  # what may be given is wider than what is kept

        def __init__(
            self,
            *,
            type: KVConnectorType | str | None = KVConnectorType.null,
            host_offload_max_gb: float | None = None,
            disk_offload_dir: str | os.PathLike[str] | None = None,
            disk_offload_max_gb: float | None = None,
            disk_rank: int = 0,
            num_disk_workers: int = 32,
            fsync: Fsync = "batch",
            block_store_endpoint: str | None = None,
            num_copy_lanes: int = 1,
            host_pin_memory: bool = False,
            host_numa_node: int | None = None,
        ) -> None: ...

    @classmethod
    def of(cls, given: KVConnectorConfig | Mapping[str, object] | str | None) -> KVConnectorConfig:
        """The configuration that is meant by one, by a mapping of its fields, or by a type's name alone.

        Raises:
            TypeError: `given` is none of these.
            pydantic.ValidationError: it makes no configuration; the message says why.

        >>> KVConnectorConfig.of("rust_tiered") == KVConnectorConfig.of({"type": "rust_tiered"})
        True
        """
        if isinstance(given, KVConnectorConfig):
            return given
        if given is None or isinstance(given, str):
            return cls(type=given)
        if isinstance(given, Mapping):
            return cls.model_validate(dict(given))
        raise TypeError(
            "a connector's configuration is a KVConnectorConfig, a mapping of its fields, a type's name "
            f"or None; got {type(given).__name__}"
        )

    @classmethod
    def parsers(cls) -> Mapping[str, Parser]:
        """What reads each field."""
        return _PARSERS

    @model_validator(mode="after")
    def _need_endpoint(self) -> Self:
        if self.type is KVConnectorType.dkv and self.block_store_endpoint is None:
            raise refusal(
                "block_store_endpoint=None: type 'dkv' needs the address of its store, "
                "such as 'tcp://host:port' or 'ipc:///path'"
            )
        return self


def _connector_type(value: object, name: str) -> KVConnectorType:
    if value is None:
        return KVConnectorType.null
    if isinstance(value, str) and value == KVConnectorType.tiered:
        warnings.warn(
            f"{name}='tiered' is a deprecated name of 'rust_tiered': give that instead",
            DeprecationWarning,
            stacklevel=callers_level(),
        )
        return KVConnectorType.rust_tiered
    return KVConnectorType(one_of("null", "rust_tiered", "dkv")(value, name))


def _endpoint(value: object, name: str) -> str:
    if not text(value):
        raise ValueError(f"{name}={hidden(value)}: must be an address such as 'tcp://host:port'")
    return str(value)


_PARSERS: dict[str, Parser] = {
    "type": _connector_type,
    "host_offload_max_gb": optional(partial(gibibytes, zero=False)),
    "disk_offload_dir": optional(path),
    "disk_offload_max_gb": optional(partial(gibibytes, zero=True)),
    "disk_rank": partial(whole_number, least=0),
    "num_disk_workers": whole_number,
    "fsync": one_of(*get_args(Fsync)),
    "block_store_endpoint": optional(_endpoint),
    "num_copy_lanes": partial(whole_number, most=64),
    "host_pin_memory": flag,
    "host_numa_node": optional(partial(whole_number, least=0)),
}
