"""The OpenAI routes over scripted rows: what reaches the engine, and what comes back."""

import base64
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from http_app import MODEL, App, make_tokenizer

from fake_tokenizer_manager import Script
from llmserve.runtime.messages import FILL_CONTEXT, UNSEEDED, EmbeddingReqInput, FinishReason
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def app(tokenizer: Tokenizer) -> App:
    return App(tokenizer)


# ---- parameters ----------------------------------------------------------------------------------------------------

HONOURED: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.3, "temperature", 0.3),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (7, "top_k", 7),
    "min_p": (0.1, "min_p", 0.1),
    "presence_penalty": (0.25, "presence_penalty", 0.25),
    "frequency_penalty": (-0.5, "frequency_penalty", -0.5),
    "repetition_penalty": (1.25, "repetition_penalty", 1.25),
    "stop": (["a", "b"], "stop", ("a", "b")),
    "stop_token_ids": ([3, 4], "stop_token_ids", (3, 4)),
    "ignore_eos": (True, "ignore_eos", True),
    "seed": (42, "seed", 42),
    "min_tokens": (2, "min_new_tokens", 2),
    "max_tokens": (9, "max_new_tokens", 9),
    "logit_bias": ({"5": -100, "6": 1.5}, "logit_bias", ((5, -100.0), (6, 1.5))),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", HONOURED)
async def test_every_sampling_parameter_reaches_the_engine(app: App, path: str, name: str) -> None:
    value, field, expected = HONOURED[name]
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HI}
    response = await app.post(path, {**prompt, "model": MODEL, "max_tokens": 5, name: value})
    assert response.status_code == 200, response.text
    assert getattr(app.manager.last.sampling_params, field) == expected


async def test_null_means_absent(app: App) -> None:
    nulls = dict.fromkeys([*HONOURED, "n", "logprobs", "echo", "stream", "stream_options", "user", "suffix"])
    assert (await app.post(COMPLETIONS, {"prompt": "hi", **nulls})).status_code == 200
    params = app.manager.last.sampling_params
    assert (params.max_new_tokens, params.temperature, params.top_p, params.seed) == (16, 1.0, 1.0, UNSEEDED)
    nulls = dict.fromkeys([*HONOURED, "tools", "tool_choice", "functions", "response_format", "top_logprobs"])
    assert (await app.post(CHAT, {"messages": HI, **nulls})).status_code == 200
    assert app.manager.last.sampling_params.max_new_tokens == FILL_CONTEXT


async def test_one_stop_string_and_the_top_k_that_means_off(app: App) -> None:
    await app.post(COMPLETIONS, {"prompt": "hi", "stop": "\n\n", "top_k": -1})
    assert app.manager.last.sampling_params.stop == ("\n\n",)
    assert app.manager.last.sampling_params.top_k == 0


async def test_user_and_rid_are_passed_on(app: App) -> None:
    answer = (await app.post(COMPLETIONS, {"prompt": "hi", "user": "ann", "rid": "job-1"})).json()
    assert (app.manager.last.user, app.manager.last.rid, answer["id"]) == ("ann", "job-1", "job-1")


async def test_skip_and_add_special_tokens_are_passed_on(app: App) -> None:
    await app.post(COMPLETIONS, {"prompt": "hi", "skip_special_tokens": False, "add_special_tokens": False})
    assert not app.manager.last.skip_special_tokens
    assert not app.manager.last.add_special_tokens


UNSUPPORTED_OF_CHAT: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "store": True,
    "service_tier": "priority",
    "web_search_options": {},
    "reasoning_effort": "high",
    "verbosity": "low",
}


@pytest.mark.parametrize("name", UNSUPPORTED_OF_CHAT)
async def test_what_is_not_supported_in_a_chat_is_refused_by_name(app: App, name: str) -> None:
    message = await app.refused(CHAT, {"messages": HI, name: UNSUPPORTED_OF_CHAT[name]}, name)
    assert name in message
    assert app.manager.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "the end"), ("best_of", 3), ("prediction", {"a": 1})],
)
async def test_what_is_not_supported_in_a_completion_is_refused_by_name(app: App, name: str, value: object) -> None:
    assert name in await app.refused(COMPLETIONS, {"prompt": "hi", name: value}, name)


@pytest.mark.parametrize(
    "name", ["guided_regex", "guided_json", "regex", "json_schema", "temprature", "use_beam_search"]
)
async def test_an_unknown_parameter_is_refused_by_name(app: App, name: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})):
        assert name in await app.refused(path, {**prompt, name: "(a+)+$"}, name)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "null"}}}},
            "json_schema",
            '{"type":"null"}',
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json_schema", '{"type": "null"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
    ],
)
async def test_structured_outputs_are_passed_on(app: App, fields: dict[str, Any], kind: str, text: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})):
        assert (await app.post(path, {**prompt, **fields})).status_code == 200
        constraint = app.manager.last.constraint
        assert constraint is not None
        assert (constraint.kind, constraint.text) == (kind, text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
async def test_structured_outputs_that_cannot_be_are_refused(app: App, fields: dict[str, Any], param: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})):
        await app.refused(path, {**prompt, **fields}, param)


