"""The load and the state of an instance, asked of its schedulers; for the commands that show or wait for them."""

import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from llmserve.runtime.instance import InstanceRecord

LOAD_TIMEOUT_S = 1.0
SILENT = "silent"


class Load(msgspec.Struct, frozen=True):
    """The load of one replica, or of all together; without numbers when it is silent."""

    running: int | None
    waiting: int | None
    state: str
    replica: int = 0


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of the known counts; None when none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def state_of(record: InstanceRecord, loads: Sequence[Load]) -> str:
    """One word for the state of an instance: by the main process's record, or once that is ready by the schedulers."""
    if not record.alive:
        return "dead"
    states = dict.fromkeys(load.state for load in loads)
    some_silent = SILENT in states and len(states) > 1
    stopped = record.stopped
    rank_stopped = len(loads) > 1 and "scheduler-dp" in stopped  # of one replica, whose first rank may still answer
    if stopped and not some_silent and not rank_stopped:
        return SILENT
    if record.state != "ready" or record.node_rank:
        return record.state
    if some_silent:
        del states[SILENT]
    state = " and ".join(states) or SILENT
    return "degraded" if state == "ready" and (some_silent or rank_stopped or record.lost_replicas) else state


def ask_loads(record: InstanceRecord, timeout_s: float = LOAD_TIMEOUT_S) -> list[Load]:
    """The load of each replica; one that does not answer within `timeout_s` seconds is silent. On a node that is not
    the first there are none.
    """
    if record.node_rank:
        return []
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError
    from llmserve.runtime.messages import GetLoadReqInput

    with Remote(record, timeout_s) as remote:
        loads = {replica: Load(None, None, SILENT, replica) for replica in remote.replicas}
        with contextlib.suppress(RpcCallError):
            for replica, answer in remote.some(GetLoadReqInput()).items():
                loads[replica] = Load(answer.running, answer.waiting, answer.state, replica)
    return list(loads.values())


def ask_load(record: InstanceRecord, timeout_s: float = LOAD_TIMEOUT_S) -> Load:
    """The load of all replicas together that answer within `timeout_s` seconds."""
    loads = ask_loads(record, timeout_s)
    running, waiting = total(load.running for load in loads), total(load.waiting for load in loads)
    return Load(running, waiting, state_of(record, loads))
