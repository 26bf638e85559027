"""`llmserve update-weights`: swaps the weights of the running instance, or says why that would not work."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
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
    GetStatusReqInput,
    PauseMode,
    UpdateWeightReqInput,
    UpdateWeightReqOutput,
)

if TYPE_CHECKING:
    from llmserve.runtime.instance import InstanceRecord

INTERRUPTED_TIMEOUT_S = 10.0
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer, in a tensor's name."""


def update_weights(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A directory, a .gguf file or a hub id: the same model, other weights."),
    ],
    instance: InstanceOption = None,
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf"],
        typer.Option("--load-format", metavar="auto|safetensors|gguf", help="The format of the checkpoint."),
    ] = "auto",
    mode: Annotated[
        PauseMode,
        typer.Option(
            "--mode",
            metavar="drain|retract|abort",
            help="What happens to running requests: they end first, are computed again later, or are aborted.",
        ),
    ] = DEFAULT_PAUSE_MODE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only compare, and print the differences.")] = False,
    timeout: TimeoutOption = 600.0,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Swap the weights of the running model without a restart.

    The new checkpoint is checked and read while the old weights serve; generation is paused only for the exchange. On
    any failure the old weights go on serving. Ctrl-C before the exchange cancels it, and prints which weights serve.
    """
    from llmserve.cli.rpc import ProgressReport, Remote

    console = console_of(ctx)
    path = os.path.expanduser(model)
    path = str(Path(path).resolve()) if os.path.exists(path) else model
    request = UpdateWeightReqInput(model_path=path, load_format=load_format, mode=mode, dry_run=dry_run)
    with Remote.find(instance, timeout) as remote:
        if mode == "abort" and not dry_run:
            confirm(console, remote.open_requests, f' of "{remote.record.name}" and swap its weights', yes)
        try:
            with ProgressReport(console) as on_progress:
                answers = remote.each(request, on_progress)
        except KeyboardInterrupt:
            raise CommandError(interrupted(remote.record), 128 + signal.SIGINT) from None
    if json:
        replicas = [
            {"replica": replica, **msgspec.structs.asdict(answer)}
            for replica, answer in zip(remote.replicas, answers, strict=True)
        ]
        console.json({"replicas": replicas})
    else:
        told = [report(answer, dry_run) for answer in answers]
        if len(set(told)) == 1:
            console.print(told[0])
        else:
            for replica, text in zip(remote.replicas, told, strict=True):
                console.print(remote.label(replica) + text)
    if any(answer.differences for answer in answers):
        raise typer.Exit(ExitCode.FAILED)


def interrupted(record: "InstanceRecord") -> str:
    """Which weights serve after Ctrl-C. If the exchange has begun, the scheduler answers after it."""
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError

    try:
        with Remote(record, INTERRUPTED_TIMEOUT_S) as remote:
            found = {(answer.weight_version, answer.model) for answer in remote.each(GetStatusReqInput())}
    except RpcCallError as error:
        return f"interrupted; the new weights may serve, see `llmserve status` ({error})"
    serving = " and ".join(f"version {version} ({model})" for version, model in sorted(found))
    return f"interrupted; the weights that serve are {serving}"


def folded(differences: Sequence[str]) -> list[str]:
    """The differences with one line for all layers that have the same: "layers.0-29.mlp.up_proj.weight: missing"."""
    layers: dict[str, list[int]] = {}
    for line in differences:
        number = LAYER.search(line)
        layers.setdefault(LAYER.sub("\0", line, count=1), []).extend([int(number[0])] if number else [])
    return [line.replace("\0", ranges(numbers), 1) if numbers else line for line, numbers in layers.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: 0, 1, 2 and 5 as "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def report(answer: UpdateWeightReqOutput, dry_run: bool) -> str:
    if answer.differences:
        return "\n".join([f"{answer.model_path} differs from the model that runs:", *folded(answer.differences)])
    if dry_run:
        return f"{answer.model_path} would be accepted"
    return (
        f"weights {answer.old_version} -> {answer.new_version}: {format.size(answer.bytes)} "
        f"in {format.duration(answer.seconds)}, paused for {format.duration(answer.paused_s)}"
    )
