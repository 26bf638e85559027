"""The operators' commands against an instance whose scheduler is a table of answers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import msgspec
import psutil
import pytest
from fake_instance import FakeInstance, fresh_registry, request_info, run
from rich.cells import cell_len, set_cell_size
from typer.testing import CliRunner

from instances import PATIENCE_S, PATIENT, fair_time, wait_until
from llmserve.cli import pause, ping, stop, update_weights
from llmserve.cli.commands import COMMANDS
from llmserve.cli.loads import Load, state_of
from llmserve.cli.main import app
from llmserve.cli.rpc import ProgressReport
from llmserve.runtime.decision import decided
from llmserve.runtime.instance import InstanceRecord
from llmserve.runtime.messages import (
    AbortReqInput,
    AbortReqOutput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlReqInput,
    DrainReqInput,
    DrainReqOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetLoadReqInput,
    GetLoadReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    ListRequestsReqInput,
    ListRequestsReqOutput,
    Message,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PingReqInput,
    PingReqOutput,
    ProcessInfo,
    RpcError,
    RpcProgress,
    UpdateWeightReqInput,
    UpdateWeightReqOutput,
)

FIGURES = ("min_ms", "p50_ms", "p99_ms", "max_ms")
STATUS = GetStatusReqOutput(
    state="ready",
    model="SmolLM2",
    weight_version=3,
    uptime_s=4000.0,
    steps=99,
    running=2,
    waiting=1,
    kv_tokens_total=1000,
    kv_tokens_used=250,
    kv_tokens_cached=500,
    kv_bytes_total=5 << 20,
    page_size=16,
    processes=(ProcessInfo(role="scheduler", pid=42, rss_bytes=1 << 30, cpu_percent=99.4, weight_bytes=270 << 20),),
    options={
        **{"port": 30000, "model": "some/model", "max_model_len": 8192, "dtype": "bfloat16", "prefix_cache": True},
        **{"served_model_names": [], "seed": None, "nccl_port": None, "drain_timeout": 30.0},
    },
    chosen=("max_model_len", "dtype"),
)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_registry(monkeypatch, tmp_path)


@pytest.fixture
def fake(registry: None) -> Iterator[FakeInstance]:
    with FakeInstance() as instance:
        yield instance


# ---- finding the instance ------------------------------------------------------------------------------------------


def test_no_instance_is_exit_3() -> None:
    result = run("ping")
    assert (result.code, result.out) == (3, "")
    assert "llmserve launch" in result.err


def test_an_instance_that_starts_is_not_said_to_be_dead(fake: FakeInstance) -> None:
    fake.instance.update(state="starting")
    result = run("requests")
    assert (result.code, result.err) == (69, 'llmserve: instance "fake" is still starting\n')


@pytest.mark.parametrize("command", ["ping", "status", "top", "abort x", "pause", "chat", "generate x", "bench"])
def test_a_node_that_is_not_the_first_sends_who_asks_to_that(fake: FakeInstance, command: str) -> None:
    fake.instance.update(node_rank=1, port=0)
    done = run(*command.split())
    assert (done.code, done.out) == (69, "")
    assert done.err == 'llmserve: instance "fake" is node 1 of its model; give the command on node 0\n'


def test_a_node_that_is_not_the_first_is_ready_and_not_silent(fake: FakeInstance) -> None:
    fake.instance.update(node_rank=1, port=0, rpc_addresses=())
    (line,) = run("ps").out.splitlines()[1:]
    assert line.split() == ["fake", "model", str(os.getpid()), "-", "ready", line.split()[5], "-", "-"]
    assert not fake.requests
    assert "scheduler" not in run("doctor").out


def test_doctor_leaves_an_instance_that_starts_its_time(fake: FakeInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.instance.update(state="starting")
    finding = lambda: next(f for f in json.loads(run("doctor", "--json").out) if '"fake"' in f["detail"])  # noqa: E731
    assert finding()["status"] == "ok"
    assert finding()["detail"].startswith('"fake" has been starting for ')
    monkeypatch.setattr(InstanceRecord, "stopped", "its main process 1 is stopped")
    assert finding()["status"] == "bad"
    assert finding()["detail"] == '"fake": its main process 1 is stopped; kill -CONT lets it go on'


def test_two_instances_need_a_name(fake: FakeInstance) -> None:
    with FakeInstance("other"):
        assert run("ping").code == 2
        assert "fake, other" in run("ping").err
        assert json.loads(run("ping", "-i", "other", "--json").out)["instance"] == "other"


def test_the_name_may_come_from_the_environment(fake: FakeInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSERVE_INSTANCE", "absent")
    result = run("ping")
    assert result.code == 3
    assert '"absent"' in result.err
    assert "LLMSERVE_INSTANCE" in result.err
    assert "LLMSERVE_INSTANCE" not in run("ping", "-i", "other").err


def test_another_protocol_is_exit_76() -> None:
    with FakeInstance(protocol=99):
        result = run("ping")
    assert result.code == 76
    assert "99" in result.err


@pytest.mark.parametrize(
    "command",
    [
        *("status", "requests", "ping", "abort x", "abort --all --yes", "flush-cache", "update-weights m"),
        *("pause", "resume", "drain", "drain --no-wait"),
    ],
)
def test_silence_is_exit_75_after_the_timeout(fake: FakeInstance, command: str) -> None:
    fake.handlers = dict.fromkeys(typing.get_args(ControlReqInput), lambda _: [])
    result = run(*command.split(), "--timeout", "0.2", "--json")
    assert (result.code, result.out) == (75, "")
    assert "no answer came in 0.2 s; see --timeout" in result.err


def test_who_is_not_answered_is_told_which_process_is_stopped(fake: FakeInstance) -> None:
    fake.handlers[PingReqInput] = lambda _: []
    fake.handlers[DrainReqInput] = lambda _: RpcError(code="timeout", message="not done in time: draining")
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, 10, "its stop")
            fake.instance.update(children=(child.pid,))
            told = [run(*command.split()).err for command in ("ping --timeout 0.2", "drain --no-wait")]
        finally:
            child.kill()
    assert told == [
        f"llmserve: {fault} (its child process {child.pid} is stopped)\n"
        for fault in ("no answer came in 0.2 s; see --timeout", "not done in time: draining")
    ]


def test_a_long_step_is_told(fake: FakeInstance) -> None:
    fake.handlers[PingReqInput] = lambda _: PingReqOutput(step=7, state="ready", in_step_s=12.3)
    fake.handlers[GetStatusReqInput] = lambda _: msgspec.structs.replace(STATUS, in_step_s=12.3)
    assert run("ping").out.endswith("(ready, step 7, the next one takes 12.3s already)\n")
    assert json.loads(run("ping", "--json").out)["replicas"] == [
        {"replica": 0, **dict.fromkeys(FIGURES, ANY), "state": "ready", "step": 7, "in_step_s": 12.3}
    ]
    assert "99 steps, the next one takes 12.3s already" in run("status").out
    fake.handlers[PingReqInput] = lambda _: PingReqOutput(step=7, state="ready", in_step_s=0.3)
    assert run("ping").out.endswith("(ready, step 7)\n")


def test_a_lost_replica_is_named(fake: FakeInstance) -> None:
    fake.handlers[GetStatusReqInput] = lambda _: STATUS
    fake.instance.update(lost_replicas=(1,))
    (line,) = json.loads(run("ps", "--json", *PATIENT).out)
    assert (line["state"], line["lost_replicas"]) == ("degraded", [1])
    assert "lost      replica 1" in run("status").out.splitlines()
    del fake.handlers[GetStatusReqInput]
    (finding,) = (found for found in json.loads(run("doctor", "--json").out) if found["check"] == "replicas")
    assert finding["status"] == "bad"
    assert '"fake" has lost replica 1' in finding["detail"]


def test_of_several_replicas_one_with_a_stopped_rank_degrades_the_instance(
    fake: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first rank may answer all the same."""
    ready, silent = Load(0, 0, "ready"), Load(None, None, "silent")
    cases = {
        "its scheduler-dp1-pp1-tp0 process 5 is stopped": ["degraded", "degraded", "silent", "silent"],
        "its main process 5 is stopped": ["silent", "degraded", "silent", "silent"],
        "": ["ready", "degraded", "silent", "ready"],
    }
    for stopped, expected in cases.items():
        monkeypatch.setattr(InstanceRecord, "stopped", stopped)
        loads = ([ready, ready], [ready, silent], [silent, silent], [ready])
        assert [state_of(fake.instance.record, each) for each in loads] == expected, stopped


