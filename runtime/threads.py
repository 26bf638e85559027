"""in_thread: like asyncio.to_thread, but with a thread that the process does not wait for at exit.

So a download that is under way does not delay the end after Ctrl-C.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """The result of `function`, run in a daemon thread. Cancelling abandons the thread; its result is dropped."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[[], None]) -> None:
        def set_unless_abandoned() -> None:
            if not outcome.done():
                set_outcome()

        try:
            loop.call_soon_threadsafe(set_unless_abandoned)
        except RuntimeError:
            log.debug("the loop closed before the work was done")

    def work() -> None:
        try:
            result = function(*arguments)
        except Exception as error:
            finish(functools.partial(outcome.set_exception, error))
        else:
            finish(lambda: outcome.set_result(result))

    threading.Thread(target=work, daemon=True, name=getattr(function, "__name__", "work")).start()
    return await outcome
