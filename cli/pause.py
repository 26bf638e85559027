"""`llmserve pause`, `resume` and `drain`: whether the instance takes steps, and new requests."""

import time
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
from llmserve.runtime.messages import (
    DEFAULT_PAUSE_MODE,
    ContinueGenerationReqInput,
    DrainReqInput,
    GetLoadReqInput,
    PauseGenerationReqInput,
    PauseMode,
)

POLL_S = 0.2

ModeOption = Annotated[
    PauseMode,
    typer.Option(
        "--mode",
        metavar="drain|retract|abort",
        help="What happens to running requests: they end first, return to the queue, or are aborted.",
    ),
]


def pause(
    ctx: typer.Context,
    instance: InstanceOption = None,
    mode: ModeOption = DEFAULT_PAUSE_MODE,
    timeout: TimeoutOption = 600.0,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Pause generation until `llmserve resume` or `llmserve stop`; requests are still accepted, and wait.

    With retract it takes effect after the current step, and requests are computed again when they resume. With abort it
    asks for confirmation, or needs --yes. An instance that is draining cannot be paused (exit status 75).
    """
    from llmserve.cli.rpc import Remote

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        if mode == "abort":
            confirm(console, remote.open_requests, f' of "{remote.record.name}" and pause it', yes)
        answers = remote.each(PauseGenerationReqInput(mode=mode))
    retracted = sum(answer.retracted for answer in answers)
    aborted = sum(answer.aborted for answer in answers)
    if json:
        console.json({"retracted": retracted, "aborted": aborted})
        return
    parts = [f"{count} {word}" for count, word in ((retracted, "retracted"), (aborted, "aborted")) if count]
    console.print(", ".join(["paused", *parts]))


def resume(
    ctx: typer.Context, instance: InstanceOption = None, timeout: TimeoutOption = 30.0, json: JsonOption = False
) -> None:
    """Resume generation after `llmserve pause`, and accept requests again after `llmserve drain`."""
    from llmserve.cli.rpc import Remote

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        resumed = sum(answer.resumed for answer in remote.each(ContinueGenerationReqInput()))
    if json:
        console.json({"resumed": resumed})
    else:
        console.print(f"resumed, {format.plural(resumed, 'request')} waiting or running" if resumed else "resumed")


def drain(
    ctx: typer.Context,
    instance: InstanceOption = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Whether to wait until all requests have ended.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait for that.")
    ] = 600.0,
    json: JsonOption = False,
) -> None:
    """Refuse new requests and let the others end.

    The instance stays up: `llmserve resume` makes it accept requests again, `llmserve stop` ends it. Exit status 75 if
    requests are left after --timeout, or if it is paused, because none would end.
    """
    from llmserve.cli.rpc import Remote

    console = console_of(ctx)
    deadline = time.monotonic() + timeout
    with Remote.find(instance, min(timeout, 30.0)) as remote:
        started = remote.each(DrainReqInput())
        left = sum(answer.running + answer.waiting for answer in started)
        while wait and left:
            if time.monotonic() >= deadline:
                message = f"{format.plural(left, 'request')} left after {timeout:g} s; the instance still drains"
                raise CommandError(message, ExitCode.BUSY)
            time.sleep(POLL_S)
            left = sum(load.running + load.waiting for load in remote.each(GetLoadReqInput()))
    if json:
        console.json({"state": "draining", "left": left})
    else:
        console.print(f"draining, {format.plural(left, 'request')} left" if left else "drained")
