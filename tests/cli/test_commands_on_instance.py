"""The commands against a real instance, each run as a user runs it: a process with a terminal or a pipe."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pexpect
import psutil
import pytest

from instances import (
    FOREVER,
    LLMSERVE,
    PATIENCE_S,
    PATIENT,
    RunningInstance,
    environment_for,
    hang_up,
    launched,
    run_cli,
    wait_until,
)
from llmserve.runtime.client import RpcClient
from llmserve.runtime.messages import ListRequestsReqInput

POOL_TOKENS = 1 << 17


@pytest.fixture(scope="module")
def op(runtime_root: Path, long_model: Path) -> Iterator[RunningInstance]:
    with launched(runtime_root, "op", str(long_model), "--max-total-tokens", str(POOL_TOKENS)) as instance:
        yield instance


@pytest.fixture
def cli(op: RunningInstance) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command on the instance `op`."""
    return lambda *arguments, **more: run_cli(op.root, *arguments, LLMSERVE_INSTANCE="op", **more)


@pytest.fixture
def running(op: RunningInstance) -> Iterator[Callable[[str], "Client"]]:
    """Starts a long request by its rid; all are ended after the test."""
    clients = []

    def start(rid: str, tokens: int = FOREVER) -> Client:
        clients.append(Client(op, rid, tokens))
        wait_until(lambda: rid in rids(op), PATIENCE_S, f"{rid} is under way")
        return clients[-1]

    yield start
    run_cli(op.root, "abort", "--all", "--yes", "-i", "op")
    for client in clients:
        client.join()


