"""`llmserve restart`: ends an instance and launches it again as it was launched, in the background."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.common import CommandError, ExitCode, InstanceOption, JsonOption, console_of, find_instance
from llmserve.cli.stop import end
from llmserve.runtime.instance import InstanceRecord

ASK_TIMEOUT_S = 1.0


def restart(
    ctx: typer.Context,
    instance: InstanceOption = None,
    now: Annotated[bool, typer.Option("--now", help="End it at once; requests in flight are lost.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.0,
            help="How long to wait for its end; if it takes longer, nothing is launched.",
            show_default="its --drain-timeout",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """End an instance and launch it again: same name, port, options, variables and working directory.

    The new one runs in the background, even if the old one did not, with the weights of the launch, not those of a
    later update-weights.
    """
    record = find_instance(instance)
    command, environ, directory = how_launched(record)
    console = console_of(ctx)
    console.note(f'restarting "{record.name}"')
    for path, version in updated_weights(record):
        console.note(
            f"the new one serves {record.model} (version 1), not {path} (version {version}); "
            f"`llmserve update-weights {shlex.quote(path)}` loads that again"
        )
    end(console, record, now, timeout)
    done = subprocess.run(command, env=environ, cwd=directory, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    address = done.stdout.strip()
    if json:
        console.json({"instance": record.name, "pid": find_instance(record.name).pid, "address": address})
    else:
        console.print(address)


def updated_weights(record: InstanceRecord) -> list[tuple[str, int]]:
    """Path and version of the weights of each replica whose weights were updated after the launch.

    Empty when the instance does not answer, because it is restarted anyway.
    """
    from llmserve.cli.rpc import Remote
    from llmserve.runtime.client import RpcCallError
    from llmserve.runtime.messages import GetStatusReqInput

    try:
        with Remote(record, ASK_TIMEOUT_S) as remote:
            serving = {(answer.model, answer.weight_version) for answer in remote.each(GetStatusReqInput())}
    except RpcCallError:
        return []
    return sorted((path, version) for path, version in serving if path != record.model)


def how_launched(record: InstanceRecord) -> tuple[list[str], dict[str, str], str]:
    """The command line that launches this instance again, its environment and its working directory.

    They are read from the running process itself (proc(5)), so keys given by variable need not be given again.
    """
    process = Path(f"/proc/{record.pid}")
    try:
        command = (process / "cmdline").read_text().rstrip("\0").split("\0")
        pairs = (process / "environ").read_text(errors="surrogateescape").rstrip("\0").split("\0")
        directory = os.readlink(process / "cwd")
    except OSError as error:
        raise CommandError(f"cannot read how pid {record.pid} was launched: {error.strerror}") from None
    if "launch" not in command[1:4]:
        message = f'"{record.name}" was not started by `llmserve launch`: {" ".join(command[:4])}'
        raise CommandError(message, ExitCode.USAGE)
    detach = [] if "--detach" in command else ["--detach"]
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return [*command, *detach, "--port", str(record.port)], environ, directory
