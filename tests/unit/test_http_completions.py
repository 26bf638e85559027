"""/v1/completions over scripted rows: prompts, streams, usage, logprobs, echo."""

import time

import pytest
from http_app import CHAT, COMPLETIONS, HI, MODEL, App

from llmserve.runtime.tokenizer import Tokenizer


async def test_a_completion_has_openais_shape(app: App) -> None:
    app.manager.script.cached_tokens = 1
    answer = (await app.post(COMPLETIONS, {"model": MODEL, "prompt": "hi hi", "max_tokens": 5})).json()
    prompt = len(app.manager.tokenizer.encode("hi hi"))
    output = len(app.manager.tokenizer.encode("Hello")) + len(app.manager.tokenizer.encode(" world"))
    assert answer.pop("id").startswith("cmpl-")
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ("a",), ()),
        (["a", "b"], ("a", "b"), ()),
        ([5, 6], (), ((5, 6),)),
        ([[5], [6, 7]], (), ((5,), (6, 7))),
    ],
)
async def test_every_form_of_prompt(
    app: App, prompt: object, texts: tuple[str, ...], ids: tuple[tuple[int, ...]]
) -> None:
    answer = (await app.post(COMPLETIONS, {"prompt": prompt, "n": 2})).json()
    assert (app.manager.last.texts, app.manager.last.input_ids) == (texts, ids)
    assert [choice["index"] for choice in answer["choices"]] == [*range(2 * (len(texts) + len(ids)))]


async def test_usage_counts_a_prompt_once_whatever_n(app: App) -> None:
    one = (await app.post(COMPLETIONS, {"prompt": ["a b", "c"]})).json()["usage"]
    three = (await app.post(COMPLETIONS, {"prompt": ["a b", "c"], "n": 3})).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]


async def test_a_streamed_completion(app: App) -> None:
    *chunks, done = await app.events(COMPLETIONS, {"prompt": "hi"})
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", " world"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert app.manager.last.stream


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})])
async def test_usage_comes_last_in_a_stream_that_asks_for_it(app: App, path: str, prompt: dict[str, object]) -> None:
    *chunks, usage, done = await app.events(path, {**prompt, "stream_options": {"include_usage": True}})
    whole = (await app.post(path, prompt)).json()
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])


async def test_rows_without_news_make_no_event(app: App) -> None:
    app.manager.script.pieces = ("", "Hello", "", "")
    *chunks, _ = await app.events(COMPLETIONS, {"prompt": "hi"})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    *chunks, _ = await app.events(CHAT, {"messages": HI})
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": "Hello"}, {}]


async def test_choices_of_a_stream_are_told_apart(app: App) -> None:
    *chunks, _ = await app.events(COMPLETIONS, {"prompt": ["a", "b"], "n": 2})
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello world")


async def test_logprobs_of_a_completion(app: App, tokenizer: Tokenizer) -> None:
    app.manager.script.pieces = ("ab", "ü")
    answer = (await app.post(COMPLETIONS, {"prompt": "hi", "logprobs": 2})).json()
    (choice,) = answer["choices"]
    ids = [*tokenizer.encode("ab", False), *tokenizer.encode("ü", False)]
    logprobs = choice["logprobs"]
    assert app.manager.last.logprobs is not None
    assert (app.manager.last.logprobs.top, app.manager.last.logprobs.prompt) == (2, False)
    assert len(logprobs["tokens"]) == len(ids)
    assert logprobs["tokens"][0] == tokenizer.token_text(ids[0])
    assert logprobs["token_logprobs"][0] == -0.5
    likeliest = {tokenizer.token_text(0): -0.25, tokenizer.token_text(1): -0.5}
    assert logprobs["top_logprobs"][0] == likeliest | {tokenizer.token_text(ids[0]): -0.5}
    assert logprobs["text_offset"][0] == 0
    assert all(
        choice["text"][at:].startswith(text)
        for at, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        if not text.startswith("bytes:")
    )


async def test_logprobs_zero_gives_those_of_the_chosen_tokens_only(app: App) -> None:
    (choice,) = (await app.post(COMPLETIONS, {"prompt": "hi", "logprobs": 0})).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["logprobs"]["token_logprobs"][0] == -0.5


async def test_streamed_logprobs_join_to_those_of_the_whole_answer(app: App) -> None:
    body = {"prompt": "hi", "logprobs": 1, "echo": True}
    *chunks, _ = await app.events(COMPLETIONS, body)
    (whole,) = (await app.post(COMPLETIONS, body)).json()["choices"]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for chunk in chunks for x in chunk["choices"][0]["logprobs"][field]] == whole["logprobs"][field]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


async def test_echo_returns_each_prompt_before_its_choices(app: App, tokenizer: Tokenizer) -> None:
    answer = (await app.post(COMPLETIONS, {"prompt": ["The ", "lazy "], "n": 2, "echo": True})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["The Hello world"] * 2 + ["lazy Hello world"] * 2
    answer = (await app.post(COMPLETIONS, {"prompt": tokenizer.encode("The "), "echo": True})).json()
    assert answer["choices"][0]["text"] == "The Hello world"
    *chunks, _ = await app.events(COMPLETIONS, {"prompt": "The ", "echo": True})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["The Hello", " world"]


async def test_echo_with_logprobs_covers_the_prompt(app: App, tokenizer: Tokenizer) -> None:
    (choice,) = (await app.post(COMPLETIONS, {"prompt": "lazy dog", "echo": True, "logprobs": 1})).json()["choices"]
    ids = tokenizer.encode("lazy dog")
    logprobs = choice["logprobs"]
    assert app.manager.last.logprobs is not None
    assert app.manager.last.logprobs.prompt
    assert app.manager.last.input_ids == (tuple(ids),)
    assert "".join(logprobs["tokens"]) == choice["text"] == "lazy dogHello world"
    assert logprobs["token_logprobs"][: len(ids)] == [None] + [-1.0] * (len(ids) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert choice["text"][logprobs["text_offset"][len(ids)] :] == "Hello world"


async def test_no_tokens_with_echo_scores_a_prompt(app: App, tokenizer: Tokenizer) -> None:
    body = {"prompt": "lazy dog", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await app.post(COMPLETIONS, body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("lazy dog", "length")
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode("lazy dog"))
    assert answer["usage"]["completion_tokens"] == 0
    assert app.manager.last.sampling_params.max_new_tokens == 0
    (choice,) = (await app.post(COMPLETIONS, {"prompt": "lazy dog", "echo": True, "max_tokens": 0})).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("lazy dog", None)
