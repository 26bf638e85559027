"""`top` in a real pseudo-terminal: keys, signals, sizes, and what is left of the terminal afterwards."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pexpect
import pytest
from fake_instance import FakeInstance, fresh_registry, request_info, run
from top_samples import front, record, scheduler

from instances import hang_up
from llmserve.runtime.messages import (
    AbortReqInput,
    AbortReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    Message,
    PingReqInput,
    RpcError,
    SubscribeMetricsReqInput,
    SubscribeMetricsReqOutput,
)
from llmserve.runtime.ports import ipc_address
from llmserve.runtime.wire import Push

ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"
WAIT_S = 60


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_registry(monkeypatch, tmp_path)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return record(tmp_path / "top.jsonl", seconds=63, first=60)


@contextlib.contextmanager
def terminal(*arguments: str, size: tuple[int, int] = (24, 80), **environ: str) -> Iterator[Any]:
    """`llmserve top ARGUMENTS` in a terminal of so many lines and columns."""
    env = os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | environ
    command = [str(Path(sys.executable).with_name("llmserve")), "top", *arguments]
    child = pexpect.spawn(command[0], command[1:], env=env, dimensions=size, encoding="utf-8", timeout=WAIT_S)
    try:
        yield child
    finally:
        hang_up(child)


def ends(child: Any) -> int:
    """Waits for the end; the exit status, or minus the signal."""
    child.expect(pexpect.EOF)
    child.wait()
    return int(-child.signalstatus if child.signalstatus else child.exitstatus)


def test_keys_move_filter_and_quit(recording: Path) -> None:
    with terminal("--replay", str(recording)) as child:
        child.expect("▸ cmpl-a")
        child.send("j")
        child.expect("▸ cmpl-b")
        child.send("\x1b[B")
        child.expect("▸ evil␛")
        child.send("/bob\r")
        child.expect("filter 'bob'")
        child.send("\r")
        child.expect("of at most 200 tokens")
        child.send("qa")
        child.expect("abort 1 request: .*cmpl-b")
        child.send("y")
        child.expect("a recording cannot be changed")
        child.send("q")
        child.expect(re.escape(LEFT))
        assert ends(child) == 0


def test_the_terminal_is_as_it_was(recording: Path) -> None:
    with terminal("--replay", str(recording)) as child:
        before = termios.tcgetattr(child.child_fd)
        child.expect("cmpl-a")
        assert termios.tcgetattr(child.child_fd)[3] & termios.ICANON == 0
        child.send("q")
        child.expect(re.escape("\x1b[?25h" + LEFT))
        assert ends(child) == 0
        assert termios.tcgetattr(child.child_fd) == before


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131), (signal.SIGINT, 0)],
    ids=["term", "hup", "quit", "int"],
)
def test_signals_end_it_and_restore_the_terminal(recording: Path, number: int, code: int) -> None:
    with terminal("--replay", str(recording)) as child:
        child.expect("cmpl-a")
        child.kill(number)
        child.expect(re.escape(LEFT))
        assert ends(child) == code


def test_an_exception_restores_the_terminal(recording: Path) -> None:
    with recording.open("a") as file:
        file.write("nonsense\n")
    with terminal("--replay", str(recording), "--speed", "2") as child:
        child.expect(re.escape(LEFT))
        child.expect("is not a sample")
        assert ends(child) == 2


def test_it_stops_and_goes_on(recording: Path) -> None:
    """Under a shell with job control: the kernel stops no process group that nobody could continue."""
    shell = pexpect.spawn(
        "bash", ["--norc", "--noprofile", "-i"], encoding="utf-8", timeout=WAIT_S, dimensions=(24, 80)
    )
    command = Path(sys.executable).with_name("llmserve")
    try:
        shell.sendline(f"PS1='$ '; {command} top --replay {recording}")
        shell.expect("cmpl-a")
        shell.send("\x1a")
        shell.expect(re.escape(LEFT))
        shell.expect("Stopped")
        shell.sendline("echo al''ive; fg")
        shell.expect("alive")
        shell.expect(re.escape(ENTERED))
        shell.expect("cmpl-a")
        shell.send("q")
        shell.expect(re.escape(LEFT))
    finally:
        hang_up(shell)


def test_it_takes_the_terminal_again_after_a_stop_that_it_could_not_see(recording: Path) -> None:
    with terminal("--replay", str(recording)) as child:
        child.expect("cmpl-a")
        child.kill(signal.SIGSTOP)
        mode = termios.tcgetattr(child.child_fd)
        mode[3] |= termios.ICANON | termios.ECHO  # as a shell would have it
        termios.tcsetattr(child.child_fd, termios.TCSANOW, mode)
        child.kill(signal.SIGCONT)
        child.expect(re.escape(ENTERED))
        child.expect("cmpl-a")
        assert termios.tcgetattr(child.child_fd)[3] & termios.ICANON == 0
        child.send("q")
        assert ends(child) == 0


def test_it_is_drawn_as_often_as_asked(recording: Path) -> None:
    with terminal("--replay", str(recording), "--interval", "0.2", size=(24, 120)) as child:
        child.expect("every 0.2s")
        child.send("-")
        child.expect("every 0.5 s")
        child.send("q")
        assert ends(child) == 0


def test_control_l_draws_anew(recording: Path) -> None:
    with terminal("--replay", str(recording), "--interval", "30") as child:
        child.expect("cmpl-a")
        child.send("\x0c")
        child.expect(re.escape("\x1b[2J"))
        child.expect("cmpl-a")
        child.send("q")
        assert ends(child) == 0


def test_it_follows_the_size(recording: Path) -> None:
    with terminal("--replay", str(recording)) as child:
        child.expect("Requests")
        child.setwinsize(5, 20)
        child.expect("run 3 wait 1 100/s")
        child.setwinsize(40, 150)
        child.expect("Processes")
        child.send("q")
        assert ends(child) == 0


def test_no_color_draws_without_styles(recording: Path) -> None:
    with terminal("--replay", str(recording), NO_COLOR="1") as child:
        child.expect("▸ cmpl-a")
        drawn = child.before
        child.send("q")
        assert ends(child) == 0
    assert not re.search(r"\x1b\[[0-9;]*m", drawn)


def test_a_reader_that_goes_away_ends_it_quietly(recording: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [Path(sys.executable).with_name("llmserve"), "top", "--replay", str(recording), "--interval", "0.2"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.parametrize("keys", [b"", b"p"], ids=["writing", "reading"])
def test_a_terminal_that_goes_away_without_a_signal_ends_it_quietly(recording: Path, keys: bytes) -> None:
    """It is not the controlling one, so that no SIGHUP comes; nor does it know its size, and gets the usual picture."""
    ours, theirs = os.openpty()
    command = [Path(sys.executable).with_name("llmserve"), "top", "--replay", str(recording), "--interval", "0.2"]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, text=True, **streams) as process:
        os.close(theirs)
        shown = b""
        while b"cmpl-a" not in shown:
            shown += os.read(ours, 1 << 16)
        if keys:  # to stop the display, so that it is the reading that finds out
            os.write(ours, keys)
            while b"display stopped" not in shown:
                shown += os.read(ours, 1 << 16)
        os.close(ours)
        assert process.communicate(timeout=WAIT_S)[1] == ""
    assert process.returncode == 0


# ---- live ----------------------------------------------------------------------------------------------------------


def watch(fake: FakeInstance) -> None:
    """Makes the instance push a second's metrics at every renewal of a lease, and answer abort and flush."""
    pushes: dict[str, Push] = {}
    second = iter(range(100, 1000))

    def lease(request: SubscribeMetricsReqInput) -> Message:
        address = ipc_address(fake.instance.directory / request.endpoint)
        push = pushes.setdefault(request.endpoint, Push(address))
        for number in (next(second), next(second)):
            for message in (scheduler(number), front(number)):
                push.send(msgspec.structs.replace(message, time=time.time()))
        return SubscribeMetricsReqOutput(lease_s=request.lease_s)

    fake.handlers[SubscribeMetricsReqInput] = lease
    fake.handlers[AbortReqInput] = lambda request: AbortReqOutput(aborted=request.rids)
    fake.handlers[FlushCacheReqInput] = lambda _: FlushCacheReqOutput(pages_freed=12, bytes_freed=1)


