"""The RPC client of a running instance's scheduler: blocking (RpcClient), or for asyncio (AsyncRpcClient).

Both drive a Call, which handles ids, deadlines, versions and errors and knows no sockets. The verbs are in
scheduler/control.py.
"""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar, cast

from llmserve.runtime.instance import InstanceRecord, stopped_process
from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    ControlRequest,
    ErrorCode,
    RpcEnvelope,
    RpcError,
    RpcOutput,
    RpcProgress,
)
from llmserve.runtime.ports import PortArgs
from llmserve.runtime.wire import Dealer, WireError, decode, encode

DEFAULT_TIMEOUT_S = 10.0
LAST_WORD_S = 1.0
"""A scheduler that has sent progress may answer so long after the deadline, to say what was not done in time, and
why.
"""
PROBE_S = 0.5
"""After so long without an answer the server's socket is probed, so that its death is noticed before the deadline."""

EXIT_CODES: dict[ErrorCode, int] = {
    "failed": 1,
    "invalid": 2,
    "not_found": 3,
    "unavailable": 69,
    "busy": 75,
    "timeout": 75,
    "protocol": 76,
    "denied": 77,
}

AnswerT = TypeVar("AnswerT")
OnProgress = Callable[[RpcProgress], None]


class RpcCallError(Exception):
    """A call failed: the server answered with an error, or not at all. `exit_code` is the exit status for a command."""

    def __init__(self, code: ErrorCode, message: str):
        super().__init__(message)
        self.code = code
        self.message = message
        self.exit_code = EXIT_CODES[code]


class Call(Generic[AnswerT]):
    """One call, without its socket: send `envelope`, then pass what is received to `take` until it returns the answer.

    `take(None)` means that nothing was received within `patience_s` seconds.
    """

    def __init__(
        self, request: ControlRequest[AnswerT], address: str, timeout_s: float, on_progress: OnProgress | None
    ):
        self._request = request
        self._address = address
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_progress = on_progress
        self._heard = False
        self.envelope = RpcEnvelope(
            protocol=PROTOCOL_VERSION, call_id=secrets.token_hex(8), timeout_s=timeout_s, body=encode(request)
        )

    @property
    def patience_s(self) -> float:
        return max(0.0, min(PROBE_S, self._deadline - time.monotonic()))

    def take(self, envelope: RpcEnvelope | None) -> AnswerT | None:
        """The answer; None when it has not come yet. Raises RpcCallError."""
        if envelope is not None and envelope.call_id == self.envelope.call_id:
            return self._open(envelope)
        if envelope is None:
            probe(self._address)
        if time.monotonic() >= self._deadline:
            raise self._late(f"no answer came in {self._timeout_s:g} s; see --timeout")
        return None

    def _late(self, message: str) -> RpcCallError:
        """The error of a call that has timed out. It names a process of the instance that is stopped (SIGSTOP), if
        any.
        """
        stopped = stopped_process(Path(self._address.removeprefix("ipc://")).parent)
        return RpcCallError("timeout", f"{message} ({stopped})" if stopped else message)

    def _open(self, envelope: RpcEnvelope) -> AnswerT | None:
        if envelope.protocol != PROTOCOL_VERSION:
            raise RpcCallError(
                "protocol",
                f"the instance speaks protocol {envelope.protocol}, this command {PROTOCOL_VERSION}; "
                "use the llmserve that launched it, or restart it",
            )
        try:
            message = decode(envelope.body, RpcOutput)
        except WireError as error:
            raise RpcCallError("failed", f"the answer cannot be read: {error}") from None
        if isinstance(message, RpcError) and message.code == "timeout":
            raise self._late(message.message)
        if isinstance(message, RpcError):
            raise RpcCallError(message.code, message.message)
        if isinstance(message, RpcProgress):
            if not self._heard:
                self._heard = True
                self._deadline += LAST_WORD_S
            if self._on_progress is not None:
                self._on_progress(message)
            return None
        expected = type(self._request).__name__.removesuffix("Input") + "Output"
        if type(message).__name__ != expected:
            raise RpcCallError("failed", f"a {type(message).__name__} came where {expected} was expected")
        return cast(AnswerT, message)


class _Client:
    """An address, and a socket for each call under way; the sockets of finished calls are used again."""

    def __init__(self, target: str | InstanceRecord, timeout_s: float = DEFAULT_TIMEOUT_S):
        """`target` is a ZeroMQ address, or an instance, which stands for the address of its first replica."""
        self.address = target if isinstance(target, str) else rpc_address(target)
        self.timeout_s = timeout_s
        self._idle: list[Dealer] = []
        self._listener = 0

    @contextlib.contextmanager
    def _calling(
        self, request: ControlRequest[AnswerT], timeout_s: float | None, on_progress: OnProgress | None
    ) -> Iterator[tuple[Call[AnswerT], Dealer]]:
        call = Call(request, self.address, self.timeout_s if timeout_s is None else timeout_s, on_progress)
        dealer = self._connected()
        try:
            dealer.send(call.envelope)
            yield call, dealer
        except BaseException:
            dealer.close()  # the server notices at its next progress message
            raise
        self._idle.append(dealer)

    def _connected(self) -> Dealer:
        """A socket to the current server. One that is still connected to a server before a restart would lose the
        request.
        """
        listener = listener_at(self.address)
        if listener != self._listener:
            self.close()
            self._listener = listener
        if self._idle:
            return self._idle.pop()
        probe(self.address)
        return Dealer(self.address)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class RpcClient(_Client):
    """For blocking code; one call at a time."""

    def call(
        self,
        request: ControlRequest[AnswerT],
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> AnswerT:
        """Asks and waits for the answer, at most `timeout_s` seconds. Raises RpcCallError."""
        with self._calling(request, timeout_s, on_progress) as (call, dealer):
            while (answer := call.take(dealer.recv(call.patience_s))) is None:
                pass
        return answer

    def __enter__(self) -> "RpcClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncRpcClient(_Client):
    """For asyncio code; any number of calls at a time. Cancelling the task of a call cancels the call."""

    async def call(
        self,
        request: ControlRequest[AnswerT],
        on_progress: OnProgress | None = None,
        timeout_s: float | None = None,
    ) -> AnswerT:
        """Asks and waits for the answer, at most `timeout_s` seconds. Raises RpcCallError."""
        import asyncio  # imported here to keep the start of commands fast

        with self._calling(request, timeout_s, on_progress) as (call, dealer):
            answer = None
            while answer is None:
                envelope = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(call.patience_s):
                        envelope = await dealer.arecv()
                answer = call.take(envelope)
        return answer


def rpc_address(record: InstanceRecord) -> str:
    return (*record.rpc_addresses, PortArgs.init_new(record.directory).rpc_ipc_name)[0]


def listener_at(address: str) -> int:
    """Identifies the server that listens at `address`: the ctime of its socket in nanoseconds; 0 if there is none."""
    try:
        return os.stat(address.removeprefix("ipc://")).st_ctime_ns
    except OSError:
        return 0


def probe(address: str) -> None:
    """Raises RpcCallError ("unavailable") unless something listens at `address`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(address.removeprefix("ipc://"))
        except (FileNotFoundError, ConnectionRefusedError):
            name = Path(address).parent.name
            message = f'instance "{name}" has ended, or does not listen yet; see `llmserve logs -i {name}`'
            raise RpcCallError("unavailable", message) from None
        except PermissionError:
            raise RpcCallError("denied", f"not allowed to connect to {address}") from None
        except OSError:
            pass  # its backlog of connections is full: it is alive, but slow