# ---- ping ----------------------------------------------------------------------------------------------------------


def test_ps_and_doctor_say_which_scheduler_is_silent(fake: FakeInstance) -> None:
    with FakeInstance("mute") as mute:
        mute.handlers[GetLoadReqInput] = mute.handlers[GetStatusReqInput] = lambda _: []
        for _ in range(20):  # as often as it takes for the other one to be in time
            began = fair_time()
            listed = {line["name"]: line for line in json.loads(run("ps", "--json", "--timeout", "0.5").out)}
            took = fair_time() - began
            if took < 1.0 and listed["fake"]["state"] == "ready":
                break
        assert took < 1.0, "it would wait so long without --timeout"
        checks = json.loads(run("doctor", "--json", "--timeout", "0.5").out)
    assert (listed["fake"]["state"], listed["fake"]["running"]) == ("ready", 2)
    assert (listed["mute"]["state"], listed["mute"]["running"]) == ("silent", None)
    assert [check["status"] for check in checks if "mute" in check["detail"] and "0.5 s" in check["detail"]] == ["bad"]


def test_who_asks_an_instance_that_has_ended_is_told_which_and_where_to_look(fake: FakeInstance) -> None:
    """As one that waits while the watchdog ends it: it has found the instance, and then nobody listens."""
    Path(fake.instance.record.rpc_addresses[0].removeprefix("ipc://")).unlink()
    result = run("ping")
    assert (result.code, result.out) == (69, "")
    assert 'instance "fake" has ended' in result.err
    assert "`llmserve logs -i fake`" in result.err


