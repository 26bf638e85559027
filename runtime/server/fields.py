"""The parameters that both OpenAI APIs have in common, and the refusal of those that are not supported.

Every parameter is honoured or refused by name. Unsupported ones are accepted only with a neutral value that asks for
nothing, such as "functions": []. `null` means absent, as at OpenAI. Ranges are checked in validation.py.
"""

import re
from typing import NamedTuple, TypeVar

import msgspec

from llmserve.runtime.messages import FILL_CONTEXT, UNSEEDED, SamplingParams
from llmserve.runtime.models.sampling_defaults import SamplingDefaults
from llmserve.runtime.server.body import invalid
from llmserve.runtime.server.structured import ResponseFormat, StructuredOutputs

T = TypeVar("T")

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
"""Canonical decimal, so that no id can be given twice."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters that have the same name everywhere."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None


class OpenAIFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a completion and a chat completion have in common."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    rid: str | None = None
    """The request id for `llmserve abort` and the log, and the answer's `id`; generated if absent."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """Constraints that `response_format` cannot express, as in vLLM."""

    # Refused unless their value is neutral: see UNSUPPORTED.
    store: object = None
    service_tier: object = None
    prediction: object = None
    # Accepted and ignored, because they cannot change an answer, here or at OpenAI.
    metadata: object = None
    prompt_cache_key: object = None
    safety_identifier: object = None


class Unsupported(NamedTuple):
    neutral: tuple[object, ...]
    instead: str


UNSUPPORTED: dict[str, Unsupported] = {
    "store": Unsupported((False,), "completions are not stored"),
    "service_tier": Unsupported(("auto", "default"), "there is one service tier"),
    "prediction": Unsupported((), "predicted outputs are not supported"),
    "suffix": Unsupported(("",), "the text after the completion cannot be given"),
    "functions": Unsupported(([],), "give tools and tool_choice instead"),
    "function_call": Unsupported(("none",), "give tools and tool_choice instead"),
    "modalities": Unsupported((["text"],), "only text is generated"),
    "audio": Unsupported((), "only text is generated"),
    "web_search_options": Unsupported((), "the web is not searched"),
    "reasoning_effort": Unsupported(("none",), "the effort of reasoning cannot be set"),
    "verbosity": Unsupported(("medium",), "the verbosity cannot be set"),
}


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raises RequestError 400 for the first field of `body` in UNSUPPORTED that has no neutral value."""
    for name in body.__struct_fields__:
        rule = UNSUPPORTED.get(name)
        if rule is None:
            continue
        value = getattr(body, name)
        if value is not None and value not in rule.neutral:
            raise invalid(f"{name} is not supported with this value: {rule.instead}", name, "unsupported_parameter")


def check_stream_options(body: OpenAIFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")


def wants_usage(body: OpenAIFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def given(value: T | None, default: T) -> T:
    return default if value is None else value


def check_max_tokens(value: int | None, name: str = "max_tokens") -> None:
    if value is not None and value < 1:
        raise invalid(f"{name} is {value}; it must be 1 or more", name)


def sampling_params(
    body: SamplingFields, defaults: SamplingDefaults, max_tokens: int | None, min_tokens: int | None
) -> SamplingParams:
    """The sampling parameters of a request; what it leaves out is as in `defaults`, or else OpenAI's default.

    `max_tokens` None means as many as the context has room for. `top_k` -1 means off, like 0, because clients of other
    servers send it.
    """
    if body.seed == UNSEEDED:
        raise invalid(f"seed is {body.seed}; it must be above that", "seed")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_new_tokens=given(max_tokens, FILL_CONTEXT),
        min_new_tokens=given(min_tokens, 0),
        temperature=given(body.temperature, defaults.temperature),
        top_p=given(body.top_p, defaults.top_p),
        top_k=0 if body.top_k == -1 else given(body.top_k, defaults.top_k),
        min_p=given(body.min_p, defaults.min_p),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        repetition_penalty=given(body.repetition_penalty, defaults.repetition_penalty),
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=given(body.ignore_eos, False),
        seed=given(body.seed, UNSEEDED),
        logit_bias=_logit_bias_pairs(body.logit_bias),
    )


def _logit_bias_pairs(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs from a JSON object, whose keys are strings: {"50256": -100}."""
    bias = bias or {}
    if wrong := [key for key in bias if not _TOKEN_ID.fullmatch(key)]:
        raise invalid(f"the keys of logit_bias must be token ids, not {wrong[0]!r}", "logit_bias")
    return tuple((int(token_id), value) for token_id, value in bias.items())
