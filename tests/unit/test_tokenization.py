"""What becomes of a client's request before it is sent: its tokens, its defaults, its grammar, or a refusal by name."""

from collections.abc import Iterator
from typing import Any

import pytest
import small_tokenizers

from llmserve.runtime.config import ServerArgs
from llmserve.runtime.engine.batch import int32_array
from llmserve.runtime.grammar import grammar_of
from llmserve.runtime.messages import (
    FILL_CONTEXT,
    Constraint,
    EmbeddingReqInput,
    GenerateReqInput,
    LogprobOptions,
    SamplingParams,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.tokenization import Tokenization
from llmserve.runtime.tokenizer import Tokenizer

TOKENIZER = Tokenizer(small_tokenizers.byte_level(), {}, {})
MAX_MODEL_LEN = 100


def make(max_model_len: int = MAX_MODEL_LEN, eos_token_ids: tuple[int, ...] = (1,)) -> Tokenization:
    config: Any = type("Config", (), {"vocab_size": 400, "eos_token_ids": eos_token_ids})
    return Tokenization(ServerArgs(model="test", seed=1, max_model_len=max_model_len), config, TOKENIZER)


@pytest.fixture
def tokenization() -> Iterator[Tokenization]:
    tokenization = make()
    yield tokenization
    tokenization.close()


async def tokenized(tokenization: Tokenization, **fields: Any) -> TokenizedGenerateReqInput:
    """What a request becomes, whose sampling parameters may be among `fields`."""
    params = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
    fields = {"rid": "r", "texts": () if "input_ids" in fields else ("Hello",), **fields}
    req = GenerateReqInput(sampling_params=SamplingParams(**{"max_new_tokens": 8, **params}), **fields)
    message = await tokenization.run(req)
    assert isinstance(message, TokenizedGenerateReqInput)
    return message


async def test_a_long_text_is_shown_in_part_only() -> None:
    text = "The quick brown fox " * 1000
    message = await tokenized(make(max_model_len=100_000), texts=(text, "b"))
    assert int32_array(message.prompts[0]).tolist() == TOKENIZER.encode(text)
    assert message.text == text[:200]


async def test_an_embedding_needs_no_room_for_more(tokenization: Tokenization) -> None:
    message = await tokenization.run(EmbeddingReqInput(rid="e", input_ids=((1,) * MAX_MODEL_LEN,), pooling="mean"))
    assert isinstance(message, TokenizedEmbeddingReqInput)
    assert (message.pooling, len(message.prompts[0])) == ("mean", 4 * MAX_MODEL_LEN)


# ---- what the client leaves open -----------------------------------------------------------------------------------


async def test_the_context_is_filled_when_no_maximum_is_given(tokenization: Tokenization) -> None:
    message = await tokenized(tokenization, input_ids=((1,) * 30, (1,) * 40), max_new_tokens=FILL_CONTEXT)
    assert message.sampling_params.max_new_tokens == MAX_MODEL_LEN - 40


async def test_a_given_maximum_and_seed_are_kept(tokenization: Tokenization) -> None:
    params = (await tokenized(tokenization, max_new_tokens=7, seed=-1)).sampling_params
    assert (params.max_new_tokens, params.seed) == (7, -1)


async def test_requests_without_a_seed_get_different_ones(tokenization: Tokenization) -> None:
    seeds = [(await tokenized(tokenization)).sampling_params.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 1 << 62 for seed in seeds)
    same_launch = make()  # with the same --seed
    assert [(await tokenized(same_launch)).sampling_params.seed for _ in range(3)] == seeds
    same_launch.close()


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("rid", {"rid": ""}),
        ("rid", {"rid": "x" * 257}),
        ("prompt", {"texts": ("",)}),
        ("prompt", {"texts": ()}),
        ("prompt", {"input_ids": ((),)}),
        ("prompt", {"texts": ("a",), "input_ids": ((1,),)}),
        ("prompt", {"input_ids": ((400,),)}),
        ("prompt", {"input_ids": ((1, -1),)}),
        ("prompt", {"input_ids": ((1,) * 100,)}),
        ("prompt", {"texts": ("word " * 100_000,)}),
        ("max_tokens", {"input_ids": ((1,) * 90,), "max_new_tokens": 11}),
        ("max_tokens", {"max_new_tokens": 10**9}),
        ("max_tokens", {"max_new_tokens": 0}),
        ("max_tokens", {"max_new_tokens": -2}),
        ("min_tokens", {"min_new_tokens": 9}),
        ("min_tokens", {"min_new_tokens": 100, "max_new_tokens": FILL_CONTEXT}),
        ("n", {"n": 0}),
        ("n", {"n": 10**6}),
        ("n", {"n": 128, "texts": ("a",) * 9}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": float("inf")}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": 1.5}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": float("-inf")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("stop", {"stop": ("",)}),
        ("stop", {"stop": ("x" * 257,)}),
        ("stop", {"stop": ("x",) * 17}),
        ("stop_token_ids", {"stop_token_ids": (400,)}),
        ("stop_token_ids", {"stop_token_ids": (1,) * 129}),
        ("seed", {"seed": 1 << 63}),
        ("logit_bias", {"logit_bias": ((400, 1.0),)}),
        ("logit_bias", {"logit_bias": ((1, 100.5),)}),
        ("logit_bias", {"logit_bias": ((1, float("nan")),)}),
        ("logit_bias", {"logit_bias": ((1, 0.0),) * 1025}),
        ("top_logprobs", {"logprobs": LogprobOptions(top=10**6)}),
        ("top_logprobs", {"logprobs": LogprobOptions(top=-1)}),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    param: str, fields: dict[str, Any], tokenization: Tokenization
) -> None:
    with pytest.raises(RequestError) as caught:
        await tokenized(tokenization, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": ((1,) * 90,), "max_new_tokens": 10},
        {"input_ids": ((0, 399),), "temperature": 2.0, "top_p": 1.0, "min_p": 1.0, "stop": ("x" * 256,) * 16},
        {"n": 128, "texts": ("a",) * 8},
        {"logprobs": LogprobOptions(top=20, prompt=True), "max_new_tokens": 0, "logit_bias": ((399, -100.0),)},
    ],
)
async def test_the_limits_themselves_are_allowed(fields: dict[str, Any], tokenization: Tokenization) -> None:
    assert (await tokenized(tokenization, **fields)).rid == "r"


