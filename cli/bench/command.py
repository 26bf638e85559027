"""The command `llmserve bench`: its options, its progress bar and its tables."""

import asyncio
import json as jsonlib
import signal
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from llmserve.cli import format
from llmserve.cli.answer import ApiKeyFileOption, api_key, refusal
from llmserve.cli.common import CommandError, ExitCode, InstanceOption, JsonOption, console_of, find_server
from llmserve.cli.console import Console
from llmserve.runtime.listener import url_of

if TYPE_CHECKING:
    from llmserve.cli.bench.load import Load, Result

SHAPE = ("requests", "concurrency", "rate", "input_words", "shared_prefix", "output_tokens")
RATES = ("REQS", "ERRORS", "TIME", "REQ/S", "OUT TOK/S", "TOK/S", "CACHED")
LATENCIES = ("TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "E2E p50", "p95", "p99")


def bench(
    ctx: typer.Context,
    instance: InstanceOption = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Any OpenAI-compatible server, instead of an instance.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model to request.", show_default="its first one")
    ] = None,
    suite: Annotated[bool, typer.Option("--suite", help="Run the five standard loads, W1 to W5.")] = False,
    requests: Annotated[int, typer.Option("--requests", "-n", metavar="N", min=1, help="The number of requests.")] = 32,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", metavar="N", min=1, help="The number of concurrent clients.")
    ] = 8,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="N", min=0.001, help="Instead of -c: N requests a second on average, at random times."
        ),
    ] = None,
    input_words: Annotated[int, typer.Option("--input-words", metavar="N", min=1, help="Words in each prompt.")] = 128,
    shared_prefix: Annotated[
        float,
        typer.Option(
            "--shared-prefix", metavar="SHARE", min=0.0, max=1.0, help="The part of each prompt that all share."
        ),
    ] = 0.0,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", metavar="N", min=1, help="Tokens in each answer.")
    ] = 64,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Whether to stream the answers.")] = True,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", help="The seed of prompts and arrival times; prompts of a new seed are not cached."
        ),
    ] = 0,
    extra: Annotated[
        str,
        typer.Option("--extra", metavar="JSON", help="More fields for each request; null removes a default one."),
    ] = "{}",
    api_key_file: ApiKeyFileOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait for each complete answer.")
    ] = 600.0,
    json: JsonOption = False,
) -> None:
    """Measure a server under load: throughput, and percentiles of the latencies.

    The same seed gives the same prompts on every server. ITL is the mean time between two tokens of a request. If the
    server reports no usage, each event of a stream counts as a token. Ctrl-C ends it with the figures so far.
    """
    from llmserve.cli.bench.load import Load, standard_loads

    console = console_of(ctx)
    if suite:
        refuse_shape(ctx)
    if url is None:
        record = find_server(instance)
        url = url_of(record.host, record.port)
    else:
        url = checked_url(url)
    fields = extra_fields(extra)
    key = api_key(console, api_key_file)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    own = Load(
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        input_words=input_words,
        shared=shared_prefix,
        output_tokens=output_tokens,
        stream=stream,
        seed=seed,
    )
    name = model or first_model(url, headers)
    loads = standard_loads(seed, stream) if suite else (own,)
    results: list[Result] = []
    try:
        for load in loads:
            results.append(run(console, load, url, name, headers, fields, timeout))
            if results[-1].answered < load.requests:
                break
    except KeyboardInterrupt:  # before the first answer to a load
        if not results:
            raise
    if json:
        console.json([as_json(result) for result in results])
    else:
        show(console, results)
    if sum(result.answered for result in results) < sum(load.requests for load in loads):
        raise typer.Exit(128 + signal.SIGINT)
    if any(result.errors for result in results):
        raise typer.Exit(ExitCode.FAILED)


def extra_fields(text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises CommandError if it holds anything else."""
    try:
        fields = jsonlib.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise CommandError(f"--extra must be a JSON object, not {text!r}", ExitCode.USAGE)
    return fields


def refuse_shape(ctx: typer.Context) -> None:
    """Raises CommandError for an option that shapes the load, because the suite's loads have their own."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if parameter.name in SHAPE and source is not None and source.name == "COMMANDLINE":
            raise CommandError(f"--suite has its own {parameter.opts[0]}; leave one of them out", ExitCode.USAGE)


def checked_url(url: str) -> str:
    """A server's URL, without the "/v1" that OpenAI's clients want at its end. Raises CommandError for what is none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.hostname.encode("idna"):
            return url.rstrip("/").removesuffix("/v1")
    except ValueError:  # of a port, of brackets, or of a name that DNS cannot hold
        pass
    raise CommandError(f"--url {url}: expected a server's URL, such as http://127.0.0.1:8000", ExitCode.USAGE)


def first_model(url: str, headers: dict[str, str]) -> str:
    """The first model that the server lists."""
    import httpx

    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10.0, trust_env=False)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (401, 403, 503):
            raise refusal(error.response) from None
        raise CommandError(f"{url}/v1/models answers HTTP {error.response.status_code}; give --model") from None
    except httpx.HTTPError as error:
        raise CommandError(f"cannot reach {url}: {error}", ExitCode.UNAVAILABLE) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise CommandError(f"{url} lists no model; give --model") from None


def run(
    console: Console,
    load: "Load",
    url: str,
    model: str,
    headers: dict[str, str],
    extra: dict[str, Any],
    timeout_s: float,
) -> "Result":
    """Runs one load, with a progress bar on a terminal."""
    import uvloop

    from llmserve.cli.bench.load import put

    with console.progress() as progress:
        task = progress.add_task(load.name, total=load.requests, amount="")
        done = 0

        def on_answer() -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, amount=f"{done} of {load.requests}")

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(put(load, url, model, headers, extra, timeout_s, on_answer))


def show(console: Console, results: list["Result"]) -> None:
    """Two tables, so that each fits into 80 columns."""
    rates, latencies = [], []
    for result in results:
        numbers = [
            str(result.ok),
            str(sum(result.errors.values())),
            format.duration(result.seconds),
            f"{result.requests_per_s:.2f}",
            f"{result.output_tokens_per_s:.1f}",
            f"{result.tokens_per_s:.1f}",
            format.percent(result.cached_tokens, result.prompt_tokens),
        ]
        rates.append([result.load.name, *numbers])
        seconds = [value for of in (result.ttft, result.itl, result.e2e) for value in (of.p50, of.p95, of.p99)]
        latencies.append([result.load.name.split()[0], *map(format.duration, seconds)])
    console.table(("LOAD", *RATES), rates, right=RATES)
    console.print()
    console.table(("LOAD", *LATENCIES), latencies, right=LATENCIES)
    for result in results:
        if result.answered < result.load.requests:
            console.note(f"{result.load.name}: interrupted after {result.answered} of {result.load.requests} requests")
        for error, times in result.errors.items():
            console.error(f"{result.load.name}: {format.plural(times, 'request')} failed: {error}")
        if result.cpu_share > 0.5:
            console.note(
                f"{result.load.name}: the load generator itself took {format.share(result.cpu_share)} of a core"
            )


def as_json(result: "Result") -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(result)
    return fields
