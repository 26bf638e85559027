"""Tool calls in the formats of the families: found in text however it is cut, and asked for by a grammar."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers

from llmserve.runtime.grammar import grammar_of
from llmserve.runtime.messages import Constraint
from llmserve.runtime.server.tool_formats import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
    CallReader,
    Format,
    format_of,
    grammar_of_calls,
)
from llmserve.runtime.tokenizer import Tokenizer

CALL = '{"name": "f", "arguments": {"x": [1, "}]"]}}'
WITH_PARAMETERS = CALL.replace("arguments", "parameters")
ARGUMENTS = '{"x": [1, "}]"]}'


def read(found: Format, text: str, size: int, several: bool = True) -> tuple[str, list[tuple[str, str]]]:
    """What a reader makes of a text that comes in pieces of that size."""
    reader, words, calls = CallReader(found, several), "", []
    for start in range(0, len(text), size):
        new, found_calls = reader.feed(text[start : start + size])
        words, calls = words + new, calls + found_calls
    new, found_calls = reader.feed("", last=True)
    calls += found_calls
    assert len({call.id for call in calls}) == len(calls)
    assert all(re.fullmatch("[a-z0-9]{9}", call.id) for call in calls)
    return words + new, [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize(
    ("found", "text", "words", "count"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (HERMES, f"I look. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n", "I look. ", 2),
        (HERMES, f"<tool_call>{CALL}", "", 1),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call> Done.", "Done.", 1),
        (HERMES, "a < b <tool", "a < b <tool", 0),
        (HERMES, "<tool_call>\n{bad}\n</tool_call>", "<tool_call>\n{bad}\n</tool_call>", 0),
        (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', 0),
        (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', 0),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", 1),
        (MISTRAL, "a [TOOL", "a [TOOL", 0),
        (PHI, f"<|tool_call|>[{CALL}]<|/tool_call|>", "", 1),
        (GRANITE, f"<|tool_call|>[{CALL}, {CALL}]", "", 2),
        (LLAMA, WITH_PARAMETERS, "", 1),
        (LLAMA, f"<|python_tag|>{WITH_PARAMETERS}", "", 1),
        (LLAMA, f"\n{WITH_PARAMETERS}; {WITH_PARAMETERS}", "", 2),
        (LLAMA, "Hello {", "Hello {", 0),
        (LLAMA, f"Hello {WITH_PARAMETERS}", f"Hello {WITH_PARAMETERS}", 0),
        (LLAMA, '{"a": 1}', '{"a": 1}', 0),
        (LLAMA, "<|py", "<|py", 0),
        (HERMES, "", "", 0),
    ],
)
def test_calls_are_found_however_the_text_is_cut(found: Format, text: str, words: str, count: int) -> None:
    for size in (1, 2, 7, 1000):
        assert read(found, text, size) == (words, [("f", ARGUMENTS)] * count)


def test_only_the_first_call_counts_where_several_are_not_wanted() -> None:
    text = f"Well. <tool_call>{CALL}</tool_call> And <tool_call>{CALL}</tool_call>"
    for size in (1, 1000):
        assert read(HERMES, text, size, several=False) == ("Well. ", [("f", ARGUMENTS)])


def test_words_come_as_they_are_certain() -> None:
    reader = CallReader(HERMES, several=True)
    assert reader.feed("Hello <to") == ("Hello ", [])
    assert reader.feed("day>") == ("<today>", [])


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ tools }} <tool_call>", HERMES),
        ("[TOOL_CALLS] {{ tools }}", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", None),
        ("<tool_call><function=x>", None),
        ("<|tool_call|> <|/tool_call|>", PHI),
        ("<|tool_call|>", GRANITE),
        ('{"name": function name, "parameters": dictionary}', LLAMA),
        ("{{ tools }}", None),
    ],
)
def test_the_format_follows_from_the_chat_template(template: str, found: Format | None) -> None:
    assert format_of(template) is found


PARAMETERS: dict[str, Any] = {
    "get weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "$defs": {"City": {"enum": ["Oslo"]}},
        "required": ["city"],
    },
    'é"x': {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("found", [HERMES, MISTRAL, PHI, GRANITE, LLAMA, Format("<|im_start|>", several=True)])
def test_a_grammar_of_calls_takes_what_a_model_is_shown(found: Format, several: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path))
    text = grammar_of_calls(found, PARAMETERS, several, tokenizer)
    assert grammar_of(Constraint(kind="lark", text=text, param="tools"))
    assert ("<[" in text) is found.is_special(tokenizer), "a special token is asked for by its number"
    assert json.dumps('{"name": "get weather", "' + found.arguments + '": ') in text
