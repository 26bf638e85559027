"""The screen: turns a Snapshot and a Ui into lines of styled text for a given size. Writes nothing itself.

It composes header, body and footer; panels.py and rows.py draw the parts of the body.
"""

from typing import NamedTuple

from rich.cells import cell_len

from llmserve.cli import format
from llmserve.cli.console import printable
from llmserve.cli.top import panels, rows
from llmserve.cli.top.frame import Frame
from llmserve.cli.top.glyphs import STATE_STYLES, UNICODE, Glyphs
from llmserve.cli.top.keys import HELP, Abort, Ui
from llmserve.cli.top.model import STALE_S
from llmserve.cli.top.snapshot import Snapshot
from llmserve.cli.top.spans import Line, beside, clip, elide, length, shorten

WIDE = 100
"""From this width on, panels are side by side."""
RIGHT = 56
"""The width that panels on the right need."""

NOTHING_YET = {
    "connecting": "waiting for its first numbers",
    "starting": "its numbers come when it is ready",
}


def render(snapshot: Snapshot, ui: Ui, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Line]:
    """Exactly `height` lines, none wider than `width` cells."""
    frame = Frame(snapshot, ui, width, glyphs)
    foot = [footer(frame)] if height >= 3 else []
    room = height - 1 - len(foot)
    if ui.mode == "help":
        body = help(frame)
    elif ui.mode == "detail":
        body = rows.detail(frame)
    else:
        body = overview(frame, room)
    body = body[:room] + [[] for _ in range(room - len(body))]
    return [clip(line, width, glyphs.ellipsis) for line in [header(frame), *body, *foot][:height]]


class Part(NamedTuple):
    """A part of the header. It is left out when there is no room for `least` cells of it."""

    text: str
    style: str
    importance: int
    least: int


def header(frame: Frame) -> Line:
    """Always has the state and the age of the data, and as much of the rest as there is room for; long names are
    shortened.
    """
    s = frame.s
    state: Line = [(f"{frame.glyphs.states[s.state]} {s.state}", STATE_STYLES[s.state])]
    parts = [
        Part(s.reason, "bad", 1, max(16, frame.width // 2)),
        Part(printable(s.instance), "bold", 0, 4),
        Part(printable(s.model), "", 3, 8),
    ]
    if s.replicas:  # known once a scheduler has sent metrics
        version, uptime = f"weights v{s.weight_version}", f"up {format.duration(s.uptime_s)}"
        parts += [Part(version, "dim", 2, len(version)), Part(uptime, "dim", 4, len(uptime))]
    if len(s.replicas) > 1:
        replicas = f"{len(s.replicas)} replicas"
        parts.append(Part(replicas, "dim", 2, len(replicas)))
    right = freshness(frame)
    room = frame.width - length(state) - length(right) - 2
    widths: dict[Part, int] = {}
    for part in sorted(parts, key=lambda part: part.importance):
        least = min(part.least, cell_len(part.text))
        if part.text and least + 2 <= room:
            widths[part] = least
            room -= least + 2
    line = state
    for part in sorted(widths, key=lambda part: part.importance):
        more = min(room, cell_len(part.text) - widths[part])
        widths[part] += more
        room -= more
    for part in parts:
        if part in widths:
            line += [("  ", ""), (elide(part.text, widths[part], frame.glyphs.ellipsis), part.style)]
    return [*line, (" " * max(1, frame.width - length(line) - length(right)), ""), *right]


def freshness(frame: Frame) -> Line:
    if frame.ui.paused:
        return [("display stopped", "warn")]
    age = frame.s.data_age_s
    if age is None:
        return [("no data yet" if frame.width >= 60 else "", "dim")]
    if age > STALE_S:
        return [(f"{frame.glyphs.alert} data {format.duration(age)} old", "bad")]
    return [(f"data {format.duration(age)} old" if frame.width >= 60 else format.duration(age), "dim")]


def footer(frame: Frame) -> Line:
    ui = frame.ui
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
        room = frame.width - cell_len(f"abort {what}: {ask}")
        return [(f"abort {what}: ", "bad"), (shorten(names, room, frame.glyphs.ellipsis), "bold"), (ask, "bad")]
    if ui.message:
        return [(printable(ui.message), "accent")]
    if ui.mode != "list":
        return [("q", "key"), (" back", "dim")]
    keys = [("q", "quit"), ("?", "help"), ("/", "filter"), ("s", "sort"), ("Space", "tag"), ("Enter", "detail")]
    if not ui.readonly:
        keys[2:2] = [("a", "abort"), ("f", "flush")]
    keys += [("z", "zoom"), ("p", "stop"), ("+-", f"every {ui.interval:g}s")]
    line: Line = []
    for key, what in keys:
        hint: Line = [(key, "key"), (f" {what}  ", "dim")]
        if length(line) + length(hint) - 2 <= frame.width:
            line += hint
    return line


def help(frame: Frame) -> list[Line]:
    lines: list[Line] = [frame.title("Keys", "", frame.width)]
    keys = [(keys, what) for keys, what in HELP if not (frame.ui.readonly and what.startswith(("abort", "flush")))]
    return lines + [[(f"{keys:15}", "key"), (what, "")] for keys, what in keys]


def overview(frame: Frame, room: int) -> list[Line]:
    """As many panels as there is room for, with the table of requests below."""
    if frame.s.data_age_s is None:
        return [[], [("  " + NOTHING_YET.get(frame.s.state, ""), "dim")]]
    top = panels.load_line(frame) if frame.ui.zoomed and room > 1 else blocks(frame, room)
    return [*top, *rows.table(frame, room - len(top))]


def blocks(frame: Frame, room: int) -> list[Line]:
    """The panels, in the richest arrangement that leaves the table some lines."""
    width = frame.width
    load = panels.load(frame, width)
    graphs = load + panels.cache(frame, width)
    latency, latency_line = panels.latency(frame, width), panels.latency_lines(frame)
    replicas, waits = panels.replicas(frame), panels.waits(frame)
    sparse = panels.load_line(frame) + panels.cache_line(frame)
    richest = (
        columns(frame) + replicas if width >= WIDE else graphs + latency + replicas + panels.processes(frame, width)
    )
    plans = (
        richest,
        graphs + latency + replicas + waits,
        graphs + latency_line + replicas + waits,
        load + panels.cache_line(frame) + latency_line + replicas + waits,
        sparse + latency_line + replicas + waits,
        sparse + latency_line,
    )
    for lines in plans:
        if len(lines) <= room - min(10, 2 + len(frame.s.requests)):
            return lines
    return sparse[:room]


def columns(frame: Frame) -> list[Line]:
    left = min(frame.width // 2 - 1, frame.width - RIGHT - 2)
    right = frame.width - left - 2
    upper = beside(panels.load(frame, left), panels.cache(frame, right), left)
    return upper + beside(panels.latency(frame, left), panels.processes(frame, right), left)
