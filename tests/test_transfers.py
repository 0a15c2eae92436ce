"""Handles of copies in flight: asked, waited for, awaited, ended and cancelled, from several threads."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pagekeeper as pk
from pagekeeper.transfers import Completer, Transfer, pending

DROPPED = "dropped without a result"

ENDS: list[Any] = [
    pytest.param(Completer.finish, None, id="finished"),
    pytest.param(lambda completer: completer.fail("disk full"), "disk full", id="failed"),
    pytest.param(Completer.abandon, "cancelled", id="cancelled"),
]
WAITS: list[Any] = [
    pytest.param(Transfer.result, id="result"),
    pytest.param(Transfer.synchronize, id="synchronize"),
    pytest.param(lambda transfer: transfer.synchronize(60), id="synchronize with a timeout"),
    pytest.param(lambda transfer: asyncio.run(awaiting(transfer)), id="await"),
]


async def awaiting(transfer: pk.KVConnectorTransfer) -> None:
    await transfer


def later(call: Callable[[], object], seconds: float = 0.05) -> threading.Timer:
    """Makes the call in another thread, soon."""
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


def check(wait: Callable[[Transfer], None], transfer: Transfer, message: str | None) -> None:
    """Waits, for an end that is good or fails with `message`."""
    if message is None:
        wait(transfer)
    else:
        with pytest.raises(pk.KVLoadFailed, match=message):
            wait(transfer)


def test_a_transfer_in_flight_is_not_complete_and_names_its_pages() -> None:
    transfer, _completer = pending(np.array([3, 9, 4]))
    assert not transfer.is_complete()
    assert transfer.block_ids == (3, 9, 4)
    assert repr(transfer) == "Transfer(3 pages, in flight)"


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(("end", "message"), ENDS)
def test_a_wait_for_a_transfer_that_has_ended_tells_how(
    end: Callable[[Completer], bool], message: str | None, wait: Callable[[Transfer], None]
) -> None:
    transfer, completer = pending([1])
    assert end(completer)
    assert transfer.is_complete()
    check(wait, transfer, message)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(("end", "message"), ENDS)
def test_a_wait_ends_when_another_thread_ends_the_transfer(
    end: Callable[[Completer], bool], message: str | None, wait: Callable[[Transfer], None]
) -> None:
    transfer, completer = pending([1])
    timer = later(lambda: end(completer))
    check(wait, transfer, message)
    timer.join()


@pytest.mark.parametrize("wait", WAITS)
def test_nobody_waits_for_a_transfer_whose_completer_is_gone(wait: Callable[[Transfer], None]) -> None:
    transfer, completer = pending([1])
    keep = [completer]
    del completer
    timer = later(keep.clear)
    check(wait, transfer, DROPPED)
    timer.join()


def test_the_first_result_stands() -> None:
    transfer, completer = pending([1])
    assert completer.fail("first")
    assert not completer.finish()
    assert not completer.abandon()
    with pytest.raises(pk.KVLoadFailed, match=r"^first$"):
        transfer.result()


def test_a_timeout_ends_the_wait_and_leaves_the_transfer_in_flight() -> None:
    transfer, completer = pending([1])
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"still in flight after 0\.12 s"):
        transfer.synchronize(timeout=0.12)
    assert time.monotonic() - start >= 0.12
    assert not transfer.is_complete()
    assert completer.finish()


def test_a_timeout_of_zero_asks_once() -> None:
    transfer, completer = pending([1])
    with pytest.raises(TimeoutError):
        transfer.synchronize(0)
    completer.finish()
    transfer.synchronize(0)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("inf"), 1e300, 10**400])
def test_a_timeout_that_is_no_duration_is_refused(timeout: float) -> None:
    transfer, _completer = pending([1])
    with pytest.raises(ValueError, match="timeout"):
        transfer.synchronize(timeout)


def test_a_timeout_that_is_no_number_is_refused() -> None:
    transfer, _completer = pending([1])
    with pytest.raises(TypeError, match="timeout"):
        transfer.synchronize("soon")  # type: ignore[arg-type]


@pytest.mark.parametrize("block_ids", [[-1], [2**32], [1.5], [True], ["1"], None, 3])
def test_pages_that_are_no_ids_are_refused(block_ids: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="block_ids"):
        pending(block_ids)


def test_ctrl_c_interrupts_a_wait() -> None:
    transfer, _completer = pending([1])
    timer = later(lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        transfer.result()
    timer.join()


def test_other_threads_run_while_one_waits() -> None:
    transfer, completer = pending([1])
    waiter = threading.Thread(target=transfer.result)
    waiter.start()
    assert sum(range(1000)) == 499_500
    assert waiter.is_alive()
    completer.finish()
    waiter.join(timeout=30)
    assert not waiter.is_alive()


def test_a_request_to_cancel_is_heard_by_whoever_copies() -> None:
    transfer, completer = pending([1])
    assert not completer.is_cancel_requested()
    assert transfer.cancel()
    assert completer.is_cancel_requested()
    assert not transfer.is_complete()


@pytest.mark.parametrize(("end", "message"), ENDS)
def test_a_transfer_may_end_in_any_way_after_a_request_to_cancel(
    end: Callable[[Completer], bool], message: str | None
) -> None:
    transfer, completer = pending([1])
    transfer.cancel()
    assert end(completer)
    assert not transfer.cancel()
    check(Transfer.result, transfer, message)


def test_many_coroutines_await_one_transfer() -> None:
    async def crowd() -> None:
        transfer, completer = pending([1])
        waiting = [asyncio.ensure_future(awaiting(transfer)) for _ in range(20)]
        await asyncio.sleep(0)
        assert not any(future.done() for future in waiting)
        completer.finish()
        await asyncio.gather(*waiting)

    asyncio.run(crowd())


def test_the_loop_runs_on_while_a_coroutine_awaits() -> None:
    async def two() -> None:
        transfer, completer = pending([1])
        waiting = asyncio.ensure_future(awaiting(transfer))
        await asyncio.sleep(0.01)
        completer.fail("late")
        with pytest.raises(pk.KVLoadFailed, match="late"):
            await waiting

    asyncio.run(two())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")  # noqa: PTH112
def test_a_wait_that_is_given_up_leaves_nothing_open() -> None:
    async def impatient() -> None:
        transfer, completer = pending([1])
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(awaiting(transfer), timeout=0.01)
        held = open_files()
        for _ in range(5):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(awaiting(transfer), timeout=0.01)
        assert open_files() == held
        completer.finish()
        await transfer

    before = open_files()
    asyncio.run(impatient())
    assert open_files() == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")  # noqa: PTH112
def test_a_loop_that_cannot_watch_files_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_reader(*_: object) -> None:
        raise NotImplementedError

    async def one() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", add_reader)
        transfer, _completer = pending([1])
        held = []
        for _ in range(3):
            with pytest.raises(NotImplementedError):
                await transfer
            held.append(open_files())
        assert held[0] == held[1] == held[2]

    asyncio.run(one())


def forked(call: Callable[[], object]) -> int:
    """The id of a forked process that makes the call and exits: with 1 if that raises a `RuntimeError`."""
    child = os.fork()
    if child:
        return child
    signal.alarm(20)  # whatever goes wrong, it ends
    try:
        call()
    except RuntimeError:
        os._exit(1)
    os._exit(0)


def test_a_forked_process_that_lives_on_holds_nobody_up() -> None:
    async def one() -> None:
        transfer, completer = pending([1])
        waiting = asyncio.ensure_future(awaiting(transfer))
        await asyncio.sleep(0)
        child = forked(lambda: time.sleep(100))
        completer.finish()
        try:
            await asyncio.wait_for(waiting, timeout=10)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    asyncio.run(one())


def test_the_end_of_a_copy_in_a_forked_process_is_no_end_here() -> None:
    async def one() -> None:
        transfer, completer = pending([1])
        waiting = asyncio.ensure_future(awaiting(transfer))
        await asyncio.sleep(0)
        assert os.waitpid(forked(lambda: completer.fail("elsewhere")), 0)[1] == 0
        await asyncio.sleep(0.05)
        assert not waiting.done()
        completer.finish()
        await waiting

    asyncio.run(one())


@pytest.mark.parametrize("wait", WAITS)
def test_a_forked_process_does_not_wait_for_what_ends_elsewhere(wait: Callable[[Transfer], None]) -> None:
    transfer, _completer = pending([1])
    child = forked(lambda: wait(transfer))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("transfer", [pk.CompletedTransfer(), pending([1])[0]], ids=["completed", "native"])
def test_the_handles_of_the_package_follow_the_protocol(transfer: object) -> None:
    assert isinstance(transfer, pk.KVConnectorTransfer)


def test_an_object_without_the_methods_does_not() -> None:
    assert not isinstance(threading.Event(), pk.KVConnectorTransfer)


def test_a_completed_transfer_is_complete_at_once_and_knows_its_pages() -> None:
    transfer = pk.CompletedTransfer([5, 6])
    assert transfer.is_complete()
    assert list(transfer.block_ids) == [5, 6]
    transfer.result()
    transfer.synchronize(timeout=0)
    asyncio.run(awaiting(transfer))
    assert not transfer.cancel()


def test_a_completed_transfer_without_pages_touches_none() -> None:
    assert list(pk.CompletedTransfer().block_ids) == []