# ---- tools -----------------------------------------------------------------------------------------------------------

TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} as <tool_call>{% endif %}{% for m in messages %}[{{ m.role }}"
    "{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}] {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments.city }}>{% endfor %}"
    "{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")]
CALLS = (
    "Let me see. <tool",
    '_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}',
    "\n</tool_call>\n<tool_call>",
    '{"name": "time", "arguments": {"city": "Rome"}}</tool_call>',
)
STOP = FinishReason(type="stop")


@pytest.fixture
def tool_app(tmp_path: Path) -> App:
    directory = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path, TOOL_TEMPLATE)
    return App(Tokenizer.load(directory), Script(pieces=CALLS, finish=STOP))


async def test_tool_calls_are_found_in_the_answer(tool_app: App) -> None:
    answer = (await tool_app.post(CHAT, {"messages": HI, "tools": TOOLS})).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == "Let me see. "
    assert [call["function"] for call in answer["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Oslo"}'},
        {"name": "time", "arguments": '{"city": "Rome"}'},
    ]
    assert [call["type"] for call in answer["message"]["tool_calls"]] == ["function", "function"]
    assert tool_app.manager.last.texts[0].startswith('[{"type": "function"'), "the template is told of them"
    assert tool_app.manager.last.constraint is None
    one = (await tool_app.post(CHAT, {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False})).json()
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


async def test_tool_calls_are_streamed_as_deltas(tool_app: App) -> None:
    events = await tool_app.events(CHAT, {"messages": HI, "tools": TOOLS, "stream": True, "n": 2})
    for index in (0, 1):
        choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see. "
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "time")]
        assert deltas[0]["role"] == "assistant"
        assert choices[-1]["finish_reason"] == "tool_calls"


async def test_without_tools_or_with_none_chosen_the_text_is_the_text(tool_app: App) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        answer = (await tool_app.post(CHAT, {"messages": HI, **more})).json()["choices"][0]
        assert answer["message"]["content"] == "".join(CALLS)
        assert "tool_calls" not in answer["message"]
        assert answer["finish_reason"] == "stop"
        assert not tool_app.manager.last.texts[0].startswith("[{")


async def test_a_required_call_is_a_grammar(tool_app: App) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    for choice, names in (("required", ["weather", "time"]), (named, ["time"])):
        assert (await tool_app.post(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": choice})).status_code == 200
        constraint = tool_app.manager.last.constraint
        assert constraint is not None
        assert [name for name in ("weather", "time") if name in constraint.text] == names


async def test_earlier_calls_and_their_results_go_into_the_template(tool_app: App) -> None:
    chat = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc", "content": "12 degrees"},
    ]
    assert (await tool_app.post(CHAT, {"messages": chat})).status_code == 200
    assert "[assistant] <weather Oslo>[tool abc] 12 degrees" in tool_app.manager.last.texts[0]
    broken = {**CALL, "function": {"name": "weather", "arguments": "{"}}
    where = "messages[0].tool_calls[0].function.arguments"
    await tool_app.refused(CHAT, {"messages": [{"role": "assistant", "tool_calls": [broken]}]}, where)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_tools_that_cannot_be_are_refused(tool_app: App, body: dict[str, Any], param: str) -> None:
    await tool_app.refused(CHAT, {"messages": HI, **body}, param)


async def test_a_model_whose_template_knows_no_tools_takes_none(app: App) -> None:
    assert "takes no tools" in await app.refused(CHAT, {"messages": HI, "tools": TOOLS}, "tools")


async def test_values_that_ask_for_nothing_are_accepted(app: App) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    assert (await app.post(CHAT, {"messages": HI, **neutral})).status_code == 200
    assert (await app.post(COMPLETIONS, {"prompt": "hi", "best_of": 2, "n": 2, "suffix": ""})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 1_000_000}, "n"),
        ({"logprobs": 1_000_000}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"seed": -(2**63)}, "seed"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"seed": 10**30}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_everything": True}}, "stream_options.include_everything"),
        ({"user": "x" * 1000}, "user"),
        ({"rid": ""}, "rid"),
        ({"rid": "\x1b[2J"}, "rid"),
        ({"rid": "x" * 1000}, "rid"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, 10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": list(range(300)) * 2}, "prompt"),
    ],
)
async def test_what_is_wrong_is_refused_with_400_that_names_it(app: App, body: dict[str, Any], param: str) -> None:
    await app.refused(COMPLETIONS, {"prompt": "hi", **body}, param)
    assert app.manager.requests == []


