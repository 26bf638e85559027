"""Which replica a request goes to: the one that holds most of its prompt in its prefix cache, else the least busy one.

What a replica's cache holds is not asked but remembered: the pages of the prompts that it was sent last, as many as its
pool has. Nothing here sends anything.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

TOKEN_BYTES = 4

Reason = Literal["only", "prefix", "load", "full"]
"""Why a request went where it went: there was no choice; a cached prefix; no prefix, so the least busy; a prefix, but
the replica that has it would have let it wait."""
REASONS: tuple[Reason, ...] = ("only", "prefix", "load", "full")


class Replica:
    """What is known of one replica."""

    def __init__(self) -> None:
        self.alive = True
        self.draining = False
        self.choices = 0
        """Choices of requests that it was sent and that have not ended."""
        self.pages: OrderedDict[bytes, None] = OrderedDict()
        """Of prompts: a digest of each page and all before it; the latest last."""


class Routing:
    """Chooses replicas; `started` and `ended` tell it their loads."""

    def __init__(self, count: int, page_size: int, max_running: int) -> None:
        self.replicas = [Replica() for _ in range(count)]
        self.reasons: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self.max_pages = 1 << 16
        """So many pages are remembered of a replica; set to its pool's when that is known."""
        self.page_size = page_size
        """Tokens; set to the pools' when that is known: a backend may have rounded it up."""
        self._max_running = max_running

    @property
    def alive(self) -> list[int]:
        return [number for number, replica in enumerate(self.replicas) if replica.alive]

    def choose(self, prompts: Sequence[bytes]) -> int:
        """The replica for a request. One is alive."""
        able = [n for n in self.alive if not self.replicas[n].draining] or self.alive
        pages = [page for prompt in prompts for page in self._pages_of(prompt)] if len(able) > 1 else []
        chosen, reason = self._choose(able, pages)
        self.reasons[reason] += 1
        replica = self.replicas[chosen]
        for page in pages:
            replica.pages[page] = None
            replica.pages.move_to_end(page)
        while len(replica.pages) > self.max_pages:
            replica.pages.popitem(last=False)
        return chosen

    def _choose(self, able: Sequence[int], pages: Sequence[bytes]) -> tuple[int, Reason]:
        if len(able) == 1:
            return able[0], "only"
        idlest = min(able, key=lambda n: (self.replicas[n].choices, len(self.replicas[n].pages)))
        known = {n: self._known(self.replicas[n], pages) for n in able}
        best = max(able, key=lambda n: (known[n], -self.replicas[n].choices))
        if not known[best]:
            return idlest, "load"
        if self.replicas[best].choices >= self._max_running > self.replicas[idlest].choices:
            return idlest, "full"
        return best, "prefix"

    def started(self, number: int, choices: int) -> None:
        """A request of so many choices was sent there."""
        self.replicas[number].choices += choices

    def ended(self, number: int) -> None:
        """One choice of a request that was sent there has ended."""
        self.replicas[number].choices -= 1

    def forget(self, number: int) -> None:
        """Its cache was emptied."""
        self.replicas[number].pages.clear()

    def _known(self, replica: Replica, pages: Sequence[bytes]) -> int:
        """A digest says all that comes before it too, so each page that is known is one that the cache may hold."""
        return sum(page in replica.pages for page in pages)

    def _pages_of(self, prompt: bytes) -> list[bytes]:
        """Of its whole pages but the last token, which is computed in any case."""
        digests, digest = [], b""
        page_bytes = self.page_size * TOKEN_BYTES
        usable = (len(prompt) - TOKEN_BYTES) // page_bytes * page_bytes
        for start in range(0, usable, page_bytes):
            digest = blake2b(prompt[start : start + page_bytes], digest_size=16, key=digest).digest()
            digests.append(digest)
        return digests
