"""`llmserve generate`: continues a prompt with the running instance."""

from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli import answer
from llmserve.cli.common import CommandError, ExitCode, InstanceOption, JsonOption, console_of, find_server


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help="The text to continue; - reads it from standard input, without the final newline."
        ),
    ],
    instance: InstanceOption = None,
    max_tokens: answer.MaxTokensOption = None,
    temperature: answer.TemperatureOption = None,
    top_p: answer.TopPOption = None,
    seed: answer.SeedOption = None,
    stop: answer.StopOption = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            "--json-schema",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Generate JSON that is valid for the schema in this file.",
        ),
    ] = None,
    api_key_file: answer.ApiKeyFileOption = None,
    timeout: answer.GapOption = 600.0,
    json: JsonOption = False,
) -> None:
    """Continue a prompt, streaming the text to standard output.

    Ctrl-C aborts the request in the server too. Only the new text is printed, so that it can be piped.
    """
    console = console_of(ctx)
    text = answer.piped(console) if prompt == "-" else prompt
    if not text:
        raise CommandError("the prompt is empty", ExitCode.USAGE)
    body = {
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
        "structured_outputs": None if json_schema is None else {"json": schema_in(json_schema)},
    }
    key = answer.api_key(console, api_key_file)
    result = answer.Answer(console, find_server(instance), "/v1/completions", body, key, timeout)
    if json:
        for _ in result:
            pass
        console.json(result.as_json())
        return
    result.show()
    if console.stdout.isatty():
        console.err.print(result.summary(), style="dim")


def schema_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise CommandError(f"cannot read the schema {file}: {reason}", ExitCode.USAGE) from None
