"""The configuration file: TOML with the options of launch as keys, used where neither a flag nor a variable is
given.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmserve.runtime.config import ConfigError


def default_path(environ: Mapping[str, str]) -> Path:
    """The path of the file without --config: $XDG_CONFIG_HOME/llmserve/config.toml."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base, "llmserve", "config.toml")


def file_in_effect(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The named file, else the default one if it exists."""
    if path is not None:
        return Path(os.path.expanduser(path))
    default = default_path(environ)
    return default if os.path.exists(default) else None  # one in a home that this user may not enter is not theirs


def read(path: Path, ctx: typer.Context) -> dict[str, Any]:
    """The values in the file, by parameter name of the command in `ctx`. Raises ConfigError, naming file and key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    settable = {key: parameter for parameter in ctx.command.params for key in keys_of(parameter)}
    for key, value in table.items():
        if key not in settable:
            raise ConfigError(f"{path}: there is no option {key!r}; there are {', '.join(sorted(settable))}")
        try:
            settable[key].process_value(ctx, value)
        except typer.BadParameter as error:
            raise ConfigError(f"{path}: {key} = {value!r}: {error.message}") from None
    return {settable[key].name: value for key, value in table.items()}


def keys_of(parameter: Any) -> list[str]:
    """The keys of a parameter in the file: its long option without dashes, or the argument's name."""
    if parameter.name in ("config", "detach", "help"):
        return []
    return [name.removeprefix("--") for name in parameter.opts]


def apply(ctx: typer.Context, value: Path | None) -> Path | None:
    """Callback of --config: makes the values in the file the defaults of the command's other options."""
    path = file_in_effect(value, os.environ)
    if path is not None and not ctx.resilient_parsing:
        ctx.default_map = read(path, ctx)
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="LLMSERVE_CONFIG",
        show_envvar=False,
        is_eager=True,
        callback=apply,
        show_default="~/.config/llmserve/config.toml",
        help="A TOML file of options, such as port = 8000. Flags and variables override it.",
    ),
]
