"""Frame: what a drawing is made from, and elements that several panels share."""

from collections.abc import Sequence
from typing import NamedTuple

from llmserve.cli.top.glyphs import Glyphs
from llmserve.cli.top.keys import Ui
from llmserve.cli.top.snapshot import Snapshot
from llmserve.cli.top.spans import Line, length


class Frame(NamedTuple):
    s: Snapshot
    ui: Ui
    width: int
    glyphs: Glyphs

    def title(self, name: str, note: str, width: int, warning: str = "") -> Line:
        line: Line = [(name, "title"), (f" {note} " if note else " ", "dim")]
        if warning:
            line.append((f"{warning} ", "warn"))
        return [*line, (self.glyphs.rule * max(0, width - length(line)), "rule")]

    def bar(self, width: int) -> Line:
        """A bar of the used, cached and free parts of the pool; a part above zero takes at least one cell."""
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

    def spark(self, values: Sequence[float], width: int) -> str:
        """The last `width` values as a bar graph, scaled from 0 to the highest."""
        shown = values[-width:] if width else ()
        highest = max(shown, default=0.0)
        top = len(self.glyphs.spark) - 1
        marks = (self.glyphs.spark[max(1, round(top * v / highest)) if v > 0 else 0] for v in shown)
        return "".join(marks).rjust(width)
