"""The scheduler's Worker on rank 0 of several ranks, which makes the other ranks do the same (ranks.py).

It broadcasts commands and receives results from the last pipeline stage. All ranks report once a second, so that the
loss of one is noticed while nothing runs, too.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec

from llmserve.runtime.distributed.channel import broadcast_bytes, receive_bytes
from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.engine.batch import PlanRow, StepPlan, StepResult, WeightSwap, WorkerDied
from llmserve.runtime.engine.busy import ActiveTime
from llmserve.runtime.engine.checkpoint import open_source
from llmserve.runtime.engine.ranks import (
    CPU,
    Command,
    Commit,
    Discard,
    Outcome,
    Rank,
    Report,
    Run,
    Stage,
    not_answering,
)
from llmserve.runtime.engine.shared_source import SharedSource
from llmserve.runtime.engine.weights import SwapCancelled, preflight
from llmserve.runtime.messages import ProcessInfo
from llmserve.runtime.models.hub import Checkpoint

REPORT_INTERVAL_S = 1.0


class Leader:
    """The Worker on rank 0: carries out each call on all ranks.

    `lost` is called, in another thread, when a rank does not answer while nothing runs.
    """

    swap: WeightSwap

    def __init__(self, rank: Rank, checkpoint: Checkpoint, lost: Callable[[str], None]) -> None:
        self.info = rank.info
        self.swap = RankedSwap(self, checkpoint)
        self.rank = rank
        self._reports: dict[int, tuple[ProcessInfo, float]] = {}
        """The latest reports of the other ranks, and when they came: a second ago at most where all is well."""
        self._control = rank.topology.control
        self._sending = threading.Lock()
        self._lost = lost
        self._expected: SimpleQueue[Future[StepResult]] = SimpleQueue()
        self._active = ActiveTime()
        threading.Thread(target=self._collect_reports, daemon=True, name="reports").start()
        if not rank.pipe.last:
            threading.Thread(target=self._collect_results, daemon=True, name="results").start()

    @property
    def active_s(self) -> float:
        return self._active.seconds

    def all_reports(self) -> tuple[ProcessInfo, ...]:
        """The reports of all ranks, this one first."""
        now = time.monotonic()
        latest = list(self._reports.values())  # copied at once, because another thread adds to it
        return (self.rank.report(), *(msgspec.structs.replace(info, silent_s=now - came) for info, came in latest))

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Runs this rank's part of the step. The handle is done already with one pipeline stage, else when the last
        stage has sent its result.
        """
        handle: Future[StepResult] = Future()
        run = Run(plan, self._active.enter())
        try:
            self.tell(Run(without_masks(plan), run.steps) if self.rank.draws else run)
            outcome = self.rank.step(run)
        except WorkerDied as error:
            handle.set_exception(error)
            return handle
        if outcome is None:
            self._expected.put(handle)
        else:
            self._finish(handle, outcome)
        return handle

    def tell(self, command: Command) -> None:
        """Broadcasts a command. Raises WorkerDied."""
        data = msgspec.msgpack.encode(command)
        try:
            with self._sending:
                broadcast_bytes(data, self._control, "plan")
        except RankLost as error:
            raise not_answering(error) from error

    def _finish(self, handle: "Future[StepResult]", outcome: Outcome) -> None:
        self._active.leave()
        if outcome.result is None:
            handle.set_exception(RuntimeError(outcome.error))
        else:
            handle.set_result(outcome.result)

    def _collect_results(self) -> None:
        """Completes the handles, in order, with the results that the last stage sends. Runs in a thread of its own."""
        topology = self.rank.topology
        source = (topology.pp.size - 1) * topology.tp.size
        decoder = msgspec.msgpack.Decoder(Outcome)
        while True:
            handle = self._expected.get()
            try:
                self._finish(handle, decoder.decode(receive_bytes(source, self._control, "results")))
            except RankLost as error:
                handle.set_exception(not_answering(error))

    def _collect_reports(self) -> None:
        decoder = msgspec.msgpack.Decoder(ProcessInfo)
        try:
            while True:
                self.tell(Report())
                for rank in range(1, self._control.size):
                    report = decoder.decode(receive_bytes(rank, self._control, "reports"))
                    self._reports[rank] = report, time.monotonic()
                time.sleep(REPORT_INTERVAL_S)
        except (RankLost, WorkerDied) as error:
            self._lost(str(error))


def without_masks(plan: StepPlan) -> StepPlan:
    """The plan without grammar masks (one bit per vocabulary entry each), for ranks that do not sample."""

    def without(row: PlanRow) -> PlanRow:
        if row.sample is None or not row.sample.mask:
            return row
        return msgspec.structs.replace(row, sample=msgspec.structs.replace(row.sample, mask=b""))

    return StepPlan(rows=tuple(without(row) for row in plan.rows))


class RankedSwap:
    """A WeightSwap over all ranks: rank 0 reads, all stage, and then all exchange their weights or none does."""

    def __init__(self, leader: Leader, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._leader = leader
        self._staged: Checkpoint | None = None

    def differences(self, new: Checkpoint) -> list[str]:
        return preflight(self._leader.rank.model, self.checkpoint, new)

    def stage(self, new: Checkpoint, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> int:
        rank = self._leader.rank
        opened = open_source(new)  # before the other ranks are told, so that a failure here concerns no other rank
        self._leader.tell(Stage(new))
        source = SharedSource(opened, rank.topology.updates, CPU, rank.topology.pp.size)
        try:
            nbytes = rank.share_weights(new, source, progress, cancelled)
        except SwapCancelled:
            return 0
        self._staged = new
        return nbytes

    def commit(self) -> None:
        assert self._staged is not None, "nothing is staged"
        new, self._staged = self._staged, None
        self._leader.tell(Commit())
        if not self._leader.rank.commit_weights():
            raise RuntimeError("a rank could not exchange its weights")
        self._leader.info = self._leader.rank.info
        self.checkpoint = new

    def discard(self) -> None:
        """Discards what is staged on all ranks; a failed `stage` has already done so."""
        if self._staged is not None:
            self._staged = None
            self._leader.tell(Discard())
            self._leader.rank.discard_weights()
