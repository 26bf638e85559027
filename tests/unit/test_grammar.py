"""What a client may ask generated text to match: read, bounded and refused by name."""

import contextlib
import time

import pytest

from llmserve.runtime.grammar import MAX_LENGTH, constraint_of, grammar_of
from llmserve.runtime.messages import Constraint
from llmserve.runtime.request_error import RequestError


def refusal(kind: str, text: str) -> str:
    with pytest.raises(RequestError) as refused:
        grammar_of(Constraint(kind=kind, text=text, param="the.param"))  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.param) == (400, "the.param")
    return refused.value.message


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "nonsense"}', "Invalid type: nonsense"),
        ("json_schema", "{", "the JSON schema cannot be used"),
        ("json_schema", "[]", "object schema"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', "minLength (3) is greater"),
        ("json_schema", '{"$ref": "#/$defs/missing"}', "does not exist"),
        ("json_schema", '{"$ref": "http://127.0.0.1/schema.json"}', "does not fetch"),
        ("regex", "(", "unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(?=a)b", "look-around"),
        ("choice", "[]", "there is none"),
        ("grammar", "start: nowhere", "nowhere"),
        ("grammar", "root ::= nowhere", "nowhere"),
        ("grammar", "root ::= " + "(" * 5000, "recursion"),
        ("regex", "a" * (MAX_LENGTH + 1), f"at most {MAX_LENGTH}"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(kind: str, text: str, reason: str) -> None:
    assert reason in refusal(kind, text)


@pytest.mark.parametrize(
    "regex", ["(a+)+$", "(x+x+)+y", "((((a*)*)*)*)*b", "(.|a{1,500}|[a-z]{3,900}){1,900}x", "(a|aa)+b"]
)
def test_a_regex_that_is_catastrophic_for_others_is_read_at_once(regex: str) -> None:
    began = time.process_time()
    assert grammar_of(Constraint(kind="regex", text=regex, param="regex"))
    assert time.process_time() - began < 1


def test_a_refusal_does_not_repeat_a_huge_grammar() -> None:
    assert len(refusal("regex", "(" * 60_000)) < 600


@pytest.mark.parametrize(
    "regex",
    ["(" * 60_000 + "a" + ")" * 60_000, "|".join(f"word{i}x" for i in range(11_000)), "a{1,1000}" * 10_000],
)
def test_what_is_huge_is_refused_or_read_in_bounded_time(regex: str) -> None:
    began = time.process_time()
    with contextlib.suppress(RequestError):
        grammar_of(Constraint(kind="regex", text=regex, param="regex"))
    assert time.process_time() - began < 5


def test_no_two_constraints() -> None:
    with pytest.raises(RequestError) as refused:
        constraint_of(regex="a", grammar="b", names={"grammar": "ebnf"})
    assert (refused.value.status, refused.value.param) == (400, "ebnf")
    assert constraint_of() is None
    assert constraint_of(choice=["a", "é"]) == Constraint(kind="choice", text='["a","é"]', param="choice")
