"""The picture: a Snapshot and a Ui become lines of styled text for a screen of some size. Writes nothing itself.

A line is a list of (text, style); styles are names, which screen.py turns into colours or into nothing. What a colour
says is always said by a glyph and a word too.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from llmserve.cli import format
from llmserve.cli.console import printable
from llmserve.cli.top.keys import HELP, Abort, Ui
from llmserve.cli.top.model import STALE_S, Quantiles, Request, Snapshot
from llmserve.cli.top.table import Column, fitting, key_of, rid_of

Span = tuple[str, str]
Line = list[Span]

WIDE = 100
"""From this width on, blocks stand side by side."""
FULL = 0.9
"""From this share of the KV pool on, it is called high."""


class Glyphs(NamedTuple):
    spark: str
    used: str
    cached: str
    free: str
    states: dict[str, str]
    chosen: str
    tagged: str
    alert: str
    rule: str
    ellipsis: str
    down: str
    up: str


STATE_WORDS = ("ready", "starting", "draining", "paused", "stalled", "dead", "lost")
UNICODE = Glyphs(
    spark=" ▁▂▃▄▅▆▇█",
    used="█",
    cached="▒",
    free="·",
    states=dict(zip(STATE_WORDS, "●◌◐‖▲✖?", strict=True)),
    chosen="▸",
    tagged="◆",
    alert="▲",
    rule="─",
    ellipsis="…",
    down="▼",
    up="▲",
)
ASCII = Glyphs(
    spark=" .:-=+*%#",
    used="#",
    cached="+",
    free=".",
    states=dict(zip(STATE_WORDS, "*o~=!X?", strict=True)),
    chosen=">",
    tagged="*",
    alert="!",
    rule="-",
    ellipsis="~",
    down="v",
    up="^",
)
STATE_STYLES = {
    "ready": "good",
    "starting": "warn",
    "draining": "warn",
    "paused": "warn",
    "stalled": "bad",
    "dead": "bad",
    "lost": "bad",
}


def render(snapshot: Snapshot, ui: Ui, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """Exactly `height` lines, none wider than `width` cells."""
    draw = Drawing(snapshot, ui, width, glyphs)
    foot = [draw.footer()] if height >= 3 else []
    room = height - 1 - len(foot)
    if ui.mode == "help":
        body = draw.help()
    elif ui.mode == "detail":
        body = draw.detail()
    else:
        body = draw.overview(room)
    body = body[:room] + [[] for _ in range(room - len(body))]
    return [clip(line, width, glyphs.ellipsis) for line in [draw.header(), *body, *foot][:height]]


def text_of(lines: Sequence[Line]) -> str:
    """The lines as plain text."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


