"""TokenizerManager: tokenizes requests, sends them to a scheduler, and streams the rows that come back to their
consumers.

It lives in the main process, in one event loop, and knows neither HTTP nor the model. in_flight.py keeps the requests
and delivers their rows.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Literal

import psutil

from llmserve.runtime.config import ServerArgs
from llmserve.runtime.in_flight import AnyInFlight, InFlight, RequestsInFlight
from llmserve.runtime.messages import (
    AbortReqInput,
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenIDOutput,
    ContinueGenerationReqInput,
    EmbeddingReqInput,
    EmbeddingRow,
    GenerateReqInput,
    Heartbeat,
    HttpMetrics,
    MetricsInput,
    ProcessInfo,
    SchedulerInput,
    SchedulerMetrics,
    StrRow,
    SubscribeMetricsReqInput,
    TokenizedReqInput,
    TokenizerManagerInput,
)
from llmserve.runtime.metrics import FrontMetrics
from llmserve.runtime.models.hub import Checkpoint
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.request_error import RequestError
from llmserve.runtime.schedulers import Schedulers
from llmserve.runtime.tokenization import Tokenization
from llmserve.runtime.tokenizer import Tokenizer
from llmserve.runtime.usage import Meter
from llmserve.runtime.validation import Limits
from llmserve.runtime.vitals import SILENCE_S
from llmserve.runtime.watchers import Watchers
from llmserve.runtime.wire import Pull, Push

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "dead"]

FLUSH_INTERVAL_S = 0.01
FRESH_S = 2.0
"""Metrics older than this do not show whether a scheduler is idle now: it sends them every second."""
LAST_ROWS_S = 0.5
"""Seconds within which the detokenizer passes on the rows that a dead replica has sent."""


class TokenizerManager:
    """The front of the stack. `start` binds its sockets; requests are accepted while `state` is "ready"."""

    def __init__(
        self,
        args: ServerArgs,
        ports: PortArgs,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        inputs: Sequence[str] = (),
    ) -> None:
        """`inputs`: the addresses of the schedulers of all replicas; by default that of `ports` alone."""
        self.tokenizer = tokenizer
        self.metrics = FrontMetrics()
        self.state: State = "starting"
        self.schedulers = Schedulers(
            inputs or (ports.scheduler_input_ipc_name,), args.page_size, args.max_running_requests
        )
        self.announce: Callable[[State], None] = lambda state: None
        """Called when an operator's drain begins and when it ends."""
        self._ports = ports
        self._in_flight = RequestsInFlight(self.metrics, self.schedulers.routing)
        self._tokenizing: set[str] = set()
        self._tokenization = Tokenization(args, checkpoint.config, tokenizer)
        self._failure = ""
        self._drains_with_scheduler = False
        """Whether it drains because an operator has told the scheduler to, and so stops draining when the scheduler
        does.
        """
        self.detokenizer_heard = time.monotonic()
        """Monotonic time of the detokenizer's last message."""
        self._delivered = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._pull: Pull | None = None
        self._metrics_pull: Pull | None = None
        self._detokenizer: Push | None = None
        self._meters = {"main": Meter(psutil.Process())}
        self._watchers = Watchers(Path(ports.metrics_ipc_name.removeprefix("ipc://")).parent)

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds the sockets of the text and metrics channels and begins to receive."""
        self._pull = Pull(self._ports.tokenizer_ipc_name, TokenizerManagerInput)
        self._metrics_pull = Pull(self._ports.metrics_ipc_name, MetricsInput)
        self._detokenizer = Push(self._ports.detokenizer_ipc_name)
        self.schedulers.open()
        self._tasks = [
            asyncio.create_task(self._receive(self._pull)),
            asyncio.create_task(self._listen_to_metrics(self._metrics_pull)),
        ]

    def ready(self, max_model_len: int, detokenizer_pid: int | None = None) -> None:
        """The schedulers serve now. `max_model_len` limits prompt and output together, perhaps below the model's own
        limit.

        The front also reports the metrics of the detokenizer process, which sends none itself.
        """
        if detokenizer_pid is not None:
            self._meters["detokenizer"] = Meter(psutil.Process(detokenizer_pid))
        self._tokenization.limits = self.limits._replace(max_model_len=max_model_len)
        self._delivered = self.detokenizer_heard = time.monotonic()
        self.schedulers.ready(self._delivered)
        self.state = "ready"

    def drain(self) -> None:
        """Refuses new requests from now on; those in flight go on."""
        self._drains_with_scheduler = False
        if self.state != "dead":
            self.state = "draining"

    def resume_paused(self) -> None:
        """Resumes the schedulers that an operator has paused, because their requests could not end otherwise."""
        for replica, metrics in self.schedulers.metrics.items():
            if metrics.state == "paused":
                log.info("ending the pause, so that requests can end dp_rank=%d", replica)
                self._push_out(ContinueGenerationReqInput(), replica)

    def fail(self, reason: str) -> None:
        """Ends every request with 503 and refuses new ones, because the stack cannot go on. Safe to repeat."""
        if self.state == "dead":
            return
        self.state = "dead"
        self._failure = reason
        self._in_flight.fail(reason)

    @property
    def scheduler_metrics(self) -> SchedulerMetrics | None:
        """The latest metrics of all replicas combined; None until each has sent some."""
        return self.schedulers.total

    def fail_replica(self, replica: int, reason: str) -> None:
        """Ends the requests of a replica that has died, with 503, while the others serve on.

        Rows of these requests may still be under way. So they stay registered until final rows, sent from here to the
        detokenizer a little later, have come back.
        """
        self.schedulers.lose(replica)
        lost = self._in_flight.fail_replica(replica, reason)
        asyncio.get_running_loop().call_later(LAST_ROWS_S, self._send_last_rows, lost)

    def _send_last_rows(self, lost: dict[str, AnyInFlight]) -> None:
        rows = self._in_flight.last_rows(lost)
        if rows and self._detokenizer is not None:
            self._detokenizer.send(BatchTokenIDOutput(rows=rows))

    async def close(self) -> None:
        """Ends what is in flight and closes the sockets."""
        self.fail("the server has stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._flushing is not None:
            self._flushing.cancel()
        for socket in (self._pull, self._metrics_pull, self._detokenizer, self.schedulers):
            if socket is not None:
                socket.close()
        self._watchers.close()
        self._tokenization.close()

    @property
    def limits(self) -> Limits:
        """The limits of the model that is served."""
        return self._tokenization.limits

    @property
    def in_flight(self) -> int:
        """The number of requests that have not ended, abandoned ones included."""
        return len(self._in_flight) + len(self._tokenizing)

    def healthy(self) -> tuple[bool, str]:
        """Whether the instance serves, and how: "ok", "degraded" and why, or why it does not."""
        if self.state != "ready":
            return False, self._failure or self.state
        now, replicas = time.monotonic(), self.schedulers.routing.replicas
        faults = self.schedulers.faults(now)
        if len(replicas) == 1 and faults:
            return False, f"the scheduler {faults[0]}"
        faults |= {number: "is lost" for number, replica in enumerate(replicas) if not replica.alive}
        told = "; ".join(f"replica {number} {fault}" for number, fault in sorted(faults.items()))
        if len(faults) == len(replicas):
            return False, told
        if now - self.detokenizer_heard > SILENCE_S:
            return False, f"the detokenizer has not been heard of for {now - self.detokenizer_heard:.0f} s"
        if now - self.delivered > SILENCE_S:
            return False, f"the detokenizer has delivered nothing for {now - self.delivered:.0f} s"
        return True, f"degraded: {told}" if told else "ok"

    @property
    def delivered(self) -> float:
        """Monotonic time at which the detokenizer last sent rows, or had none to send: now, while it has none."""
        return self._delivered if self._awaits_rows else time.monotonic()

    @property
    def _awaits_rows(self) -> bool:
        """Whether requests are open although the schedulers are idle: their last rows are under way, or lost."""
        metrics = self.scheduler_metrics
        idle = metrics is not None and metrics.running + metrics.waiting == 0
        return len(self._in_flight) > 0 and idle and self.schedulers.silence_s(time.monotonic()) < FRESH_S

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(self, req: GenerateReqInput) -> AsyncGenerator[StrRow, None]:
        """Yields the rows of all choices as they come; the last row of each choice has `finish`.

        Raises RequestError before the first row when the request is refused, later when the stack fails. Closing or
        cancelling the generator before its end aborts the request.
        """
        arrival = time.perf_counter()
        message = await self._admit(req)
        request = InFlight[StrRow](req.n * len(message.prompts), arrival)
        self._send(message, request)
        unseen = request.choices
        try:
            while unseen:
                for row in await request.take():
                    unseen -= row.finish is not None
                    yield row
        finally:
            self._leave(req.rid, request)

    async def embed(self, req: EmbeddingReqInput) -> list[EmbeddingRow]:
        """One row per prompt, in order. Raises RequestError when the request is refused or one of its prompts fails."""
        arrival = time.perf_counter()
        message = await self._admit(req)
        request = InFlight[EmbeddingRow](len(message.prompts), arrival)
        self._send(message, request)
        rows: list[EmbeddingRow] = []
        try:
            while len(rows) < request.choices:
                rows += await request.take()
        finally:
            self._leave(req.rid, request)
        for row in rows:
            if row.finish is not None and row.finish.type in ("abort", "error"):
                status = row.finish.status if row.finish.status >= 400 else 503
                raise RequestError(status, row.finish.message or "the request was aborted")
        return sorted(rows, key=lambda row: row.index)

    def abort(self, rid: str, message: str = "aborted") -> bool:
        """Asks the scheduler to end a request; its consumer gets rows that finish with "abort". False: no such rid."""
        request = self._in_flight.get(rid)
        if request is None:
            return False
        self._push_out(AbortReqInput(rids=(rid,), message=message), request.replica)
        return True

    def http_metrics(self) -> HttpMetrics:
        """The front's current metrics, with those of the main process and the detokenizer."""
        processes = []
        for role, meter in self._meters.items():
            with contextlib.suppress(psutil.Error):  # it has just died, which the supervision handles
                usage = meter.read()
                dropped = self._watchers.dropped if role == "main" else 0
                silent_s = time.monotonic() - self.detokenizer_heard if role == "detokenizer" else 0.0
                processes.append(
                    ProcessInfo(
                        role=role,
                        pid=meter.pid,
                        rss_bytes=usage.rss_bytes,
                        cpu_percent=usage.cpu_percent,
                        dropped_messages=dropped,
                        silent_s=silent_s,
                    )
                )
        routed = {str(reason): count for reason, count in self.schedulers.routing.reasons.items()}
        return self.metrics.snapshot(tuple(processes), routed)

    async def tokenize(self, texts: Sequence[str], add_special_tokens: bool = True) -> tuple[tuple[int, ...], ...]:
        """The token ids of each text. Raises RequestError 400 for a text that cannot fit into the model's context."""
        return tuple(tuple(ids) for ids in await self._tokenization.encode(texts, add_special_tokens, "prompt"))

    # ---- before the scheduler --------------------------------------------------------------------------------------

    async def _admit(self, req: GenerateReqInput | EmbeddingReqInput) -> TokenizedReqInput:
        """Validates and tokenizes. Raises RequestError."""
        try:
            self._check_state()
            if req.rid in self._in_flight or req.rid in self._tokenizing:
                raise RequestError(
                    400, f"a request with the rid {req.rid!r} is in flight already", "rid", code="duplicate_rid"
                )
            self._tokenizing.add(req.rid)
            try:
                message = await self._tokenization.run(req)
            finally:
                self._tokenizing.discard(req.rid)
            self._check_state()
            return message
        except RequestError as error:
            self.metrics.count_outcome("rejected" if error.status < 500 else "unavailable")
            log.info("refused rid=%r status=%d param=%s", req.rid, error.status, error.param)
            raise

    def _check_state(self) -> None:
        if self.state == "draining":
            raise RequestError(
                503, "the server is draining: it finishes what it has and takes no new requests", code="draining"
            )
        if self.state != "ready":
            raise RequestError(503, f"the server does not serve: {self._failure or self.state}", code="unavailable")
        if self.schedulers.congested:
            raise RequestError(
                503, "the scheduler does not keep up with the requests: try again later", code="overloaded"
            )

    # ---- to and from the scheduler ---------------------------------------------------------------------------------

    def _send(self, message: TokenizedReqInput, request: AnyInFlight) -> None:
        """Sends the request and registers it. There is no await between here and the consumer's `finally`."""
        request.replica = self.schedulers.route(message, time.monotonic())
        self._push_out(message, request.replica)  # first, so that a message too large for a frame leaves nothing behind
        self._in_flight.add(message.rid, request)

    def _push_out(self, message: SchedulerInput, replica: int) -> None:
        if self.schedulers.send(message, replica) and self._flushing is None:
            self._flush_later()

    def _flush_later(self) -> None:
        self._flushing = asyncio.get_running_loop().call_later(FLUSH_INTERVAL_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        if not self.schedulers.flush():
            self._flush_later()

    def _leave(self, rid: str, request: AnyInFlight) -> None:
        """The consumer has left. An unfinished request is aborted, and stays registered until its last rows come."""
        if self._in_flight.abandon(rid, request):
            self._push_out(AbortReqInput(rids=(rid,), message="the client has left"), request.replica)
            log.info("abandoned rid=%r open_choices=%d", rid, len(request.open))

    async def _receive(self, pull: Pull) -> None:
        while True:
            message = await pull.arecv()
            await asyncio.sleep(0)  # arecv does not yield while there are messages, and consumers must run too
            if isinstance(message, BatchStrOutput | Heartbeat):
                self.detokenizer_heard = time.monotonic()
            if isinstance(message, BatchStrOutput | BatchEmbeddingOutput):
                self._deliver(message)
            elif isinstance(message, SubscribeMetricsReqInput):
                try:
                    self._watchers.subscribe(message)
                except ValueError as error:
                    log.warning("no metrics for watcher=%r reason=%s", message.endpoint, error)

    def _deliver(self, batch: BatchStrOutput | BatchEmbeddingOutput) -> None:
        self._delivered = time.monotonic()
        self._in_flight.deliver(batch)

    async def _listen_to_metrics(self, pull: Pull) -> None:
        while True:
            message = await pull.arecv()
            if not isinstance(message, SchedulerMetrics):
                continue
            now = time.monotonic()
            self.schedulers.take(message, now)
            self._delivered = self.delivered
            total = self.scheduler_metrics
            draining = total is not None and total.state == "draining"  # with several replicas: all of them
            if draining and self.state == "ready":
                self.drain()
                self._drains_with_scheduler = True
                self.announce(self.state)
            elif not draining and self.state == "draining" and self._drains_with_scheduler:
                self.state = "ready"
                self.announce(self.state)
            if self._watchers:
                self._watchers.offer(self.http_metrics())
