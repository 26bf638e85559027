"""The scheduler's loop: receives messages, plans and submits a step, applies its result, and sends rows.

It decides when things happen. policy.py decides who runs, results.py what a result means, control.py what operators'
calls do; process.py provides the sockets. During a long step, standin.py takes over what does not need the worker.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from llmserve.runtime.cache.kv_cache import KVCache
from llmserve.runtime.cache.pages import IntegrityError
from llmserve.runtime.config import ServerArgs
from llmserve.runtime.engine.batch import PlanRow, StepPlan, Worker
from llmserve.runtime.messages import (
    AbortReqInput,
    BatchEmbeddingOutput,
    BatchTokenIDOutput,
    ControlReqInput,
    FinishReason,
    Message,
    PauseMode,
    SchedulerMetrics,
    TokenizedReqInput,
)
from llmserve.runtime.scheduler.guides import GrammarError, Guides
from llmserve.runtime.scheduler.intake import Intake, MakeStopDecoder
from llmserve.runtime.scheduler.policy import Policy
from llmserve.runtime.scheduler.request import Request, Share, Step
from llmserve.runtime.scheduler.results import Results
from llmserve.runtime.scheduler.rows import failure
from llmserve.runtime.scheduler.snapshot import Snapshots
from llmserve.runtime.scheduler.table import RequestTable

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 64
METRICS_INTERVAL_S = 0.5
HEARTBEAT_S = 1.0
PENDING_WAIT_S = 0.01


class Inbox(Protocol):
    def recv(self) -> Message | None: ...


class Sender(Protocol):
    """The part of wire.Push that the loop uses."""

    @property
    def congested(self) -> bool: ...

    @property
    def backlog(self) -> int: ...

    def send(self, message: Message) -> None: ...

    def flush(self) -> bool: ...


class ControlChannel(Protocol):
    """Where operators' calls come from, and their answers go (rpc.RpcServer)."""

    @property
    def pending(self) -> bool:
        """Whether a verb is under way, so that `poll` must be called again soon."""

    def handle(self, message: ControlReqInput) -> None:
        """A control message that came through the pipeline."""

    def poll(self, holds_up: bool = True) -> bool:
        """Called once per turn: reads new calls, and answers those that can be answered now. Whether there were any.

        `holds_up`: running requests wait for this call, so it is kept short.
        """


