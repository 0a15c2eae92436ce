"""Memory follows what is held, not how much has come and gone (TREE-16)."""

import subprocess
import sys

import pytest

PREPARED = """
import numpy as np
import pagekeeper as pk

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

params = pk.MHAKVCacheParams(
    dtype="float32", n_kv_heads=1, head_dim=8, num_layers=1, page_size=4, devices=["cpu"]
)
kv = pk.PagedKVCacheManager(params=params, total_num_pages=64, max_batch_size=1, allocate_pools=False)
"""

LIVES = """
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
lives(20_000, 500_000)
kv.verify()
assert kv.metrics()["evictions"] >= 1_000_000, kv.metrics()
print(resident() - before)
"""

KEEPS = """
kv = pk.PagedKVCacheManager(params=params, total_num_pages=1_000_000, max_batch_size=1, allocate_pools=False)
kept = []
for number in range(40_000):
    ctx = pk.TextContext(request_id=number, tokens=[number, 1, 2, 3, 4, 5, 6, 7, 8])
    kv.claim(ctx)
    kv.alloc(ctx)
    asked = kv.slot_mapping(ctx, [0, 4, 8]), kv.get_cache_indices(ctx), kv.commit_and_get_block_hashes(ctx)
    if number % 100 == 0:
        kept.append(asked)
    if number == 10_000:
        before = resident()
    kv.release(ctx)
print(resident() - before)
"""


def growth(program: str) -> int:
    """Bytes that a process says it grew by."""
    command = [sys.executable, "-c", PREPARED + program]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.timeout(300)  # 520,000 requests
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_million_blocks_that_came_and_went_leave_no_memory_behind() -> None:
    assert growth(LIVES) < 4 << 20, "a leak of 5 bytes a block would show"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_asked_of_one_request_in_a_hundred_and_kept_keeps_nothing_else() -> None:
    assert growth(KEEPS) < 4 << 20, "13 kB for each that was kept would show"