def test_ping(fake: FakeInstance) -> None:
    assert run("ping").out.startswith("PONG ")
    assert "(ready, step 7)" in run("ping").out
    began = time.monotonic()
    run("ping", "--count", "3", "--interval", "0.1")
    assert time.monotonic() - began > 0.2
    fake.requests.clear()
    many = json.loads(run("ping", "--count", "20", "--json").out)
    assert many["count"] == 20
    assert 0 < many["min_ms"] <= many["p50_ms"] <= many["p99_ms"] <= many["max_ms"]
    assert len(fake.requests) == 20


# ---- requests ------------------------------------------------------------------------------------------------------


def test_requests_are_listed_oldest_first(fake: FakeInstance) -> None:
    fake.running = [
        request_info("young", age_s=1.5, state="waiting", output_tokens=0, ttft_s=None, tokens_per_s=0.0),
        request_info("old", age_s=125.0, index=1, user="ann", retractions=2),
    ]
    result = run("requests")
    header, old, young = result.out.splitlines()
    assert header.split() == ["RID", "STATE", "AGE", "PROMPT", "CACHED", "OUTPUT", "TOK/S", "TTFT", "USER"]
    assert old.split() == [
        "old",
        "#1",
        "decode",
        "(retracted",
        "2×)",
        "2m05s",
        "100",
        "64",
        "50/200",
        "12.5",
        "250ms",
        "ann",
    ]
    assert young.split() == ["young", "waiting", "1.5s", "100", "64", "0/200", "0.0", "-", "-"]
    assert result.err == "1 running, 1 waiting\n"


def test_prompt_text_only_when_asked_for(fake: FakeInstance) -> None:
    fake.running = [request_info("a", text="the secret prompt")]
    assert "secret" not in run("requests").out + run("requests", "--json").out
    assert "secret" in run("requests", "--show-text").out
    assert json.loads(run("requests", "--show-text", "--json").out)[0]["text"] == "the secret prompt"
    assert [request.show_text for request in fake.requests if isinstance(request, ListRequestsReqInput)] == [
        False,
        False,
        True,
        True,
    ]


def test_escape_codes_in_a_rid_are_shown(fake: FakeInstance) -> None:
    fake.running = [request_info("\x1b]0;owned\x07")]
    assert "\x1b" not in run("requests").out
    assert "␛]0;owned␇" in run("requests").out


# ---- abort ---------------------------------------------------------------------------------------------------------


def test_abort_says_found_or_not_for_each_rid(fake: FakeInstance) -> None:
    fake.handlers[AbortReqInput] = lambda _: AbortReqOutput(aborted=("a",), not_found=("b",))
    result = run("abort", "a", "b")
    assert result.code == 3
    assert result.out.splitlines() == ["RID  RESULT", "a    aborted", "b    not found"]
    assert fake.requests == [AbortReqInput(rids=("a", "b"))]
    shown = json.loads(run("abort", "a", "b", "--json").out)
    assert shown == {"aborted": ["a"], "not_found": ["b"], "replicas": {"a": 0}}


def test_abort_of_named_requests_asks_nothing(fake: FakeInstance) -> None:
    fake.handlers[AbortReqInput] = lambda _: AbortReqOutput(aborted=("a",))
    assert run("abort", "a").code == 0


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (["--all"], AbortReqInput(everything=True)),
        (["--older-than", "5m"], AbortReqInput(older_than_s=300.0)),
        (["--prefix", "batch-"], AbortReqInput(prefix="batch-")),
    ],
)
def test_bulk_abort_asks_on_a_terminal_and_needs_yes_off_it(
    fake: FakeInstance, options: list[str], sent: AbortReqInput
) -> None:
    fake.running = [request_info("batch-1", age_s=400.0), request_info("batch-1", index=1, age_s=400.0)]
    fake.handlers[AbortReqInput] = lambda _: AbortReqOutput(aborted=("batch-1",))

    def aborts() -> list[AbortReqInput]:
        return [request for request in fake.requests if isinstance(request, AbortReqInput)]

    assert run("abort", *options).code == 2
    assert run("abort", *options, terminal=True, stdin="n\n").code == 1
    assert aborts() == []
    asked = run("abort", *options, terminal=True, stdin="y\n")
    assert asked.code == 0
    assert 'abort 1 request of "fake"? [y/N]' in asked.err
    assert run("abort", *options, "--yes").code == 0
    assert aborts() == [sent, sent]


@pytest.mark.parametrize(
    ("command", "request_type", "answer"),
    [
        ("abort --all", AbortReqInput, AbortReqOutput(aborted=())),
        ("flush-cache --abort", FlushCacheReqInput, FlushCacheReqOutput(pages_freed=0, bytes_freed=0)),
        ("pause --mode abort", PauseGenerationReqInput, PauseGenerationReqOutput()),
    ],
)
def test_nothing_is_asked_where_nothing_would_end(
    fake: FakeInstance, command: str, request_type: type, answer: AbortReqOutput
) -> None:
    fake.handlers[request_type] = lambda _: answer
    fake.handlers[GetLoadReqInput] = lambda _: GetLoadReqOutput(
        state="ready", running=0, waiting=0, kv_tokens_used=0, kv_tokens_cached=0, kv_tokens_total=1
    )
    done = run(*command.split(), terminal=True, stdin="n\n")
    assert (done.code, done.err) == (0, "")
    assert isinstance(fake.requests[-1], request_type)
    assert run(*command.split()).code == 2  # a script's --yes does not depend on what happens to run


