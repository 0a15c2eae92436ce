"""What a process waits for before its first request, each in a fresh interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from conftest import Row

pytestmark = pytest.mark.benchmark(group="start-up")

_CLOCK = "import time; start = time.perf_counter();"
_PRINT = "; print(time.perf_counter() - start)"
_MANAGER = """
from pagekeeper import MHAKVCacheParams, PagedKVCacheManager
params = MHAKVCacheParams(
    dtype="bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=128, devices=["cpu"]
)
PagedKVCacheManager(params=params, total_num_pages=8192, max_batch_size=256, allocate_pools=False)
print(time.perf_counter() - start)
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_CLOCK + "import numpy" + _PRINT, id="import numpy"),
        pytest.param(_CLOCK + "import pagekeeper" + _PRINT, id="import pagekeeper"),
        pytest.param(_CLOCK + _MANAGER, id="import, parameters, manager"),
    ],
)
def test_start(row: Row, script: str) -> None:
    """The figure is the script's own wall time; the round also has the interpreter's start."""
    seconds: list[float] = []

    def run() -> None:
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        seconds.append(float(done.stdout))

    row.time(run, unit="ms", rounds=7)
    row.says(statistics.median(seconds[1:] or seconds) * 1e3, "ms")
