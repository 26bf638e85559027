"""A request between the scheduler and the consumer of its rows: what has come and was not taken, in bounded memory."""

import asyncio
from typing import Generic, TypeVar

from llmserve.runtime.messages import BatchStrOutput, EmbeddingRow, StrRow
from llmserve.runtime.outbox import coalesce
from llmserve.runtime.request_error import RequestError

ROWS_BEFORE_MERGING = 16
"""So many rows a choice may wait for a slow consumer before they are merged."""

R = TypeVar("R", StrRow, EmbeddingRow)


class InFlight(Generic[R]):
    """A request of so many choices, and what has come of it that its consumer has not taken."""

    __slots__ = ("abandoned", "arrival", "begun", "choices", "error", "open", "replica", "rows", "waiter")

    def __init__(self, choices: int, arrival: float) -> None:
        self.replica = 0
        """Whose it is."""
        self.choices = choices
        self.open = set(range(choices))
        """Choices whose last row has not come."""
        self.rows: list[R] = []
        self.error: RequestError | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.abandoned = False
        self.arrival = arrival
        self.begun: set[int] = set()
        """Choices of which a token has come."""

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
        """The rows since the last call; waits for the first. Raises the error that ended the request."""
        while not self.rows:
            if self.error is not None:
                raise self.error
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        rows, self.rows = self.rows, []
        return rows


AnyInFlight = InFlight[StrRow] | InFlight[EmbeddingRow]
