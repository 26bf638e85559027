"""RequestTable: which requests of a scheduler wait, and which run."""

from bisect import insort
from collections.abc import Iterator

from llmserve.runtime.cache.kv_cache import Lease
from llmserve.runtime.scheduler.request import Group, Request


class RequestTable:
    """All requests that have not ended. A running one has a lease, a waiting one has none.

    Both lists are in order of arrival, the oldest first, so that a retracted request gets its old place back.
    """

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.prompt_tokens = 0
        """Prompt tokens of all choices that have started. `cached_tokens`: those of them that the prefix cache held."""
        self.cached_tokens = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._next_seq = 0

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def next_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq

    def add(self, group: Group) -> None:
        self.groups[group.rid] = group
        self.waiting += group.requests

    def start(self, request: Request, lease: Lease, cached: int, now: float) -> None:
        """Moves a waiting request to the running ones; its first `cached` tokens are computed already. `now` in
        seconds.
        """
        self.waiting.remove(request)
        insort(self.running, request, key=_age)
        request.lease = lease
        request.computed = request.scheduled = cached
        if request.first_run is None:
            request.first_run = now
            request.cached = cached
            self.prompt_tokens += request.prompt_len
            self.cached_tokens += cached

    def put_back(self, request: Request) -> None:
        """Moves a running request whose pages were released back to its place in the queue."""
        self.running.remove(request)
        insort(self.waiting, request, key=_age)

    def remove(self, request: Request) -> None:
        (self.running if request.lease is not None else self.waiting).remove(request)
        request.group.requests.remove(request)
        if not request.group.requests:
            del self.groups[request.rid]


def _age(request: Request) -> int:
    return request.seq