def test_the_question_counts_what_would_end(fake: FakeInstance) -> None:
    for command in ("flush-cache --abort", "pause --mode abort", "update-weights m --mode abort"):
        done = run(*command.split(), terminal=True, stdin="n\n")
        assert done.code == 1
        assert 'abort 3 requests of "fake" and ' in done.err


@pytest.mark.parametrize("arguments", [[], ["a", "--all"], ["--all", "--prefix", "p"], ["--older-than", "soon"]])
def test_abort_refuses_what_is_not_one_choice(fake: FakeInstance, arguments: list[str]) -> None:
    assert run("abort", *arguments).code == 2
    assert fake.requests == []


# ---- flush-cache ---------------------------------------------------------------------------------------------------


def test_flush_reports_pages_and_bytes(fake: FakeInstance) -> None:
    fake.handlers[FlushCacheReqInput] = lambda _: FlushCacheReqOutput(pages_freed=12, bytes_freed=3 << 20)
    assert run("flush-cache").out == "flushed 12 pages (3.0 MiB)\n"
    assert fake.requests == [FlushCacheReqInput()]
    assert json.loads(run("flush-cache", "--wait", "5", "--json").out)["bytes_freed"] == 3 << 20
    assert fake.requests[-1] == FlushCacheReqInput(wait_s=5.0)


def test_flush_while_busy_is_exit_75_with_the_counts(fake: FakeInstance) -> None:
    fake.handlers[FlushCacheReqInput] = lambda _: RpcError(code="busy", message="2 requests run and 1 waits")
    result = run("flush-cache")
    assert result.code == 75
    assert "2 requests run and 1 waits" in result.err


def test_the_timeout_of_a_flush_begins_after_its_wait(fake: FakeInstance) -> None:
    fake.handlers[FlushCacheReqInput] = lambda _: []
    result = run("flush-cache", "--wait", "0.2", "--timeout", "0.1")
    assert (result.code, result.err) == (75, "llmserve: no answer came in 0.3 s; see --timeout\n")


def test_flush_abort_is_confirmed(fake: FakeInstance) -> None:
    fake.handlers[FlushCacheReqInput] = lambda _: FlushCacheReqOutput(pages_freed=1, bytes_freed=1, aborted=("a",))
    assert run("flush-cache", "--abort").code == 2
    assert fake.requests == []
    assert run("flush-cache", "--abort", "--yes").out == "flushed 1 page (1 B), 1 request aborted\n"
    assert fake.requests == [FlushCacheReqInput(abort=True)]
    assert run("flush-cache", "--abort", "--wait", "3").code == 2


# ---- pause, resume, drain ------------------------------------------------------------------------------------------


def test_pause_and_resume(fake: FakeInstance) -> None:
    fake.handlers[PauseGenerationReqInput] = lambda _: PauseGenerationReqOutput(retracted=3)
    fake.handlers[ContinueGenerationReqInput] = lambda _: ContinueGenerationReqOutput(resumed=3)
    assert run("pause", "--mode", "retract").out == "paused, 3 retracted\n"
    assert run("resume").out == "resumed, 3 requests waiting or running\n"
    assert fake.requests == [PauseGenerationReqInput(mode="retract"), ContinueGenerationReqInput()]
    fake.handlers[ContinueGenerationReqInput] = lambda _: ContinueGenerationReqOutput(resumed=0)
    assert run("resume").out == "resumed\n"
    del fake.requests[-1]
    assert run("pause", "--mode", "abort").code == 2
    assert run("pause", "--mode", "drain").code == 0
    assert fake.requests[-1] == PauseGenerationReqInput(mode="drain")


def test_drain_waits_until_nothing_is_left(fake: FakeInstance) -> None:
    left = iter([2, 1, 0])

    def load(_: GetLoadReqInput) -> GetLoadReqOutput:
        return GetLoadReqOutput(
            state="draining",
            running=next(left),
            waiting=0,
            kv_tokens_used=0,
            kv_tokens_cached=0,
            kv_tokens_total=1,
        )

    fake.handlers[DrainReqInput] = lambda _: DrainReqOutput(running=2, waiting=1)
    fake.handlers[GetLoadReqInput] = load
    assert run("drain").out == "drained\n"
    assert next(left, None) is None
    assert run("drain", "--no-wait").out == "draining, 3 requests left\n"