class Client(threading.Thread):
    """A client that waits for one long answer."""

    def __init__(self, instance: RunningInstance, rid: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self._instance = instance
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self._body = {"rid": rid, "text": "Once upon a time", "sampling_params": params}
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        with self._instance.client() as client:
            self.answer = client.post("/generate", json=self._body)


def rids(op: RunningInstance) -> list[str]:
    """Of what generates."""
    with RpcClient(op.record["rpc_addresses"][0], PATIENCE_S) as client:
        return [info.rid for info in client.call(ListRequestsReqInput()).requests if info.state == "decode"]


# ---- looking -------------------------------------------------------------------------------------------------------


def test_ping_status_and_ps_agree(op: RunningInstance, cli: Any) -> None:
    assert re.fullmatch(r"PONG \d+\.\d\d ms \(ready, step \d+\)\n", cli("ping").stdout)
    status = json.loads(cli("status", "--json").stdout)
    (replica,) = status["replicas"]
    assert status["instance"]["pid"] == op.process.pid
    assert replica["kv_tokens_total"] == POOL_TOKENS
    assert replica["options"]["max-total-tokens"] == POOL_TOKENS
    assert replica["options"]["device"] in ("cpu", "cuda")
    assert replica["options"]["dtype"] == "float32"
    assert {"device", "dtype", "max-model-len", "load-format"} <= set(replica["chosen"])
    assert "max-total-tokens" not in replica["chosen"]
    assert {process["role"] for process in replica["processes"]} == {"main", "scheduler", "detokenizer"}
    assert all(psutil.pid_exists(process["pid"]) for process in replica["processes"])
    listed = json.loads(run_cli(op.root, "ps", "--json", *PATIENT).stdout)
    (line,) = [line for line in listed if line["name"] == "op"]
    assert (line["pid"], line["state"], line["running"]) == (op.process.pid, "ready", 0)


def test_requests_shows_what_runs(cli: Any, running: Any) -> None:
    running("seen-1")
    (request,) = json.loads(cli("requests", "--json", "--show-text").stdout)
    assert (request["rid"], request["state"], request["max_new_tokens"]) == ("seen-1", "decode", FOREVER)
    assert request["text"] == "Once upon a time"
    assert request["output_tokens"] > 0
    assert "seen-1" in cli("requests").stdout


def test_top_once_sees_the_load(cli: Any, running: Any) -> None:
    running("busy")
    data: dict[str, Any] = {}

    def sees_tokens() -> bool:
        data.update(json.loads(cli("top", "--once", "--json", *PATIENT).stdout))
        return bool(data["load"]["decode_tokens_per_s"])

    wait_until(sees_tokens, PATIENCE_S, "a step between two samples")
    assert data["state"] == "ready"
    assert data["load"]["running"] == 1
    assert [request["rid"] for request in data["requests"]] == ["busy"]
    assert {process["role"] for process in data["processes"]} >= {"main", "scheduler"}


def test_top_aborts_from_the_screen(op: RunningInstance, running: Any) -> None:
    client = running("runaway")
    env = environment_for(op.root, TERM="xterm-256color", LANG="C.UTF-8")
    screen = pexpect.spawn(
        LLMSERVE, ["top", "-i", "op"], env=env, dimensions=(24, 80), encoding="utf-8", timeout=PATIENCE_S
    )
    try:
        screen.expect("▸ runaway")
        screen.send("a")
        screen.expect("abort 1 request: .*runaway")
        screen.send("y")
        screen.expect("aborted 1 request")
        client.join(PATIENCE_S)
        assert client.answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        screen.send("q")
        screen.expect(pexpect.EOF)
    finally:
        hang_up(screen)


# ---- acting --------------------------------------------------------------------------------------------------------


def test_abort_by_rid(cli: Any, running: Any) -> None:
    client = running("one")
    running("one0")  # a rid matches exactly
    done = cli("abort", "one", "unknown")
    assert (done.returncode, done.stdout.split()) == (3, ["RID", "RESULT", "one", "aborted", "unknown", "not", "found"])
    client.join(PATIENCE_S)
    assert client.answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert cli("abort", "one").returncode == 3
    assert json.loads(cli("requests", "--json").stdout)[0]["rid"] == "one0"


def test_abort_in_bulk(cli: Any, running: Any) -> None:
    for rid in ("batch-1", "batch-2", "other"):
        running(rid)
    assert cli("abort", "--prefix", "batch-").returncode == 2  # off a terminal it needs --yes
    assert cli("abort", "--prefix", "batch-", "--yes", "--json").returncode == 0
    assert [request["rid"] for request in json.loads(cli("requests", "--json").stdout)] == ["other"]
    assert cli("abort", "--older-than", "1h", "--yes").stdout == "no request to abort\n"
    assert cli("abort", "--all", "--yes").stdout.split() == ["RID", "RESULT", "other", "aborted"]


def test_flush_is_refused_while_busy_and_reports_what_it_freed(cli: Any, running: Any) -> None:
    client = running("busy")
    refused = cli("flush-cache")
    assert refused.returncode == 75
    assert "1 running, 0 waiting" in refused.stderr
    cli("abort", "busy")
    client.join(PATIENCE_S)
    pages = json.loads(cli("flush-cache", "--json").stdout)["pages_freed"]
    assert pages > 0
    assert cli("flush-cache").stdout == "flushed 0 pages (0 B)\n"


def test_pause_stops_the_tokens_and_resume_goes_on(cli: Any, running: Any) -> None:
    client = running("held")

    def tokens() -> int:
        return int(json.loads(cli("requests", "--json").stdout)[0]["output_tokens"])

    assert cli("pause", "--mode", "retract").stdout == "paused, 1 retracted\n"
    assert cli("ping").stdout.strip().endswith(")")
    assert "paused" in cli("ping").stdout
    before = tokens()
    time.sleep(0.3)
    assert tokens() == before
    assert cli("resume").returncode == 0
    wait_until(lambda: tokens() > before, PATIENCE_S, "it goes on")
    assert client.answer is None


def test_everything_works_while_the_front_is_wedged(op: RunningInstance, cli: Any, running: Any) -> None:
    """What the operators' commands are for: they go to the scheduler, whatever the process with the HTTP port does."""
    for rid in ("stuck-1", "stuck-2"):
        running(rid)
    op.process.send_signal(signal.SIGSTOP)
    try:
        assert cli("ping").returncode == cli("status").returncode == 0
        assert {request["rid"] for request in json.loads(cli("requests", "--json").stdout)} == {"stuck-1", "stuck-2"}
        assert json.loads(cli("top", "--once", "--json").stdout)["load"]["running"] == 2
        assert json.loads(cli("abort", "stuck-1", "--json").stdout)["aborted"] == ["stuck-1"]
        assert cli("pause").stdout == "paused, 1 retracted\n"
        assert cli("resume").returncode == 0
        flushed = json.loads(cli("flush-cache", "--abort", "--yes", "--json").stdout)
        assert flushed["aborted"] == ["stuck-2"]
        generated = cli("generate", "x", "--timeout", "0.5")
        assert (generated.returncode, generated.stdout) == (75, "")
        assert "no token came for 0.5 s" in generated.stderr
    finally:
        op.process.send_signal(signal.SIGCONT)
    assert cli("generate", "x", "--max-tokens", "1").returncode == 0


def test_a_scheduler_that_hangs_is_said_to_be_silent(op: RunningInstance, cli: Any) -> None:
    scheduler = op.child("scheduler")
    scheduler.suspend()
    try:
        for command in ("requests", "flush-cache", "pause", "top --once"):
            done = cli(*command.split(), "--timeout", "0.3")
            assert (done.returncode, done.stdout) == (75, "")
            assert "0.3 s" in done.stderr
            assert command == "top --once" or f"its scheduler process {scheduler.pid} is stopped" in done.stderr
        listed = json.loads(cli("ps", "--json").stdout)
        assert [line["state"] for line in listed if line["name"] == "op"] == ["silent"]
    finally:
        scheduler.resume()
    wait_until(lambda: cli("ping").returncode == 0, PATIENCE_S, "it to go on")
    cli("resume")  # the pause had been heard


@pytest.mark.parametrize("role", ["main", "detokenizer"])
def test_a_process_that_is_stopped_is_said_to_be(op: RunningInstance, cli: Any, role: str) -> None:
    """Also where the scheduler goes on and answers: the main process and the detokenizer."""
    process = op.child(role) if role != "main" else psutil.Process(op.process.pid)
    fault = f"its {role} process {process.pid} is stopped"
    process.suspend()
    try:
        assert [line["state"] for line in json.loads(cli("ps", "--json").stdout) if line["name"] == "op"] == ["silent"]
        assert re.search(rf"^state +silent \({fault}\), up ", cli("status").stdout, re.MULTILINE)
        assert json.loads(cli("status", "--json").stdout)["instance"]["state"] == "silent"
        shown = json.loads(cli("top", "--once", "--json").stdout)
        assert (shown["state"], shown["reason"]) == ("stalled", fault)
    finally:
        process.resume()
    listed = json.loads(cli("ps", "--json", *PATIENT).stdout)
    assert [line["state"] for line in listed if line["name"] == "op"] == ["ready"]
    assert json.loads(cli("status", "--json").stdout)["instance"]["state"] == "ready"


def test_update_weights(op: RunningInstance, cli: Any, long_model: Path, tmp_path: Path) -> None:
    """To the same weights: the version counts, the text stays. Something else is refused with the differences."""
    copy = tmp_path / "copy"
    shutil.copytree(long_model, copy)
    prompt = ("generate", "Once upon a time", "--max-tokens", "8", "-t", "0")
    before = cli(*prompt).stdout
    version = json.loads(cli("status", "--json").stdout)["replicas"][0]["weight_version"]
    assert cli("update-weights", str(copy), "--dry-run").stdout == f"{copy} would be accepted\n"
    done = cli("update-weights", str(copy))
    assert done.returncode == 0, done.stderr
    assert f"weights {version} -> {version + 1}: " in done.stdout
    assert cli(*prompt).stdout == before
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    refused = cli("update-weights", str(copy))
    assert refused.returncode != 0
    assert cli(*prompt).stdout == before


# ---- using ---------------------------------------------------------------------------------------------------------


def test_generate_and_chat_in_pipes(op: RunningInstance, cli: Any) -> None:
    once = cli("generate", "Once upon a time", "--max-tokens", "8", "-t", "0", "--json")
    data = json.loads(once.stdout)
    assert (data["finish_reason"], data["usage"]["completion_tokens"]) == ("length", 8)
    again = subprocess.run(
        [LLMSERVE, "generate", "-", "--max-tokens", "8", "-t", "0", "-i", "op"],
        input="Once upon a time",
        env=environment_for(op.root),
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.rstrip("\n") == data["text"].rstrip("\n")
    assert cli("chat", "Hello", "--system", "Be brief.", "--max-tokens", "4").returncode == 0


def test_ctrl_c_aborts_the_request_in_the_server(op: RunningInstance) -> None:
    command = [LLMSERVE, "generate", "Once upon a time", "--max-tokens", str(FOREVER), "-t", "0", "-i", "op"]
    process = subprocess.Popen(command, env=environment_for(op.root), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    assert len(rids(op)) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    process.stdout.close()
    wait_until(lambda: not rids(op), PATIENCE_S, "the request is gone")


# ---- whole lives ---------------------------------------------------------------------------------------------------


def test_a_detached_instance_is_configured_logged_restarted_and_stopped(own_root: Path, tiny_model: Path) -> None:
    file = own_root / "config.toml"
    file.write_text(f'model = "{tiny_model}"\nname = "filed"\nport = 0\nmax-total-tokens = 4096\n')
    key = {"LLMSERVE_API_KEY": "a-key"}
    started = run_cli(own_root, "launch", "--config", str(file), "--detach", **key)
    assert started.returncode == 0, started.stderr
    try:
        url = started.stdout.strip()
        first = json.loads(run_cli(own_root, "status", "--json").stdout)
        assert first["instance"]["name"] == "filed"
        assert first["replicas"][0]["kv_tokens_total"] == 4096
        assert "ready" in run_cli(own_root, "logs").stdout
        checks = {f["check"]: f for f in json.loads(run_cli(own_root, "doctor", "--json", *PATIENT).stdout)}
        assert checks["pool"]["status"] == "ok"
        assert checks["stale"]["status"] == "ok"

        restarted = run_cli(own_root, "restart")
        assert restarted.returncode == 0, restarted.stderr
        assert restarted.stdout.strip() == url
        again = json.loads(run_cli(own_root, "restart", "--now", "--json").stdout)
        assert (again["instance"], again["address"]) == ("filed", url)
        second = json.loads(run_cli(own_root, "status", "--json").stdout)
        assert second["instance"]["pid"] == again["pid"] != first["instance"]["pid"]
        assert second["replicas"][0]["kv_tokens_total"] == 4096
        assert httpx.get(f"{url}/v1/models").status_code == 401  # it still has its key
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer a-key"}).status_code == 200
    finally:
        stopped = run_cli(own_root, "stop", "--now", "--json")
    assert stopped.returncode == 0
    ended = json.loads(stopped.stdout)
    assert (ended["instance"], ended["pid"]) == ("filed", second["instance"]["pid"])
    assert ended["seconds"] > 0
    assert run_cli(own_root, "ps", "--json").stdout.strip() == "[]"


def test_drain_refuses_new_requests_and_waits_for_the_others(own_root: Path, tiny_model: Path) -> None:
    with launched(own_root, "drained", str(tiny_model)) as instance:
        client = Client(instance, "last", 100)
        client.join(PATIENCE_S)
        assert run_cli(own_root, "drain").stdout == "drained\n"
        refused = run_cli(own_root, "generate", "x", "--max-tokens", "1")
        assert refused.returncode == 69
        assert refused.stderr
        assert "draining" in run_cli(own_root, "ping").stdout
        wait_until(lambda: instance.record["state"] == "draining", PATIENCE_S, "the registry to know")
        (line,) = json.loads(run_cli(own_root, "ps", "--json", *PATIENT).stdout)
        assert line["state"] == "draining"
        assert run_cli(own_root, "resume").returncode == 0
        with instance.client() as client:
            wait_until(lambda: client.get("/health").status_code == 200, PATIENCE_S, "the front to open again")
        assert instance.record["state"] == "ready"
        assert run_cli(own_root, "generate", "x", "--max-tokens", "1").returncode == 0


def test_a_killed_instance_is_found_and_swept(own_root: Path, tiny_model: Path) -> None:
    with launched(own_root, "killed", str(tiny_model)) as instance:
        os.kill(instance.process.pid, signal.SIGKILL)
        instance.process.wait()
        assert run_cli(own_root, "ping", "-i", "killed").returncode == 69
        found = json.loads(run_cli(own_root, "doctor", "--json").stdout)
        assert [f["status"] for f in found if f["check"] == "stale"] == ["warning"]
        run_cli(own_root, "doctor", "--fix")
        assert not instance.directory.exists()
