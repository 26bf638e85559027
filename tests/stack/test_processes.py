"""What an instance is made of: its processes and their memory, its directory, its port and its name, its keys."""

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from instances import PATIENCE_S, RunningInstance, fair_time, launched, run_cli, wait_until

API_KEY, ADMIN_KEY = "sk-api-4711", "sk-admin-0815"
MIB = 2**20


def test_the_directory_is_private_and_so_are_the_sockets(server: RunningInstance) -> None:
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    sockets = {path.name: path for path in server.directory.glob("*.sock")}
    assert set(sockets) == {"tokenizer.sock", "scheduler.sock", "detokenizer.sock", "rpc.sock", "metrics.sock"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets.values()} == {0o600}


def test_children_are_in_groups_of_their_own(server: RunningInstance) -> None:
    """So that a terminal's Ctrl-C reaches only the main process."""
    main, *children = server.processes()
    assert len(children) == 2
    groups = {
        int((Path("/proc") / str(child.pid) / "stat").read_text().rpartition(")")[2].split()[2]) for child in children
    }
    assert groups == {child.pid for child in children}
    assert main.pid not in groups


def test_clients_are_not_limited_by_the_habitual_1024_files(server: RunningInstance) -> None:
    soft, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft >= min(hard, 65536)


def test_a_second_launch_under_the_name_is_refused(server: RunningInstance, tiny_model: Path) -> None:
    began = fair_time()
    second = run_cli(server.root, "launch", str(tiny_model), "--name", server.name, "--port", "0")
    assert fair_time() - began < 5
    assert second.returncode == 1
    assert "started child" not in second.stderr
    assert f'instance "{server.name}" is running (pid {server.process.pid}' in second.stderr.splitlines()[-1]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.record["state"] == "ready"


def test_a_port_in_use_is_found_at_once(server: RunningInstance, own_root: Path, tiny_model: Path) -> None:
    """Before the weights load, and with the name of an instance that has it."""
    port = server.record["port"]
    began = fair_time()
    second = run_cli(server.root, "launch", str(tiny_model), "--name", "other", "--port", str(port))
    assert fair_time() - began < 5
    assert second.returncode == 78
    prefix = f'llmserve: port {port} is in use by pid {server.process.pid} (llmserve "{server.name}"); try --port '
    assert second.stderr.startswith(prefix)
    free = int(second.stderr.removeprefix(prefix))
    assert port < free <= port + 100
    socket.create_server(("127.0.0.1", free)).close()
    assert not (server.root / "llmserve" / "other").exists()


