"""`llmserve pause`, `resume` and `drain`: whether the instance takes steps, and new requests."""

import signal
import time
from typing import TYPE_CHECKING, Annotated

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
from llmserve.cli.console import Console
from llmserve.runtime.messages import (
    DEFAULT_PAUSE_MODE,
    ContinueGenerationReqInput,
    DrainReqInput,
    GetLoadReqInput,
    PauseGenerationReqInput,
    PauseMode,
)

if TYPE_CHECKING:
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError

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
        with console.waiting("waiting until what runs has ended" if mode == "drain" else ""):
            answers = remote.some(PauseGenerationReqInput(mode=mode))
    if json:
        retracted, aborted = (
            sum(getattr(each, name) for each in answers.values()) for name in ("retracted", "aborted")
        )
        console.json({"retracted": retracted, "aborted": aborted, "replicas": answers.as_json()})
    else:
        for replica, answer in answers.items():
            counts = ((answer.retracted, "retracted"), (answer.aborted, "aborted"))
            parts = [f"{count} {word}" for count, word in counts if count]
            console.print(remote.label(replica) + ", ".join(["paused", *parts]))
    answers.check()


def resume(
    ctx: typer.Context, instance: InstanceOption = None, timeout: TimeoutOption = 30.0, json: JsonOption = False
) -> None:
    """Resume generation after `llmserve pause`, and accept requests again after `llmserve drain`."""
    from llmserve.cli.rpc import Remote

    console = console_of(ctx)
    with Remote.find(instance, timeout) as remote:
        answers = remote.some(ContinueGenerationReqInput())
    if json:
        resumed = sum(answer.resumed for answer in answers.values())
        console.json({"resumed": resumed, "replicas": answers.as_json()})
    else:
        for replica, answer in answers.items():
            go_on = f", {format.plural(answer.resumed, 'request')} waiting or running" if answer.resumed else ""
            console.print(f"{remote.label(replica)}resumed{go_on}")
    answers.check()


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
    with Remote.find(instance, min(timeout, 30.0)) as remote:
        started = remote.some(DrainReqInput())
        left = {replica: answer.running + answer.waiting for replica, answer in started.items()}
        failure = started.failure
        if wait:
            failure = wait_until_none_is_left(console, remote, left, timeout) or failure
    if json:
        replicas = [{"replica": replica, "left": count} for replica, count in left.items()]
        console.json({"state": "draining", "left": sum(left.values()), "replicas": replicas})
    else:
        for replica, count in left.items():
            state = f"draining, {format.plural(count, 'request')} left" if count else "drained"
            console.print(f"{remote.label(replica)}{state}")
    if failure is not None:
        raise failure


def wait_until_none_is_left(
    console: Console, remote: "Remote", left: dict[int, int], timeout: float
) -> "RpcCallError | None":
    """Keeps `left`, the number of requests by dp_rank, up to date until there are none.

    A replica that does not answer is asked again as long as others have some left; then its error is returned. Raises
    CommandError, and RpcCallError when none answers.
    """
    deadline = time.monotonic() + timeout
    try:
        with console.waiting("draining") as say:
            while any(left.values()):
                requests = format.plural(sum(left.values()), "request")
                if time.monotonic() >= deadline:
                    raise CommandError(f"{requests} left after {timeout:g} s; the instance still drains", ExitCode.BUSY)
                say(f"draining {remote.record.name}: {requests} left")
                time.sleep(POLL_S)
                answers = remote.some(GetLoadReqInput())
                heard = {n: load.running + load.waiting for n, load in answers.items() if n in left}
                left.update(heard)
                if any(left.values()) and not any(heard.values()):
                    return answers.failure
    except KeyboardInterrupt:
        requests = format.plural(sum(left.values()), "request")
        message = f"interrupted with {requests} left; the instance still drains, `llmserve resume` ends that"
        raise CommandError(message, 128 + signal.SIGINT) from None
    return None
