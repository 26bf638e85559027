"""The formats in which model families write tool calls, recognized by their chat templates.

For each format: incremental parsing of calls in generated text, and a grammar that makes a model write calls.
"""

import json
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from llmserve.runtime.grammar import JSON_OPTIONS
from llmserve.runtime.tokenizer import Tokenizer


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON, as a text."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: str = "function"
    function: CalledFunction


class Format(NamedTuple):
    """A call is JSON between the marks `begin` and `end`, or with `several` a JSON list of calls. Without marks the
    whole text is a call.
    """

    begin: str
    end: str = ""
    several: bool = False
    arguments: str = "arguments"
    """The key of the arguments in a call's JSON, beside "name"."""

    def is_special(self, tokenizer: Tokenizer) -> bool:
        """Whether the mark is a special token, which decoding skips unless told not to."""
        return tokenizer.token_id(self.begin) in tokenizer.special_ids


HERMES = Format("<tool_call>", "</tool_call>")
"""Hermes, Qwen, SmolLM3."""
MISTRAL = Format("[TOOL_CALLS]", several=True)
PHI = Format("<|tool_call|>", "<|/tool_call|>", several=True)
GRANITE = Format("<|tool_call|>", several=True)
LLAMA = Format("", arguments="parameters")
"""Llama 3; a call may begin with <|python_tag|>."""
PYTHON_TAG = "<|python_tag|>"


def format_of(template: str) -> Format | None:
    """The format of the model with this chat template; None where it is unknown."""
    if "<function=" in template or "[ARGS]" in template:  # the same marks, but not around JSON
        return None
    for found in (HERMES, MISTRAL, PHI):
        if found.begin in template:
            return GRANITE if found is PHI and PHI.end not in template else found
    return LLAMA if '"parameters"' in template or PYTHON_TAG in template else None


def grammar_of_calls(
    found: Format, parameters: Mapping[str, Mapping[str, object]], several: bool, tokenizer: Tokenizer
) -> str:
    """A Lark grammar for calls of functions with these parameters (JSON schemas by name); for a single call unless
    `several`.

    White space is that of Python's json.dumps, as in the chat templates.
    """
    begin, end = _mark(found.begin, tokenizer), _mark(found.end, tokenizer)
    if found.several:
        more = ' (", " call)*' if several else ""
        rules = [f'start: {begin} / ?/ "[" call{more} "]" {end}']
    elif found.begin:
        more = r' ("\n" item)*' if several else ""
        rules = [f"start: item{more}", rf'item: {begin} "\n" call "\n" {end}']
    else:
        rules = ["start: call"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(parameters))))
    for number, (name, schema) in enumerate(parameters.items()):
        opening = f'{{"name": {_quoted(name)}, "{found.arguments}": '
        rules.append(f'call_{number}: {_quoted(opening)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {_quoted({**schema, 'x-guidance': JSON_OPTIONS})}")
    return "\n".join(rules)


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A mark in a Lark grammar. A special token matches no text, so it is written by its id."""
    token = tokenizer.token_id(text)
    return f"<[{token}]>" if token is not None and token in tokenizer.special_ids else _quoted(text)


class CallReader:
    """Separates tool calls from plain text, incrementally."""

    def __init__(self, found: Format, several: bool) -> None:
        """Unless `several`, only the first call counts, and everything after it is dropped."""
        self.calls = 0
        self._format = found
        self._several = several
        self._text = ""
        self._in_call = False
        self._at_start = True
        self._after_call = False

    def feed(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Takes new text; returns the plain text and the complete calls that are certain by now, or all that is left
        with `last`.

        Text that began like a call but is none is plain text.
        """
        self._text += text
        words = ""
        calls: list[ToolCall] = []
        while True:
            words += self._worth_saying(self._words())
            if not self._in_call or not (read := self._read_calls(last)):
                break
            calls += read if self._several or not self.calls else []
            self.calls += len(read)
            self._after_call = True
        if last:
            words += self._worth_saying(self._format.begin + self._text if self._in_call else self._text)
            self._text = ""
        return words, calls if self._several else calls[:1]

    def _worth_saying(self, words: str) -> str:
        """Drops white space after a call, and all text after it where only the first call counts."""
        if self._after_call:
            words = words.lstrip() if self._several else ""
            self._after_call = not words
        return words

    def _words(self) -> str:
        """Removes and returns the text that is certainly not part of a call; the rest is a call or may become one."""
        if self._in_call:
            return ""
        if not self._format.begin:
            return self._words_without_mark()
        words, mark, rest = self._text.partition(self._format.begin)
        if mark:
            self._in_call = True
        else:
            mark = self._format.begin
            held = next(n for n in range(min(len(mark) - 1, len(words)), -1, -1) if words.endswith(mark[:n]))
            words, rest = words[: len(words) - held], words[len(words) - held :]
        self._text = rest
        return words

    def _words_without_mark(self) -> str:
        """As `_words`, for calls without marks, which are recognized by the beginning of the text."""
        rest = self._text.lstrip(" \n;" if self.calls else None).removeprefix(PYTHON_TAG).lstrip()
        if PYTHON_TAG.startswith(rest) if self._at_start else self.calls and not rest:
            return ""
        self._in_call = (self._at_start or self.calls > 0) and rest.startswith("{")
        self._at_start = False
        words, self._text = ("", rest) if self._in_call else (self._text, "")
        return words

    def _read_calls(self, last: bool) -> list[ToolCall]:
        """Removes and returns the calls at the beginning of the text; none if they are incomplete or not calls."""
        text, end = self._text.strip(), self._format.end
        if not text or (not last and text[-1] not in "}]>"):
            return []
        try:
            value, length = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return []
        values = value if isinstance(value, list) else [value]
        calls = [call for each in values if (call := _call(each, self._format)) is not None]
        rest = text[length:].lstrip()
        if not calls or len(calls) < len(values) or (not last and rest != end and end.startswith(rest)):
            return []
        self._text, self._in_call = rest.removeprefix(end), False
        return calls


def _call(value: object, found: Format) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(found.arguments, {})
    text = arguments if isinstance(arguments, str) else _quoted(arguments)
    # Nine letters or digits, because Mistral's templates accept no other ids.
    return ToolCall(id=uuid.uuid4().hex[:9], function=CalledFunction(name=value["name"], arguments=text))