def test_a_port_in_use_by_another_program(own_root: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        second = run_cli(own_root, "launch", str(tiny_model), "--port", str(port))
    assert second.returncode == 78
    me = psutil.Process()
    assert second.stderr.startswith(f"llmserve: port {port} is in use by pid {me.pid} ({me.name()}); try --port ")


def test_an_address_that_is_not_ours(own_root: Path, tiny_model: Path) -> None:
    refused = run_cli(own_root, "launch", str(tiny_model), "--host", "192.0.2.1")
    assert refused.returncode == 78
    assert refused.stderr.splitlines()[-1].startswith("llmserve: cannot listen on 192.0.2.1 port 30000: ")
    refused = run_cli(own_root, "launch", str(tiny_model), "--host", "no.such.host.invalid")
    assert refused.returncode == 78
    assert refused.stderr.splitlines()[-1].startswith("llmserve: --host no.such.host.invalid: ")


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_directory_that_is_not_private_is_refused(
    own_root: Path, tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    root = own_root / "llmserve"
    if kind == "open":
        root.mkdir()
        root.chmod(0o755)  # whatever the umask is
    elif kind == "link":
        tmp_path.chmod(0o700)
        root.symlink_to(tmp_path)
    else:
        root.touch()
    began = fair_time()
    refused = run_cli(own_root, "launch", str(tiny_model), "--port", "0")
    assert fair_time() - began < 5
    assert refused.returncode == 77
    assert str(root) in refused.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def keyed(runtime_root: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningInstance]:
    """An instance with both keys, one from a variable and one from a file, whose metrics need none."""
    file = tmp_path_factory.mktemp("keys") / "admin.key"
    file.write_text(ADMIN_KEY + "\n")
    file.chmod(0o600)
    options = (str(tiny_model), "--admin-api-key-file", str(file), "--no-metrics-auth", "--log-level", "debug")
    with launched(runtime_root, "keyed", *options, LLMSERVE_API_KEY=API_KEY) as instance:
        yield instance


def test_the_keys_are_asked_for(keyed: RunningInstance) -> None:
    request = {"prompt": "Once", "max_tokens": 1}
    assert keyed.client().post("/v1/completions", json=request).status_code == 401
    headers = {"Authorization": f"Bearer {API_KEY}"}
    assert keyed.client(headers=headers).post("/v1/completions", json=request).status_code == 200


def test_the_log_level_is_that_of_all_processes(keyed: RunningInstance) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, "rid": "mine", "user": "ann"}
    assert keyed.client(headers=headers).post("/v1/completions", json=body).status_code == 200
    told = " debug scheduler: request ended rid=mine index=0 reason=length prompt=3 cached=0 output=2 user='ann'\n"
    wait_until(lambda: told in keyed.log_text(), PATIENCE_S, "a line of the scheduler")


def test_metrics_are_scraped_without_a_key_where_so_configured(keyed: RunningInstance) -> None:
    """test_http_service.py has the default: they need one."""
    response = keyed.client().get("/metrics")
    assert response.status_code == 200
    assert "llmserve_num_requests_running" in response.text


def test_keys_show_nowhere(keyed: RunningInstance) -> None:
    """Not in logs, process titles, a child's environment, the server's info, the registry, or what commands print."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    keyed.client(headers={"Authorization": f"Bearer {ADMIN_KEY}x"}).get("/v1/models")
    places = {"log": keyed.log_text(), "registry": (keyed.directory / "instance.json").read_text()}
    main, *children = keyed.processes()
    for process in (main, *children):
        places[f"title of {process.pid}"] = " ".join(process.cmdline()) + process.name()
    for child in children:
        places[f"environment of {child.pid}"] = str(child.environ())
    info = keyed.client(headers=headers).get("/server_info")
    assert info.status_code == 200
    places["server info"] = info.text
    for command in (("ps", "--json"), ("status", "--instance", "keyed", "--json")):
        shown = run_cli(keyed.root, *command)
        assert shown.returncode == 0, shown.stderr
        places[command[0]] = shown.stdout
    assert [place for place, text in places.items() if API_KEY in text or ADMIN_KEY in text] == []


def test_the_default_model_starts_fast_and_small(own_root: Path, tmp_path: Path) -> None:
    """From an empty cache in 10 s and again in 5 s; no torch outside the scheduler; memory, with a KV pool of 23 MB."""
    for limit in (10, 5):
        began = fair_time()
        with launched(own_root, "fresh", "--max-total-tokens", "1024", XDG_CACHE_HOME=str(tmp_path)) as instance:
            assert fair_time() - began < limit
            request = {"prompt": "The capital of France is", "max_tokens": 32, "n": 8}
            assert instance.client().post("/v1/completions", json=request).status_code == 200
            main, scheduler, detokenizer = (
                psutil.Process(instance.process.pid),
                instance.child("scheduler"),
                instance.child("detokenizer"),
            )
            assert "libtorch" in maps(scheduler)
            for process in (main, detokenizer):
                assert "libtorch" not in maps(process)
                assert process.memory_info().rss < 250 * MIB
            assert sum(process.memory_info().rss for process in instance.processes()) < 1600 * MIB


def maps(process: psutil.Process) -> str:
    """The files that are mapped into a process."""
    return Path(f"/proc/{process.pid}/maps").read_text()
