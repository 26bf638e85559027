"""The requests in flight, and the delivery of rows to their consumers: in bounded memory, if a consumer is slow."""

import asyncio
import logging
import time
from typing import Generic, TypeVar

from llmserve.runtime.messages import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    EmbeddingRow,
    FinishReason,
    StrRow,
    TokenIDRow,
)
from llmserve.runtime.metrics import FrontMetrics, Outcome
from llmserve.runtime.outbox import coalesce
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.routing import Routing

log = logging.getLogger(__name__)

ROWS_BEFORE_MERGING = 16
"""Rows per choice that may wait for a slow consumer before they are merged."""

R = TypeVar("R", StrRow, EmbeddingRow)


class InFlight(Generic[R]):
    """A request with `choices` choices, and its rows that the consumer has not taken. `arrival` is by
    time.perf_counter.
    """

    __slots__ = ("abandoned", "arrival", "begun", "choices", "error", "open", "replica", "rows", "waiter")

    def __init__(self, choices: int, arrival: float) -> None:
        self.replica = 0
        """The dp_rank of the replica that it was sent to."""
        self.choices = choices
        self.open = set(range(choices))
        """Indices of the choices whose last row has not come."""
        self.rows: list[R] = []
        self.error: RequestError | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.abandoned = False
        self.arrival = arrival
        self.begun: set[int] = set()
        """Indices of the choices that have had a token."""

    def add(self, row: R) -> None:
        self.rows.append(row)
        if len(self.rows) > ROWS_BEFORE_MERGING * self.choices and isinstance(row, StrRow):
            (batch,) = coalesce([BatchStrOutput(rows=tuple(self.rows))])  # type: ignore[arg-type]
            self.rows = list(batch.rows)  # type: ignore[attr-defined]
        self.wake()

    def fail(self, error: RequestError) -> None:
        self.error = error
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> list[R]:
        """The rows since the last call; waits until there is one. Raises the RequestError that ended the request."""
        while not self.rows:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        rows, self.rows = self.rows, []
        return rows


AnyInFlight = InFlight[StrRow] | InFlight[EmbeddingRow]


class RequestsInFlight:
    """The requests in flight by rid.

    A request is kept from its dispatch until every choice has had its last row, even when its consumer has left, so
    that rows of an abandoned request are never taken for those of a new one with the same rid.
    """

    def __init__(self, metrics: FrontMetrics, routing: Routing) -> None:
        """Counts outcomes and latencies in `metrics`, and in `routing` the choices that each replica has open."""
        self._metrics = metrics
        self._routing = routing
        self._requests: dict[str, AnyInFlight] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def get(self, rid: str) -> AnyInFlight | None:
        return self._requests.get(rid)

    def add(self, rid: str, request: AnyInFlight) -> None:
        """Registers a request that has been sent to `request.replica`."""
        self._routing.started(request.replica, request.choices)
        self._requests[rid] = request

    def abandon(self, rid: str, request: AnyInFlight) -> bool:
        """Drops the rows of a request whose consumer has left. Returns False if the request has ended already."""
        if not request.open or self._requests.get(rid) is not request:
            return False
        request.abandoned = True
        request.rows.clear()
        return True

    def fail(self, reason: str) -> None:
        """Ends all requests with 503."""
        log.info("ending all requests reason=%r in_flight=%d", reason, len(self._requests))
        for request in self._requests.values():
            request.fail(request_lost(reason))
            self._metrics.count_outcome("error", len(request.open))
        self._requests.clear()

    def fail_replica(self, replica: int, reason: str) -> dict[str, AnyInFlight]:
        """Ends the requests of a replica with 503, and returns them. They are kept until their last rows come."""
        lost = {rid: request for rid, request in self._requests.items() if request.replica == replica}
        log.error("ending the requests of a replica dp_rank=%d reason=%r in_flight=%d", replica, reason, len(lost))
        for request in lost.values():
            request.fail(request_lost(reason))
            request.abandoned = True
        return lost

    def last_rows(self, lost: dict[str, AnyInFlight]) -> tuple[TokenIDRow, ...]:
        """A final row, for the detokenizer, for each choice that is still open of the requests of a dead replica."""
        ended = FinishReason(type="error", status=500, message="the replica has died")
        return tuple(
            TokenIDRow(
                rid=rid,
                index=index,
                output_ids=b"",
                prompt_tokens=0,
                cached_tokens=0,
                completion_tokens=0,
                finish=ended,
            )
            for rid, request in lost.items()
            if self._requests.get(rid) is request
            for index in sorted(request.open)
        )

    def deliver(self, batch: BatchStrOutput | BatchEmbeddingOutput) -> None:
        """Passes rows to their consumers. Drops those of requests and choices that have ended."""
        now = time.perf_counter()
        for row in batch.rows:
            request = self._requests.get(row.rid)
            if request is None or row.index not in request.open:
                continue
            try:
                self._take(row, request, now)
            except Exception:
                log.exception("row lost rid=%r index=%d", row.rid, row.index)
                request.fail(RequestError(500, "internal error; the server's log has the details"))

    def _take(self, row: StrRow | EmbeddingRow, request: AnyInFlight, now: float) -> None:
        self._measure(row, request, now)
        if row.finish is not None or isinstance(row, EmbeddingRow):
            request.open.discard(row.index)
            self._routing.ended(request.replica)
            if not request.open:
                del self._requests[row.rid]
        if not request.abandoned:
            request.add(row)  # type: ignore[arg-type]  # the scheduler answers a request in its own kind

    def _measure(self, row: StrRow | EmbeddingRow, request: AnyInFlight, now: float) -> None:
        metrics = self._metrics
        outcome = None if row.finish is None else row.finish.type
        if isinstance(row, EmbeddingRow):
            outcome = outcome or "stop"
            metrics.queue.observe(row.queue_s)
        elif row.output_ids and row.index not in request.begun:
            request.begun.add(row.index)
            metrics.ttft.observe(now - request.arrival)
            metrics.queue.observe(row.queue_s)
        if row.finish is not None and row.finish.type == "error":
            metrics.count_outcome(failed(row.finish.status))
        elif outcome is not None:
            metrics.count_outcome(outcome)
        if outcome in ("stop", "length"):
            metrics.e2e.observe(now - request.arrival)


def failed(status: int) -> Outcome:
    """The outcome of a choice that the scheduler ended with this status: 503 is a full queue or too long a wait."""
    if status == 503:
        return "unavailable"
    return "rejected" if status < 500 else "error"


def request_lost(reason: str) -> RequestError:
    return RequestError(503, f"the request was lost: {reason}", code="server_failed")
