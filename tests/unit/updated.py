"""A scheduler under operators whose weights can be exchanged, as far as it can see."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from operated import Operated

from instances import PATIENCE_S
from llmserve.runtime.config import ConfigError
from llmserve.runtime.messages import (
    GetStatusReqInput,
    GetStatusReqOutput,
    Message,
    UpdateWeightReqInput,
)
from llmserve.runtime.models.hub import Checkpoint


class FakeSwap:
    """`serving` and `staged` are paths. A staging reads one of `parts` tensors each time it may."""

    def __init__(self) -> None:
        self.serving, self.staged, self.parts = "/models/fake", "", 3
        self.differing: list[str] = []
        self.fail_stage: Exception | None = None
        self.fail_commit: Exception | None = None
        self.may_read = threading.Event()
        self.may_read.set()
        self.quiet: Callable[[], bool] = lambda: True

    def differences(self, new: Checkpoint) -> list[str]:
        return self.differing

    def stage(self, new: Checkpoint, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> int:
        for part in range(self.parts):
            progress(part * 100, self.parts * 100)
            while not self.may_read.wait(0.001):
                if cancelled():
                    return 0
            if self.fail_stage is not None:
                raise self.fail_stage
        self.staged = new.path
        return self.parts * 100

    def commit(self) -> None:
        assert self.quiet(), "a commit while a step may run"
        assert self.staged
        if self.fail_commit is not None:
            raise self.fail_commit
        self.serving, self.staged = self.staged, ""

    def discard(self) -> None:
        self.staged = ""


class Updated(Operated):
    """With weights that can be exchanged; any path but one that begins with /missing is a checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self.swap = FakeSwap()
        self.swap.quiet = lambda: self.scheduler.quiet and self.scheduler.kv.used == 0
        self.worker.swap = self.swap  # type: ignore[attr-defined]
        monkeypatch.setattr("llmserve.runtime.models.hub.resolve", self.resolve)

    @staticmethod
    def resolve(path: str, load_format: str) -> Checkpoint:
        if path.startswith("/missing"):
            raise ConfigError(f"{path} does not exist")
        if load_format == "gguf" and not path.endswith(".gguf"):
            raise ConfigError(f"{path} is not a .gguf file")
        return cast(Checkpoint, SimpleNamespace(path=path))

    def update(self, path: str = "/models/new", **fields: Any) -> Message:
        """The answer to an update; turns go on while the thread reads."""
        client = self.call(UpdateWeightReqInput(model_path=path, **fields))
        deadline = time.monotonic() + PATIENCE_S
        while (answer := self.answer(client)) is None:
            assert time.monotonic() < deadline
            self.turn()
            time.sleep(0.001)
        return answer

    def check_old_serves(self) -> None:
        status = self.ask(GetStatusReqInput())
        assert isinstance(status, GetStatusReqOutput)
        assert (status.model, status.weight_version, status.state) == ("/models/fake", 1, "ready")
        assert (self.swap.serving, self.swap.staged) == ("/models/fake", "")
