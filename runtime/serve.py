"""run_server: one instance with its HTTP front, from the bound port to the exit code.

Owns the port, the signals, the order of a drain, and uvicorn. The processes behind it are launch.py's; what a route
does is server/'s.
"""

import asyncio
import contextlib
import errno
import importlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from llmserve.runtime.child import CONFIG_EXIT_CODE
from llmserve.runtime.config import ConfigError, Secrets, ServerArgs
from llmserve.runtime.fanout import Replicas
from llmserve.runtime.instance import list_instances
from llmserve.runtime.launch import LaunchError, LaunchObserver, Stack, in_thread
from llmserve.runtime.logs import bound_log, keep_log, stderr_to_file
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.server.errors import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

BACKLOG = 2048
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's first line and headers."""
GRACE_S = 1.5
"""For responses to be written to the end after their requests have ended."""
LAST_WORDS_S = 0.2
"""For streams to be told that the server ends at once."""
KEEP_ALIVE_S = 75
"""For an idle connection: longer than clients and proxies keep theirs, so that none is closed while they write."""
MAX_DESCRIPTORS = 65536
PORTS_TRIED = 100
LOG_FILE = "llmserve.log"


def run_server(args: ServerArgs, secrets: Secrets, observer: LaunchObserver, log_to_file: bool = False) -> int:
    """Serves until a signal ends it, and returns the exit code. With `log_to_file` stderr leads to the instance's log.

    Raises ConfigError or InstanceError when it cannot start, LaunchError when it cannot start or go on; nothing is left
    over then.
    """
    allow_connections()
    try:
        if args.node_rank > 0:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(serve(args, secrets, observer, None, log_to_file))
        with bind(args.host, args.port) as listener:
            args = msgspec.structs.replace(args, port=listener.getsockname()[1])
            observer.stage("port", address_of(args))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(serve(args, secrets, observer, listener, log_to_file))
    finally:
        observer.close()


