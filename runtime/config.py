"""ServerArgs: all launch options, validated once, with errors written for the user.

Imports neither torch nor zmq, because every start of the command line imports it.
"""

import math
import re
from typing import Literal, get_args, get_type_hints

import msgspec

MAX_NAME_LENGTH = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
COUNTS = (
    *("max_model_len", "max_total_tokens", "max_running_requests", "chunked_prefill_size", "page_size"),
    *("max_queued_requests", "stream_interval", "threads", "tp_size", "pp_size", "dp_size", "nnodes"),
)
TIMES = ("queue_timeout", "watchdog_timeout", "drain_timeout")


class ConfigError(ValueError):
    """A launch option or a model cannot be used. The text says what was given, what was expected and what to do."""


class ServerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The launch options of one instance. It travels to every child process, so it holds no secrets (see Secrets).

    Sizes are in tokens, times in seconds. None means: chosen from the model and the machine.
    """

    model: str
    """A directory, a .gguf file or a hub id, as the user wrote it."""
    name: str = "default"
    host: str = "127.0.0.1"
    port: int = 30000
    served_model_names: tuple[str, ...] = ()
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf"] = "auto"
    max_model_len: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int = 64
    chunked_prefill_size: int = 512
    page_size: int = 16
    schedule_policy: Literal["fcfs", "lpm"] = "lpm"
    prefix_cache: bool = True
    max_queued_requests: int = 1024
    queue_timeout: float = 600.0
    watchdog_timeout: float = 60.0
    drain_timeout: float = 30.0
    stream_interval: int = 2
    sampling_defaults: Literal["model", "openai"] = "model"
    """Where the sampling parameters come from that a request leaves out: the checkpoint's generation_config.json, if it
    has one, or OpenAI's API. This is for HTTP: Engine has the defaults of SamplingParams."""
    threads: int | None = None
    attention_backend: Literal["auto", "reference", "native", "varlen"] = "auto"
    tp_size: int = 1
    """Ranks that share each layer."""
    pp_size: int = 1
    """Stages that the layers are split into."""
    dp_size: int = 1
    """Replicas of the whole model, each with its own ranks."""
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    """The rendezvous of ranks on several nodes: HOST:PORT of node 0, or HOST with the port nccl_port."""
    nccl_port: int | None = None
    """The rendezvous of ranks on one node: a loopback port, plus dp_rank; None: a file in the instance's directory."""
    metrics_auth: bool = True
    """Whether /metrics requires the API key, if there is one."""
    seed: int | None = None
    """Seeds the generator of seeds for requests that have none; None: seeded by the system."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def validated(cls, **options: object) -> "ServerArgs":
        """The options as ServerArgs. Raises ConfigError for an unknown or invalid one."""
        unknown = sorted(options.keys() - set(cls.__struct_fields__))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(cls.__struct_fields__)}")
        try:
            args = msgspec.convert({"model": "", **options}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(describe_error(str(error), options)) from None
        check(args)
        return args


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Known to the main process alone: never logged, sent, or passed in a process's arguments."""

    api_key: str | None = None
    admin_api_key: str | None = None

    def __repr__(self) -> str:
        return "Secrets(…)"


def describe_error(text: str, options: dict[str, object]) -> str:
    """A msgspec message such as "Expected `int`, got `str` - at `$.port`" in the terms of the command line."""
    problem, _, place = text.partition(" - at `$.")
    name = re.split(r"[`\[.]", place)[0]
    if not name:
        return text
    choices = get_args(get_type_hints(ServerArgs)[name])
    if choices and "enum" in problem:
        problem = f"expected one of {', '.join(choices)}"
    return f"{flag(name)} {options.get(name)!r}: {problem[0].lower()}{problem[1:]}"


def flag(field: str) -> str:
    """The command-line option of a field: --max-model-len for max_model_len."""
    return {"served_model_names": "--served-model-name", "model": "MODEL"}.get(field, "--" + field.replace("_", "-"))


def check(args: ServerArgs) -> None:
    """Raises ConfigError for a value that is invalid on any machine and for any model."""
    if not args.model:
        raise ConfigError("MODEL is empty: give a directory, a .gguf file or a hub id")
    check_name(args.name)
    if not args.host:
        raise ConfigError("--host is empty: give an address to listen on, such as 127.0.0.1")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: a port is between 0 (any free one) and 65535")
    for field in COUNTS:
        value = getattr(args, field)
        if value is not None and value < 1:
            raise ConfigError(f"{flag(field)} {value}: must be at least 1")
    for field in TIMES:
        value = getattr(args, field)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{flag(field)} {value}: must be a number of seconds, 0 or more")
    if args.max_total_tokens is not None and args.max_total_tokens < args.page_size:
        raise ConfigError(
            f"--max-total-tokens {args.max_total_tokens}: must hold at least one page of {args.page_size} tokens"
        )
    check_nodes(args)
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: must be between 0 and 2**63 - 1")
    for name in args.served_model_names:
        if not name or any(not character.isprintable() for character in name):
            raise ConfigError(f"--served-model-name {name!r}: must be printable and not empty")


def check_nodes(args: ServerArgs) -> None:
    """Raises ConfigError when the ranks cannot be placed on the nodes. Limits of the model: ranks.check_split."""
    port, address, nodes = args.nccl_port, args.dist_init_addr, args.nnodes
    if port is not None and not 1 <= port <= 65536 - args.dp_size:
        raise ConfigError(
            f"--nccl-port {port}: a port is between 1 and 65535, and each of --dp-size replicas needs one"
        )
    if not 0 <= args.node_rank < nodes:
        raise ConfigError(f"--node-rank {args.node_rank}: with --nnodes {nodes} it is between 0 and {nodes - 1}")
    if nodes == 1 and address is not None:
        raise ConfigError("--dist-init-addr: the ranks of one node need none; give --nnodes too")
    if nodes == 1:
        return
    if args.dp_size > 1:
        raise ConfigError(
            f"--dp-size {args.dp_size} with --nnodes {nodes}: replicas lie on the node of the front, which reaches "
            "them through sockets in a private directory; launch one instance a node instead"
        )
    ranks = args.tp_size * args.pp_size
    if ranks % nodes:
        raise ConfigError(
            f"--nnodes {nodes}: --tp-size {args.tp_size} times --pp-size {args.pp_size} ranks do not spread evenly; "
            f"what works is {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
        )
    if address is None:
        raise ConfigError(f"--nnodes {nodes}: give --dist-init-addr HOST:PORT, an address of node 0, on every node")
    host, colon, end = address.rpartition(":")
    if not colon and port is None:
        raise ConfigError(f"--dist-init-addr {address}: it has no port; give HOST:PORT, or --nccl-port")
    if colon and not (host and end.isascii() and end.isdecimal() and 1 <= int(end) <= 65535):
        raise ConfigError(f"--dist-init-addr {address}: expected HOST:PORT, with a port between 1 and 65535")
    if host and port not in (None, int(end)):
        raise ConfigError(f"--dist-init-addr {address}: --nccl-port says {port}; give one of them")


def check_name(name: str) -> None:
    """Raises ConfigError for a name that cannot be a directory's name or an argument of --instance."""
    if len(name) > MAX_NAME_LENGTH or not NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r}: a name has 1 to {MAX_NAME_LENGTH} letters, digits, dots, underscores or dashes, "
            "and begins with a letter or a digit"
        )
