"""The verbs that operators can call on a scheduler: one method each, dispatched by the type of its message.

Receiving calls and sending answers is in rpc.py. A verb that takes time is a generator. It first yields progress, so
that it does not begin for a caller that has left, and undoes its changes when it is closed before its end.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import msgspec

from llmserve.runtime.messages import (
    AbortReqInput,
    AbortReqOutput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlReqInput,
    DrainReqInput,
    DrainReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetLoadReqInput,
    GetLoadReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    ListRequestsReqInput,
    ListRequestsReqOutput,
    Message,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PingReqInput,
    PingReqOutput,
    RpcProgress,
    SubscribeMetricsReqInput,
    SubscribeMetricsReqOutput,
    UpdateWeightReqInput,
)
from llmserve.runtime.scheduler.loop import Scheduler
from llmserve.runtime.scheduler.request import Group
from llmserve.runtime.scheduler.rpc import Refusal, Work
from llmserve.runtime.scheduler.update import WeightUpdates
from llmserve.runtime.watchers import Watchers

log = logging.getLogger(__name__)


class Verbs:
    """The verbs of one scheduler. `forward` passes a metrics lease on to the other processes."""

    def __init__(
        self,
        scheduler: Scheduler,
        model_path: str,
        watchers: Watchers,
        forward: Callable[[SubscribeMetricsReqInput], None],
    ):
        self._updates = WeightUpdates(scheduler, model_path, watchers.directory)
        self._scheduler = scheduler
        self._watchers = watchers
        self._forward = forward
        self._at_work = ""
        """The verb under way that changes the whole scheduler; only one such verb may be under way."""
        self._verbs: dict[type[Message], Callable[..., Message | Work]] = {
            PingReqInput: self.ping,
            AbortReqInput: self.abort,
            FlushCacheReqInput: self.flush_cache,
            UpdateWeightReqInput: self.update_weights,
            PauseGenerationReqInput: self.pause_generation,
            ContinueGenerationReqInput: self.continue_generation,
            DrainReqInput: self.drain,
            GetLoadReqInput: self.get_load,
            ListRequestsReqInput: self.list_requests,
            GetStatusReqInput: self.get_status,
            SubscribeMetricsReqInput: self.subscribe_metrics,
        }

    def start(self, request: ControlReqInput) -> Message | Work:
        """Starts a verb. Returns its answer, or the work that will return it. Raises Refusal."""
        return self._verbs[type(request)](request)

    # ---- verbs that answer at once -----------------------------------------------------------------------------------

    def ping(self, request: PingReqInput) -> PingReqOutput:
        scheduler = self._scheduler
        return PingReqOutput(
            step=scheduler.results.counters.steps, state=scheduler.state, in_step_s=scheduler.in_step_s
        )

    def get_load(self, request: GetLoadReqInput) -> GetLoadReqOutput:
        return self._scheduler.snapshots.load()

    def list_requests(self, request: ListRequestsReqInput) -> ListRequestsReqOutput:
        return ListRequestsReqOutput(requests=self._scheduler.snapshots.requests(request.show_text))

    def get_status(self, request: GetStatusReqInput) -> GetStatusReqOutput:
        scheduler = self._scheduler
        load, info = scheduler.snapshots.load(), scheduler.worker.info
        given = msgspec.to_builtins(scheduler.args)
        options = given | {
            "max_model_len": info.max_model_len,
            "max_total_tokens": info.num_pages * info.page_size,
            "page_size": info.page_size,
            "load_format": "gguf" if self._updates.model_path.endswith(".gguf") else "safetensors",
            **info.in_effect,
        }
        return GetStatusReqOutput(
            state=load.state,
            model=self._updates.model_path,
            weight_version=scheduler.weight_version,
            uptime_s=scheduler.snapshots.uptime_s,
            steps=scheduler.results.counters.steps,
            in_step_s=scheduler.in_step_s,
            running=load.running,
            waiting=load.waiting,
            kv_tokens_total=load.kv_tokens_total,
            kv_tokens_used=load.kv_tokens_used,
            kv_tokens_cached=load.kv_tokens_cached,
            kv_bytes_total=info.num_pages * info.bytes_per_page,
            page_size=info.page_size,
            processes=scheduler.snapshots.processes(),
            options=options,
            chosen=tuple(name for name, value in options.items() if value != given[name]),
        )

    def drain(self, request: DrainReqInput) -> DrainReqOutput:
        """Refused while paused, because requests could not end and their clients would wait for ever."""
        if self._scheduler.pause_mode is not None and self._at_work:
            raise Refusal("busy", f"{self._at_work} is under way")
        if self._scheduler.pause_mode is not None:
            raise Refusal("busy", "it is paused, so that nothing would end: resume it first")
        self._scheduler.drain()
        table = self._scheduler.table
        log.info("draining running=%d waiting=%d", len(table.running), len(table.waiting))
        return DrainReqOutput(running=len(table.running), waiting=len(table.waiting))

    def continue_generation(self, request: ContinueGenerationReqInput) -> ContinueGenerationReqOutput:
        if self._at_work not in ("", "pause"):
            raise Refusal("busy", f"{self._at_work} is under way")
        resumed = self._scheduler.resume()
        log.info("resumed requests=%d", resumed)
        return ContinueGenerationReqOutput(resumed=resumed)

    def subscribe_metrics(self, request: SubscribeMetricsReqInput) -> SubscribeMetricsReqOutput:
        try:
            lease_s = self._watchers.subscribe(request)
        except ValueError as error:
            raise Refusal("invalid", str(error)) from None
        self._forward(request)
        return SubscribeMetricsReqOutput(lease_s=lease_s)

    # ---- verbs that take time ----------------------------------------------------------------------------------------

    def abort(self, request: AbortReqInput) -> Work:
        """Answers when the memory of the aborted requests is free."""
        yield RpcProgress(stage="aborting")
        aborted, not_found, groups = self._mark(request)
        yield from self._until_gone(groups)
        log.info("aborted by an operator requests=%d not_found=%d", len(aborted), len(not_found))
        return AbortReqOutput(aborted=aborted, not_found=not_found)

    def flush_cache(self, request: FlushCacheReqInput) -> Work:
        scheduler = self._scheduler
        if not request.wait_s >= 0:
            raise Refusal("invalid", f"cannot wait {request.wait_s} s")
        with self._alone("a flush"):
            yield RpcProgress(stage="flushing")
            aborted: tuple[str, ...] = ()
            if request.abort:
                aborted = yield from self._abort_everything("aborted: the cache is being flushed")
            deadline = scheduler.now() + request.wait_s
            while not scheduler.quiet and scheduler.now() < deadline:
                yield self._running("waiting")
            if not scheduler.quiet:
                raise Refusal(
                    "busy", f"{self._counts()}: wait for them (--wait, wait_s) or abort them (--abort, abort)"
                )
            pages = scheduler.flush()
            log.info("flushed pages=%d aborted=%d", pages, len(aborted))
            return FlushCacheReqOutput(
                pages_freed=pages, bytes_freed=pages * scheduler.worker.info.bytes_per_page, aborted=aborted
            )

    def pause_generation(self, request: PauseGenerationReqInput) -> Work:
        """Answers when nothing runs and no request holds memory. Closed before that, it restores the previous state.

        Refused during a drain, whose requests must be able to end.
        """
        scheduler = self._scheduler
        if scheduler.intake.draining:
            raise Refusal("busy", "it is draining: resume it first")
        with self._alone("pause"):
            yield RpcProgress(stage="pausing")
            before = scheduler.pause_mode
            retractions = scheduler.results.counters.asked_retractions
            aborted = scheduler.pause(request.mode)
            try:
                while not scheduler.quiet:
                    yield self._running("pausing")
                    if scheduler.pause_mode is None:
                        raise Refusal("failed", "resumed meanwhile")
            except GeneratorExit:
                scheduler.pause_mode = before
                raise
            answer = PauseGenerationReqOutput(
                retracted=scheduler.results.counters.asked_retractions - retractions,
                aborted=aborted if request.mode == "abort" else 0,
            )
            log.info("paused mode=%s retracted=%d aborted=%d", request.mode, answer.retracted, answer.aborted)
            return answer

    def update_weights(self, request: UpdateWeightReqInput) -> Work:
        with self._alone("an update of the weights"):
            return (yield from self._updates.update(request))

    # ---- what they share ---------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, verb: str) -> Iterator[None]:
        """Marks a verb that changes the whole scheduler as under way. Raises Refusal while there is another."""
        if self._at_work:
            raise Refusal("busy", f"{self._at_work} is under way already")
        self._at_work = verb
        try:
            yield
        finally:
            self._at_work = ""

    def _abort_everything(self, message: str) -> Generator[RpcProgress, None, tuple[str, ...]]:
        """Aborts all requests and returns their rids. Requests that arrive meanwhile wait, so that the scheduler is
        quiet afterwards.
        """
        scheduler = self._scheduler
        scheduler.admitting = False
        try:
            aborted, _, groups = self._mark(AbortReqInput(everything=True, message=message))
            yield from self._until_gone(groups)
        finally:
            scheduler.admitting = True
        return aborted

    def _mark(self, request: AbortReqInput) -> tuple[tuple[str, ...], tuple[str, ...], list[Group]]:
        """Marks requests for abortion; returns the rids that will end, those not found, and the groups to wait for."""
        aborted, not_found = self._scheduler.abort(request)
        return tuple(aborted), tuple(not_found), [self._scheduler.table.groups[rid] for rid in aborted]

    def _until_gone(self, groups: list[Group]) -> Generator[RpcProgress, None, None]:
        while left := sum(bool(group.requests) for group in groups):
            yield RpcProgress(stage="aborting", done=len(groups) - left, total=len(groups), unit="requests")

    def _running(self, stage: str) -> RpcProgress:
        return RpcProgress(stage=stage, done=len(self._scheduler.table.running), unit="running")

    def _counts(self) -> str:
        table = self._scheduler.table
        return f"{len(table.running)} running, {len(table.waiting)} waiting"
