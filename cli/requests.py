"""`llmserve requests`: what runs and what waits, once or again and again."""

import time
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from llmserve.cli import format
from llmserve.cli.common import InstanceOption, JsonOption, TimeoutOption, console_of
from llmserve.cli.console import Console
from llmserve.runtime.messages import ListRequestsReqInput, RequestInfo

NUMBERS = ("AGE", "PROMPT", "CACHED", "OUTPUT", "TOK/S", "TTFT")


class Listed(NamedTuple):
    """A choice of a request and its replica."""

    replica: int
    info: RequestInfo


def requests(
    ctx: typer.Context,
    instance: InstanceOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh the list until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="The time between two refreshes of --watch.")
    ] = 1.0,
    show_text: Annotated[bool, typer.Option("--show-text", help="Also show the start of each prompt.")] = False,
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
) -> None:
    """List the running and waiting requests, the oldest first.

    OUTPUT has the tokens generated so far and the most there can be; with several replicas, REPLICA has the one of the
    request. With --watch, --json prints one list per line.
    """
    from llmserve.cli.rpc import Remote

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        while True:
            answers = remote.some(ListRequestsReqInput(show_text=show_text))
            found = [Listed(replica, info) for replica, answer in answers.items() for info in answer.requests]
            found.sort(key=lambda listed: -listed.info.age_s)
            if watch and console.color and not json:
                console.print("\x1b[H\x1b[2J", end="")
            show(console, found, several=remote.several, show_text=show_text, json=json)
            if not watch:
                answers.check()
                return
            if answers.failure is not None:
                console.error(str(answers.failure))
            time.sleep(interval)


def show(console: Console, found: list[Listed], several: bool, show_text: bool, json: bool) -> None:
    """Prints the list. `several`: whether there are several replicas, so that the table has a REPLICA column."""
    if json:
        console.json([as_json(listed, show_text) for listed in found])
        return
    running = sum(listed.info.state != "waiting" for listed in found)
    if not found:
        console.print("no requests")
        return
    columns = ["RID", "STATE", *(["REPLICA"] if several else []), *NUMBERS, "USER", *(["TEXT"] if show_text else [])]
    rows = [row(listed, several, show_text) for listed in found]
    console.table(columns, rows, right=("REPLICA", *NUMBERS))
    console.note(f"{running} running, {len(found) - running} waiting")


def row(listed: Listed, several: bool, show_text: bool) -> list[str]:
    info = listed.info
    cells = [
        f"{info.rid} #{info.index}" if info.index else info.rid,
        info.state + (f" (retracted {info.retractions}×)" if info.retractions else ""),
        *([str(listed.replica)] if several else []),
        format.duration(info.age_s),
        str(info.prompt_tokens),
        str(info.cached_tokens),
        f"{info.output_tokens}/{info.max_new_tokens}",
        f"{info.tokens_per_s:.1f}",
        format.duration(info.ttft_s),
        info.user or "-",
    ]
    return [*cells, info.text] if show_text else cells


def as_json(listed: Listed, show_text: bool) -> dict[str, Any]:
    fields = {**msgspec.structs.asdict(listed.info), "replica": listed.replica}
    if not show_text:
        del fields["text"]
    return fields
