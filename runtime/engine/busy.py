"""Time that a rank works on steps, and time with any step under way: the difference is its pipeline bubble."""

import threading
import time
from collections import deque

import torch


class BusyTime:
    """Seconds that a rank has worked: in each step from the receipt of the previous stage's output to the end.

    `begin` and `end` surround that work. On CUDA, where it is asynchronous, they record events in the stream, and a
    step counts once its end event has been reached. `seconds` may be read from another thread.
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
    """Seconds during which at least one step was under way."""

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
        """Counts a step that begins; returns how many are under way, this one included."""
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
