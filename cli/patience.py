"""Tells the user that the instance is paused, while a command waits for a token in vain."""

import threading
from typing import TYPE_CHECKING

from llmserve.cli.console import Console
from llmserve.cli.loads import ask_load

if TYPE_CHECKING:
    from llmserve.runtime.instance import InstanceRecord

SILENCE_S = 1.0
"""After so long without an event the scheduler is asked for its state, and again at this interval."""


class Patience:
    """Watches a streamed answer in a thread, within `with`. Call `heard` at each event."""

    def __init__(self, console: Console, record: "InstanceRecord") -> None:
        self._console = console
        self._record = record
        self._events = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="patience")

    def heard(self) -> None:
        self._events += 1

    def _watch(self) -> None:
        told = seen = -1
        while not self._over.wait(SILENCE_S):
            if self._events == seen != told and self._paused():
                told = seen
                name = self._record.name
                self._console.note(f'"{name}" is paused; waiting until `llmserve resume -i {name}` lets it go on')
            seen = self._events

    def _paused(self) -> bool:
        return ask_load(self._record, SILENCE_S).state == "paused" and not self._over.is_set()

    def __enter__(self) -> "Patience":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
