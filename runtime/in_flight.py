"""A request in flight: the rows that have come for its consumer and were not taken yet, in bounded memory."""

import asyncio
from typing import Generic, TypeVar

from llmserve.runtime.messages import BatchStrOutput, EmbeddingRow, StrRow
from llmserve.runtime.outbox import coalesce
from llmserve.runtime.request_error import RequestError

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
