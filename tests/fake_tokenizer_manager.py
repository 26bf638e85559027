"""A TokenizerManager without a stack behind it: it answers with rows that the test wrote."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence

import numpy as np

from llmserve.runtime.grammar import grammar_of
from llmserve.runtime.messages import (
    EmbeddingReqInput,
    EmbeddingRow,
    FinishReason,
    GenerateReqInput,
    HttpMetrics,
    LogprobOptions,
    Logprobs,
    SchedulerMetrics,
    StrRow,
)
from llmserve.runtime.metrics import FrontMetrics
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.tokenizer import Tokenizer
from llmserve.runtime.validation import Limits, check_before_tokenizing, check_prompts

LENGTH = FinishReason(type="length")


@dataclasses.dataclass
class Script:
    """What every choice answers: a row for each of `pieces`, after `delay_s` each, the last one with `finish`."""

    pieces: Sequence[str] = ("Hello", " world")
    finish: FinishReason = LENGTH
    delay_s: float = 0.0
    cached_tokens: int = 0
    before_rows: Exception | None = None
    after_rows: Exception | None = None
    """Raised instead of the last row."""


class FakeTokenizerManager:
    """Honours nothing but `script`; remembers the requests it got and how their consumers left."""

    def __init__(self, tokenizer: Tokenizer, script: Script | None = None) -> None:
        self.tokenizer = tokenizer
        self.script = script or Script()
        self.limits = Limits(vocab_size=tokenizer.vocab_size, max_model_len=512)
        self.state = "ready"
        self.metrics = FrontMetrics()
        self.scheduler_metrics: SchedulerMetrics | None = None
        self.health: tuple[bool, str] = (True, "ok")
        self.requests: list[GenerateReqInput | EmbeddingReqInput] = []
        self.ended: list[str] = []
        self.aborted: list[str] = []
        self.in_flight: set[str] = set()

    @property
    def last(self) -> GenerateReqInput:
        request = self.requests[-1]
        assert isinstance(request, GenerateReqInput)
        return request

    def healthy(self) -> tuple[bool, str]:
        return self.health

    def http_metrics(self) -> HttpMetrics:
        return self.metrics.snapshot()

    async def tokenize(self, texts: Sequence[str], add_special_tokens: bool = True) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.tokenizer.encode(text, add_special_tokens)) for text in texts)

    async def generate(self, req: GenerateReqInput) -> AsyncGenerator[StrRow, None]:
        check_before_tokenizing(req, self.limits)
        if req.constraint is not None:
            grammar_of(req.constraint)
        if req.rid in self.in_flight:
            raise RequestError(400, "in flight already", "rid", code="duplicate_rid")
        prompts = [tuple(self.tokenizer.encode(text, req.add_special_tokens)) for text in req.texts] or [*req.input_ids]
        check_prompts(prompts, self.limits, "prompt", room=min(req.sampling_params.max_new_tokens, 1))
        self.requests.append(req)
        if self.script.before_rows is not None:
            raise self.script.before_rows
        self.in_flight.add(req.rid)
        try:
            # As the detokenizer sends them: row by row, over all choices.
            for row in self._rows(req, prompts):
                await asyncio.sleep(self.script.delay_s)
                if row.finish is not None and self.script.after_rows is not None:
                    raise self.script.after_rows
                yield row
            self.ended.append(req.rid)
        finally:
            self.in_flight.discard(req.rid)
            if req.rid not in self.ended:
                self.aborted.append(req.rid)

    def _rows(self, req: GenerateReqInput, prompts: Sequence[tuple[int, ...]]) -> Iterator[StrRow]:
        completion = 0
        pieces = self.script.pieces if req.sampling_params.max_new_tokens else ("",)
        for step, piece in enumerate(pieces):
            ids = self.tokenizer.encode(piece, False)
            completion += len(ids)
            last = step == len(pieces) - 1
            for index in range(len(prompts) * req.n):
                prompt = prompts[index // req.n]
                yield StrRow(
                    rid=req.rid,
                    index=index,
                    text=piece,
                    output_ids=np.asarray(ids, "<i4").tobytes(),
                    prompt_tokens=len(prompt),
                    cached_tokens=self.script.cached_tokens,
                    completion_tokens=completion,
                    finish=self.script.finish if last else None,
                    logprobs=logprobs_of(ids, req.logprobs, first=-0.5) if req.logprobs else None,
                    prompt_logprobs=logprobs_of(prompt, req.logprobs, first=np.nan)
                    if req.logprobs and req.logprobs.prompt and step == 0
                    else None,
                )

    async def embed(self, req: EmbeddingReqInput) -> list[EmbeddingRow]:
        self.requests.append(req)
        self.in_flight.add(req.rid)
        try:
            await asyncio.sleep(self.script.delay_s)
            self.ended.append(req.rid)
        finally:
            self.in_flight.discard(req.rid)
            if req.rid not in self.ended:
                self.aborted.append(req.rid)
        vector = np.array([1.0, -0.5, 0.25], "<f4").tobytes()
        prompts = [tuple(self.tokenizer.encode(text)) for text in req.texts] or [*req.input_ids]
        return [
            EmbeddingRow(rid=req.rid, index=i, embedding=vector, prompt_tokens=len(ids))
            for i, ids in enumerate(prompts)
        ]


def logprobs_of(ids: Sequence[int], options: LogprobOptions, first: float) -> Logprobs:
    """-1 for every token but the first; the likeliest tokens are 0, 1, 2 … with -0.25, -0.5, -0.75 …"""
    k, top = len(ids), options.top
    values = np.full(k, -1.0, "<f4")
    values[:1] = first
    top_ids = np.tile(np.arange(top, dtype="<i4"), (k, 1))
    top_values = np.tile(-0.25 * np.arange(1, top + 1, dtype="<f4"), (k, 1)).astype("<f4")
    return Logprobs(
        token_logprobs=values.tobytes(), top=top, top_ids=top_ids.tobytes(), top_logprobs=top_values.tobytes()
    )
