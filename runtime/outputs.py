"""The results that Engine returns, made from the rows of messages.py."""

from typing import Any, Literal

import msgspec
import numpy as np

from llmserve.runtime.logprobs import token_ids, unpacked
from llmserve.runtime.messages import FinishReason, Logprobs, StrRow
from llmserve.runtime.request_error import RequestError


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, its logprob, and the likeliest tokens at its position with their logprobs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of one choice, or all of it. Token counts are totals so far; `finish` is set in the last chunk."""

    index: int
    text: str
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: FinishReason | None
    logprobs: list[TokenLogprob] | None

    @property
    def finish_reason(self) -> Literal["stop", "length", "abort", "error"] | None:
        return None if self.finish is None else self.finish.type


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one prompt, with `n` choices. The properties are those of the first choice."""

    rid: str
    choices: list[Chunk]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def output_ids(self) -> list[int]:
        return self.choices[0].output_ids

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length" or "abort"."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def prompt_tokens(self) -> int:
        return self.choices[0].prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were taken from the prefix cache."""
        return self.choices[0].cached_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's vector, float32 [hidden_size]."""

    vector: "np.ndarray[Any, np.dtype[np.float32]]"
    prompt_tokens: int


def checked(row: StrRow) -> StrRow:
    """The row itself. Raises RequestError if its choice has failed."""
    if row.finish is not None and row.finish.type == "error":
        raise RequestError(row.finish.status, row.finish.message)
    return row


def chunk_of(rows: list[StrRow]) -> Chunk:
    """One chunk for consecutive rows of a choice."""
    last = rows[-1]
    logprobs = [
        entry for row in rows if row.logprobs is not None for entry in _with_logprobs(row.output_ids, row.logprobs)
    ]
    return Chunk(
        index=last.index,
        text="".join(row.text for row in rows),
        output_ids=token_ids(b"".join(row.output_ids for row in rows)),
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        completion_tokens=last.completion_tokens,
        finish=last.finish,
        logprobs=logprobs or None,
    )


def _with_logprobs(output_ids: bytes, logprobs: Logprobs) -> list[TokenLogprob]:
    tokens = zip(token_ids(output_ids), unpacked(logprobs), strict=True)
    return [TokenLogprob(token_id, value, top) for token_id, (value, top) in tokens]
