"""Tool calls over a real instance, by OpenAI's own client. The model writes noise: only required calls are any."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

from checkpoints import CHAT_TEMPLATE, make_tiny
from instances import PATIENCE_S, RunningInstance, launched

CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[ChatCompletionToolUnionParam] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")
]
OPTIONS: dict[str, Any] = {"model": "tiny", "messages": CHAT, "tools": TOOLS, "max_tokens": 200, "seed": 2}


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, runtime_root: Path
) -> Iterator[openai.OpenAI]:
    """Of a model that marks calls by plain text, and of one that has a special token for it."""
    model = make_tiny(tmp_path_factory.mktemp("models") / request.param, max_position_embeddings=2048)
    mark = "<tool_call>" if request.param == "hermes" else "[TOOL_CALLS]"
    template = "{% if tools %}{{ tools | tojson }} " + mark + "{% endif %}" + CHAT_TEMPLATE
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / file).read_text()
        (model / file).write_text(text.replace("<|endoftext|>", mark) if request.param == "mistral" else text)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with (
        launched(runtime_root, f"tools-{request.param}", str(model), "--served-model-name", "tiny") as instance,
        connected(instance) as client,
    ):
        yield client


def connected(instance: RunningInstance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def check(calls: Any, names: set[str]) -> None:
    assert calls
    for call in calls:
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Oslo", "Rome")
        assert arguments["days"] in range(1, 10)


def test_a_required_call_is_made_of_valid_arguments(client: openai.OpenAI) -> None:
    for temperature in (0, 1):
        choice = client.chat.completions.create(
            **OPTIONS, temperature=temperature, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        check(choice.message.tool_calls, {"weather", "time"})
        assert choice.message.tool_calls is not None
        assert len(choice.message.tool_calls) == 1
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")


def test_a_named_tool_is_called_also_in_a_stream(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "time"}}
    with client.chat.completions.stream(**OPTIONS, tool_choice=choice) as stream:
        message = stream.get_final_completion().choices[0]
    check(message.message.tool_calls, {"time"})
    assert message.finish_reason == "tool_calls"


def test_left_to_itself_the_model_writes_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**{**OPTIONS, "max_tokens": 9}, tool_choice="auto").choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content


def test_the_result_of_a_call_goes_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**OPTIONS, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert first.message.tool_calls is not None
    answer: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": first.message.tool_calls[0].id,
        "content": "12 degrees",
    }
    chat: Any = [*CHAT, first.message, answer]
    second = client.chat.completions.create(**{**OPTIONS, "messages": chat, "max_tokens": 9})
    assert second.choices[0].finish_reason in ("length", "stop")
