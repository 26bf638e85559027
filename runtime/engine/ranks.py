"""One model on several ranks: a rank's part of a step and of a weight swap, and the command loop from rank 1 on.

Commands come from rank 0 (leader.py) as msgspec bytes. A thread receives them, so that the next plan is there when a
step ends. The last stage sends the results back.
"""

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import psutil
import torch
from torch import Tensor

from llmserve.runtime.attention.base import AttentionBackend
from llmserve.runtime.config import ConfigError
from llmserve.runtime.distributed.channel import receive_broadcast, send_bytes
from llmserve.runtime.distributed.collectives import least
from llmserve.runtime.distributed.errors import RankLost
from llmserve.runtime.distributed.groups import Topology
from llmserve.runtime.distributed.pipeline import Pipe
from llmserve.runtime.engine.batch import (
    RowResult,
    SampleSpec,
    StepPlan,
    StepResult,
    WorkerDied,
    WorkerInfo,
)
from llmserve.runtime.engine.busy import BusyTime
from llmserve.runtime.engine.forward import make_forward_batch
from llmserve.runtime.engine.shared_source import SharedSource
from llmserve.runtime.engine.weights import (
    commit_weights,
    discard_weights,
    stage_weights,
)
from llmserve.runtime.engine.worker import TpModelWorker
from llmserve.runtime.messages import Logprobs, ProcessInfo
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.models.registry import CausalLM
from llmserve.runtime.ops import native
from llmserve.runtime.usage import Meter

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Run(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan
    steps: int
    """Steps under way, this one included: at most one per pipeline stage."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """Asks for the rank's ProcessInfo."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Receive new weights beside those that serve."""

    checkpoint: Checkpoint


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Exchange the staged weights with those that serve, if all can."""


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Forget the staged weights."""


Command = Run | Report | Stage | Commit | Discard


class Outcome(msgspec.Struct, frozen=True):
    """The result of a step, or why sampling failed. The forward pass has succeeded on all ranks either way."""

    result: StepResult | None
    error: str = ""


def not_answering(error: RankLost) -> WorkerDied:
    """The WorkerDied that the loss of another rank means."""
    return WorkerDied(f"another rank does not answer ({error})")


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
        """`threads(steps)` is the number of CPU threads of this rank while `steps` steps are under way."""
        super().__init__(model, attention, info, device)
        self.topology = topology
        self._threads = threads
        self.pipe = Pipe(topology, info.hidden_size, model.dtype, device)
        self.draws = self.pipe.last and topology.tp.rank == 0
        """Whether this is the rank that samples."""
        self.busy = BusyTime(device)
        self._meter = Meter(psutil.Process())
        self._drawing_error: Exception | None = None

    @torch.inference_mode()
    def step(self, run: Run) -> Outcome | None:
        """Runs this rank's part of a step. Returns the outcome on the rank that samples, None on the others.

        Raises WorkerDied when it fails: the ranks are out of step then.
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
            raise not_answering(error) from error
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
        """Samples on one rank; the others only take part in making the logits. A failure is kept for `_outcome`, so
        that this rank still joins the collectives that follow.
        """
        if self.draws:
            try:
                return super()._sample(logits, specs)
            except Exception as error:
                self._drawing_error = error
        return [RowResult()] * len(specs)

    def _logprobs(self, logits: Tensor, targets: Tensor, top: int) -> Logprobs:
        return super()._logprobs(logits, targets, top) if self.draws else Logprobs(token_logprobs=b"")

    def report(self) -> ProcessInfo:
        usage = self._meter.read()
        return ProcessInfo(
            role="scheduler",
            pid=os.getpid(),
            tp_rank=self.topology.tp.rank,
            pp_rank=self.topology.pp.rank,
            rss_bytes=usage.rss_bytes,
            cpu_percent=usage.cpu_percent,
            weight_bytes=self.info.weight_bytes,
            busy_s=self.busy.seconds,
            collectives=self.topology.counts.snapshot(),
        )

    # ---- weights -----------------------------------------------------------------------------------------------------

    def receive_weights(self, checkpoint: Checkpoint) -> None:
        """Stages the weights that rank 0 broadcasts. Nothing stays staged unless all ranks have succeeded."""
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
        """Reads, broadcasts and stages the weights, on rank 0; returns the bytes read. Raises what stage_weights
        raises, and ConfigError when another rank has failed.
        """
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
        """Exchanges the weights on all ranks or on none, and frees the others. Returns whether they were exchanged."""
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
    """The command loop of every rank but rank 0. Never returns; raises WorkerDied."""
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
            raise not_answering(command)
        if staging is not None:
            staging.join()  # rank 0 has finished it, and two threads must not use its group
        if isinstance(command, Stage):
            receive = rank.receive_weights
            staging = threading.Thread(target=receive, args=(command.checkpoint,), daemon=True, name="stage-weights")
            staging.start()
        elif isinstance(command, Commit):
            rank.commit_weights()
        elif isinstance(command, Discard):
            rank.discard_weights()


def _listen(rank: Rank, commands: "SimpleQueue[Command | RankLost]") -> None:
    """Receives commands and queues them, in a thread. It answers Report itself: the main thread may be in a step."""
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