def allow_connections() -> None:
    """Raises the limit of open files, which is 1024 by habit and would be the limit of clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(
    args: ServerArgs, secrets: Secrets, observer: LaunchObserver, listener: socket.socket | None, log_to_file: bool
) -> int:
    """run_server, once the port is ours and a loop runs. Without `listener` this node has ranks and no front."""
    stack: Stack | None = None
    ended_by = 0

    def end_now(number: int) -> None:
        nonlocal ended_by
        log.warning("ended at once signal=%s", signal.Signals(number).name)
        again, ended_by = ended_by, number
        if stack is not None and stack.fail_requests("the server was ended at once") and not again:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, leave, number)
        else:
            leave(number)

    def leave(number: int) -> None:
        if stack is not None:
            stack.kill()
        observer.close()
        os._exit(128 + number)

    with asked_to_end(end_now) as asked:
        stack = Stack(args, observer)
        log_path = stack.instance.directory / LOG_FILE
        if log_to_file:
            stderr_to_file(log_path)
            stack.instance.update(log_path=str(log_path))
        bounding = asyncio.create_task(bound_log(log_path))
        http = None if listener is None else HttpServer(listener)
        try:
            code = await (serve_ranks(stack, asked) if http is None else serve_stack(stack, secrets, asked, http))
            return 128 + ended_by if ended_by else code
        except LaunchError as error:
            log.error("failed reason=%s", error)
            kept = keep_log(log_path, args.name) if log_to_file and error.exit_code != CONFIG_EXIT_CODE else None
            raise LaunchError(f"{error}; the log is in {kept}" if kept else str(error), error.exit_code) from None
        finally:
            bounding.cancel()
            if http is not None:
                await http.close(GRACE_S)
            await stack.stop()


async def serve_stack(stack: Stack, secrets: Secrets, asked: "asyncio.Future[int]", http: "HttpServer") -> int:
    """Starts the processes, puts the application in front of them, and serves until asked to end."""
    starting = asyncio.create_task(stack.start())
    app_module = asyncio.create_task(in_thread(importlib.import_module, "llmserve.runtime.server.app"))
    await first_of(starting, asked, http.task)
    if asked.done():
        starting.cancel()
        return 128 + asked.result()
    await starting
    http.app = (await app_module).build_app(
        tokenizer_manager=stack.tokenizer_manager,
        args=stack.args,
        options=stack.options,
        secrets=secrets,
        checkpoint=stack.checkpoint,
        rpc=Replicas(stack.instance.directory, lambda: stack.instance.record.rpc_addresses),
    )
    stack.announce_ready()
    stack.observer.ready(address_of(stack.args), stack.instance.record.served_model_names[0], stack.facts)
    return await until_asked(stack, asked, http)


async def serve_ranks(stack: Stack, asked: "asyncio.Future[int]") -> int:
    """Runs this node's ranks until asked to end, or the first node is. Raises LaunchError when one of them ends, or
    another node does unasked.
    """
    starting = asyncio.create_task(stack.start())
    dismissed = asyncio.create_task(stack.dismissed.wait())
    await first_of(starting, asked, dismissed)
    if asked.done():
        starting.cancel()
        return 128 + asked.result()
    failed = asyncio.create_task(stack.wait_failed())
    try:
        if not dismissed.done():
            await starting
            stack.announce_ready()
            stack.observer.ready(f"node {stack.args.node_rank}", stack.checkpoint.name, stack.facts)
            await first_of(failed, asked, dismissed)
        if failed.done():
            raise failed.result()
        if dismissed.done():
            log.info("the first node was stopped")
        return 0
    finally:
        for task in (starting, failed, dismissed):
            task.cancel()


async def until_asked(stack: Stack, asked: "asyncio.Future[int]", http: "HttpServer") -> int:
    """Serves until asked to end, then drains and returns 0. Raises LaunchError when the instance fails before that."""
    failed = asyncio.create_task(stack.wait_failed())
    try:
        await first_of(failed, asked, http.task)
        if asked.done() and not failed.done():
            log.info("asked to end signal=%s", signal.Signals(asked.result()).name)
            draining = asyncio.create_task(stack.drain())
            await first_of(failed, draining)
            if draining.done():
                left = draining.result()
                if left:
                    log.warning("the drain timeout is over requests_ended=%d", left)
                    stack.tokenizer_manager.fail("the server is shutting down and its drain timeout is over")
                return 0
        if failed.done():
            raise failed.result()
        raise LaunchError("the HTTP server stopped by itself")
    finally:
        failed.cancel()


async def first_of(*futures: "asyncio.Future[Any]") -> None:
    """Waits until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def asked_to_end(end_now: Callable[[int], None]) -> "Iterator[asyncio.Future[int]]":
    """Gives a future of the first SIGTERM, SIGINT or SIGHUP. The second of them, or SIGQUIT, calls `end_now`.

    A signal that this process was started to ignore (nohup, a shell's background job) stays ignored.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if asked.done() or number == signal.SIGQUIT:
            end_now(number)
        else:
            asked.set_result(number)

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield asked
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


# ---- the HTTP server -----------------------------------------------------------------------------------------------


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
        # Not `serve`, which would take the signals that asked_to_end gives a meaning.
        self.task: asyncio.Task[None] = asyncio.create_task(self._server._serve([listener]))

    async def _dispatch(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        else:
            loading = RequestError(503, "the model is still loading", code="loading")
            await error_response(loading, {"Retry-After": "1"})(scope, receive, send)

    async def close(self, grace_s: float) -> None:
        """Stops listening at once, and returns when the open responses have ended, or are cut off after `grace_s`."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]  # it only goes to wait_for
        self._server.should_exit = True
        await self.task


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's fast protocol with a limit on a request's head: its parser would keep a header of any size."""

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


# ---- the port ------------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that nobody else gets the port while the model loads. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"--host {host}: {error.strerror}; give an address of this machine, such as 127.0.0.1"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = find_holder(port)
            raise ConfigError(f"port {port} is in use by {holder}; try --port {find_free_port(host, port)}") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def find_holder(port: int) -> str:
    """Who listens on a TCP port: `pid 812 (llmserve "prod")`, as far as we may see."""
    for record in list_instances():
        if record.port == port:
            return f'pid {record.pid} (llmserve "{record.name}")'
    for connection in psutil.net_connections("tcp"):
        if (
            connection.laddr
            and connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
            and connection.pid
        ):
            with contextlib.suppress(psutil.Error):
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"


def find_free_port(host: str, taken: int) -> int:
    """The next port after `taken` that can be bound now."""
    for port in range(taken + 1, min(taken + PORTS_TRIED, 65535) + 1):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    return 0


def address_of(args: ServerArgs) -> str:
    """The URL to type: an address that means "all" is shown as loopback, which works at least here."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    return f"http://[{host}]:{args.port}" if ":" in host else f"http://{host}:{args.port}"
