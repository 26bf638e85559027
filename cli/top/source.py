"""Source: where `top` gets its samples from, by a thread of its own; and Replay, the source that is a recording.

live.py is the source that is a running instance.
"""

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llmserve.cli.top.keys import Action
from llmserve.cli.top.samples import Sample, read

CLOSE_S = 1.0
"""How long to wait for a thread to end; one that waits for a slow scheduler is left behind."""


class Notice(NamedTuple):
    """A message for the user, such as the result of an action."""

    text: str


class Ended(NamedTuple):
    """The end of the source, with the error that has caused it, if any."""

    error: Exception | None = None


Item = Sample | Notice | Ended


class Source(ABC):
    """A queue that threads fill. `wake` is called, in such a thread, when something has been put in."""

    ends = False
    """Whether it ends by itself, like a recording."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    def now(self) -> float:
        """The time on the samples' clock."""
        return time.time()

    def take(self) -> list[Item]:
        """The items since the last call; never blocks."""
        items = []
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self._items.get_nowait())
        return items

    def act(self, action: Action) -> None:
        """Starts an action of the user; a Notice reports how it ended."""
        self.put(Notice("a recording cannot be changed"))

    def start(self) -> None:
        self._spawn(self._run)

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def put(self, item: Item) -> None:
        self._items.put(item)
        self.wake()

    def _spawn(self, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except Exception as error:
                self.put(Ended(error))

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Puts items into the queue, until the source is closed or has ended."""


class Replay(Source):
    """A recording, replayed at `speed` times its own pace; 0: all at once."""

    ends = True

    def __init__(self, path: Path, speed: float) -> None:
        super().__init__()
        self._path = path
        self._speed = speed
        self._origin: tuple[float, float] | None = None
        """The time of the first sample, and the monotonic time at which it was put into the queue."""
        self._last = 0.0

    def now(self) -> float:
        if self._origin is None or not self._speed:
            return self._last
        first, began = self._origin
        return min(max(self._last, first + (time.monotonic() - began) * self._speed), self._last + 1.0)

    def _run(self) -> None:
        for sample in read(self._path):
            if self._origin is None:
                self._origin = sample.time, time.monotonic()
            elif self._speed:
                first, began = self._origin
                if self._ends.wait(max(0.0, began + (sample.time - first) / self._speed - time.monotonic())):
                    return
            self._last = sample.time
            self.put(sample)
        self.put(Ended())
