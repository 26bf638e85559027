"""The native routes: POST /generate, /tokenize and /detokenize.

/generate takes SGLang's body: `text` or `input_ids`, with one prompt or several, and a `sampling_params` object. The
answer is an object for a single choice, and a list, prompt by prompt, for several (several prompts, or n above 1). The
events of a stream hold only what is new.
"""

import asyncio

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from llmserve.runtime.grammar import constraint_of
from llmserve.runtime.logprobs import token_ids
from llmserve.runtime.messages import GenerateReqInput, LogprobOptions, StrRow
from llmserve.runtime.server.body import Prompts, invalid, json_response, read_json, split_prompts
from llmserve.runtime.server.context import Context
from llmserve.runtime.server.fields import SamplingFields, check_max_tokens, given, sampling_params
from llmserve.runtime.server.generation import collect, request_id, text_of
from llmserve.runtime.server.logprobs import (
    NativeLogprob,
    native_logprobs,
    native_top_logprobs,
    unpack,
)
from llmserve.runtime.server.openapi import operation
from llmserve.runtime.server.sse import EventStream, frame
from llmserve.runtime.validation import MAX_CHOICES

DEFAULT_MAX_NEW_TOKENS = 128


class NativeSamplingParams(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    json_schema: dict[str, object] | str | None = None
    """The whole text must match this, or one of the next two; at most one may be given."""
    regex: str | None = None
    ebnf: str | None = None
    """A grammar in the notation of llama.cpp (GBNF) or of Lark."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSamplingParams | None = None
    rid: str | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    logprob_start_len: int | None = None
    """-1 (default): logprobs of the output only; 0: of prompt and output, where `max_new_tokens` may be 0."""
    user: str | None = None


class GenerateMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token counts are totals so far; `finish_reason` is null until the choice has ended."""

    id: str
    index: int
    finish_reason: dict[str, int | str] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_token_logprobs: list[NativeLogprob] | None = None
    input_top_logprobs: list[list[NativeLogprob]] | None = None
    output_token_logprobs: list[NativeLogprob] | None = None
    output_top_logprobs: list[list[NativeLogprob]] | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: bool | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """With a list of prompts, `tokens` and `count` are lists by prompt."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A list of texts where `tokens` was a list of lists."""

    text: str | list[str]


def add_routes(app: FastAPI, context: Context) -> None:
    @app.post("/generate", openapi_extra=operation(GenerateRequest, Generated))
    async def generate(request: Request) -> Response:
        body = await read_json(request, GenerateRequest)
        req, several = await _generate_request(context, body)
        rows = context.manager.generate(req)
        writer = _NativeWriter(context, req)
        if body.stream:
            return EventStream(rows, writer)
        answers = [writer.answer(choice) for choice in await collect(rows)]
        return json_response(answers if several else answers[0])

    @app.post("/tokenize", openapi_extra=operation(TokenizeRequest, Tokens))
    async def tokenize(request: Request) -> Response:
        body = await read_json(request, TokenizeRequest)
        context.check_model(body.model)
        add_special = given(body.add_special_tokens, True)
        limit = context.manager.limits.max_model_len
        if isinstance(body.prompt, str):
            ids = (await context.manager.tokenize([body.prompt], add_special))[0]
            return json_response(Tokens(tokens=list(ids), count=len(ids), max_model_len=limit))
        if len(body.prompt) > MAX_CHOICES:
            raise invalid(f"at most {MAX_CHOICES} prompts a request, not {len(body.prompt)}", "prompt")
        prompts = await context.manager.tokenize(body.prompt, add_special)
        return json_response(
            Tokens(tokens=[list(ids) for ids in prompts], count=[*map(len, prompts)], max_model_len=limit)
        )

    @app.post("/detokenize", openapi_extra=operation(DetokenizeRequest, Text))
    async def detokenize(request: Request) -> Response:
        body = await read_json(request, DetokenizeRequest)
        context.check_model(body.model)
        if not body.tokens:  # what /tokenize returns for ""
            return json_response(Text(text=""))
        texts = await asyncio.to_thread(_decode, context, body)
        return json_response(Text(text=texts if isinstance(body.tokens[0], list) else texts[0]))


def _decode(context: Context, body: DetokenizeRequest) -> list[str]:
    """Decodes the prompts; called in a thread, because a body can hold millions of tokens."""
    _, prompts = split_prompts([*body.tokens], "tokens")
    vocab_size = context.manager.limits.vocab_size
    if bad := [token_id for ids in prompts for token_id in ids if not 0 <= token_id < vocab_size]:
        raise invalid(f"token id {bad[0]} is not in the vocabulary: ids are 0 to {vocab_size - 1}", "tokens")
    skip_special = given(body.skip_special_tokens, True)
    return [context.tokenizer.decode(ids, skip_special) for ids in prompts]


async def _generate_request(context: Context, body: GenerateRequest) -> tuple[GenerateReqInput, bool]:
    """The request for the TokenizerManager, and whether the answer is a list."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("give either text or input_ids", "text")
    params = given(body.sampling_params, NativeSamplingParams())
    wants_logprobs, top = bool(body.return_logprob), given(body.top_logprobs_num, 0)
    start = given(body.logprob_start_len, -1)
    if start not in (-1, 0):
        raise invalid("logprob_start_len must be -1 (the output only) or 0 (from the start)", "logprob_start_len")
    if not wants_logprobs and (top or start == 0):
        param = "top_logprobs_num" if top else "logprob_start_len"
        raise invalid(f"{param} is only allowed when return_logprob is true", param)
    wants_prompt = wants_logprobs and start == 0
    if not (params.max_new_tokens == 0 and wants_prompt):
        check_max_tokens(params.max_new_tokens, "max_new_tokens")
    prompts: Prompts = body.text if isinstance(body.text, str) else [*(body.text or body.input_ids or [])]
    texts, ids = split_prompts(prompts, "input_ids" if body.text is None else "text")
    if wants_prompt and texts:
        texts, ids = (), await context.manager.tokenize(texts)
    n = given(params.n, 1)
    req = GenerateReqInput(
        rid=request_id(body.rid, "gen-"),
        texts=texts,
        input_ids=ids,
        sampling_params=sampling_params(
            params,
            context.sampling_defaults,
            given(params.max_new_tokens, DEFAULT_MAX_NEW_TOKENS),
            params.min_new_tokens,
        ),
        n=n,
        constraint=constraint_of(
            json_schema=params.json_schema, regex=params.regex, grammar=params.ebnf, names={"grammar": "ebnf"}
        ),
        logprobs=LogprobOptions(top=top, prompt=wants_prompt) if wants_logprobs else None,
        stream=bool(body.stream),
        skip_special_tokens=given(params.skip_special_tokens, True),
        user=given(body.user, ""),
    )
    one_prompt = isinstance(body.text, str) or (body.input_ids is not None and isinstance(body.input_ids[0], int))
    return req, n > 1 or not one_prompt


class _NativeWriter:
    """A RowWriter (sse.py) for /generate, which can also write all rows of a choice as one answer."""

    def __init__(self, context: Context, req: GenerateReqInput) -> None:
        self._req = req
        self._tokenizer = context.tokenizer

    def chunk(self, row: StrRow) -> bytes:
        return frame(msgspec.json.encode(self.answer([row])))

    def last(self) -> bytes:
        return b""

    def answer(self, rows: list[StrRow]) -> Generated:
        """One answer for consecutive rows of a choice; token counts are those of the last row."""
        last = rows[-1]
        output = [entry for row in rows if row.logprobs for entry in unpack(token_ids(row.output_ids), row.logprobs)]
        prompt_ids = self._req.input_ids[last.index // self._req.n] if self._req.input_ids else ()
        prompt = [entry for row in rows if row.prompt_logprobs for entry in unpack(prompt_ids, row.prompt_logprobs)]
        tokenizer, top = self._tokenizer, self._req.logprobs is not None and self._req.logprobs.top > 0
        return Generated(
            text=text_of(rows),
            output_ids=[token_id for row in rows for token_id in token_ids(row.output_ids)],
            meta_info=GenerateMeta(
                id=last.rid,
                index=last.index,
                finish_reason=_finish_reason(last),
                prompt_tokens=last.prompt_tokens,
                completion_tokens=last.completion_tokens,
                cached_tokens=last.cached_tokens,
                input_token_logprobs=native_logprobs(tokenizer, prompt) if prompt else None,
                input_top_logprobs=native_top_logprobs(tokenizer, prompt) if prompt and top else None,
                output_token_logprobs=native_logprobs(tokenizer, output) if self._req.logprobs else None,
                output_top_logprobs=native_top_logprobs(tokenizer, output) if top else None,
            ),
        )


def _finish_reason(row: StrRow) -> dict[str, int | str] | None:
    """As in SGLang: {"type": "length", "length": 16}, {"type": "stop", "matched": …}, {"type": "abort", …}."""
    finish = row.finish
    if finish is None:
        return None
    if finish.type == "length":
        return {"type": "length", "length": row.completion_tokens}
    if finish.type == "stop":
        return {"type": "stop"} if finish.matched is None else {"type": "stop", "matched": finish.matched}
    return {"type": finish.type, "message": finish.message}
