"""Validation of a request against the limits of the model. A refusal is a RequestError 400 that names the parameter.

Used for requests from HTTP and from Engine alike. The shape of HTTP bodies is checked in server/, and whether there is
room for a request now in scheduler/intake.py.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llmserve.runtime.messages import FILL_CONTEXT, EmbeddingReqInput, GenerateReqInput, SamplingParams
from llmserve.runtime.request_error import RequestError

MAX_RID_LENGTH = 256
MAX_USER_LENGTH = 256
MAX_CHOICES_PER_PROMPT = 128
MAX_CHOICES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20


class Limits(NamedTuple):
    """Limits of the model that is served. `max_model_len` is the tokens of prompt and output together."""

    vocab_size: int
    max_model_len: int


def check_before_tokenizing(req: GenerateReqInput, limits: Limits) -> None:
    """Checks everything that does not depend on the tokens of the prompts. Raises RequestError 400."""
    _check_common(req)
    _in_range("n", req.n, 1, MAX_CHOICES_PER_PROMPT)
    choices = req.n * _number_of_prompts(req)
    if choices > MAX_CHOICES:
        param = prompt_param(req) if req.n == 1 else "n"
        raise _refusal(param, f"n times the number of prompts is {choices}; at most {MAX_CHOICES} choices a request")
    if req.logprobs is not None:
        _in_range("top_logprobs", req.logprobs.top, 0, min(MAX_TOP_LOGPROBS, limits.vocab_size))
    # With prompt logprobs it is allowed to generate no token.
    least = 0 if req.logprobs is not None and req.logprobs.prompt else 1
    _check_sampling(req.sampling_params, limits, least)


def check_embedding_before_tokenizing(req: EmbeddingReqInput) -> None:
    """Checks everything that does not depend on the tokens of the inputs. Raises RequestError 400."""
    _check_common(req)
    if _number_of_prompts(req) > MAX_CHOICES:
        raise _refusal("input", f"at most {MAX_CHOICES} inputs a request, not {_number_of_prompts(req)}")


def check_text_length(text: str, limits: Limits, longest_token: int, param: str) -> None:
    """Refuses a text that is too long whatever its tokens are, before time is spent on tokenizing it. Raises
    RequestError 400.

    `longest_token`: characters of the longest token of the vocabulary.
    """
    least = len(text) // longest_token
    if least > limits.max_model_len:
        raise _too_long(param, f"at least {least}", limits)


def check_prompts(prompts: Sequence[Sequence[int]], limits: Limits, param: str, room: int = 0) -> None:
    """Checks the token ids of prompts, each of which must leave `room` tokens of the context. Raises RequestError
    400.
    """
    for ids in prompts:
        if not ids:
            raise _refusal(param, f"the {param} is empty: the model needs at least one token to begin from")
        if len(ids) + room > limits.max_model_len:
            raise _too_long(param, str(len(ids)), limits)
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            bad = next(token_id for token_id in ids if not 0 <= token_id < limits.vocab_size)
            raise _refusal(param, f"token id {bad} is not in the vocabulary: ids are 0 to {limits.vocab_size - 1}")


def resolve_max_new_tokens(params: SamplingParams, longest_prompt: int, limits: Limits) -> int:
    """`max_new_tokens` with FILL_CONTEXT resolved. Raises RequestError 400 when prompt and output do not fit."""
    room = limits.max_model_len - longest_prompt
    if params.max_new_tokens == FILL_CONTEXT:
        if params.min_new_tokens > room:
            raise _refusal("min_tokens", f"the context has room for {room} tokens, not for {params.min_new_tokens}")
        return room
    if params.max_new_tokens > room:
        raise RequestError(
            400,
            f"the prompt has {longest_prompt} tokens and max_tokens is {params.max_new_tokens}, which is more than the "
            f"model's context of {limits.max_model_len} tokens: shorten the prompt or ask for at most {room} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return params.max_new_tokens


def _check_common(req: GenerateReqInput | EmbeddingReqInput) -> None:
    if not 0 < len(req.rid) <= MAX_RID_LENGTH:
        raise _refusal("rid", f"a rid has 1 to {MAX_RID_LENGTH} characters, not {len(req.rid)}")
    if len(req.user) > MAX_USER_LENGTH:
        raise _refusal("user", f"a user has at most {MAX_USER_LENGTH} characters, not {len(req.user)}")
    param = prompt_param(req)
    if bool(req.texts) == bool(req.input_ids):
        what = "both texts and token ids were given" if req.texts else "there is no prompt"
        raise _refusal(param, f"{what}: give texts or token ids")
    if "" in req.texts:
        raise _refusal(param, f"the {param} is empty: the model needs at least one token to begin from")


def prompt_param(req: GenerateReqInput | EmbeddingReqInput) -> str:
    """The name of the prompts in OpenAI's API, for errors."""
    return "prompt" if isinstance(req, GenerateReqInput) else "input"


