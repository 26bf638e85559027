"""`llmserve doctor`: diagnoses this machine and its instances, and repairs what can be repaired."""

import contextlib
import os
import shutil
import textwrap
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import psutil
import typer

from llmserve.cli import format
from llmserve.cli.common import ExitCode, JsonOption, TimeoutOption, console_of
from llmserve.cli.console import Console
from llmserve.runtime import machine
from llmserve.runtime.instance import InstanceError, InstanceRecord, list_instances, runtime_root, sweep_stale
from llmserve.runtime.proc import CHILD_MODULE

if TYPE_CHECKING:
    from llmserve.runtime.client import RpcCallError
    from llmserve.runtime.messages import GetStatusReqOutput

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyzmq", "msgspec", "fastapi", "uvicorn")
REAPERS = ("systemd", "init", "tini", "dumb-init")
GRACE_S = 3.0
POLL_S = 0.02
GLYPHS = {"ok": "✓", "warning": "!", "bad": "✗", "fixed": "✓"}
COLORS = {"ok": "32", "warning": "33", "bad": "31", "fixed": "36"}


class Finding(NamedTuple):
    """One line of the report. A "bad" one makes the exit status 1."""

    check: str
    status: Literal["ok", "warning", "bad", "fixed"]
    detail: str


def doctor(
    ctx: typer.Context,
    fix: Annotated[
        bool, typer.Option("--fix", help="Remove the directories of dead instances, and kill their orphaned processes.")
    ] = False,
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="The port to check.")] = 30000,
    timeout: TimeoutOption = 2.0,
    json: JsonOption = False,
) -> None:
    """Diagnose problems: stale directories, orphans, lost replicas, taken ports, memory, versions, threads.

    Exit status 1 if a finding is bad. --fix never touches a running instance.
    """
    console = console_of(ctx)
    findings = list(examine(fix, port, timeout))
    if json:
        console.json([finding._asdict() for finding in findings])
    else:
        show(console, findings)
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def show(console: Console, findings: list[Finding]) -> None:
    """Prints a line per finding; on a terminal long ones are wrapped with a hanging indent."""
    width = max(len(finding.check) for finding in findings)
    for check, status, detail in findings:
        mark = f"{GLYPHS[status]} {status.ljust(7)}"
        indent = " " * (len(mark) + width + 4)
        if console.stdout.isatty():
            room = max(20, shutil.get_terminal_size().columns - len(indent))
            detail = f"\n{indent}".join(textwrap.wrap(detail, room, break_on_hyphens=False))
        mark = f"\x1b[{COLORS[status]}m{mark}\x1b[0m" if console.color else mark
        console.print(f"{mark}  {check.ljust(width)}  {detail}")


def examine(fix: bool, port: int, timeout_s: float) -> Iterator[Finding]:
    """Runs all checks, in the order in which they are shown."""
    yield from libraries()
    yield default_model()
    try:
        root = runtime_root()
    except InstanceError as error:
        yield Finding("directory", "bad", str(error))
        return
    yield Finding("directory", "ok", f"{root} is private to this user")
    records = list_instances()
    alive = [record for record in records if record.alive]
    yield from orphans(fix)  # before the sweep: their directories are in use until they are gone
    yield from stale(records, fix)
    yield taken_port(alive, port)
    yield from versions_of(alive)
    yield memory()
    running = {}
    for record in alive:
        if record.stopped:
            yield Finding("processes", "bad", f'"{record.name}": {record.stopped}; kill -CONT lets it go on')
        if record.state == "starting":
            yield starting(record)
            continue
        if record.node_rank:
            continue  # node 0 answers
        yield from lost(record)
        answers, failure = ask(record, timeout_s)
        if answers:
            running[record.name] = answers
            yield pool(record.name, answers)
        if failure is not None:
            yield Finding("scheduler", "bad", f'"{record.name}" ({record.state}): {failure}')
    yield threads(running)


def libraries() -> Iterator[Finding]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            yield Finding("libraries", "bad", f"{name} is not installed; pip install llmserve gets it")
    yield Finding("libraries", "ok", ", ".join(f"{name} {number}" for name, number in found.items()))


def default_model() -> Finding:
    from llmserve.runtime.config import ConfigError
    from llmserve.runtime.models import hub

    try:
        return Finding("default model", "ok", hub.default_model())
    except ConfigError as error:
        return Finding("default model", "warning", str(error))


def stale(records: list[InstanceRecord], fix: bool) -> Iterator[Finding]:
    """Directories of instances that died without removing them."""
    names = [record.name for record in records if not record.alive]
    if fix:
        names = sweep_stale()
        if names:
            yield Finding("stale", "fixed", f"removed the directories of {', '.join(names)}")
            return
    for name in names:
        yield Finding("stale", "warning", f'"{name}" died and left its directory; --fix removes it')
    if not names:
        yield Finding("stale", "ok", "no directory is left of a dead instance")


def orphans(fix: bool) -> Iterator[Finding]:
    """Child processes whose instance is gone."""
    found = [process for process in children() if is_orphan(process)]
    if fix:
        kill(found)
    for process in found:
        what = f"pid {process.pid}, up {format.duration(max(0.0, time.time() - process.create_time()))}"
        if not fix:
            yield Finding("orphans", "bad", f"{what}, belongs to no instance; --fix ends it")
        elif ended(process):
            yield Finding("orphans", "fixed", f"ended {what}")
        else:
            yield Finding("orphans", "bad", f"{what}, belongs to no instance and does not end when it is killed")
    if not found:
        yield Finding("orphans", "ok", "every process belongs to a running instance")


