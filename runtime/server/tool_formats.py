"""How models write tool calls: the formats of the families that are served, told apart by their chat templates.

A format says how calls are found in generated text, bit by bit as it comes, and what grammar has a model write some.
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
    """`begin` and `end` mark a call, or with `several` a JSON list of them; without a mark the whole text is calls."""

    begin: str
    end: str = ""
    several: bool = False
    arguments: str = "arguments"
    """The member of a call's JSON that holds the arguments, beside "name"."""

    def is_special(self, tokenizer: Tokenizer) -> bool:
        """Whether the mark is a special token, which texts do not show unless they are asked to."""
        return tokenizer.token_id(self.begin) in tokenizer.special_ids


HERMES = Format("<tool_call>", "</tool_call>")
"""Hermes, Qwen, SmolLM3."""
MISTRAL = Format("[TOOL_CALLS]", several=True)
PHI = Format("<|tool_call|>", "<|/tool_call|>", several=True)
GRANITE = Format("<|tool_call|>", several=True)
LLAMA = Format("", arguments="parameters")
"""Llama 3, which may begin a call with <|python_tag|>."""
PYTHON_TAG = "<|python_tag|>"


def format_of(template: str) -> Format | None:
    """That of the model whose chat template this is; None where it is not known."""
    if "<function=" in template or "[ARGS]" in template:  # the same marks around something else than JSON
        return None
    for found in (HERMES, MISTRAL, PHI):
        if found.begin in template:
            return GRANITE if found is PHI and PHI.end not in template else found
    return LLAMA if '"parameters"' in template or PYTHON_TAG in template else None


def grammar_of_calls(
    found: Format, parameters: Mapping[str, Mapping[str, object]], several: bool, tokenizer: Tokenizer
) -> str:
    """A grammar, as Lark writes it, of calls of functions with such parameters (JSON schemas); of one unless `several`.

    A call is spelled as models are shown it, by Python's json.dumps.
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
    """A special token matches no text: it is asked for by its number."""
    token = tokenizer.token_id(text)
    return f"<[{token}]>" if token is not None and token in tokenizer.special_ids else _quoted(text)


class CallReader:
    """Tells the calls in a text from what is said besides."""

    def __init__(self, found: Format, several: bool) -> None:
        """Unless `several` only the first call counts, and what follows it is dropped."""
        self.calls = 0
        self._format = found
        self._several = several
        self._text = ""
        self._in_call = False
        self._at_start = True
        self._after_call = False

    def feed(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """What is new and certain, of words and of whole calls; all where this is the `last` text.

        What began as a call and is none are words.
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
        """White space that follows a call is not, and nothing that does where only the first one counts."""
        if self._after_call:
            words = words.lstrip() if self._several else ""
            self._after_call = not words
        return words

    def _words(self) -> str:
        """Takes off what is certain to be no call; then the rest begins one, or may still."""
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
        """Where calls have no mark they are all of the text, so its beginning tells."""
        rest = self._text.lstrip(" \n;" if self.calls else None).removeprefix(PYTHON_TAG).lstrip()
        if PYTHON_TAG.startswith(rest) if self._at_start else self.calls and not rest:
            return ""
        self._in_call = (self._at_start or self.calls > 0) and rest.startswith("{")
        self._at_start = False
        words, self._text = ("", rest) if self._in_call else (self._text, "")
        return words

    def _read_calls(self, last: bool) -> list[ToolCall]:
        """The calls that the text begins with, taken off it; none where they are not complete, or no calls."""
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
    # Nine letters or digits: Mistral's templates take no other ids.
    return ToolCall(id=uuid.uuid4().hex[:9], function=CalledFunction(name=value["name"], arguments=text))
