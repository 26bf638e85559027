"""The outermost ASGI layer: API keys, limits on bodies, clients that disconnect, and uncaught errors.

It is a plain ASGI class: Starlette's BaseHTTPMiddleware would put a queue between the answer and the socket, and hide
that a client has disconnected.
"""

import asyncio
import logging
from types import TracebackType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmserve.runtime.request_error import RequestError
from llmserve.runtime.server.auth import KeyPolicy
from llmserve.runtime.server.errors import error_response, unexpected

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024


class ClientLeft(Exception):
    """The client has disconnected before its answer was complete."""


class Frontdoor:
    """Checks the key, reads the body for the app, and cancels the app when the client disconnects.

    The app serves a request within the cancelled task, so that disconnecting aborts the request on every route.
    """

    def __init__(self, app: ASGIApp, keys: KeyPolicy, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._keys.check(scope["path"], scope["headers"])
            body = await _read_body(scope, receive, self._max_body_bytes)
            async with _cancelled_when_client_leaves(receive):
                await self._app(scope, _Replay(body), send)
        except ClientLeft:
            log.debug("client left path=%s", scope["path"])
        except RequestError as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await error_response(error, headers)(scope, receive, send)
        except Exception as error:
            # A stream that has begun handles its own errors (sse.py), so nothing has been sent yet.
            log.exception("request failed method=%s path=%s", scope["method"], scope["path"])
            await error_response(unexpected(error))(scope, receive, send)


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body. Raises RequestError 413 as soon as it is known to exceed `limit` bytes; no more than that is kept."""
    too_long = RequestError(413, f"the request body is longer than {limit} bytes", code="request_too_large")
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if int(announced) > limit:
        raise too_long
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_long
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


class _Replay:
    """The `receive` of the app: gives it the whole body. A disconnect is not reported here, as it cancels the app."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _cancelled_when_client_leaves:
    """Cancels the block when the client disconnects, and then raises ClientLeft. Built like asyncio.Timeout."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watch = asyncio.create_task(self._wait_for_client())

    async def _wait_for_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._left and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientLeft from error
