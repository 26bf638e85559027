"""Real instances for tests: `llmserve launch` in a subprocess, looked at and ended from outside as an operator would.

Every instance of a test run lives under a runtime directory of its own, so that no test sees the developer's instances.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from llmserve.runtime.client import RpcClient
from llmserve.runtime.messages import GetLoadReqInput

LLMSERVE = str(Path(sys.executable).with_name("llmserve"))
FOREVER = 60_000
"""Tokens that outlast any test: the model of `long_model` takes over ten seconds for them on a fast machine."""
PATIENCE_S = 60.0
"""For what has to happen, however slow the machine is."""
COMMAND_S = 2.5 * PATIENCE_S
"""For a whole command, by the wall clock; it may launch an instance."""
PATIENT = ("--timeout", str(PATIENCE_S))
"""For commands that would soon say that an instance is silent."""


def runtime_directory() -> Path:
    """A new private directory for XDG_RUNTIME_DIR; short, because socket paths must be."""
    return Path(tempfile.mkdtemp(prefix="llms-"))


def fair_time() -> float:
    """A clock for limits of time, in seconds: it stands still while somebody waits for a core.

    Linux counts that (its pressure stall information); where it does not, this is the wall clock.
    """
    try:
        some = Path("/proc/pressure/cpu").read_text().split()
    except OSError:
        return time.monotonic()
    return time.monotonic() - int(some[4].removeprefix("total=")) / 1e6


def wait_until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Returns once `condition` holds; fails the test after so many seconds by `fair_time`: `what` did not come."""
    deadline = fair_time() + seconds
    while not condition():
        if fair_time() >= deadline:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)


def run_cli(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `llmserve ARGUMENTS` to its end, off a terminal."""
    return subprocess.run(
        [LLMSERVE, *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env=environment_for(root, **environment),
        stdin=subprocess.DEVNULL,
        check=False,
    )


def environment_for(root: Path, **more: str) -> dict[str, str]:
    """This process's environment with the runtime directory `root` and none of the developer's own settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LLMSERVE_")}
    ours = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"), str(root))
    return inherited | ours | more


class RunningInstance:
    """An instance that `launched` or a test has started. `process` is its main process, as a subprocess of ours."""

    def __init__(self, root: Path, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.root = root
        self.name = name
        self.process = process
        self.log = log
        self.directory = root / "llmserve" / name

    @property
    def record(self) -> dict[str, Any]:
        """What the instance says of itself in its directory; empty before it does."""
        try:
            record: dict[str, Any] = json.loads((self.directory / "instance.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return record if record["pid"] == self.process.pid else {}  # a predecessor's lies there until it is swept

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.record['port']}"

    def requests(self) -> int:
        """How many choices of requests run in the schedulers, or wait there."""
        count = 0
        for address in self.record["rpc_addresses"]:
            with RpcClient(address, PATIENCE_S) as client:
                answer = client.call(GetLoadReqInput())
            count += answer.running + answer.waiting
        return count

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def child(self, role: str) -> psutil.Process:
        """The child process of a role ("scheduler", "detokenizer"), which looks like its parent for a moment."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            children = psutil.Process(self.process.pid).children()
            found[:] = [child for child in children if role in command_line(child)]
            return bool(found)

        wait_until(is_there, PATIENCE_S, f"the {role}")
        return found[0]

    def processes(self) -> list[psutil.Process]:
        """The main process and everything that it has started."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def wait_ready(self, seconds: float = PATIENCE_S) -> None:
        def ready_or_ended() -> bool:
            return self.record.get("state") == "ready" or self.process.poll() is not None

        wait_until(ready_or_ended, seconds, lambda: f"ready; its log:\n{self.log_text()}")
        assert self.process.poll() is None, f"it ended with {self.process.returncode}; its log:\n{self.log_text()}"

    def wait_ended(self, seconds: float) -> int:
        """The exit code of the main process, which must end within so many seconds."""
        wait_until(lambda: self.process.poll() is not None, seconds, lambda: f"its end; its log:\n{self.log_text()}")
        code: int = self.process.returncode
        return code

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, **{"timeout": PATIENCE_S, **options})

    def stop(self) -> None:
        """Ends it at once and checks that nothing is left of it."""
        if self.process.poll() is None:
            processes = self.processes()
            self.process.send_signal(signal.SIGQUIT)
            self.wait_ended(10)
            assert_gone(processes)
            assert not self.directory.exists()


def hang_up(child: Any) -> None:
    """Ends a program that pexpect runs, however long that takes; its own `close` gives it a tenth of a second."""
    child.kill(signal.SIGKILL)
    child.wait()
    child.close()


def command_line(process: psutil.Process) -> list[str]:
    """Empty when it has ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def assert_gone(processes: list[psutil.Process], seconds: float = 5) -> None:
    """Fails unless all of `processes` end within so many seconds; a zombie has ended."""
    wait_until(lambda: not any(map(is_alive, processes)), seconds, f"the end of {processes}")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_all(root: Path) -> None:
    """Kills whatever still runs under a runtime directory, and removes it: what a failed test leaves behind."""
    for path in root.glob("llmserve/*/instance.json"):
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            process = psutil.Process(json.loads(path.read_bytes())["pid"])
            if "launch" in process.cmdline():
                process.kill()
    shutil.rmtree(root, ignore_errors=True)


def start(root: Path, name: str, *arguments: str, **environment: str) -> RunningInstance:
    """Starts `llmserve launch ARGUMENTS --name NAME` on a free port and returns at once. Its draws are seeded: the luck
    of a run, such as an end token drawn early, is no reason to fail.
    """
    log = root / f"{name}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [LLMSERVE, "launch", *arguments, "--name", name, "--port", "0", "--seed", "7"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment_for(root, **environment),
            start_new_session=True,
        )
    return RunningInstance(root, name, process, log)


def free_port() -> int:
    """One that nobody has, and that the system gives to nobody who wants any."""
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are all in use")


@contextmanager
def launched(root: Path, name: str, *arguments: str, **environment: str) -> Iterator[RunningInstance]:
    """A ready instance, ended afterwards with a check that nothing is left of it."""
    instance = start(root, name, *arguments, **environment)
    try:
        instance.wait_ready()
        yield instance
    finally:
        instance.stop()
