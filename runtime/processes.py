"""The main process's side of a child process: starting it, sending its ChildInit, receiving its status, noticing its
end, and ending it.

The Stack (launch.py) decides what follows from that; the child's side is in child.py.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

import msgspec

from llmserve.runtime.child import CONFIG_EXIT_CODE, DISMISSAL, STACKS_SIGNAL, ChildInit, Failed, Ready, Status
from llmserve.runtime.proc import CHILD_MODULE

log = logging.getLogger(__name__)

SECRET_VARIABLES = ("LLMSERVE_API_KEY", "LLMSERVE_ADMIN_API_KEY")
KILLED_WAIT_S = 5.0
FAREWELL_WAIT_S = 1.0
STATUS_READ_BYTES = 1 << 16


class ChildProcess:
    """One child of this process, started by the constructor. Belongs to the event loop in which it was made.

    `ended` completes with the return code (negative: the signal that ended it), `ready` with its Ready message, or
    never. `failure` is the reason that the child itself gave for its end, if any.
    """

    def __init__(
        self,
        role: str,
        module: str,
        instance: str,
        environment: Mapping[str, str],
        on_status: Callable[["ChildProcess", Status], None],
    ) -> None:
        """Starts `run` of `module` in a new process. `environment` is added to this process's, without the secrets.
        Raises OSError.
        """
        self.role = role
        self.failure: Failed | None = None
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        self._popen = subprocess.Popen(
            # -P: files in the working directory must not shadow libraries.
            [sys.executable, "-P", "-m", CHILD_MODULE, role, module, instance],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, **environment},
            process_group=0,  # a terminal's Ctrl-C must reach only the main process
            bufsize=0,
        )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._orders = self._popen.stdin
        self._status = self._popen.stdout
        self._buffer = b""
        os.set_blocking(self._status.fileno(), False)
        self._loop.add_reader(self._status.fileno(), self._read_status)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def __str__(self) -> str:
        return f"{self.role} (pid {self.pid})"

    def send(self, init: ChildInit) -> None:
        """Sends the child its ChildInit. A child that has died is noticed elsewhere (`ended`)."""
        try:
            self._orders.write(msgspec.json.encode(init) + b"\n")
        except (OSError, ValueError):  # ValueError: it has been reaped, and the pipe closed
            log.debug("cannot send orders child=%s", self.role)

    async def dismiss(self) -> None:
        """Tells the child to say farewell and end; waits up to FAREWELL_WAIT_S seconds for that."""
        with contextlib.suppress(OSError, ValueError):  # it has ended by itself
            self._orders.write(DISMISSAL)
            self._orders.close()
        await asyncio.wait([self.ended], timeout=FAREWELL_WAIT_S)

    def dump_stacks(self) -> None:
        """Makes the child write the stacks of all its threads to the log."""
        if not self.ended.done():
            os.kill(self.pid, STACKS_SIGNAL)

    def kill(self) -> None:
        """Kills the child's process group. Safe to repeat."""
        if self.ended.done():
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("process group is gone already child=%s", self.role)

    async def wait_killed(self) -> None:
        """Kills the child and waits until it is gone."""
        self.kill()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), KILLED_WAIT_S)
        except TimeoutError:
            log.error("cannot be killed child=%s pid=%d", self.role, self.pid)

    def _read_status(self) -> None:
        try:
            data = os.read(self._status.fileno(), STATUS_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._status.fileno())
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            status = msgspec.json.decode(line, type=Status)
            if isinstance(status, Failed):
                self.failure = status
            elif isinstance(status, Ready) and not self.ready.done():
                self.ready.set_result(status)
            self._on_status(self, status)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._read_status()  # its last status may have come with its end
        self._loop.remove_reader(self._status.fileno())
        self._status.close()
        self._orders.close()
        self.ended.set_result(self._popen.wait())


def describe_end(child: ChildProcess, code: int) -> str:
    """Why a child has ended, for the user."""
    if child.failure is not None and child.failure.exit_code == CONFIG_EXIT_CODE:
        return child.failure.message  # for the user to correct, so the role does not matter
    if child.failure is not None:
        return f"the {child.role} failed: {child.failure.message}"
    if code >= 0:
        return f"the {child} exited with status {code}"
    name = signal.Signals(-code).name
    hint = " (out of memory, perhaps: see the kernel's log)" if name == "SIGKILL" else ""
    return f"the {child} was killed by {name}{hint}"