class Scheduler:
    """One replica's scheduler. At most `depth` steps are in flight, one per pipeline stage.

    Nothing here assumes that a scheduled token is known before results.apply has added it.
    """

    def __init__(
        self,
        args: ServerArgs,
        worker: Worker,
        make_decoder: MakeStopDecoder,
        guides: Guides,
        inbox: Inbox,
        tokens: Sender,
        embeddings: Sender,
        offer_metrics: Callable[[SchedulerMetrics], object],
        *,
        dp_rank: int = 0,
        depth: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        info = worker.info
        self.now = now
        self.args = args
        self.worker = worker
        self.kv = KVCache(info.num_pages, info.page_size, args.prefix_cache)
        self.table = RequestTable()
        self.results = Results(worker, self.kv, self.table, args.stream_interval)
        self.guides = guides
        self.intake = Intake(args, info, self.table, make_decoder, guides)
        self.policy = Policy(args, self.kv, self.table, self.results.retract, depth)
        self.snapshots = Snapshots(self, dp_rank)
        self.control: ControlChannel | None = None
        self.waiting: AbstractContextManager[None] = nullcontext()
        """Entered while the loop waits for the worker; within it another thread may call `stand_in`."""
        self.pause_mode: PauseMode | None = None
        self.admitting = True
        """If not, no waiting request is started."""
        self.weight_version = 1
        self._inbox = inbox
        self._tokens = tokens
        self._embeddings = embeddings
        self._offer_metrics = offer_metrics
        self._depth = depth
        self._in_flight: deque[Step] = deque()
        self._submitting: float | None = None
        """When the current call of worker.submit began, which may last until the step is computed."""
        self._metrics_due = 0.0
        self._told_state = ""
        self._working = False
        self._check_due = math.inf

    # ---- turns ---------------------------------------------------------------------------------------------------

    def run(self, wait: Callable[[float], None]) -> None:
        """Runs turns for ever. `wait(timeout_s)` returns when the inbox or the RPC socket may have something. Raises
        WorkerDied.
        """
        while True:
            if not self.turn():
                pending = self._tokens.backlog or self._embeddings.backlog or (self.control and self.control.pending)
                wait(PENDING_WAIT_S if self.guides.poll() or pending else HEARTBEAT_S)

    def turn(self) -> bool:
        """Runs one turn, which begins at most one step. Whether anything happened; if not, the caller may wait."""
        received = self._receive()
        called = self.control is not None and self.control.poll()
        ended = self._end_what_must()
        submitted = self._submit()
        expired = self._expire()
        applied = self._apply(wait=not submitted or len(self._in_flight) >= self._depth)
        self._send()
        self._report()
        return received or called or ended or submitted or expired or applied

    def stand_in(self) -> None:
        """Does what a turn does apart from steps. Called instead of turns during a long step, within `waiting`.

        Requests in the step are left alone, because part of them is in flight; others may end.
        """
        self._receive()
        if self.control is not None:
            self.control.poll(holds_up=False)
        self.results.reap()
        self._expire()
        self._send()
        self._report()

    def _receive(self) -> bool:
        for count in range(MESSAGES_PER_TURN):
            message = self._inbox.recv()
            if message is None:
                return count > 0
            if isinstance(message, TokenizedReqInput):
                self._accept(message)
            elif isinstance(message, AbortReqInput):
                self.abort(message)
            elif self.control is not None and isinstance(message, ControlReqInput):
                self.control.handle(message)
        return True

    def _accept(self, message: TokenizedReqInput) -> None:
        if message.rid in self.table.groups:
            # An error row would end the first request. The front never sends two with one rid.
            log.error("request dropped, its rid is in use rid=%s", message.rid)
            return
        try:
            reason = self.intake.accept(message, self.now())
        except Exception as error:
            log.exception("request failed on arrival rid=%s", message.rid)
            reason = failure(500, f"internal error ({type(error).__name__})")
        if reason is None:
            self.results.counters.requests += 1
        else:
            log.debug("request refused rid=%s status=%d reason=%s", message.rid, reason.status, reason.message)
            self.results.refuse(message, reason)

    def _end_what_must(self) -> bool:
        """Ends aborted requests, and retracts running ones for a pause with mode "retract"."""
        reaped = self.results.reap()
        if self.pause_mode == "retract" and not self._in_flight:
            for request in tuple(self.table.running):
                self.results.retract(request, asked=True)
                reaped = True
        return reaped

    def _submit(self) -> bool:
        """Plans the next step and submits it to the worker. False when there is nothing to run now."""
        if self.pause_mode == "retract" or len(self._in_flight) >= self._depth or not len(self.table):
            return False
        began = self.now()
        self.results.congested = self._tokens.congested
        congested = self._tokens.congested or self._embeddings.congested
        admit = self.admitting and self.pause_mode is None and not congested
        shares = self.policy.schedule(began, admit)
        plan = StepPlan(rows=tuple(self._rows(shares)))
        if not shares:
            return False
        for request, _, length in shares:
            request.scheduled += length
            request.in_flight += 1
        self._submitting = began
        with self.waiting:
            handle = self.worker.submit(plan)
        self._submitting = None
        self._in_flight.append(Step(shares, handle, began))
        return True

    def _rows(self, shares: list[Share]) -> Iterator[PlanRow]:
        """The rows of the plan. A request whose row cannot be made ends with an error, and its share is removed."""
        for share in tuple(shares):
            request, start, length = share
            try:
                yield request.row(start, length)
            except GrammarError as error:
                shares.remove(share)
                self.results.fail(request, str(error), status=400)
            except Exception as error:
                log.exception("request cannot be planned rid=%s index=%d", request.rid, request.index)
                shares.remove(share)
                self.results.fail(request, f"internal error ({type(error).__name__})")

    def _expire(self) -> bool:
        """Ends requests that have waited for their first step longer than --queue-timeout."""
        timeout_s = self.args.queue_timeout
        came_before = self.now() - timeout_s
        expired = False
        for request in self.table.waiting:
            if request.arrival > came_before:
                break
            if request.first_run is None:
                request.ending = failure(503, f"the request has waited in the queue for {timeout_s:g} s")
                expired = True
        return expired and self.results.reap()

    def _apply(self, wait: bool) -> bool:
        """Applies the result of the oldest step in flight, if it is done or `wait` is set."""
        if not self._in_flight or not (wait or self._in_flight[0].handle.done()):
            return False
        step = self._in_flight[0]
        self.results.apply(step, self.now, self.waiting)
        self._in_flight.popleft()
        self.policy.observe(step.shares, self.results.counters.step_s)
        return True

    def _send(self) -> None:
        results = self.results
        if results.token_rows:
            self._tokens.send(BatchTokenIDOutput(rows=tuple(results.token_rows)))
            results.token_rows.clear()
        elif self._tokens.backlog:
            self._tokens.flush()
        if results.embedding_rows:
            self._embeddings.send(BatchEmbeddingOutput(rows=tuple(results.embedding_rows)))
            results.embedding_rows.clear()
        elif self._embeddings.backlog:
            self._embeddings.flush()

    def _report(self) -> None:
        """Offers metrics at intervals, when the work ends and when the state changes.

        A second after the work has ended it checks the integrity of the cache.
        """
        now = self.now()
        worked, self._working = self._working, len(self.table) > 0
        ends = worked and not self._working
        if ends:
            self._check_due = now + HEARTBEAT_S
        elif not self._working and now >= self._check_due:
            self._check_due = math.inf
            self._check_integrity()
        if ends or self.state != self._told_state or now >= self._metrics_due:
            self._told_state = self.state
            self._metrics_due = now + METRICS_INTERVAL_S
            self._offer_metrics(self.snapshots.metrics())

    def _check_integrity(self) -> None:
        """With no request left, every page must be free or in the prefix tree. If not, logs it and resets the cache."""
        try:
            self.kv.check_integrity([])
        except IntegrityError:
            log.exception("the cache was not in order and has been emptied")
            self.kv.reset()

    # ---- what operators may ask, between steps -----------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.intake.draining:
            return "draining"
        return "ready" if self.pause_mode is None else "paused"

    @property
    def in_step_s(self) -> float:
        """Seconds since the oldest step under way began; 0 if there is none."""
        began = self._in_flight[0].began if self._in_flight else self._submitting
        return 0.0 if began is None else self.now() - began

    @property
    def quiet(self) -> bool:
        """Whether no request holds memory and no step is in flight."""
        return not self.table.running and not self._in_flight

    def abort(self, message: AbortReqInput) -> tuple[list[str], list[str]]:
        """Marks requests for abortion. Returns the rids that will end, and the named ones that do not exist.

        They have ended, and their memory is free, when their rids are no longer in `table.groups`.
        """
        groups, now = self.table.groups, self.now()
        chosen = [rid for rid in dict.fromkeys(message.rids) if rid in groups]
        not_found = [rid for rid in dict.fromkeys(message.rids) if rid not in groups]
        for rid, group in groups.items():
            old = message.older_than_s is not None and now - group.arrival > message.older_than_s
            if message.everything or old or (message.prefix and rid.startswith(message.prefix)):
                chosen.append(rid)
        aborted = list(dict.fromkeys(chosen))
        for rid in aborted:
            self._mark(groups[rid].requests, message.message)
        return aborted, not_found

    def pause(self, mode: PauseMode) -> int:
        """Pauses generation; in effect once `quiet`. Returns the number of choices that it retracts or aborts."""
        self.pause_mode = mode
        if mode == "abort":
            begun = [request for request in self.table if request.first_run is not None]
            self._mark(begun, "aborted: generation was paused")
            return len(begun)
        return len(self.table.running) if mode == "retract" else 0

    def resume(self) -> int:
        """Ends a pause and a drain. Returns the number of choices that run or wait."""
        self.pause_mode = None
        self.intake.draining = False
        return len(self.table)

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.intake.draining = True

    def flush(self) -> int:
        """Empties the prefix cache except for pages that running requests use. Returns the number of pages freed."""
        self._metrics_due = 0.0  # reported at once, because the front routes by its estimate of what is cached
        return self.kv.flush()

    def _mark(self, requests: list[Request], message: str) -> None:
        for request in requests:
            if request.ending is None:
                request.ending = FinishReason(type="abort", message=message)
