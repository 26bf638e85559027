"""The HTTP server of an instance: uvicorn on a bound socket, answering 503 until it is given an application.

Signals and the drain are in serve.py, the application in server/.
"""

import asyncio
import socket
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmserve.runtime.listener import BACKLOG
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.server.errors import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_HEAD_BYTES = 64 * 1024
"""Limit on the first line and the headers of a request."""
KEEP_ALIVE_S = 75
"""How long an idle connection is kept: longer than clients and proxies keep theirs, so that the server never closes one
on which a client is just sending.
"""


class HttpServer:
    """uvicorn on a bound socket in the running loop. Until `app` is set every request is answered 503."""

    def __init__(self, listener: socket.socket) -> None:
        self.app: ASGIApp | None = None
        config = uvicorn.Config(
            self._dispatch,
            interface="asgi3",
            http=LimitedHttp,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            backlog=BACKLOG,
        )
        self._server = uvicorn.Server(config)
        # `_serve`, because `serve` would install signal handlers over those of serve.py.
        self.task: asyncio.Task[None] = asyncio.create_task(self._server._serve([listener]))

    async def _dispatch(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        else:
            loading = RequestError(503, "the model is still loading", code="loading")
            await error_response(loading, {"Retry-After": "1"})(scope, receive, send)

    async def close(self, grace_s: float) -> None:
        """Stops listening at once; returns when the open responses have ended, or cuts them off after `grace_s`."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]  # it only goes to wait_for
        self._server.should_exit = True
        await self.task


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's httptools protocol with a limit on the request's head: its parser would buffer a header of any size."""

    _head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()
