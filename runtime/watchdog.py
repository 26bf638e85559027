"""Watchdog: notices that a value which should keep changing has stayed the same for too long.

It has the processes concerned write their stacks to the log and reports the reason; launch.py decides what to end.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from llmserve.runtime.proc import is_stopped
from llmserve.runtime.processes import ChildProcess

TICKS = 10
"""How many times the value is read within a timeout; at least once a second."""
STACKS_WAIT_S = 0.5


class Watchdog:
    """Watches any number of values, each until it has not changed for `timeout_s` seconds. 0 watches nothing."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []

    def watch(
        self,
        sign: Callable[[], object],
        processes: Sequence[ChildProcess],
        fault: str,
        on_hang: Callable[[str], None],
    ) -> None:
        """Calls `on_hang` with the reason once the value of `sign` has stayed the same for the timeout.

        The reason says that the first of `processes` has the `fault` ("made no step"); any of them may be the cause.
        """
        if self._timeout_s:
            self._tasks.append(asyncio.create_task(self._watch(sign, processes, fault, on_hang)))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch(
        self,
        sign: Callable[[], object],
        processes: Sequence[ChildProcess],
        fault: str,
        on_hang: Callable[[str], None],
    ) -> None:
        await self._until_still(sign)
        stopped = " and ".join(f"the {process}" for process in processes if is_stopped(process.pid))
        for process in processes:
            process.dump_stacks()
        await asyncio.sleep(STACKS_WAIT_S)
        cause = f" ({stopped} is stopped)" if stopped else ""
        on_hang(f"the {processes[0]} {fault} for {self._timeout_s:g} s{cause}; its stacks are in the log")

    async def _until_still(self, sign: Callable[[], object]) -> None:
        still, seen = Standstill(min(self._timeout_s / TICKS, 1.0)), sign()
        while True:
            seconds, now = await still.seconds(), sign()
            if now != seen:
                seen = now
                still.end()
            elif seconds > self._timeout_s:
                return


class Standstill:
    """Measures how long a value read every `tick` seconds has not changed, without the time that this process was
    stopped.

    While it was stopped (SIGSTOP, a suspended machine), it could not see the value change.
    """

    def __init__(self, tick: float) -> None:
        self._tick = tick
        self._began = self._looked = time.monotonic()

    async def seconds(self) -> float:
        """Waits a tick, and returns the seconds since the last `end`."""
        await asyncio.sleep(self._tick)
        now = time.monotonic()
        self._began += max(0.0, now - self._looked - 2 * self._tick)
        self._looked = now
        return now - self._began

    def end(self) -> None:
        """The value has changed: counts from now."""
        self._began = self._looked
