"""Values as they were given, turned into what is kept, or refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from typing import TypeVar

from pagekeeper.errors import shown

__all__ = [
    "finite_number",
    "integer",
    "keep",
    "parse_choice",
    "parse_count",
    "parse_flag",
    "parse_instance",
    "parse_length",
    "parse_priority",
    "whole_number",
]

_Given = TypeVar("_Given")
_Instance = TypeVar("_Instance")


def keep(
    target: object,
    field: str,
    given: _Given,
    parse: Callable[[_Given], object],
    tell: Callable[[object], str] = shown,
) -> None:
    """Sets a field of a frozen dataclass to what `given` says.

    Raises:
        ValueError: `parse` refuses it; the message names the field and, as `tell` has it, what was given.
    """
    try:
        kept = parse(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field}={tell(given)}: {error}") from error
    object.__setattr__(target, field, kept)  # past the freeze


def whole_number(value: object, name: str, least: int = 1, most: int = 2**31 - 1) -> int:
    """A number that was given as `name`, as an `int`; numpy's integers are accepted.

    Raises:
        ValueError: it is no whole number from `least` to `most`; a bool is none.
    """
    try:
        return parse_count(value, least, most)
    except ValueError as error:
        raise ValueError(f"{name}={shown(value)}: {error}") from None


def parse_count(value: object, least: int = 1, most: int = 2**31 - 1) -> int:
    """A whole number from `least` to `most`."""
    count = integer(value)
    if count is None or not least <= count <= most:
        upper = "2**31 - 1" if most == 2**31 - 1 else most
        raise ValueError(f"must be a whole number from {least} to {upper}")
    return count


def parse_length(value: object) -> int:
    """A whole number from 0."""
    return parse_count(value, least=0)


def parse_flag(value: object) -> bool:
    """True or False, and nothing that only counts as one."""
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def parse_choice(allowed: tuple[str, ...]) -> Callable[[object], str]:
    """What gives back one of `allowed`."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"must be one of {', '.join(map(repr, allowed))}")
        return value

    return parse


def parse_instance(cls: type[_Instance]) -> Callable[[object], _Instance | None]:
    """What gives back an instance of `cls`, or None."""

    def parse(value: object) -> _Instance | None:
        if value is not None and not isinstance(value, cls):
            raise ValueError(f"must be a {cls.__name__} or None")
        return value

    return parse


def parse_priority(value: object) -> int:
    """A retention priority, 0 to 100, given as a number or a name.

    Raises:
        ValueError: it is neither.
    """
    priority = _PRIORITIES.get(value) if isinstance(value, str) else integer(value)
    if priority is None or not 0 <= priority <= 100:
        raise ValueError("must be a whole number from 0 to 100, 'low' (20), 'medium' (35) or 'high' (80)")
    return priority


def finite_number(value: object) -> float:
    """The value as a finite `float`, numpy's included; NaN for a bool and for what is no such number."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):
            return float(value) if math.isfinite(float(value)) else math.nan
    return math.nan


def integer(value: object) -> int | None:
    """The value as an `int`, numpy's integers included; None for a bool and for what is no integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


_PRIORITIES = {"low": 20, "medium": 35, "high": 80}
