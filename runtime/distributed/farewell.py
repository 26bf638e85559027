"""How the ranks of several nodes learn that the first one ends on purpose: through the store where they have met, so
that they know it whatever they are at, be it loading. Without a word, a rank that is gone is lost (presence.py).
"""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

ENDING, HEARD = "farewell/ending", "farewell/heard"
ASK_EVERY_S = 0.2
HEARD_WITHIN_S = 0.8
"""So long the first rank stays: the store ends with it."""


def say_farewell(store: Store, others: int) -> None:
    """Tells the others, on the first rank, and returns when all have heard it or have had the time to."""
    store.set(ENDING, "")
    deadline = time.monotonic() + HEARD_WITHIN_S
    while store.add(HEARD, 0) < others and time.monotonic() < deadline:
        time.sleep(0.01)


def await_farewell(store: Store, leave: Callable[[], None]) -> None:
    """Waits, in a thread of its own, until the first rank says that it ends on purpose, and calls `leave`.

    Returns without when the store has gone, which whoever uses the groups learns too.
    """
    try:
        while not store.check([ENDING]):
            time.sleep(ASK_EVERY_S)
        store.add(HEARD, 1)
    except RuntimeError:
        return
    leave()
