"""/v1/chat/completions over scripted rows."""

from pathlib import Path

import pytest
import small_tokenizers
from http_app import CALL, CHAT, HI, MODEL, App

from llmserve.runtime.tokenizer import Tokenizer


async def test_a_chat_completion_has_openais_shape(app: App) -> None:
    answer = (await app.post(CHAT, {"model": MODEL, "messages": HI, "max_completion_tokens": 5})).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert app.manager.last.sampling_params.max_new_tokens == 5


async def test_the_chat_template_makes_the_prompt(app: App) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "three"},
    ]
    await app.post(CHAT, {"messages": messages})
    assert app.manager.last.texts == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n",
    )
    assert not app.manager.last.add_special_tokens


async def test_the_last_message_can_be_continued(app: App) -> None:
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    await app.post(CHAT, {"messages": messages, "continue_final_message": True})
    assert app.manager.last.texts == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI am",)
    await app.post(CHAT, {"messages": HI, "add_generation_prompt": False})
    assert app.manager.last.texts == ("<|im_start|>user\nhi<|im_end|>\n",)
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    await app.refused(CHAT, both, "continue_final_message")


async def test_variables_reach_the_chat_template(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}{% if enable_thinking %} THINK{% endif %}"
    app = App(Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, template)))
    await app.post(CHAT, {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}})
    assert app.manager.last.texts == ("hi THINK",)
    for name in ("messages", "self", "add_generation_prompt"):
        await app.refused(CHAT, {"messages": HI, "chat_template_kwargs": {name: 1}}, "chat_template_kwargs")


async def test_who_speaks_and_what_is_answered_reach_the_chat_template(tmp_path: Path) -> None:
    template = "{% for each in messages %}{{ each.name }} {{ each.tool_call_id }};{% endfor %}"
    app = App(Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, template)))
    messages = [{**HI[0], "name": "ann"}, {"role": "tool", "content": "4", "tool_call_id": "call-1"}]
    assert (await app.post(CHAT, {"messages": messages})).status_code == 200
    assert app.manager.last.texts == ("ann ; call-1;",)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
        ([{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
        (
            [*HI, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
            "messages[1].tool_calls[0].function",
        ),
        ([{"role": "user", "content": "", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}], "messages[0].content[0]"),
    ],
)
async def test_messages_that_cannot_be_understood_are_refused(app: App, messages: object, param: str) -> None:
    await app.refused(CHAT, {"messages": messages}, param)


async def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    app = App(Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, chat_template=None)))
    assert "chat template" in await app.refused(CHAT, {"messages": HI}, "messages")


async def test_a_streamed_chat(app: App) -> None:
    *chunks, done = await app.events(CHAT, {"messages": HI})
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Hello"},
        {"content": " world"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


async def test_logprobs_of_a_chat_whole_and_streamed(app: App, tokenizer: Tokenizer) -> None:
    app.manager.script.pieces = ("a", "ü")
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await app.post(CHAT, body)).json()["choices"]
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "a"
    assert (first["bytes"], first["logprob"]) == ([97], -0.5)
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [
        (tokenizer.token_text(0), -0.25),
        (tokenizer.token_text(1), -0.5),
    ]
    spelled = [byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]]
    assert bytes(spelled).decode() == "aü"
    *chunks, _ = await app.events(CHAT, body)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]


async def test_top_logprobs_must_be_possible(app: App) -> None:
    await app.refused(CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs")
    await app.refused(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 10**6}, "top_logprobs")
    await app.refused(CHAT, {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens")
