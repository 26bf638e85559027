"""The watchdog over processes that are stopped, and signs that the test moves."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from instances import wait_until
from llmserve.runtime import watchdog
from llmserve.runtime.watchdog import Standstill, Watchdog


class Process:
    """A ChildProcess as the watchdog sees it."""

    def __init__(self, role: str, pid: int) -> None:
        self.role, self.pid, self.dumps = role, pid, 0

    def __str__(self) -> str:
        return f"{self.role} (pid {self.pid})"

    def dump_stacks(self) -> None:
        self.dumps += 1


@pytest.fixture
def stopped() -> Iterator[int]:
    """The pid of a process that is stopped."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, 10, "its stop")
            yield process.pid
        finally:
            process.kill()


async def test_a_sign_that_stands_still_is_told_once_with_the_process_that_is_stopped(stopped: int) -> None:
    processes: Any = [Process("tp0", 1), Process("tp1", stopped)]
    told: asyncio.Queue[str] = asyncio.Queue()
    dog = Watchdog(0.2)
    dog.watch(lambda: 7, processes, "made no step", told.put_nowait)
    assert await asyncio.wait_for(told.get(), 20) == (
        f"the tp0 (pid 1) made no step for 0.2 s (the tp1 (pid {stopped}) is stopped); its stacks are in the log"
    )
    assert [process.dumps for process in processes] == [1, 1]
    await asyncio.sleep(0.4)
    assert told.empty()
    dog.stop()


async def test_what_moves_is_left_alone() -> None:
    """So is everything with a timeout of 0, and after `stop`."""
    told: list[str] = []
    processes: Any = [Process("scheduler", 1)]
    moves, off, stopped = Watchdog(0.2), Watchdog(0), Watchdog(0.2)
    moves.watch(iter(range(10**9)).__next__, processes, "made no step", told.append)
    off.watch(lambda: 7, processes, "made no step", told.append)
    stopped.watch(lambda: 7, processes, "made no step", told.append)
    stopped.stop()
    await asyncio.sleep(0.6)
    moves.stop()
    assert told == []


async def test_time_in_which_we_were_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watchdog.asyncio, "sleep", sleep)
    still = Standstill(1.0)
    assert [await still.seconds() for _ in range(3)] == [1, 2, 3]
    clock[0] += 50
    assert await still.seconds() == 5, "a tick more than it asked for may be the machine's"
    still.end()
    assert await still.seconds() == 1
