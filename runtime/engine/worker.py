"""The worker: one replica's model, its KV pages, and the running of a step's plan over them.

It schedules nothing and remembers nothing of a request between steps but what lies in its pages.
"""

from concurrent.futures import Future
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend
from llmserve.runtime.engine.batch import (
    PlanRow,
    RowResult,
    SampleSpec,
    StepPlan,
    StepResult,
    WeightSwap,
    WorkerDied,
    WorkerInfo,
    int32_array,
)
from llmserve.runtime.engine.forward import make_forward_batch
from llmserve.runtime.engine.sampler import logprobs_of, sample
from llmserve.runtime.engine.weights import weight_bytes
from llmserve.runtime.messages import Logprobs
from llmserve.runtime.models.registry import CausalLM

PROMPT_LOGPROB_ROWS = 128
"""Positions whose logits are computed at once for prompt logprobs; float32 logits take 200 kB a position and more."""


class TpModelWorker:
    """Runs plans on one device. `submit` computes the step before it returns: its handle is done."""

    swap: WeightSwap
    """Set by create_worker, which knows the checkpoint."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, info: WorkerInfo, device: torch.device) -> None:
        self.info = info
        self.model = model
        self._attention = attention
        self._device = device

    def count_weights(self) -> None:
        """Updates `info.weight_bytes` after a swap: quantized blocks take less memory than numbers."""
        self.info = msgspec.structs.replace(self.info, weight_bytes=weight_bytes(self.model))

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        handle: Future[StepResult] = Future()
        try:
            handle.set_result(self._run(plan))
        except torch.AcceleratorError as error:  # the device is unusable after this, unlike after an OutOfMemoryError
            handle.set_exception(WorkerDied(f"the device failed ({str(error).splitlines()[0]})"))
        except Exception as error:
            handle.set_exception(error)
        return handle

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        batch, starts = make_forward_batch(plan, self.info.page_size, self._device)
        self._attention.plan(batch)
        hidden = self.model.forward(batch.input_ids, batch.positions, self._attention)
        return self._results(plan, hidden, starts)

    def _results(self, plan: StepPlan, hidden: Tensor, starts: list[int]) -> StepResult:
        """What the plan asks of the final hidden states [T, hidden]."""
        drawn = iter(self._draw(plan, hidden, starts))
        rows = []
        for row, (start, end) in zip(plan.rows, pairwise(starts), strict=True):
            result = next(drawn) if row.sample is not None else RowResult()
            if row.prompt_logprobs is not None:
                logprobs = self._prompt_logprobs(row, row.prompt_logprobs, hidden[start:end])
                result = msgspec.structs.replace(result, prompt_logprobs=logprobs)
            if row.pool:
                result = _pooled(row, hidden[start:end])
            rows.append(result)
        return StepResult(rows=tuple(rows))

    def _draw(self, plan: StepPlan, hidden: Tensor, starts: list[int]) -> list[RowResult]:
        specs = [row.sample for row in plan.rows if row.sample is not None]
        if not specs:
            return []
        last = [end - 1 for row, end in zip(plan.rows, starts[1:], strict=True) if row.sample is not None]
        if len(last) < hidden.shape[0]:
            hidden = hidden[torch.tensor(last, device=self._device)]
        return self._sample(self.model.logits(hidden), specs)

    def _prompt_logprobs(self, row: PlanRow, top: int, hidden: Tensor) -> Logprobs:
        """Logprobs of the token after each one of the row; after the last one only where the plan has `next_token`."""
        following = int32_array(row.token_ids)[1:].tolist()
        if row.next_token is not None:
            following.append(row.next_token)
        targets = torch.tensor(following, dtype=torch.int64, device=self._device)
        spans = [slice(i, i + PROMPT_LOGPROB_ROWS) for i in range(0, len(following), PROMPT_LOGPROB_ROWS)]
        parts = [
            self._logprobs(self.model.logits(hidden[: len(following)][span]), targets[span], top) for span in spans
        ]
        return Logprobs.joined(parts)

    def _sample(self, logits: Tensor, specs: list[SampleSpec]) -> list[RowResult]:
        return sample(logits, specs)

    def _logprobs(self, logits: Tensor, targets: Tensor, top: int) -> Logprobs:
        return logprobs_of(logits, targets, top)


def _pooled(row: PlanRow, hidden: Tensor) -> RowResult:
    vector = hidden.float().sum(0) if row.pool == "mean" else hidden[-1].float()
    if not bool(torch.isfinite(vector).all()):
        return RowResult(error="the model's hidden states are not finite")
    return RowResult(hidden=vector.cpu().numpy().astype("<f4", copy=False).tobytes())
