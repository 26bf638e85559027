"""The parameters of OpenAI's routes: each reaches the engine, or is refused by its name."""

from typing import Any

import pytest
from http_app import CHAT, COMPLETIONS, HI, MODEL, App

from llmserve.runtime.messages import FILL_CONTEXT, UNSEEDED
from llmserve.runtime.models.sampling_defaults import SamplingDefaults
from llmserve.runtime.tokenizer import Tokenizer

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


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate"])
async def test_what_a_request_leaves_out_is_as_the_model_recommends(tokenizer: Tokenizer, path: str) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    app = App(tokenizer, sampling=SamplingDefaults(**values))
    prompt: dict[str, Any] = {"messages": HI} if path == CHAT else {"text" if path == "/generate" else "prompt": "hi"}
    for given in ({}, dict.fromkeys(values), {"temperature": 0.0, "top_k": -1, "top_p": 1.0}):
        parameters = {"sampling_params": given} if path == "/generate" else given
        assert (await app.post(path, {**prompt, **parameters})).status_code == 200
        params = app.manager.last.sampling_params
        expected = values | {name: value for name, value in given.items() if value is not None}
        expected["top_k"] = max(expected["top_k"], 0)
        assert {name: getattr(params, name) for name in values} == expected
        assert params.presence_penalty == 0.0


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
        assert await app.refused(path, {**prompt, name: "(a+)+$"}, name) == f"unknown parameter: {name}"


async def test_a_parameter_that_is_missing_is_named(app: App) -> None:
    for path, name in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
        assert await app.refused(path, {"max_tokens": 1}, name) == f"missing required parameter: {name}"


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


@pytest.mark.parametrize(
    ("body", "param", "choices"),
    [
        ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "developer, system, tool, user"),
        ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type", "json_schema, text"),
        ({"messages": HI, "tool_choice": "maybe"}, "tool_choice", "auto, none, required"),
        ({"messages": HI, "tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type", "one of function"),
    ],
)
async def test_a_word_that_is_none_of_a_list_is_told_the_list(
    app: App, body: dict[str, Any], param: str, choices: str
) -> None:
    assert (await app.refused(CHAT, body, param)).endswith(choices)


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
