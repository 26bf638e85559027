"""What nobody should send, on every socket of a real instance: it lives, its memory stays flat, and it serves on."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from instances import PATIENCE_S, RunningInstance, launched, wait_until
from llmserve.runtime.client import RpcClient
from llmserve.runtime.messages import PROTOCOL_VERSION, PingReqInput, RpcEnvelope
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.wire import encode
from wire_attacks import bad_pickles, huge_frame, many_parts, one_frame, send_all, zmtp_connection

CHANNELS = {
    "scheduler_input_ipc_name": b"PUSH",
    "detokenizer_ipc_name": b"PUSH",
    "tokenizer_ipc_name": b"PUSH",
    "metrics_ipc_name": b"PUSH",
    "rpc_ipc_name": b"DEALER",
}
GROWTH = 150 << 20
"""Bytes that the instance's processes may take altogether while they are attacked."""


@pytest.fixture(scope="module")
def instance(runtime_root: Path, tiny_model: Path) -> Iterator[RunningInstance]:
    with launched(runtime_root, "attacked", str(tiny_model)) as instance:
        assert_serves(instance)
        yield instance


def assert_serves(instance: RunningInstance) -> None:
    with instance.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
    with RpcClient(f"ipc://{instance.directory}/rpc.sock", PATIENCE_S) as rpc:
        assert rpc.call(PingReqInput()).state == "ready"


def peaks(processes: list[psutil.Process]) -> int:
    """The largest resident sizes of processes since `reset_peaks`, in bytes."""
    lines = [line for process in processes for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def reset_peaks(processes: list[psutil.Process]) -> None:
    for process in processes:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


@pytest.fixture
def attack(instance: RunningInstance) -> Iterator[Callable[[str], str]]:
    """Gives a channel's address; afterwards the same processes must serve, and have stayed as small as they were."""
    processes = instance.processes()
    reset_peaks(processes)
    before = peaks(processes)
    ports = PortArgs.init_new(instance.directory)
    yield lambda channel: getattr(ports, channel)
    assert_serves(instance)
    assert instance.processes() == processes
    assert peaks(processes) - before < GROWTH


@pytest.mark.parametrize("channel", CHANNELS)
def test_bad_pickles(attack: Callable[[str], str], instance: RunningInstance, channel: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    address, frames = attack(channel), list(bad_pickles(str(canary)).values())
    frames += [envelope_of(frame) for frame in frames]  # the body of an envelope is decoded apart
    for frame in frames:
        with zmtp_connection(address, CHANNELS[channel]) as attacker:
            send_all(attacker, one_frame(frame))
    assert_serves(instance)
    told = f"bad frame dropped: socket={address} "
    wait_until(lambda: told in instance.log_text(), PATIENCE_S, "word of a bad frame")
    assert not canary.exists()


def envelope_of(body: bytes) -> bytes:
    return encode(RpcEnvelope(protocol=PROTOCOL_VERSION, call_id="attack", timeout_s=1.0, body=body))


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_frame_of_a_gigabyte(attack: Callable[[str], str], channel: str) -> None:
    with zmtp_connection(attack(channel), CHANNELS[channel]) as attacker:
        assert not send_all(attacker, huge_frame(1 << 30))


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_message_of_100_000_parts(attack: Callable[[str], str], channel: str) -> None:
    with zmtp_connection(attack(channel), CHANNELS[channel]) as attacker:
        assert send_all(attacker, many_parts(100_000))


@pytest.mark.parametrize("channel", CHANNELS)
def test_http_on_the_socket(attack: Callable[[str], str], channel: str) -> None:
    with socket.socket(socket.AF_UNIX) as attacker:
        attacker.connect(attack(channel).removeprefix("ipc://"))
        send_all(attacker, iter([b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("channel", CHANNELS)
def test_another_user(attack: Callable[[str], str], channel: str) -> None:
    address = attack(channel)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            zmtp_connection(address, CHANNELS[channel])
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
