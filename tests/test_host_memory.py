"""How host memory is kept: pinned, and near a NUMA node."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from model.host import BYTES, HostCache

NODES = Path("/sys/devices/system/node")


def locked_bytes() -> int:
    """Memory of this process that the kernel keeps from being swapped."""
    status = Path("/proc/self/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmLck:"))
    return int(kib) * 1024


def pinned(cache: HostCache) -> tuple[int, int, int]:
    """Bytes that were asked for, are pinned, and were refused, once that is decided."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        asked, done, refused = (
            cache.counted(name) for name in ("pin_asked_bytes", "pinned_bytes", "pin_refused_bytes")
        )
        if done + refused == asked:
            return asked, done, refused
        time.sleep(0.001)
    raise AssertionError(f"{done} of {asked} bytes are pinned after 10 s")


def program(rest: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that may lock 64 KiB of memory, whatever else it may."""
    head = f"""
import ctypes, os, resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_host_memory import *
from model.host import prompt_of
_, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, most))
version, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(version, nothing) == 0  # a superuser is not limited
"""
    command = [sys.executable, "-W", "ignore", "-c", head + rest]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_pinned_memory_is_locked_until_the_shutdown_as_the_metrics_say() -> None:
    before = locked_bytes()
    cache = HostCache(units=512, host={"host_pin_memory": True})
    assert pinned(cache) == (512 * BYTES, 512 * BYTES, 0)
    assert locked_bytes() - before == 512 * BYTES == 65536
    cache.kv.shutdown()
    assert locked_bytes() == before


def test_memory_is_unpinned_with_a_manager_that_nobody_shuts_down() -> None:
    before = locked_bytes()
    cache = HostCache(units=512, host={"host_pin_memory": True})
    pinned(cache)
    del cache
    assert locked_bytes() == before


def test_without_the_option_nothing_is_pinned() -> None:
    before = locked_bytes()
    cache = HostCache(units=512)
    assert pinned(cache) == (0, 0, 0)
    assert locked_bytes() == before


def test_where_the_system_refuses_one_warning_says_so_and_the_tier_serves() -> None:
    run = program("""
import logging
class Log(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage())
logging.getLogger("pagekeeper").addHandler(Log(logging.WARNING))
cache = HostCache(pages=8, units=8192, host={"host_pin_memory": True})
assert pinned(cache) == (2**20, 65536, 2**20 - 65536)
assert locked_bytes() == 65536
for number in (1, 2, 1):
    found = cache.serve(prompt_of(number, 6))
assert found == 24 and cache.kv.metrics()["loaded_blocks"] > 0
cache.kv.shutdown()
""")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "WARNING host_pin_memory: 65536 of 1048576 bytes of host memory are pinned, "
        "the rest is used unpinned: mlock2 of 4096 bytes: Cannot allocate memory (os error 12); "
        "RLIMIT_MEMLOCK is 65536 and 65536 are in use"
    ]


def test_a_forked_process_has_nothing_pinned_and_leaves_its_parents_memory_alone() -> None:
    run = program("""
cache = HostCache(units=512, host={"host_pin_memory": True})
assert pinned(cache) == (65536, 65536, 0)
child = os.fork()
if child == 0:
    cache.kv.poll_transfers()
    nothing = pinned(cache) == (0, 0, 0)
    cache.kv.shutdown()
    os._exit(17 if nothing else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
assert locked_bytes() == 65536
assert cache.serve(prompt_of(1, 6)) == 0
""")
    assert run.returncode == 0, run.stderr


def test_a_node_that_is_not_there_is_refused_with_those_that_are() -> None:
    nodes = sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
    there = f"this machine has {', '.join(map(str, nodes))}" if nodes else "this system names none"
    with pytest.raises(ValueError, match=f"^host_numa_node=4321: there is no such node; {there}$"):
        HostCache(host={"host_numa_node": 4321})


@pytest.mark.skipif(not (NODES / "node0").exists(), reason="needs a system that names its NUMA nodes")
def test_a_tier_near_a_node_serves_and_leaves_the_caller_where_it_was() -> None:
    run = program("""
before = os.sched_getaffinity(0)
cache = HostCache(pages=8, units=32, host={"host_numa_node": 0})
assert os.sched_getaffinity(0) == before
cache.serve(prompt_of(1, 6))
cache.kv.truncate_prefix([])
assert cache.serve(prompt_of(1, 6)) == 24
""")
    assert run.returncode == 0, run.stderr
