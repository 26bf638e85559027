"""Tools in chats over scripted rows."""

from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from http_app import CALL, CHAT, HI, App

from fake_tokenizer_manager import Script
from llmserve.runtime.messages import FinishReason
from llmserve.runtime.tokenizer import Tokenizer

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