def test_drain_that_takes_too_long_is_exit_75(fake: FakeInstance) -> None:
    fake.handlers[DrainReqInput] = lambda _: DrainReqOutput(running=2, waiting=1)
    result = run("drain", "--timeout", "0.8")
    assert result.code == 75
    assert "3 requests left after 0.8 s" in result.err


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_of_a_ping_gives_the_figures_so_far(fake: FakeInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = iter([lambda _: None, interrupt] * 2)
    clock = SimpleNamespace(sleep=lambda s: next(sleeps)(s), perf_counter=time.perf_counter)
    monkeypatch.setattr(ping, "time", clock)
    ended = run("ping", "--count", "9", "--interval", "1")
    assert (ended.code, ended.out[:11], ended.err) == (130, "2 × PONG  m", "")
    assert json.loads(run("ping", "--count", "9", "--interval", "1", "--json").out)["count"] == 2


def test_ctrl_c_of_an_abort_says_that_it_may_take_effect(fake: FakeInstance) -> None:
    """The scheduler holds the memory until a step ends."""

    def hang(_: AbortReqInput) -> list[Message]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    fake.handlers[AbortReqInput] = hang
    ended = run("abort", "a", *PATIENT)
    assert (ended.code, ended.out) == (130, "")
    assert ended.err == "llmserve: interrupted; what was to end may still do so, see `llmserve requests`\n"


def test_ctrl_c_says_that_a_drain_goes_on(fake: FakeInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.handlers[DrainReqInput] = lambda _: DrainReqOutput(running=2, waiting=1)
    monkeypatch.setattr(pause, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    ended = run("drain")
    assert (ended.code, ended.out) == (130, "")
    assert "interrupted with 3 requests left; the instance still drains, `llmserve resume` ends that" in ended.err
    signals: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda _, number: signals.append(number))
    monkeypatch.setattr(stop, "wait_drained", interrupt)
    ended = run("stop")
    assert (ended.code, ended.out, signals) == (130, "", [signal.SIGTERM])
    assert ended.err == 'llmserve: interrupted; "fake" goes on ending, `llmserve stop --now` ends it at once\n'


# ---- several replicas ----------------------------------------------------------------------------------------------


@contextmanager
def second_replica(fake: FakeInstance) -> Iterator[FakeInstance]:
    """A fake that is replica 1 of the instance `fake`."""
    with FakeInstance("other") as other:
        socket = fake.instance.directory / "rpc-1.sock"
        socket.symlink_to(other.instance.directory / "rpc.sock")
        fake.instance.update(rpc_addresses=(*fake.instance.record.rpc_addresses, f"ipc://{socket}"))
        yield other


SILENCE = RpcError(code="timeout", message="a step takes long")
"""What comes in place of an answer, at once: a test need not wait for it, and has time for the answers of others."""
DONE: dict[str, Message] = {
    "status": STATUS,
    "requests": ListRequestsReqOutput(requests=(request_info("a"),)),
    "abort a": AbortReqOutput(aborted=("a",)),
    "flush-cache": FlushCacheReqOutput(pages_freed=3, bytes_freed=1024),
    "pause": PauseGenerationReqOutput(retracted=2),
    "resume": ContinueGenerationReqOutput(resumed=2),
    "drain": DrainReqOutput(running=0, waiting=0),
}


def answer_with(fake: FakeInstance, answer: Message) -> None:
    """Has the fake answer so to whatever it answers, and nothing else."""
    named = {each.__name__: each for each in typing.get_args(ControlReqInput)}
    fake.handlers = {named[type(answer).__name__.replace("Output", "Input")]: lambda _: answer}


@pytest.mark.parametrize(
    ("command", "totals", "line"),
    [
        (
            "flush-cache",
            {"pages_freed": 6, "bytes_freed": 2048, "aborted": []},
            "flushed 3 pages (1.0 KiB)",
        ),
        ("pause", {"retracted": 4, "aborted": 0}, "paused, 2 retracted"),
        ("resume", {"resumed": 4}, "resumed, 2 requests waiting or running"),
        ("drain", {"state": "draining", "left": 0}, "drained"),
    ],
)
def test_what_each_replica_did_is_told(fake: FakeInstance, command: str, totals: dict[str, object], line: str) -> None:
    with second_replica(fake) as other:
        for each in (fake, other):
            answer_with(each, DONE[command])
        assert run(command, "-i", "fake").out == f"replica 0: {line}\nreplica 1: {line}\n"
        data = json.loads(run(command, "-i", "fake", "--json").out)
    replicas = data.pop("replicas")
    assert data == totals
    assert [each.pop("replica") for each in replicas] == [0, 1]
    assert replicas[0] == replicas[1]
    assert {name: 2 * value for name, value in replicas[0].items() if isinstance(value, int)} == {
        name: value for name, value in data.items() if isinstance(value, int)
    }


@pytest.mark.parametrize("command", DONE)
def test_a_replica_that_hangs_does_not_hide_what_another_answers(fake: FakeInstance, command: str) -> None:
    with second_replica(fake) as other:
        answer_with(fake, DONE[command])
        other.handlers = dict.fromkeys(typing.get_args(ControlReqInput), lambda _: SILENCE)
        plain = run(*command.split(), "-i", "fake")
        structured = run(*command.split(), "-i", "fake", "--json")
    for ended in (plain, structured):
        assert ended.code == 75
        assert "replica 1: a step takes long" in ended.err
    data = json.loads(structured.out)
    told = data if command == "requests" else data["replicas"]
    assert list(told.values()) == [0] if command == "abort a" else [each["replica"] for each in told] == [0]
    shown = {"status": "99", "requests": "decode", "abort a": "replica 0: aborted"}
    assert shown.get(command, "replica 0: ") in plain.out


def test_what_all_replicas_refuse_in_the_same_words_is_said_of_each(fake: FakeInstance) -> None:
    """Three that run on each are six: "3 running" alone would be half of the truth."""
    with second_replica(fake) as other:
        for each in (fake, other):
            each.handlers[FlushCacheReqInput] = lambda _: RpcError(code="busy", message="3 running")
        refused = run("flush-cache", "-i", "fake")
    assert (refused.code, refused.err) == (75, "llmserve: each of 2 replicas: 3 running\n")


@pytest.mark.parametrize(("left_there", "code"), [(1, 75), (0, 0)])
def test_a_drain_waits_for_those_that_answer(
    fake: FakeInstance, monkeypatch: pytest.MonkeyPatch, left_there: int, code: int
) -> None:
    """And then fails with the error of the one that does not, unless that had nothing left."""
    monkeypatch.setattr(pause, "POLL_S", 0.0)
    left = iter([2, 1, 0])

    def load(_: GetLoadReqInput) -> GetLoadReqOutput:
        memory = {"kv_tokens_used": 0, "kv_tokens_cached": 0, "kv_tokens_total": 1}
        return GetLoadReqOutput(state="draining", running=next(left), waiting=0, **memory)

    with second_replica(fake) as other:
        fake.handlers[DrainReqInput] = lambda _: DrainReqOutput(running=3, waiting=0)
        fake.handlers[GetLoadReqInput] = load
        other.handlers[DrainReqInput] = lambda _: DrainReqOutput(running=left_there, waiting=0)
        other.handlers[GetLoadReqInput] = lambda _: SILENCE
        done = run("drain", "-i", "fake", *PATIENT)
    assert next(left, None) is None
    there = "draining, 1 request left" if left_there else "drained"
    assert (done.code, done.out) == (code, f"replica 0: drained\nreplica 1: {there}\n")
    assert ("replica 1: a step takes long" in done.err) == bool(code)


def test_a_ping_measures_each_replica(fake: FakeInstance) -> None:
    with second_replica(fake) as other:
        other.handlers[PingReqInput] = lambda _: PingReqOutput(step=8, state="paused")
        once = run("ping", "-i", "fake").out.splitlines()
        many = run("ping", "-i", "fake", "--count", "3").out.splitlines()
        data = json.loads(run("ping", "-i", "fake", "--count", "3", "--json").out)
        other.handlers[PingReqInput] = lambda _: SILENCE
        hung = run("ping", "-i", "fake")
    assert [line.split(" PONG ")[0] for line in once] == ["replica 0:", "replica 1:"]
    assert [line.split(" ms ")[1] for line in once] == ["(ready, step 7)", "(paused, step 8)"]
    assert [line.split("  min ")[0] for line in many] == ["replica 0: 3 × PONG", "replica 1: 3 × PONG"]
    assert [each["state"] for each in data["replicas"]] == ["ready", "paused"]
    assert data["count"] == 3
    assert data["max_ms"] == max(each["max_ms"] for each in data["replicas"])
    assert (hung.code, hung.err) == (75, "llmserve: replica 1: a step takes long\n")


def test_ps_counts_a_silent_replica_as_unknown(fake: FakeInstance) -> None:
    with second_replica(fake) as other:
        other.handlers[GetLoadReqInput] = lambda _: SILENCE
        row = next(line.split() for line in run("ps", "--timeout", "30").out.splitlines() if line.startswith("fake"))
        line = json.loads(run("ps", "--timeout", "30", "--json").out)[0]
    assert (row[4], row[6:]) == ("degraded", ["2+-", "1+-"])
    assert (line["state"], line["running"], line["waiting"]) == ("degraded", 2, 1)
    assert [(each["state"], each["running"]) for each in line["replicas"]] == [("ready", 2), ("silent", None)]


def test_status_shows_what_replicas_share_once(fake: FakeInstance) -> None:
    with second_replica(fake) as other:
        for number, each in enumerate((fake, other)):
            process = ProcessInfo(role="scheduler", pid=50 + number, dp_rank=number)
            main = ProcessInfo(role="main", pid=49)
            busy = msgspec.structs.replace(STATUS, running=2 + number, processes=(main, process))
            each.handlers[GetStatusReqInput] = lambda _, busy=busy: busy  # type: ignore[misc]
        text = run("status", "-i", "fake").out
        data = json.loads(run("status", "-i", "fake", "--json").out)
    lines = [line.split() for line in text.splitlines()]
    assert ["state", "ready"] in lines
    table = lines.index(["REPLICA", "STATE", "UP", "STEPS", "RUN", "WAIT", "KV", "TOKENS", "USED", "CACHED"])
    assert lines[table + 1 : table + 3] == [
        [number, "ready", "1h06m", "99", running, "1", "1.0k", "(5.0", "MiB)", "25%", "50%"]
        for number, running in (("0", "2"), ("1", "3"))
    ]
    assert [line[:2] for line in lines if line[:1] in (["main"], ["scheduler"])] == [
        ["main", "49"],
        ["scheduler", "50"],
        ["scheduler", "51"],
    ]
    assert text.count("max-model-len") == 1
    assert [each["replica"] for each in data["replicas"]] == [0, 1]


def test_doctor_tells_of_the_replica_that_hangs_and_of_the_pool_of_the_others(fake: FakeInstance) -> None:
    options = {"tp_size": 1, "pp_size": 1, "dp_size": 2, "threads": 1}
    with second_replica(fake) as other:
        answer_with(fake, msgspec.structs.replace(STATUS, options=options))
        other.handlers[GetStatusReqInput] = lambda _: SILENCE
        found = json.loads(run("doctor", "--timeout", "30", "--json").out)
    ours = {each["check"]: each for each in found if '"fake"' in each["detail"]}
    assert ours["pool"]["status"] == "ok"
    assert ours["scheduler"]["status"] == "bad"
    assert "replica 1: a step takes long" in ours["scheduler"]["detail"]


# ---- update-weights ------------------------------------------------------------------------------------------------


def test_update_weights_reports_the_swap(fake: FakeInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.handlers[UpdateWeightReqInput] = lambda request: [
        RpcProgress(stage="reading", done=1, total=2, unit="bytes"),
        RpcProgress(stage="reading", done=2, total=2, unit="bytes"),
        RpcProgress(stage="copying"),
        UpdateWeightReqOutput(
            old_version=1, new_version=2, model_path=request.model_path, bytes=3 << 20, seconds=2.5, paused_s=0.125
        ),
    ]
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path)
    result = run("update-weights", "new", "--load-format", "safetensors", "--mode", "drain")
    assert result.out == "weights 1 -> 2: 3.0 MiB in 2.5s, paused for 125ms\n"
    assert result.err == "reading\ncopying\n"
    sent = UpdateWeightReqInput(model_path=str(tmp_path / "new"), load_format="safetensors", mode="drain")
    assert fake.requests == [sent]


def test_dry_run_prints_what_differs(fake: FakeInstance) -> None:
    answer = UpdateWeightReqOutput(
        old_version=1, new_version=1, model_path="org/other", differences=("lm_head.weight: [9, 4], not [8, 4]",)
    )
    fake.handlers[UpdateWeightReqInput] = lambda _: answer
    result = run("update-weights", "org/other", "--dry-run")
    assert result.code == 1
    assert "lm_head.weight: [9, 4], not [8, 4]" in result.out
    assert fake.requests == [UpdateWeightReqInput(model_path="org/other", dry_run=True)]


def test_what_differs_in_many_layers_is_one_line() -> None:
    missing = [f"model.layers.{layer}.mlp.up_proj.weight: missing" for layer in (0, 1, 2, 5, 7, 8)]
    shape = "model.layers.3.norm.weight: shape [64, 1.5.2], the model has [576]"
    assert update_weights.folded(["config: x is {}", *missing, shape, "lm_head.weight: missing"]) == [
        "config: x is {}",
        "model.layers.0-2,5,7-8.mlp.up_proj.weight: missing",
        shape,
        "lm_head.weight: missing",
    ]


def test_each_replica_is_named_whose_weights_are_swapped(fake: FakeInstance) -> None:
    with second_replica(fake) as other:
        for number, each in enumerate((fake, other)):
            answer = UpdateWeightReqOutput(old_version=1, new_version=1, model_path=f"m{number}")
            each.handlers[UpdateWeightReqInput] = lambda _, answer=answer: answer  # type: ignore[misc]
        lines = run("update-weights", "m", "--dry-run", "-i", "fake").out.splitlines()
        assert lines == ["replica 0: m0 would be accepted", "replica 1: m1 would be accepted"]
        other.handlers[UpdateWeightReqInput] = fake.handlers[UpdateWeightReqInput]
        assert run("update-weights", "m", "--dry-run", "-i", "fake").out == "m0 would be accepted\n"  # what all say
        replicas = json.loads(run("update-weights", "m", "--dry-run", "-i", "fake", "--json").out)["replicas"]
        assert [(each["replica"], each["model_path"]) for each in replicas] == [(0, "m0"), (1, "m0")]


def test_update_that_aborts_is_confirmed(fake: FakeInstance) -> None:
    assert run("update-weights", "x", "--mode", "abort").code == 2
    assert fake.requests == []


def test_a_refused_update_is_the_servers_words(fake: FakeInstance) -> None:
    fake.handlers[UpdateWeightReqInput] = lambda _: RpcError(code="invalid", message="it is a qwen2, not a llama")
    result = run("update-weights", "x")
    assert result.code == 2
    assert "it is a qwen2, not a llama" in result.err


@pytest.mark.parametrize("answers", [True, False])
def test_an_interrupted_update_says_which_weights_serve(
    fake: FakeInstance, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(ProgressReport, "_show", interrupt)
    monkeypatch.setattr(update_weights, "INTERRUPTED_TIMEOUT_S", PATIENCE_S if answers else 0.2)
    fake.handlers[UpdateWeightReqInput] = lambda _: [RpcProgress(stage="exchanging")]
    fake.handlers[GetStatusReqInput] = lambda _: STATUS if answers else []
    done = run("update-weights", "x")
    assert (done.code, done.out) == (130, "")
    says = "the weights that serve are version 3 (SmolLM2)" if answers else "the new weights may serve, see `llmserve"
    assert done.err.startswith(f"llmserve: interrupted; {says}")


def test_an_interrupted_update_of_replicas_is_called_off_for_all(
    fake: FakeInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has prepared itself and waits for the word, which is no."""
    monkeypatch.setattr(update_weights, "INTERRUPTED_TIMEOUT_S", 0.2)
    with FakeInstance("other") as other:
        other.handlers = {UpdateWeightReqInput: lambda _: [RpcProgress(stage="reading")]}
        addresses = (*fake.instance.record.rpc_addresses, *other.instance.record.rpc_addresses)
        fake.instance.update(rpc_addresses=addresses)

        def prepare(_: UpdateWeightReqInput) -> list[RpcProgress]:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            return [RpcProgress(stage="prepared")]

        fake.handlers[UpdateWeightReqInput] = prepare
        assert run("update-weights", "x", "-i", "fake").code == 130
    (asked,) = (request for request in fake.requests if isinstance(request, UpdateWeightReqInput))
    assert decided(fake.instance.directory, asked.decision) == "abort"


# ---- status --------------------------------------------------------------------------------------------------------


def test_status_shows_the_instance_in_depth(fake: FakeInstance) -> None:
    fake.handlers[GetStatusReqInput] = lambda _: STATUS
    text = run("status").out
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["model"].endswith("SmolLM2 (weights version 3)")
    assert lines["state"].endswith("ready, up 1h06m, 99 steps")
    assert "1000 tokens in pages of 16, 5.0 MiB: 25% used, 50% cached" in lines["kv pool"]
    assert lines["scheduler"].split() == [
        "scheduler",
        "42",
        "tp0",
        "pp0",
        "dp0",
        "1.0",
        "GiB",
        "99%",
        "270",
        "MiB",
        "0",
    ]
    table = text[text.index("OPTION") :].splitlines()
    assert [line.split() for line in table] == [
        ["OPTION", "CHOSEN", "VALUE"],
        ["MODEL", "some/model"],
        ["drain-timeout", "30"],
        ["dtype", "automatic", "bfloat16"],
        ["max-model-len", "automatic", "8192"],
        ["nccl-port", "-"],
        ["port", "30000"],
        ["prefix-cache", "yes"],
        ["seed", "automatic", "random"],
        ["served-model-name", "automatic", "model"],
    ]
    data = json.loads(run("status", "--json").out)
    assert (data["instance"]["name"], data["instance"]["lost_replicas"]) == ("fake", [])
    assert data["replicas"][0]["processes"][0]["pid"] == 42
    options = data["replicas"][0]["options"]
    assert (options["port"], options["max-model-len"], options["served-model-name"]) == (30000, 8192, ["model"])
    assert data["replicas"][0]["chosen"] == ["dtype", "max-model-len", "seed", "served-model-name"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_shows_no_type_for_what_takes_no_value(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0
    assert "--help" in shown.output
    assert "<bool>" not in shown.output


# ---- the terminal --------------------------------------------------------------------------------------------------


def test_escapes_only_on_a_terminal_that_wants_them(fake: FakeInstance) -> None:
    fake.running = [request_info("a")]
    assert "\x1b[1m" in run("requests", terminal=True).out
    assert "\x1b" not in run("requests").out
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        result = run("requests", terminal=True, **plain)
        assert "\x1b" not in result.out + result.err


def test_watch_shows_it_again_until_it_is_ended(fake: FakeInstance, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal each time in the same place, off it one list after the other."""
    fake.running = [request_info("a")]
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("llmserve.cli.requests.time.sleep", nap)
    result = run("requests", "--watch", "--interval", "0.5", "--json")
    assert (result.code, naps) == (130, [0.5, 0.5, 0.5])
    assert [json.loads(line)[0]["rid"] for line in result.out.splitlines()] == ["a", "a", "a"]
    naps.clear()
    assert run("requests", "--watch", terminal=True).out.count("\x1b[H\x1b[2J") == 3


def test_columns_are_aligned_by_what_the_terminal_shows(fake: FakeInstance) -> None:
    fake.running = [request_info("漢字-😀"), request_info("ascii-7")]
    header, *rows = run("requests").out.splitlines()
    assert [set_cell_size(row, header.index("STATE")).rstrip() for row in rows] == ["漢字-😀", "ascii-7"]
    assert len({cell_len(row) for row in rows}) == 1


@pytest.mark.parametrize("arguments", [["requests"], ["requests", "--json"], ["ping", "-c", "2"]])
def test_a_terminal_without_the_characters_is_no_failure(fake: FakeInstance, arguments: list[str]) -> None:
    fake.running = [request_info("é-漢字-😀")]
    program = Path(sys.executable).with_name("llmserve")
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    if "--json" in arguments:
        assert json.loads(done.stdout)[0]["rid"] == "é-漢字-😀"


@pytest.mark.parametrize("command", [["config"], ["config", "--json"]])
def test_a_reader_that_leaves_early_is_no_error(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = Path(sys.executable).with_name("llmserve")
    done = subprocess.run([program, *command], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 0
