"""POST /v1/completions. https://platform.openai.com/docs/api-reference/completions"""

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from llmserve.runtime.logprobs import token_ids
from llmserve.runtime.messages import GenerateReqInput, LogprobOptions, StrRow
from llmserve.runtime.server.body import Prompts, invalid, json_response, read_json, split_prompts
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
from llmserve.runtime.server.generation import Tally, Usage, collect, request_id, text_of
from llmserve.runtime.server.logprobs import (
    CompletionLogprobEncoder,
    CompletionLogprobs,
    TokenLogprob,
    unpack,
)
from llmserve.runtime.server.openapi import operation
from llmserve.runtime.server.sse import EventStream, frame
from llmserve.runtime.server.structured import openai_constraint
from llmserve.runtime.validation import MAX_TOP_LOGPROBS

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Prompts
    """One text, several texts, the token ids of one prompt, or of several."""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    suffix: object = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def add_routes(app: FastAPI, context: Context) -> None:
    @app.post("/v1/completions", openapi_extra=operation(CompletionRequest, Completion))
    async def create_completion(request: Request) -> Response:
        body = await read_json(request, CompletionRequest)
        model = context.check_model(body.model)
        _check(body)
        req, echoed = await _generate_request(context, body)
        rows = context.manager.generate(req)
        writer = _CompletionWriter(context, body, req, echoed, model)
        if body.stream:
            return EventStream(rows, writer)
        return json_response(writer.whole(await collect(rows)))


def _check(body: CompletionRequest) -> None:
    refuse_unsupported(body)
    check_stream_options(body)
    if body.best_of is not None and body.best_of != given(body.n, 1):
        raise invalid("best_of is not supported: ask for n choices instead", "best_of", "unsupported_parameter")
    if not (body.max_tokens == 0 and body.echo):
        check_max_tokens(body.max_tokens)
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise invalid(f"logprobs is {body.logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}", "logprobs")


class _Echo(NamedTuple):
    """The text and the token ids of a prompt, for `echo`."""

    text: str
    token_ids: Sequence[int]


async def _generate_request(context: Context, body: CompletionRequest) -> tuple[GenerateReqInput, list[_Echo]]:
    texts, ids = split_prompts(body.prompt, "prompt")
    skip_special = given(body.skip_special_tokens, True)
    add_special = given(body.add_special_tokens, True)
    echoed: list[_Echo] = []
    if body.echo:
        if texts:
            ids = await context.manager.tokenize(texts, add_special)
            echoed = [_Echo(text, tokens) for text, tokens in zip(texts, ids, strict=True)]
            texts = ()
        else:
            decoded = await asyncio.to_thread(lambda: [context.tokenizer.decode(each, skip_special) for each in ids])
            echoed = [_Echo(text, tokens) for text, tokens in zip(decoded, ids, strict=True)]
    # max_tokens 0 is allowed only with prompt logprobs, whether or not these are returned.
    top = 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs
    req = GenerateReqInput(
        rid=request_id(body.rid, "cmpl-"),
        texts=texts,
        input_ids=ids,
        sampling_params=sampling_params(
            body, context.sampling_defaults, given(body.max_tokens, DEFAULT_MAX_TOKENS), body.min_tokens
        ),
        n=given(body.n, 1),
        constraint=openai_constraint(body.response_format, body.structured_outputs),
        logprobs=None if top is None else LogprobOptions(top=top, prompt=bool(body.echo)),
        stream=bool(body.stream),
        add_special_tokens=add_special,
        skip_special_tokens=skip_special,
        user=given(body.user, ""),
    )
    return req, echoed


class _CompletionWriter:
    """A RowWriter (sse.py) for completions, which can also write all rows of the request as one answer."""

    def __init__(
        self, context: Context, body: CompletionRequest, req: GenerateReqInput, echoed: list[_Echo], model: str
    ) -> None:
        self._tally = Tally(req.n)
        self._req = req
        self._echoed = echoed
        self._tokenizer = context.tokenizer
        self._usage = wants_usage(body)
        self._top_logprobs = body.logprobs
        self._model = model
        self._created = int(time.time())
        self._logprobs: dict[int, CompletionLogprobEncoder] = {}
        self._begun: set[int] = set()

    def chunk(self, row: StrRow) -> bytes:
        self._tally.add(row)
        choice = self._choice(row.index, [row])
        if not choice.text and choice.logprobs is None and choice.finish_reason is None:
            return b""
        return frame(msgspec.json.encode(self._answer([choice], None if self._usage else msgspec.UNSET)))

    def last(self) -> bytes:
        return frame(msgspec.json.encode(self._answer([], self._tally.usage()))) if self._usage else b""

    def whole(self, choices: list[list[StrRow]]) -> Completion:
        for rows in choices:
            self._tally.add(rows[-1])
        return self._answer([self._choice(index, rows) for index, rows in enumerate(choices)], self._tally.usage())

    def _answer(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> Completion:
        return Completion(id=self._req.rid, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, index: int, rows: list[StrRow]) -> CompletionChoice:
        """The choice for consecutive rows, preceded by the echo if these are its first."""
        echo = self._echoed[index // self._req.n] if self._echoed and index not in self._begun else None
        self._begun.add(index)
        finish = rows[-1].finish
        return CompletionChoice(
            index=index,
            text=(echo.text if echo else "") + text_of(rows),
            logprobs=self._logprobs_of(index, rows, echo),
            finish_reason=finish.type if finish else None,
        )

    def _logprobs_of(self, index: int, rows: list[StrRow], echo: _Echo | None) -> CompletionLogprobs | None:
        if self._top_logprobs is None:
            return None
        entries: list[TokenLogprob] = []
        for row in rows:
            if echo and row.prompt_logprobs:
                entries += unpack(echo.token_ids, row.prompt_logprobs)
            if row.logprobs:
                entries += unpack(token_ids(row.output_ids), row.logprobs)
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobEncoder(self._tokenizer, self._req.skip_special_tokens)
        return self._logprobs[index].encode(entries, want_top=self._top_logprobs > 0)
