"""One model on several ranks: the first one is told what to do and tells the others, which only follow.

The first rank is the scheduler's Worker. What it broadcasts is a command, as msgspec bytes; the others take it in a
thread, so that the next plan is there when a step ends. Results come back from the last stage. Once a second all
report, so that a rank that is gone is missed also while nothing runs.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec
import psutil
import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend
from llmserve.runtime.config import ConfigError
from llmserve.runtime.distributed.channel import broadcast_bytes, receive_broadcast, receive_bytes, send_bytes
from llmserve.runtime.distributed.collectives import least
from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.distributed.pipeline import Pipe
from llmserve.runtime.engine.batch import (
    PlanRow,
    RowResult,
    SampledLogprobs,
    SampleSpec,
    StepPlan,
    StepResult,
    WeightSwap,
    WorkerDied,
    WorkerInfo,
)
from llmserve.runtime.engine.busy import BusyTime
from llmserve.runtime.engine.checkpoint import open_source
from llmserve.runtime.engine.forward import make_forward_batch
from llmserve.runtime.engine.shared_source import SharedSource
from llmserve.runtime.engine.weights import (
    SwapCancelled,
    commit_weights,
    discard_weights,
    preflight,
    stage_weights,
)
from llmserve.runtime.engine.worker import TpModelWorker
from llmserve.runtime.messages import ProcessInfo
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.models.registry import CausalLM
from llmserve.runtime.ops import native

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
CPU = torch.device("cpu")


class Run(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan
    steps: int
    """Under way with this one: at most one a stage."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """Tell the first rank how you are."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Receive new weights beside those that serve."""

    checkpoint: Checkpoint


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Exchange the staged weights with those that serve, if all can."""


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Forget the staged weights."""


Command = Run | Report | Stage | Commit | Discard


class Outcome(msgspec.Struct, frozen=True):
    """What comes of a step, or why nothing does. All ranks are still in step then: only drawing has failed."""

    result: StepResult | None
    error: str = ""


