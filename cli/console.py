"""Console: the streams of a command, passed to it and never global, so that tests can pass their own.

Data goes to stdout; notes, errors, questions and progress go to stderr. It decides whether colour is allowed, and knows
nothing about instances or commands. Rich is imported only when it is used.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import rich.console
    import rich.progress

CONTROL_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
for _code in range(0x80, 0xA0):  # C1 controls: some terminals treat them like ESC [
    CONTROL_PICTURES[_code] = "\ufffd"


def printable(text: str) -> str:
    """`text` with control characters made visible, so that a rid or a prompt cannot control the terminal."""
    return text.translate(CONTROL_PICTURES)


class Console:
    """The three streams of a command and its environment variables."""

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO, environ: Mapping[str, str]) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.environ = environ
        self._plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"

    @staticmethod
    def system() -> "Console":
        """The console of this process."""
        return Console(sys.stdin, sys.stdout, sys.stderr, os.environ)

    @property
    def color(self) -> bool:
        """Whether stdout may carry escape sequences."""
        return self.stdout.isatty() and not self._plain

    @property
    def asks(self) -> bool:
        """Whether questions can be asked: stdin and stderr are terminals."""
        return self.stdin.isatty() and self.stderr.isatty()

    @property
    def out(self) -> "rich.console.Console":
        """Rich on stdout, for tables and styled data."""
        return self._rich(self.stdout)

    @property
    def err(self) -> "rich.console.Console":
        """Rich on stderr, for progress and notes."""
        return self._rich(self.stderr)

    def print(self, text: str = "", end: str = "\n") -> None:
        """Writes a line of data to stdout, unchanged, and flushes."""
        self.stdout.write(text + end)
        self.stdout.flush()

    def json(self, value: object) -> None:
        """Writes a JSON value to stdout: indented on a terminal, else on one line."""
        import json

        indent = 2 if self.stdout.isatty() else None
        encoding = (getattr(self.stdout, "encoding", None) or "utf-8").lower()
        self.print(json.dumps(value, indent=indent, ensure_ascii="utf" not in encoding, allow_nan=False))

    def note(self, text: str) -> None:
        """Writes a message for the user to stderr; where that cannot be written to, nowhere."""
        with contextlib.suppress(OSError):
            self.stderr.write(text + "\n")
            self.stderr.flush()

    def error(self, text: str) -> None:
        """Writes `llmserve: TEXT` to stderr, in red where colour is allowed."""
        mark = "\x1b[1;31mllmserve:\x1b[0m" if self.stderr.isatty() and not self._plain else "llmserve:"
        self.note(f"{mark} {text}")

    def ask(self, question: str) -> bool:
        """Asks a yes-or-no question on stderr; anything but yes is no. Requires `asks`."""
        self.stderr.write(f"{question} [y/N] ")
        self.stderr.flush()
        return self.stdin.readline().strip().lower() in ("y", "yes")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
        """Writes aligned columns to stdout, a header line first; the columns named in `right` align right.

        Control characters in cells are made visible. The text is the same on and off a terminal, except for a bold
        header.
        """
        from rich.cells import cell_len  # some characters are two columns wide, some none

        cells = [[printable(cell) for cell in row] for row in rows]
        widths = [max([len(name), *(cell_len(row[i]) for row in cells)]) for i, name in enumerate(columns)]

        def line(values: Sequence[str]) -> str:
            padded = []
            for name, value, width in zip(columns, values, widths, strict=True):
                space = " " * (width - cell_len(value))
                padded.append(space + value if name in right else value + space)
            return "  ".join(padded).rstrip()

        header = line(columns)
        self.print(f"\x1b[1m{header}\x1b[0m" if self.color else header)
        for row in cells:
            self.print(line(row))

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Shows on a terminal what a command waits for, while in `with`; gives a function that changes the text.

        Without a text, and off a terminal, it shows nothing.
        """
        if not text or not self.stderr.isatty():
            yield lambda text: None
            return
        with self.err.status(text) as status:
            yield status.update

    def progress(self) -> "rich.progress.Progress":
        """A Rich progress display on stderr: bars on a terminal, nothing off it."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
        )
        return Progress(*columns, console=self.err, transient=True, disable=not self.err.is_terminal)

    def _rich(self, stream: TextIO) -> "rich.console.Console":
        from rich.console import Console as RichConsole

        options: dict[str, Any] = {"file": stream, "highlight": False, "_environ": self.environ}
        if self._plain:
            options |= {"color_system": None, "force_terminal": False}
        return RichConsole(**options)
