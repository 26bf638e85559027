"""The terminal while `top` runs: reads keys, draws lines, and restores everything at the end.

It owns the terminal's mode, its alternate screen and the signals that concern them. view.py makes the lines.
"""

import contextlib
import errno
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from llmserve.cli.top.keys import KeyReader
from llmserve.cli.top.spans import Line

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # alternate screen, no cursor, no wrapping
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
ESCAPE_WAIT_S = 0.05
"""An escape sequence that is incomplete after so long is the Esc key."""

COLORS = {
    "bold": "1",
    "dim": "2",
    "title": "1;36",
    "rule": "2;36",
    "good": "1;32",
    "warn": "33",
    "bad": "1;31",
    "accent": "35",
    "key": "1;36",
    "sorted": "1",
    "chosen": "7",
    "used": "32",
    "cached": "34",
    "free": "2",
    "graph": "32",
}


class Terminated(Exception):
    """A signal asks the program to end. `exit_code` is 128 plus its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 128 + number


@contextlib.contextmanager
def eof_if_gone() -> Iterator[None]:
    """Raises EOFError where the terminal has hung up, as one does that ends without a SIGHUP (a container's, say)."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise EOFError from None


class Screen:
    """The terminal, within `with`. Only one may be in use. What uses it raises EOFError when it is gone."""

    def __init__(self, color: bool) -> None:
        self._color = color
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._reader = KeyReader()
        self._wake_in, self._wake_out = os.pipe()
        for end in (self._wake_in, self._wake_out):
            os.set_blocking(end, False)
        self._shown: list[str] = []
        self.stale = True
        """Whether the screen has to be drawn again."""
        self._erased = True
        """Whether the whole screen has to be written, whatever was on it."""
        self._handlers: dict[int, object] = {}
        self._mode = termios.tcgetattr(self._in)

    def __enter__(self) -> "Screen":
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGTERM: self._end,
            signal.SIGHUP: self._end,
            signal.SIGQUIT: self._end,
            signal.SIGINT: self._end,
            signal.SIGTSTP: self._suspend,
            signal.SIGCONT: self._continued,
            signal.SIGWINCH: self._resized,
        }
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError, EOFError):  # the terminal may be gone
            self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for end in (self._wake_in, self._wake_out):
            os.close(end)

    def wake(self) -> None:
        """Makes `keys` return soon. For other threads."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_out, b"x")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines; a terminal that does not know, as a serial console, counts as the usual one."""
        with eof_if_gone():
            columns, lines = os.get_terminal_size(self._out)
        return columns or 80, lines or 24

    def keys(self, timeout_s: float) -> list[str]:
        """The keys pressed; waits for one, for `wake` or for `timeout_s`."""
        ready, _, _ = select.select([self._in, self._wake_in], [], [], timeout_s)
        if self._wake_in in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wake_in, 4096):
                    pass
        if self._in not in ready:
            return []
        with eof_if_gone():
            data = os.read(self._in, 4096)
        if not data:
            raise EOFError
        keys = self._reader.feed(data)
        if not select.select([self._in], [], [], ESCAPE_WAIT_S)[0]:
            keys += self._reader.flush()
        return keys

    def draw(self, lines: list[Line]) -> None:
        """Draws the lines, writing only those that have changed."""
        rendered = [self._render(line) for line in lines]
        erased, self._erased, self.stale = self._erased, False, False
        if erased or len(rendered) != len(self._shown):
            self._shown = ["\0"] * len(rendered)
            self._write("\x1b[2J")
        changed = [
            f"\x1b[{number}H\x1b[K{new}"  # erase first: after writing the last column, \x1b[K would erase it
            for number, (new, old) in enumerate(zip(rendered, self._shown, strict=True), start=1)
            if new != old
        ]
        self._shown = rendered
        self._write("".join(changed))

    def erase(self) -> None:
        """Makes the next `draw` write the whole screen."""
        self._erased = self.stale = True

    def _render(self, line: Line) -> str:
        if not self._color:
            return "".join(text for text, _ in line)
        return "".join(f"\x1b[{COLORS[style]}m{text}\x1b[0m" if style and text else text for text, style in line)

    def _take(self) -> None:
        tty.setcbreak(self._in)
        self._write(ENTER)
        self.erase()

    def _give_back(self) -> None:
        self._write(LEAVE)
        termios.tcsetattr(self._in, termios.TCSADRAIN, self._mode)

    def _write(self, text: str) -> None:
        data = text.encode()
        with eof_if_gone():
            while data:
                data = data[os.write(self._out, data) :]

    # ---- signals ---------------------------------------------------------------------------------------------------

    def _end(self, number: int, _: FrameType | None) -> None:
        raise Terminated(number)

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Restores the terminal and stops, like a program without a handler; continues from here at SIGCONT."""
        self._give_back()
        ours = {which: signal.signal(which, signal.SIG_DFL) for which in (number, signal.SIGCONT)}
        os.kill(os.getpid(), number)
        for which, handler in ours.items():
            signal.signal(which, handler)
        self._mode = termios.tcgetattr(self._in)
        self._continued()

    def _continued(self, *_: object) -> None:
        """Takes the terminal again. SIGSTOP, which cannot be caught, has stopped the program without restoring it."""
        self._take()
        self.wake()

    def _resized(self, *_: object) -> None:
        self.erase()
        self.wake()
