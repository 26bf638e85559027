"""Shared by the commands: exit codes and errors, common options, finding the instance, and asking for confirmation.

Every command imports it, even for completion and --help, so it imports neither rich, zmq nor torch.
"""

import os
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import typer

from llmserve.cli.console import Console
from llmserve.cli.format import plural

if TYPE_CHECKING:
    from llmserve.runtime.instance import InstanceRecord


class ExitCode(IntEnum):
    """The meanings of exit statuses; those from 69 on are from sysexits.h."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 69
    BUSY = 75
    PROTOCOL = 76
    DENIED = 77
    CONFIG = 78


class CommandError(Exception):
    """A command cannot do what was asked. `main` prints the text and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: Exception) -> int | None:
    """The exit status for an error that is meant for the user; None for a bug.

    llmserve's own errors for users have an `exit_code`. Typer's have one too, but are left to Typer.
    """
    if type(error).__module__.startswith("llmserve."):
        code = getattr(error, "exit_code", None)
        if isinstance(code, int):
            return code
    from llmserve.runtime.config import ConfigError

    return ExitCode.CONFIG if isinstance(error, ConfigError) else None


def console_of(ctx: typer.Context) -> Console:
    """The console that `main` (or a test, through `obj=`) gave to this command."""
    return ctx.find_object(Console) or Console.system()


def complete_instance(incomplete: str) -> list[str]:
    """Shell completion of instance names."""
    from llmserve.runtime.instance import list_instances

    return [record.name for record in list_instances() if record.name.startswith(incomplete)]


InstanceOption = Annotated[
    str | None,
    typer.Option(
        "--instance",
        "-i",
        metavar="NAME",
        envvar="LLMSERVE_INSTANCE",
        help="The instance to act on; not needed if only one is running.",
        autocompletion=complete_instance,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait for the answer.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def find_instance(name: str | None) -> "InstanceRecord":
    """The running instance called `name`, or the only one. Raises InstanceError (exit 2, 3 or 69)."""
    from llmserve.runtime import instance

    try:
        return instance.find_instance(name)
    except instance.InstanceError as error:
        if name is None or name != os.environ.get("LLMSERVE_INSTANCE"):
            raise
        raise instance.InstanceError(f"{error} (the name is that of LLMSERVE_INSTANCE)", error.exit_code) from None


def find_server(name: str | None) -> "InstanceRecord":
    """As find_instance, for what node 0 of a model on several machines must be asked. Raises CommandError elsewhere."""
    record = find_instance(name)
    if record.node_rank:
        raise CommandError(
            f'instance "{record.name}" is node {record.node_rank} of its model; give the command on node 0',
            ExitCode.UNAVAILABLE,
        )
    return record


def confirm(console: Console, count: Callable[[], int], what: str, yes: bool) -> None:
    """Asks for confirmation before requests are aborted in bulk: "abort 3 requests" followed by `what`. Raises
    CommandError unless it is given.

    Without requests to abort it does not ask. Without a terminal `--yes` is required even then, so that a script does
    not fail only when requests run.
    """
    if yes:
        return
    if not console.asks:
        raise CommandError(f"abort requests{what}? Say --yes to do it without a terminal to ask on.", ExitCode.USAGE)
    found = count()
    if found and not console.ask(f"abort {plural(found, 'request')}{what}?"):
        raise CommandError("nothing was done")
