"""POST /v1/chat/completions. https://platform.openai.com/docs/api-reference/chat"""

import asyncio
import time
from typing import Literal

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from llmserve.runtime.messages import GenerateReqInput, LogprobOptions, StrRow
from llmserve.runtime.server.body import invalid, json_response, read_json
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
from llmserve.runtime.server.generation import Tally, Usage, collect, finish_of, request_id, text_of
from llmserve.runtime.server.logprobs import ChatLogprobs, chat_logprobs, token_ids, unpack
from llmserve.runtime.server.openapi import operation
from llmserve.runtime.server.sse import EventStream, frame
from llmserve.runtime.server.structured import openai_constraint
from llmserve.runtime.tokenizer import ChatTemplateError

RESERVED_VARIABLES = frozenset({"self", "messages", "add_generation_prompt"})


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, object]] | None = None
    name: str | None = None
    # An assistant's message from an earlier answer has these, empty.
    refusal: object = None
    annotations: object = None
    audio: object = None
    tool_calls: object = None
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
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    functions: object = None
    function_call: object = None
    modalities: object = None
    audio: object = None
    web_search_options: object = None
    reasoning_effort: object = None
    verbosity: object = None


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def add_routes(app: FastAPI, context: Context) -> None:
    @app.post("/v1/chat/completions", openapi_extra=operation(ChatRequest, ChatCompletion))
    async def create_chat_completion(request: Request) -> Response:
        body = await read_json(request, ChatRequest)
        model = context.check_model(body.model)
        _check(body)
        req = await _generate_request(context, body)
        rows = context.manager.generate(req)
        writer = _ChatWriter(context, body, req, model)
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


async def _generate_request(context: Context, body: ChatRequest) -> GenerateReqInput:
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return GenerateReqInput(
        rid=request_id(body.rid, "chatcmpl-"),
        texts=(await render_chat(context, body),),
        sampling_params=sampling_params(body, max_tokens, body.min_tokens),
        n=given(body.n, 1),
        constraint=openai_constraint(body.response_format, body.structured_outputs),
        logprobs=LogprobOptions(top=given(body.top_logprobs, 0)) if body.logprobs else None,
        stream=bool(body.stream),
        add_special_tokens=False,  # the template writes them
        skip_special_tokens=given(body.skip_special_tokens, True),
        user=given(body.user, ""),
    )


async def render_chat(context: Context, body: ChatRequest) -> str:
    """The prompt, by the model's chat template. Raises RequestError 400 where the template refuses the chat."""
    if not body.messages:
        raise invalid("messages must not be empty", "messages")
    messages = [_template_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    continued = bool(body.continue_final_message)
    variables = given(body.chat_template_kwargs, {})
    if taken := RESERVED_VARIABLES & variables.keys():
        raise invalid(f"chat_template_kwargs must not set {min(taken)!r}", "chat_template_kwargs")
    add_generation_prompt = not continued and given(body.add_generation_prompt, True)
    try:
        prompt = await asyncio.to_thread(
            lambda: context.tokenizer.apply_chat_template(messages, add_generation_prompt, **variables)
        )
    except ChatTemplateError as error:
        raise invalid(str(error), "messages") from None
    return _cut_after(prompt, messages[-1]["content"]) if continued else prompt


def _cut_after(prompt: str, content: str) -> str:
    """The prompt up to the end of its last message, without what closes that turn, as transformers does."""
    for text in (content, content.strip()):
        start = prompt.rfind(text)
        if text and start >= 0:
            return prompt[: start + len(text)]
    raise invalid(
        "the last message is empty, or the model's chat template changes it: it cannot be continued", "messages"
    )


def _template_message(message: ChatMessage, where: str) -> dict[str, str]:
    """A message as templates know it: a text for content. Texts in parts are joined by line breaks, as vLLM does."""
    for field in ("refusal", "annotations", "audio", "tool_calls", "function_call"):
        if getattr(message, field) not in (None, [], ""):
            raise invalid(f"{where}.{field} is not supported", f"{where}.{field}", "unsupported_parameter")
    role = "system" if message.role == "developer" else message.role
    if message.content is None:
        raise invalid(f"{where}.content must not be null", f"{where}.content")
    if isinstance(message.content, str):
        content = message.content
    else:
        content = "\n".join(_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content))
    return {"role": role, "content": content, **({"name": message.name} if message.name else {})}


def _text_part(part: dict[str, object], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise invalid(f'{where}: only parts of type "text" are supported, not {kind!r}', f"{where}.type")
    if not isinstance(text, str) or len(part) > 2:
        raise invalid(f"{where} must have a string `text` and nothing else", where)
    return text


class _ChatWriter:
    """Writes the rows of one request as chunks of a stream, or all of them as one answer."""

    def __init__(self, context: Context, body: ChatRequest, req: GenerateReqInput, model: str) -> None:
        self._tally = Tally(req.n)
        self._req = req
        self._tokenizer = context.tokenizer
        self._usage = wants_usage(body)
        self._model = model
        self._created = int(time.time())
        self._begun: set[int] = set()

    def chunk(self, row: StrRow) -> bytes:
        self._tally.add(row)
        logprobs = self._logprobs([row])
        if not row.text and logprobs is None and row.finish is None:
            return b""
        delta = Delta(content=row.text or None, role=None if row.index in self._begun else "assistant")
        self._begun.add(row.index)
        finish_reason = row.finish.type if row.finish else None
        choice = ChatChunkChoice(index=row.index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._frame([choice], None)

    def last(self) -> bytes:
        return self._frame([], self._tally.usage()) if self._usage else b""

    def _frame(self, choices: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        return frame(
            msgspec.json.encode(
                ChatCompletionChunk(
                    id=self._req.rid,
                    created=self._created,
                    model=self._model,
                    choices=choices,
                    usage=usage if self._usage else msgspec.UNSET,
                )
            )
        )

    def whole(self, choices: list[list[StrRow]]) -> ChatCompletion:
        for rows in choices:
            self._tally.add(rows[-1])
        return ChatCompletion(
            id=self._req.rid,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AnswerMessage(content=text_of(rows)),
                    logprobs=self._logprobs(rows),
                    finish_reason=finish_of(rows).type,
                )
                for index, rows in enumerate(choices)
            ],
            usage=self._tally.usage(),
        )

    def _logprobs(self, rows: list[StrRow]) -> ChatLogprobs | None:
        if self._req.logprobs is None:
            return None
        entries = [e for row in rows if row.logprobs for e in unpack(token_ids(row.output_ids), row.logprobs)]
        return chat_logprobs(self._tokenizer, entries)
