"""Every message that crosses a socket, and the rows that messages are made of.

Nothing here knows about sockets (wire.py) or about how a message is handled. A request is an `XReqInput`, its answer
an `XReqOutput`. Token ids travel as little-endian int32 bytes and vectors as float32 bytes, never as lists of numbers.
"""

from typing import Generic, Literal, TypeVar

import msgspec

PROTOCOL_VERSION = 1
"""To be raised with every change of a message: a field that the receiver does not know makes a frame a bad one."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all that is sent alone in a frame; the tag is the class name."""


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of what belongs together inside a message; encoded by position, so that a row costs no field names."""


# ---- sampling ----------------------------------------------------------------------------------------------------


FILL_CONTEXT = -1
"""As `max_new_tokens`: as many as the model's context has room for."""
UNSEEDED = -(1 << 63)
"""As `seed`: any."""
MIN_TEMPERATURE = 1e-5
"""Below it the likeliest token is drawn: dividing logits by so little would overflow."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen.

    The TokenizerManager validates it against the model and replaces FILL_CONTEXT and UNSEEDED by numbers before it
    reaches the scheduler. Choice j of a prompt draws with `seed + j`. `top_k` 0 means off. `logit_bias` holds
    (token id, bias) pairs.
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
        """Whether the choice of a token depends on the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which logprobs a request wants: always the chosen token's, the `top` likeliest too, the prompt's if `prompt`."""

    top: int = 0
    prompt: bool = False


class Constraint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text of every choice must match: a JSON schema, a regular expression, one of the choices in a JSON list,
    or a grammar as Lark writes it, or as either Lark or llama.cpp (GBNF) do.
    """

    kind: Literal["json_schema", "regex", "choice", "lark", "grammar"]
    text: str
    param: str
    """What the client calls it: refusals name it."""


# ---- requests ----------------------------------------------------------------------------------------------------


class GenerateReqInput(Message, frozen=True, kw_only=True):
    """What a client asks of the TokenizerManager. Exactly one of `texts` and `input_ids` is not empty.

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
    """A request for one vector a prompt."""

    rid: str
    texts: tuple[str, ...] = ()
    input_ids: tuple[tuple[int, ...], ...] = ()
    pooling: Literal["mean", "last"] = "last"
    normalize: bool = True
    user: str = ""


class TokenizedGenerateReqInput(Message, frozen=True, kw_only=True):
    """A generation request after tokenization: each of `prompts` is int32 bytes, each is continued `n` times.

    The scheduler accepts or refuses all its choices together.
    """

    rid: str
    prompts: tuple[bytes, ...]
    sampling_params: SamplingParams
    n: int = 1
    grammar: str = ""
    """A constraint as runtime/grammar.py writes it; empty: none."""
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
    """Why a request ended. For "abort" and "error", `status` is the HTTP status and `message` the text for the client.

    `matched` is the stop string or stop token id that ended it, None when the model ended it by itself.
    """

    type: Literal["stop", "length", "abort", "error"]
    matched: int | str | None = None
    status: int = 200
    message: str = ""


class Logprobs(Row, frozen=True, kw_only=True):
    """Logprobs of k consecutive tokens: float32 [k]; int32 and float32 [k, top].

    A logprob that does not exist (the first token of a prompt) is NaN.
    """

    token_logprobs: bytes
    top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""


class TokenIDRow(Row, frozen=True, kw_only=True):
    """What is new of one choice since its last row. Token counts are totals so far."""

    rid: str
    index: int
    output_ids: bytes
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    """In the choice's first row only, [prompt_tokens]."""
    stop: tuple[str, ...] = ()
    """In the choice's first row only: the stop strings that the detokenizer withholds and trims."""
    skip_special_tokens: bool = True
    queue_s: float = 0.0
    """Seconds between the arrival and the first step that ran it."""
    min_new_tokens: int = 0
    """In the choice's first row only: a stop string counts only when it ends after so many tokens."""


class StrRow(Row, frozen=True, kw_only=True):
    """A TokenIDRow with its text: what is new and certain, stop strings trimmed and partial characters withheld."""

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
    """One prompt's vector as float32 bytes, or the reason there is none."""

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
    """The detokenizer lives: it says so to the front every second, busy or idle."""


# ---- control -----------------------------------------------------------------------------------------------------

PauseMode = Literal["drain", "retract", "abort"]
DEFAULT_PAUSE_MODE: PauseMode = "retract"
"""It acts at once and ends nothing; "drain" takes as long as the longest answer."""
Answer = TypeVar("Answer")


class ControlRequest(Message, Generic[Answer], frozen=True, kw_only=True):
    """Base of what an operator asks of a scheduler; generic in the message that answers it."""


class PingReqInput(ControlRequest["PingReqOutput"], frozen=True, kw_only=True):
    pass


class PingReqOutput(Message, frozen=True, kw_only=True):
    """`step` counts the steps since the start: it moves while the scheduler works."""

    step: int
    state: str
    in_step_s: float = 0.0
    """How long the oldest step that is under way has taken so far; 0 where none is."""


class AbortReqInput(ControlRequest["AbortReqOutput"], frozen=True, kw_only=True):
    """Ends requests: those named exactly by `rids` and those chosen by the bulk fields. An empty one ends nothing."""

    rids: tuple[str, ...] = ()
    prefix: str = ""
    older_than_s: float | None = None
    everything: bool = False
    message: str = "aborted"


