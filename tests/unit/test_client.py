"""The RPC client against a Router in a thread that answers as the test says."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from instances import fair_time
from llmserve.runtime.client import EXIT_CODES, AsyncRpcClient, RpcCallError, RpcClient
from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    ControlReqInput,
    FlushCacheReqInput,
    GetLoadReqInput,
    GetLoadReqOutput,
    Message,
    PingReqInput,
    PingReqOutput,
    RpcEnvelope,
    RpcError,
    RpcProgress,
)
from llmserve.runtime.wire import Poller, Router, decode, encode

PONG = PingReqOutput(step=7, state="ready")


class Server:
    """Answers each request with the messages that `answers` gives for it."""

    def __init__(self, address: str):
        self.address = address
        self.answers: Callable[[Message], Iterable[Message]] = lambda request: [PONG]
        self.protocol = PROTOCOL_VERSION
        self.call_id: str | None = None
        self.envelopes: list[RpcEnvelope] = []
        self.unsent = 0
        self._router = Router(address)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)  # a test that fails must not hang the rest
        self._thread.start()

    def _serve(self) -> None:
        poller = Poller(self._router)
        while not self._ended.is_set():
            poller.wait(0.02)
            while (request := self._router.recv()) is not None:
                client, envelope = request
                self.envelopes.append(envelope)
                for message in self.answers(decode(envelope.body, ControlReqInput)):
                    answer = msgspec.structs.replace(
                        envelope,
                        protocol=self.protocol,
                        call_id=self.call_id or envelope.call_id,
                        body=encode(message),
                    )
                    self.unsent += not self._router.send(client, answer)
        self._router.close()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(f"ipc://{tmp_path}/rpc.sock")
    yield server
    server.close()


def test_call_returns_the_answer_and_says_protocol_and_deadline(server: Server) -> None:
    with RpcClient(server.address) as client:
        assert client.call(PingReqInput(), timeout_s=33.0) == PONG
    [envelope] = server.envelopes
    assert (envelope.protocol, envelope.timeout_s) == (PROTOCOL_VERSION, 33.0)


def test_progress_comes_before_the_answer(server: Server) -> None:
    steps = [RpcProgress(stage="stage", done=float(done), total=2.0, unit="bytes") for done in range(3)]
    server.answers = lambda request: [*steps, PONG]
    seen: list[RpcProgress] = []
    with RpcClient(server.address) as client:
        assert client.call(PingReqInput(), on_progress=seen.append) == PONG
    assert seen == steps


@pytest.mark.parametrize(("code", "exit_code"), EXIT_CODES.items())
def test_an_error_is_typed_and_has_its_exit_code(server: Server, code: str, exit_code: int) -> None:
    server.answers = lambda request: [RpcError(code=code, message="3 running, 1 waiting")]  # type: ignore[arg-type]
    with RpcClient(server.address) as client, pytest.raises(RpcCallError, match="3 running, 1 waiting") as caught:
        client.call(FlushCacheReqInput())
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)


def test_another_protocol_exits_76_even_if_its_body_is_unknown(server: Server) -> None:
    server.protocol = PROTOCOL_VERSION + 1
    with RpcClient(server.address) as client, pytest.raises(RpcCallError, match="restart") as caught:
        client.call(PingReqInput())
    assert caught.value.exit_code == 76


def test_an_answer_of_another_verb_is_an_error(server: Server) -> None:
    server.answers = lambda request: [PONG]
    with RpcClient(server.address) as client, pytest.raises(RpcCallError, match="PingReqOutput") as caught:
        client.call(GetLoadReqInput())
    assert caught.value.code == "failed"


def test_an_answer_to_another_call_is_not_taken(server: Server) -> None:
    server.call_id = "another"
    with RpcClient(server.address) as client, pytest.raises(RpcCallError) as caught:
        client.call(PingReqInput(), timeout_s=0.2)
    assert caught.value.code == "timeout"


def test_silence_of_a_live_server_times_out_at_the_deadline(server: Server) -> None:
    server.answers = lambda request: []
    began, fair_began = time.monotonic(), fair_time()
    with RpcClient(server.address) as client, pytest.raises(RpcCallError, match=r"0\.7 s") as caught:
        client.call(PingReqInput(), timeout_s=0.7)
    assert caught.value.exit_code == 75
    assert time.monotonic() - began >= 0.7
    assert fair_time() - fair_began < 2.0


def test_a_server_that_has_spoken_may_say_why_it_is_late(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows only at the deadline, when the client has reached that too."""
    monkeypatch.setattr("llmserve.runtime.client.LAST_WORD_S", 20.0)

    def late(request: Message) -> Iterator[Message]:
        yield RpcProgress(stage="aborting")
        time.sleep(0.4)
        yield RpcError(code="timeout", message="a step takes long")

    server.answers = late
    with RpcClient(server.address) as client, pytest.raises(RpcCallError, match=r"^a step takes long$") as caught:
        client.call(PingReqInput(), timeout_s=0.2)
    assert caught.value.code == "timeout"


