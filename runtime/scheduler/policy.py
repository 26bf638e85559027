"""Who runs next, and nothing else.

There is no prefill phase and no decode phase. A request has tokens that are known and tokens that are computed, and a
step gives each chosen request some tokens to catch up with: one that decodes is behind by one token, one that has just
arrived by its whole prompt, one that was retracted by its prompt and what it had generated. Chunked prefill, prefix
hits and retraction all fall out of that.

1. What runs goes on, oldest first. One token is free; all larger chunks share a budget of `chunked_prefill_size`. When
   memory runs out the youngest is retracted; a request that is itself the youngest skips the step. So the oldest always
   gets on.
2. Then the queue, while there is budget, a free place, and memory also for what the running ones are expected to need.
   "lpm" prefers the longest cached prefix; a second of waiting weighs as much as a chunk of it, so nobody starves.
   A request whose next pages are being computed by another one waits for these instead of computing them too.
"""

from collections.abc import Callable

from llmserve.runtime.cache.kv_cache import KVCache
from llmserve.runtime.cache.radix import ELEMENT_BYTES
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.scheduler.request import Request, RequestTable, Share

WINDOW = 128
"""So many waiting requests are looked at in a step: those that came first."""
FORESIGHT = 1024
"""At most so many future tokens of a request count when its need of memory is estimated."""


class Policy:
    def __init__(
        self,
        args: ServerArgs,
        kv: KVCache,
        table: RequestTable,
        retract: Callable[[Request], None],
        depth: int = 1,
    ) -> None:
        """`depth` steps can be in flight: each takes its part of what runs, so that the others find something to do."""
        self._chunk = args.chunked_prefill_size
        self._max_running = args.max_running_requests
        self._lpm = args.schedule_policy == "lpm" and args.prefix_cache
        self._kv = kv
        self._table = table
        self._retract = retract
        self._depth = depth
        self._expected = 0.4
        """The part of its remaining tokens that a request is thought to generate. Falls step by step;
        a retraction raises it."""

    def schedule(self, now: float, admit: bool) -> list[Share]:
        """The next step, its pages allocated. Takes from the queue only if `admit`; `now` in seconds."""
        shares: list[Share] = []
        budget = self._chunk
        self._expected = max(0.1, self._expected * 0.995)
        part = -(-len(self._table.running) // self._depth)
        for request in tuple(self._table.running):
            if len(shares) == part:
                break
            if request.lease is None or request.ending is not None:  # retracted just now, or about to end
                continue
            decodes = request.pending == 1
            count = 1 if decodes else min(request.pending, budget)
            if count and self._make_room(request, count):
                shares.append(Share(request, request.scheduled, count))
                budget -= 0 if decodes else count
        return shares + self._take_from_queue(now, budget) if admit else shares

    def _make_room(self, request: Request, count: int) -> bool:
        assert request.lease is not None
        while not self._kv.grow(request.lease, request.scheduled + count):
            idle = (other for other in reversed(self._table.running) if not other.in_flight or other is request)
            youngest = next(idle)
            if youngest is request:
                return False
            self._retract(youngest)
            self._expected = min(1.0, self._expected + 0.2)
        return True

    def _take_from_queue(self, now: float, budget: int) -> list[Share]:
        shares: list[Share] = []
        kv, running = self._kv, self._table.running
        if not self._table.waiting or len(running) >= self._max_running or budget <= 0:
            return shares
        spare = kv.available - sum(self._still_needed(request) for request in running)
        for request in self._candidates():
            if budget <= 0 or len(running) >= self._max_running:
                break
            cached, locked = kv.match(request.namespace, request.tokens, request.reusable)
            if self._cached_soon(request, cached):
                continue
            needed = self._expected_pages(request) - locked
            if needed > spare:
                break
            lease = kv.lease(request.namespace, request.tokens, request.reusable)
            self._table.start(request, lease, lease.num_pages * kv.page_size, now)
            spare -= needed
            count = min(request.pending, budget)
            if kv.grow(lease, request.scheduled + count):
                shares.append(Share(request, request.scheduled, count))
                budget -= count
        return shares

    def _candidates(self) -> list[Request]:
        window = self._table.waiting[:WINDOW]
        if not self._lpm:
            return window
        match = self._kv.match
        return sorted(window, key=lambda r: r.arrival * self._chunk - match(r.namespace, r.tokens, r.reusable)[0])

    def _cached_soon(self, request: Request, cached: int) -> bool:
        """Whether a running request computes the page that would be the next one to take from the cache."""
        end = cached + self._kv.page_size
        if end > request.reusable or not self._kv.prefix_cache:
            return False
        prefix = request.tokens[: end * ELEMENT_BYTES]
        return any(
            other.prefilling and other.namespace == request.namespace and other.tokens.startswith(prefix)
            for other in self._table.running
        )

    def _expected_pages(self, request: Request) -> int:
        future = min(request.limit - request.known, FORESIGHT)
        return self._kv.pages_for(request.known + int(future * self._expected))

    def _still_needed(self, request: Request) -> int:
        assert request.lease is not None
        return max(0, self._expected_pages(request) - request.lease.num_pages)
