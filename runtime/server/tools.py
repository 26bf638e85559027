"""The `tools` of a chat request: which may or must be called, and what the chat template is given."""

import json
from typing import Literal, NamedTuple

import msgspec

from llmserve.runtime.messages import Constraint
from llmserve.runtime.server.body import invalid
from llmserve.runtime.server.tool_formats import Format, ToolCall, format_of, grammar_of_calls
from llmserve.runtime.tokenizer import Tokenizer


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    """A JSON schema. It is enforced where a call is required, whether or not `strict` is set."""
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolUse(NamedTuple):
    """How a request uses tools: `tools` are given to the chat template, calls are parsed by `format`."""

    tools: list[dict[str, object]]
    format: Format
    several: bool
    constraint: Constraint | None
    """The grammar of calls, where one is required."""


def tool_use(
    tools: list[Tool] | None, choice: ToolChoice | None, several: bool | None, tokenizer: Tokenizer
) -> ToolUse | None:
    """How to use the tools; None where no tool may be called. Raises RequestError 400, naming the parameter, for a
    combination that is invalid or that the model does not support.
    """
    if not tools:
        if choice not in (None, "none"):
            raise invalid("tool_choice is only allowed with tools", "tool_choice")
        return None
    functions = {tool.function.name: tool.function for tool in tools}
    if len(functions) < len(tools):
        raise invalid("two tools have the same name", "tools")
    if choice == "none":
        return None
    template = tokenizer.tool_template
    found = format_of(template) if template is not None else None
    if template is None:
        raise invalid(
            "this model takes no tools: its chat template does not know them", "tools", "unsupported_parameter"
        )
    if found is None:
        raise invalid("this model writes tool calls in a way that is not supported", "tools", "unsupported_parameter")
    required = functions if choice == "required" else {}
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            raise invalid(f"there is no tool {choice.function.name!r}", "tool_choice")
        required = {choice.function.name: functions[choice.function.name]}
    many = several is not False and not isinstance(choice, NamedTool)
    constraint = None
    if required:
        parameters = {name: function.parameters or {"type": "object"} for name, function in required.items()}
        text = grammar_of_calls(found, parameters, many, tokenizer)
        constraint = Constraint(kind="lark", text=text, param="tools")
    return ToolUse([_without_nulls(tool) for tool in tools], found, many, constraint)


def _without_nulls(tool: Tool) -> dict[str, object]:
    function = {name: value for name, value in msgspec.structs.asdict(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


def template_calls(calls: list[ToolCall], where: str) -> list[dict[str, object]]:
    """Calls of an earlier answer as templates expect them, with the arguments parsed. Raises RequestError 400 if they
    are not JSON.
    """
    return [_template_call(call, f"{where}[{number}].function.arguments") for number, call in enumerate(calls)]


def _template_call(call: ToolCall, where: str) -> dict[str, object]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise invalid(f"{where} is not JSON", where) from None
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