def test_abort_and_flush_reach_the_scheduler() -> None:
    with FakeInstance() as fake:
        watch(fake)
        with terminal() as child:
            child.expect("▸ cmpl-a")
            child.send("ja")
            child.expect("abort 1 request: .*cmpl-b")
            child.send("y")
            child.expect("aborted 1 request")
            child.send("f")
            child.expect("flushed 12 pages")
            fake.handlers[FlushCacheReqInput] = lambda _: RpcError(code="busy", message="3 running, and much advice")
            child.send("f")
            child.expect("not flushed, as requests run: `llmserve flush-cache --wait` waits for them")
            child.send("q")
            assert ends(child) == 0
        asked = [request for request in fake.requests if isinstance(request, AbortReqInput | FlushCacheReqInput)]
        assert asked == [AbortReqInput(rids=("cmpl-b",)), FlushCacheReqInput(), FlushCacheReqInput()]
        assert not list(fake.instance.directory.glob("watch-*"))  # its socket is removed


def test_readonly_asks_nothing_of_the_scheduler() -> None:
    with FakeInstance() as fake:
        watch(fake)
        with terminal("--readonly") as child:
            child.expect("▸ cmpl-a")
            child.send("a")
            child.expect("read-only")
            child.send("f")
            child.send("q")
            assert ends(child) == 0
        assert all(isinstance(request, SubscribeMetricsReqInput) for request in fake.requests)


