"""A configuration from a command line, the environment and a file, and where each of its values is from.

The command line and the environment are read by pydantic-settings. It takes long to import, so the package
loads it when a configuration is read, and not before.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import yaml
from pydantic import Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from pagekeeper.config_document import descriptions
from pagekeeper.config_model import Configuration, from_json, told, without_doubles
from pagekeeper.errors import shown

__all__ = ["PREFIX", "read", "unknown_flags"]

PREFIX = "PAGEKEEPER_"
"""What variables of the environment begin with."""

MOST_BYTES, MOST_VALUES, MOST_DEPTH = 2**16, 2**12, 32
"""The largest file of settings, the values that it may have, and how deep they may be nested."""

_log = logging.getLogger("pagekeeper")

_Config = TypeVar("_Config", bound=Configuration)


class _Value(NamedTuple):
    """A value, and where it is from as messages tell it."""

    value: object
    origin: str


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        cli_kebab_case=True,
        cli_ignore_unknown_args=True,
        cli_exit_on_error=False,
        cli_hide_none_type=True,
        extra="allow",
    )


def read(
    cls: type[_Config], argv: Sequence[str] | None, given: Mapping[str, object]
) -> tuple[_Config, list[str]]:
    """The configuration that all places give together, and the flags of `argv` that are none of it.

    Raises:
        TypeError: `argv` is no list of strings.
        ValueError: what cannot be read, is unknown, or is not allowed.
    """
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(argv, str) or not all(isinstance(it, str) for it in argv):
        raise TypeError("argv: must be a list of str")
    argv = list(argv)
    values: dict[str, _Value] = {}
    flags, file, rest = _flags(cls, argv)
    for source in (
        _file(file),
        _environment(cls),
        flags,
        _python(given),
    ):  # later ones go before earlier ones
        values.update(source)
    try:
        return cls.model_validate({name: value for name, (value, _) in values.items()}), rest
    except ValidationError as error:
        raise ValueError("\n".join(_told(error, values))) from None


def unknown_flags(cls: type[Configuration], rest: Sequence[str]) -> str:
    """What is to be said of arguments that are left over."""
    flags = [_flag(name) for name in cls.model_fields]
    said = []
    for flag in (it.partition("=")[0] for it in rest if it.startswith("-")):  # its value may be a secret
        close = get_close_matches(flag, flags, n=1)
        said.append(f"{shown(flag)}: unknown flag" + (f"; did you mean {close[0]}?" if close else ""))
    return "\n".join(said) or f"{told(rest[0])}: belongs to no flag"


# Where values are.


def _python(given: Mapping[str, object]) -> dict[str, _Value]:
    return {name: _Value(value, "given in Python") for name, value in given.items()}


def _flags(cls: type[Configuration], argv: list[str]) -> tuple[dict[str, _Value], str | None, list[str]]:
    """Values of flags, the file that `--config` names, and arguments that are neither."""
    rest: list[str] = []

    def parse(parser: Any, arguments: list[str], namespace: Namespace | None = None) -> Namespace:
        parser.allow_abbrev = False
        known, unknown = parser.parse_known_args(arguments, namespace)
        rest.extend(unknown)
        return cast(Namespace, known)

    fields: dict[str, Any] = {
        "config": (str, Field(None, description="a file with the same settings, YAML or JSON")),
        **{
            name: (str, Field(cls.model_fields[name].default, description=said))
            for name, said in descriptions(cls).items()
        },
    }
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            create_model("Flags", __base__=_Settings, **fields), cli_parse_args=argv, parse_args_method=parse
        )
    except SettingsError as error:
        raise ValueError(str(error).removeprefix("error parsing CLI: ")) from None
    texts = dict(source())
    file = texts.pop("config", None)
    return _from_texts(cls, texts, _flag), file, rest


def _environment(cls: type[Configuration]) -> dict[str, _Value]:
    fields: dict[str, Any] = dict.fromkeys(cls.model_fields, (Any, None))
    for variable in os.environ:
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and name not in fields:
            for meant in get_close_matches(name, fields, n=1, cutoff=0.85):
                _log.warning("%s: no such setting; did you mean %s?", variable, PREFIX + meant.upper())
    source = EnvSettingsSource(
        create_model("Environment", __base__=_Settings, **fields), env_ignore_empty=True
    )
    return _from_texts(cls, source(), lambda name: PREFIX + name.upper())


def _from_texts(cls: type[Configuration], texts: Mapping[str, Any], origin: Any) -> dict[str, _Value]:
    values = {}
    for name, text in texts.items():
        if name in cls.model_fields:
            place = f"from {origin(name)}"
            try:
                values[name] = _Value(None if text is None else cls.from_text(name, text), place)
            except ValueError as error:
                raise ValueError(f"{error} ({place})") from None
    return values


def _file(name: str | None) -> dict[str, _Value]:
    if name is None:
        return {}
    try:
        if not Path(name).is_file():
            raise ValueError(f"--config {shown(name)}: there is no such file")
        with Path(name).open("rb") as file:
            given = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--config {shown(name)}: cannot be read: {error.strerror}") from None
    try:
        if len(given) > MOST_BYTES:
            raise ValueError(f"has more than {MOST_BYTES} bytes")
        content = _content(given.decode("utf-8-sig"), is_json=name.lower().endswith(".json"))
    except ValueError as error:
        raise ValueError(f"--config {shown(name)}: cannot be read as YAML or JSON: {error}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"--config {shown(name)}: must hold a mapping of fields to values")
    return {key: _Value(value, f"from {os.fspath(name)}") for key, value in content.items()}


def _content(text: str, *, is_json: bool) -> object:
    """What a file says. A refusal tells of the place, and not what is written there: it may be a secret."""
    if is_json:
        return from_json(text)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f": line {mark.line + 1} column {mark.column + 1}" if mark else ""
        problem = _OWN_WORDS.sub(r"\1", error.problem or error.context or "is no YAML")
        raise ValueError(f"{problem}{place}") from None
    except yaml.reader.ReaderError as error:
        raise ValueError(f"{error.reason}: character {error.position + 1}") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Reads plain values, within bounds, and refuses a mapping that has a key twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._values = 0
        self._sizes: dict[str, int] = {}  # values that each anchor stands for

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.peek_event(), self._values
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and event.anchor in self.anchors and event.anchor not in self._sizes:
            raise _error("an alias is in what it stands for", event)
        self._values += self._sizes.get(event.anchor, 1) if is_alias else 1
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise _error(f"is nested more than {MOST_DEPTH} deep", event)
        if self._values > MOST_VALUES:
            raise _error(f"has more than {MOST_VALUES} values, those of aliases counted each time", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None and not is_alias:
            self._sizes[event.anchor] = self._values - before
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, ArithmeticError):
            raise _error(f"is no {node.tag.rpartition(':')[2]}", node) from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, object]:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        scalars = [key for key, _ in pairs if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        try:
            without_doubles((self.construct_object(key), None) for key in scalars)
        except ValueError as error:
            raise _error(str(error), node) from None
        return dict(super().construct_mapping(node, deep))


_Loader.add_implicit_resolver(  # as JSON and YAML 1.2 have them: 5e-1
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _error(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


_OWN_WORDS = re.compile(r"(alias|tag|handle) ['\"].*", re.DOTALL)
"""What a refusal of YAML tells of the file: a password may begin as an alias or a tag does."""

_MERGE = "tag:yaml.org,2002:merge"
"""The key `<<`, which takes over what another mapping has, and may be there twice."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# What is said of them.


def _told(error: ValidationError, values: Mapping[str, _Value]) -> Iterator[str]:
    """A line for each refusal: with the places of the fields that it is about."""
    places = {str(name): value.origin for name, value in values.items()}
    for refused in error.errors():
        names = refused.get("ctx", {}).get("fields") or refused["loc"]
        origins = {str(name): places[str(name)] for name in names if str(name) in places}
        if len(origins) == 1:
            yield f"{refused['msg']} ({next(iter(origins.values()))})"
        elif origins:
            yield f"{refused['msg']} ({', '.join(f'{name} {origin}' for name, origin in origins.items())})"
        else:
            yield str(refused["msg"])