async def test_a_missing_prompt_is_named(app: App) -> None:
    await app.refused(COMPLETIONS, {}, "prompt")
    await app.refused(CHAT, {}, "messages")


async def test_another_model_is_404(app: App) -> None:
    for path, prompt in (
        (COMPLETIONS, {"prompt": "hi"}),
        (CHAT, {"messages": HI}),
        ("/v1/embeddings", {"input": "hi"}),
    ):
        assert "tiny" in await app.refused(path, {**prompt, "model": "gpt-4"}, "model", status=404)
    assert (await app.http.get("/v1/models/gpt-4")).status_code == 404


# ---- completions -----------------------------------------------------------------------------------------------------


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


# ---- chat ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour"),
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


# ---- how a request ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})])
async def test_a_refusal_before_the_first_row_keeps_its_status(
    app: App, path: str, prompt: dict[str, object], stream: bool
) -> None:
    app.manager.script.before_rows = RequestError(503, "the queue is full", code="queue_full")
    response = await app.post(path, {**prompt, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json() == {
        "error": {"message": "the queue is full", "type": "server_error", "param": None, "code": "queue_full"}
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_row_first_keeps_its_status(app: App, stream: bool) -> None:
    app.manager.script = Script(
        pieces=("",), finish=FinishReason(type="error", status=503, message="the queue is full")
    )
    response = await app.post(COMPLETIONS, {"prompt": "hi", "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the queue is full"


async def test_an_error_in_mid_stream_is_an_event(app: App) -> None:
    app.manager.script.after_rows = RequestError(503, "the scheduler has died")
    first, error = await app.events(COMPLETIONS, {"prompt": "hi"})
    assert first["choices"][0]["text"] == "Hello"
    assert error["error"]["message"] == "the scheduler has died"
    app.manager.script = Script(finish=FinishReason(type="error", status=500, message="not a number"))
    _, error = await app.events(COMPLETIONS, {"prompt": "hi"})
    assert error["error"]["message"] == "not a number"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_inside_is_a_500_without_its_details(app: App, stream: bool) -> None:
    app.manager.script.before_rows = ZeroDivisionError("secret detail")
    response = await app.post(COMPLETIONS, {"prompt": "hi", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret detail" not in response.text


async def test_a_failure_inside_in_mid_stream_is_an_event(app: App) -> None:
    app.manager.script.after_rows = ZeroDivisionError("secret detail")
    _, error = await app.events(CHAT, {"messages": HI})
    assert error["error"]["type"] == "server_error"
    assert "secret detail" not in str(error)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_aborted_request_is_an_answer_that_says_so(app: App, path: str) -> None:
    app.manager.script.finish = FinishReason(type="abort", message="aborted by an operator")
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HI}
    (choice,) = (await app.post(path, prompt)).json()["choices"]
    assert choice["finish_reason"] == "abort"
    *_, last, done = await app.events(path, prompt)
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")


# ---- embeddings, models ----------------------------------------------------------------------------------------------


async def test_embeddings_as_numbers_and_as_base64(app: App) -> None:
    answer = (await app.post("/v1/embeddings", {"model": MODEL, "input": ["a", "b c"]})).json()
    tokens = sum(len(app.manager.tokenizer.encode(text)) for text in ("a", "b c"))
    assert answer == {
        "object": "list",
        "data": [{"index": i, "object": "embedding", "embedding": [1.0, -0.5, 0.25]} for i in range(2)],
        "model": MODEL,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    answer = (await app.post("/v1/embeddings", {"input": [[1, 2]], "encoding_format": "base64"})).json()
    assert struct.unpack("<3f", base64.b64decode(answer["data"][0]["embedding"])) == (1.0, -0.5, 0.25)


async def test_pooling_and_normalize_reach_the_engine(app: App) -> None:
    await app.post("/v1/embeddings", {"input": "a", "pooling": "mean", "normalize": False, "user": "ann"})
    request = app.manager.requests[-1]
    assert isinstance(request, EmbeddingReqInput)
    assert (request.pooling, request.normalize, request.user) == ("mean", False, "ann")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": "a", "pooling": "max"}, "pooling"),
    ],
)
async def test_embeddings_refuse_what_they_cannot_do(app: App, body: dict[str, object], param: str) -> None:
    await app.refused("/v1/embeddings", body, param)


async def test_the_served_names_are_listed(tokenizer: Tokenizer) -> None:
    app = App(tokenizer, served_model_names=("org/big", "small"))
    listed = (await app.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["org/big", "small"]
    assert (await app.http.get("/v1/models/org/big")).json()["max_model_len"] == 512
    assert (await app.post(COMPLETIONS, {"model": "small", "prompt": "a"})).json()["model"] == "small"
    await app.refused(COMPLETIONS, {"model": MODEL, "prompt": "a"}, "model", status=404)
