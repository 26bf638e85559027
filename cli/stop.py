"""`llmserve stop`: signals the main process of an instance, which drains and ends, and waits until it is gone."""

import os
import select
import signal
import time
from typing import Annotated

import typer

from llmserve.cli.common import CommandError, ExitCode, InstanceOption, JsonOption, console_of, find_instance
from llmserve.cli.console import Console
from llmserve.cli.format import duration, plural
from llmserve.cli.loads import ask_load
from llmserve.runtime.instance import InstanceError, InstanceRecord, sweep_stale
from llmserve.runtime.proc import is_stopped

LOOK_EVERY_S = 0.5
ENDS_NOW_WITHIN_S = 2.0
TAKES_NOTICE_WITHIN_S = 10.0
"""How soon a drain must begin: a main process that hangs, or is stopped by SIGSTOP, never reaches its
--drain-timeout.
"""


def stop(
    ctx: typer.Context,
    instance: InstanceOption = None,
    now: Annotated[bool, typer.Option("--now", help="End it at once; requests in flight are lost.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.0,
            help="How long to wait for its end; it goes on draining after that.",
            show_default="its --drain-timeout",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Drain an instance and end it.

    It refuses new requests at once, finishes those in flight within its --drain-timeout, and ends. A paused instance is
    resumed for that. With --now it ends without finishing them.
    """
    console = console_of(ctx)
    record = find_instance(instance)
    seconds = end(console, record, now, timeout)
    if json:
        console.json({"instance": record.name, "pid": record.pid, "seconds": round(seconds, 3)})
    else:
        console.note(f'"{record.name}" has ended after {duration(seconds)}')


def end(console: Console, record: InstanceRecord, now: bool, timeout: float | None) -> float:
    """Ends an instance, or waits for its end if it has been told already; returns the seconds that it took. Raises
    CommandError.
    """
    began = time.monotonic()
    process = open_process(record)
    try:
        if now or not record.ending:
            signal.pidfd_send_signal(process, signal.SIGQUIT if now else signal.SIGTERM)
        if now and not wait_gone(process, ENDS_NOW_WITHIN_S):
            signal.pidfd_send_signal(process, signal.SIGKILL)  # it is stuck; its children end with it
            wait_gone(process, ENDS_NOW_WITHIN_S)
            sweep_stale()
        elif not now:
            wait_drained(console, record, process, timeout)
    except KeyboardInterrupt:
        message = f'interrupted; "{record.name}" goes on ending, `llmserve stop --now` ends it at once'
        raise CommandError(message, 128 + signal.SIGINT) from None
    finally:
        os.close(process)
    return time.monotonic() - began


def open_process(record: InstanceRecord) -> int:
    """A pidfd of the instance's main process, not of another one that has got its pid. Raises CommandError."""
    try:
        process = os.pidfd_open(record.pid)
    except ProcessLookupError:
        raise CommandError(f'instance "{record.name}" has just ended', ExitCode.UNAVAILABLE) from None
    if not record.alive:
        os.close(process)
        raise CommandError(f'instance "{record.name}" has just ended', ExitCode.UNAVAILABLE)
    return process


def wait_gone(process: int, seconds: float) -> bool:
    """Whether the process ends within `seconds`."""
    return bool(select.select([process], [], [], seconds)[0])


def wait_drained(console: Console, record: InstanceRecord, process: int, limit: float | None) -> None:
    """Waits for the end of a drain, showing on a terminal how many requests are left.

    Raises CommandError (75) after `limit` seconds, or earlier when the instance does not begin to drain.
    """
    deadline = time.monotonic() + (limit if limit is not None else float("inf"))
    notice, drains = time.monotonic() + TAKES_NOTICE_WITHIN_S, False
    with console.waiting(f"draining {record.name}") as say:
        while not wait_gone(process, min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                stopped = f" ({record.stopped})" if record.stopped else ""
                ends = "`llmserve stop --now`"
                if not is_stopped(record.pid):
                    ends = f"its --drain-timeout or {ends}"
                raise CommandError(f'"{record.name}" is still draining{stopped}; {ends} ends it', ExitCode.BUSY)
            drains = drains or says_it_drains(record)
            if not drains and time.monotonic() >= notice:
                raise CommandError(
                    f'"{record.name}" (pid {record.pid}) has not begun to drain in {duration(TAKES_NOTICE_WITHIN_S)}: '
                    "it hangs, or is stopped; `llmserve stop --now` ends it all the same",
                    ExitCode.BUSY,
                )
            load = ask_load(record)
            if load.running is not None and load.waiting is not None:
                left = plural(load.running + load.waiting, "request")
                say(f"draining {record.name}: {left} left")


def says_it_drains(record: InstanceRecord) -> bool:
    """Whether the main process has begun to drain, or is gone."""
    try:
        return find_instance(record.name).state == "draining"
    except InstanceError:
        return True
