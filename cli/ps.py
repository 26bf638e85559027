"""`llmserve ps`: the instances of this user, with their load where the scheduler answers."""

import contextlib
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from llmserve.cli.common import JsonOption, TimeoutOption, console_of
from llmserve.cli.format import duration
from llmserve.cli.loads import LOAD_TIMEOUT_S, SILENT, Load, ask_loads, state_of, total
from llmserve.runtime.instance import InstanceRecord, deaths, list_instances, none_running


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, as --json prints it. `running` and `waiting` are null when none of its schedulers answers."""

    name: str
    model: str
    pid: int
    address: str
    state: str
    age_s: float
    running: int | None = None
    waiting: int | None = None
    served_model_names: tuple[str, ...] = ()
    log_path: str = ""
    children: tuple[int, ...] = ()
    replicas: tuple[Load, ...] = ()
    """The load and state of each replica, where there are several."""
    lost_replicas: tuple[int, ...] = ()
    ranks: tuple[dict[str, object], ...] = ()
    """All ranks of all replicas, as ProcessInfo."""


def ps(
    ctx: typer.Context,
    timeout: TimeoutOption = LOAD_TIMEOUT_S,
    json: JsonOption = False,
    all_records: Annotated[
        bool, typer.Option("--all", "-a", help="Also list instances that died and left their directory.")
    ] = False,
) -> None:
    """List the running instances, with the numbers of running and waiting requests.

    With several replicas, RUN and WAIT have a number for each. The state is starting, ready, paused or draining;
    degraded: a replica is lost or silent; silent: no scheduler answers within --timeout, or a process is stopped; or
    dead: the process is gone, and the next launch removes what it left.
    """
    console = console_of(ctx)
    records = list_instances()
    lines = [look(record, timeout, ranks=json) for record in records if record.alive or all_records]
    if json:
        console.json([msgspec.to_builtins(line) for line in lines])
        return
    if not lines:
        console.note(none_running(records))
        return
    rows = [
        (
            *(line.name, line.model, str(line.pid), line.address, line.state, duration(line.age_s)),
            *(shares(line, name) for name in ("running", "waiting")),
        )
        for line in lines
    ]
    columns = ("NAME", "MODEL", "PID", "ADDRESS", "STATE", "AGE", "RUN", "WAIT")
    console.table(columns, rows, right=("PID", "AGE", "RUN", "WAIT"))
    if not all_records and (dead := deaths(records)):
        console.note(dead)


def look(record: InstanceRecord, timeout_s: float, ranks: bool = False) -> Line:
    """What the record and the schedulers say of an instance; with `ranks` also all its ranks."""
    loads = ask_loads(record, timeout_s) if record.alive and record.state != "starting" else []
    return Line(
        name=record.name,
        model=record.served_model_names[0] if record.served_model_names else record.model,
        pid=record.pid,
        address=record.address if record.port else "-",
        state=state_of(record, loads),
        age_s=round(time.time() - record.created, 1),
        running=total(load.running for load in loads),
        waiting=total(load.waiting for load in loads),
        served_model_names=record.served_model_names,
        log_path=record.log_path,
        children=record.children,
        replicas=tuple(loads) if len(loads) > 1 else (),
        lost_replicas=record.lost_replicas,
        ranks=tuple(ask_ranks(record, timeout_s)) if ranks and any(load.state != SILENT for load in loads) else (),
    )


def shares(line: Line, name: str) -> str:
    """The counts of the replicas, such as 3+0; "-" when they are not known."""
    counts = [getattr(load, name) for load in line.replicas or (line,)]
    return "+".join("-" if count is None else str(count) for count in counts)


def ask_ranks(record: InstanceRecord, timeout_s: float) -> Iterator[dict[str, object]]:
    """All ranks of the replicas that answer within `timeout_s` seconds."""
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError
    from llmserve.runtime.messages import GetStatusReqInput

    with contextlib.suppress(RpcCallError), Remote(record, timeout_s) as remote:
        for answer in remote.some(GetStatusReqInput()).values():
            ranks = (process for process in answer.processes if process.role == "scheduler")
            yield from map(msgspec.structs.asdict, ranks)
