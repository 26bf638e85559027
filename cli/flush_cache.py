"""`llmserve flush-cache`: empties the prefix cache."""

from typing import Annotated

import typer

from llmserve.cli import format
from llmserve.cli.common import (
    CommandError,
    ExitCode,
    InstanceOption,
    JsonOption,
    TimeoutOption,
    YesOption,
    confirm,
    console_of,
)


def flush_cache(
    ctx: typer.Context,
    instance: InstanceOption = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="How long to wait for running requests to end.")
    ] = 0.0,
    abort: Annotated[bool, typer.Option("--abort", help="Abort running requests first.")] = False,
    timeout: TimeoutOption = 30.0,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Empty the prefix cache.

    It is refused while requests run (exit status 75), unless --wait or --abort is given.
    """
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.messages import FlushCacheReqInput

    console = console_of(ctx)
    if wait and abort:
        raise CommandError("give --wait or --abort, not both", ExitCode.USAGE)
    with Remote.find(instance, timeout + wait) as remote:
        if abort:
            confirm(console, remote.open_requests, f' of "{remote.record.name}" and flush its cache', yes)
        with console.waiting("waiting until what runs has ended" if wait else ""):
            answers = remote.some(FlushCacheReqInput(wait_s=wait, abort=abort))
    if json:
        pages, freed = (
            sum(getattr(each, name) for each in answers.values()) for name in ("pages_freed", "bytes_freed")
        )
        aborted = [rid for answer in answers.values() for rid in answer.aborted]
        replicas = answers.as_json()
        console.json({"pages_freed": pages, "bytes_freed": freed, "aborted": aborted, "replicas": replicas})
    else:
        for replica, answer in answers.items():
            ended = f", {format.plural(len(answer.aborted), 'request')} aborted" if answer.aborted else ""
            flushed = f"{format.plural(answer.pages_freed, 'page')} ({format.size(answer.bytes_freed)})"
            console.print(f"{remote.label(replica)}flushed {flushed}{ended}")
    answers.check()
