"""`llmserve status`: one instance in depth."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from llmserve.cli import format
from llmserve.cli.common import InstanceOption, JsonOption, TimeoutOption, console_of
from llmserve.cli.console import Console
from llmserve.cli.loads import SILENT, Load, state_of
from llmserve.cli.ping import LONG_STEP_S, delay_of
from llmserve.runtime.config import flag

if TYPE_CHECKING:
    from llmserve.cli.rpc import Answers, Remote
    from llmserve.runtime.instance import InstanceRecord
    from llmserve.runtime.messages import GetStatusReqOutput, ProcessInfo

OptionValue = str | int | float | bool | list[str] | None
REPLICA = ("REPLICA", "STATE", "UP", "STEPS", "RUN", "WAIT", "KV TOKENS", "USED", "CACHED")
PROCESS = ("PROCESS", "PID", "RANK", "RSS", "CPU", "WEIGHTS", "DROPPED")
WORDS = ("STATE", "PROCESS", "RANK")
NUMBERS = tuple(name for name in (*REPLICA, *PROCESS) if name not in WORDS)


def status(
    ctx: typer.Context, instance: InstanceOption = None, timeout: TimeoutOption = 10.0, json: JsonOption = False
) -> None:
    """Show one instance in depth: load, memory, processes and the options in effect."""
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.messages import GetStatusReqInput

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        answers = remote.some(GetStatusReqInput())
        loads = loads_of(remote, answers)
    if json:
        console.json(as_json(remote.record, answers, loads))
    else:
        show(console, remote.record, answers, loads)
    answers.check()


def loads_of(remote: "Remote", answers: "Answers[GetStatusReqOutput]") -> list[Load]:
    """The load of each replica, as in `ps`."""
    loads = {replica: Load(None, None, SILENT, replica) for replica in remote.replicas}
    loads |= {n: Load(answer.running, answer.waiting, answer.state, n) for n, answer in answers.items()}
    return list(loads.values())


def as_json(record: "InstanceRecord", answers: "Answers[GetStatusReqOutput]", loads: Sequence[Load]) -> dict[str, Any]:
    replicas = []
    for replica, answer in answers.items():
        fields = {"replica": replica, **msgspec.structs.asdict(answer)}
        fields["processes"] = [msgspec.structs.asdict(process) for process in answer.processes]
        options = options_of(record, answer)
        fields["options"] = {name: value for name, value, _ in options}
        fields["chosen"] = [name for name, _, chosen in options if chosen]
        replicas.append(fields)
    names = ("name", "pid", "host", "port", "version", "protocol", "log_path", "lost_replicas")
    where = {name: getattr(record, name) for name in names} | {"state": state_of(record, loads)}
    return {"instance": where, "replicas": replicas}


def show(
    console: Console, record: "InstanceRecord", answers: "Answers[GetStatusReqOutput]", loads: Sequence[Load]
) -> None:
    answer = next(iter(answers.values()))
    stopped = f" ({record.stopped})" if record.stopped else ""
    state = f"{state_of(record, loads)}{stopped}"
    if len(loads) == 1:
        state += f", up {format.duration(answer.uptime_s)}, {answer.steps} steps{delay_of(answer.in_step_s)}"
    total, used, cached = answer.kv_tokens_total, answer.kv_tokens_used, answer.kv_tokens_cached
    share = f"{format.percent(used, total)} used, {format.percent(cached, total)} cached"
    facts = {
        "instance": f"{record.name} (pid {record.pid}, llmserve {record.version}, protocol {record.protocol})",
        "address": f"http://{record.address}",
        "model": f"{answer.model} (weights version {answer.weight_version})",
        "state": state,
        "lost": ", ".join(f"replica {n}" for n in record.lost_replicas),
        "requests": f"{answer.running} running, {answer.waiting} waiting",
        "kv pool": f"{total} tokens in pages of {answer.page_size}, {format.size(answer.kv_bytes_total)}: {share}",
        "log": record.log_path or "-",
    }
    if len(loads) > 1:
        del facts["requests"], facts["kv pool"]  # each replica has its own
    facts = {name: value for name, value in facts.items() if value}
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name.ljust(width)}  {value}")
    console.print()
    if len(loads) > 1:
        console.table(REPLICA, [replica_row(load, answers.get(load.replica)) for load in loads], right=NUMBERS)
        console.print()
    processes = {(each.role, each.pid): each for found in answers.values() for each in found.processes}
    rows = [process_row(process) for process in processes.values()]
    console.table(PROCESS, rows, right=NUMBERS)
    console.print()
    rows = [[name, "automatic" if chosen else "", shown(value)] for name, value, chosen in options_of(record, answer)]
    console.table(("OPTION", "CHOSEN", "VALUE"), rows)


def replica_row(load: Load, answer: "GetStatusReqOutput | None") -> list[str]:
    """The cells of a replica in the table; dashes if it is silent."""
    if answer is None:
        return [str(load.replica), load.state, *["-"] * (len(REPLICA) - 2)]
    late = f", a step takes {format.duration(answer.in_step_s)} already" if answer.in_step_s >= LONG_STEP_S else ""
    return [
        str(load.replica),
        f"{load.state}{late}",
        format.duration(answer.uptime_s),
        str(answer.steps),
        str(answer.running),
        str(answer.waiting),
        f"{format.number(answer.kv_tokens_total)} ({format.size(answer.kv_bytes_total)})",
        format.percent(answer.kv_tokens_used, answer.kv_tokens_total),
        format.percent(answer.kv_tokens_cached, answer.kv_tokens_total),
    ]


def options_of(record: "InstanceRecord", answer: "GetStatusReqOutput") -> list[tuple[str, OptionValue, bool]]:
    """The options in effect: name on the command line, value, and whether the instance has chosen it itself."""
    options, chosen = dict(answer.options), set(answer.chosen)
    if not options.get("served_model_names"):
        options["served_model_names"] = list(record.served_model_names)
        chosen.add("served_model_names")
    if options.get("seed", 0) is None:
        options["seed"] = "random"
        chosen.add("seed")
    return sorted((flag(name).removeprefix("--"), value, name in chosen) for name, value in options.items())


def process_row(process: "ProcessInfo") -> list[str]:
    rank = f"tp{process.tp_rank} pp{process.pp_rank} dp{process.dp_rank}" if process.role == "scheduler" else "-"
    return [
        process.role,
        str(process.pid),
        rank,
        format.size(process.rss_bytes),
        f"{process.cpu_percent:.0f}%",
        format.size(process.weight_bytes) if process.weight_bytes else "-",
        str(process.dropped_messages),
    ]


def shown(value: OptionValue) -> str:
    """The value of an option as it would be typed; "-" if it is not set."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
