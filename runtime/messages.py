"""All messages that cross a socket, and the rows that messages are made of.

Nothing here knows about sockets (wire.py) or about how a message is handled. A request is an `XReqInput`, its answer an
`XReqOutput`. Token ids are little-endian int32 bytes and vectors float32 bytes, never lists of numbers.
"""

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import msgspec

PROTOCOL_VERSION = 1
"""To be raised with every change of a message, because a receiver drops messages with unknown fields."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of the messages, each sent alone in a frame; the tag is the class name."""


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of records within messages; encoded by position, so that field names are not sent."""


# ---- sampling ----------------------------------------------------------------------------------------------------


FILL_CONTEXT = -1
"""A value of `max_new_tokens`: as many as the model's context has room for."""
UNSEEDED = -(1 << 63)
"""A value of `seed`: the front chooses one."""
MIN_TEMPERATURE = 1e-5
"""Below this temperature sampling is greedy, because dividing logits by less could overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of one request.

    The front validates them (validation.py) and replaces FILL_CONTEXT and UNSEEDED by numbers before they reach the
    scheduler. Choice j of a prompt samples with `seed + j`. `top_k` 0 means off. `logit_bias` holds (token id, bias)
    pairs.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = UNSEEDED
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def penalized(self) -> bool:
        """Whether penalties make the choice of a token depend on the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which logprobs are wanted: the sampled tokens', those of the `top` likeliest tokens, and with `prompt` the
    prompt's.
    """

    top: int = 0
    prompt: bool = False


class Constraint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of every choice must match.

    `text` is a JSON schema, a regular expression, a JSON list of texts ("choice"), a Lark grammar ("lark"), or a
    grammar in either Lark or llama.cpp's GBNF ("grammar").
    """

    kind: Literal["json_schema", "regex", "choice", "lark", "grammar"]
    text: str
    param: str
    """The client's name for the parameter, for error messages."""


# ---- requests ----------------------------------------------------------------------------------------------------


class GenerateReqInput(Message, frozen=True, kw_only=True):
    """A generation request, before tokenization. Exactly one of `texts` and `input_ids` is not empty.

    The choices of a request are numbered prompt by prompt: index = prompt_index * n + choice.
    """

    rid: str
    texts: tuple[str, ...] = ()
    input_ids: tuple[tuple[int, ...], ...] = ()
    sampling_params: SamplingParams = SamplingParams()
    n: int = 1
    constraint: Constraint | None = None
    logprobs: LogprobOptions | None = None
    stream: bool = False
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    user: str = ""


class EmbeddingReqInput(Message, frozen=True, kw_only=True):
    """An embedding request, before tokenization: one vector per prompt."""

    rid: str
    texts: tuple[str, ...] = ()
    input_ids: tuple[tuple[int, ...], ...] = ()
    pooling: Literal["mean", "last"] = "last"
    normalize: bool = True
    user: str = ""


class TokenizedGenerateReqInput(Message, frozen=True, kw_only=True):
    """A generation request after tokenization: each of `prompts` is int32 bytes and is continued `n` times.

    The scheduler accepts or refuses all its choices together.
    """

    rid: str
    prompts: tuple[bytes, ...]
    sampling_params: SamplingParams
    n: int = 1
    grammar: str = ""
    """The constraint, in the notation of runtime/grammar.py; empty: none."""
    logprobs: LogprobOptions | None = None
    stream: bool = False
    skip_special_tokens: bool = True
    user: str = ""
    text: str = ""
    """The start of the first prompt, for `llmserve requests --show-text`; never logged."""


class TokenizedEmbeddingReqInput(Message, frozen=True, kw_only=True):
    rid: str
    prompts: tuple[bytes, ...]
    pooling: Literal["mean", "last"] = "last"
    normalize: bool = True
    user: str = ""
    text: str = ""


# ---- outputs -----------------------------------------------------------------------------------------------------


class FinishReason(Row, frozen=True, kw_only=True):
    """Why a choice ended. For "abort" and "error", `status` is the HTTP status and `message` the text for the client.

    `matched` is the stop string or stop token id that ended it; None when the model ended it with an EOS token.
    """

    type: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    status: int = 200
    message: str = ""


