"""A scheduler over a fake worker, and operators who call it without sockets."""

import itertools
from collections import deque
from pathlib import Path

import msgspec
from scheduler_harness import GREEDY, Harness

from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    ControlReqInput,
    Message,
    RpcEnvelope,
    RpcError,
    RpcOutput,
    RpcProgress,
)
from llmserve.runtime.scheduler.control import Verbs
from llmserve.runtime.scheduler.rpc import RpcServer
from llmserve.runtime.watchers import Watchers
from llmserve.runtime.wire import decode, encode

LONG = msgspec.structs.replace(GREEDY, max_new_tokens=40)


class Transport:
    """A ROUTER without sockets. Clients in `gone` have disconnected."""

    def __init__(self) -> None:
        self.calls: deque[tuple[bytes, RpcEnvelope]] = deque()
        self.sent: list[tuple[bytes, RpcEnvelope]] = []
        self.gone: set[bytes] = set()

    def recv(self) -> tuple[bytes, RpcEnvelope] | None:
        return self.calls.popleft() if self.calls else None

    def send(self, client: bytes, envelope: RpcEnvelope) -> bool:
        if client in self.gone:
            return False
        self.sent.append((client, envelope))
        return True


class Operated(Harness):
    """A scheduler and those who ask it. Each call has a client of its own."""

    def __init__(self, directory: Path = Path("/nonexistent"), **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self.transport = Transport()
        self.replies: list[Message] = []
        self.forwarded: list[Message] = []
        self.preempted = 0.0
        """Seconds of the clock in which other programs had the core."""
        self.watchers = Watchers(directory, now=lambda: self.clock)
        self.control = Verbs(self.scheduler, "/models/fake", self.watchers, self.forwarded.append)
        self.scheduler.control = self.server = RpcServer(
            self.transport,
            self.control.start,
            self.replies.append,
            busy=lambda: not self.scheduler.quiet,
            in_step_s=lambda: self.scheduler.in_step_s,
            now=lambda: self.clock,
            cpu_time=lambda: self.clock - self.preempted,
        )
        self._clients = itertools.count()

    def call(self, request: ControlReqInput, timeout_s: float = 1000.0, protocol: int = PROTOCOL_VERSION) -> bytes:
        """Puts a call into the socket and returns its client."""
        return self.call_body(encode(request), timeout_s, protocol)

    def call_body(self, body: bytes, timeout_s: float = 1000.0, protocol: int = PROTOCOL_VERSION) -> bytes:
        client = str(next(self._clients)).encode()
        envelope = RpcEnvelope(protocol=protocol, call_id=client.decode(), timeout_s=timeout_s, body=body)
        self.transport.calls.append((client, envelope))
        return client

    def heard(self, client: bytes) -> list[Message]:
        """All that a client was sent so far."""
        envelopes = [envelope for receiver, envelope in self.transport.sent if receiver == client]
        assert all(envelope.call_id == client.decode() for envelope in envelopes)
        return [decode(envelope.body, RpcOutput) for envelope in envelopes]

    def answer(self, client: bytes) -> Message | None:
        """The answer to a call, if it has come: exactly one, after all progress."""
        messages = self.heard(client)
        assert all(isinstance(message, RpcProgress) for message in messages[:-1])
        return None if not messages or isinstance(messages[-1], RpcProgress) else messages[-1]

    def ask(self, request: ControlReqInput, timeout_s: float = 1000.0, turns: int = 500) -> Message:
        client = self.call(request, timeout_s)
        for _ in range(turns):
            self.turn()
            answer = self.answer(client)
            if answer is not None:
                return answer
        raise AssertionError("no answer")

    def start_running(self, *rids: str, turns: int = 4) -> None:
        """Requests with different prompts of 6 tokens, each a few steps under way."""
        for seed, rid in enumerate(rids, start=1):
            self.send(rid, [seed, 2, 3, 4, 5, 6], params=LONG)
        for _ in range(turns):
            self.turn()
        assert [request.rid for request in self.scheduler.table.running] == list(rids)


def refusal(message: Message) -> tuple[str, str]:
    assert isinstance(message, RpcError)
    return message.code, message.message
