"""Chooses the replica of a request: the one with most of its prompt in the prefix cache, unless it is much busier; else
the least busy one.

The contents of a cache are estimated: the pages of the latest prompts that were sent there, as many as its pool has.
Nothing here sends anything.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from hashlib import blake2b
from typing import Literal

TOKEN_BYTES = 4
CHOICE_TOKENS = 64
"""Prompt tokens whose computation costs as much as one more choice in flight, which is about its tokens of output.

Otherwise requests that all begin with the same system prompt would all go to one replica.
"""

Reason = Literal["only", "prefix", "load", "full"]
"""Why a replica was chosen. only: there was no other; prefix: it has most of the prompt cached; load: this one is the
least busy, and what others have cached of the prompt does not make up for their load; full: the one that has it would
have queued the request.
"""
REASONS: tuple[Reason, ...] = ("only", "prefix", "load", "full")


class Replica:
    """What the front knows about one replica."""

    def __init__(self) -> None:
        self.alive = True
        self.draining = False
        self.choices = 0
        """Choices that were sent there and have not ended."""
        self.pages: OrderedDict[bytes, None] = OrderedDict()
        """Digests of prompt pages, each over the page and all before it; the least recently used first."""


class Routing:
    """Chooses replicas; `started` and `ended` tell it their loads."""

    def __init__(self, count: int, page_size: int, max_running: int) -> None:
        self.replicas = [Replica() for _ in range(count)]
        self.reasons: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self.max_pages = 1 << 16
        """Pages remembered per replica; set to the size of a pool once that is known."""
        self.page_size = page_size
        """Tokens in a page; set to the pools' once that is known, as a backend may round --page-size up."""
        self._max_running = max_running

    @property
    def alive(self) -> list[int]:
        return [number for number, replica in enumerate(self.replicas) if replica.alive]

    def choose(self, prompts: Sequence[bytes], avoid: Container[int] = ()) -> int:
        """The replica for a request with these prompts (int32 bytes). At least one must be alive.

        Replicas that drain get none, and those in `avoid` neither, unless there is no other.
        """
        able = [n for n in self.alive if not self.replicas[n].draining] or self.alive
        able = [n for n in able if n not in avoid] or able
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
        saved = (known[best] - known[idlest]) * self.page_size
        if saved < CHOICE_TOKENS * (self.replicas[best].choices - self.replicas[idlest].choices):
            return idlest, "load"
        return best, "prefix"

    def started(self, number: int, choices: int) -> None:
        """Counts a request with `choices` choices that was sent to a replica."""
        self.replicas[number].choices += choices

    def ended(self, number: int) -> None:
        """Counts one choice of a replica that has ended."""
        self.replicas[number].choices -= 1

    def forget(self, number: int) -> None:
        """Notes that a replica's cache was emptied."""
        self.replicas[number].pages.clear()

    def _known(self, replica: Replica, pages: Sequence[bytes]) -> int:
        """How many of these pages the replica may have cached. A digest covers all pages before it, so order does not
        matter.
        """
        return sum(page in replica.pages for page in pages)

    def _pages_of(self, prompt: bytes) -> list[bytes]:
        """Digests of the full pages of a prompt, without its last token, which is always computed."""
        digests, digest = [], b""
        page_bytes = self.page_size * TOKEN_BYTES
        usable = (len(prompt) - TOKEN_BYTES) // page_bytes * page_bytes
        for start in range(0, usable, page_bytes):
            digest = blake2b(prompt[start : start + page_bytes], digest_size=16, key=digest).digest()
            digests.append(digest)
        return digests
