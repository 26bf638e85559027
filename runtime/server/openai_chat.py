"""POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat"""

import asyncio
from typing import Literal

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from llmserve.runtime.messages import GenerateReqInput, LogprobOptions
from llmserve.runtime.server.body import invalid, json_response, read_json
from llmserve.runtime.server.chat_answer import ChatCompletion, ChatWriter
from llmserve.runtime.server.context import Context
from llmserve.runtime.server.fields import (
    OpenAIFields,
    check_max_tokens,
    check_stream_options,
    given,
    refuse_unsupported,
    sampling_params,
    wants_usage,
)
from llmserve.runtime.server.generation import collect, request_id
from llmserve.runtime.server.openapi import operation
from llmserve.runtime.server.sse import EventStream
from llmserve.runtime.server.structured import openai_constraint
from llmserve.runtime.server.tool_formats import ToolCall
from llmserve.runtime.server.tools import Tool, ToolChoice, ToolUse, template_calls, tool_use
from llmserve.runtime.tokenizer import ChatTemplateError

RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, object]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """The tool calls of an earlier answer, in an assistant's message."""
    tool_call_id: str | None = None
    """The call whose result a tool's message holds."""
    # Present, but empty, in an assistant's message from an earlier answer.
    refusal: object = None
    annotations: object = None
    audio: object = None
    function_call: object = None


class ChatRequest(OpenAIFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the opening of the assistant's turn (default true)."""
    continue_final_message: bool | None = None
    """Whether the last message is continued instead of answered."""
    chat_template_kwargs: dict[str, object] | None = None
    """Variables of the model's own chat template, such as {"enable_thinking": false}."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: object = None
    function_call: object = None
    modalities: object = None
    audio: object = None
    web_search_options: object = None
    reasoning_effort: object = None
    verbosity: object = None


def add_routes(app: FastAPI, context: Context) -> None:
    @app.post("/v1/chat/completions", openapi_extra=operation(ChatRequest, ChatCompletion))
    async def create_chat_completion(request: Request) -> Response:
        body = await read_json(request, ChatRequest)
        model = context.check_model(body.model)
        _check(body)
        tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, context.tokenizer)
        req = await _generate_request(context, body, tools)
        rows = context.manager.generate(req)
        writer = ChatWriter(context, req, tools, model, wants_usage(body))
        if body.stream:
            return EventStream(rows, writer)
        return json_response(writer.whole(await collect(rows)))


def _check(body: ChatRequest) -> None:
    refuse_unsupported(body)
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise invalid("top_logprobs must be 0 or more", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens and max_completion_tokens mean the same: give one of them", "max_tokens")
    check_max_tokens(body.max_tokens)
    check_max_tokens(body.max_completion_tokens, "max_completion_tokens")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")


async def _generate_request(context: Context, body: ChatRequest, tools: ToolUse | None) -> GenerateReqInput:
    constraint = openai_constraint(body.response_format, body.structured_outputs)
    if tools is not None and constraint is not None:
        raise invalid(f"{constraint.param} would leave no room for tool calls: give it with tool_choice none", "tools")
    skip_special_tokens = given(body.skip_special_tokens, True)
    if tools is not None:
        constraint = tools.constraint
        skip_special_tokens = skip_special_tokens and not tools.format.is_special(context.tokenizer)
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return GenerateReqInput(
        rid=request_id(body.rid, "chatcmpl-"),
        texts=(await render_chat(context, body, tools),),
        sampling_params=sampling_params(body, context.sampling_defaults, max_tokens, body.min_tokens),
        n=given(body.n, 1),
        constraint=constraint,
        logprobs=LogprobOptions(top=given(body.top_logprobs, 0)) if body.logprobs else None,
        stream=bool(body.stream),
        add_special_tokens=False,  # the chat template adds them
        skip_special_tokens=skip_special_tokens,
        user=given(body.user, ""),
    )


async def render_chat(context: Context, body: ChatRequest, tools: ToolUse | None = None) -> str:
    """The prompt, rendered by the model's chat template. Raises RequestError 400 when it does not accept the chat."""
    if not body.messages:
        raise invalid("messages must not be empty", "messages")
    messages = [_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    continued = bool(body.continue_final_message)
    variables = given(body.chat_template_kwargs, {})
    if taken := RESERVED_VARIABLES & variables.keys():
        raise invalid(f"chat_template_kwargs must not set {min(taken)!r}", "chat_template_kwargs")
    if tools is not None:
        variables = {**variables, "tools": tools.tools}
    add_generation_prompt = not continued and given(body.add_generation_prompt, True)
    try:
        prompt = await asyncio.to_thread(
            lambda: context.tokenizer.apply_chat_template(messages, add_generation_prompt, **variables)
        )
    except ChatTemplateError as error:
        raise invalid(str(error), "messages") from None
    return _cut_after(prompt, str(messages[-1]["content"])) if continued else prompt


def _cut_after(prompt: str, content: str) -> str:
    """The prompt up to the end of its last message, without what the template adds to close the turn, as in
    transformers.
    """
    for text in (content, content.strip()):
        start = prompt.rfind(text)
        if text and start >= 0:
            return prompt[: start + len(text)]
    raise invalid(
        "the last message is empty, or the model's chat template changes it: it cannot be continued", "messages"
    )


def _template_message(message: ChatMessage, where: str) -> dict[str, object]:
    """A message as templates expect it, with a string as content; text parts are joined by line breaks, as in vLLM."""
    for field in ("refusal", "annotations", "audio", "function_call"):
        if getattr(message, field) not in (None, [], ""):
            raise invalid(f"{where}.{field} is not supported", f"{where}.{field}", "unsupported_parameter")
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{where}.tool_calls: only an assistant's message has them", f"{where}.tool_calls")
    if message.content is None and not message.tool_calls:
        raise invalid(f"{where}.content must not be null", f"{where}.content")
    if not isinstance(message.content, list):
        content = message.content or ""
    else:
        content = "\n".join(_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content))
    told: dict[str, object] = {"role": role, "content": content}
    if message.name:
        told["name"] = message.name
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        told["tool_calls"] = template_calls(message.tool_calls, f"{where}.tool_calls")
    return told


def _text_part(part: dict[str, object], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise invalid(f'{where}: only parts of type "text" are supported, not {kind!r}', f"{where}.type")
    if not isinstance(text, str) or len(part) > 2:
        raise invalid(f"{where} must have a string `text` and nothing else", where)
    return text
