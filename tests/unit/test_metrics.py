"""What is measured, and how Prometheus reads it."""

import math
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmserve.runtime.histogram import Recorder, added, buckets
from llmserve.runtime.messages import Histogram, HttpMetrics, ProcessInfo, SchedulerMetrics
from llmserve.runtime.metrics import FrontMetrics
from llmserve.runtime.server.prometheus import CONTENT_TYPE, exposition

SCHEDULER: dict[str, Any] = {
    **{"time": 1.0, "dp_rank": 0, "state": "ready", "weight_version": 2, "uptime_s": 60.0, "steps_total": 11},
    **{
        "running": 3,
        "max_running": 64,
        "waiting": 4,
        "kv_tokens_total": 2048,
        "kv_tokens_used": 100,
        "kv_tokens_cached": 50,
    },
    **{"prefill_tokens_total": 70, "decode_tokens_total": 80, "cached_tokens_total": 30, "prompt_tokens_total": 90},
    **{"requests_total": 5, "evicted_tokens_total": 6, "retractions_total": 7, "asked_retractions_total": 8},
}


def samples(front: HttpMetrics, scheduler: SchedulerMetrics | None = None) -> dict[tuple[str, tuple[str, ...]], float]:
    """Parsed as a scraper does it: (name, label values) -> value."""
    text = exposition(front, scheduler).decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_buckets_are_close_and_those_of_prometheus_are_among_them() -> None:
    bounds = buckets(-1, 1)
    assert (bounds[0], bounds[-1]) == (0.1, 10)
    assert max(high / low for low, high in pairwise(bounds)) < 1.13
    assert {0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10} < set(bounds)


def test_prometheus_gets_six_buckets_a_decade() -> None:
    found = samples(FrontMetrics().snapshot())
    bounds = [labels[0] for name, labels in found if name == "llmserve_request_latency_seconds_bucket"]
    assert len(bounds) == 6 * 5 + 2
    assert bounds[:3] + bounds[-2:] == ["0.01", "0.015", "0.02", "1000.0", "+Inf"]


def test_an_observation_falls_into_the_bucket_that_it_is_at_most() -> None:
    recorder = Recorder((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        recorder.observe(value, times)
    histogram = recorder.snapshot()
    assert histogram.counts == (3, 1, 3)
    assert histogram.sum == pytest.approx(0.5 + 2 + 1.5 + 27)


def test_what_several_have_counted_is_added_up() -> None:
    """A replica that has said nothing of it yet has no bounds."""
    one, other = Recorder((1.0, 2.0)), Recorder((1.0, 2.0))
    one.observe(0.5)
    other.observe(1.5, times=2)
    assert added([one.snapshot(), Histogram(), other.snapshot()]) == Histogram(
        bounds=(1.0, 2.0), counts=(1, 2, 0), sum=3.5
    )
    assert added([]) == Histogram()


def test_histograms_are_cumulative_for_prometheus() -> None:
    front = FrontMetrics()
    front.ttft.observe(0.0012)
    front.ttft.observe(0.3)
    front.ttft.observe(1000.0)
    found = samples(front.snapshot())
    name = "llmserve_time_to_first_token_seconds"
    assert found[(name + "_bucket", ("0.001",))] == 0
    assert found[(name + "_bucket", ("0.0015",))] == 1
    assert found[(name + "_bucket", ("0.3",))] == 2
    assert found[(name + "_bucket", ("100.0",))] == 2
    assert found[(name + "_bucket", ("+Inf",))] == found[(name + "_count", ())] == 3
    assert math.isclose(found[(name + "_sum", ())], 1000.3012)


def test_the_time_between_tokens_is_the_schedulers() -> None:
    itl = Recorder((0.01, 0.1))
    itl.observe(0.05, times=3)
    name = "llmserve_inter_token_latency_seconds"
    found = samples(FrontMetrics().snapshot(), SchedulerMetrics(**SCHEDULER, itl=itl.snapshot()))
    assert found[(name + "_bucket", ("0.01",))] == 0
    assert found[(name + "_bucket", ("0.1",))] == found[(name + "_count", ())] == 3
    assert (name + "_count", ()) not in samples(FrontMetrics().snapshot())


def test_every_outcome_is_there_from_the_start() -> None:
    front = FrontMetrics()
    front.count_outcome("abort", 2)
    found = samples(front.snapshot())
    outcomes = {
        labels[0]: value for (name, labels), value in found.items() if name == "llmserve_requests_finished_total"
    }
    assert outcomes == {"stop": 0, "length": 0, "abort": 2, "error": 0, "rejected": 0, "unavailable": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llmserve_num_requests_running", 3),
        ("llmserve_max_num_requests_running", 64),
        ("llmserve_num_requests_waiting", 4),
        ("llmserve_kv_tokens_used", 100),
        ("llmserve_kv_tokens_total", 2048),
        ("llmserve_kv_tokens_cached", 50),
        ("llmserve_weight_version", 2),
        ("llmserve_prompt_tokens_total", 90),
        ("llmserve_generation_tokens_total", 80),
        ("llmserve_cached_tokens_total", 30),
        ("llmserve_evicted_tokens_total", 6),
        ("llmserve_retractions_total", 7),
        ("llmserve_asked_retractions_total", 8),
    ],
)
def test_the_schedulers_numbers(name: str, value: float) -> None:
    assert samples(FrontMetrics().snapshot(), SchedulerMetrics(**SCHEDULER))[(name, ())] == value


def test_the_last_numbers_of_the_scheduler_are_shown() -> None:
    idle = SchedulerMetrics(**{**SCHEDULER, "running": 0, "waiting": 0})
    found = samples(FrontMetrics().snapshot(), idle)
    assert found[("llmserve_num_requests_running", ())] == 0
    assert found[("llmserve_num_requests_waiting", ())] == 0


def test_memory_is_shown_for_each_process() -> None:
    main = ProcessInfo(role="main", pid=1, rss_bytes=100)
    rank = ProcessInfo(role="scheduler", pid=2, tp_rank=1, rss_bytes=200)
    found = samples(FrontMetrics().snapshot((main,)), SchedulerMetrics(**SCHEDULER, processes=(rank,)))
    name = "llmserve_process_resident_memory_bytes"
    by_role = {labels: value for (sample, labels), value in found.items() if sample == name}
    assert sorted(by_role.values()) == [100, 200]
    assert {"main", "scheduler"} <= {label for labels in by_role for label in labels}


def test_without_a_scheduler_the_front_still_answers() -> None:
    found = samples(FrontMetrics().snapshot())
    assert ("llmserve_request_latency_seconds_count", ()) in found
    assert not any(name == "llmserve_num_requests_running" for name, _ in found)
    assert "version=" in CONTENT_TYPE
