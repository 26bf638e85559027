"""Does the scheduler's other duties while its loop waits for a step that takes long, or never ends.

The loop's thread holds a lock except while it waits for the worker (`with standin:`). Only the holder of the lock may
touch the scheduler and its sockets, so that nothing there needs to know about threads.
"""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

PATIENCE_S = 0.2
"""How long a wait must last before the duties are called, and how often they are called from then on."""


class StandIn:
    """Calls `duties` repeatedly, in a thread of its own, during long waits of the thread that made it."""

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
        """Waits until a call of `duties` is over, and raises the exception that ended one."""
        self._lock.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None:
            time.sleep(self._patience_s)
            with self._lock:  # free only during waits: while nothing runs, this thread sleeps
                if time.monotonic() - self._began >= self._patience_s:
                    try:
                        self._duties()
                    except Exception as error:
                        log.exception("cannot go on while a step takes long")  # told now: the step may never end
                        self._error = error
