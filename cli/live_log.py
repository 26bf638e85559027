"""The live log on the terminal of a foreground launch: the lines of all processes, shortened.

The file that runtime/logs.py writes stays complete; `llmserve logs` prints it.
"""

import threading
from datetime import datetime
from io import BufferedReader
from pathlib import Path

from rich.console import Console as RichConsole
from rich.text import Text

from llmserve.cli.console import printable
from llmserve.cli.logs import LINE

POLL_S = 0.2
QUIET = ("debug", "info")
STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}
LAST = "9999"
"""Sorts after every timestamp in a log."""
PROCESS_WIDTH = len("detokenizer")


class LiveLog:
    """Follows the log from `start` to `stop`. Shows all lines between `speak` and `hush`, otherwise only warnings and
    errors.
    """

    def __init__(self, screen: RichConsole, path: Path) -> None:
        self._from = self._to = LAST
        self._screen = screen
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="live-log")

    def start(self) -> None:
        self._thread.start()

    def speak(self) -> None:
        self._from = now()

    def hush(self) -> None:
        self._to = now()

    def stop(self) -> None:
        """Shows the remaining lines and ends. Safe to repeat."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _follow(self) -> None:
        try:
            with self._path.open("rb") as file:
                self._show_lines(file)
        except OSError:
            pass  # it was removed with its instance

    def _show_lines(self, file: BufferedReader) -> None:
        rest, over = b"", False
        while not over:
            over = self._over.wait(POLL_S)  # asked before the last look
            if file.tell() > self._path.stat().st_size:
                file.seek(0)  # it was truncated because it had grown too long
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in lines:
                self._show(line.decode(errors="replace"))

    def _show(self, line: str) -> None:
        parts = LINE.fullmatch(line)
        if parts is None:  # a line of a traceback
            self._screen.print(Text(f"  {printable(line)}", "dim"), soft_wrap=True)
        elif self._from <= parts["time"] < self._to or parts["level"] not in QUIET:
            self._screen.print(short(**parts.groupdict()), soft_wrap=True)


def now() -> str:
    """The current time in the format of the log."""
    return datetime.now().isoformat(timespec="milliseconds")


def short(time: str, level: str, process: str, message: str) -> Text:
    """`17:05:57  scheduler    weights updated version=2`."""
    clock = time.partition("T")[2].partition(".")[0]
    style = STYLES.get(level, "")
    said = f"{level}: {message}" if style else message
    return Text.assemble((clock, "dim"), f"  {process:{PROCESS_WIDTH}}  ", (printable(said), style))
