"""Memory follows what is held, not how much has come and gone (TREE-16)."""

import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import pagekeeper as pk

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

params = pk.MHAKVCacheParams(
    dtype="float32", n_kv_heads=1, head_dim=8, num_layers=1, page_size=4, devices=["cpu"]
)
kv = pk.PagedKVCacheManager(params=params, total_num_pages=64, max_batch_size=1, allocate_pools=False)

def lives(first, count):
    # A namespace, two blocks and an extra key of its own for each.
    for number in range(first, first + count):
        ctx = pk.TextContext(
            request_id=pk.RequestID(), max_length=16, tokens=pk.TokenBuffer(np.arange(number, number + 9)),
            cache_salt=str(number), mm_items=[(number.to_bytes(32, "little"), 1, 3)],
        )
        kv.claim(ctx)
        kv.alloc(ctx)
        kv.step(ctx, new_tokens=[7])
        kv.release(ctx)

lives(0, 20_000)
before = resident()
lives(20_000, 100_000)
kv.verify()
assert kv.metrics()["evictions"] >= 200_000 - 64, kv.metrics()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hundred_thousand_requests_leave_no_memory_behind() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 4 << 20, "a leak of 42 bytes a request would show"
