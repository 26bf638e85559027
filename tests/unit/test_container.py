"""What a container leaves to its processes: its limits, not the machine's size, decide on threads and the KV pool."""

import os
from pathlib import Path

import pytest

from llmserve.runtime import machine, ranks
from llmserve.runtime.config import ServerArgs

MIB = 1 << 20


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory where the container's limits stand, none yet, on a machine of eight cores."""
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("150000 100000", 2), ("20000 100000", 1), ("9900000 100000", 8), ("max 100000", 8)],
)
def test_as_many_threads_as_the_quota_amounts_to(group: Path, quota: str, cores: int) -> None:
    assert ranks.threads_of(ServerArgs(model="m")) == 8
    (group / "cpu.max").write_text(f"{quota}\n")
    assert ranks.threads_of(ServerArgs(model="m")) == cores


def test_files_that_were_read_leave_room(group: Path) -> None:
    without_limit = machine.memory().available
    assert without_limit > 20 * MIB
    (group / "memory.current").write_text(f"{9 * MIB}\n")
    (group / "memory.stat").write_text(f"anon {MIB}\nfile {8 * MIB}\ninactive_file {7 * MIB}\nactive_file {MIB}\n")
    for limit, left in ((10 * MIB, 8 * MIB), (MIB, 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert machine.memory() == (left, limit)
    (group / "memory.max").write_text("max\n")
    assert machine.memory().available > 20 * MIB
