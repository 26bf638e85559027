"""Grammars that generated text must match: a client's constraint translated into llguidance's notation, and checked.

Compiling grammars and computing token masks is in scheduler/guides.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from llmserve.runtime.messages import Constraint
from llmserve.runtime.request_error import RequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_LENGTH = 1 << 17
"""Characters of a constraint. With the limits below, compiling takes about a second and 10 MB at most."""
LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    max_lexer_states=10_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    verbose_errors=False,
)
"""Within these limits the worst grammar known delays one step by 125 ms, and then ends its request."""
SHOWN_REASON = 500
JSON_OPTIONS: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,64}"}
"""Allowed between two JSON tokens: nothing, a space, or a line break with indentation. Small models that may generate
any white space fall into generating nothing else.
"""


JsonSchema = Mapping[str, object] | str
"""A JSON schema, or its text."""


def constraint_of(
    *,
    json_schema: JsonSchema | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    names: Mapping[str, str] | None = None,
) -> Constraint | None:
    """The constraint that a client asks for; None if there is none. Raises RequestError 400 when there are several.

    `names` maps these parameters to the client's names for them, where they differ.
    """
    asked = {
        "json_schema": json_schema if json_schema is None or isinstance(json_schema, str) else _json(json_schema),
        "regex": regex,
        "choice": None if choice is None else _json(list(choice)),
        "grammar": grammar,
    }
    names = {kind: (names or {}).get(kind, kind) for kind in asked}
    found = [
        Constraint(kind=kind, text=text, param=names[kind])  # type: ignore[arg-type]  # the keys above
        for kind, text in asked.items()
        if text is not None
    ]
    return the_only(found)


def the_only(found: Sequence[Constraint]) -> Constraint | None:
    """The only constraint, or None. Raises RequestError 400 when there are several."""
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(400, f"{second} and {first} exclude each other: give one of them", param=second)
    return found[0] if found else None


def grammar_of(constraint: Constraint) -> str:
    """The grammar of a constraint, in llguidance's notation. Raises RequestError 400 for one that is invalid, too
    large, or uses unsupported features.
    """
    if len(constraint.text) > MAX_LENGTH:
        raise _refusal(constraint, f"it has {len(constraint.text)} characters; at most {MAX_LENGTH} are allowed")
    try:
        grammar = _READERS[constraint.kind](constraint.text)
    except Exception as error:  # the library raises plain Exceptions
        raise _refusal(constraint, str(error)) from None
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if failed:
        raise _refusal(constraint, messages[0])
    return grammar


def told(reason: str) -> str:
    """The library's error message, shortened for a client, as it may quote the whole grammar."""
    reason = reason.removesuffix("<non-verbose/>").strip()
    return reason if len(reason) <= SHOWN_REASON else f"{reason[:SHOWN_REASON]}…"


def _choice(text: str) -> str:
    choices = msgspec.json.decode(text, type=list[str])
    if not choices:
        raise ValueError("there is none")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_json, choices)))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


_READERS: dict[str, Callable[[str], str]] = {
    "json_schema": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "lark": LLMatcher.grammar_from_lark,
    "grammar": lambda text: LLMatcher.grammar_from_lark(any_to_lark(text)),
}


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    what = constraint.kind.replace("_", " ").replace("json", "JSON")
    return RequestError(400, f"the {what} cannot be used: {told(reason)}", param=constraint.param)
