"""Shows the progress of a start: as a checklist on a terminal, else as log lines. Both are LaunchObservers."""

import json
import logging
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from llmserve.cli.format import duration, plural, size
from llmserve.cli.live_log import LiveLog

if TYPE_CHECKING:
    from llmserve.runtime.child import Fact

log = logging.getLogger(__name__)

STAGES = ("port", "model", "weights", "kv pool", "warm-up")
BAR_WIDTH = 32
LOGGED_EVERY_S = 5.0


class Stage:
    """A line of the checklist."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.done = 0.0
        self.total = 0.0
        self.unit = ""
        self.result: str | None = None


class Checklist:
    """The stages of a start on a terminal, then the address and a line to paste."""

    def __init__(self, console: RichConsole, title: str, with_key: bool, log: LiveLog | None = None) -> None:
        """`log` is shown once the instance serves, in the foreground; None in the background."""
        self._log = log
        self._console = console
        self._title = title
        self._with_key = with_key
        self._stages: dict[str, Stage] = {}
        self._over = False
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=10)

    def progress(self, stage: str, done: float, total: float, unit: str) -> None:
        line = self._line(stage)
        line.done, line.total, line.unit = done, total, unit
        if total and done >= total:
            line.result = finished(line)

    def stage(self, name: str, detail: str) -> None:
        if name == "model" and self._log is not None:
            self._log.start()  # the instance's directory exists by now
        self._line(name).result = detail

    def ready(self, address: str, model: str, facts: "Mapping[str, Fact]") -> None:
        pool = self._stages.get("kv pool")
        if pool is not None and "kv_bytes" in facts:
            pool.result = f"{pool.total:,.0f} tokens, {size(float(facts['kv_bytes']))}"
        self._end_list()
        end = "llmserve stop ends it" if self._log is None else "Ctrl-C ends it"
        self._console.print(Text.assemble("\nReady at ", (address, "bold green"), f"  ({end})\n"))
        self._console.print(curl_line(address, model, self._with_key), soft_wrap=True, style="cyan", markup=False)
        self._console.print()
        if self._log is not None:
            self._log.speak()

    def draining(self, in_flight: int) -> None:
        if self._log is not None:
            self._log.hush()
        if in_flight:
            self._console.print(f"\nDraining: {plural(in_flight, 'request')} left. Ctrl-C again ends it at once.")
        else:
            self._console.print("\nEnding.")

    def close(self) -> None:
        self._end_list()
        if self._log is not None:
            self._log.stop()

    def _end_list(self) -> None:
        self._over = True
        self._live.stop()

    def _line(self, name: str) -> Stage:
        if not self._stages:
            self._live.start()
        return self._stages.setdefault(name, Stage())

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(min_width=max(map(len, STAGES)), no_wrap=True)
        table.add_column(overflow="fold")
        waits = False  # for a stage above it
        for name in dict.fromkeys((*STAGES, *self._stages)):
            line = self._stages.get(name)
            if line is not None and line.result is not None:
                table.add_row(Text("✓", "green"), name, Text(line.result))
            elif self._over:
                if line is not None:
                    table.add_row(Text("✗", "red"), name, running(line))
            elif waits:
                table.add_row(" ", Text(name, "dim"), "")
            else:
                table.add_row(self._spinner, name, "" if line is None else running(line))
                waits = True
        return Group(Text(self._title, "bold"), table)


class LogLines:
    """The stages of a start in the log."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def progress(self, stage: str, done: float, total: float, unit: str) -> None:
        now = time.monotonic()
        self._began.setdefault(stage, now)
        if done >= total > 0:
            seconds = now - self._began[stage]
            log.info('done stage="%s" %s=%d seconds=%.2f', stage, unit or "steps", total, seconds)
        elif now - self._logged.setdefault(stage, now) >= LOGGED_EVERY_S:
            self._logged[stage] = now
            log.info('running stage="%s" done=%d total=%d unit=%s', stage, done, total, unit)

    def stage(self, name: str, detail: str) -> None:
        log.info('done stage="%s" result="%s"', name, detail)

    def ready(self, address: str, model: str, facts: "Mapping[str, Fact]") -> None:
        known = " ".join(f"{name}={value}" for name, value in facts.items())
        log.info("ready address=%s model=%s %s", address, model, known)

    def draining(self, in_flight: int) -> None:
        """The stack logs it."""

    def close(self) -> None:
        """Nothing to do."""


def finished(line: Stage) -> str:
    """`257 MiB in 0.8s`, `131,072 tokens`."""
    seconds = duration(time.monotonic() - line.began)
    if line.unit == "bytes":
        return f"{size(line.total)} in {seconds}"
    return f"{line.total:,.0f} {line.unit}" if line.unit else f"in {seconds}"


def running(line: Stage) -> RenderableType:
    """A progress bar, for a stage that counts bytes."""
    if line.unit != "bytes" or not line.total:
        return ""
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=line.total, completed=line.done, width=BAR_WIDTH), f"{size(line.done)} of {size(line.total)}"
    )
    return row


def curl_line(address: str, model: str, with_key: bool) -> str:
    """A curl command to paste into a shell. The API key itself is never shown."""
    body = f'{{"model": {json.dumps(model)}, "max_tokens": 16,\n       "prompt": "The capital of France is"}}'
    lines = (
        f"curl {address}/v1/completions",
        *(['  -H "Authorization: Bearer $LLMSERVE_API_KEY"'] if with_key else []),
        "  -H 'Content-Type: application/json'",
        f"  -d {shlex.quote(body)}",
    )
    return " \\\n".join(lines)
