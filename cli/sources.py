"""The sources of launch's options (flag, variable, file), so that an error can name the place to correct."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from llmserve.cli.common import CommandError, ExitCode, exit_code_of

PREFIX = "LLMSERVE_"
KEYS = {"LLMSERVE_API_KEY": "api-key", "LLMSERVE_ADMIN_API_KEY": "admin-api-key"}
"""Variables that are not options."""


def name_of(parameter: Any) -> str:
    """The name of a parameter in the file and in tables: its long option without dashes."""
    name: str = parameter.opts[0]
    return name.removeprefix("--")


def place_of(ctx: Any, parameter: Any) -> str:
    """The variable or the key of the file that has set a parameter; "" for neither."""
    source = ctx.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"the variable {parameter.envvar}"
    if source is not None and source.name == "DEFAULT_MAP":
        return f"{name_of(parameter)} in {ctx.params['config']}"
    return ""


@contextlib.contextmanager
def places_told(ctx: typer.Context) -> Iterator[None]:
    """Turns errors for users into CommandErrors that name the variable or file that has set the options concerned."""
    try:
        yield
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        raise CommandError(with_places(ctx, str(error)), code) from error


def with_places(ctx: typer.Context, text: str) -> str:
    """`text`, followed by the sources of the options named in it that were not given as flags."""
    for parameter in ctx.command.params:
        if parameter.name == "model":
            flag, model = "MODEL", ctx.params["model"]
            named = text.startswith(("MODEL ", model) if model else "MODEL ")
        else:
            flag = parameter.opts[0]
            named = re.search(rf"(?<![\w-]){flag}(?![\w-])", text) is not None
        place = place_of(ctx, parameter) if named else ""
        if place:
            text += f" ({flag} is set by {place})"
    return text


def bad_variable(error: typer.BadParameter) -> CommandError | None:
    """The error for a variable or file with an invalid value; None for a value that was given as a flag."""
    parameter: Any = error.param
    if error.ctx is None or parameter is None or not (place := place_of(error.ctx, parameter)):
        return None
    value = os.environ.get(parameter.envvar, "")
    return CommandError(f"{place} is {value!r}: {error.message.removeprefix('Value error, ')}", ExitCode.CONFIG)


def unknown_variables(command: Any, environ: Mapping[str, str]) -> Iterator[str]:
    """Warnings about variables that begin with LLMSERVE_ but are not used. `command` is launch."""
    known = {"LLMSERVE_INSTANCE", *KEYS, *(parameter.envvar for parameter in command.params if parameter.envvar)}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(
                name.removeprefix(PREFIX), [other.removeprefix(PREFIX) for other in known], 1
            )
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            yield f"warning: there is no variable {name}, it is ignored{hint}"
