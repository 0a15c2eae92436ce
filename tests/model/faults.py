"""For tests of failures: a native module that fails on purpose (`make test-faults`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from model.host import HostCache
from pagekeeper import _native

needs_faults = pytest.mark.skipif(
    not hasattr(_native.Ledger, "force_panic"),
    reason="needs a native module built with faults: make test-faults",
)

PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from conftest import load_native
load_native(Path({_native.__file__!r}))
from model.faults import lanes
from model.host import HostCache, prompt_of
"""
"""How a program begins that is run for a test: with the native module that is tested."""


def lanes(cache: HostCache, do: Literal["copy", "hold", "fail", "panic"]) -> None:
    """What lanes do with copies from now on, those that they hold included."""
    cache.kv._connector.force_copies(do)  # type: ignore[union-attr]


def disk_does(
    cache: HostCache,
    call: Literal["read", "write", "sync", "entries"],
    do: Literal["work", "hold", "fail", "refuse"],
) -> None:
    """What the disk does with such calls from now on, those that it holds included.

    All are about blocks, but for "entries", which is any call on these. "refuse" is said of direct I/O alone.
    """
    for directory in cache.kv._disk:
        directory.force_disk(call, do)  # type: ignore[attr-defined]


def lose_memory(cache: HostCache, held: list[int] | None = None) -> None:
    """Host memory is out of reach; with `held`, it is back, and in these units is what was in them."""
    cache.kv._connector.force_loss(held)  # type: ignore[union-attr]
