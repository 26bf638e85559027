"""The registry of instances: a private directory for each, with its lock and its record, under one private root.

It owns these directories and who may use them, but not the sockets in them or the processes. Imports neither torch nor
zmq, because the command line imports it.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from llmserve.runtime.messages import PROTOCOL_VERSION
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.proc import child_role, is_stopped, process_start_time

log = logging.getLogger(__name__)

RECORD = "instance.json"


class InstanceError(Exception):
    """An instance cannot be found, acquired or trusted. `exit_code` is the exit status for a command."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance publishes for the commands: a JSON file in its directory. `created` is in Unix seconds."""

    name: str
    pid: int = 0
    start_time: int = 0
    """Start time of the process `pid` in clock ticks since the boot, by which a reused pid is recognized."""
    host: str = ""
    port: int = 0
    model: str = ""
    served_model_names: tuple[str, ...] = ()
    node_rank: int = 0
    """The number of this machine among those that hold the model. Only node 0 serves clients and answers commands."""
    state: Literal["starting", "ready", "draining"] = "starting"
    ending: bool = False
    """Whether it has been told to end, and drains for that: another SIGTERM would end it at once."""
    created: float = 0.0
    version: str = ""
    protocol: int = PROTOCOL_VERSION
    log_path: str = ""
    children: tuple[int, ...] = ()
    rpc_addresses: tuple[str, ...] = ()
    """The RPC socket of each live replica."""
    lost_replicas: tuple[int, ...] = ()
    """The dp_ranks of replicas that have died while others serve on."""

    @property
    def address(self) -> str:
        """Host and port as they stand in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return self.pid > 0 and process_start_time(self.pid) == self.start_time

    @property
    def stopped(self) -> str:
        """A description of the first of its processes that is stopped (SIGSTOP, a debugger); empty if none is."""
        for pid in (self.pid, *self.children):
            if is_stopped(pid):
                role = "main" if pid == self.pid else child_role(pid) or "child"
                return f"its {role} process {pid} is stopped"
        return ""

    @property
    def directory(self) -> Path:
        return runtime_root() / self.name


class Instance:
    """An instance name that this process holds until `release`. Made by `acquire`."""

    def __init__(self, record: InstanceRecord, directory: Path, lock: int):
        self.record = record
        self.directory = directory
        self._lock = lock
        self._owner = os.getpid()
        self._write()

    def update(self, **fields: object) -> None:
        """Publishes the record with some fields changed.

        A failure is only logged: the disk may be full, or the end of a login session may have removed $XDG_RUNTIME_DIR.
        """
        self.record = msgspec.structs.replace(self.record, **fields)
        try:
            self._write()
        except OSError as error:
            log.warning("the record is out of date directory=%s reason=%s", self.directory, error.strerror)

    def _write(self) -> None:
        draft = self.directory / f".{RECORD}"
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self.record)))
        draft.replace(self.directory / RECORD)  # atomic: a reader sees the old record or the new one

    def release(self) -> None:
        """Removes the directory with its contents and frees the name. Safe to repeat; does nothing in a forked
        process.
        """
        if self._lock < 0 or os.getpid() != self._owner:
            return
        with _locked_root() as root:
            shutil.rmtree(root / self.record.name, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def runtime_root() -> Path:
    """$XDG_RUNTIME_DIR/llmserve, else a directory of this user in the temporary directory; made if missing.

    Raises InstanceError (exit 77) when it is not private to this user.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        root = Path(runtime, "llmserve")
    else:
        root = Path(tempfile.gettempdir(), f"llmserve-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        _mkdir(root)
    _check_private(root)
    return root


def acquire(name: str) -> Instance:
    """Acquires a name for this process: makes its directory, which holds only the record and the lock, and takes the
    lock.

    Removes what a dead instance has left under the name. Raises InstanceError when the name is in use, the directory is
    not private to this user, or its path is too long for a socket; ConfigError for an invalid name.
    """
    from importlib.metadata import version  # slow to import, and not needed by the commands

    from llmserve.runtime.config import check_name

    check_name(name)
    with _locked_root() as root:
        directory = root / name
        try:
            PortArgs.init_new(directory, dp_rank=99)
        except ValueError as error:
            raise InstanceError(str(error), 78) from None
        if os.path.lexists(directory):
            _sweep(directory)
        _mkdir(directory)
        pid = os.getpid()
        record = InstanceRecord(
            name=name,
            pid=pid,
            start_time=process_start_time(pid) or 0,
            created=time.time(),
            version=version("llmserve"),
        )
        try:
            lock = _lock(directory / "lock")
            assert lock is not None, "a lock in a directory that has just been made is held"
            return Instance(record, directory, lock)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise InstanceError(f"cannot write in {directory}: {error.strerror}", 1) from None


def stopped_process(directory: Path) -> str:
    """As `InstanceRecord.stopped`, for the instance in `directory`."""
    record = _read(directory)
    return record.stopped if record is not None else ""


def is_last_replica(directory: Path) -> bool:
    """Whether the instance in `directory` has lost all of its replicas but one."""
    record = _read(directory)
    return record is not None and bool(record.lost_replicas) and len(record.rpc_addresses) == 1


def list_instances() -> list[InstanceRecord]:
    """The records of all instances, in the order of their names. Those that dead instances have left are not
    `alive`.
    """
    root = runtime_root()
    records = [_read(directory) for directory in sorted(root.iterdir()) if directory.is_dir()]
    return [record for record in records if record is not None]


def find_instance(name: str | None = None) -> InstanceRecord:
    """The running instance called `name`, or the only one. Raises InstanceError: exit 2, 3 or 69."""
    records = list_instances()
    running = [record for record in records if record.alive]
    names = ", ".join(record.name for record in running)
    if name is None:
        if not running:
            raise InstanceError(none_running(records), 3)
        if len(running) > 1:
            raise InstanceError(f"several instances are running: {names}; choose one with --instance", 2)
        return running[0]
    for record in records:
        if record.name == name and record.alive:
            return record
        if record.name == name:
            see = f"see `llmserve logs -i {name}` and " if record.log_path else ""
            raise InstanceError(
                f'instance "{name}" is dead: its process {record.pid} is gone; {see}launch it again', 69
            )
    raise InstanceError(f'no instance is called "{name}"; running: {names or "none"}', 3)


def none_running(records: Iterable[InstanceRecord]) -> str:
    """What to say when none of the instances is running."""
    dead = deaths(records)
    return f"no instance is running{f': {dead}' if dead else ''}; start one with `llmserve launch`"


def deaths(records: Iterable[InstanceRecord]) -> str:
    """The instances that died and left their directory, in words; empty if none did."""
    dead = [record for record in records if not record.alive]
    if len(dead) == 1:
        see = f", see `llmserve logs -i {dead[0].name}`" if dead[0].log_path else ""
        return f'"{dead[0].name}" has died{see}'
    names = ", ".join(f'"{record.name}"' for record in dead)
    return f"{names} have died, see `llmserve ps --all`" if dead else ""


def sweep_stale() -> list[str]:
    """Removes the directories of dead instances; returns their names."""
    swept = []
    with _locked_root() as root:
        for directory in sorted(root.iterdir()):
            if directory.is_dir():
                with contextlib.suppress(InstanceError):
                    _sweep(directory)
                    swept.append(directory.name)
    return swept


def _sweep(directory: Path) -> None:
    """Removes the directory of a dead instance; the caller holds the lock of the root. Raises InstanceError if it is
    alive.
    """
    _check_private(directory)
    record = _read(directory)
    if record is not None and record.alive:
        raise InstanceError(
            f'instance "{record.name}" is running (pid {record.pid}, {record.address}); '
            "choose another --name or stop it with `llmserve stop`",
            1,
        )
    lock = _lock(directory / "lock")
    if lock is None:
        raise InstanceError(f"{directory} is in use by another process: its lock is held", 1)
    shutil.rmtree(directory)
    os.close(lock)


def _read(directory: Path) -> InstanceRecord | None:
    """The record in a directory; None when it is missing, unreadable, or of another instance."""
    try:
        record = msgspec.json.decode((directory / RECORD).read_bytes(), type=InstanceRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return record if record.name == directory.name else None


@contextlib.contextmanager
def _locked_root() -> Iterator[Path]:
    """Yields the root with its lock held, so that no other process adds, removes or sweeps directories meanwhile."""
    root = runtime_root()
    lock = _lock(root / ".lock", wait=True)
    assert lock is not None
    try:
        yield root
    finally:
        os.close(lock)


def _lock(path: Path, wait: bool = False) -> int | None:
    """A descriptor with an exclusive lock on a file; None when another process holds it. Children do not inherit it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _mkdir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise
    except OSError as error:
        raise InstanceError(f"cannot make the directory {path}: {error.strerror}", 77) from None


def _check_private(path: Path) -> None:
    """Raises InstanceError (exit 77) unless `path` is a directory, not a symbolic link, that only this user can
    access.
    """
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        problem = "it is a symbolic link"
    elif not stat.S_ISDIR(info.st_mode):
        problem = "it is not a directory"
    elif info.st_uid != os.geteuid():
        problem = f"it belongs to user {info.st_uid}"
    elif info.st_mode & 0o077:
        problem = f"its mode is {stat.S_IMODE(info.st_mode):o}, which lets others in; it must be 700"
    else:
        return
    raise InstanceError(f"refusing to use {path}: {problem}; remove it, or set XDG_RUNTIME_DIR", 77)
