"""The panels above the table: load, KV pool, latency and processes, each as a block and some as one line.

What a colour says is always said by a glyph and a word too.
"""

from llmserve.cli import format
from llmserve.cli.top.frame import Frame
from llmserve.cli.top.model import STALE_S
from llmserve.cli.top.snapshot import Quantiles
from llmserve.cli.top.spans import Line

FULL = 0.9
"""From this share of the KV pool on, it is called high."""


def load(frame: Frame, width: int) -> list[Line]:
    load, history = frame.s.load, frame.s.history
    rows = [
        ("running", str(load.running), "running", ""),
        ("waiting", str(load.waiting), "waiting", "warn" if load.waiting else ""),
        ("prefill", f"{format.number(load.prefill_tokens_per_s)} tok/s", "prefill", ""),
        ("decode", f"{format.number(load.decode_tokens_per_s)} tok/s", "decode", ""),
        ("requests", f"{load.requests_per_s:.1f}/s", "requests", ""),
    ]
    lines = [frame.title("Load", f"step {format.duration(load.step_s)}", width)]
    for name, value, series, style in rows:
        graph = frame.spark(history.get(series, ()), max(0, width - 22))
        lines.append([(f"{name:9}", "dim"), (f"{value:>11}", style), ("  ", ""), (graph, "graph")])
    return lines


def load_line(frame: Frame) -> list[Line]:
    load = frame.s.load
    if frame.width < 40:
        return [[(f"run {load.running} wait {load.waiting} {format.number(load.decode_tokens_per_s)}/s", "")]]
    line: Line = [("run ", "dim"), (str(load.running), ""), (" wait ", "dim")]
    line += [(str(load.waiting), "warn" if load.waiting else "")]
    line += [("  decode ", "dim"), (f"{format.number(load.decode_tokens_per_s)}/s", "")]
    line += [("  prefill ", "dim"), (f"{format.number(load.prefill_tokens_per_s)}/s", "")]
    line += [("  req ", "dim"), (f"{load.requests_per_s:.1f}/s", "")]
    return [line]


def cache(frame: Frame, width: int) -> list[Line]:
    cache = frame.s.cache
    high = cache.total and cache.used >= FULL * cache.total
    window = "-" if cache.hit_rate is None else f"{100 * cache.hit_rate:.0f}%"
    lifetime = "-" if cache.hit_rate_lifetime is None else f"{100 * cache.hit_rate_lifetime:.0f}%"
    lost = cache.retractions_last_minute
    asked = f", {cache.asked_retractions} asked for" if cache.asked_retractions else ""
    return [
        frame.title("KV pool", f"{format.number(cache.total)} tokens", width),
        [*frame.bar(width - 10), (f" {frame.glyphs.alert} high" if high else "", "bad")],
        [
            ("used ", "dim"),
            (f"{format.number(cache.used)} ({format.percent(cache.used, cache.total)})", "bad" if high else ""),
            ("  cached ", "dim"),
            (format.number(cache.cached), ""),
            ("  free ", "dim"),
            (format.number(cache.free), ""),
        ],
        [
            ("hit rate ", "dim"),
            (window, ""),
            (" last minute, ", "dim"),
            (lifetime, ""),
            (" since the start", "dim"),
        ],
        [
            ("evicted ", "dim"),
            (f"{format.number(cache.evicted_tokens_per_s)}/s", ""),
            (f" ({format.number(cache.evicted_tokens)})", "dim"),
            ("  retracted ", "dim"),
            (f"{frame.glyphs.alert} {lost}/min" if lost else "0/min", "warn" if lost else ""),
            (f" ({cache.retractions}{asked})", "dim"),
        ],
    ]


def cache_line(frame: Frame) -> list[Line]:
    cache = frame.s.cache
    high = cache.total and cache.used >= FULL * cache.total
    line: Line = [("kv ", "dim"), *frame.bar(min(24, max(6, frame.width - 14)))]
    line += [(f" {format.percent(cache.used, cache.total)}", "bad" if high else "")]
    line += [(f" {frame.glyphs.alert} high" if high else "", "bad"), ("  hit ", "dim")]
    line += [("-" if cache.hit_rate is None else f"{100 * cache.hit_rate:.0f}%", "")]
    return [line]


def latency(frame: Frame, width: int) -> list[Line]:
    latency = frame.s.latency
    window = f"last {latency.window_s:.0f}s" if latency.window_s else "since the start"
    lines = [frame.title("Latency", window, width)]
    lines.append([(f"{'':7}{'p50':>8}{'p95':>8}{'p99':>8}{'count':>8}", "dim")])
    for name, values in latencies(frame):
        cells = "".join(f"{seconds(value):>8}" for value in (values.p50, values.p95, values.p99))
        lines.append([(f"{name:7}", "dim"), (cells, ""), (f"{format.number(values.count):>8}", "dim")])
    return lines


def latency_lines(frame: Frame) -> list[Line]:
    """p50 and p95 in one line, for small screens."""
    line: Line = [("p50/p95", "dim")]
    for name, values in latencies(frame):
        line += [(f"  {name} ", "dim"), (f"{seconds(values.p50)}/{seconds(values.p95)}", "")]
    return [line]


def latencies(frame: Frame) -> list[tuple[str, Quantiles]]:
    latency = frame.s.latency
    return [("ttft", latency.ttft), ("itl", latency.itl), ("e2e", latency.e2e), ("queue", latency.queue)]


def processes(frame: Frame, width: int) -> list[Line]:
    lines = [frame.title("Processes", "", width)]
    staged = any(process.bubble is not None for process in frame.s.processes)
    waits = f"{'wait':>6}" if staged else ""
    lines.append([(f"{'':12}{'pid':>7}{'rss':>10}{'cpu':>6}{waits}{'heard':>7}{'drop':>6}", "dim")])
    many = len({(p.dp_rank, p.pp_rank, p.tp_rank) for p in frame.s.processes}) > 1
    for process in frame.s.processes:
        late = process.heartbeat_age_s > STALE_S
        rank = f" {process.dp_rank}.{process.pp_rank}.{process.tp_rank}" if many and process.role == "scheduler" else ""
        heard = format.duration(process.heartbeat_age_s)
        lines.append(
            [
                (f"{process.role[: 12 - len(rank)]}{rank}".ljust(12), ""),
                (f"{process.pid:>7}{format.size(process.rss_bytes):>10}{process.cpu_percent:>5.0f}%", ""),
                (waited(process.bubble) if staged else "", ""),
                (f"{heard:>7}", "bad" if late else ""),
                (f"{format.number(process.dropped_messages):>6}", "warn" if process.dropped_messages else "dim"),
                (f" {frame.glyphs.alert} late" if late else "", "bad"),
            ]
        )
    for gpu in frame.s.gpus:
        used = f"{format.size(gpu.used_bytes)} of {format.size(gpu.total_bytes)}"
        lines.append(
            [
                (f"gpu {gpu.index}".ljust(12), ""),
                (f"{used}, {gpu.busy_percent:.0f}% busy", ""),
                (f"  {gpu.name}", "dim"),
            ]
        )
    return lines


def seconds(value: float | None) -> str:
    return "-" if value is None else format.duration(value)


def waited(bubble: float | None) -> str:
    return f"{'-':>6}" if bubble is None else f"{100 * bubble:>5.0f}%"
