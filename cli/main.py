"""The `llmserve` command: loads and runs its subcommands (commands.py), and turns their errors into messages.

The module of a command is imported only when that command is run, completed or asked for help, so that `llmserve
--help` is as fast as an empty Typer program.
"""

import errno
import gc
import importlib
import inspect
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from llmserve.cli.commands import COMMANDS
from llmserve.cli.common import ExitCode, console_of, exit_code_of
from llmserve.cli.console import Console

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
CONTEXT_SETTINGS = {"help_option_names": ["--help", "-h"]}


def discard_output(*streams: TextIO) -> None:
    """Discards what streams still buffer and cannot write; otherwise Python reports an error at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())


def status_behind(error: BaseException) -> int:
    """The exit status of the error that was being reported when `error` was raised; 0 if there was none."""
    told = error.__context__
    while told is not None:
        code = getattr(told, "exit_code", None)
        if isinstance(code, int):
            return code
        told = told.__context__
    return 0


def without_type(parameters: list[Any]) -> list[Any]:
    """The parameters, with "<bool>" removed from the help of switches, which take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """One subcommand."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_type(super().get_params(ctx))


class LazyGroup(TyperGroup):
    """A group whose commands are placeholders made from COMMANDS until they are needed."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, entry in COMMANDS.items():
            if name not in self.commands:
                self.commands[name] = TyperCommand(
                    name, help=entry.help, rich_help_panel=entry.panel, hidden=entry.hidden
                )

    def get_params(self, ctx: Any) -> list[Any]:
        return without_type(super().get_params(ctx))

    def load(self, name: str) -> None:
        """Replaces the placeholder of `name` by the real command."""
        entry = COMMANDS.get(name)
        if entry is None or self.commands[name].callback is not None:
            return
        function = getattr(importlib.import_module(f"llmserve.cli.{entry.module}"), entry.function)
        paragraphs = (inspect.getdoc(function) or entry.help).split("\n\n")
        single = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        single.command(
            name,
            cls=Command,
            help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
            epilog="\n\n".join(["Examples:", *entry.examples]) if entry.examples else None,
            hidden=entry.hidden,
            rich_help_panel=entry.panel,
            context_settings=CONTEXT_SETTINGS,
        )(function)
        self.commands[name] = typer.main.get_command(single)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the program. Output that cannot be written, also that of --help and --version, is reported in one
        line.
        """
        try:
            return super().main(*args, **extra)
        except SystemExit as end:
            # Typer and Rich end like that when a reader has what it wanted (`llmserve ps | head -1`).
            if not isinstance(end.__context__, BrokenPipeError):
                discard_output(sys.stderr)  # an error that could not be told
                raise
            discard_output(sys.stdout, sys.stderr)
            raise SystemExit(status_behind(end)) from None
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            discard_output(sys.stdout, sys.stderr)
            (extra.get("obj") or Console.system()).error(f"cannot write: {error.strerror}")
            raise SystemExit(status_behind(error) or ExitCode.FAILED) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args:
            self.load(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; prints errors that are meant for the user, and exits with their status."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from llmserve.cli.sources import bad_variable

            told = bad_variable(error)
            if told is None:
                raise
            console_of(ctx).error(str(told))
            raise typer.Exit(told.exit_code) from None
        except Exception as error:
            code = exit_code_of(error)
            if code is None:
                raise
            console_of(ctx).error(str(error))
            raise typer.Exit(code) from None


app = typer.Typer(
    cls=LazyGroup,
    name="llmserve",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings=CONTEXT_SETTINGS,
)


def show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"llmserve {version('llmserve')}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Serve language models, and operate the running server from the terminal."""


def main() -> None:
    """The console script."""
    gc.freeze()  # modules are never collected, and scanning them, also at exit, takes 5% of a command
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed (`llmserve ps >&-`)
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that the terminal cannot encode are no error
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # Rich alone would still write bold
    app(prog_name="llmserve", obj=Console.system())