class Logprobs(Row, frozen=True, kw_only=True):
    """Logprobs of k consecutive tokens. The first token of a prompt has none, which is NaN."""

    token_logprobs: bytes
    """float32 [k]: those of the tokens themselves."""
    top: int = 0
    """How many of the likeliest tokens at each position are given too."""
    top_ids: bytes = b""
    """int32 [k, top]."""
    top_logprobs: bytes = b""
    """float32 [k, top]."""

    @staticmethod
    def joined(parts: "Sequence[Logprobs]") -> "Logprobs":
        """Those of several runs of tokens, one after the other, as one. All have the same `top`."""
        return Logprobs(
            token_logprobs=b"".join(part.token_logprobs for part in parts),
            top=parts[0].top if parts else 0,
            top_ids=b"".join(part.top_ids for part in parts),
            top_logprobs=b"".join(part.top_logprobs for part in parts),
        )


class TokenIDRow(Row, frozen=True, kw_only=True):
    """The new output of one choice since its last row. Token counts are totals so far."""

    rid: str
    index: int
    output_ids: bytes
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    """In the choice's first row only: k = prompt_tokens."""
    stop: tuple[str, ...] = ()
    """In the choice's first row only: the stop strings that the detokenizer withholds and trims."""
    skip_special_tokens: bool = True
    queue_s: float = 0.0
    """Seconds from arrival to first step."""
    min_new_tokens: int = 0
    """In the choice's first row only: stop strings that end within this many tokens do not count."""


class StrRow(Row, frozen=True, kw_only=True):
    """A TokenIDRow after detokenization. `text` is new and final: stop strings are removed, and incomplete characters
    withheld.
    """

    rid: str
    index: int
    text: str
    output_ids: bytes
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    queue_s: float = 0.0


class EmbeddingRow(Row, frozen=True, kw_only=True):
    """The vector of one prompt, float32 [hidden_size], or empty with `finish` as the reason."""

    rid: str
    index: int
    embedding: bytes
    prompt_tokens: int
    cached_tokens: int = 0
    finish: FinishReason | None = None
    queue_s: float = 0.0


class BatchTokenIDOutput(Message, frozen=True, kw_only=True):
    rows: tuple[TokenIDRow, ...]


class BatchStrOutput(Message, frozen=True, kw_only=True):
    rows: tuple[StrRow, ...]


class BatchEmbeddingOutput(Message, frozen=True, kw_only=True):
    rows: tuple[EmbeddingRow, ...]


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent by the detokenizer to the front every second, busy or idle."""


# ---- control -----------------------------------------------------------------------------------------------------

PauseMode = Literal["drain", "retract", "abort"]
DEFAULT_PAUSE_MODE: PauseMode = "retract"
""""retract" takes effect after a step and ends no request; "drain" takes as long as the longest answer."""
Answer = TypeVar("Answer")


class ControlRequest(Message, Generic[Answer], frozen=True, kw_only=True):
    """Base of operators' requests to a scheduler, generic in the type of the answer."""


class PingReqInput(ControlRequest["PingReqOutput"], frozen=True, kw_only=True):
    pass


class PingReqOutput(Message, frozen=True, kw_only=True):
    """`step` is the number of steps since the start, which grows while the scheduler works."""

    step: int
    state: str
    in_step_s: float = 0.0
    """How long the oldest step that is under way has taken so far; 0 where none is."""


class AbortReqInput(ControlRequest["AbortReqOutput"], frozen=True, kw_only=True):
    """Aborts the requests named in `rids`, and those selected by the other fields. With no field set it aborts
    nothing.
    """

    rids: tuple[str, ...] = ()
    prefix: str = ""
    older_than_s: float | None = None
    everything: bool = False
    message: str = "aborted"


class AbortReqOutput(Message, frozen=True, kw_only=True):
    """Sent when the memory is free. `not_found` are the named rids that neither wait nor run."""

    aborted: tuple[str, ...]
    not_found: tuple[str, ...] = ()


class FlushCacheReqInput(ControlRequest["FlushCacheReqOutput"], frozen=True, kw_only=True):
    """Empties the prefix cache. While requests run it waits up to `wait_s`, or aborts them, or is refused ("busy")."""

    wait_s: float = 0.0
    abort: bool = False


class FlushCacheReqOutput(Message, frozen=True, kw_only=True):
    pages_freed: int
    bytes_freed: int
    aborted: tuple[str, ...] = ()


class UpdateWeightReqInput(ControlRequest["UpdateWeightReqOutput"], frozen=True, kw_only=True):
    """Swaps the weights for those of another checkpoint of the same model. `model_path` as in ServerArgs.model."""

    model_path: str
    load_format: Literal["auto", "safetensors", "gguf"] = "auto"
    mode: PauseMode = DEFAULT_PAUSE_MODE
    dry_run: bool = False
    decision: str = ""
    """With several replicas: the name of the file with their common decision (runtime/decision.py)."""


