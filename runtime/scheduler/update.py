"""Swapping the weights under load, as a transaction: check, stage, quiesce, commit.

A failure, or a caller that leaves, before the commit leaves the old weights serving. How a worker compares, stages and
exchanges weights is in engine/swap.py.
"""

import logging
import os
import threading
from collections.abc import Generator
from pathlib import Path

from llmserve.runtime.config import ConfigError
from llmserve.runtime.decision import NAME, decide, decided
from llmserve.runtime.engine.batch import WeightSwap
from llmserve.runtime.instance import is_last_replica
from llmserve.runtime.messages import RpcProgress, UpdateWeightReqInput, UpdateWeightReqOutput
from llmserve.runtime.models import hub
from llmserve.runtime.scheduler.loop import Scheduler
from llmserve.runtime.scheduler.rpc import Refusal, Work

log = logging.getLogger(__name__)

SHOWN_DIFFERENCES = 5


class Staging:
    """A thread that finds a checkpoint, compares it with the model and, if it fits, stages it, while steps go on."""

    def __init__(self, swap: WeightSwap, request: UpdateWeightReqInput):
        self.progress = RpcProgress(stage="checking")
        self.checkpoint: hub.Checkpoint | None = None
        self.differences: list[str] = []
        self.nbytes = 0
        self.error: Exception | None = None
        self.ended = False
        self._swap = swap
        self._request = request
        self._cancelled = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="stage-weights", daemon=True).start()

    def cancel(self) -> None:
        """Stops staging. Nothing stays staged once it has `ended`."""
        with self._lock:
            self._cancelled = True
            if self.ended:
                self._swap.discard()

    def _run(self) -> None:
        try:
            self.checkpoint = hub.resolve(self._request.model_path, self._request.load_format)
            self.differences = self._swap.differences(self.checkpoint)
            if not self.differences and not self._request.dry_run and not self._cancelled:
                self.nbytes = self._swap.stage(self.checkpoint, self._tell, lambda: self._cancelled)
        except Exception as error:
            self.error = error
        with self._lock:
            self.ended = True
            if self._cancelled:
                self._swap.discard()

    def _tell(self, done: int, total: int) -> None:
        self.progress = RpcProgress(stage="reading", done=done, total=total, unit="bytes")


class WeightUpdates:
    """Updates of one scheduler's weights, one at a time."""

    def __init__(self, scheduler: Scheduler, model_path: str, directory: Path):
        self.model_path = model_path
        """The path of the weights that serve."""
        self._directory = directory
        """The instance's directory, for decisions."""
        self._scheduler = scheduler
        self._staging: Staging | None = None

    def update(self, request: UpdateWeightReqInput) -> Work:
        """Answers when the new weights serve. Closed or refused before that, it leaves the old ones serving."""
        scheduler = self._scheduler
        began, version = scheduler.now(), scheduler.weight_version
        self._check_decision(request)
        if self._staging is not None and not self._staging.ended:
            raise Refusal("busy", "the update before this one was cancelled and is still ending")
        yield RpcProgress(stage="checking")
        self._staging = staging = Staging(scheduler.worker.swap, request)
        try:
            while not staging.ended:
                yield staging.progress
            checkpoint = _checked(staging, request)
            paused_s = 0.0
            if not request.dry_run:
                paused_s = yield from self._exchange(request, checkpoint)
        except BaseException:
            staging.cancel()
            if request.decision:
                decide(self._directory, request.decision, "abort")
            raise
        return UpdateWeightReqOutput(
            old_version=version,
            new_version=scheduler.weight_version,
            model_path=checkpoint.path,
            bytes=staging.nbytes,
            seconds=scheduler.now() - began,
            paused_s=paused_s,
            differences=tuple(staging.differences),
        )

    def _exchange(
        self, request: UpdateWeightReqInput, checkpoint: hub.Checkpoint
    ) -> Generator[RpcProgress, None, float]:
        """Pauses in the mode that the operator has chosen, commits, and resumes. Returns the seconds of the pause."""
        scheduler = self._scheduler
        pause_before, began = scheduler.pause_mode, scheduler.now()
        scheduler.pause(request.mode)
        try:
            while not scheduler.quiet:
                yield RpcProgress(stage="pausing", done=len(scheduler.table.running), unit="running")
            if request.decision:
                try:
                    yield from self._until_decided(request.decision)
                except GeneratorExit:
                    if decide(self._directory, request.decision, "abort") == "abort":
                        raise
                    # The caller has left too late: another replica may have committed already.
            else:
                yield RpcProgress(stage="exchanging")  # sent at once, so that a caller that has left cancels
            try:
                scheduler.worker.swap.commit()
            except Exception as error:
                log.exception("commit failed")
                if request.decision:
                    end_process()  # the other replicas commit, and none may go on serving the old weights
                raise Refusal("failed", f"the exchange failed ({error}); the old weights serve on") from None
            scheduler.weight_version += 1
            scheduler.flush()  # nothing runs, so this removes every prefix computed with the old weights
            self.model_path = checkpoint.path
            log.info("weights updated version=%d path=%s", scheduler.weight_version, checkpoint.path)
        finally:
            scheduler.pause_mode = pause_before
        return scheduler.now() - began

    def _check_decision(self, request: UpdateWeightReqInput) -> None:
        replicas = self._scheduler.args.dp_size
        if request.decision:
            if not NAME.fullmatch(request.decision):
                raise Refusal("invalid", f"{request.decision!r} is not the name of a decision")
        elif replicas > 1 and not request.dry_run and not is_last_replica(self._directory):
            raise Refusal("invalid", f"this is one of {replicas} replicas, which are updated together or not at all")

    def _until_decided(self, name: str) -> Generator[RpcProgress, None, None]:
        """Waits for the decision of all replicas. Raises Refusal when it is to abort."""
        while (word := decided(self._directory, name)) is None:
            yield RpcProgress(stage="prepared")
        if word == "abort":
            raise Refusal("failed", "another replica does not take the new weights; the old ones serve on")


def end_process() -> None:
    log.critical("this replica ends, as it cannot follow the others")
    os._exit(1)


def _checked(staging: Staging, request: UpdateWeightReqInput) -> hub.Checkpoint:
    """The staged checkpoint. Raises Refusal with the reason when it cannot be used."""
    if isinstance(staging.error, ConfigError):
        raise Refusal("failed", f"{staging.error}; the old weights serve on")
    if staging.error is not None:
        log.error("staging failed", exc_info=staging.error)
        kind = type(staging.error).__name__
        raise Refusal("failed", f"cannot read {request.model_path} ({kind}); the old weights serve on")
    if staging.differences and not request.dry_run:
        more = len(staging.differences) - SHOWN_DIFFERENCES
        lines = staging.differences[:SHOWN_DIFFERENCES] + (
            [f"and {more} more, which a dry run tells"] if more > 0 else []
        )
        raise Refusal("failed", "\n".join(["the checkpoint differs from the model that runs:", *lines]))
    assert staging.checkpoint is not None
    return staging.checkpoint
