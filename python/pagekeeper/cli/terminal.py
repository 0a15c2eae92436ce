"""Tables for people, on terminals of any width."""

from __future__ import annotations

from rich.console import Console, RenderableType

__all__ = ["show"]

_LEAST_COLUMNS = 80  # in fewer, tables would lose digits


def show(what: RenderableType) -> None:
    """Prints to stdout. Where the terminal is too narrow, its lines are longer than it is wide."""
    console = Console()
    if console.width < _LEAST_COLUMNS:
        console = Console(width=_LEAST_COLUMNS)
    console.print(what)