class UpdateWeightReqOutput(Message, frozen=True, kw_only=True):
    old_version: int
    new_version: int
    model_path: str
    bytes: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    differences: tuple[str, ...] = ()
    """After a dry run: the differences from the model, a line each; empty when the swap would be accepted."""


class PauseGenerationReqInput(ControlRequest["PauseGenerationReqOutput"], frozen=True, kw_only=True):
    """Pauses generation. Running requests end first ("drain"), go back to the queue ("retract") or are aborted
    ("abort").
    """

    mode: PauseMode = DEFAULT_PAUSE_MODE


class PauseGenerationReqOutput(Message, frozen=True, kw_only=True):
    retracted: int = 0
    aborted: int = 0


class ContinueGenerationReqInput(ControlRequest["ContinueGenerationReqOutput"], frozen=True, kw_only=True):
    """Ends a pause, and a drain begun by DrainReqInput."""


class ContinueGenerationReqOutput(Message, frozen=True, kw_only=True):
    resumed: int = 0


class DrainReqInput(ControlRequest["DrainReqOutput"], frozen=True, kw_only=True):
    """Refuses new requests from now on. Answered at once; GetLoadReqInput tells how many requests are left."""


class DrainReqOutput(Message, frozen=True, kw_only=True):
    running: int
    waiting: int


class GetLoadReqInput(ControlRequest["GetLoadReqOutput"], frozen=True, kw_only=True):
    pass


class GetLoadReqOutput(Message, frozen=True, kw_only=True):
    state: str
    running: int
    waiting: int
    kv_tokens_used: int
    kv_tokens_cached: int
    kv_tokens_total: int


class RequestInfo(Row, frozen=True, kw_only=True):
    """One choice of a request as an operator sees it. Times in seconds."""

    rid: str
    index: int
    state: Literal["waiting", "prefill", "decode", "embed"]
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_new_tokens: int
    tokens_per_s: float
    ttft_s: float | None
    retractions: int
    user: str = ""
    text: str = ""


class ListRequestsReqInput(ControlRequest["ListRequestsReqOutput"], frozen=True, kw_only=True):
    show_text: bool = False


class ListRequestsReqOutput(Message, frozen=True, kw_only=True):
    requests: tuple[RequestInfo, ...]


class ProcessInfo(Row, frozen=True, kw_only=True):
    """One process of the instance. `role` is "main", "scheduler" or "detokenizer"; `cpu_percent` 100 is one core."""

    role: str
    pid: int
    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0
    rss_bytes: int = 0
    cpu_percent: float = 0.0
    weight_bytes: int = 0
    dropped_messages: int = 0
    busy_s: float = 0.0
    """Seconds of work in steps since the start, without waiting for the previous pipeline stage."""
    collectives: dict[str, dict[str, int]] = {}
    """{"calls": …, "bytes": …} by operation since the start; empty with a single rank."""
    silent_s: float = 0.0
    """Seconds since its last sign of life, where another process reports it."""


class GetStatusReqInput(ControlRequest["GetStatusReqOutput"], frozen=True, kw_only=True):
    pass


class GetStatusReqOutput(Message, frozen=True, kw_only=True):
    """One replica in depth. `options` are the values of ServerArgs in effect; `chosen` names those that the instance
    has chosen itself.
    """

    state: str
    model: str
    weight_version: int
    uptime_s: float
    steps: int
    in_step_s: float = 0.0
    """As PingReqOutput's."""
    running: int
    waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    kv_tokens_cached: int
    kv_bytes_total: int
    page_size: int
    processes: tuple[ProcessInfo, ...]
    options: dict[str, str | int | float | bool | list[str] | None]
    chosen: tuple[str, ...] = ()


class SubscribeMetricsReqInput(ControlRequest["SubscribeMetricsReqOutput"], frozen=True, kw_only=True):
    """Subscribes to metrics for `lease_s` seconds, pushed to `endpoint`: the file name, watch-…, of a socket that the
    caller has bound in the instance's directory.
    """

    endpoint: str
    lease_s: float = 10.0


class SubscribeMetricsReqOutput(Message, frozen=True, kw_only=True):
    lease_s: float


# ---- RPC envelope ------------------------------------------------------------------------------------------------


class RpcProgress(Message, frozen=True, kw_only=True):
    """May be sent any number of times before the answer. `done` and `total` are in `unit`."""

    stage: str
    done: float = 0.0
    total: float = 0.0
    unit: str = ""


