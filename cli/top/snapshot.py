"""Snapshot: the data that `top` shows at one moment, for the screen, `--json` and the plain lines alike."""

from typing import Literal

import msgspec

SCHEMA_VERSION = 1

State = Literal["connecting", "starting", "ready", "draining", "paused", "degraded", "stalled", "dead", "lost"]
"""degraded: only some of the replicas serve."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    running: int = 0
    max_running: int = 0
    waiting: int = 0
    obstacle: str = ""
    """Why requests wait, as far as known."""
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    steps_per_s: float = 0.0
    step_s: float = 0.0


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the KV pool. `used` is held by requests; `cached` is kept for prefixes and can be evicted."""

    total: int = 0
    used: int = 0
    cached: int = 0
    free: int = 0
    hit_rate: float | None = None
    """Fraction of the last minute's prompt tokens that came from the cache."""
    hit_rate_lifetime: float | None = None
    evicted_tokens: int = 0
    evicted_tokens_per_s: float = 0.0
    retractions: int = 0
    """For lack of memory."""
    retractions_last_minute: int = 0
    asked_retractions: int = 0
    """For a pause or a swap of the weights."""


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of the `count` observations in the window; None where there are none."""

    count: int = 0
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    window_s: float = 0.0
    """Seconds; 0: since the start of the instance."""
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    queue: Quantiles = Quantiles()


class Process(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    pid: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    rss_bytes: int
    cpu_percent: float
    heartbeat_age_s: float
    dropped_messages: int
    weight_bytes: int = 0
    bubble: float | None = None
    """Recent fraction of the time with a step in some stage that this rank has spent waiting for its turn; None for a
    single rank, or when nothing ran.
    """


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    dp_rank: int
    state: str
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    heartbeat_age_s: float


class Request(msgspec.Struct, frozen=True, kw_only=True):
    rid: str
    index: int
    dp_rank: int
    state: str
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_new_tokens: int
    tokens_per_s: float
    ttft_s: float | None
    retractions: int
    user: str


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    used_bytes: int | None
    total_bytes: int | None
    busy_percent: float | None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that top shows at `time` (Unix seconds). `--json` prints it without `history`."""

    schema_version: int = SCHEMA_VERSION
    time: float
    instance: str
    model: str
    address: str
    state: State
    reason: str = ""
    """Why the state is not "ready", if there is more to say."""
    weight_version: int = 0
    uptime_s: float = 0.0
    data_age_s: float | None = None
    replicas: tuple[Replica, ...] = ()
    load: Load = Load()
    cache: Cache = Cache()
    latency: Latency = Latency()
    outcomes: dict[str, int] = {}
    bad_frames: int = 0
    processes: tuple[Process, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    requests: tuple[Request, ...] = ()
    history: dict[str, tuple[float, ...]] = {}
    """By name of the curve: a value per second, the newest last."""