def kill(processes: list[psutil.Process]) -> None:
    """Kills processes and waits up to GRACE_S seconds until all have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + GRACE_S
    while not all(map(ended, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def ended(process: psutil.Process) -> bool:
    """Whether a process has ended. It may stay a zombie where nobody reaps orphans, as in many containers."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children() -> Iterator[psutil.Process]:
    """All child processes of this user's instances, whatever their XDG_RUNTIME_DIR."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and CHILD_MODULE in process.cmdline()[1:4]:
                yield process


def is_orphan(process: psutil.Process) -> bool:
    """Whether a child process was reparented to init, because its main process has died.

    In a container the main process itself may be process 1, so the name of the parent counts too.
    """
    try:
        parent = process.parent()
        return parent is None or ((parent.pid == 1 or parent.name() in REAPERS) and "python" not in parent.name())
    except psutil.Error:
        return False


def taken_port(alive: list[InstanceRecord], port: int) -> Finding:
    owner = next((record for record in alive if record.port == port), None)
    if owner is not None:
        return Finding("port", "ok", f'{port} is that of "{owner.name}"')
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                by = f"pid {connection.pid}" if connection.pid else "a process of another user"
                return Finding("port", "warning", f"{port} is in use by {by}; launch with another --port")
    return Finding("port", "ok", f"{port} is free")


def versions_of(alive: list[InstanceRecord]) -> Iterator[Finding]:
    here = version("llmserve")
    for record in alive:
        if record.version != here:
            detail = f'"{record.name}" runs llmserve {record.version}, this is {here}; `llmserve restart` updates it'
            yield Finding("version", "warning", detail)


def memory() -> Finding:
    available, total = machine.memory()
    detail = f"{format.size(available)} of {format.size(total)} available"
    swapped = psutil.swap_memory().used
    if available < total / 20:
        return Finding("memory", "bad", f"{detail}: the kernel may soon kill a process")
    if swapped > psutil.virtual_memory().total / 20:  # of the whole machine, as swap is
        return Finding("memory", "warning", f"{detail}, but {format.size(swapped)} are swapped out")
    return Finding("memory", "ok", detail)


def ask(record: InstanceRecord, timeout_s: float) -> "tuple[list[GetStatusReqOutput], RpcCallError | None]":
    """The status of the replicas that answer, and the error of the others."""
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError
    from llmserve.runtime.messages import GetStatusReqInput

    try:
        with Remote(record, timeout_s) as remote:
            answers = remote.some(GetStatusReqInput())
            return list(answers.values()), answers.failure
    except RpcCallError as error:
        return [], error


def starting(record: InstanceRecord) -> Finding:
    """An instance that does not answer yet, and for how long."""
    for_s = format.duration(time.time() - record.created)
    how_far = f"`llmserve logs -i {record.name}` tells how far it is"
    return Finding("scheduler", "ok", f'"{record.name}" has been starting for {for_s}; {how_far}')


def lost(record: InstanceRecord) -> Iterator[Finding]:
    """Replicas that have died while others serve."""
    for replica in record.lost_replicas:
        detail = f'"{record.name}" has lost replica {replica}, whose end `llmserve logs` tells; restart it'
        yield Finding("replicas", "bad", detail)


def pool(name: str, answers: "list[GetStatusReqOutput]") -> Finding:
    """Whether the KV pool of an instance, which becomes resident as it is used, fits into the available memory."""
    available = machine.memory().available
    size = sum(answer.kv_bytes_total for answer in answers)
    resident = sum(p.rss_bytes for answer in answers for p in answer.processes if p.role == "scheduler")
    weights = sum(p.weight_bytes for answer in answers for p in answer.processes)
    to_come = max(0, size + weights - resident)
    detail = f'"{name}": KV pool {format.size(size)}, weights {format.size(weights)}'
    if answers[0].options.get("device") != "cuda" and to_come > available:
        more = f"{detail}; {format.size(to_come)} more when it is full, {format.size(available)} are available"
        return Finding("pool", "bad", f"{more}: launch with a smaller --max-total-tokens")
    return Finding("pool", "ok", f"{detail}: fits")


def threads(running: "dict[str, list[GetStatusReqOutput]]") -> Finding:
    """Whether there is a core for each computing thread of the running instances."""
    cores = machine.cores()
    counts = {name: sum(computing(answer.options, cores) for answer in found) for name, found in running.items()}
    total = sum(counts.values())
    if total > cores:
        who = ", ".join(f'"{name}" {count}' for name, count in counts.items())
        detail = f"{total} threads compute on {format.plural(cores, 'core')} ({who}): launch with fewer --threads"
        return Finding("threads", "warning", detail)
    compiler = shutil.which("c++") or shutil.which("g++")
    kernels = (
        "" if compiler else "; no C++ compiler, so the slower torch kernels are used unless they were built before"
    )
    of = f"{format.plural(total, 'thread')} on " if total else ""
    return Finding("threads", "ok" if compiler else "warning", f"{of}{format.plural(cores, 'core')}{kernels}")


def computing(options: dict[str, Any], cores: int) -> int:
    """The computing threads of one replica. Without --threads all ranks of an instance share the cores."""
    ranks: int = options["tp_size"] * options["pp_size"]
    threads_each: int = options["threads"] or max(1, cores // (ranks * options["dp_size"]))
    return ranks * threads_each
