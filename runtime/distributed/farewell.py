"""How ranks on other nodes learn that rank 0 ends on purpose: through the rendezvous store, so that they notice it
whatever they are doing. A rank that disappears without this is lost (presence.py).
"""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

ENDING, HEARD = "farewell/ending", "farewell/heard"
ASK_EVERY_S = 0.2
HEARD_WITHIN_S = 0.8
"""How long rank 0 waits for the others to notice, because the store ends with it."""


def say_farewell(store: Store, others: int) -> None:
    """Announces on rank 0 that it ends; returns when all others have noticed, or after HEARD_WITHIN_S."""
    store.set(ENDING, "")
    deadline = time.monotonic() + HEARD_WITHIN_S
    while store.add(HEARD, 0) < others and time.monotonic() < deadline:
        time.sleep(0.01)


def await_farewell(store: Store, leave: Callable[[], None]) -> None:
    """Waits, in a thread of its own, until rank 0 announces that it ends, and calls `leave`.

    Returns without that when the store is gone; then the next collective raises RankLost anyway.
    """
    try:
        while not store.check([ENDING]):
            time.sleep(ASK_EVERY_S)
        store.add(HEARD, 1)
    except RuntimeError:
        return
    leave()
