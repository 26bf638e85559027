"""Two nodes on one machine: network namespaces joined by a pair of virtual interfaces."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from instances import LLMSERVE, PATIENCE_S, RunningInstance, assert_gone, environment_for, run_cli, wait_until

PORT = 29400
ADDRESSES = ("10.213.7.1", "10.213.7.2")
OPTIONS = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"{ADDRESSES[0]}:{PORT}", "--threads", "1")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip())


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces that see each other."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the ip command and root")
    tag = secrets.token_hex(3)
    names = (f"llms{tag}a", f"llms{tag}b")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", f"v{tag}a", "netns", names[0], "type", "veth", "peer", f"v{tag}b", "netns", names[1])
        for name, end, address in zip(names, "ab", ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", f"v{tag}{end}")
            run("ip", "-n", name, "link", "set", f"v{tag}{end}", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
    except OSError as error:
        remove(names)
        pytest.skip(f"network namespaces are not allowed here: {error}")
    yield names
    remove(names)


def remove(names: tuple[str, str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            run("ip", "netns", "del", name)


def launch(root: Path, namespace: str, rank: int, model: Path, *options: str) -> RunningInstance:
    name = f"node{rank}"
    log = root / f"{name}.log"
    arguments = ["launch", str(model), "--name", name, "--node-rank", str(rank), "--port", "0", *OPTIONS, *options]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, LLMSERVE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment_for(root),
            start_new_session=True,
        )
    return RunningInstance(root, name, process, log)


def complete(namespace: str, instance: RunningInstance) -> str:
    """From inside the node: its loopback is not ours."""
    body = json.dumps({"prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True})
    curl = ["curl", "-s", "-H", "Content-Type: application/json", "-d", body, f"{instance.url}/v1/completions"]
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, *curl],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return str(json.loads(done.stdout)["choices"][0]["text"])


def test_a_model_over_two_nodes_serves_until_one_dies(
    nodes: tuple[str, str], own_root: Path, tiny_model: Path, server: RunningInstance
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl to ask a node from inside")
    first, second = (launch(own_root, node, rank, tiny_model) for rank, node in enumerate(nodes))
    try:
        first.wait_ready()
        second.wait_ready()
        alone = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True},
            timeout=PATIENCE_S,
        )
        assert complete(nodes[0], first) == alone.json()["choices"][0]["text"]
        (replica,) = json.loads(run_cli(own_root, "status", "--instance", "node0", "--json").stdout)["replicas"]
        ranks = [process for process in replica["processes"] if process["role"] == "scheduler"]
        assert [rank["tp_rank"] for rank in ranks] == [0, 1]
        assert ranks[1]["pid"] in {child.pid for child in psutil.Process(second.process.pid).children()}
        assert listeners(nodes[0]) == {ADDRESSES[0]}, "the ranks' sockets are on the interface between the nodes alone"
        processes = [*first.processes(), *second.processes()]
        second.process.kill()
        assert first.wait_ended(5) == 1
        assert "lost the scheduler-dp0-pp0-tp1 on node 1" in first.log_text().splitlines()[-1]
        assert_gone(processes, 5)
    finally:
        kill(first, second)


def kill(*instances: RunningInstance) -> None:
    for instance in instances:
        if instance.process.poll() is None:
            instance.process.kill()
            instance.process.wait()


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        (signal.SIGTERM, 0, "the first node was stopped"),
        (signal.SIGKILL, 1, "lost the scheduler-dp0-pp0-tp0 on node 0"),
    ],
)
def test_the_other_node_knows_whether_the_first_was_stopped(
    nodes: tuple[str, str], own_root: Path, tiny_model: Path, how: signal.Signals, code: int, last: str
) -> None:
    first, second = (launch(own_root, node, rank, tiny_model) for rank, node in enumerate(nodes))
    try:
        first.wait_ready()
        second.wait_ready()
        processes = [*first.processes(), *second.processes()]
        first.process.send_signal(how)
        assert second.wait_ended(5) == code
        assert last in second.log_text()
        assert first.wait_ended(5) == (0 if code == 0 else -signal.SIGKILL)
        assert_gone(processes, 5)
    finally:
        kill(first, second)


def test_the_other_node_knows_that_the_first_was_stopped_while_loading(
    nodes: tuple[str, str], own_root: Path, tiny_model: Path
) -> None:
    """Nobody gets on as one rank stands still; another one of its node is there to hear."""
    four = ("--tp-size", "4")
    first, second = (launch(own_root, node, rank, tiny_model, *four) for rank, node in enumerate(nodes))
    try:
        wait_until(
            lambda: len(psutil.Process(second.process.pid).children()) == 2, PATIENCE_S, "the start of its ranks"
        )
        second.child("scheduler-dp0-pp0-tp3").suspend()
        wait_until(lambda: connections(nodes[1]) >= 2, PATIENCE_S, "that the other rank has found the first one's")
        processes = [*first.processes(), *second.processes()]
        first.process.terminate()
        assert second.wait_ended(5) == 0
        assert "the first node was stopped" in second.log_text()
        assert first.wait_ended(5) == 128 + signal.SIGTERM
        assert_gone(processes, 5)
    finally:
        kill(first, second)


def listeners(namespace: str) -> set[str]:
    """The addresses on which somebody listens in a node, but for the HTTP front on its loopback."""
    found = set()
    for local in sockets(namespace, "0A"):
        raw = bytes.fromhex(local.split(":")[0])
        found.add(".".join(str(byte) for byte in reversed(raw)) if len(raw) == 4 else raw.hex())
    return found - {"127.0.0.1"}


def connections(namespace: str) -> int:
    """How many ends of connections there are in a node."""
    return len(sockets(namespace, "01"))


def sockets(namespace: str, state: str) -> list[str]:
    """The local addresses of a node's TCP sockets in a state, as the kernel writes them."""
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return [fields[1] for fields in lines if len(fields) > 3 and fields[3] == state]


def test_nodes_that_differ_do_not_serve(nodes: tuple[str, str], own_root: Path, tiny_model: Path) -> None:
    first = launch(own_root, nodes[0], 0, tiny_model)
    second = launch(own_root, nodes[1], 1, tiny_model, "--page-size", "32")
    for instance in (first, second):
        assert instance.wait_ended(PATIENCE_S) == 78
        assert "the nodes differ" in instance.log_text().splitlines()[-1]
    wait_until(lambda: not first.directory.exists(), 5, "the end of the directory")
