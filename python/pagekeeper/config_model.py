"""What configurations have in common: models that are frozen, know their fields, and say what is wrong.

They need pydantic, so the package loads them when a configuration is first named or given, and not before.
"""

from __future__ import annotations

import json
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, get_args

from pydantic import BaseModel, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from pagekeeper.errors import hidden, shown
from pagekeeper.params.checks import finite_number

if TYPE_CHECKING:
    from typing import Self

    from pydantic import ValidationInfo

__all__ = [
    "Configuration",
    "Parser",
    "Unit",
    "callers_level",
    "flag",
    "from_json",
    "gibibytes",
    "named",
    "one_of",
    "optional",
    "path",
    "refusal",
    "text",
    "told",
    "without_doubles",
]

Parser: TypeAlias = Callable[[object, str], object]
"""From what was given, and the field's name, to what is kept. A ValueError says `name=given: must be ...`."""


@dataclass(frozen=True)
class Unit:
    """What a number of a field counts, as an annotation of the field."""

    name: str


class Configuration(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    """A configuration: frozen, equal ones hash alike, unknown fields are refused with the one that was meant.

    A subclass has a parser for each of its fields, and tells of each in the `Args:` of its docstring.
    """

    @classmethod
    @abstractmethod
    def parsers(cls) -> Mapping[str, Parser]:
        """What reads each field."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with the fields in `update` changed, and checked. `deep` makes no difference.

        Raises:
            pydantic.ValidationError: the changed configuration is not allowed.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate(given | dict(update or {}))

    @classmethod
    def from_text(cls, name: str, given: str) -> object:
        """What `given` says as a value of a field, where all there is is text: on a command line, say.

        Text that says nothing of the field's type is left as it is, for the field's parser to refuse.

        Raises:
            ValueError: the text begins as a mapping does, and is none.
        """
        annotation = cls.model_fields[name].annotation
        types = get_args(annotation) or (annotation,)
        word = given.strip().lower()
        if type(None) in types and word in ("none", "null"):
            return None
        if bool in types:
            return _WORDS.get(word, given)
        if any(isinstance(it, type) and issubclass(it, Configuration) for it in types):
            return _from_json(given, name) if word.startswith("{") else given
        for number in (int, float):
            if number in types:
                with suppress(ValueError):
                    return number(word)
        return given

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """The configuration that a JSON object has.

        Raises:
            pydantic.ValidationError: there is no such object, or it makes no configuration.
        """
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] != "json_invalid":
                raise
        raise refusal(f"{cls.__name__}: {first['msg']}")  # without the text, which may have a secret

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            raise refusal(f"{cls.__name__}: got {type(given).__name__}, must be a mapping of its fields")
        names = tuple(cls.model_fields)
        if unknown := [_unknown_field(name, names) for name in given if name not in names]:
            raise _refused(unknown)
        return given

    def __setattr__(self, name: str, value: object) -> None:
        raise self._frozen(name)

    def __delattr__(self, name: str) -> None:
        raise self._frozen(name)

    def _frozen(self, name: str) -> ValidationError:
        """What pydantic says too, but with the value that was to be set, which may be a secret."""
        return _refused([InitErrorDetails(type="frozen_instance", loc=(name,), input=None)])

    @field_validator("*", mode="before")
    @classmethod
    def _parse(cls, given: object, info: ValidationInfo) -> object:
        name = str(info.field_name)
        try:
            return cls.parsers()[name](given, name)
        except ValueError as error:
            raise refusal(str(error)) from None


def refusal(message: str, *fields: str) -> ValidationError:
    """What a validator raises; `fields` are those that it is about, if it is about several.

    It does not have what was given, which may be a secret: the message says what may be told of it.
    """
    return _refused([_details(message, *fields)])


def _refused(details: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("configuration", details, hide_input=True)


def _details(message: str, *fields: str, loc: tuple[str, ...] = ()) -> InitErrorDetails:
    told = PydanticCustomError("refused", "{message}", {"message": message, "fields": fields})
    return InitErrorDetails(type=told, loc=loc, input=None)


def _unknown_field(name: object, known: tuple[str, ...]) -> InitErrorDetails:
    given = str(name)
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 60:
        name = shown(name)
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"
    return _details(f"{name}: unknown; {hint}", given, loc=(given,))


def callers_level() -> int:
    """The `stacklevel` of a warning that the calling function gives to the code which uses the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("pagekeeper.", "pydantic.")):
        frame, level = frame.f_back, level + 1
    return level


# Parsers.


def optional(parse: Parser) -> Parser:
    """What takes None too, as None."""

    def parse_unless_none(value: object, name: str) -> object:
        try:
            return None if value is None else parse(value, name)
        except ValueError as error:
            raise ValueError(f"{error}, or None") from None

    return parse_unless_none


def named(parse: Callable[[object], object]) -> Parser:
    """A parser of what the parameters of a cache take, which knows no name."""

    def parse_by_name(value: object, name: str) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{name}={shown(value)}: {error}") from None

    return parse_by_name


def one_of(*allowed: str) -> Callable[[object, str], str]:
    """What takes one of these words."""

    def parse(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}={told(value)}: must be one of {', '.join(map(repr, allowed))}")
        return str(value)

    return parse


def gibibytes(value: object, name: str, *, zero: bool) -> float:
    """A size in GiB, above 0 or from 0."""
    size = finite_number(value)
    if size > 0 or (zero and size == 0):
        return size
    allowed = "from 0" if zero else "above 0"
    raise ValueError(f"{name}={shown(value)}: must be a finite number of GiB {allowed}")


def path(value: object, name: str) -> str:
    """A path, as a str."""
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not text(given):
        raise ValueError(f"{name}={shown(value)}: must be a path (a str that is not empty, an os.PathLike)")
    return str(given)


def flag(value: object, name: str) -> bool:
    """True or False, and nothing that only counts as one."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}: must be True or False")
    return value


def text(value: object) -> TypeGuard[str]:
    """Whether `value` is a string that means something outside of Python: no NUL in it, no lone surrogate."""
    return isinstance(value, str) and value != "" and re.search("[\0\ud800-\udfff]", value) is None


def told(value: object) -> str:
    """A value where a word is expected. What is no word may be anything, an address with a password too."""
    parts = value if isinstance(value, list | tuple) else [value]
    may_hide = any(isinstance(part, _TEXTS) and not _is_word(part) for part in parts)
    return hidden(value) if may_hide else shown(value)


def from_json(text: str) -> object:
    """What JSON says.

    Raises:
        ValueError: it is none, has a key twice, or is nested too deeply to be read.
    """
    try:
        return json.loads(text, object_pairs_hook=without_doubles)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def without_doubles(pairs: Iterable[tuple[Any, object]]) -> dict[Any, object]:
    """A mapping of what a text has, each key once.

    Raises:
        ValueError: a key is there twice.
    """
    given: dict[Any, object] = {}
    for key, value in pairs:
        if key in given:
            raise ValueError(f"{shown(key)} is there twice")
        given[key] = value
    return given


def _is_word(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w .+-]{0,40}", value) is not None


def _from_json(given: str, name: str) -> object:
    try:
        return from_json(given)
    except ValueError as error:
        raise ValueError(f"{name}={hidden(given)}: is no JSON object: {error}") from None


_TEXTS = (str, bytes, Mapping, list, tuple)
"""What a secret may be, or be in."""

_WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
"""True and False as text says them."""