ErrorCode = Literal["busy", "not_found", "invalid", "denied", "timeout", "protocol", "failed", "unavailable"]


class RpcError(Message, frozen=True, kw_only=True):
    code: ErrorCode
    message: str


# ---- metrics -----------------------------------------------------------------------------------------------------


class Histogram(Row, frozen=True, kw_only=True):
    """Observations since the start: counts[i] in (bounds[i - 1], bounds[i]], the last count above all bounds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0


class SchedulerMetrics(Message, frozen=True, kw_only=True):
    """The state of one scheduler at `time` (Unix seconds). Fields that end in `_total` are counters, but for
    kv_tokens_total and pages_total, the size of the pool.
    """

    time: float
    dp_rank: int
    state: str
    weight_version: int
    uptime_s: float
    steps_total: int
    running: int
    waiting: int
    kv_tokens_total: int
    kv_tokens_used: int
    kv_tokens_cached: int
    prefill_tokens_total: int
    decode_tokens_total: int
    cached_tokens_total: int
    """Prompt tokens taken from the prefix cache."""
    prompt_tokens_total: int
    requests_total: int
    evicted_tokens_total: int
    retractions_total: int
    """Choices put back into the queue for lack of memory."""
    asked_retractions_total: int = 0
    """Choices put back into the queue by a pause or a swap of the weights."""
    flushes_total: int = 0
    """How many times the prefix cache was emptied, updates of the weights included."""
    bad_frames_total: int = 0
    max_running: int = 0
    """The most choices that may run at once."""
    step_s: float = 0.0
    """Seconds that the last step took."""
    in_step_s: float = 0.0
    """How long the oldest step that is under way has taken so far; 0 where none is."""
    compiling: int = 0
    """Grammars that are being compiled, for which requests may be waiting."""
    pages_total: int = 0
    active_s: float = 0.0
    """Seconds since the start with a step in some pipeline stage. Less a rank's `busy_s` it is the rank's bubble."""
    itl: Histogram = Histogram()
    """Seconds between consecutive tokens of a choice."""
    processes: tuple[ProcessInfo, ...] = ()
    requests: tuple[RequestInfo, ...] = ()


class HttpMetrics(Message, frozen=True, kw_only=True):
    """The front's metrics: choices by outcome, and latencies in seconds (metrics.py)."""

    time: float
    outcomes: dict[str, int]
    ttft: Histogram
    e2e: Histogram
    queue: Histogram
    processes: tuple[ProcessInfo, ...] = ()
    routed: dict[str, int] = {}
    """Requests by the reason for the choice of their replica (routing.py)."""


# ---- what may travel where -----------------------------------------------------------------------------------------

ControlReqInput = (
    PingReqInput
    | AbortReqInput
    | FlushCacheReqInput
    | UpdateWeightReqInput
    | PauseGenerationReqInput
    | ContinueGenerationReqInput
    | DrainReqInput
    | GetLoadReqInput
    | ListRequestsReqInput
    | GetStatusReqInput
    | SubscribeMetricsReqInput
)
ControlReqOutput = (
    PingReqOutput
    | AbortReqOutput
    | FlushCacheReqOutput
    | UpdateWeightReqOutput
    | PauseGenerationReqOutput
    | ContinueGenerationReqOutput
    | DrainReqOutput
    | GetLoadReqOutput
    | ListRequestsReqOutput
    | GetStatusReqOutput
    | SubscribeMetricsReqOutput
)
TokenizedReqInput = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
SchedulerInput = TokenizedReqInput | ControlReqInput
DetokenizerInput = BatchTokenIDOutput | BatchEmbeddingOutput | SubscribeMetricsReqInput
TokenizerManagerInput = BatchStrOutput | BatchEmbeddingOutput | Heartbeat | SubscribeMetricsReqInput | ControlReqOutput
MetricsInput = SchedulerMetrics | HttpMetrics
RpcOutput = RpcProgress | RpcError | ControlReqOutput
AnyMessage = (
    SchedulerInput
    | DetokenizerInput
    | TokenizerManagerInput
    | MetricsInput
    | RpcOutput
    | GenerateReqInput
    | EmbeddingReqInput
)


class RpcEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """One RPC frame. The version is read before the body, so that a mismatch can be reported.

    `timeout_s` is how long the caller waits for the answer.
    """

    protocol: int
    call_id: str
    timeout_s: float
    body: bytes
    """An encoded message: a ControlReqInput to the scheduler, an RpcOutput back."""
