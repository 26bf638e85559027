"""`llmserve logs`: the log of an instance, also of one that has died or failed."""

import os
import re
import time
from collections import deque
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.common import CommandError, ExitCode, InstanceOption, JsonOption, console_of, find_instance
from llmserve.cli.console import CONTROL_PICTURES, Console
from llmserve.runtime.instance import InstanceRecord, list_instances
from llmserve.runtime.logs import kept_log

POLL_S = 0.2
LINE = re.compile(r"(?P<time>\d{4}-\S+) (?P<level>[a-z]+) (?P<process>\S+): (?P<message>.*)")
"""A line as runtime/logs.py writes it."""
LINE_SAFE = {code: shown for code, shown in CONTROL_PICTURES.items() if chr(code) not in "\n\t"}


def logs(
    ctx: typer.Context,
    instance: InstanceOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing what is added, until the instance ends.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", metavar="N", min=0, help="Print only the last N lines.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.0,
            help="How long --follow waits for a new line.",
            show_default="for ever",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the log of an instance that keeps one: started on a terminal, or with --detach.

    An instance started off a terminal writes its log to its standard error instead.

    --json prints an object per line: time, level, process and message; lines of a traceback have only a message.
    """
    console = console_of(ctx)
    record = find_with_log(instance)
    with Path(record.log_path).open("rb") as file:
        rest = write(console, b"".join(deque(file, maxlen=lines)), json)
        heard = time.monotonic()
        while follow:
            alive = record.alive  # asked before the last look, so that nothing written before the end is missed
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # it was truncated because it had grown too long
            added = file.read()
            if added:
                rest = write(console, rest + added, json)
                heard = time.monotonic()
            elif not alive or not os.path.exists(record.log_path):
                console.note(f'"{record.name}" has ended')
                break
            elif timeout is not None and time.monotonic() - heard >= timeout:
                raise CommandError(f"no line came in {timeout:g} s", ExitCode.BUSY)
            else:
                time.sleep(POLL_S)
        if rest:
            write(console, rest + b"\n", json)


def find_with_log(name: str | None) -> InstanceRecord:
    """The instance whose log to read; one that is named may have failed or died. Raises InstanceError or
    CommandError.
    """
    known = {record.name: record for record in list_instances()}
    kept = kept_log(name) if name else None
    if kept and name and name not in known and kept.exists():
        return InstanceRecord(name=name, log_path=str(kept))
    record = known[name] if name in known and not known[name].alive else find_instance(name)
    if not record.log_path:
        raise CommandError(
            f'"{record.name}" keeps no log: it writes to the standard error of pid {record.pid}', ExitCode.NOT_FOUND
        )
    if not Path(record.log_path).exists():
        raise CommandError(f"the log {record.log_path} is gone", ExitCode.NOT_FOUND)
    return record


def write(console: Console, text: bytes, json: bool) -> bytes:
    """Prints the complete lines of `text`; returns the incomplete last one."""
    *lines, rest = text.split(b"\n")
    for line in (line.decode(errors="replace") for line in lines):
        if json:
            parts = LINE.fullmatch(line)
            fields = parts.groupdict() if parts else {**dict.fromkeys(LINE.groupindex), "message": line}
            console.print(dumps(fields))
        else:
            console.print(line.translate(LINE_SAFE) if console.stdout.isatty() else line)
    return rest
