"""A client that leaves has its request ended, streaming or not, and its memory is back within two steps."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from instances import PATIENCE_S, RunningInstance, wait_until
from llmserve.runtime.client import RpcClient
from llmserve.runtime.messages import (
    AbortReqInput,
    GetLoadReqInput,
    GetLoadReqOutput,
    ListRequestsReqInput,
    PingReqInput,
)

LONG = {"max_tokens": 5000, "ignore_eos": True}
TRIES = 20
"""So often at most a client leaves: steps that are made while we wait for a core look like those after its end."""
WAYS = [
    ("/v1/completions", {"prompt": "Once upon a time", **LONG}),
    ("/v1/completions", {"prompt": "Once upon a time", "stream": True, **LONG}),
    ("/v1/completions", {"prompt": ["Once", "Twice"], "n": 2, "stream": True, **LONG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a story"}], **LONG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a story"}], "stream": True, **LONG}),
    ("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}),
]


class Scheduler:
    """What the scheduler says of itself, asked directly: between two steps, so an answer is never older than one."""

    def __init__(self, instance: RunningInstance) -> None:
        self._instance = instance
        self._process = instance.child("scheduler")
        self._rpc = RpcClient(f"ipc://{instance.directory}/rpc.sock", timeout_s=PATIENCE_S)

    @property
    def load(self) -> GetLoadReqOutput:
        return self._rpc.call(GetLoadReqInput())

    @property
    def step(self) -> int:
        return self._rpc.call(PingReqInput()).step

    @property
    def idle(self) -> bool:
        load = self.load
        return not load.running and not load.waiting and not load.kv_tokens_used

    def make_steps(self, count: int) -> None:
        begun = self.step
        wait_until(lambda: self.step >= begun + count, PATIENCE_S, "steps")

    def steps_after_end_of(self, connection: socket.socket) -> int:
        """Closes a client's connection; the steps until the memory is back, from when the front knows of it.

        That may have to wait for a core, so the scheduler stands still meanwhile.
        """
        before = self.step
        self._process.suspend()
        try:
            connection.close()
            with self._instance.client() as http:
                for _ in range(3):
                    http.get("/health")  # it has looked at its connections by then
        finally:
            self._process.resume()
        wait_until(lambda: self.idle, PATIENCE_S, "the memory's return")
        return self.step - before

    def close(self) -> None:
        self._rpc.close()


@pytest.fixture(scope="module")
def scheduler(default_server: RunningInstance) -> Iterator[Scheduler]:
    scheduler = Scheduler(default_server)
    yield scheduler
    scheduler.close()


def ask(instance: RunningInstance, path: str, body: dict[str, object]) -> socket.socket:
    """Sends a request and returns its connection, of which nothing has been read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", instance.record["port"]))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize(("path", "body"), WAYS)
def test_memory_is_back_within_two_steps(
    default_server: RunningInstance, scheduler: Scheduler, path: str, body: dict[str, object]
) -> None:
    steps = []
    while len(steps) < TRIES and min(steps, default=TRIES) > 2:
        wait_until(lambda: scheduler.idle, PATIENCE_S, "the end of earlier work")
        connection = ask(default_server, path, body)
        wait_until(lambda: scheduler.load.running, PATIENCE_S, "the request's start")
        scheduler.make_steps(3)
        lines = default_server.log_text().count("\n")
        steps.append(scheduler.steps_after_end_of(connection))
    assert min(steps) <= 2
    ended = scheduler.step
    time.sleep(0.2)
    assert scheduler.step == ended, "nothing goes on decoding"
    assert default_server.log_text().count("\n") - lines <= 1


def test_many_streams_that_are_cut_leave_nothing(default_server: RunningInstance, scheduler: Scheduler) -> None:
    wait_until(lambda: scheduler.idle, PATIENCE_S, "the end of earlier work")
    connections = [ask(default_server, *WAYS[1]) for _ in range(12)]
    wait_until(lambda: scheduler.load.running == 12, PATIENCE_S, "all of them running")
    for connection in connections[::2]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # RST, not FIN
    for connection in connections:
        connection.close()
    wait_until(lambda: scheduler.idle, PATIENCE_S, "the memory's return")
    with default_server.client() as http:
        assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_embeddings_are_given_up_too(default_server: RunningInstance, scheduler: Scheduler) -> None:
    steps = []
    while len(steps) < TRIES and min(steps, default=TRIES) > 3:
        wait_until(lambda: scheduler.idle, PATIENCE_S, "the end of earlier work")
        connection = ask(default_server, "/v1/embeddings", {"input": [f"{n} word" * 90 for n in range(60)]})
        wait_until(lambda: not scheduler.idle, PATIENCE_S, "the request's start")
        steps.append(scheduler.steps_after_end_of(connection))
    assert min(steps) <= 3


def test_an_aborted_request_tells_its_client(default_server: RunningInstance, scheduler: Scheduler) -> None:
    """An operator's abort is an answer with what there is, and finish_reason "abort"."""
    wait_until(lambda: scheduler.idle, PATIENCE_S, "the end of earlier work")
    connection = ask(default_server, "/v1/completions", {**WAYS[0][1], "rid": "runaway", "user": "ann"})
    rpc = scheduler._rpc
    wait_until(lambda: scheduler.load.running, PATIENCE_S, "the request's start")
    (request,) = rpc.call(ListRequestsReqInput()).requests
    assert (request.rid, request.user) == ("runaway", "ann")
    assert rpc.call(AbortReqInput(rids=("runaway",))).aborted == ("runaway",)
    assert scheduler.idle, "an abort answers after the memory is back"
    answer = read_answer(connection)
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["id"] == "runaway"


def read_answer(connection: socket.socket) -> dict[str, object]:
    with connection, connection.makefile("rb") as stream:
        assert b" 200 " in stream.readline()
        length = 0
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        answer: dict[str, object] = json.loads(stream.read(length))
        return answer