def test_it_finds_the_instance_again_after_a_restart() -> None:
    with terminal("--interval", "0.2") as nothing:
        assert ends(nothing) == 3  # there has to be one to begin with
    fake = FakeInstance()
    watch(fake)
    with fake, terminal("--interval", "0.2") as child:
        child.expect("● ready")
        fake.__exit__(None, None, None)
        child.expect("✖ dead|. lost")
        with FakeInstance() as again:
            watch(again)
            again.running = [request_info("x")]
            child.expect("● ready")
        child.send("q")
        assert ends(child) == 0


def test_an_instance_that_is_to_end_is_draining_though_its_scheduler_goes_on() -> None:
    with FakeInstance() as fake:
        watch(fake)
        with terminal("--interval", "0.2") as child:
            child.expect("● ready")
            fake.instance.update(state="draining")
            child.expect("◐ draining")
            child.send("q")
            assert ends(child) == 0


def test_an_instance_that_loses_a_replica_is_degraded_and_its_metrics_go_on() -> None:
    with FakeInstance() as fake:
        watch(fake)
        (address,) = fake.instance.record.rpc_addresses
        with FakeInstance("other") as other, terminal("-i", "fake", "--interval", "0.2", size=(24, 120)) as child:
            other.handlers[SubscribeMetricsReqInput] = lambda request: SubscribeMetricsReqOutput(lease_s=5.0)
            fake.instance.update(rpc_addresses=(address, *other.instance.record.rpc_addresses))
            child.expect("2 replicas")
            other.__exit__(None, None, None)
            fake.instance.update(rpc_addresses=(address,), lost_replicas=(1,))
            child.expect("◒ degraded.*replica 1 is lost")
            assert "? lost" not in child.before
            child.send("q")
            assert ends(child) == 0


def test_an_instance_of_another_version_is_said_to_be_one() -> None:
    with FakeInstance() as fake:

        def lease(request: SubscribeMetricsReqInput) -> Message:
            push = Push(ipc_address(fake.instance.directory / request.endpoint))
            push.send(PingReqInput())  # not what a watcher is sent
            pushes.append(push)
            return SubscribeMetricsReqOutput(lease_s=request.lease_s)

        pushes: list[Push] = []
        fake.handlers[SubscribeMetricsReqInput] = lease
        with terminal("--interval", "0.2", size=(24, 120)) as child:
            child.expect("lost.*of another version")
            child.send("q")
            assert ends(child) == 0


def test_a_scheduler_that_says_nothing_is_told_from_one_that_starts() -> None:
    with FakeInstance() as fake:
        fake.handlers[SubscribeMetricsReqInput] = lambda _: []
        result = run("top", "--once", "--json", "--timeout", "0.5")
        assert (result.code, result.out) == (75, "")
        assert "has said nothing for 0.5 s" in result.err
        with terminal("--interval", "0.2") as child:
            child.expect("connecting.*fake")
            assert "v0" not in child.before + child.after
            child.expect(r"stalled.*has said nothing for \d+ s.*fake")
            child.send("q")
            assert ends(child) == 0


def test_no_line_is_printed_before_there_is_something_to_say() -> None:
    with FakeInstance() as fake:
        watch(fake)
        lease = fake.handlers[SubscribeMetricsReqInput]
        slow = iter([[], []])
        fake.handlers[SubscribeMetricsReqInput] = lambda request: next(slow, None) or lease(request)
        command = [Path(sys.executable).with_name("llmserve"), "top", "--json", "--interval", "0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            process.terminate()
    assert (first["state"], first["instance"]) == ("ready", "fake")


def test_a_recording_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    with FakeInstance():
        result = run("top", "--once", "--record", str(tmp_path / "no" / "x.jsonl"))
    assert result.code == 2
    assert "cannot write" in result.err


def test_a_recording_of_a_live_instance_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with FakeInstance() as fake:
        watch(fake)
        seen = run("top", "--once", "--record", str(path)).out
    replayed = run("top", "--replay", str(path), "--once").out
    for text in (seen, replayed):
        assert text.startswith("● ready  fake  model")
        assert "▸ cmpl-a" in text
