"""Swapping the weights of a model on one rank, for scheduler/update.py. Reading and staging them is in weights.py."""

from collections.abc import Callable

from llmserve.runtime.engine.weights import (
    SwapCancelled,
    commit_weights,
    discard_weights,
    preflight,
    stage_weights,
)
from llmserve.runtime.engine.worker import TpModelWorker
from llmserve.runtime.models.hub import Checkpoint


class ModelSwap:
    """A WeightSwap. `checkpoint` is the one that serves."""

    def __init__(self, worker: TpModelWorker, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._worker = worker
        self._model = worker.model
        self._staged: Checkpoint | None = None

    def differences(self, new: Checkpoint) -> list[str]:
        return preflight(self._model, self.checkpoint, new)

    def stage(self, new: Checkpoint, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> int:
        try:
            nbytes = stage_weights(self._model, new, progress, cancelled)
        except SwapCancelled:
            return 0
        self._staged = new
        return nbytes

    def commit(self) -> None:
        assert self._staged is not None, "nothing is staged"
        commit_weights(self._model)
        self._worker.count_weights()
        self.checkpoint = self._staged
        self.discard()

    def discard(self) -> None:
        self._staged = None
        discard_weights(self._model)
