"""The lines of the log: one an event whatever is in it, and a file that does not grow for ever."""

import asyncio
import logging
from pathlib import Path

import pytest

from instances import PATIENCE_S
from llmserve.runtime import logs


def line_of(text: str, *arguments: object, level: int = logging.INFO) -> str:
    record = logging.LogRecord("llmserve.x", level, __file__, 1, text, arguments, None)
    return logs.LineFormatter("scheduler").format(record)


def test_a_line_has_time_level_role_and_text() -> None:
    moment, level, role, text = line_of("ended child=%s", "x", level=logging.WARNING).split(" ", 3)
    assert len(moment) == len("2026-11-30T13:20:00.123")
    assert (level, role, text) == ("warning", "scheduler:", "ended child=x")


def test_what_a_client_sent_neither_begins_a_line_nor_steers_the_terminal() -> None:
    line = line_of("refused rid=%s", "a\n2026 info main: forged\x1b[2J\x9b")
    assert line.endswith("refused rid=a\\x0a2026 info main: forged\\x1b[2J\\x9b")


async def test_a_log_that_has_grown_too_long_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(logs, "LOG_CHECK_S", 0.01)
    path = tmp_path / "log"
    with path.open("a") as writer:
        bounding = asyncio.create_task(logs.bound_log(path))
        writer.write("x" * 100)
        writer.flush()
        await asyncio.sleep(0.05)
        assert path.read_text() == "x" * 100
        writer.write("y")
        writer.flush()
        async with asyncio.timeout(PATIENCE_S):
            while path.stat().st_size:
                await asyncio.sleep(0.01)
        writer.write("after")
        writer.flush()
        assert path.read_text() == "after"
        bounding.cancel()


def test_a_kept_log_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for text in ("first", "second"):
        path = tmp_path / "llmserve.log"
        path.write_text(text)
        assert logs.keep_log(path, "prod") == logs.kept_log("prod")
        assert logs.kept_log("prod").read_text() == text
        assert not path.exists()
    (tmp_path / "llmserve.log").write_text("third")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert logs.keep_log(tmp_path / "llmserve.log", "prod") is None
