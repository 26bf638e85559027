"""Structured outputs: the parameters of OpenAI's routes that constrain an answer, turned into a Constraint.

These are OpenAI's `response_format` and vLLM's `structured_outputs`, which can express more. /generate has SGLang's
parameters (native.py).
"""

from typing import Literal

import msgspec

from llmserve.runtime.grammar import constraint_of, the_only
from llmserve.runtime.messages import Constraint
from llmserve.runtime.server.body import invalid

FORMAT_NAMES = {"json_schema": "response_format"}
OUTPUT_NAMES = {
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
}


class SchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer follows the schema whether or not `strict` is set."""

    name: str
    schema: dict[str, object]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one must be given; the whole answer must match it."""

    json: dict[str, object] | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In the notation of Lark or of llama.cpp (GBNF)."""


def openai_constraint(format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Constraint | None:
    """The constraint of `response_format` or `structured_outputs`, or None. Raises RequestError 400 if both have
    one.
    """
    return the_only([each for each in (_of_format(format), _of_outputs(outputs)) if each is not None])


def _of_format(format: ResponseFormat | None) -> Constraint | None:
    if format is None:
        return None
    if (format.type == "json_schema") != (format.json_schema is not None):
        raise invalid('json_schema is to be given with the type "json_schema", and only then', "response_format")
    if format.json_schema is not None:
        return constraint_of(json_schema=format.json_schema.schema, names=FORMAT_NAMES)
    return constraint_of(json_schema={"type": "object"}, names=FORMAT_NAMES) if format.type == "json_object" else None


def _of_outputs(outputs: StructuredOutputs | None) -> Constraint | None:
    if outputs is None:
        return None
    found = constraint_of(
        json_schema=outputs.json,
        regex=outputs.regex,
        choice=outputs.choice,
        grammar=outputs.grammar,
        names=OUTPUT_NAMES,
    )
    if found is None:
        raise invalid("structured_outputs asks for nothing: give json, regex, choice or grammar", "structured_outputs")
    return found