class Rank(TpModelWorker):
    """This process's part of a model that several ranks hold."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        info: WorkerInfo,
        device: torch.device,
        topology: Topology,
        threads: Callable[[int], int],
    ) -> None:
        """`threads`: how many of the CPU's there are for this rank, by the number of steps under way."""
        super().__init__(model, attention, info, device)
        self.topology = topology
        self._threads = threads
        self.pipe = Pipe(topology, info.hidden_size, model.dtype, device)
        self.draws = self.pipe.last and topology.tp.rank == 0
        """Whether this is the one rank that turns logits into tokens."""
        self.busy = BusyTime(device)
        self.model = model
        self._process = psutil.Process()
        self._drawing_error: Exception | None = None

    @torch.inference_mode()
    def step(self, run: Run) -> Outcome | None:
        """This rank's part of a step; the outcome on the rank that draws.

        Raises WorkerDied where it fails: the ranks are no longer in step.
        """
        try:
            plan = run.plan
            if self._device.type == "cpu":
                native.set_threads(self._threads(run.steps))
            batch, starts = make_forward_batch(plan, self.info.page_size, self._device)
            self._attention.plan(batch)
            received = None if self.pipe.first else self.pipe.receive(batch.num_tokens)
            self.busy.begin()
            hidden = self.model.forward(batch.input_ids, batch.positions, self._attention, received)
            outcome = None
            if self.pipe.last:
                outcome = self._outcome(plan, hidden, starts)
            else:
                self.pipe.send(hidden)
            self.busy.end()
            return outcome
        except RankLost as error:
            raise WorkerDied(f"another rank does not answer ({error})") from error
        except Exception as error:
            raise WorkerDied(f"the step failed ({type(error).__name__}: {error})") from error

    def _outcome(self, plan: StepPlan, hidden: Tensor, starts: list[int]) -> Outcome | None:
        self._drawing_error = None
        result = self._results(plan, hidden, starts)
        if not self.draws:
            return None
        if self._drawing_error is not None:
            log.error("drawing failed", exc_info=self._drawing_error)
            return Outcome(None, f"{type(self._drawing_error).__name__}: {self._drawing_error}")
        return Outcome(result)

    def _sample(self, logits: Tensor, specs: list[SampleSpec]) -> list[RowResult]:
        """The other ranks make logits too, and nothing of them. A failure must not keep a rank from what follows."""
        if self.draws:
            try:
                return super()._sample(logits, specs)
            except Exception as error:
                self._drawing_error = error
        return [RowResult()] * len(specs)

    def _logprobs(self, logits: Tensor, targets: Tensor, top: int) -> SampledLogprobs:
        return super()._logprobs(logits, targets, top) if self.draws else SampledLogprobs(token_logprobs=b"")

    def report(self) -> ProcessInfo:
        return ProcessInfo(
            role="scheduler",
            pid=os.getpid(),
            tp_rank=self.topology.tp.rank,
            pp_rank=self.topology.pp.rank,
            rss_bytes=self._process.memory_info().rss,
            cpu_percent=self._process.cpu_percent(),
            weight_bytes=self.info.weight_bytes,
            busy_s=self.busy.seconds,
            collectives=self.topology.counts.snapshot(),
        )

    # ---- weights -----------------------------------------------------------------------------------------------------

    def receive_weights(self, checkpoint: Checkpoint) -> None:
        """Takes part in a staging, on a rank that does not read. Nothing is staged unless all ranks have succeeded."""
        source = SharedSource(None, self.topology.updates, CPU)
        succeeded = False
        try:
            stage_weights(self.model, checkpoint, lambda done, total: None, source=source)
            succeeded = True
        except Exception as error:
            log.warning("cannot stage the weights reason=%s", error)
        if not source.end(succeeded):
            discard_weights(self.model)

    def share_weights(
        self,
        checkpoint: Checkpoint,
        source: SharedSource,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> int:
        """The same on the rank that reads; returns the bytes read. Raises what stage_weights raises, or ConfigError."""
        try:
            nbytes = stage_weights(self.model, checkpoint, progress, cancelled, source)
        except BaseException:
            source.end(False)
            raise
        if not source.end(True):
            discard_weights(self.model)
            raise ConfigError("another rank could not take the weights; its log says why")
        return nbytes

    def commit_weights(self) -> bool:
        """Exchanges the weights on all ranks, or on none. Whether it did; then the old ones are forgotten."""
        try:
            commit_weights(self.model)
            succeeded = True
        except Exception:
            log.exception("cannot exchange the weights")
            succeeded = False
        everywhere = bool(least(int(succeeded), self.topology.updates, CPU))
        if succeeded and not everywhere:
            commit_weights(self.model)
        discard_weights(self.model)
        self.count_weights()
        return everywhere

    def discard_weights(self) -> None:
        discard_weights(self.model)


def follow(rank: Rank) -> None:
    """What every rank but the first does, for ever. Raises WorkerDied."""
    commands: SimpleQueue[Command | RankLost] = SimpleQueue()
    threading.Thread(target=_listen, args=(rank, commands), daemon=True, name="commands").start()
    staging: threading.Thread | None = None
    while True:
        command = commands.get()
        if isinstance(command, Run):
            outcome = rank.step(command)
            if outcome is not None:
                send_bytes(msgspec.msgpack.encode(outcome), 0, rank.topology.control, "results")
            continue
        if isinstance(command, RankLost):
            raise WorkerDied(f"another rank does not answer ({command})")
        if staging is not None:
            staging.join()  # it has ended on the first rank, and two threads must not use its group
        if isinstance(command, Stage):
            receive = rank.receive_weights
            staging = threading.Thread(target=receive, args=(command.checkpoint,), daemon=True, name="stage-weights")
            staging.start()
        elif isinstance(command, Commit):
            rank.commit_weights()
        elif isinstance(command, Discard):
            rank.discard_weights()


def _listen(rank: Rank, commands: "SimpleQueue[Command | RankLost]") -> None:
    """Takes the commands as they come. It gives reports itself: the main thread may be in a step."""
    decoder = msgspec.msgpack.Decoder(Command)
    control = rank.topology.control
    try:
        while True:
            command = decoder.decode(receive_broadcast(control, "plan"))
            if isinstance(command, Report):
                send_bytes(msgspec.msgpack.encode(rank.report()), 0, control, "reports")
            else:
                commands.put(command)
    except RankLost as error:
        commands.put(error)


class Leader:
    """The scheduler's Worker on the first rank: what it is told, all ranks do.

    `lost` is called, in another thread, when a rank does not answer while nothing runs.
    """

    swap: WeightSwap

    def __init__(self, rank: Rank, checkpoint: Checkpoint, lost: Callable[[str], None]) -> None:
        self.info = rank.info
        self.swap = RankedSwap(self, checkpoint)
        self.rank = rank
        self.reports: tuple[ProcessInfo, ...] = ()
        """Of the other ranks, a second old at most."""
        self._control = rank.topology.control
        self._sending = threading.Lock()
        self._lost = lost
        self._expected: SimpleQueue[Future[StepResult]] = SimpleQueue()
        self._active = Clock()
        threading.Thread(target=self._collect_reports, daemon=True, name="reports").start()
        if not rank.pipe.last:
            threading.Thread(target=self._collect_results, daemon=True, name="results").start()

    @property
    def active_s(self) -> float:
        return self._active.seconds

    def all_reports(self) -> tuple[ProcessInfo, ...]:
        """Of all ranks, this one first."""
        return (self.rank.report(), *self.reports)

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """With one stage the handle is done when this returns, with more when the last one is."""
        handle: Future[StepResult] = Future()
        run = Run(plan, self._active.enter())
        try:
            self.tell(Run(_without_masks(plan), run.steps) if self.rank.draws else run)
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
            raise WorkerDied(f"another rank does not answer ({error})") from error

    def _finish(self, handle: "Future[StepResult]", outcome: Outcome) -> None:
        self._active.leave()
        if outcome.result is None:
            handle.set_exception(RuntimeError(outcome.error))
        else:
            handle.set_result(outcome.result)

    def _collect_results(self) -> None:
        """Of the steps in their order, from the last stage."""
        topology = self.rank.topology
        source = (topology.pp.size - 1) * topology.tp.size
        decoder = msgspec.msgpack.Decoder(Outcome)
        while True:
            handle = self._expected.get()
            try:
                self._finish(handle, decoder.decode(receive_bytes(source, self._control, "results")))
            except RankLost as error:
                handle.set_exception(WorkerDied(f"another rank does not answer ({error})"))

    def _collect_reports(self) -> None:
        decoder = msgspec.msgpack.Decoder(ProcessInfo)
        try:
            while True:
                self.tell(Report())
                others = range(1, self._control.size)
                self.reports = tuple(decoder.decode(receive_bytes(i, self._control, "reports")) for i in others)
                time.sleep(REPORT_INTERVAL_S)
        except (RankLost, WorkerDied) as error:
            self._lost(str(error))


def _without_masks(plan: StepPlan) -> StepPlan:
    """What ranks need that do not draw: a mask has a bit for each token of the vocabulary."""

    def without(row: PlanRow) -> PlanRow:
        if row.sample is None or not row.sample.mask:
            return row
        return msgspec.structs.replace(row, sample=msgspec.structs.replace(row.sample, mask=b""))

    return StepPlan(rows=tuple(without(row) for row in plan.rows))


class Clock:
    """The time during which at least one step is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._since = 0.0
        self._total = 0.0

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._count else 0.0)

    def enter(self) -> int:
        """How many steps are under way with this one."""
        with self._lock:
            if self._count == 0:
                self._since = time.perf_counter()
            self._count += 1
            return self._count

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._total += time.perf_counter() - self._since


class RankedSwap:
    """A WeightSwap over all ranks: the first one reads, all stage, and then all exchange or none."""

    def __init__(self, leader: Leader, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._leader = leader
        self._staged: Checkpoint | None = None

    def differences(self, new: Checkpoint) -> list[str]:
        return preflight(self._leader.rank.model, self.checkpoint, new)

    def stage(self, new: Checkpoint, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> int:
        rank = self._leader.rank
        opened = open_source(new)  # before the others are told: a failure here is nobody else's
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
        """Of what is staged only: a staging that failed has discarded everywhere."""
        if self._staged is not None:
            self._staged = None
            self._leader.tell(Discard())
            self._leader.rank.discard_weights()
