"""Bytes as people write and read them."""

from __future__ import annotations

import re

import click

__all__ = ["parse_size", "shown_size"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """The number of bytes that an option says: 80GiB, 1.5TiB, 80GB, 1000.

    Raises:
        click.BadParameter: it says none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 0 < float(match[1]) * unit < 2**63:
        raise click.BadParameter(f"{text!r} is no size above 0, such as 80GiB, 512MiB, 80GB or 1000 (bytes)")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def shown_size(count: float) -> str:
    """Bytes in the unit that fits."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{count:,.0f} bytes" if units[0] == "bytes" else f"{size:,.2f} {units[0]}"