class AbortReqOutput(Message, frozen=True, kw_only=True):
    """Sent after the memory is back. `not_found` holds those of the named rids that neither wait nor run."""

    aborted: tuple[str, ...]
    not_found: tuple[str, ...] = ()


class FlushCacheReqInput(ControlRequest["FlushCacheReqOutput"], frozen=True, kw_only=True):
    """Empties the prefix cache. While requests run: refused (code "busy"), or waits `wait_s`, or aborts them."""

    wait_s: float = 0.0
    abort: bool = False


class FlushCacheReqOutput(Message, frozen=True, kw_only=True):
    pages_freed: int
    bytes_freed: int
    aborted: tuple[str, ...] = ()


class UpdateWeightReqInput(ControlRequest["UpdateWeightReqOutput"], frozen=True, kw_only=True):
    """Swaps the weights for those of another checkpoint of the same model."""

    model_path: str
    load_format: Literal["auto", "safetensors", "gguf"] = "auto"
    mode: PauseMode = DEFAULT_PAUSE_MODE
    dry_run: bool = False
    decision: str = ""
    """With several replicas: the name of the file that says whether all of them go on (runtime/decision.py)."""


class UpdateWeightReqOutput(Message, frozen=True, kw_only=True):
    old_version: int
    new_version: int
    model_path: str
    bytes: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    differences: tuple[str, ...] = ()
    """For a dry run: what differs from the model, a line each; empty when the swap would be accepted."""


class PauseGenerationReqInput(ControlRequest["PauseGenerationReqOutput"], frozen=True, kw_only=True):
    """Stops steps. "drain" lets what runs end first, "retract" frees its memory and keeps it, "abort" ends it."""

    mode: PauseMode = DEFAULT_PAUSE_MODE


class PauseGenerationReqOutput(Message, frozen=True, kw_only=True):
    retracted: int = 0
    aborted: int = 0


class ContinueGenerationReqInput(ControlRequest["ContinueGenerationReqOutput"], frozen=True, kw_only=True):
    """Ends a pause, and a drain that DrainReqInput began."""


class ContinueGenerationReqOutput(Message, frozen=True, kw_only=True):
    resumed: int = 0


class DrainReqInput(ControlRequest["DrainReqOutput"], frozen=True, kw_only=True):
    """Refuses new requests from now on. Answered at once; `running + waiting` of GetLoad tells how far it is."""


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
    """One process of the instance. `role` is "main", "scheduler" or "detokenizer"."""

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
    """Time in steps since the start but for waiting for the stage before."""
    collectives: dict[str, dict[str, int]] = {}
    """{"calls", "bytes"} by operation since the start; empty where a rank is alone."""
    silent_s: float = 0.0
    """How long ago it was last heard of, where another process speaks of it."""


class GetStatusReqInput(ControlRequest["GetStatusReqOutput"], frozen=True, kw_only=True):
    pass


class GetStatusReqOutput(Message, frozen=True, kw_only=True):
    """One instance in depth. `options` are the ServerArgs in effect, without secrets; `chosen` names those of them that
    the instance has chosen by itself.
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
    """Asks for metrics for `lease_s`, pushed to `endpoint`: the bare name, watch-…, of a socket that the caller has
    bound in the instance's directory.
    """

    endpoint: str
    lease_s: float = 10.0


class SubscribeMetricsReqOutput(Message, frozen=True, kw_only=True):
    lease_s: float


# ---- RPC envelope ------------------------------------------------------------------------------------------------


class RpcProgress(Message, frozen=True, kw_only=True):
    """Comes any number of times before the answer; `done` and `total` in `unit`."""

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
    """Since the start: counts[i] observations in (bounds[i - 1], bounds[i]], the last count being above all bounds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0


class SchedulerMetrics(Message, frozen=True, kw_only=True):
    """The state of one scheduler at `time` (Unix seconds). Names ending in `_total` only grow."""

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
    """Choices put back into the queue for want of memory."""
    asked_retractions_total: int = 0
    """Choices put back because a pause or a swap of the weights asked for their memory."""
    flushes_total: int = 0
    """Times that the prefix cache was emptied, which an update of the weights does too."""
    bad_frames_total: int = 0
    max_running: int = 0
    """So many choices may run at once."""
    step_s: float = 0.0
    """The duration of the last step."""
    in_step_s: float = 0.0
    """How long the oldest step that is under way has taken so far; 0 where none is."""
    pages_total: int = 0
    active_s: float = 0.0
    """Time since the start with a step in some stage: of this a stage that is not busy has waited the rest."""
    itl: Histogram = Histogram()
    """Seconds between the tokens of a choice, each token for itself."""
    processes: tuple[ProcessInfo, ...] = ()
    requests: tuple[RequestInfo, ...] = ()


class HttpMetrics(Message, frozen=True, kw_only=True):
    """What the front sees: outcomes by reason and the clients' latencies in seconds."""

    time: float
    outcomes: dict[str, int]
    ttft: Histogram
    e2e: Histogram
    queue: Histogram
    processes: tuple[ProcessInfo, ...] = ()
    routed: dict[str, int] = {}
    """Requests by the reason why they went to the replica that they went to."""


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
    """One RPC frame. The version is read before the body, so that another version is told so.

    `timeout_s` is how long the caller waits: work that cannot be answered by then is not begun.
    """

    protocol: int
    call_id: str
    timeout_s: float
    body: bytes
    """An encoded message: a ControlReqInput towards the scheduler, an RpcOutput back."""
