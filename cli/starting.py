"""Runs a server for `llmserve launch`: in the foreground, or in the background, returning when it is ready
(`--detach`).

It decides where the log goes: to stderr if that is not a terminal, else to a file in the instance's directory, so that
the checklist stays readable.
"""

import contextlib
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from llmserve.cli.common import CommandError, exit_code_of, find_instance
from llmserve.cli.console import Console
from llmserve.runtime.config import Secrets, ServerArgs
from llmserve.runtime.instance import runtime_root
from llmserve.runtime.logs import setup_logging

if TYPE_CHECKING:
    from llmserve.runtime.child import Fact

log = logging.getLogger(__name__)


def run_attached(console: Console, args: ServerArgs, secrets: Secrets) -> int:
    """Serves in this process until a signal ends it; returns the exit code. Exits if that was before it served."""
    setup_logging("main", args.log_level)
    from llmserve.cli.checklist import Checklist, LogLines
    from llmserve.cli.live_log import LiveLog
    from llmserve.runtime.serve import LOG_FILE, run_server

    if not console.stderr.isatty():
        code = run_server(args, secrets, LogLines())
    else:
        with kept_terminal() as terminal:
            screen = Console(console.stdin, console.stdout, terminal, console.environ).err
            live_log = LiveLog(screen, runtime_root() / args.name / LOG_FILE)
            checklist = Checklist(screen, f"llmserve {args.name}", secrets.api_key is not None, live_log)
            code = run_server(args, secrets, checklist, log_to_file=True)
    if code > 128:  # a signal ended the start, perhaps a download, for whose threads Python would wait
        os._exit(code)
    return code


def run_detached(console: Console, args: ServerArgs, secrets: Secrets) -> int:
    """Starts a server in a session of its own; prints its address and returns when it is ready. Raises CommandError."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os._exit(run_in_background(args, secrets, os.fdopen(writer, "w")))
    os.close(writer)
    try:
        with os.fdopen(reader) as events:
            address = follow(console, args, secrets, events)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        return 128 + signal.SIGINT
    if address is None:
        _, status = os.waitpid(pid, 0)
        raise CommandError(f"the server ended while starting ({os.waitstatus_to_exitcode(status)})")
    record = find_instance(args.name)
    console.note(f'"{args.name}" runs in the background (pid {record.pid}); its log: {record.log_path}')
    console.print(address)
    return 0


def run_in_background(args: ServerArgs, secrets: Secrets, events: TextIO) -> int:
    """Serves as the leader of a new session, reporting the start as JSON lines on `events`; returns the exit code."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    setup_logging("main", args.log_level)
    relay = Relay(events)
    try:
        from llmserve.runtime.serve import run_server

        return run_server(args, secrets, relay, log_to_file=True)
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            log.exception("failed by a defect")
            relay.failed(f"{type(error).__name__}: {error}", 1)
            return 1
        relay.failed(str(error), code)
        return code


class Relay:
    """The LaunchObserver in the background: writes each call as a JSON line, until the start is over."""

    def __init__(self, events: TextIO) -> None:
        self._events = events

    def progress(self, stage: str, done: float, total: float, unit: str) -> None:
        self._write("progress", stage, done, total, unit)

    def stage(self, name: str, detail: str) -> None:
        self._write("stage", name, detail)

    def ready(self, address: str, model: str, facts: "Mapping[str, Fact]") -> None:
        self._write("ready", address, model, dict(facts))
        self._events.close()

    def failed(self, text: str, exit_code: int) -> None:
        self._write("failed", text, exit_code)

    def draining(self, in_flight: int) -> None:
        """The stack logs it."""

    def close(self) -> None:
        """The pipe stays open, because the reason of a failure is still to be written."""

    def _write(self, *event: object) -> None:
        if not self._events.closed:
            with contextlib.suppress(OSError):  # the parent is gone
                self._events.write(json.dumps(event) + "\n")
                self._events.flush()


def follow(console: Console, args: ServerArgs, secrets: Secrets, events: TextIO) -> str | None:
    """Shows the events of a start in the background; returns the address, or None when they end without one. Raises
    CommandError when it fails.
    """
    from llmserve.cli.checklist import Checklist, LogLines

    observer: Checklist | LogLines
    if console.stderr.isatty():
        observer = Checklist(console.err, f"llmserve {args.name}", secrets.api_key is not None)
    else:
        setup_logging("main", args.log_level)
        observer = LogLines()
    try:
        for line in events:
            kind, *values = json.loads(line)
            if kind == "progress":
                observer.progress(*values)
            elif kind == "stage":
                observer.stage(*values)
            elif kind == "ready":
                observer.ready(*values)
                return str(values[0])
            else:
                raise CommandError(*values)
        return None
    finally:
        observer.close()


class Terminal(io.TextIOWrapper):
    """A terminal that may disappear. Later writes are dropped, so that they do not keep the server from draining."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def kept_terminal() -> Iterator[TextIO]:
    """Yields the terminal on stderr; restores stdout and stderr afterwards."""
    saved = os.dup(1), os.dup(2)
    try:
        with Terminal(os.fdopen(os.dup(2), "wb"), encoding=sys.stderr.encoding, errors="replace") as terminal:
            yield terminal
    finally:
        for target, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
