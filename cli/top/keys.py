"""Keys: parses the terminal's bytes into keys, each of which changes the Ui or asks for an action.

Drawing is in view.py; actions are carried out by source.py.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from llmserve.cli.top.snapshot import Request, Snapshot
from llmserve.cli.top.table import RequestKey, arrange, columns_of, key_of

INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ESCAPES = {
    "[A": "up",
    "[B": "down",
    "[C": "right",
    "[D": "left",
    "OA": "up",
    "OB": "down",
    "OC": "right",
    "OD": "left",
    "[H": "home",
    "[F": "end",
    "OH": "home",
    "OF": "end",
    "[1~": "home",
    "[4~": "end",
    "[5~": "pgup",
    "[6~": "pgdn",
    "[3~": "delete",
}
CONTROLS = {
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x02": "pgup",
    "\x15": "pgup",
    "\x06": "pgdn",
    "\x04": "pgdn",
    "\x0c": "redraw",
    "\x03": "quit",
}
SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.)|\x1b(?=\x1b|$)|\x1b(.)|(.)", re.DOTALL)
UNFINISHED = re.compile(r"\x1b(\[[0-9;?]*|O)?$")
ALIASES = {"k": "up", "j": "down", "h": "left", "l": "right", "g": "home", "G": "end", "d": "enter", "x": "delete"}

HELP = (
    ("Up Down j k", "choose a request"),
    ("g G PgUp PgDn", "first, last, a page up or down"),
    ("Left Right h l", "sort by the column to the left or right"),
    ("s r", "sort by the next column; reverse"),
    ("/", "show only what contains a text; Esc shows all"),
    ("Space u", "tag the request; untag all"),
    ("Enter d", "all about the request"),
    ("a x Del", "abort the tagged ones, or the chosen one"),
    ("f", "flush the prefix cache"),
    ("z", "give the requests the whole screen, and back"),
    ("p", "stop the display, and go on"),
    ("+ -", "look more, or less, often"),
    ("? q", "this help; quit (Ctrl-L draws anew)"),
)


class Abort(tuple[str, ...]):
    """End these rids."""


class Flush:
    """Empty the prefix cache."""


class Quit:
    """Leave."""


Action = Abort | Flush | Quit


class KeyReader:
    """Turns bytes from a terminal into names of keys. An escape sequence may come in several pieces."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[str]:
        """Takes bytes; returns the keys that are complete."""
        self._pending += data
        text = self._pending.decode(errors="ignore")
        rest = UNFINISHED.search(text)
        self._pending = rest.group().encode() if rest else b""
        return [self._name(match) for match in SEQUENCE.finditer(text[: rest.start()] if rest else text)]

    def flush(self) -> list[str]:
        """To be called when nothing has followed for a moment: a lone escape byte is the Esc key, then."""
        alone, self._pending = self._pending, b""
        return ["esc"] if alone else []

    @staticmethod
    def _name(match: re.Match[str]) -> str:
        sequence, alt, character = match.groups()
        if sequence is not None:
            return ESCAPES.get(sequence, "unknown")
        if character is None:
            return f"alt-{alt}" if alt else "esc"
        return CONTROLS.get(character, character if character.isprintable() else "unknown")


