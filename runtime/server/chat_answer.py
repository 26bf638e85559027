"""Answers of /v1/chat/completions, whole and as chunks of a stream, made from the rows of a request."""

import time

import msgspec

from llmserve.runtime.logprobs import token_ids
from llmserve.runtime.messages import GenerateReqInput, StrRow
from llmserve.runtime.server.context import Context
from llmserve.runtime.server.generation import Tally, Usage, finish_of, text_of
from llmserve.runtime.server.logprobs import ChatLogprobs, chat_logprobs, unpack
from llmserve.runtime.server.sse import frame
from llmserve.runtime.server.tool_formats import CalledFunction, CallReader, ToolCall
from llmserve.runtime.server.tools import ToolUse


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tool call; calls are not split into deltas."""

    index: int
    id: str
    type: str
    function: CalledFunction


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


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


def _finish_reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason


class ChatWriter:
    """A RowWriter (sse.py) for chats, which can also write all rows of the request as one answer."""

    def __init__(self, context: Context, req: GenerateReqInput, tools: ToolUse | None, model: str, usage: bool) -> None:
        self._tally = Tally(req.n)
        self._req = req
        self._tokenizer = context.tokenizer
        self._usage = usage
        self._model = model
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._tools = tools
        self._readers: dict[int, CallReader] = {}

    def chunk(self, row: StrRow) -> bytes:
        self._tally.add(row)
        logprobs = self._logprobs([row])
        text, calls, first = self._read(row.index, row.text, row.finish is not None)
        if not text and not calls and logprobs is None and row.finish is None:
            return b""
        deltas = [
            CallDelta(index=first + number, id=call.id, type=call.type, function=call.function)
            for number, call in enumerate(calls)
        ]
        role = None if row.index in self._begun else "assistant"
        delta = Delta(role=role, content=text or None, tool_calls=deltas or None)
        self._begun.add(row.index)
        finish_reason = _finish_reason(row.finish.type, first + len(calls)) if row.finish else None
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
            choices=[self._choice(index, rows) for index, rows in enumerate(choices)],
            usage=self._tally.usage(),
        )

    def _choice(self, index: int, rows: list[StrRow]) -> ChatChoice:
        text, calls, _ = self._read(index, text_of(rows), last=True)
        message = AnswerMessage(content=text or (None if calls else ""), tool_calls=calls or msgspec.UNSET)
        finish_reason = _finish_reason(finish_of(rows).type, len(calls))
        return ChatChoice(index=index, message=message, logprobs=self._logprobs(rows), finish_reason=finish_reason)

    def _read(self, index: int, text: str, last: bool) -> tuple[str, list[ToolCall], int]:
        """The plain text and the tool calls in new text of a choice, and how many calls came before."""
        if self._tools is None:
            return text, [], 0
        if index not in self._readers:
            self._readers[index] = CallReader(self._tools.format, self._tools.several)
        before = self._readers[index].calls
        return *self._readers[index].feed(text, last), before

    def _logprobs(self, rows: list[StrRow]) -> ChatLogprobs | None:
        if self._req.logprobs is None:
            return None
        entries = [e for row in rows if row.logprobs for e in unpack(token_ids(row.output_ids), row.logprobs)]
        return chat_logprobs(self._tokenizer, entries)
