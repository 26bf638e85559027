"""run_server: one instance with its HTTP front, from the bound port to the exit code.

It handles the signals, and orders start, drain and end. listener.py binds the port, http_server.py runs uvicorn,
launch.py runs the other processes.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvloop

from llmserve.runtime.child import CONFIG_EXIT_CODE
from llmserve.runtime.config import Secrets, ServerArgs
from llmserve.runtime.fanout import Replicas
from llmserve.runtime.http_server import HttpServer
from llmserve.runtime.launch import LaunchError, Stack
from llmserve.runtime.listener import bind, url_of
from llmserve.runtime.logs import bound_log, keep_log, stderr_to_file
from llmserve.runtime.observer import LaunchObserver
from llmserve.runtime.threads import in_thread

log = logging.getLogger(__name__)

GRACE_S = 1.5
"""How long responses may still be written after their requests have ended."""
LAST_WORDS_S = 0.2
"""How long open streams have to deliver the error when the server is ended at once."""
MAX_DESCRIPTORS = 65536
LOG_FILE = "llmserve.log"


def run_server(args: ServerArgs, secrets: Secrets, observer: LaunchObserver, log_to_file: bool = False) -> int:
    """Serves until a signal ends it, and returns the exit code. `log_to_file` redirects stdout and stderr to the
    instance's log.

    Raises ConfigError or InstanceError when it cannot start, LaunchError when it cannot start or later fails. Either
    way no process and no directory is left behind.
    """
    allow_connections()
    try:
        if args.node_rank > 0:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(serve(args, secrets, observer, None, log_to_file))
        with bind(args.host, args.port) as listener:
            args = msgspec.structs.replace(args, port=listener.getsockname()[1])
            observer.stage("port", url_of(args.host, args.port))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(serve(args, secrets, observer, listener, log_to_file))
    finally:
        observer.close()


def allow_connections() -> None:
    """Raises this process's limit of open files: the usual 1024 would limit the number of clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(
    args: ServerArgs, secrets: Secrets, observer: LaunchObserver, listener: socket.socket | None, log_to_file: bool
) -> int:
    """The body of run_server, in its event loop. `listener` is None on a node that runs ranks but no front."""
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


async def serve_stack(stack: Stack, secrets: Secrets, asked: "asyncio.Future[int]", http: HttpServer) -> int:
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
        sampling_defaults=stack.sampling_defaults,
        rpc=Replicas(stack.instance.directory, lambda: stack.instance.record.rpc_addresses),
    )
    stack.announce_ready()
    address = url_of(stack.args.host, stack.args.port)
    stack.observer.ready(address, stack.instance.record.served_model_names[0], stack.facts)
    return await until_asked(stack, asked, http)


async def serve_ranks(stack: Stack, asked: "asyncio.Future[int]") -> int:
    """Runs this node's ranks until this node or the first one is asked to end. Raises LaunchError when a rank fails or
    another node is lost.
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


async def until_asked(stack: Stack, asked: "asyncio.Future[int]", http: HttpServer) -> int:
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
    """Yields a future that the first SIGTERM, SIGINT or SIGHUP completes. A second one, or SIGQUIT, calls `end_now`.

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
