"""Stands in for the scheduler's loop while that waits for a step which takes long, or never ends.

The loop's thread holds a lock at all times but while it waits for its worker (`with standin:`). Whoever holds it may
touch the scheduler and its sockets, so nothing there need know of threads.
"""

import threading
import time
from collections.abc import Callable

PATIENCE_S = 0.2
"""A step that takes longer is stood in for, and so often is looked."""


class StandIn:
    """Calls `duties` again and again, in a thread of its own, while a wait of the thread that made it takes long."""

    def __init__(self, duties: Callable[[], None], patience_s: float = PATIENCE_S) -> None:
        self._duties = duties
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._lock.acquire()
        self._began = 0.0
        self._error: Exception | None = None
        threading.Thread(target=self._run, daemon=True, name="stand-in").start()

    def __enter__(self) -> None:
        self._began = time.monotonic()
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        """Waits for the stand-in to be done, and raises what it could not cope with."""
        self._lock.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None:
            time.sleep(self._patience_s)
            with self._lock:  # it is free during waits only: while nothing runs, this thread sleeps
                if time.monotonic() - self._began >= self._patience_s:
                    try:
                        self._duties()
                    except Exception as error:
                        self._error = error
