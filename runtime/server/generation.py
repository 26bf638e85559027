"""Shared by all generating routes: request ids, gathering rows into whole choices, and counting tokens."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from llmserve.runtime.messages import FinishReason, StrRow
from llmserve.runtime.server.body import invalid
from llmserve.runtime.server.errors import finish_error
from llmserve.runtime.validation import MAX_RID_LENGTH


def request_id(rid: str | None, prefix: str) -> str:
    """The client's rid, or a new one. Raises RequestError 400 for one that is too long or not printable, as it is shown
    in terminals and logs.
    """
    if rid is None:
        return f"{prefix}{uuid.uuid4().hex}"
    if not 0 < len(rid) <= MAX_RID_LENGTH or not rid.isprintable():
        raise invalid(f"rid must have 1 to {MAX_RID_LENGTH} printable characters", "rid")
    return rid


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a whole request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Tally:
    """Counts the tokens of a request by the last row of each choice, as rows hold totals."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._latest: dict[int, StrRow] = {}

    def add(self, row: StrRow) -> None:
        self._latest[row.index] = row

    def usage(self) -> Usage:
        first_choices = [row for index, row in self._latest.items() if index % self._n == 0]
        prompt = sum(row.prompt_tokens for row in first_choices)
        completion = sum(row.completion_tokens for row in self._latest.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(row.cached_tokens for row in first_choices)),
        )


async def collect(rows: AsyncGenerator[StrRow, None]) -> list[list[StrRow]]:
    """All rows of a request, one list per choice, in the order of the choices.

    Raises RequestError when a choice ends with an error. Cancelling it closes `rows`, which aborts the request.
    """
    choices: dict[int, list[StrRow]] = {}
    async with aclosing(rows):
        async for row in rows:
            if row.finish is not None and (error := finish_error(row.finish)):
                raise error
            choices.setdefault(row.index, []).append(row)
    return [choices[index] for index in sorted(choices)]


def text_of(rows: list[StrRow]) -> str:
    return "".join(row.text for row in rows)


def finish_of(rows: list[StrRow]) -> FinishReason:
    """The finish reason of a whole choice."""
    finish = rows[-1].finish
    assert finish is not None, "rows end with the one that has `finish`"
    return finish
