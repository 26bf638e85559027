"""`llmserve config`: what `llmserve launch` would run with here, and where each value comes from."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from llmserve.cli.common import JsonOption, console_of
from llmserve.cli.config_file import default_path, file_in_effect
from llmserve.cli.sources import KEYS, name_of, unknown_variables


def config(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", envvar="LLMSERVE_CONFIG", help="The configuration file to read."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the options that `llmserve launch` would use now, and the source of each value.

    A flag overrides a variable (LLMSERVE_PORT for --port), a variable overrides the configuration file, and the file
    overrides the default.
    """
    console = console_of(ctx)
    file = file_in_effect(config, os.environ)
    launch = launch_context(ctx, file)
    for warning in unknown_variables(launch.command, os.environ):
        console.note(warning)
    rows = resolve(launch, file)
    if json:
        console.json({"file": str(file) if file else None, "options": rows})
        return
    parameters = launch.command.params
    unset = {name_of(each): f"({each.show_default})" for each in parameters if isinstance(each.show_default, str)}
    unset["model"] = "(the default model)"
    cells = [(row["option"], shown(row["value"], unset.get(row["option"], "-")), row["source"]) for row in rows]
    console.table(("OPTION", "VALUE", "FROM"), cells)
    if file is None:
        console.note(f"there is no configuration file at {default_path(os.environ)}")


def launch_context(ctx: typer.Context, file: Path | None) -> Any:
    """The context of `llmserve launch` as it would be run here without flags."""
    group: Any = ctx.find_root().command
    group.load("launch")
    arguments = ["--config", str(file)] if file else []
    return group.commands["launch"].make_context("launch", arguments, parent=ctx.parent)


def resolve(launch: Any, file: Path | None) -> list[dict[str, Any]]:
    """One row per option of launch: name, value and source, as Typer resolves them."""
    rows = []
    for parameter in launch.command.params:
        if parameter.name in ("config", "detach", "help"):
            continue
        name = name_of(parameter)
        source = launch.get_parameter_source(parameter.name).name
        places = {"ENVIRONMENT": f"variable {parameter.envvar}", "DEFAULT_MAP": f"file {file}", "DEFAULT": "default"}
        value = launch.params[parameter.name]
        rows.append({"option": name, "value": plain(value), "source": places[source]})
    for variable, name in KEYS.items():
        if os.environ.get(variable):
            rows.append({"option": name, "value": "(set)", "source": f"variable {variable}"})
    return rows


def plain(value: Any) -> Any:
    """The value as JSON data."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return [plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


def shown(value: Any, unset: str) -> str:
    if value is None or value == []:
        return unset
    return (
        ", ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)
    )
