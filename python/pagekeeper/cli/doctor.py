"""`pagekeeper doctor`: check the directory of a disk tier, or wipe it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pagekeeper.cli.sizes import shown_size
from pagekeeper.doctor import Examination, NoStoreError, StoreReport, examine, files_of, wipe

__all__ = ["doctor"]

_EXIT_CODES = {"sound": 0, "damaged": 1, "unreadable": 2}
_STYLES = {"sound": "bold green", "damaged": "bold red", "unreadable": "bold red"}

_EPILOG = """\b
Exit codes: 0 sound, 1 damage was found, 2 no store, or one that cannot be read.

\b
Examples:
  pagekeeper doctor /var/cache/kv
  pagekeeper doctor /var/cache/kv --quick --json
  pagekeeper doctor /var/cache/kv --wipe
"""


class _Refused(click.ClickException):
    exit_code = 2


@click.command(epilog=_EPILOG, short_help="Check a disk tier offline, or wipe it.")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="Check entries and sizes alone, and read no block.")
@click.option("--wipe", "wipes", is_flag=True, help="Remove the stores' files, and nothing else.")
@click.option("--yes", is_flag=True, help="Wipe without a question.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(directory: Path, quick: bool, wipes: bool, yes: bool, as_json: bool) -> None:
    """Check the stores in DIR, which is what `disk_offload_dir` names.

    Every block is read and compared with its checksum. Nothing is changed, so the stores may be open in
    another process meanwhile. Damage does no harm to answers: a store checks what it reads, and a damaged
    block is a miss.
    """
    if yes and not wipes:
        raise click.UsageError("--yes goes with --wipe")
    if quick and wipes:
        raise click.UsageError("--quick goes with a check, not with --wipe")
    try:
        if wipes:
            _wipe(directory, yes, as_json)
        else:
            _check(directory, quick, as_json)
    except (NoStoreError, ValueError) as error:
        raise _Refused(str(error)) from None
    except OSError as error:
        raise _Refused(f"{directory}: {error}") from None


def _check(directory: Path, quick: bool, as_json: bool) -> None:
    found = _examine_with_progress(directory, deep=not quick)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        Console().print(_summary(found, quick))
    click.get_current_context().exit(_EXIT_CODES[found.status])


def _examine_with_progress(directory: Path, *, deep: bool) -> Examination:
    terminal = Console(stderr=True)
    with Progress(
        TextColumn("Checking {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeRemainingColumn(),
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None)
        return examine(
            directory,
            deep=deep,
            on_blocks=lambda rank, done, all: progress.update(
                task, description=rank, completed=done, total=all
            ),
        )


def _wipe(directory: Path, yes: bool, as_json: bool) -> None:
    try:
        found = examine(directory, deep=False)
    except NoStoreError:
        found = Examination(directory=str(directory), stores=[], foreign=[])
    for store in found.stores:
        if store.in_use:
            raise _Refused(f"{store.path}: is in use{_by(store)}: stop that first; nothing was removed")
    files = files_of(directory)
    if files and not yes:
        for path in files:
            click.echo(f"{shown_size(path.stat().st_blocks * 512):>10}  {path}", err=True)
        if not click.confirm("Remove these files, and the cached KV with them?", err=True):
            raise _Refused("nothing was removed")
    wiped = wipe(directory)
    if as_json:
        click.echo(json.dumps(asdict(wiped), indent=2))
        return
    click.echo(f"Removed {len(files)} files from {directory}.")
    for left in wiped.left:
        click.echo(f"Left, as it is not ours: {left}")


def _summary(found: Examination, quick: bool) -> RenderableType:
    title = Text.assemble(("Disk tier in ", "bold"), (found.directory, "bold cyan"))
    parts: list[RenderableType] = ["", title]
    for store in found.stores:
        parts += ["", _table(store, quick)]
    if found.foreign:
        parts += ["", f"Also there, and not ours: {', '.join(found.foreign)}"]
    return Group(*parts)


def _table(store: StoreReport, quick: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")

    def row(label: str, value: str, style: str = "") -> None:
        table.add_row(Text(label, style), Text(value, style))

    status = store.status if store.error is None else f"{store.status}: {store.error}"
    row(Path(store.path).name, status, _STYLES[store.status])
    if store.in_use:
        row("  in use", f"{_by(store).strip() or 'by another machine'}; it is only read", "yellow")
    for problem in store.problems:
        row("  problem", problem, "red")
    if store.error is not None:
        return table
    if store.block_bytes is not None:
        room = f"room for {store.slots:,} of {shown_size(store.block_bytes)}"
        row("  blocks", f"{store.blocks:,}, {room}")
        row("    checked", "none: --quick" if quick else f"{store.checked_blocks:,}")
        row("    damaged", f"{store.damaged_blocks:,}", "red" if store.damaged_blocks else "")
        row("  damaged entries", f"{store.damaged_entries:,}", "red" if store.damaged_entries else "")
        row("  old entries", f"{store.old_entries:,}")
        row("  resets", f"{store.epoch:,}")
    row("  on disk", f"{shown_size(store.disk_bytes)}; {shown_size(store.free_bytes)} are free")
    for name, value in store.fingerprint.items():
        row(f"  {name.replace('_', ' ')}", value or "none")
    if store.seed_fingerprint:
        row("  seed's fingerprint", store.seed_fingerprint)
    if store.foreign:
        row("  not ours", ", ".join(store.foreign))
    return table


def _by(store: StoreReport) -> str:
    return f" by process {store.process}" if store.process else ""
