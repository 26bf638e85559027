"""How long a rank has been at work, and how long any rank has: the difference is what it has waited for others."""

import threading
import time
from collections import deque

import torch


class BusyTime:
    """A rank's own work, from when the stage before has delivered to the end of each step.

    `begin` and `end` surround it. On CUDA, which does it later, they are marks in its stream. `seconds` may be
    read in another thread; a step whose end CUDA has not reached counts later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._began = 0.0
        self._begin: torch.cuda.Event | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        if self._device.type == "cuda":
            self._begin = self._mark()
        else:
            self._began = time.perf_counter()

    def end(self) -> None:
        if self._begin is not None:
            self._spans.append((self._begin, self._mark()))
        else:
            self._seconds += time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        while self._spans and self._spans[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._spans.popleft()
            self._seconds += begin.elapsed_time(end) / 1000
        return self._seconds

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class ActiveTime:
    """The time during which at least one step is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._since = 0.0
        self._total = 0.0

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._count else 0.0)

    def enter(self) -> int:
        """How many steps are under way with this one."""
        with self._lock:
            if self._count == 0:
                self._since = time.perf_counter()
            self._count += 1
            return self._count

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._total += time.perf_counter() - self._since
