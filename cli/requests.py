"""`llmserve requests`: what runs and what waits, once or again and again."""

import time
from typing import Annotated, Any

import msgspec
import typer

from llmserve.cli import format
from llmserve.cli.common import InstanceOption, JsonOption, TimeoutOption, console_of
from llmserve.cli.console import Console
from llmserve.runtime.messages import ListRequestsReqInput, RequestInfo

NUMBERS = ("AGE", "PROMPT", "CACHED", "OUTPUT", "TOK/S", "TTFT")


def requests(
    ctx: typer.Context,
    instance: InstanceOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="How often --watch shows it.")
    ] = 1.0,
    show_text: Annotated[bool, typer.Option("--show-text", help="Show the start of each prompt too.")] = False,
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
) -> None:
    """List the requests that run and wait, the oldest first.

    OUTPUT shows the tokens so far and the most there can be. With --watch, --json prints one list a line.
    """
    from llmserve.cli.rpc import Remote

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        while True:
            answers = remote.each(ListRequestsReqInput(show_text=show_text))
            found = sorted((info for answer in answers for info in answer.requests), key=lambda info: -info.age_s)
            if watch and console.color and not json:
                console.print("\x1b[H\x1b[2J", end="")
            show(console, found, show_text, json)
            if not watch:
                return
            time.sleep(interval)


def show(console: Console, found: list[RequestInfo], show_text: bool, json: bool) -> None:
    if json:
        console.json([as_json(info, show_text) for info in found])
        return
    running = sum(info.state != "waiting" for info in found)
    if not found:
        console.print("no requests")
        return
    columns = ["RID", "STATE", *NUMBERS, "USER", *(["TEXT"] if show_text else [])]
    console.table(columns, [row(info, show_text) for info in found], right=NUMBERS)
    console.note(f"{running} running, {len(found) - running} waiting")


def row(info: RequestInfo, show_text: bool) -> list[str]:
    cells = [
        f"{info.rid} #{info.index}" if info.index else info.rid,
        info.state + (f" (retracted {info.retractions}×)" if info.retractions else ""),
        format.duration(info.age_s),
        str(info.prompt_tokens),
        str(info.cached_tokens),
        f"{info.output_tokens}/{info.max_new_tokens}",
        f"{info.tokens_per_s:.1f}",
        "-" if info.ttft_s is None else format.duration(info.ttft_s),
        info.user or "-",
    ]
    return [*cells, info.text] if show_text else cells


def as_json(info: RequestInfo, show_text: bool) -> dict[str, Any]:
    fields = msgspec.structs.asdict(info)
    if not show_text:
        del fields["text"]
    return fields
