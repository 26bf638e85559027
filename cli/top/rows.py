"""Drawing requests: the table, and the details of one."""

from collections.abc import Sequence

from rich.cells import cell_len

from llmserve.cli import format
from llmserve.cli.console import printable
from llmserve.cli.top.frame import Frame
from llmserve.cli.top.snapshot import Request
from llmserve.cli.top.spans import Line, pad
from llmserve.cli.top.table import Column, columns_of, fitting, key_of, rid_of


def table(frame: Frame, room: int) -> list[Line]:
    """The table of requests in `room` lines, title and header included; scrolled to the chosen one."""
    ui, rows = frame.ui, frame.ui.rows(frame.s)
    if room < 1:
        return []
    count = f"{len(rows)} of {len(frame.s.requests)}" if ui.wanted else str(len(rows))
    note = f"{count}, filter {printable(ui.wanted)!r}" if ui.wanted else count
    note += f", {len(ui.tagged)} tagged" if ui.tagged else ""
    lines = [frame.title("Requests", note, frame.width)] if room >= 4 else []
    columns = fitting(columns_of(frame.s), frame.width - 2)
    widths = widths_of(frame, columns, rows)
    if room >= 3:
        lines.append([("  ", ""), *header(frame, columns, widths)])
    ui.page = max(1, room - len(lines))
    place = ui.place(rows)
    first = max(0, min(place - ui.page // 2, len(rows) - ui.page))
    for number, row in enumerate(rows[first : first + ui.page], start=first):
        lines.append(cells_of(frame, row, columns, widths, number == place))
    return lines


def widths_of(frame: Frame, columns: Sequence[Column], rows: Sequence[Request]) -> list[int]:
    """The widths of the columns. RID gets the room that the others leave, as far as it needs it."""
    rest = frame.width - 2 - sum(column.width + 2 for column in columns if column.name != "RID")
    longest = max((cell_len(rid_of(row)) for row in rows), default=0)
    return [
        max(8, min(rest, max(longest, column.width))) if column.name == "RID" else column.width for column in columns
    ]


def header(frame: Frame, columns: Sequence[Column], widths: Sequence[int]) -> Line:
    line: Line = []
    for column, width in zip(columns, widths, strict=True):
        mark = frame.glyphs.down if column.descending != frame.ui.reverse else frame.glyphs.up
        name = f"{column.name}{mark}" if column.name == frame.ui.sort else column.name
        text = name.rjust(width) if column.right else name.ljust(width)
        line += [(text, "sorted" if column.name == frame.ui.sort else "dim"), ("  ", "")]
    return line[:-1]


def cells_of(frame: Frame, row: Request, columns: Sequence[Column], widths: Sequence[int], chosen: bool) -> Line:
    tagged = key_of(row) in frame.ui.tagged
    mark = (frame.glyphs.chosen if chosen else " ") + (frame.glyphs.tagged if tagged else " ")
    cells = [
        pad(column.cell(row), width, column.right, frame.glyphs.ellipsis)
        for column, width in zip(columns, widths, strict=True)
    ]
    style = "chosen" if chosen else "accent" if tagged else "dim" if row.state == "waiting" else ""
    return [(mark + "  ".join(cells), style)]


def detail(frame: Frame) -> list[Line]:
    """The details of the chosen request."""
    row = next((row for row in frame.s.requests if key_of(row) == frame.ui.chosen), None)
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
    lines: list[Line] = [frame.title("Request", "", frame.width)]
    return lines + [[(f"{name:13}", "dim"), (value, "")] for name, value in facts.items()]
