"""Which connector a cache has, and how large its tiers are.

It needs pydantic, so the package loads it when a configuration is first named or given, and not before.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from pagekeeper.errors import shown
from pagekeeper.params import whole_number

if TYPE_CHECKING:
    from typing import Self

    from pydantic import ValidationInfo

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


class KVConnectorConfig(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
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
    host_offload_max_gb: float | None = None
    disk_offload_dir: str | None = None
    disk_offload_max_gb: float | None = None
    disk_rank: int = 0
    num_disk_workers: int = 32
    fsync: Fsync = "batch"
    block_store_endpoint: str | None = Field(default=None, repr=False)
    num_copy_lanes: int = 1
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

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the fields in `update` changed, and checked. `deep` makes no difference.

        Raises:
            pydantic.ValidationError: the changed configuration is not allowed.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate(given | dict(update or {}))

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: object) -> object:
        names = tuple(cls.model_fields)
        unknown = [name for name in given if name not in names] if isinstance(given, Mapping) else []
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__, [_unknown_field(name, names) for name in unknown], hide_input=True
            )
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _parse(cls, given: object, info: ValidationInfo) -> object:
        name = str(info.field_name)
        try:
            return _PARSERS[name](given, name)
        except ValueError as error:
            raise _refusal(str(error)) from None

    @model_validator(mode="after")
    def _need_endpoint(self) -> Self:
        if self.type is KVConnectorType.dkv and self.block_store_endpoint is None:
            raise _refusal(
                "block_store_endpoint=None: type 'dkv' needs the address of its store, "
                "such as 'tcp://host:port' or 'ipc:///path'"
            )
        return self


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"message": message})


def _unknown_field(name: object, known: tuple[str, ...]) -> InitErrorDetails:
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 60:
        name = shown(name)
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
    return InitErrorDetails(type=_refusal(f"{name}: unknown; {hint}"), loc=(name,), input=None)


_Parser: TypeAlias = Callable[[object, str], object]
"""From what was given, and the field's name, to what is kept. A ValueError says `name=given: must be ...`."""


def _optional(parse: _Parser) -> _Parser:
    def parse_unless_none(value: object, name: str) -> object:
        try:
            return None if value is None else parse(value, name)
        except ValueError as error:
            raise ValueError(f"{error}, or None") from None

    return parse_unless_none


def _one_of(*allowed: str) -> Callable[[object, str], str]:
    def parse(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}={shown(value)}: must be one of {', '.join(map(repr, allowed))}")
        return str(value)

    return parse


def _connector_type(value: object, name: str) -> KVConnectorType:
    if value is None:
        return KVConnectorType.null
    if isinstance(value, str) and value == KVConnectorType.tiered:
        warnings.warn(
            f"{name}='tiered' is a deprecated name of 'rust_tiered': give that instead",
            DeprecationWarning,
            stacklevel=_callers_level(),
        )
        return KVConnectorType.rust_tiered
    return KVConnectorType(_one_of("null", "rust_tiered", "dkv")(value, name))


def _callers_level() -> int:
    """The `stacklevel` of a warning that the calling function gives to the code which uses the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("pagekeeper.", "pydantic.")):
        frame, level = frame.f_back, level + 1
    return level


def _gibibytes(value: object, name: str, *, zero: bool) -> float:
    size = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):
            size = float(value)
    if math.isfinite(size) and (size > 0 or (zero and size == 0)):
        return size
    allowed = "from 0" if zero else "above 0"
    raise ValueError(f"{name}={shown(value)}: must be a finite number of GiB {allowed}")


def _path(value: object, name: str) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not _is_text(path):
        raise ValueError(f"{name}={shown(value)}: must be a path (a str that is not empty, an os.PathLike)")
    return str(path)


def _endpoint(value: object, name: str) -> str:
    if not _is_text(value):
        raise ValueError(f"{name}={shown(value)}: must be an address such as 'tcp://host:port'")
    return str(value)


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: must be True or False")
    return value


def _is_text(value: object) -> TypeGuard[str]:
    """Whether `value` is a string that means something outside of Python: no NUL in it, no lone surrogate."""
    return isinstance(value, str) and value != "" and re.search("[\0\ud800-\udfff]", value) is None


_PARSERS: dict[str, _Parser] = {
    "type": _connector_type,
    "host_offload_max_gb": _optional(partial(_gibibytes, zero=False)),
    "disk_offload_dir": _optional(_path),
    "disk_offload_max_gb": _optional(partial(_gibibytes, zero=True)),
    "disk_rank": partial(whole_number, least=0),
    "num_disk_workers": whole_number,
    "fsync": _one_of(*get_args(Fsync)),
    "block_store_endpoint": _optional(_endpoint),
    "num_copy_lanes": partial(whole_number, most=64),
    "host_pin_memory": _flag,
    "host_numa_node": _optional(partial(whole_number, least=0)),
}
