"""The load and the state of an instance, asked of its schedulers; for the commands that show or wait for them."""

from collections.abc import Sequence

import msgspec

from llmserve.runtime.instance import InstanceRecord

LOAD_TIMEOUT_S = 1.0


class Load(msgspec.Struct, frozen=True):
    """The load of one replica, or of all together."""

    running: int
    waiting: int
    state: str
    replica: int = 0


def state_of(record: InstanceRecord, loads: Sequence[Load]) -> str:
    """One word for the state of an instance: by the main process's record, or once that is ready by the schedulers."""
    if not record.alive:
        return "dead"
    if record.stopped:
        return "silent"
    if record.state != "ready":
        return record.state
    state = " and ".join(dict.fromkeys(load.state for load in loads)) or "silent"
    return "degraded" if state == "ready" and record.lost_replicas else state


def ask_loads(record: InstanceRecord, timeout_s: float = LOAD_TIMEOUT_S) -> list[Load]:
    """The load of each replica; empty when one of them does not answer within `timeout_s` seconds."""
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError
    from llmserve.runtime.messages import GetLoadReqInput

    try:
        with Remote(record, timeout_s) as remote:
            answers = remote.each(GetLoadReqInput())
            replicas = remote.replicas
    except RpcCallError:
        return []
    return [
        Load(answer.running, answer.waiting, answer.state, replica)
        for replica, answer in zip(replicas, answers, strict=True)
    ]


def ask_load(record: InstanceRecord, timeout_s: float = LOAD_TIMEOUT_S) -> Load | None:
    """The load of all replicas together; None when one of them does not answer within `timeout_s` seconds."""
    loads = ask_loads(record, timeout_s)
    if not loads:
        return None
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    return Load(running, waiting, state_of(record, loads))