def _number_of_prompts(req: GenerateReqInput | EmbeddingReqInput) -> int:
    return len(req.texts) or len(req.input_ids)


def _check_sampling(params: SamplingParams, limits: Limits, least_new_tokens: int) -> None:
    if params.max_new_tokens != FILL_CONTEXT:
        _in_range("max_tokens", params.max_new_tokens, least_new_tokens, None)
        _in_range("min_tokens", params.min_new_tokens, 0, params.max_new_tokens, "max_tokens")
    else:
        _in_range("min_tokens", params.min_new_tokens, 0, None)
    _in_range("temperature", params.temperature, 0, 2)
    _in_range("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        raise _refusal("top_p", "top_p must be above 0; for the likeliest token always, set temperature to 0")
    _in_range("top_k", params.top_k, 0, None)
    _in_range("min_p", params.min_p, 0, 1)
    _in_range("presence_penalty", params.presence_penalty, -2, 2)
    _in_range("frequency_penalty", params.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", params.repetition_penalty, 0.01, 100)
    _in_range("seed", params.seed, -(1 << 63), (1 << 63) - 1)
    _check_stop(params, limits)
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise _refusal("logit_bias", f"at most {MAX_LOGIT_BIAS} biases a request, not {len(params.logit_bias)}")
    for token_id, bias in params.logit_bias:
        _check_token_id("logit_bias", token_id, limits)
        _in_range("logit_bias", bias, -100, 100)


def _check_stop(params: SamplingParams, limits: Limits) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise _refusal("stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(params.stop)}")
    for stop in params.stop:
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise _refusal("stop", f"a stop string has 1 to {MAX_STOP_LENGTH} characters, not {len(stop)}")
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise _refusal("stop_token_ids", f"at most {MAX_STOP_TOKENS} stop tokens, not {len(params.stop_token_ids)}")
    for token_id in params.stop_token_ids:
        _check_token_id("stop_token_ids", token_id, limits)


def _check_token_id(param: str, token_id: int, limits: Limits) -> None:
    if not 0 <= token_id < limits.vocab_size:
        raise _refusal(
            param, f"{param}: token id {token_id} is not in the vocabulary: ids are 0 to {limits.vocab_size - 1}"
        )


def _in_range(param: str, value: float, low: float, high: float | None, high_name: str = "") -> None:
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        if high is None:
            expected = f"{low} or more"
        else:
            expected = f"between {low} and {f'{high_name} ({high})' if high_name else high}"
        raise _refusal(param, f"{param} is {value}; it must be {expected}")


def _too_long(param: str, tokens: str, limits: Limits) -> RequestError:
    return RequestError(
        400,
        f"the {param} has {tokens} tokens, too many for the model's context of {limits.max_model_len} tokens",
        param=param,
        code="context_length_exceeded",
    )


def _refusal(param: str, message: str) -> RequestError:
    return RequestError(400, message, param=param)
