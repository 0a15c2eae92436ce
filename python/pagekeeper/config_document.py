"""What is to be read of configurations, taken from themselves: descriptions of fields, and tables of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from pagekeeper.config_model import Configuration, Unit

__all__ = ["descriptions", "table"]


def descriptions(cls: type[Configuration]) -> dict[str, str]:
    """What the docstring of a configuration says of each field, in one line."""
    arguments = (inspect.getdoc(cls) or "").partition("Args:\n")[2].partition("\n\n")[0]
    items = re.split(r"^ {4}(?=\w+: )", arguments, flags=re.MULTILINE)
    pairs = (item.partition(": ") for item in items if item.strip())
    return {name: " ".join(said.split()) for name, _, said in pairs}


def table(cls: type[Configuration]) -> Iterator[str]:
    """The lines of a table of all fields: what each is, its unit, what it may be, its default."""
    yield "| field | default | unit | allowed | what it is |"
    yield "|---|---|---|---|---|"
    for name, said in descriptions(cls).items():
        field = cls.model_fields[name]
        unit = next((it.name for it in field.metadata if isinstance(it, Unit)), "")
        yield f"| `{name}` | {_default(field.default)} | {unit} | {_allowed(cls, name)} | {_sentence(said)} |"


def _default(value: Any) -> str:
    return f"`{value.value!r}`" if hasattr(value, "value") else f"`{value!r}`"


def _allowed(cls: type[Configuration], name: str) -> str:
    """As a refusal says it."""
    try:
        cls.parsers()[name](object(), name)
    except ValueError as error:
        return re.sub(r"^.*?: (must be )?", "", str(error)).replace("|", "\\|")
    raise AssertionError(f"{cls.__name__}.{name} takes anything")


def _sentence(said: str) -> str:
    return (said[0].upper() + said[1:]).replace("|", "\\|")
