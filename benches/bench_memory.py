"""Memory that a cached block takes, its tokens included.

The figure is what the process grew by, so it is taken in a process of its own: this file, run as a script.
"""

from __future__ import annotations

import gc
import itertools
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Row
from workbench import cache, prompts, request, serve

pytestmark = pytest.mark.benchmark(group="memory")

PAGE_SIZE = 16
PAGES = 1 << 18
PROMPT = 8192


def test_bytes_of_a_cached_block(row: Row) -> None:
    """A full cache of 262,144 blocks, no request left; the time is that of the whole process."""
    child: list[str] = []

    def fill() -> None:
        script = [sys.executable, __file__]
        child[:] = subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()

    row.benchmark.pedantic(fill)
    row.says(float(child[0]), "bytes/block")


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _grown_by() -> int:
    fresh = prompts(PROMPT)
    serve(cache(PAGE_SIZE, PAGES // 256), request(next(fresh)))  # whatever the first use of anything takes
    before = _resident_bytes()
    kv = cache(PAGE_SIZE, PAGES)
    for tokens in itertools.islice(fresh, PAGES * PAGE_SIZE // PROMPT):
        serve(kv, request(tokens))
    return _resident_bytes() - before


if __name__ == "__main__":
    print(_grown_by() / PAGES)