@pytest.mark.parametrize("socket_file_left", [False, True])
def test_a_dead_instance_is_noticed_at_once(tmp_path: Path, socket_file_left: bool) -> None:
    address = f"ipc://{tmp_path}/rpc.sock"
    if socket_file_left:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{tmp_path}/rpc.sock")
    began = fair_time()
    with RpcClient(address) as client, pytest.raises(RpcCallError) as caught:
        client.call(PingReqInput(), timeout_s=30.0)
    assert (caught.value.code, caught.value.exit_code) == ("unavailable", 69)
    assert fair_time() - began < 5.0


def test_a_death_during_the_call_is_noticed_before_the_deadline(tmp_path: Path) -> None:
    server = Server(f"ipc://{tmp_path}/rpc.sock")
    server.answers = lambda request: []
    threading.Timer(0.3, server.close).start()
    began = fair_time()
    with RpcClient(server.address) as client, pytest.raises(RpcCallError) as caught:
        client.call(PingReqInput(), timeout_s=30.0)
    assert caught.value.code == "unavailable"
    assert fair_time() - began < 5.0


def test_a_client_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    with RpcClient(f"ipc://{tmp_path}/rpc.sock") as client:
        for step in range(2):
            server = Server(client.address)
            server.answers = lambda request, step=step: [PingReqOutput(step=step, state="ready")]  # type: ignore[misc]
            try:
                assert client.call(PingReqInput()).step == step
            finally:
                server.close()


async def test_async_calls_do_not_wait_for_each_other(server: Server) -> None:
    load = GetLoadReqOutput(
        state="ready", running=0, waiting=0, kv_tokens_used=0, kv_tokens_cached=0, kv_tokens_total=0
    )
    server.answers = lambda request: [PONG] if isinstance(request, PingReqInput) else []
    client = AsyncRpcClient(server.address)
    hanging = asyncio.create_task(client.call(FlushCacheReqInput(), timeout_s=30.0))
    assert await asyncio.gather(*(client.call(PingReqInput()) for _ in range(20))) == [PONG] * 20
    assert not hanging.done()
    server.answers = lambda request: [load]
    assert await client.call(GetLoadReqInput()) == load
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    client.close()


async def test_async_errors_and_deadlines_are_the_same(server: Server, tmp_path: Path) -> None:
    client = AsyncRpcClient(server.address)
    server.answers = lambda request: [RpcProgress(stage="waiting"), RpcError(code="busy", message="1 running")]
    seen: list[RpcProgress] = []
    with pytest.raises(RpcCallError, match="1 running"):
        await client.call(FlushCacheReqInput(), on_progress=seen.append)
    assert seen == [RpcProgress(stage="waiting")]
    server.answers = lambda request: []
    with pytest.raises(RpcCallError) as caught:
        await client.call(PingReqInput(), timeout_s=0.2)
    assert caught.value.code == "timeout"
    client.close()


def test_a_caller_that_left_is_seen_by_the_server(server: Server) -> None:
    def answer_until_nobody_hears(request: Message) -> Iterator[Message]:
        for _ in range(1000):
            if server.unsent:
                return
            yield RpcProgress(stage="waiting")
            time.sleep(0.01)

    server.answers = answer_until_nobody_hears
    with RpcClient(server.address) as client, pytest.raises(RpcCallError):
        client.call(PingReqInput(), timeout_s=0.1)
    server.answers = lambda request: [PONG]
    with RpcClient(server.address) as client:
        assert client.call(PingReqInput()) == PONG
    assert server.unsent == 1
