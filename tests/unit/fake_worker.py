"""A worker without a model. Its next token is a function of the whole history as read back through the pages.

What it stores for a position depends on all tokens up to it, as real KV does, and is made from what the page of the
position before holds. So a page that is mixed up, unfinished or stale shows as a wrong token.
"""

import random
import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from llmserve.runtime.engine.batch import (
    PlanRow,
    RowResult,
    SampleSpec,
    StepPlan,
    StepResult,
    WorkerInfo,
    int32_array,
)
from llmserve.runtime.messages import Logprobs

PRIME = 2**31 - 1
HIDDEN = 4
GARBAGE = -1


def chain(before: int, token: int) -> int:
    """What is stored for a token after what is stored for the position before (0 at the beginning)."""
    return (before * 31 + token + 7) % PRIME


def draw(stored: Sequence[int], spec: SampleSpec, vocab_size: int) -> int:
    """The next token after positions with these contents; never a forbidden or masked one."""
    data = np.asarray(stored, dtype=np.int64).tobytes()
    salt = 0 if spec.params.greedy else spec.seed * 1_000_003 + spec.position
    token = zlib.crc32(data, salt & 0xFFFFFFFF) % vocab_size
    while token in spec.forbidden or (spec.mask and not spec.mask[token >> 3] >> (token & 7) & 1):
        token = (token + 1) % vocab_size
    return token


def alone(prompt: Sequence[int], spec: SampleSpec, count: int, vocab_size: int, stop: frozenset[int]) -> list[int]:
    """What a request generates alone: up to `count` tokens, the first of `stop` ends it."""
    stored: list[int] = []
    for token in prompt:
        stored.append(chain(stored[-1] if stored else 0, token))
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in stop and len(output) > spec.params.min_new_tokens):
        forbidden = tuple(stop) if len(output) < spec.params.min_new_tokens else ()
        spec = msgspec.structs.replace(spec, position=len(prompt) + len(output), forbidden=forbidden)
        output.append(draw(stored, spec, vocab_size))
        stored.append(chain(stored[-1], output[-1]))
    return output


def hidden(stored: int) -> np.ndarray:
    """The final hidden state of a position, [HIDDEN]."""
    return np.array([stored % 97, stored % 89, stored % 83, 1], dtype=np.float32)


class FakeHandle:
    """A step that is computed when its turn comes, and done when somebody waits for it."""

    def __init__(self, result: StepResult | Exception) -> None:
        self._result = result

    def result(self) -> StepResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def done(self) -> bool:
        return False


class FakeWorker:
    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        vocab_size: int = 50,
        max_model_len: int = 4096,
        eos_token_ids: tuple[int, ...] = (0,),
    ) -> None:
        self.info = WorkerInfo(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            hidden_size=HIDDEN,
            eos_token_ids=eos_token_ids,
            num_pages=num_pages,
            page_size=page_size,
            bytes_per_page=page_size * 8,
            weight_bytes=1000,
        )
        self.slots = np.full(num_pages * page_size, GARBAGE, dtype=np.int64)
        self.plans: list[StepPlan] = []
        self.fail: Callable[[StepPlan], Exception | None] = lambda plan: None
        """Returns what a step is to raise."""
        self.row_error: Callable[[PlanRow], str] = lambda row: ""

    def submit(self, plan: StepPlan) -> FakeHandle:
        # Through bytes, as to other ranks: nothing may depend on shared objects.
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        self.plans.append(plan)
        error = self.fail(plan)
        if error is None:
            self._check_disjoint(plan)
            return FakeHandle(StepResult(rows=tuple(self._run(row) for row in plan.rows)))
        for row in plan.rows:  # a step that fails has written anything
            self.slots[self._slots(row)[row.start :]] = random.randrange(1000)
        return FakeHandle(error)

    def _slots(self, row: PlanRow) -> np.ndarray:
        size = self.info.page_size
        end = row.start + len(row.token_ids) // 4
        pages = int32_array(row.pages)
        assert len(pages) * size >= end, "the block table does not cover the row"
        return (pages[:, None] * size + np.arange(size)).reshape(-1)[:end]

    def _check_disjoint(self, plan: StepPlan) -> None:
        """No two rows of a step may write one slot, and none may write what another reads."""
        written: set[int] = set()
        for row in plan.rows:
            mine = set(self._slots(row)[row.start :].tolist())
            assert not mine & written, "two rows write one slot"
            written |= mine
        for row in plan.rows:
            assert not written & set(self._slots(row)[: row.start].tolist()), "a row reads what another one writes"

    def _run(self, row: PlanRow) -> RowResult:
        slots = self._slots(row)
        tokens = int32_array(row.token_ids).tolist()
        assert tokens
        before = int(self.slots[slots[row.start - 1]]) if row.start else 0
        for slot, token in zip(slots[row.start :].tolist(), tokens, strict=True):
            before = chain(before, token)
            self.slots[slot] = before
        error = self.row_error(row)
        if error:
            return RowResult(error=error)
        stored = self.slots[slots].tolist()
        token_id = logprobs = prompt_logprobs = None
        pooled = b""
        if row.sample is not None:
            assert row.sample.position == len(slots)
            token_id = draw(stored, row.sample, self.info.vocab_size)
            if row.sample.top_logprobs is not None:
                logprobs = fake_logprobs([token_id], row.sample.top_logprobs)
        if row.prompt_logprobs is not None:
            following = tokens[1:] + ([] if row.next_token is None else [row.next_token])
            prompt_logprobs = fake_logprobs(following, row.prompt_logprobs)
        if row.pool == "mean":
            pooled = np.sum([hidden(value) for value in stored[row.start :]], axis=0).astype("<f4").tobytes()
        elif row.pool == "last":
            pooled = hidden(stored[-1]).tobytes()
        return RowResult(token_id=token_id, logprobs=logprobs, prompt_logprobs=prompt_logprobs, hidden=pooled)


def fake_logprobs(tokens: Sequence[int], top: int) -> Logprobs:
    """A token's logprob is minus its id; the alternatives are the ids 0 … top - 1."""
    ids = np.tile(np.arange(top, dtype="<i4"), (len(tokens), 1))
    return Logprobs(
        token_logprobs=(-np.asarray(tokens, dtype="<f4")).tobytes(),
        top=top,
        top_ids=ids.tobytes(),
        top_logprobs=(-ids.astype("<f4")).tobytes(),
    )
