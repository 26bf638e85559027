"""Snapshots of the scheduler for others: metrics, load, and the list of requests. Changes nothing."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec
import psutil

from llmserve.runtime.messages import GetLoadReqOutput, ProcessInfo, RequestInfo, SchedulerMetrics
from llmserve.runtime.proc import child_role
from llmserve.runtime.scheduler.request import Request
from llmserve.runtime.usage import Meter

if TYPE_CHECKING:
    from llmserve.runtime.scheduler.loop import Scheduler

SHOWN_REQUESTS = 256
"""The most requests in a metrics message; ListRequestsReqInput lists all."""


class Snapshots:
    def __init__(self, scheduler: "Scheduler", dp_rank: int) -> None:
        self.bad_frames: Callable[[], int] = lambda: 0
        """Set by process.py, which owns the sockets."""
        self.dropped_messages: Callable[[], int] = lambda: 0
        self.ranks: Callable[[], tuple[ProcessInfo, ...]] = lambda: ()
        """With several ranks, the reports of all, this one first. Set, like `active_s`, by process.py."""
        self.active_s: Callable[[], float] = lambda: 0.0
        self._scheduler = scheduler
        self._dp_rank = dp_rank
        self._began = scheduler.now()
        self._process = psutil.Process()
        self._meter = Meter(self._process)

    @property
    def uptime_s(self) -> float:
        return self._scheduler.now() - self._began

    def metrics(self) -> SchedulerMetrics:
        scheduler = self._scheduler
        kv, table, counters = scheduler.kv, scheduler.table, scheduler.results.counters
        return SchedulerMetrics(
            time=time.time(),
            dp_rank=self._dp_rank,
            state=scheduler.state,
            weight_version=scheduler.weight_version,
            uptime_s=self.uptime_s,
            steps_total=counters.steps,
            running=len(table.running),
            waiting=len(table.waiting),
            max_running=scheduler.args.max_running_requests,
            kv_tokens_total=kv.total * kv.page_size,
            kv_tokens_used=kv.used * kv.page_size,
            kv_tokens_cached=kv.cached * kv.page_size,
            prefill_tokens_total=counters.prefill_tokens,
            decode_tokens_total=counters.decode_tokens,
            cached_tokens_total=table.cached_tokens,
            prompt_tokens_total=table.prompt_tokens,
            requests_total=counters.requests,
            evicted_tokens_total=kv.evicted_pages * kv.page_size,
            retractions_total=counters.retractions,
            asked_retractions_total=counters.asked_retractions,
            flushes_total=kv.flushes,
            bad_frames_total=self.bad_frames(),
            step_s=counters.step_s,
            in_step_s=scheduler.in_step_s,
            compiling=scheduler.guides.compiling,
            pages_total=kv.total,
            active_s=self.active_s(),
            itl=counters.itl.snapshot(),
            processes=self.own_processes(),
            requests=self.requests(limit=SHOWN_REQUESTS),
        )

    def load(self) -> GetLoadReqOutput:
        kv, table = self._scheduler.kv, self._scheduler.table
        return GetLoadReqOutput(
            state=self._scheduler.state,
            running=len(table.running),
            waiting=len(table.waiting),
            kv_tokens_used=kv.used * kv.page_size,
            kv_tokens_cached=kv.cached * kv.page_size,
            kv_tokens_total=kv.total * kv.page_size,
        )

    def requests(self, show_text: bool = False, limit: int | None = None) -> tuple[RequestInfo, ...]:
        """The running, then the waiting choices, each in order of arrival."""
        now = self._scheduler.now()
        table = self._scheduler.table
        return tuple(request_info(request, now, show_text) for request in [*table.running, *table.waiting][:limit])

    def processes(self) -> tuple[ProcessInfo, ...]:
        """The main process (this one's parent), the ranks of this replica, and the detokenizer."""
        main = self._process.parent()
        if main is None:
            return self.own_processes()
        others = [process_info("main", main)]
        for child in main.children():
            with contextlib.suppress(psutil.Error):
                role = child_role(child.pid)
                if role and not role.startswith("scheduler"):
                    others.append(process_info(role, child))
        return (others[0], *self.own_processes(), *others[1:])

    def own_processes(self) -> tuple[ProcessInfo, ...]:
        """The ranks of this replica, this one first."""
        ranks = [msgspec.structs.replace(rank, dp_rank=self._dp_rank) for rank in self.ranks()]
        if ranks:
            return (msgspec.structs.replace(ranks[0], dropped_messages=self.dropped_messages()), *ranks[1:])
        usage = self._meter.read()
        own = ProcessInfo(
            role="scheduler",
            pid=os.getpid(),
            dp_rank=self._dp_rank,
            rss_bytes=usage.rss_bytes,
            cpu_percent=usage.cpu_percent,
            weight_bytes=self._scheduler.worker.info.weight_bytes,
            dropped_messages=self.dropped_messages(),
        )
        return (own,)


def process_info(role: str, process: psutil.Process) -> ProcessInfo:
    """Another process of the instance. Its CPU usage is the average since its start."""
    with process.oneshot():
        times, age_s = process.cpu_times(), time.time() - process.create_time()
        return ProcessInfo(
            role=role,
            pid=process.pid,
            rss_bytes=process.memory_info().rss,
            cpu_percent=100 * (times.user + times.system) / max(age_s, 0.1),
        )


def request_info(request: Request, now: float, show_text: bool) -> RequestInfo:
    """One choice as operators see it; `now` is on the scheduler's clock."""
    output_len, first_token = request.output_len, request.first_token
    decoding_s = 0.0 if first_token is None else now - first_token
    return RequestInfo(
        rid=request.rid,
        index=request.index,
        state=_state(request),
        age_s=now - request.arrival,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached,
        output_tokens=output_len,
        max_new_tokens=request.params.max_new_tokens,
        tokens_per_s=(output_len - 1) / decoding_s if decoding_s > 0 else 0.0,
        ttft_s=None if first_token is None else first_token - request.arrival,
        retractions=request.retractions,
        user=request.group.message.user,
        text=request.group.message.text if show_text else "",
    )


def _state(request: Request) -> Literal["waiting", "prefill", "decode", "embed"]:
    if request.lease is None:
        return "waiting"
    if request.pooling:
        return "embed"
    return "prefill" if request.prefilling else "decode"
