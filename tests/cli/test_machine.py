"""The commands that look at processes and files instead of asking a scheduler: logs, restart, doctor."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from fake_instance import FakeInstance, fresh_registry, run

from instances import PATIENCE_S, assert_gone, fair_time, is_alive
from llmserve.cli import doctor, restart, stop
from llmserve.cli.common import CommandError
from llmserve.runtime import machine
from llmserve.runtime.config import ConfigError
from llmserve.runtime.instance import InstanceRecord
from llmserve.runtime.logs import LineFormatter
from llmserve.runtime.messages import GetStatusReqInput, GetStatusReqOutput, ProcessInfo
from llmserve.runtime.models import hub
from llmserve.runtime.proc import process_start_time


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    fresh_registry(monkeypatch, tmp_path)
    return tmp_path / "llmserve"


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like an instance that was launched from `tmp_path`."""
    code = "import time; print(flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "launch", "--port", "0"],
        cwd=tmp_path,
        env=os.environ | {"LLMSERVE_API_KEY": "k=1"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def leave_dead(registry: Path, name: str, **fields: Any) -> Path:
    """The directory of an instance that died."""
    directory = registry / name
    directory.mkdir(parents=True, mode=0o700)
    registry.chmod(0o700)
    record = InstanceRecord(name=name, pid=2**22 + 1, start_time=1, **fields)
    (directory / "instance.json").write_bytes(msgspec.json.encode(record))
    return directory


# ---- logs ----------------------------------------------------------------------------------------------------------


def test_logs_prints_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\x1b[2J\nthree\n")
    with FakeInstance() as fake:
        fake.instance.update(log_path=str(log))
        assert run("logs").out == "one\ntwo\x1b[2J\nthree\n"
        assert run("logs", "-n", "2", terminal=True).out == "two␛[2J\nthree\n"


def test_logs_follows_until_the_instance_ends(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    log = tmp_path / "log"
    log.write_text("start\n")

    def go_on() -> None:
        with log.open("a") as file:
            file.write("more\n")
            file.flush()
            time.sleep(0.3)
            file.write("the end\n")
        sleeper.kill()
        sleeper.wait()

    with FakeInstance() as fake:
        record = msgspec.structs.replace(
            fake.instance.record,
            pid=sleeper.pid,
            start_time=process_start_time(sleeper.pid),
            log_path=str(log),
        )
        (fake.instance.directory / "instance.json").write_bytes(msgspec.json.encode(record))
        writer = threading.Thread(target=go_on)
        writer.start()
        result = run("logs", "-f")
        assert (result.out, result.err) == ("start\nmore\nthe end\n", '"fake" has ended\n')
        writer.join()


def test_logs_that_follows_gives_up_after_its_timeout(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("start\n")
    with FakeInstance() as fake:
        fake.instance.update(log_path=str(log))
        result = run("logs", "-f", "--timeout", "0.3")
    assert (result.code, result.out) == (75, "start\n")
    assert "no line came in 0.3 s" in result.err


def test_logs_goes_on_in_a_log_that_was_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("a long line of the log before\n")
    naps = iter((lambda: log.write_text("anew\n"), log.unlink))
    monkeypatch.setattr("llmserve.cli.logs.time.sleep", lambda _: next(naps)())
    with FakeInstance() as fake:
        fake.instance.update(log_path=str(log))
        assert run("logs", "-f").out == "a long line of the log before\nanew\n"


def test_logs_as_json_is_an_object_a_line(tmp_path: Path) -> None:
    """Every line as the log's own formatter writes it, tracebacks and an unfinished line included."""
    log = tmp_path / "log"
    try:
        raise ValueError("why")
    except ValueError:
        facts = {"msg": "it failed rid=%r", "args": ("a: b",), "levelname": "ERROR", "exc_info": sys.exc_info()}
        event = logging.makeLogRecord(facts)
    log.write_text(LineFormatter("scheduler").format(event))
    with FakeInstance() as fake:
        fake.instance.update(log_path=str(log))
        for terminal in (False, True):
            first, *rest = map(json.loads, run("logs", "--json", terminal=terminal).out.splitlines())
            assert (first["level"], first["process"], first["message"]) == (
                "error",
                "scheduler",
                "it failed rid='a: b'",
            )
            datetime.fromisoformat(first["time"])
            assert rest[-1] == {"time": None, "level": None, "process": None, "message": "ValueError: why"}


def test_logs_of_a_dead_instance_can_be_read(registry: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Killed\n")
    leave_dead(registry, "gone", log_path=str(log))
    assert run("logs", "-i", "gone").out == "Killed\n"


def test_an_instance_without_a_log_says_where_it_writes() -> None:
    with FakeInstance():
        result = run("logs")
    assert result.code == 3
    assert f"standard error of pid {os.getpid()}" in result.err


# ---- restart -------------------------------------------------------------------------------------------------------


def test_restart_reads_how_the_process_was_launched(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    record = InstanceRecord(name="x", pid=sleeper.pid, port=31777)
    command, environ, directory = restart.how_launched(record)
    assert command[0] == sys.executable
    assert command[3:] == ["launch", "--port", "0", "--detach", "--port", "31777"]
    assert environ["LLMSERVE_API_KEY"] == "k=1"
    assert directory == str(tmp_path)


def test_restart_ends_it_as_asked_and_launches_with_all_that_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    show = [sys.executable, "-c", "import os; print(os.getcwd(), os.environ['KEPT'])"]
    monkeypatch.setattr(restart, "how_launched", lambda record: (show, os.environ | {"KEPT": "a key"}, str(tmp_path)))
    monkeypatch.setattr(restart, "end", lambda console, record, now, timeout: asked.append((record.name, now, timeout)))
    with FakeInstance():
        assert run("restart", "--now", "--timeout", "7").out == f"{tmp_path} a key\n"
        assert run("restart").code == 0
    assert asked == [("fake", True, 7.0), ("fake", False, None)]


@pytest.mark.parametrize(
    ("serving", "told"),
    [
        (("some/model", 1), ""),
        (("some/model", 3), ""),  # back to those of the launch
        (
            ("/models/the tuned", 2),
            "the new one serves some/model (version 1), not /models/the tuned (version 2); "
            "`llmserve update-weights '/models/the tuned'` loads that again\n",
        ),
    ],
)
def test_restart_says_which_weights_end_with_the_old_one(
    serving: tuple[str, int], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restart, "how_launched", lambda record: (["true"], dict(os.environ), str(tmp_path)))
    monkeypatch.setattr(restart, "end", lambda console, record, now, timeout: None)
    status = msgspec.structs.replace(status_of(0), model=serving[0], weight_version=serving[1])
    with FakeInstance() as fake:
        fake.handlers[GetStatusReqInput] = lambda _: status
        assert run("restart").err == f'restarting "fake"\n{told}'


def test_restart_refuses_what_launch_did_not_start() -> None:
    with pytest.raises(CommandError, match="not started by"):
        restart.how_launched(InstanceRecord(name="x", pid=os.getpid(), port=1))


def test_stop_now_tells_it_to_end_at_once_before_it_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told so, it still tells its clients."""
    sent: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: sent.append(number))
    monkeypatch.setattr(stop, "ENDS_NOW_WITHIN_S", 0.01)
    with FakeInstance():
        assert run("stop", "--now").code == 0
        assert run("stop", "--timeout", "0.01").code == 75
    assert sent == [signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM]


def test_a_second_stop_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal would end what the first one lets finish."""
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: pytest.fail("a signal"))
    with FakeInstance() as fake:
        fake.instance.update(state="draining", ending=True)
        assert run("stop", "--timeout", "0.01").code == 75


def test_stop_does_not_wait_for_a_main_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its --drain-timeout would be kept by that very process; one that drains is waited for as long as asked."""
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda process, number: None)
    monkeypatch.setattr(stop, "TAKES_NOTICE_WITHIN_S", 0.05)
    monkeypatch.setattr(stop, "LOOK_EVERY_S", 0.01)
    with FakeInstance() as fake:
        result = run("stop")
        assert result.code == 75
        assert "has not begun to drain" in result.err
        assert "stop --now" in result.err
        fake.instance.update(state="draining")
        assert "is still draining" in run("stop", "--timeout", "0.2").err


# ---- doctor --------------------------------------------------------------------------------------------------------


def examine(*arguments: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(run("doctor", "--json", *arguments).out):
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_doctor_finds_and_sweeps_what_the_dead_left(registry: Path) -> None:
    directory = leave_dead(registry, "gone")
    with FakeInstance():
        (finding,) = examine()["stale"]
        assert finding["status"] == "warning"
        assert '"gone"' in finding["detail"]
        assert directory.exists()
        (finding,) = examine("--fix")["stale"]
        assert finding["status"] == "fixed"
        assert not directory.exists()
        assert run("ping").code == 0  # the living one was left alone


def start_child(orphaned: bool) -> int:
    """The pid of a process that looks like an instance's child; `orphaned`: the one that started it is gone."""
    sleep = "import time; time.sleep(60)"
    child = f"subprocess.Popen([sys.executable, '-c', {sleep!r}, {doctor.CHILD_MODULE!r}], stdout=subprocess.DEVNULL)"
    code = f"import os, subprocess, sys, time; print({child}.pid, flush=True); time.sleep({0 if orphaned else 60})"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if orphaned:
        parent.wait()
        parent.stdout.close()
    else:
        STARTED.append(parent)
    return pid


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture
def children() -> Iterator[Any]:
    """start_child, whose processes are gone after the test."""
    pids: list[int] = []

    def start(orphaned: bool) -> int:
        pids.append(start_child(orphaned))
        while pids[-1] not in {process.pid for process in doctor.children()}:  # until it has become itself
            time.sleep(0.01)
        return pids[-1]

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while STARTED:
        parent = STARTED.pop()
        parent.kill()
        parent.communicate()


def test_doctor_finds_and_ends_orphans_only(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan, child = children(True), children(False)
    mine = [psutil.Process(orphan), psutil.Process(child)]
    monkeypatch.setattr(doctor, "children", lambda: [process for process in mine if process.is_running()])
    reaper = psutil.Process(orphan).parent()
    assert reaper is not None
    monkeypatch.setattr(doctor, "REAPERS", (reaper.name(),))

    result = run("doctor", "--json")
    assert result.code == 1
    assert f"pid {orphan}," in result.out
    assert f"pid {child}," not in result.out
    (finding,) = examine("--fix")["orphans"]
    assert finding["status"] == "fixed"
    assert f"pid {orphan}," in finding["detail"]
    assert_gone(mine[:1], PATIENCE_S)  # in a container nobody may reap it
    assert is_alive(mine[1])


def test_a_long_finding_goes_on_below_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("doctor", terminal=True, NO_COLOR="1").out.splitlines()
    assert max(map(len, lines)) <= 60
    first = next(number for number, line in enumerate(lines) if "libraries" in line)
    assert lines[first + 1].index(lines[first + 1].split()[0]) == lines[first].index("torch")
    assert len(run("doctor").out.splitlines()[0]) > 60  # a line each for programs


def test_doctor_does_not_wait_for_processes_that_nobody_reaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As orphans in a container whose first process does not wait for them."""
    dead = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    monkeypatch.setattr(doctor, "children", lambda: [psutil.Process(process.pid) for process in dead])
    monkeypatch.setattr(doctor, "is_orphan", lambda process: True)
    monkeypatch.setattr(doctor, "GRACE_S", 60.0)
    try:
        began = fair_time()
        findings = examine("--fix")["orphans"]
        assert fair_time() - began < 30
        assert [finding["status"] for finding in findings] == ["fixed", "fixed"]
    finally:
        for process in dead:
            process.kill()
            process.wait()


def status_of(pool: int, threads: int | None = None) -> GetStatusReqOutput:
    return GetStatusReqOutput(
        state="ready",
        model="m",
        weight_version=1,
        uptime_s=1.0,
        steps=1,
        running=0,
        waiting=0,
        kv_tokens_total=1,
        kv_tokens_used=0,
        kv_tokens_cached=0,
        kv_bytes_total=pool,
        page_size=16,
        processes=(ProcessInfo(role="scheduler", pid=1, rss_bytes=100 << 20, weight_bytes=50 << 20),),
        options={"device": "cpu", "tp_size": 2, "pp_size": 1, "dp_size": 1, "threads": threads},
    )


@pytest.mark.parametrize(("pool", "status"), [(60 << 20, "ok"), (1 << 50, "bad")])
def test_doctor_compares_the_pool_with_the_memory(pool: int, status: str) -> None:
    with FakeInstance() as fake:
        fake.handlers[GetStatusReqInput] = lambda _: status_of(pool)
        (finding,) = examine()["pool"]
    assert finding["status"] == status


def test_doctor_counts_the_threads_of_all_ranks_and_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    with FakeInstance() as fake, FakeInstance("other") as other:
        fake.handlers[GetStatusReqInput] = lambda _: status_of(0, threads=4)
        other.handlers[GetStatusReqInput] = lambda _: status_of(0, threads=1)
        (finding,) = examine()["threads"]
        assert finding["status"] == "warning"
        assert "10 threads compute on 4 cores" in finding["detail"]
        assert '"fake" 8, "other" 2' in finding["detail"]
    with FakeInstance() as fake:
        fake.handlers[GetStatusReqInput] = lambda _: status_of(0)
        (finding,) = examine()["threads"]
        assert "4 threads on 4 cores" in finding["detail"]


def test_doctor_names_the_libraries_and_those_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = examine()["libraries"]
    assert found["status"] == "ok"
    assert f"torch {version('torch')}, " in found["detail"]
    monkeypatch.setattr(doctor, "LIBRARIES", ("no-such-library", "torch"))
    missing, found = examine()["libraries"]
    assert (missing["status"], found["status"]) == ("bad", "ok")
    assert missing["detail"].startswith("no-such-library is not installed")


@pytest.mark.parametrize(("available", "swapped", "status"), [(50, 0, "ok"), (4, 0, "bad"), (50, 6, "warning")])
def test_doctor_looks_at_the_memory(monkeypatch: pytest.MonkeyPatch, available: int, swapped: int, status: str) -> None:
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(available << 30, 100 << 30))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100 << 30))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(used=swapped << 30))
    (found,) = examine()["memory"]
    assert found["status"] == status
    assert f"{available}.0 GiB of 100 GiB available" in found["detail"]


def test_doctor_says_which_model_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "default_model", lambda: "/models/small.gguf")
    assert examine()["default model"] == [
        {"check": "default model", "status": "ok", "detail": "/models/small.gguf"},
    ]

    def none() -> str:
        raise ConfigError("none is installed")

    monkeypatch.setattr(hub, "default_model", none)
    assert examine()["default model"][0]["status"] == "warning"


def test_doctor_names_an_instance_of_another_version() -> None:
    with FakeInstance() as fake:
        fake.instance.update(version="0.0.0")
        (finding,) = examine()["version"]
    assert finding["status"] == "warning"
    assert '"fake" runs llmserve 0.0.0' in finding["detail"]


def test_doctor_says_who_has_the_port() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (finding,) = examine("--port", str(port))["port"]
    assert finding["status"] == "warning"
    assert f"{port} is in use by pid {os.getpid()}" in finding["detail"]
    (finding,) = examine("--port", str(port))["port"]
    assert finding["status"] == "ok"


def test_doctor_refuses_a_directory_that_is_not_private(registry: Path) -> None:
    registry.mkdir(mode=0o755)
    registry.chmod(0o755)
    (finding,) = examine()["directory"]
    assert finding["status"] == "bad"
