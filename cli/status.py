"""`llmserve status`: one instance in depth."""

from typing import TYPE_CHECKING, Any

import msgspec
import typer

from llmserve.cli import format
from llmserve.cli.common import InstanceOption, JsonOption, TimeoutOption, console_of
from llmserve.cli.console import Console
from llmserve.cli.loads import Load, state_of
from llmserve.cli.ping import delay_of
from llmserve.runtime.config import flag

if TYPE_CHECKING:
    from llmserve.runtime.instance import InstanceRecord
    from llmserve.runtime.messages import GetStatusReqOutput, ProcessInfo

OptionValue = str | int | float | bool | list[str] | None
NUMBERS = ("PID", "RSS", "CPU", "WEIGHTS", "DROPPED")


def status(
    ctx: typer.Context, instance: InstanceOption = None, timeout: TimeoutOption = 10.0, json: JsonOption = False
) -> None:
    """Show one instance in depth: load, memory, processes and the options in effect."""
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.messages import GetStatusReqInput

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        answers = remote.each(GetStatusReqInput())
    if json:
        console.json(as_json(remote.record, answers))
        return
    for replica, answer in zip(remote.replicas, answers, strict=True):
        if len(answers) > 1:
            console.print(f"replica {replica}")
        show(console, remote.record, answer)


def as_json(record: "InstanceRecord", answers: list["GetStatusReqOutput"]) -> dict[str, Any]:
    replicas = []
    for answer in answers:
        fields = msgspec.structs.asdict(answer)
        fields["processes"] = [msgspec.structs.asdict(process) for process in answer.processes]
        options = options_of(record, answer)
        fields["options"] = {name: value for name, value, _ in options}
        fields["chosen"] = [name for name, _, chosen in options if chosen]
        replicas.append(fields)
    names = ("name", "pid", "host", "port", "version", "protocol", "log_path", "lost_replicas")
    loads = [Load(answer.running, answer.waiting, answer.state) for answer in answers]
    where = {name: getattr(record, name) for name in names} | {"state": state_of(record, loads)}
    return {"instance": where, "replicas": replicas}


def show(console: Console, record: "InstanceRecord", answer: "GetStatusReqOutput") -> None:
    total, used, cached = answer.kv_tokens_total, answer.kv_tokens_used, answer.kv_tokens_cached
    share = f"{format.percent(used, total)} used, {format.percent(cached, total)} cached"
    state = f"silent ({record.stopped})" if record.stopped else answer.state
    facts = {
        "instance": f"{record.name} (pid {record.pid}, llmserve {record.version}, protocol {record.protocol})",
        "address": f"http://{record.host}:{record.port}",
        "model": f"{answer.model} (weights version {answer.weight_version})",
        "state": f"{state}, up {format.duration(answer.uptime_s)}, {answer.steps} steps{delay_of(answer.in_step_s)}",
        **({"lost": ", ".join(f"replica {n}" for n in record.lost_replicas)} if record.lost_replicas else {}),
        "requests": f"{answer.running} running, {answer.waiting} waiting",
        "kv pool": f"{total} tokens in pages of {answer.page_size}, {format.size(answer.kv_bytes_total)}: {share}",
        "log": record.log_path or "-",
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name.ljust(width)}  {value}")
    console.print()
    console.table(
        ("PROCESS", "PID", "RANK", "RSS", "CPU", "WEIGHTS", "DROPPED"),
        [process_row(process) for process in answer.processes],
        right=NUMBERS,
    )
    console.print()
    rows = [(name, "automatic" if chosen else "", shown(value)) for name, value, chosen in options_of(record, answer)]
    console.table(("OPTION", "CHOSEN", "VALUE"), rows)


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
