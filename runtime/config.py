"""ServerArgs: every launch option, validated once, with the error that the user should read.

Imports neither torch nor zmq: the command line reads it at start-up.
"""

from typing import Literal

import msgspec

MAX_NAME_LENGTH = 32


class ConfigError(ValueError):
    """A launch option is wrong. The text says what was given, what was expected and what to do."""


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
    threads: int | None = None
    attention_backend: Literal["auto", "reference", "native", "varlen"] = "auto"
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    nccl_port: int | None = None
    metrics_auth: bool = True
    """Whether /metrics asks for the API key where there is one."""
    seed: int | None = None
    """Requests without a seed draw theirs from this one; None: from the system."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """What only the main process may know; never logged, never sent, never in a process's arguments."""

    api_key: str | None = None
    admin_api_key: str | None = None

    def __repr__(self) -> str:
        return "Secrets(…)"
