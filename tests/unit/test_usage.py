"""How much of the machine a process uses."""

from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.runtime.usage import Meter


class FakeProcess:
    pid = 1

    def __init__(self) -> None:
        self.cpu_s = 100.0

    def cpu_times(self) -> Any:
        return SimpleNamespace(user=self.cpu_s - 1, system=1.0)

    def memory_info(self) -> Any:
        return SimpleNamespace(rss=1 << 20)


def test_cpu_is_the_share_since_the_last_look_and_a_second_asker_changes_nothing() -> None:
    process, clock = FakeProcess(), [0.0]
    meter = Meter(process, now=lambda: clock[0])  # type: ignore[arg-type]
    assert meter.read() == (1 << 20, 0.0)
    clock[0], process.cpu_s = 1.0, 101.5
    assert meter.read().cpu_percent == pytest.approx(150.0)
    clock[0], process.cpu_s = 1.01, 101.55  # a scrape just after
    assert meter.read().cpu_percent == pytest.approx(150.0)
    clock[0], process.cpu_s = 2.0, 102.0  # what the scrape saw is part of this second
    assert meter.read().cpu_percent == pytest.approx(50.0)
