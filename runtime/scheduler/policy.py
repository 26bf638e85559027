"""Who runs next, and nothing else.

There is no prefill phase and no decode phase. A request has tokens that are known and tokens that are computed, and a
step gives each chosen request some tokens to catch up with: one that decodes is behind by one token, one that has just
arrived by its whole prompt, one that was retracted by its prompt and what it had generated. Chunked prefill, prefix
hits and retraction all fall out of that.

1. One token is free, so what decodes goes on in every step. All larger chunks share a budget: `chunked_prefill_size`,
   or less while there are decodes that this would hold up (pace.py).
2. Half of the budget is for the oldest that wants it. The rest goes to those that have least left to compute, so that
   a short prompt does not wait for long ones. With "fcfs" all of it goes by age.
3. From the queue start, in the same order, those that get a part of the budget, while there are places and memory also
   for what the running ones are expected to need. The oldest is passed by a few times at most. A request whose next
   pages are being computed by another one waits for these instead of computing them too.
4. Memory is given out by age. When it runs out the youngest is retracted; a request that is itself the youngest skips
   the step. So the oldest always gets on, and as each becomes the oldest one day, nobody starves.
"""

from collections.abc import Callable

from llmserve.runtime.cache.kv_cache import KVCache
from llmserve.runtime.cache.radix import ELEMENT_BYTES
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.scheduler.pace import Pace
from llmserve.runtime.scheduler.request import Request, Share
from llmserve.runtime.scheduler.table import RequestTable

WINDOW = 128
"""The number of waiting requests considered in a step: the oldest ones."""
FORESIGHT = 1024
"""The most future tokens of a request that count in the estimate of its memory."""
PATIENCE = 4
"""The most younger requests that may overtake the first of the queue while no older prompt is under way."""


class Policy:
    def __init__(
        self,
        args: ServerArgs,
        kv: KVCache,
        table: RequestTable,
        retract: Callable[[Request], None],
        depth: int = 1,
    ) -> None:
        """Up to `depth` steps are in flight, so each takes only its share of the decoding requests."""
        self.pace = Pace(min(kv.page_size, args.chunked_prefill_size), args.chunked_prefill_size)
        self._chunk = args.chunked_prefill_size
        self._max_running = args.max_running_requests
        self._by_age = args.schedule_policy == "fcfs"
        self._kv = kv
        self._table = table
        self._retract = retract
        self._depth = depth
        self._expected = 0.4
        """The estimated fraction of its remaining tokens that a request will generate. Decays with each step; a
        retraction raises it.
        """

    def schedule(self, now: float, admit: bool) -> list[Share]:
        """The shares of the next step, with their pages allocated. Starts waiting requests only if `admit`. `now` in
        seconds.
        """
        self._expected = max(0.1, self._expected * 0.995)
        running = self._table.running
        decoding = [request for request in running if request.pending == 1 and request.ending is None]
        decoding = decoding[: -(-len(running) // self._depth)]
        prompts = {request: request.pending for request in running if request.pending > 1 and request.ending is None}
        budget = self._chunk if all(request.prefilling for request in running) else self.pace.budget(len(decoding))
        if admit:
            self._start(prompts, budget, now)
        counts = dict.fromkeys(decoding, 1) | self._divide(prompts, budget)
        shares: list[Share] = []
        for request in tuple(running):
            count = counts.get(request, 0)
            if count and request.lease is not None and self._make_room(request, count):  # no lease: retracted just now
                shares.append(Share(request, request.scheduled, count))
        return shares

    def observe(self, shares: list[Share], seconds: float) -> None:
        """Learns from a step with these shares that has taken `seconds`."""
        decodes = sum(share.length == 1 for share in shares)
        self.pace.observe(decodes, sum(share.length for share in shares) - decodes, seconds)

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

    def _divide(self, prompts: dict[Request, int], budget: int) -> dict[Request, int]:
        """Divides the budget among requests, given the tokens that each has left to compute."""
        if not prompts:
            return {}
        oldest = min(prompts, key=_age)
        counts = {oldest: min(prompts[oldest], -(-budget // 2))}
        budget -= counts[oldest]
        for request in sorted(prompts, key=_age if self._by_age else lambda r: _by_need(r, prompts[r])):
            first = counts.get(request, 0)
            counts[request] = first + min(prompts[request] - first, budget)
            budget -= counts[request] - first
        return counts

    def _start(self, prompts: dict[Request, int], budget: int, now: float) -> None:
        """Starts the waiting requests that get a part of the budget beside those in `prompts`, and adds them to it."""
        kv, table = self._kv, self._table
        free = self._max_running - len(table.running)
        if not table.waiting or free <= 0:
            return
        spare = kv.available - sum(self._still_needed(request) for request in table.running)
        for request, left in self._candidates(prompts):
            if free <= 0 or not self._divide({**prompts, request: left}, budget)[request]:
                break
            # Matched again, because the requests started before it have locked pages.
            cached, locked = kv.match(request.namespace, request.tokens, request.reusable)
            if self._cached_soon(request, cached):
                continue
            needed = self._expected_pages(request) - locked
            if needed > spare:
                break
            spare -= needed
            free -= 1
            if table.waiting[0] is not request:
                table.waiting[0].passed_by += 1
            lease = kv.lease(request.namespace, request.tokens, request.reusable)
            table.start(request, lease, lease.num_pages * kv.page_size, now)
            prompts[request] = request.pending

    def _candidates(self, prompts: dict[Request, int]) -> list[tuple[Request, int]]:
        """The waiting requests that may start, in the order in which they should, and the tokens that each has left to
        compute.
        """
        window = [request for request in self._table.waiting[:WINDOW] if request.ready]
        if not window:
            return []
        left = {r: r.known - self._kv.match(r.namespace, r.tokens, r.reusable)[0] for r in window}
        first = window[0]
        its_turn = first.passed_by >= PATIENCE and all(first.seq < request.seq for request in prompts)
        if not self._by_age:
            window.sort(key=lambda r: (r is not first or not its_turn, _by_need(r, left[r])))
        return [(request, left[request]) for request in window]

    def _cached_soon(self, request: Request, cached: int) -> bool:
        """Whether a running request is computing the page that this one could take from the cache next."""
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


def _age(request: Request) -> int:
    return request.seq


def _by_need(request: Request, left: int) -> tuple[int, int]:
    """Sorts by tokens left to compute, in powers of two, then by age, so that similar requests do not share the
    budget.
    """
    return left.bit_length(), request.seq
