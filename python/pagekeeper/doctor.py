"""Checks the directory of a disk tier offline, and wipes it.

The directory is the one that a configuration names, `disk_offload_dir`: it holds one store a rank. A check
changes nothing, locks nothing, and may be made while the stores are open elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pagekeeper._native import STORE_FILES, inspect_store, wipe_store

__all__ = ["Examination", "NoStoreError", "StoreReport", "Wiped", "examine", "files_of", "wipe"]

Status: TypeAlias = Literal["sound", "damaged", "unreadable"]


class NoStoreError(Exception):
    """There is no store in a directory."""


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """What a store holds and what is damaged.

    Attributes:
        path: its directory.
        status: "sound", "damaged", or "unreadable": then `error` says why, and the rest is not known.
        error: why it cannot be read.
        problems: what is wrong beyond single entries and blocks.
        in_use: whether a process has it open.
        process: the number of that process, if it is known.
        format: the format of its files; None if its manifest is missing or damaged.
        fingerprint: what its blocks are blocks of.
        seed_fingerprint: the first 16 digits of the SHA-256 of the seed's 64 digits.
        block_bytes: bytes of a block.
        slots: blocks that its files have room for.
        blocks: blocks that it would hold if it were opened.
        checked_blocks: blocks whose bytes were compared with their checksums.
        damaged_blocks: blocks that are not what they were.
        damaged_entries: entries that are not what they were; nothing is known of their blocks.
        old_entries: entries of blocks that a reset has forgotten or that were written anew.
        epoch: resets that it has seen.
        disk_bytes: bytes that its files take on the disk.
        free_bytes: bytes that the disk has left.
        foreign: names in its directory that are no files of ours.
    """

    path: str
    status: Status = "unreadable"
    error: str | None = None
    problems: list[str] = field(default_factory=list)
    in_use: bool = False
    process: int | None = None
    format: int | None = None
    fingerprint: dict[str, str] = field(default_factory=dict)
    seed_fingerprint: str | None = None
    block_bytes: int | None = None
    slots: int = 0
    blocks: int = 0
    checked_blocks: int = 0
    damaged_blocks: int = 0
    damaged_entries: int = 0
    old_entries: int = 0
    epoch: int = 0
    disk_bytes: int = 0
    free_bytes: int = 0
    foreign: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found in a directory.

    Attributes:
        directory: the directory.
        stores: its stores, by rank.
        foreign: what else lies in it.
    """

    directory: str
    stores: list[StoreReport]
    foreign: list[str]

    @property
    def status(self) -> Status:
        """The worst of its stores': "unreadable" before "damaged" before "sound"."""
        found = {store.status for store in self.stores}
        return "unreadable" if "unreadable" in found else "damaged" if "damaged" in found else "sound"

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON knows."""
        return {"status": self.status, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Wiped:
    """What a wipe did.

    Attributes:
        removed: paths of the files and of the ranks' directories that are gone.
        left: paths of what is not ours.
    """

    removed: list[str]
    left: list[str]


def examine(
    directory: Path, *, deep: bool = True, on_blocks: Callable[[str, int, int], object] = lambda *_: None
) -> Examination:
    """Checks the stores in a directory.

    Args:
        directory: as a configuration names it.
        deep: read every block and compare it with its checksum. Otherwise entries and sizes alone.
        on_blocks: called with the name of a rank, the number of its blocks that are checked, and of all.

    Raises:
        NoStoreError: there is no store.
        OSError: the directory cannot be read.
    """
    stores = []
    for rank in _ranks(directory):
        try:
            found = inspect_store(rank, deep, partial(on_blocks, rank.name))
        except FileNotFoundError:
            continue  # a directory without a store
        except (OSError, ValueError) as error:
            stores.append(StoreReport(path=str(rank), error=str(error)))
        else:
            status: Status = "sound" if found.pop("sound") else "damaged"
            stores.append(StoreReport(path=str(rank), status=status, **found))
    if not stores:
        raise NoStoreError(_nothing_in(directory))
    foreign = {path.name for path in directory.iterdir()} - {rank.name for rank in _ranks(directory)}
    return Examination(directory=str(directory), stores=stores, foreign=sorted(foreign))


def files_of(directory: Path) -> list[Path]:
    """The files of all stores in a directory, damaged and unreadable ones too.

    Raises:
        OSError: the directory cannot be read.
    """
    return [path for rank in _ranks(directory) for path in sorted(rank.iterdir()) if path.name in STORE_FILES]


def wipe(directory: Path) -> Wiped:
    """Removes the files of the stores in a directory, and the directories of ranks that are empty then.

    The directory itself stays, and so does what is not ours.

    Raises:
        NoStoreError: there is nothing of ours.
        ValueError: files of our names lie there that are no store's, as there is no manifest.
        OSError: a store is in use, or the system refuses; stores of ranks before it are gone.
    """
    ours = files_of(directory)
    if not ours:
        raise NoStoreError(_nothing_in(directory))
    ranks = sorted({path.parent for path in ours})
    for rank in ranks:
        wipe_store(rank)
        if rank.exists() and not any(rank.iterdir()):
            rank.rmdir()
    gone = [path for path in [*ours, *ranks] if not path.exists()]
    left = [path for place in [directory, *ranks] if place.exists() for path in place.iterdir()]
    return Wiped(removed=sorted(map(str, gone)), left=sorted(str(path) for path in left if path not in ranks))


def _ranks(directory: Path) -> list[Path]:
    """Where the stores lie: one a rank, and one more for each further group of layers."""
    names = [re.fullmatch(r"rank-(\d+)(?:-group-(\d+))?", path.name) for path in directory.iterdir()]
    places = sorted((int(name[1]), int(name[2] or 0), name[0]) for name in names if name)
    return [directory / name for *_, name in places if (directory / name).is_dir()]


def _nothing_in(directory: Path) -> str:
    if any((directory / name).is_file() for name in ("manifest.json", "entries")):
        return f"{directory}: is the directory of one rank; name the one that it lies in"
    return f"{directory}: there is no store in it; its stores would lie in rank-0, rank-1, ..."
