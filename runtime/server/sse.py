"""Server-sent events: the rows of a request as `data: …` frames, each followed by a blank line, and `data: [DONE]` at
the end.

The status is sent with the first row, so that an error before it is an ordinary HTTP error. A later error is a frame
`data: {"error": …}`, and the stream ends without `[DONE]`.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmserve.runtime.messages import StrRow
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.server.errors import error_json, error_response, finish_error, unexpected

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def frame(data: bytes) -> bytes:
    """One event. JSON from msgspec has no line breaks, so one `data:` line is enough."""
    return b"data: " + data + b"\n\n"


class RowWriter(Protocol):
    """Encodes the rows of one request as frames."""

    def chunk(self, row: StrRow) -> bytes:
        """The frame of a row; b"" if there is nothing to send."""

    def last(self) -> bytes:
        """The frames after the last row and before [DONE]."""


class EventStream(Response):
    """Streams the rows of a request as they come. Cancelling it closes `rows`, which aborts the request."""

    def __init__(self, rows: AsyncGenerator[StrRow, None], writer: RowWriter) -> None:
        super().__init__()
        self._rows = rows
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._rows) as rows:
                async for row in rows:
                    if row.finish is not None and (error := finish_error(row.finish)):
                        raise error
                    data = self._writer.chunk(row)
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": self._writer.last() + DONE})
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("stream failed path=%s", scope["path"])
            told = error if isinstance(error, RequestError) else unexpected(error)
            if started:
                await send({"type": "http.response.body", "body": frame(error_json(told))})
            else:
                await error_response(told)(scope, receive, send)
