"""`llmserve launch`: the options of an instance and its keys. starting.py shows its start, runtime/serve.py serves."""

import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmserve.cli.common import console_of
from llmserve.cli.config_file import ConfigOption
from llmserve.cli.console import Console
from llmserve.cli.keys import checked_key, key_in
from llmserve.cli.sources import places_told, unknown_variables
from llmserve.runtime.config import Secrets, ServerArgs

MODEL, SERVER, BATCHING = "Model", "Server", "Memory and batching"
TIMES, KEYS, SWITCHES, RANKS = "Queue and timeouts", "Keys", "Switches", "Several ranks"
LOOPBACK = ("127.", "::1", "localhost")


def option(flag: str, panel: str, help: str, **more: Any) -> Any:
    """A Typer option that can also be set by its variable: --max-model-len by LLMSERVE_MAX_MODEL_LEN."""
    variable = "LLMSERVE_" + flag.split("/")[0].removeprefix("--").upper().replace("-", "_")
    return typer.Option(flag, rich_help_panel=panel, help=help, envvar=variable, show_envvar=False, **more)


def launch(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A directory of safetensors, a .gguf file, or a hub id (ORG/NAME, ORG/NAME/FILE.gguf). Without it: "
            "the default model.",
            envvar="LLMSERVE_MODEL",
            show_envvar=False,
        ),
    ] = None,
    config: ConfigOption = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        option(
            "--dtype",
            MODEL,
            "The data type of weights and KV cache: bfloat16, float16 or float32; auto is the checkpoint's, but "
            "bfloat16 for float16 on a CPU.",
            metavar="DTYPE",
        ),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        option(
            "--device", MODEL, "Where the model runs: cpu or cuda; auto is cuda if there is a device.", metavar="DEVICE"
        ),
    ] = "auto",
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf"],
        option("--load-format", MODEL, "The format of MODEL: safetensors or gguf; auto allows both.", metavar="FORMAT"),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        option(
            "--max-model-len",
            MODEL,
            "The most tokens of prompt and output together.",
            metavar="TOKENS",
            show_default="the model's own",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            MODEL,
            "The model's name for clients. Repeat it for more names; the first one is for requests that give none.",
            metavar="NAME",
            show_default="MODEL's last part",
        ),
    ] = None,
    name: Annotated[
        str, option("--name", SERVER, "The name of the instance for the other commands.", metavar="NAME")
    ] = "default",
    host: Annotated[
        str, option("--host", SERVER, "The address to listen on; 0.0.0.0 admits other machines.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[
        int, option("--port", SERVER, "The port to listen on; 0 takes any free one.", metavar="PORT")
    ] = 30000,
    detach: Annotated[
        bool,
        option(
            "--detach", SERVER, "Return when it is ready and leave it running; its log is in the instance's directory."
        ),
    ] = False,
    stream_interval: Annotated[
        int,
        option(
            "--stream-interval", SERVER, "Tokens per event of a stream; the first one is sent alone.", metavar="TOKENS"
        ),
    ] = 2,
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        option(
            "--sampling-defaults",
            SERVER,
            "The sampling parameters of requests that leave them out: the model's recommendations, in its "
            "generation_config.json, or OpenAI's defaults.",
            metavar="WHOSE",
        ),
    ] = "model",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        option(
            "--log-level",
            SERVER,
            "The lowest level to log: debug (has a line for each request), info, warning or error.",
            metavar="LEVEL",
        ),
    ] = "info",
    max_total_tokens: Annotated[
        int | None,
        option(
            "--max-total-tokens",
            BATCHING,
            "Tokens that the KV cache can hold, for all requests together.",
            metavar="TOKENS",
            show_default="from the memory",
        ),
    ] = None,
    max_running_requests: Annotated[
        int, option("--max-running-requests", BATCHING, "The most requests in a step.", metavar="N")
    ] = 64,
    chunked_prefill_size: Annotated[
        int,
        option(
            "--chunked-prefill-size",
            BATCHING,
            "The most prompt tokens in a step; fewer where these would delay answers that are under way.",
            metavar="TOKENS",
        ),
    ] = 512,
    page_size: Annotated[
        int, option("--page-size", BATCHING, "Tokens in a page of the KV cache.", metavar="TOKENS")
    ] = 16,
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        option(
            "--schedule-policy",
            BATCHING,
            "The order of requests: fcfs, first come, or lpm, longest cached prefix and least left to compute.",
            metavar="POLICY",
        ),
    ] = "lpm",
    prefix_cache: Annotated[
        bool,
        option(
            "--prefix-cache/--no-prefix-cache",
            SWITCHES,
            "Keep the KV of prompts for later requests with the same prefix.",
        ),
    ] = True,
    threads: Annotated[
        int | None,
        option("--threads", BATCHING, "CPU threads of each rank.", metavar="N", show_default="its share of the cores"),
    ] = None,
    attention_backend: Annotated[
        Literal["auto", "reference", "native", "varlen"],
        option(
            "--attention-backend",
            BATCHING,
            "The attention kernels: reference, native or varlen; auto is the fastest that works here.",
            metavar="NAME",
        ),
    ] = "auto",
    seed: Annotated[
        int | None,
        option("--seed", MODEL, "Seeds the random seeds of requests without one.", metavar="N", show_default="random"),
    ] = None,
    max_queued_requests: Annotated[
        int,
        option(
            "--max-queued-requests", TIMES, "The most requests that may wait; others are refused with 503.", metavar="N"
        ),
    ] = 1024,
    queue_timeout: Annotated[
        float, option("--queue-timeout", TIMES, "How long a request may wait for its first step.", metavar="SECONDS")
    ] = 600.0,
    watchdog_timeout: Annotated[
        float,
        option(
            "--watchdog-timeout",
            TIMES,
            "End the instance when it makes no step for this long although it has work; 0: never.",
            metavar="SECONDS",
        ),
    ] = 60.0,
    drain_timeout: Annotated[
        float,
        option(
            "--drain-timeout",
            TIMES,
            "How long requests may still run when the instance is told to end.",
            metavar="SECONDS",
        ),
    ] = 30.0,
    tp_size: Annotated[
        int, option("--tp-size", RANKS, "Ranks that share every layer (tensor parallelism).", metavar="N")
    ] = 1,
    pp_size: Annotated[
        int, option("--pp-size", RANKS, "Stages that the layers are split into (pipeline parallelism).", metavar="N")
    ] = 1,
    dp_size: Annotated[
        int, option("--dp-size", RANKS, "Replicas of the whole model, which share the requests.", metavar="N")
    ] = 1,
    nnodes: Annotated[
        int, option("--nnodes", RANKS, "Machines with ranks of the model; launch on each of them.", metavar="N")
    ] = 1,
    node_rank: Annotated[
        int, option("--node-rank", RANKS, "The number of this machine; 0 serves the clients.", metavar="N")
    ] = 0,
    dist_init_addr: Annotated[
        str | None,
        option(
            "--dist-init-addr",
            RANKS,
            "The rendezvous of the machines: an address of node 0.",
            metavar="HOST:PORT",
            show_default=False,
        ),
    ] = None,
    nccl_port: Annotated[
        int | None,
        option(
            "--nccl-port",
            RANKS,
            "The rendezvous port of the ranks on one machine.",
            metavar="PORT",
            show_default="none: in a file",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        option(
            "--api-key-file",
            KEYS,
            "A file with the key that clients must send. Or set the variable LLMSERVE_API_KEY.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    admin_api_key_file: Annotated[
        Path | None,
        option(
            "--admin-api-key-file",
            KEYS,
            "A file with the key of the admin routes. Or set the variable LLMSERVE_ADMIN_API_KEY.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    metrics_auth: Annotated[
        bool, option("--metrics-auth/--no-metrics-auth", SWITCHES, "Whether /metrics requires the API key.")
    ] = True,
) -> None:
    """Serve a model.

    Loads MODEL and serves OpenAI's HTTP API until Ctrl-C, which lets requests in flight end first; a second Ctrl-C ends
    it at once. Every option can also be set by a variable, LLMSERVE_PORT for --port, or in a TOML file, port = 8000.
    """
    options = {key: value for key, value in locals().items() if key in ServerArgs.__struct_fields__}
    console = console_of(ctx)
    for warning in unknown_variables(ctx.command, os.environ):
        console.note(warning)
    with places_told(ctx):
        secrets = Secrets(
            api_key=read_key(console, "API_KEY", api_key_file),
            admin_api_key=read_key(console, "ADMIN_API_KEY", admin_api_key_file),
        )
        names = tuple(served_model_name or ())
        model = default_model() if model is None else model
        args = ServerArgs.validated(**options | {"model": model, "served_model_names": names})
        if not args.host.startswith(LOOPBACK):
            warn_of_open_doors(console, args.host, secrets)

        from llmserve.cli.starting import run_attached, run_detached

        code = (run_detached if detach else run_attached)(console, args, secrets)
    raise typer.Exit(code)


def warn_of_open_doors(console: Console, host: str, secrets: Secrets) -> None:
    """Warns about what other machines can do without a key."""
    if secrets.api_key is None and secrets.admin_api_key is None:
        console.note(
            f"warning: anyone who reaches {host} can use this server and its admin routes, which abort requests, pause "
            "it and swap its weights; set an API key to prevent it (--api-key-file or LLMSERVE_API_KEY)"
        )
    elif secrets.api_key is None:
        console.note(
            f"warning: anyone who reaches {host} can use this server, but for its admin routes; set an API key to "
            "prevent it (--api-key-file or LLMSERVE_API_KEY)"
        )


def default_model() -> str:
    from llmserve.runtime.models.hub import default_model

    return default_model()


def read_key(console: Console, what: str, file: Path | None) -> str | None:
    """The key in `file`, else in the variable LLMSERVE_`what`, which is removed so that children do not inherit it."""
    variable = f"LLMSERVE_{what}"
    key = console.environ.get(variable)
    os.environ.pop(variable, None)
    if file is None:
        return None if key is None else checked_key(key, f"the variable {variable}")
    key = key_in(file)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        console.note(
            f"warning: the key file {file} can be read by others (mode {mode:o}); make it private: chmod 600 {file}"
        )
    return key
