"""Two minutes of an instance that gets busy, as `top` would have recorded them: a known curve for every number."""

from pathlib import Path

from fake_instance import request_info

from llmserve.cli.top.samples import GpuInfo, Gpus, Link, Recorder, Sample
from llmserve.runtime.messages import Histogram, HttpMetrics, ProcessInfo, SchedulerMetrics

START = 1_800_000_000.0
SECONDS = 120
BOUNDS = (0.01, 0.1, 1.0, 10.0)


def scheduler(second: int) -> SchedulerMetrics:
    """100 decoded and 50 prefilled tokens a second, 40 of every 50 prompt tokens cached in the second minute only."""
    late = max(0, second - 60)
    requests = (
        request_info("cmpl-a", age_s=float(second), user="ann", output_tokens=second, prompt_tokens=2000),
        request_info("cmpl-b", index=1, age_s=10.0, user="bob", tokens_per_s=40.0, retractions=1),
        request_info("evil\x1b[2J\x07", age_s=3.0, state="prefill", ttft_s=None, tokens_per_s=0.0, output_tokens=0),
        request_info("長い名前のリクエスト", age_s=0.5, state="waiting", ttft_s=None, output_tokens=0),
    )
    return SchedulerMetrics(
        time=START + second,
        dp_rank=0,
        state="ready",
        weight_version=3,
        uptime_s=1000.0 + second,
        steps_total=20 * second,
        running=3,
        waiting=1,
        max_running=64,
        kv_tokens_total=10_000,
        kv_tokens_used=2_500,
        kv_tokens_cached=5_000,
        prefill_tokens_total=50 * second,
        decode_tokens_total=100 * second,
        cached_tokens_total=40 * late,
        prompt_tokens_total=50 * second,
        requests_total=2 * second,
        evicted_tokens_total=10 * second,
        retractions_total=second // 30,
        asked_retractions_total=second // 10,
        itl=histogram(second),
        step_s=0.05,
        processes=(ProcessInfo(role="scheduler", pid=200, rss_bytes=2 << 30, cpu_percent=99.0),),
        requests=requests,
    )


def histogram(second: int) -> Histogram:
    """Two observations a second; in the first minute of up to 0.1 s, in the second of up to 1 s."""
    early, late = min(second, 60), max(0, second - 60)
    return Histogram(bounds=BOUNDS, counts=(0, 2 * early, 2 * late, 0, 0), sum=0.0)


def front(second: int) -> HttpMetrics:
    latencies = histogram(second)
    return HttpMetrics(
        time=START + second,
        outcomes={"stop": second, "length": second, "abort": 1},
        ttft=latencies,
        e2e=latencies,
        queue=latencies,
        processes=(ProcessInfo(role="main", pid=100, rss_bytes=80 << 20, cpu_percent=12.0, dropped_messages=5),),
    )


def samples(seconds: int = SECONDS, first: int = 0) -> list[Sample]:
    name = {"name": "prod", "model": "SmolLM2-135M", "address": "127.0.0.1:30000"}
    gpu = GpuInfo(index=0, name="H200", used_bytes=12 << 30, total_bytes=139 << 30, busy_percent=45.0)
    found: list[Sample] = [Link(time=START + first, status="connected", **name), Gpus(time=START + first, gpus=(gpu,))]
    for second in range(first, seconds + 1):
        found += [scheduler(second), front(second)]
    return found


def record(path: Path, seconds: int = SECONDS, first: int = 0) -> Path:
    recorder = Recorder(path)
    for sample in samples(seconds, first):
        recorder.add(sample)
    recorder.close()
    return path