@dataclass
class Ui:
    """The user's choice of what to see. Changed by `press`, except for `page` and `message`."""

    readonly: bool = False
    interval: float = 1.0
    paused: bool = False
    zoomed: bool = False
    """Whether the table of requests has the whole screen."""
    sort: str = "AGE"
    reverse: bool = False
    wanted: str = ""
    tagged: dict[RequestKey, None] = field(default_factory=dict)
    chosen: RequestKey | None = None
    page: int = 10
    """Rows of the table on the screen, set by the view."""
    mode: Literal["list", "detail", "help", "filter", "confirm"] = "list"
    asked: Action | None = None
    """The action that is to be confirmed, in mode "confirm"."""
    message: str = ""

    def rows(self, snapshot: Snapshot) -> list[Request]:
        return arrange(snapshot.requests, self.sort, self.reverse, self.wanted)

    def place(self, rows: list[Request]) -> int:
        """The index of the chosen request in `rows`; 0 when it is gone."""
        keys = [key_of(row) for row in rows]
        return keys.index(self.chosen) if self.chosen in keys else 0

    def press(self, key: str, snapshot: Snapshot) -> Action | None:
        """Handles a key; returns the action that it asks for, if any."""
        self.message = ""
        if key == "quit":
            return Quit()
        if self.mode == "filter":
            self._edit(key)
            return None
        if self.mode == "confirm":
            return self._answer(key)
        if self.mode in ("help", "detail") and key in ("esc", "q", "?", "enter", "d", "left", "h"):
            self.mode = "list"
            return None
        return self._command(ALIASES.get(key, key), snapshot)

    def _command(self, key: str, snapshot: Snapshot) -> Action | None:
        rows = self.rows(snapshot)
        if key == "q":
            return Quit()
        if key in ("a", "delete", "f"):
            return self._act(key, rows)
        if key in ("up", "down", "pgup", "pgdn", "home", "end", " ", "u"):
            self._move(key, rows)
        elif key in ("left", "right", "s", "tab", "r"):
            self._sort(key, [column.name for column in columns_of(snapshot)])
        elif key in ("+", "=", "-"):
            place = min(range(len(INTERVALS)), key=lambda i: abs(INTERVALS[i] - self.interval))
            place = max(0, min(len(INTERVALS) - 1, place + (1 if key == "-" else -1)))
            self.interval = INTERVALS[place]
            self.message = f"every {self.interval:g} s"
        elif key == "z":
            self.zoomed = not self.zoomed
        elif key == "p":
            self.paused = not self.paused
        elif key == "/":
            self.mode = "filter"
        elif key == "?":
            self.mode = "help"
        elif key == "enter" and rows:
            self.chosen = key_of(rows[self.place(rows)])
            self.mode = "detail"
        elif key == "esc":
            self.wanted = ""
        return None

    def _move(self, key: str, rows: list[Request]) -> None:
        if key == "u":
            self.tagged.clear()
        if not rows:
            return
        place = self.place(rows)
        here = key_of(rows[place])
        if key == " ":
            if here in self.tagged:
                del self.tagged[here]
            else:
                self.tagged[here] = None
        steps = {
            "up": -1,
            "down": 1,
            " ": 1,
            "pgup": -self.page,
            "pgdn": self.page,
            "home": -len(rows),
            "end": len(rows),
        }
        place = max(0, min(len(rows) - 1, place + steps.get(key, 0)))
        self.chosen = key_of(rows[place])

    def _sort(self, key: str, names: list[str]) -> None:
        if key == "r":
            self.reverse = not self.reverse
            return
        place = names.index(self.sort) if self.sort in names else 0  # it had replicas, and is another instance now
        self.sort = names[(place + (-1 if key == "left" else 1)) % len(names)]
        self.reverse = False
        self.message = f"sorted by {self.sort}"  # the column may not fit on the screen

    def _act(self, key: str, rows: list[Request]) -> Action | None:
        if self.readonly:
            self.message = "read-only: nothing can be changed"
            return None
        if key == "f":
            self.message = "flushing"
            return Flush()
        present = {key_of(row) for row in rows}
        tagged = [tag for tag in self.tagged if tag in present]
        keys = tagged or ([key_of(rows[self.place(rows)])] if rows else [])
        if keys:
            self.asked = Abort(dict.fromkeys(rid for rid, _, _ in keys))
            self.mode = "confirm"
        return None

    def _answer(self, key: str) -> Action | None:
        self.mode, asked, self.asked = "list", self.asked, None
        if key in ("y", "Y"):
            self.tagged.clear()
            self.message = "aborting"
            return asked
        self.message = "nothing was aborted"
        return None

    def _edit(self, key: str) -> None:
        if key in ("enter", "esc"):
            self.mode = "list"
            self.wanted = "" if key == "esc" else self.wanted
        elif key == "backspace":
            self.wanted = self.wanted[:-1]
        elif len(key) == 1:
            self.wanted += key
