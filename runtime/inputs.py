"""The requests of Engine, made from the arguments of its methods."""

import uuid
from typing import Any, Literal

import msgspec
import numpy as np

from llmserve.runtime.grammar import constraint_of
from llmserve.runtime.messages import EmbeddingReqInput, GenerateReqInput, SamplingParams
from llmserve.runtime.request_error import RequestError

Prompt = str | list[int]
"""A text, or token ids."""
Prompts = list[str] | list[list[int]]
Pooling = Literal["mean", "last"]

CONSTRAINTS = {"json_schema", "regex", "choice", "grammar"}
REQUEST_OPTIONS = CONSTRAINTS | {"n", "rid", "logprobs", "add_special_tokens", "skip_special_tokens", "user"}


def generate_request(
    prompt: Prompt, params: SamplingParams | None, options: dict[str, Any], stream: bool = False
) -> GenerateReqInput:
    """The request for one prompt. Raises TypeError for an unknown option, and RequestError 400 for a value of the wrong
    type.
    """
    unknown = options.keys() - REQUEST_OPTIONS - set(SamplingParams.__struct_fields__)
    if unknown:
        known = sorted(REQUEST_OPTIONS | set(SamplingParams.__struct_fields__))
        raise TypeError(f"unknown option {min(unknown)!r}; known: {', '.join(known)}")
    given = msgspec.structs.asdict(params or SamplingParams())
    given |= {name: value for name, value in options.items() if name not in REQUEST_OPTIONS}
    if isinstance(given["stop"], str):
        given["stop"] = (given["stop"],)
    if isinstance(given["logit_bias"], dict):
        given["logit_bias"] = tuple(given["logit_bias"].items())
    top = options.get("logprobs")
    fields = {
        "rid": options.get("rid") or uuid.uuid4().hex,
        "n": options.get("n", 1),
        "sampling_params": given,
        "constraint": constraint_of(**{name: options.get(name) for name in CONSTRAINTS}),
        "logprobs": None if top is None else {"top": top},
        "add_special_tokens": options.get("add_special_tokens", True),
        "skip_special_tokens": options.get("skip_special_tokens", True),
        "user": options.get("user", ""),
        "stream": stream,
        "type": GenerateReqInput.__name__,
        **_prompts(prompt),
    }
    try:
        return msgspec.convert(fields, GenerateReqInput)
    except msgspec.ValidationError as error:
        raise RequestError(400, str(error)) from None


def embedding_request(prompt: Prompt, pooling: Pooling, normalize: bool) -> EmbeddingReqInput:
    return EmbeddingReqInput(rid=uuid.uuid4().hex, pooling=pooling, normalize=normalize, **_prompts(prompt))


def is_one(prompt: Any) -> bool:
    """Whether it is one Prompt, rather than a list of them."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | np.integer))


def _prompts(prompt: Prompt) -> dict[str, Any]:
    """The prompt as fields of a request."""
    return {"texts": (prompt,)} if isinstance(prompt, str) else {"input_ids": (tuple(map(int, prompt)),)}
