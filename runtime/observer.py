"""LaunchObserver: how the start of an instance is reported to whoever shows it."""

from collections.abc import Mapping
from typing import Protocol

from llmserve.runtime.child import Fact


class LaunchObserver(Protocol):
    """Is told of each event of a start: the checklist on a terminal, the log, or the parent of a detached launch."""

    def progress(self, stage: str, done: float, total: float, unit: str) -> None:
        """A stage is under way: `done` of `total`, in `unit`."""

    def stage(self, name: str, detail: str) -> None:
        """A stage is done; `detail` says with what result."""

    def ready(self, address: str, model: str, facts: Mapping[str, Fact]) -> None:
        """The instance serves `model` at `address`; `facts` are those of child.Ready."""

    def draining(self, in_flight: int) -> None:
        """The instance was asked to end, and finishes `in_flight` requests first."""

    def close(self) -> None:
        """The start is over, successful or not: restore the terminal. May be called twice."""


class SilentObserver:
    """A LaunchObserver that ignores all events."""

    def progress(self, stage: str, done: float, total: float, unit: str) -> None: ...

    def stage(self, name: str, detail: str) -> None: ...

    def ready(self, address: str, model: str, facts: Mapping[str, Fact]) -> None: ...

    def draining(self, in_flight: int) -> None: ...

    def close(self) -> None: ...
