"""OpenAI's own Python client against a real instance."""

import math
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from instances import PATIENCE_S, RunningInstance

MODEL = "tiny-llama"
CHAT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who are you?"},
]


@pytest.fixture(scope="module")
def client(server: RunningInstance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="def main(", max_tokens=12, temperature=0)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = [*client.completions.create(model=MODEL, prompt="def main(", max_tokens=12, temperature=0, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_several_prompts_and_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=6, seed=7, temperature=1)
    alone = client.completions.create(model=MODEL, prompt="b", max_tokens=6, seed=8, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[3].text == alone.choices[0].text, "choice j of a prompt draws with seed + j"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="import", max_tokens=5, temperature=0, logprobs=3, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert logprobs.token_logprobs[0] is None
    for token, logprob, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[
        -5:
    ]:
        assert top[token] == logprob == max(top.values()), "greedy takes the likeliest"
        assert len(top) == 3


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=12, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 12)


def test_a_chat_uses_the_models_template(client: openai.OpenAI, server: RunningInstance) -> None:
    """The same tokens as when the template is written out by hand."""
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in CHAT)  # type: ignore[typeddict-item]
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, temperature=0)
    written = client.completions.create(
        model=MODEL, prompt=text + "<|im_start|>assistant\n", max_tokens=8, temperature=0
    )
    assert chat.choices[0].message.content == written.choices[0].text
    assert chat.usage is not None
    assert written.usage is not None
    assert chat.usage.prompt_tokens == written.usage.prompt_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode("utf-8", "replace") == answer.choices[0].message.content


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 by default."""
    answer = client.embeddings.create(model=MODEL, input=["one", "two", "one"])
    one, two, again = (item.embedding for item in answer.data)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert len(one) == 64
    assert one == pytest.approx(again, abs=1e-5)
    assert one != pytest.approx(two, abs=1e-2)
    assert math.sqrt(sum(x * x for x in one)) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens > 0
    numbers = client.embeddings.create(model=MODEL, input="one", encoding_format="float")
    assert numbers.data[0].embedding == pytest.approx(one, abs=1e-5)


def test_embedding_pooling_and_normalization(client: openai.OpenAI) -> None:
    text = "import sys, os"
    last, mean, raw = (
        client.embeddings.create(model=MODEL, input=text, extra_body=extra).data[0].embedding
        for extra in ({}, {"pooling": "mean"}, {"normalize": False})
    )
    assert last != pytest.approx(mean, abs=1e-2)
    length = math.sqrt(sum(x * x for x in raw))
    assert length != pytest.approx(1, abs=0.1)
    assert [x / length for x in raw] == pytest.approx(last, abs=1e-5)


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(model=MODEL, messages=CHAT, store=True)
    assert unsupported.value.param == "store"


async def test_the_async_client_streams(server: RunningInstance) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8, stream=True, seed=1)
        finish = [chunk.choices[0].finish_reason async for chunk in stream]
    assert finish[-1] in ("length", "stop")
