"""The command `llmserve top`: its options, and the loops that connect source, model, view and keys."""

import signal
import threading
import time
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from llmserve.cli import format
from llmserve.cli.common import CommandError, ExitCode, InstanceOption, JsonOption, console_of, find_server
from llmserve.cli.console import Console, printable

if TYPE_CHECKING:
    from llmserve.cli.top.glyphs import Glyphs
    from llmserve.cli.top.keys import Ui
    from llmserve.cli.top.snapshot import Snapshot
    from llmserve.cli.top.source import Source

ONCE_WIDTH = 100
FIRST_S = 0.5
"""How long to wait for the first numbers before drawing a screen without them."""
NOTICE_S = 5.0
"""How long a message is shown."""


def top(
    ctx: typer.Context,
    instance: InstanceOption = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="The time between two refreshes.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    json: JsonOption = False,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", dir_okay=False, help="Record the samples to a file.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", exists=True, dir_okay=False, help="Replay a file made by --record."),
    ] = None,
    speed: Annotated[float, typer.Option("--speed", metavar="N", min=0.001, help="Replay N times as fast.")] = 1.0,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long --once waits for data."),
    ] = 3.0,
    readonly: Annotated[bool, typer.Option("--readonly", help="Disable the keys that abort and flush.")] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")] = False,
) -> None:
    """Watch an instance live: load, memory, latencies, processes and requests.

    Press ? for the keys. Without a terminal it prints a line per interval; with --json, a JSON object per line.
    """
    from llmserve.cli.top.glyphs import ASCII, UNICODE
    from llmserve.cli.top.keys import Ui
    from llmserve.cli.top.live import Live
    from llmserve.cli.top.samples import Recorder
    from llmserve.cli.top.source import Replay

    console = console_of(ctx)
    if record and replay:
        raise CommandError("give --record or --replay, not both", ExitCode.USAGE)
    source: Source
    if replay:
        source = Replay(replay, 0.0 if once else speed)
    else:
        found = find_server(instance)
        source = Live(found, Recorder(record) if record else None)
    encoding = (getattr(console.stdout, "encoding", None) or "utf-8").lower()
    glyphs = ASCII if ascii_only or "utf" not in encoding else UNICODE
    interactive = console.stdout.isatty() and console.stdin.isatty() and console.environ.get("TERM") != "dumb"
    if once:
        show_once(console, source, json, glyphs, timeout)
    elif json or not interactive:
        show_lines(console, source, json, interval)
    else:
        show_screen(console, source, Ui(readonly=readonly, interval=interval), glyphs)


class Feed:
    """A model and the source that feeds it, within `with`."""

    def __init__(self, source: "Source") -> None:
        from llmserve.cli.top.model import Model

        self.model = Model()
        self.source = source
        self.ended = False
        self._came = threading.Event()

    def __enter__(self) -> "Feed":
        self.source.wake = self._came.set
        self.source.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def wait(self, timeout_s: float) -> None:
        """Waits until something has come, and takes it. For use without a screen, which waits itself."""
        self._came.wait(max(0.0, timeout_s))
        self._came.clear()
        self.pump()

    def pump(self) -> list[str]:
        """Adds what has come to the model; returns notices for the user. Raises the error that ended the source."""
        from llmserve.cli.top.source import Ended, Notice

        notices = []
        for item in self.source.take():
            if isinstance(item, Notice):
                notices.append(item.text)
            elif not isinstance(item, Ended):
                self.model.add(item)
            elif item.error is not None:
                raise item.error
            else:
                self.ended = True
                notices.append("the recording is over")
        return notices

    def snapshot(self) -> "Snapshot":
        return self.model.snapshot(self.source.now())


