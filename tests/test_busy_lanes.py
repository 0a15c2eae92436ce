"""Processes whose lanes are busy: interrupted while they wait, at their end, and when they fork."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from model.faults import PROGRAM, needs_faults

pytestmark = needs_faults

LOADING = (
    PROGRAM
    + """
cache = HostCache(pages=16)
prompt = prompt_of(1, 3)
cache.serve(prompt)
cache.kv.truncate_prefix([])
cache.memory[:] = 0
away = cache.computed(prompt_of(3, 2), no_store=True)
lanes(cache, "hold")
cache.kv.release(cache.computed(prompt_of(2, 2)))
ctx = cache.claimed(prompt)
transfer = cache.kv.alloc(ctx)
cache.kv.suspend(away)
assert cache.kv.metrics()["copies_in_flight"] == 3
"""
)
"""A load, a store and a suspension that lanes hold."""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Runs the program, which is to end soon."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


WAITS = {
    "result": "transfer.result()",
    "synchronize": "transfer.synchronize(60)",
    "await": "asyncio.run(awaiting(transfer))",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_within_a_second_and_the_copy_goes_on(wait: str) -> None:
    program = f"""{LOADING}
import asyncio

async def awaiting(transfer):
    await transfer

print("waiting", flush=True)
try:
    {WAITS[wait]}
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert not transfer.is_complete()
lanes(cache, "copy")
transfer.synchronize(10)
assert cache.settled() == [ctx.request_id]
cache.run(ctx)
assert ctx.cached_prefix_length == 12
cache.resume(away)
assert cache.holds(away)
cache.kv.release([ctx, away])
cache.kv.shutdown()
cache.kv.verify()
assert cache.kv.block_count().free == 16
print("served", flush=True)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)  # it waits by now
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - sent < 1
        said, complained = process.communicate(timeout=30)
    assert (said, process.returncode) == ("served\n", 0), complained


def test_a_process_that_is_interrupted_and_catches_nothing_ends() -> None:
    command = [sys.executable, "-c", f"{LOADING}\nprint('waiting', flush=True)\ntransfer.result()\n"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, complained = process.communicate(timeout=30)
        assert time.monotonic() - sent < 5
    assert process.returncode == -signal.SIGINT
    assert complained.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('the engine broke')", 1),
        ("import threading; threading.Thread(target=transfer.result, daemon=True).start()", 0),
        ("keep = [cache]; keep.append(keep)", 0),
    ],
    ids=["at its end", "by sys.exit", "by an exception", "while a thread waits", "in a cycle"],
)
def test_a_process_that_exits_without_a_shutdown_ends_while_lanes_are_busy(end: str, code: int) -> None:
    program = f"{LOADING}\nimport atexit, time\natexit.register(lambda: print(time.monotonic()))\n{end}\n"
    ended = run(program)
    assert time.monotonic() - float(ended.stdout) < 5
    assert ended.returncode == code, ended.stderr
    assert ("the engine broke" in ended.stderr) == (code == 1)
    assert "panicked" not in ended.stderr


def test_a_forked_process_is_told_that_copies_in_flight_end_elsewhere() -> None:
    program = f"""{LOADING}
import asyncio, os

async def awaiting(transfer):
    await transfer

child = os.fork()
if child == 0:
    told = 0
    for call in (
        transfer.result,
        lambda: transfer.synchronize(60),
        lambda: asyncio.run(awaiting(transfer)),
        cache.kv.poll_transfers,
        cache.kv.begin_step,
    ):
        try:
            call()
        except RuntimeError as error:
            told += "forked" in str(error)
    cache.kv.shutdown()
    os._exit(told)
told = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert told == 5, told
lanes(cache, "copy")
transfer.synchronize(10)
assert cache.settled() == [ctx.request_id]
cache.run(ctx)
cache.resume(away)
assert cache.holds(away)
cache.kv.shutdown()
"""
    ended = run(program)
    assert ended.returncode == 0, ended.stderr
