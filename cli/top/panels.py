"""The panels above the table: load, KV pool, latency and processes, each as a block and some as one line.

What a colour says is always said by a glyph and a word too.
"""

from llmserve.cli import format
from llmserve.cli.top.frame import Frame
from llmserve.cli.top.glyphs import STATE_STYLES
from llmserve.cli.top.model import FULL, STALE_S
from llmserve.cli.top.snapshot import Process, Quantiles
from llmserve.cli.top.spans import Line, packed


def load(frame: Frame, width: int) -> list[Line]:
    load, history = frame.s.load, frame.s.history
    rows = [
        ("running", f"{load.running}/{load.max_running}" if load.max_running else str(load.running), "running", ""),
        ("waiting", str(load.waiting), "waiting", "warn" if load.waiting else ""),
        ("prefill", f"{format.number(load.prefill_tokens_per_s)} tok/s", "prefill", ""),
        ("decode", f"{format.number(load.decode_tokens_per_s)} tok/s", "decode", ""),
        ("requests", f"{load.requests_per_s:.1f}/s", "requests", ""),
    ]
    lines = [frame.title("Load", f"step {format.duration(load.step_s)}", width, obstacle(frame))]
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
    line += [(f" {obstacle(frame)}", "warn")] if load.obstacle else []
    line += [("  decode ", "dim"), (f"{format.number(load.decode_tokens_per_s)}/s", "")]
    line += [("  prefill ", "dim"), (f"{format.number(load.prefill_tokens_per_s)}/s", "")]
    line += [("  req ", "dim"), (f"{load.requests_per_s:.1f}/s", "")]
    return [line]


def obstacle(frame: Frame) -> str:
    """The warning that says why requests wait; empty if none do."""
    return f"{frame.glyphs.alert} {frame.s.load.obstacle}" if frame.s.load.obstacle else ""


def cache(frame: Frame, width: int) -> list[Line]:
    cache = frame.s.cache
    high = cache.total and cache.used >= FULL * cache.total
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
            (format.share(cache.hit_rate), ""),
            (" last minute, ", "dim"),
            (format.share(cache.hit_rate_lifetime), ""),
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
    line += [(format.share(cache.hit_rate), "")]
    return [line]


def latency(frame: Frame, width: int) -> list[Line]:
    latency = frame.s.latency
    window = f"last {latency.window_s:.0f}s" if latency.window_s else "since the start"
    lines = [frame.title("Latency", window, width)]
    lines.append([(f"{'':7}{'p50':>8}{'p95':>8}{'p99':>8}{'count':>8}", "dim")])
    for name, values in latencies(frame):
        cells = "".join(f"{format.duration(value):>8}" for value in (values.p50, values.p95, values.p99))
        lines.append([(f"{name:7}", "dim"), (cells, ""), (f"{format.number(values.count):>8}", "dim")])
    return lines


def latency_lines(frame: Frame) -> list[Line]:
    """p50 and p95 in one line, for small screens."""
    line: Line = [("p50/p95", "dim")]
    for name, values in latencies(frame):
        line += [(f"  {name} ", "dim"), (f"{format.duration(values.p50)}/{format.duration(values.p95)}", "")]
    return [line]


def latencies(frame: Frame) -> list[tuple[str, Quantiles]]:
    latency = frame.s.latency
    return [("ttft", latency.ttft), ("itl", latency.itl), ("e2e", latency.e2e), ("queue", latency.queue)]


def replicas(frame: Frame) -> list[Line]:
    """The load of each replica, if there are several. Requests are routed by prefix, so loads may differ."""
    if len(frame.s.replicas) < 2:
        return []
    items: list[Line] = []
    for each in frame.s.replicas:
        late = each.heartbeat_age_s > STALE_S
        state = "silent" if late and each.state != "lost" else each.state
        sign = f"{frame.glyphs.alert} " if late or each.state == "lost" else ""
        style = "bad" if late else STATE_STYLES.get(each.state, "")
        item: Line = [(f"dp{each.dp_rank} ", "dim"), (f"{sign}{state}", style)]
        kv = format.percent(each.kv_used, each.kv_total)
        item += [(" run ", "dim"), (str(each.running), ""), (" wait ", "dim"), (str(each.waiting), "")]
        items.append([*item, (" kv ", "dim"), (kv, "")])
    return packed("replicas", items, frame.width)


def waits(frame: Frame) -> list[Line]:
    """The share of time that each rank waits for others, for screens without room for the processes."""
    ranks = [process for process in frame.s.processes if process.bubble is not None]
    items: list[Line] = [[(f"{place(frame, rank)} ", "dim"), (format.share(rank.bubble), "")] for rank in ranks]
    return packed("waits", items, frame.width)


def place(frame: Frame, process: Process) -> str:
    """The dimensions in which a process differs from others of its role, such as "pp1 tp0"."""
    ranks = [each for each in frame.s.processes if each.role == process.role]
    names = ("dp", "pp", "tp")
    return " ".join(
        f"{name}{getattr(process, name + '_rank')}"
        for name in names
        if len({getattr(each, name + "_rank") for each in ranks}) > 1
    )


def processes(frame: Frame, width: int) -> list[Line]:
    shown = frame.s.processes
    staged = any(process.bubble is not None for process in shown)
    names = [f"{'rank' if place(frame, each) else each.role} {place(frame, each)}".rstrip() for each in shown]
    first = max([11, *map(len, names)])
    lines = [frame.title("Processes", "wait: for other ranks" if staged else "", width)]
    waits = f"{'wait':>5}" if staged else ""
    lines.append([(f"{'':{first}}{'pid':>8}{'rss':>9}{'cpu':>6}{waits}{'heard':>6}{'drop':>5}", "dim")])
    for name, process in zip(names, shown, strict=True):
        late = process.heartbeat_age_s > STALE_S
        heard = format.duration(process.heartbeat_age_s)
        lines.append(
            [
                (f"{name:{first}}{process.pid:>8}", ""),
                (f"{format.size(process.rss_bytes):>9}{process.cpu_percent:>5.0f}%", ""),
                (f"{format.share(process.bubble):>5}" if staged else "", ""),
                (f"{heard:>6}", "bad" if late else ""),
                (f"{format.number(process.dropped_messages):>5}", "warn" if process.dropped_messages else "dim"),
                (f" {frame.glyphs.alert} late" if late else "", "bad"),
            ]
        )
    for gpu in frame.s.gpus:
        used, total = ("-" if size is None else format.size(size) for size in (gpu.used_bytes, gpu.total_bytes))
        busy = "-" if gpu.busy_percent is None else f"{gpu.busy_percent:.0f}%"
        lines.append(
            [
                (f"gpu {gpu.index}".ljust(first), ""),
                (f"{used} of {total}, {busy} busy", ""),
                (f"  {gpu.name}", "dim"),
            ]
        )
    return lines