def show_once(console: Console, source: "Source", json: bool, glyphs: "Glyphs", patience_s: float) -> None:
    """Prints one snapshot, as JSON or as a screen as wide as the terminal and as high as necessary.

    Waits up to `patience_s` for two samples, which rates need. Raises CommandError (75) when none comes.
    """
    from llmserve.cli.top.keys import Ui
    from llmserve.cli.top.spans import text_of
    from llmserve.cli.top.view import render

    with Feed(source) as feed:
        deadline = time.monotonic() + patience_s
        while not feed.ended and (source.ends or (not feed.model.has_rates and time.monotonic() < deadline)):
            feed.wait(0.1)
        snapshot = feed.snapshot()
        if feed.model.expects_data and not source.ends:
            why = f" ({snapshot.reason})" if snapshot.reason else ""
            message = f"the scheduler has said nothing for {patience_s:g} s; see --timeout and `llmserve logs`{why}"
            raise CommandError(message, ExitCode.BUSY)
    if json:
        console.json(as_json(snapshot))
        return
    width = console.out.width if console.stdout.isatty() else ONCE_WIDTH
    lines = render(snapshot, Ui(readonly=True), width, 30 + len(snapshot.requests), glyphs)
    console.print(text_of(lines[:-1]).rstrip())


def show_lines(console: Console, source: "Source", json: bool, interval: float) -> None:
    """Prints a line per interval, until the source ends or stdout is closed."""
    with Feed(source) as feed:
        due = time.monotonic() + interval
        while not feed.ended:
            feed.wait(due - time.monotonic())
            if feed.ended or time.monotonic() >= due:
                due = time.monotonic() + interval
                snapshot = feed.snapshot()
                if snapshot.state == "connecting":
                    continue
                console.print(dumps(as_json(snapshot)) if json else line_of(snapshot))


def show_screen(console: Console, source: "Source", ui: "Ui", glyphs: "Glyphs") -> None:
    """Runs the live screen, until the user quits."""
    from llmserve.cli.top.keys import Quit
    from llmserve.cli.top.screen import Screen, Terminated
    from llmserve.cli.top.view import render

    try:
        with Feed(source) as feed, Screen(console.color) as screen:
            source.wake = screen.wake
            snapshot = feed.snapshot()
            due, told = time.monotonic() + FIRST_S, 0.0
            screen.stale = False  # draw nothing for a moment, rather than a screen without numbers
            while True:
                for notice in feed.pump():
                    ui.message, told, screen.stale = notice, time.monotonic(), True
                if ui.message and time.monotonic() > told + NOTICE_S:
                    ui.message, screen.stale = "", True
                first = snapshot.data_age_s is None and feed.model.has_numbers
                if (first or time.monotonic() >= due) and not ui.paused:
                    snapshot, due, screen.stale = feed.snapshot(), time.monotonic() + ui.interval, True
                if screen.stale:  # not for every sample that comes
                    screen.draw(render(snapshot, ui, *screen.size, glyphs))
                for key in screen.keys(max(0.0, due - time.monotonic()) if not ui.paused else ui.interval):
                    told, screen.stale = time.monotonic(), True
                    if key == "redraw":
                        screen.erase()
                    action = ui.press(key, snapshot)
                    if isinstance(action, Quit):
                        return
                    if action is not None:
                        source.act(action)
    except Terminated as ended:
        if ended.number != signal.SIGINT:  # Ctrl-C is a normal way to quit
            raise typer.Exit(ended.exit_code) from None
    except EOFError:
        return


def as_json(snapshot: "Snapshot") -> dict[str, Any]:
    """The snapshot without its history, which only the graphs need."""
    fields: dict[str, Any] = msgspec.to_builtins(snapshot)
    del fields["history"]
    return fields


def line_of(snapshot: "Snapshot") -> str:
    """The most important numbers as one line of key=value pairs."""
    load, cache, latency = snapshot.load, snapshot.cache, snapshot.latency
    pairs = {
        "instance": printable(snapshot.instance),
        "state": snapshot.state,
        "running": load.running,
        "waiting": load.waiting,
        "decode_tokens_per_s": round(load.decode_tokens_per_s, 1),
        "prefill_tokens_per_s": round(load.prefill_tokens_per_s, 1),
        "requests_per_s": round(load.requests_per_s, 2),
        "kv_used": format.percent(cache.used, cache.total),
        "hit_rate": format.share(cache.hit_rate),
        "ttft_p50": format.duration(latency.ttft.p50),
        "itl_p50": format.duration(latency.itl.p50),
    }
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    return " ".join([clock, *(f"{name}={value}" for name, value in pairs.items())])
