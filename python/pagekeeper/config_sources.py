"""A configuration from a command line, the environment and a file, and where each of its values is from.

The command line and the environment are read by pydantic-settings. It takes long to import, so the package
loads it when a configuration is read, and not before.
"""

from __future__ import annotations

import json
import logging
import os
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
from pagekeeper.config_model import Configuration
from pagekeeper.errors import shown

__all__ = ["PREFIX", "read", "unknown_flags"]

PREFIX = "PAGEKEEPER_"
"""What variables of the environment begin with."""

_log = logging.getLogger("pagekeeper")

_Config = TypeVar("_Config", bound=Configuration)


class _Value(NamedTuple):
    """A value, and where it is from as messages tell it."""

    value: object
    origin: str


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
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
        ValueError: what cannot be read, is unknown, or is not allowed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
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
    for argument in (it for it in rest if it.startswith("-")):
        close = get_close_matches(argument.partition("=")[0], flags, n=1)
        said.append(f"{shown(argument)}: unknown flag" + (f"; did you mean {close[0]}?" if close else ""))
    return "\n".join(said) or f"{shown(rest[0])}: belongs to no flag"


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
    source = EnvSettingsSource(create_model("Environment", __base__=_Settings, **fields))
    return _from_texts(cls, source(), lambda name: PREFIX + name.upper())


def _from_texts(cls: type[Configuration], texts: Mapping[str, Any], origin: Any) -> dict[str, _Value]:
    return {
        name: _Value(None if text is None else cls.from_text(name, text), f"from {origin(name)}")
        for name, text in texts.items()
        if name in cls.model_fields
    }


def _file(name: str | None) -> dict[str, _Value]:
    if name is None:
        return {}
    if not Path(name).is_file():
        raise ValueError(f"--config {shown(name)}: there is no such file")
    try:
        text = Path(name).read_text(encoding="utf-8")
        content: object = json.loads(text) if name.lower().endswith(".json") else yaml.safe_load(text)
    except (ValueError, OSError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config {shown(name)}: cannot be read as YAML or JSON: {error}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(f"--config {shown(name)}: must hold a mapping of fields to values")
    return {key: _Value(value, f"from {os.fspath(name)}") for key, value in content.items()}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# What is said of them.


def _told(error: ValidationError, values: Mapping[str, _Value]) -> Iterator[str]:
    """A line for each refusal: with the places of the fields that it is about."""
    for refused in error.errors():
        names = refused.get("ctx", {}).get("fields") or refused["loc"]
        origins = {str(name): values[str(name)].origin for name in names if str(name) in values}
        if len(origins) == 1:
            yield f"{refused['msg']} ({next(iter(origins.values()))})"
        elif origins:
            yield f"{refused['msg']} ({', '.join(f'{name} {origin}' for name, origin in origins.items())})"
        else:
            yield str(refused["msg"])
