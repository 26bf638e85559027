"""All metrics of an instance in Prometheus' text format.

Only the schedulers' latest numbers are exported, so that an idle scheduler's zeros show as soon as it has pushed them.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmserve.runtime.histogram import COARSE, buckets
from llmserve.runtime.messages import Histogram, HttpMetrics, ProcessInfo, SchedulerMetrics

CONTENT_TYPE: str = CONTENT_TYPE_LATEST


class Described(NamedTuple):
    """One exported metric: the field that it is read from, its name without PREFIX, and its help text."""

    field: str
    name: str
    help: str


GAUGES = (
    Described("running", "num_requests_running", "Choices of requests that hold KV pages."),
    Described("max_running", "max_num_requests_running", "So many choices may run at once."),
    Described(
        "waiting", "num_requests_waiting", "Choices of requests that wait for their first step, or again for one."
    ),
    Described("kv_tokens_total", "kv_tokens_total", "Tokens that the KV pool has room for."),
    Described("kv_tokens_used", "kv_tokens_used", "Tokens of KV that running requests hold."),
    Described("kv_tokens_cached", "kv_tokens_cached", "Tokens of KV that only the prefix cache holds."),
    Described("weight_version", "weight_version", "How often the weights have been swapped."),
    Described("uptime_s", "uptime_seconds", "Seconds since the scheduler began to serve."),
    Described("step_s", "step_seconds", "Seconds that the last step took."),
)
COUNTERS = (
    Described("steps_total", "steps", "Steps of the model."),
    Described("requests_total", "requests", "Choices of requests that the scheduler has accepted."),
    Described("prompt_tokens_total", "prompt_tokens", "Prompt tokens of those requests, cached ones included."),
    Described("cached_tokens_total", "cached_tokens", "Prompt tokens that the prefix cache held."),
    Described(
        "prefill_tokens_total", "prefill_tokens", "Tokens that were computed before the first token of an output."
    ),
    Described("decode_tokens_total", "generation_tokens", "Tokens that were generated."),
    Described("evicted_tokens_total", "evicted_tokens", "Tokens of KV that the prefix cache gave up for room."),
    Described("retractions_total", "retractions", "Requests put back into the queue because the KV pool was full."),
    Described(
        "asked_retractions_total",
        "asked_retractions",
        "Requests put back into the queue because generation was paused or the weights swapped.",
    ),
    Described("active_s", "pipeline_active_seconds", "Time with a step in some stage, where there are several ranks."),
    Described(
        "flushes_total", "cache_flushes", "Times that the prefix cache was emptied, by updates of the weights too."
    ),
    Described("bad_frames_total", "bad_frames", "Frames on the scheduler's sockets that held no message."),
)
HISTOGRAMS = (
    Described("ttft", "time_to_first_token_seconds", "From the arrival of a request to its first token."),
    Described("e2e", "request_latency_seconds", "From the arrival of a request to its end."),
    Described("queue", "queue_time_seconds", "From the arrival of a request to its first step."),
)
ITL = Described("itl", "inter_token_latency_seconds", "Between the tokens of a request, streamed or not.")
PREFIX = "llmserve_"
BOUNDS = {*buckets(-4, 3, COARSE), math.inf}


def exposition(front: HttpMetrics, scheduler: SchedulerMetrics | None) -> bytes:
    """The text of /metrics, of the type CONTENT_TYPE. Only the front's metrics while `scheduler` is None."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Export(front, scheduler))
    return generate_latest(registry)


class _Export(Collector):
    """Presents one pair of messages to prometheus-client as metric families."""

    def __init__(self, front: HttpMetrics, scheduler: SchedulerMetrics | None) -> None:
        self._front = front
        self._scheduler = scheduler

    def describe(self) -> Iterable[Metric]:
        """Empty: a registry would otherwise collect once more to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            PREFIX + "requests_finished", "Choices of requests by outcome.", labels=["reason"]
        )
        for outcome, count in self._front.outcomes.items():
            finished.add_metric([outcome], count)
        yield finished
        routed = CounterMetricFamily(
            PREFIX + "requests_routed", "Requests by why they went to their replica.", labels=["reason"]
        )
        for reason, count in self._front.routed.items():
            routed.add_metric([reason], count)
        yield routed
        for field, name, help in HISTOGRAMS:
            yield _histogram(name, help, getattr(self._front, field))
        processes = self._front.processes
        if self._scheduler is not None:
            processes += self._scheduler.processes
            yield _histogram(ITL.name, ITL.help, self._scheduler.itl)
            for field, name, help in GAUGES:
                yield GaugeMetricFamily(PREFIX + name, help, value=getattr(self._scheduler, field))
            for field, name, help in COUNTERS:
                yield CounterMetricFamily(PREFIX + name, help, value=getattr(self._scheduler, field))
        yield from _process_metrics(processes)


def _histogram(name: str, help: str, histogram: Histogram) -> Metric:
    cumulative, total = [], 0
    for bound, count in zip([*histogram.bounds, math.inf], histogram.counts, strict=True):
        total += count
        if bound in BOUNDS:
            cumulative.append(("+Inf" if math.isinf(bound) else repr(bound), total))
    return HistogramMetricFamily(PREFIX + name, help, buckets=cumulative, sum_value=histogram.sum)


def _process_metrics(processes: tuple[ProcessInfo, ...]) -> Iterator[Metric]:
    labels = ["role", "tp_rank", "pp_rank", "dp_rank"]
    resident = GaugeMetricFamily(PREFIX + "process_resident_memory_bytes", "Resident memory.", labels=labels)
    dropped = CounterMetricFamily(PREFIX + "dropped_messages", "Metrics that a slow reader missed.", labels=labels)
    for process in processes:
        values = [process.role, str(process.tp_rank), str(process.pp_rank), str(process.dp_rank)]
        resident.add_metric(values, process.rss_bytes)
        dropped.add_metric(values, process.dropped_messages)
    yield resident
    yield dropped
    labels = [*labels[1:], "operation"]
    calls = CounterMetricFamily(PREFIX + "collective_calls", "What a rank has said to others.", labels=labels)
    size = CounterMetricFamily(PREFIX + "collective_bytes", "Bytes of the tensors of that.", labels=labels)
    busy = CounterMetricFamily(PREFIX + "rank_busy_seconds", "Time of a rank in steps.", labels=labels[:-1])
    for process in processes:
        place = [str(process.tp_rank), str(process.pp_rank), str(process.dp_rank)]
        if process.collectives:
            busy.add_metric(place, process.busy_s)
        for operation, count in process.collectives.items():
            calls.add_metric([*place, operation], count["calls"])
            size.add_metric([*place, operation], count["bytes"])
    yield calls
    yield size
    yield busy