class Drawing:
    """One frame being drawn. Each method gives the lines of one part."""

    def __init__(self, snapshot: Snapshot, ui: Ui, width: int, glyphs: Glyphs) -> None:
        self.s = snapshot
        self.ui = ui
        self.width = width
        self.glyphs = glyphs

    # ---- the fixed lines -------------------------------------------------------------------------------------------

    def header(self) -> Line:
        s = self.s
        line: Line = [(f"{self.glyphs.states[s.state]} {s.state}", STATE_STYLES[s.state]), ("  ", "")]
        line += [(printable(s.instance), "bold")]
        if self.width >= 60 and s.model:
            line += [("  ", ""), (printable(s.model), "")]
        if self.width >= 30:
            line += [(f"  weights v{s.weight_version}" if self.width >= 60 else f" v{s.weight_version}", "dim")]
        if self.width >= 40:
            line += [(f"  up {format.duration(s.uptime_s)}", "dim")]
        if s.replicas > 1:
            line += [(f"  {s.replicas} replicas", "dim")]
        right = self._freshness()
        gap = self.width - length(line) - length(right)
        if s.reason and self.width >= 60:
            reason = f"  {s.reason}"
            line = [*line[:1], (reason, "bad"), *line[1:]]
            gap -= cell_len(reason)
        return [*line, (" " * max(2, gap), ""), *right]

    def _freshness(self) -> Line:
        if self.ui.paused:
            return [("display stopped", "warn")]
        age = self.s.data_age_s
        if age is None:
            return [("no data yet", "dim")]
        if age > STALE_S:
            return [(f"{self.glyphs.alert} data {format.duration(age)} old", "bad")]
        return [(f"data {format.duration(age)} old" if self.width >= 60 else format.duration(age), "dim")]

    def footer(self) -> Line:
        ui = self.ui
        if ui.mode == "filter":
            return [
                ("filter: ", "accent"),
                (printable(ui.wanted), ""),
                ("_", "dim"),
                ("  Enter keeps, Esc clears", "dim"),
            ]
        if ui.mode == "confirm" and isinstance(ui.asked, Abort):
            names = ", ".join(printable(rid) for rid in ui.asked)
            what = format.plural(len(ui.asked), "request")
            ask = " [y/N] "
            room = self.width - cell_len(f"abort {what}: {ask}")
            return [(f"abort {what}: ", "bad"), (shorten(names, room, self.glyphs.ellipsis), "bold"), (ask, "bad")]
        if ui.message:
            return [(printable(ui.message), "accent")]
        if ui.mode != "list":
            return [("q", "key"), (" back", "dim")]
        keys = [("q", "quit"), ("?", "help"), ("/", "filter"), ("s", "sort"), ("Space", "tag"), ("Enter", "detail")]
        if not ui.readonly:
            keys[2:2] = [("a", "abort"), ("f", "flush")]
        keys += [("p", "stop"), ("+-", f"every {ui.interval:g}s")]
        line: Line = []
        for key, what in keys:
            hint: Line = [(key, "key"), (f" {what}  ", "dim")]
            if length(line) + length(hint) - 2 <= self.width:
                line += hint
        return line

    # ---- the body --------------------------------------------------------------------------------------------------

    def overview(self, room: int) -> list[Line]:
        """As many blocks as there is room for, the table of requests below them."""
        top = self._blocks(room)
        return [*top, *self.table(room - len(top))]

    def _blocks(self, room: int) -> list[Line]:
        """The richest arrangement that leaves the table some lines."""
        wide = self.width >= WIDE
        plans: list[Callable[[], list[Line]]] = [self._columns] if wide else [self._stack]
        plans += [
            lambda: [*self.load(self.width), *self.cache(self.width), *self.latency(self.width)],
            lambda: [*self.load(self.width), *self.cache(self.width), *self.latency_lines()],
            lambda: [*self.load_line(), *self.cache_line(), *self.latency_lines()],
            lambda: [*self.load_line(), *self.cache_line()],
        ]
        for plan in plans:
            lines = plan()
            if len(lines) <= room - min(10, 2 + len(self.s.requests)):
                return lines
        return [*self.load_line(), *self.cache_line()][:room]

    def _columns(self) -> list[Line]:
        left = self.width // 2 - 1
        right = self.width - left - 2
        upper = beside(self.load(left), self.cache(right), left)
        return [*upper, *beside(self.latency(left), self.processes(right), left)]

    def _stack(self) -> list[Line]:
        width = self.width
        return [*self.load(width), *self.cache(width), *self.latency(width), *self.processes(width)]

    def load(self, width: int) -> list[Line]:
        load, history = self.s.load, self.s.history
        rows = [
            ("running", str(load.running), "running", ""),
            ("waiting", str(load.waiting), "waiting", "warn" if load.waiting else ""),
            ("prefill", f"{format.number(load.prefill_tokens_per_s)} tok/s", "prefill", ""),
            ("decode", f"{format.number(load.decode_tokens_per_s)} tok/s", "decode", ""),
            ("requests", f"{load.requests_per_s:.1f}/s", "requests", ""),
        ]
        lines = [self._title("Load", f"step {format.duration(load.step_s)}", width)]
        for name, value, series, style in rows:
            graph = self._spark(history.get(series, ()), max(0, width - 22))
            lines.append([(f"{name:9}", "dim"), (f"{value:>11}", style), ("  ", ""), (graph, "graph")])
        return lines

    def load_line(self) -> list[Line]:
        load = self.s.load
        if self.width < 40:
            return [[(f"run {load.running} wait {load.waiting} {format.number(load.decode_tokens_per_s)}/s", "")]]
        line: Line = [("run ", "dim"), (str(load.running), ""), (" wait ", "dim")]
        line += [(str(load.waiting), "warn" if load.waiting else "")]
        line += [("  decode ", "dim"), (f"{format.number(load.decode_tokens_per_s)}/s", "")]
        line += [("  prefill ", "dim"), (f"{format.number(load.prefill_tokens_per_s)}/s", "")]
        line += [("  req ", "dim"), (f"{load.requests_per_s:.1f}/s", "")]
        return [line]

    def cache(self, width: int) -> list[Line]:
        cache = self.s.cache
        high = cache.total and cache.used >= FULL * cache.total
        window = "-" if cache.hit_rate is None else f"{100 * cache.hit_rate:.0f}%"
        lifetime = "-" if cache.hit_rate_lifetime is None else f"{100 * cache.hit_rate_lifetime:.0f}%"
        lost = cache.retractions_last_minute
        return [
            self._title("KV pool", f"{format.number(cache.total)} tokens", width),
            [*self._bar(width - 10), (f" {self.glyphs.alert} high" if high else "", "bad")],
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
                (f"{self.glyphs.alert} {lost}" if lost else "0", "warn" if lost else ""),
                (f" last minute ({cache.retractions})", "dim"),
            ],
        ]

    def cache_line(self) -> list[Line]:
        cache = self.s.cache
        high = cache.total and cache.used >= FULL * cache.total
        line: Line = [("kv ", "dim"), *self._bar(min(24, max(6, self.width - 14)))]
        line += [(f" {format.percent(cache.used, cache.total)}", "bad" if high else "")]
        line += [(f" {self.glyphs.alert} high" if high else "", "bad"), ("  hit ", "dim")]
        line += [("-" if cache.hit_rate is None else f"{100 * cache.hit_rate:.0f}%", "")]
        return [line]

    def latency(self, width: int) -> list[Line]:
        latency = self.s.latency
        window = f"last {latency.window_s:.0f}s" if latency.window_s else "since the start"
        lines = [self._title("Latency", window, width)]
        lines.append([(f"{'':7}{'p50':>8}{'p95':>8}{'p99':>8}{'count':>8}", "dim")])
        for name, values in self._latencies():
            cells = "".join(f"{seconds(value):>8}" for value in (values.p50, values.p95, values.p99))
            lines.append([(f"{name:7}", "dim"), (cells, ""), (f"{format.number(values.count):>8}", "dim")])
        return lines

    def latency_lines(self) -> list[Line]:
        """p50 and p95 in one line, for small screens."""
        line: Line = [("p50/p95", "dim")]
        for name, values in self._latencies():
            line += [(f"  {name} ", "dim"), (f"{seconds(values.p50)}/{seconds(values.p95)}", "")]
        return [line]

    def _latencies(self) -> list[tuple[str, Quantiles]]:
        latency = self.s.latency
        return [("ttft", latency.ttft), ("itl", latency.itl), ("e2e", latency.e2e), ("queue", latency.queue)]

    def processes(self, width: int) -> list[Line]:
        lines = [self._title("Processes", "", width)]
        staged = any(process.bubble is not None for process in self.s.processes)
        waits = f"{'wait':>6}" if staged else ""
        lines.append([(f"{'':12}{'pid':>7}{'rss':>10}{'cpu':>6}{waits}{'heard':>7}{'drop':>6}", "dim")])
        many = len({(p.dp_rank, p.pp_rank, p.tp_rank) for p in self.s.processes}) > 1
        for process in self.s.processes:
            late = process.heartbeat_age_s > STALE_S
            rank = (
                f" {process.dp_rank}.{process.pp_rank}.{process.tp_rank}"
                if many and process.role == "scheduler"
                else ""
            )
            heard = format.duration(process.heartbeat_age_s)
            lines.append(
                [
                    (f"{process.role[: 12 - len(rank)]}{rank}".ljust(12), ""),
                    (f"{process.pid:>7}{format.size(process.rss_bytes):>10}{process.cpu_percent:>5.0f}%", ""),
                    (waited(process.bubble) if staged else "", ""),
                    (f"{heard:>7}", "bad" if late else ""),
                    (f"{format.number(process.dropped_messages):>6}", "warn" if process.dropped_messages else "dim"),
                    (f" {self.glyphs.alert} late" if late else "", "bad"),
                ]
            )
        for gpu in self.s.gpus:
            used = f"{format.size(gpu.used_bytes)} of {format.size(gpu.total_bytes)}"
            lines.append(
                [
                    (f"gpu {gpu.index}".ljust(12), ""),
                    (f"{used}, {gpu.busy_percent:.0f}% busy", ""),
                    (f"  {gpu.name}", "dim"),
                ]
            )
        return lines

    # ---- requests --------------------------------------------------------------------------------------------------

    def table(self, room: int) -> list[Line]:
        """The requests in `room` lines, title and header included; around the chosen one when not all fit."""
        ui, rows = self.ui, self.ui.rows(self.s)
        if room < 1:
            return []
        count = f"{len(rows)} of {len(self.s.requests)}" if ui.wanted else str(len(rows))
        note = f"{count}, filter {printable(ui.wanted)!r}" if ui.wanted else count
        note += f", {len(ui.tagged)} tagged" if ui.tagged else ""
        lines = [self._title("Requests", note, self.width)] if room >= 4 else []
        columns = fitting(self.width - 2)
        widths = self._widths(columns, rows)
        if room >= 3:
            lines.append([("  ", ""), *self._table_header(columns, widths)])
        ui.page = max(1, room - len(lines))
        place = ui.place(rows)
        first = max(0, min(place - ui.page // 2, len(rows) - ui.page))
        for number, row in enumerate(rows[first : first + ui.page], start=first):
            lines.append(self._row(row, columns, widths, number == place))
        return lines

    def _widths(self, columns: Sequence[Column], rows: Sequence[Request]) -> list[int]:
        """The rid takes what the others leave, as far as it needs it."""
        rest = self.width - 2 - sum(column.width + 2 for column in columns if column.name != "RID")
        longest = max((cell_len(rid_of(row)) for row in rows), default=0)
        return [
            max(8, min(rest, max(longest, column.width))) if column.name == "RID" else column.width
            for column in columns
        ]

    def _table_header(self, columns: Sequence[Column], widths: Sequence[int]) -> Line:
        line: Line = []
        for column, width in zip(columns, widths, strict=True):
            mark = self.glyphs.down if column.descending != self.ui.reverse else self.glyphs.up
            name = f"{column.name}{mark}" if column.name == self.ui.sort else column.name
            text = name.rjust(width) if column.right else name.ljust(width)
            line += [(text, "sorted" if column.name == self.ui.sort else "dim"), ("  ", "")]
        return line[:-1]

    def _row(self, row: Request, columns: Sequence[Column], widths: Sequence[int], chosen: bool) -> Line:
        tagged = key_of(row) in self.ui.tagged
        mark = (self.glyphs.chosen if chosen else " ") + (self.glyphs.tagged if tagged else " ")
        cells = [
            pad(column.cell(row), width, column.right, self.glyphs.ellipsis)
            for column, width in zip(columns, widths, strict=True)
        ]
        style = "chosen" if chosen else "accent" if tagged else "dim" if row.state == "waiting" else ""
        return [(mark + "  ".join(cells), style)]

    def detail(self) -> list[Line]:
        """All about the chosen request."""
        row = next((row for row in self.s.requests if key_of(row) == self.ui.chosen), None)
        if row is None:
            return [[("this request has ended", "warn")]]
        facts = {
            "rid": rid_of(row),
            "user": printable(row.user) or "-",
            "state": row.state + (f", retracted {row.retractions} times" if row.retractions else ""),
            "age": format.duration(row.age_s),
            "prompt": f"{row.prompt_tokens} tokens, {row.cached_tokens} from the cache",
            "output": f"{row.output_tokens} of at most {row.max_new_tokens} tokens",
            "speed": f"{row.tokens_per_s:.1f} tokens/s",
            "first token": "-" if row.ttft_s is None else f"after {format.duration(row.ttft_s)}",
            "replica": str(row.dp_rank),
        }
        left = row.max_new_tokens - row.output_tokens
        if row.tokens_per_s > 0 and left > 0:
            facts["ends"] = f"in {format.duration(left / row.tokens_per_s)} at the latest"
        lines: list[Line] = [self._title("Request", "", self.width)]
        return lines + [[(f"{name:13}", "dim"), (value, "")] for name, value in facts.items()]

    def help(self) -> list[Line]:
        lines: list[Line] = [self._title("Keys", "", self.width)]
        keys = [(keys, what) for keys, what in HELP if not (self.ui.readonly and what.startswith(("abort", "flush")))]
        return lines + [[(f"{keys:15}", "key"), (what, "")] for keys, what in keys]

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _title(self, name: str, note: str, width: int) -> Line:
        line: Line = [(name, "title"), (f" {note} " if note else " ", "dim")]
        return [*line, (self.glyphs.rule * max(0, width - length(line)), "rule")]

    def _bar(self, width: int) -> Line:
        """Used, cached and free parts of the pool; a part that is there at all takes at least one cell."""
        cache = self.s.cache
        total = max(1, cache.total)
        used = min(width, max(round(width * cache.used / total), cache.used > 0))
        cached = min(width - used, max(round(width * cache.cached / total), cache.cached > 0))
        glyphs = self.glyphs
        return [
            (glyphs.used * used, "used"),
            (glyphs.cached * cached, "cached"),
            (glyphs.free * (width - used - cached), "free"),
        ]

    def _spark(self, values: Sequence[float], width: int) -> str:
        """The last `width` values as a curve from 0 to their highest."""
        shown = values[-width:] if width else ()
        highest = max(shown, default=0.0)
        top = len(self.glyphs.spark) - 1
        marks = (self.glyphs.spark[max(1, round(top * v / highest)) if v > 0 else 0] for v in shown)
        return "".join(marks).rjust(width)


def seconds(value: float | None) -> str:
    return "-" if value is None else format.duration(value)


def waited(bubble: float | None) -> str:
    return f"{'-':>6}" if bubble is None else f"{100 * bubble:>5.0f}%"


def length(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def shorten(text: str, width: int, ellipsis: str) -> str:
    """`text` in at most `width` cells."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + ellipsis if width > 0 else ""


def pad(text: str, width: int, right: bool, ellipsis: str) -> str:
    """`text` in exactly `width` cells."""
    text = shorten(text, width, ellipsis)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def clip(line: Line, width: int, ellipsis: str) -> Line:
    """The line, cut to `width` cells where it is longer."""
    if length(line) <= width:
        return line
    clipped: Line = []
    room = width
    for text, style in line:
        if cell_len(text) >= room:
            clipped.append((shorten(text, room, ellipsis) if cell_len(text) > room else text, style))
            break
        clipped.append((text, style))
        room -= cell_len(text)
    return clipped


def beside(left: list[Line], right: list[Line], width: int) -> list[Line]:
    """Two blocks side by side, two cells apart; the left one is `width` wide."""
    height = max(len(left), len(right))
    lines = []
    for number in range(height):
        first = clip(left[number], width, "") if number < len(left) else []
        second = right[number] if number < len(right) else []
        lines.append([*first, (" " * (width + 2 - length(first)), ""), *second])
    return lines
