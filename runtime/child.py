"""The child's side of a child process: `python -m llmserve.runtime.child ROLE MODULE INSTANCE` runs MODULE.run(init,
report).

Does what all children have in common: it receives its ChildInit from the main process and never outlives it. stdin
carries one line, the ChildInit, and possibly a DISMISSAL; its end means that the main process is gone, or wants this
process to end. stdout carries status lines. The main process's side is in processes.py.
"""

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType
from typing import BinaryIO

import msgspec

from llmserve.runtime.config import ConfigError, ServerArgs
from llmserve.runtime.logs import setup_logging
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.ports import PortArgs

log = logging.getLogger(__name__)

CONFIG_EXIT_CODE = 78
DISMISSAL = b"dismissed\n"
"""Sent before the end of stdin when the main process ends this one on purpose, and waits a moment for its farewell."""
PR_SET_NAME = 15
PR_SET_PDEATHSIG = 1
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a process write the stacks of its threads to stderr, even while it is stuck in native code."""


class ChildInit(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a child is told. It holds no secrets: children neither need nor get them."""

    role: str
    args: ServerArgs
    ports: PortArgs
    directory: str
    """The instance's directory, with its sockets."""
    checkpoint: Checkpoint
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0


Fact = int | float | str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """`done` of `total`, in `unit`, of one stage of the start."""

    stage: str
    done: float
    total: float
    unit: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child is ready; `facts` are sizes and choices that the main process uses or shows."""

    facts: dict[str, Fact]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why the child ends. `exit_code` is the exit status for the launch."""

    message: str
    exit_code: int = 1


Status = Progress | Ready | Failed


class Reporter:
    """Writes status lines to the main process. It is not an error when that is gone: the child then ends soon
    anyway.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.farewell: Callable[[], None] = lambda: None
        """Called, in a thread of its own, when the main process dismisses this one, before the end."""

    def progress(self, stage: str, done: float, total: float, unit: str) -> None:
        self._write(Progress(stage, done, total, unit))

    def ready(self, **facts: Fact) -> None:
        self._write(Ready(facts))

    def error(self, text: str, exit_code: int = 1) -> None:
        self._write(Failed(text, exit_code))

    def _write(self, status: Status) -> None:
        try:
            self._stream.write(msgspec.json.encode(status) + b"\n")
            self._stream.flush()
        except OSError:
            pass


def main() -> int:
    role, module = sys.argv[1], sys.argv[2]
    # systemd, a container's runtime and some terminals signal every process of a group. Only the main process decides:
    # otherwise the requests that it wants to finish would die with their scheduler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_NAME, f"llms-{role}".encode()[:15], 0, 0, 0)

    orders, report = take_standard_streams()
    first_line: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=watch_parent, args=(orders, first_line, report), daemon=True, name="death-pipe").start()
    # In addition, for a process whose threads cannot run because native code holds the GIL.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    setup_logging(role, "info")

    try:
        run = imported(module).run  # slow, so done while the main process looks for the checkpoint
        init = msgspec.json.decode(first_line.get(), type=ChildInit)
        setup_logging(role, init.args.log_level)
        run(init, report)
    except ConfigError as error:
        report.error(str(error), CONFIG_EXIT_CODE)
        return CONFIG_EXIT_CODE
    except Exception as error:
        log.exception("failed role=%s", role)
        report.error(f"{type(error).__name__}: {error}")
        return 1
    return 0


def imported(module: str) -> ModuleType:
    """Imports a module with the garbage collector off, and excludes what was imported from later collections.

    torch makes a million objects: collecting during the import takes a fifth of a start, and one collection later, in
    the middle of a step, 0.15 s.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def take_standard_streams() -> tuple[BinaryIO, Reporter]:
    """Moves the two pipes away from stdin and stdout, where a library's print would corrupt them, and makes stdout
    stderr.
    """
    orders = os.fdopen(os.dup(0), "rb")
    report = Reporter(os.fdopen(os.dup(1), "wb"))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return orders, report


def watch_parent(orders: BinaryIO, first_line: "SimpleQueue[bytes]", report: Reporter) -> None:
    """Passes on the first line of `orders`, then waits for its end, and kills this process and its descendants."""
    line = orders.readline()
    if line:
        first_line.put(line)
        if orders.read() == DISMISSAL:
            try:
                report.farewell()
            except Exception as error:
                log.warning("no farewell reason=%s", error)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    # Run the imported module: the classes of `__main__` would differ from those that others import.
    from llmserve.runtime.child import main as imported_main

    sys.exit(imported_main())
