"""The queue in front of a slow receiver, kept small by merging the rows of each choice.

It knows nothing of sockets. Merging loses nothing: one row says what two consecutive rows of a choice have said.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from typing import TypeVar, cast

import msgspec

from llmserve.runtime.messages import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    Logprobs,
    Message,
    StrRow,
    TokenIDRow,
)

_R = TypeVar("_R", TokenIDRow, StrRow)


class Outbox:
    """Messages in the order of sending. When more than `mark` are queued, rows of the same choice are merged.

    From then on until it is empty it is `full`: its owner should take on no new work.
    """

    def __init__(self, mark: int):
        self._mark = mark
        self._messages: deque[Message] = deque()
        self.full = False

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def head(self) -> Message:
        return self._messages[0]

    def append(self, message: Message) -> None:
        self._messages.append(message)
        if len(self._messages) > self._mark:
            self.full = True
            self._messages = coalesce(self._messages)

    def pop(self) -> None:
        """Removes the head."""
        self._messages.popleft()
        self.full = self.full and bool(self._messages)

    def split(self) -> bool:
        """Replaces the head by two messages with half of its rows each. False when it cannot be split."""
        head = self._messages[0]
        if not isinstance(head, BatchTokenIDOutput | BatchStrOutput | BatchEmbeddingOutput) or len(head.rows) < 2:
            return False
        half = len(head.rows) // 2
        self._messages[0] = msgspec.structs.replace(head, rows=head.rows[half:])
        self._messages.appendleft(msgspec.structs.replace(head, rows=head.rows[:half]))
        return True


def coalesce(messages: Iterable[Message]) -> deque[Message]:
    """The same messages, with each run of token batches or of text batches merged into one that has one row per
    choice.
    """
    merged: deque[Message] = deque()
    for kind, run in itertools.groupby(messages, key=type):
        if kind is BatchTokenIDOutput:
            merged.append(
                BatchTokenIDOutput(rows=_one_each(row for batch in run for row in cast(BatchTokenIDOutput, batch).rows))
            )
        elif kind is BatchStrOutput:
            merged.append(
                BatchStrOutput(rows=_one_each(row for batch in run for row in cast(BatchStrOutput, batch).rows))
            )
        else:
            merged.extend(run)
    return merged


def _one_each(rows: Iterable[_R]) -> tuple[_R, ...]:
    """The rows with those of each choice merged into one."""
    merged: dict[tuple[str, int], _R] = {}
    for row in rows:
        key = (row.rid, row.index)
        merged[key] = _merge(merged[key], row) if key in merged else row
    return tuple(merged.values())


def _merge(old: _R, new: _R) -> _R:
    """One row for two consecutive ones of a choice: new output is concatenated, totals are those of the newer row."""
    joined: dict[str, object] = {
        "output_ids": old.output_ids + new.output_ids,
        "logprobs": _join(old.logprobs, new.logprobs),
        "prompt_logprobs": old.prompt_logprobs or new.prompt_logprobs,
    }
    if isinstance(old, StrRow) and isinstance(new, StrRow):
        joined["text"] = old.text + new.text
    elif isinstance(old, TokenIDRow) and isinstance(new, TokenIDRow):
        joined["stop"] = old.stop or new.stop
        joined["min_new_tokens"] = old.min_new_tokens or new.min_new_tokens
    return msgspec.structs.replace(new, **joined)


def _join(old: Logprobs | None, new: Logprobs | None) -> Logprobs | None:
    if old is None or new is None:
        return old or new
    return Logprobs.joined((old, new))