async def test_an_overlong_prompt_is_told_how_long_it_is(tokenization: Tokenization) -> None:
    with pytest.raises(RequestError, match=r"has 150 tokens.*100 tokens") as caught:
        await tokenized(tokenization, input_ids=((1,) * 150,))
    assert caught.value.code == "context_length_exceeded"


async def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenized(
    tokenization: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_batch", None)
    text = "x" * (MAX_MODEL_LEN + 1) * TOKENIZER.longest_token
    with pytest.raises(RequestError, match="at least 101 tokens, too many"):
        await tokenized(tokenization, texts=(text,))


async def test_an_embedding_has_at_most_1024_inputs(tokenization: Tokenization) -> None:
    assert await tokenization.run(EmbeddingReqInput(rid="e", input_ids=((1,),) * 1024))
    with pytest.raises(RequestError, match="at most 1024 inputs a request, not 1025") as caught:
        await tokenization.run(EmbeddingReqInput(rid="e", input_ids=((1,),) * 1025))
    assert caught.value.param == "input"


# ---- grammars ------------------------------------------------------------------------------------------------------


def regex(text: str) -> Constraint:
    return Constraint(kind="regex", text=text, param="the.regex")


async def test_what_the_text_must_match_is_read(tokenization: Tokenization) -> None:
    assert (await tokenized(tokenization, constraint=regex("a+"))).grammar == grammar_of(regex("a+"))
    with pytest.raises(RequestError) as caught:
        await tokenized(tokenization, constraint=regex("("))
    assert (caught.value.status, caught.value.param) == (400, "the.regex")


async def test_no_text_need_match_where_the_model_cannot_end_it() -> None:
    with pytest.raises(RequestError, match="ends a text") as caught:
        await tokenized(make(eos_token_ids=()), constraint=regex("a+"))
    assert caught.value.param == "the.regex"
