"""The server side of RPC: receives calls, sends progress and answers, between steps and within a budget of time.

The verbs are in control.py. One that cannot answer at once is a generator: it is resumed once per turn, yields
progress, returns the answer, and is closed when its caller has left or the time is over.
"""

import logging
import math
import time
from collections.abc import Callable, Generator
from typing import Protocol

from llmserve.runtime.messages import (
    PROTOCOL_VERSION,
    ControlReqInput,
    ErrorCode,
    Message,
    RpcEnvelope,
    RpcError,
    RpcProgress,
)
from llmserve.runtime.wire import MAX_RPC_OPCODES, WireError, decode, encode

log = logging.getLogger(__name__)

Work = Generator[RpcProgress, None, Message]

MAX_TIMEOUT_S = 86_400.0
MAX_PENDING = 64
CALLS_PER_TURN = 64
SHARE_OF_TIME = 0.02
"""CPU time that calls may take while requests run, as a fraction of the time that passes; a burst may take up to
MAX_CREDIT_S. Not elapsed time: where other programs take the core during a call, callers would wait fifty times as
long.
"""
MAX_CREDIT_S = 0.005
LONG_STEP_S = 1.0
"""A step that takes longer is named as the reason for a timeout."""
PROGRESS_INTERVAL_S = 0.25
"""How often progress is sent, which is also how the server notices that a client is gone."""


class Refusal(Exception):
    """A verb refuses a call; the caller gets the code and the message."""

    def __init__(self, code: ErrorCode, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


class Transport(Protocol):
    """The part of wire.Router that RpcServer uses."""

    def recv(self) -> tuple[bytes, RpcEnvelope] | None: ...

    def send(self, client: bytes, envelope: RpcEnvelope) -> bool: ...


class Pending:
    """A verb under way. `tell` sends a message to its caller, which waits until `deadline` (seconds)."""

    def __init__(self, verb: str, tell: Callable[[Message], bool], work: Work, deadline: float):
        self.verb = verb
        self.tell = tell
        self.work = work
        self.deadline = deadline
        self.told = -math.inf
        self.stage = ""
        """`told` is when progress was last sent, and `stage` its stage."""


class RpcServer:
    """Serves calls from the ROUTER socket, and control messages from the pipeline.

    `start` begins a verb: it returns the answer or the work that will return it, or raises Refusal. `reply` sends an
    answer back through the pipeline. `busy` is whether requests run, so that calls are held to their budget;
    `in_step_s` is how long the step under way has taken.
    """

    def __init__(
        self,
        router: Transport,
        start: Callable[[ControlReqInput], Message | Work],
        reply: Callable[[Message], None],
        busy: Callable[[], bool],
        in_step_s: Callable[[], float] = lambda: 0.0,
        now: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[], float] = time.thread_time,
    ):
        self._router = router
        self._start = start
        self._reply = reply
        self._busy = busy
        self._in_step_s = in_step_s
        self._now = now
        self._cpu_time = cpu_time
        self._pending: list[Pending] = []
        self._credit_s = MAX_CREDIT_S
        self._polled = now()

    @property
    def pending(self) -> bool:
        """Whether a verb is under way, so that `poll` must be called again soon."""
        return bool(self._pending)

    def handle(self, message: ControlReqInput) -> None:
        """Starts the verb of a message from the pipeline. An error is only logged, as nobody waits for it."""

        def tell(answer: Message) -> bool:
            if isinstance(answer, RpcError):
                log.warning("refused verb=%s code=%s reason=%s", type(message).__name__, answer.code, answer.message)
            elif not isinstance(answer, RpcProgress):
                self._reply(answer)
            return True

        self._begin(message, tell, self._now() + MAX_TIMEOUT_S)

    def poll(self, holds_up: bool = True) -> bool:
        """Resumes pending verbs, then takes new calls; within the budget if that `holds_up` running requests. Whether
        it took any.
        """
        now, began, busy = self._now(), self._cpu_time(), holds_up and self._busy()
        earned_s = (now - self._polled) * SHARE_OF_TIME
        self._credit_s = min(MAX_CREDIT_S, self._credit_s + earned_s) if busy else MAX_CREDIT_S
        self._polled = now
        self._pending = [call for call in self._pending if not self._advance(call)]
        count = 0
        while count < CALLS_PER_TURN and self._credit_s > 0:
            received = self._router.recv()
            if received is not None:
                count += 1
                self._take(*received)
            ended = self._cpu_time()
            if busy:
                self._credit_s -= ended - began  # bad frames cost time too
            began = ended
            if received is None:
                break
        return count > 0

    def _take(self, client: bytes, envelope: RpcEnvelope) -> None:
        def tell(message: Message) -> bool:
            try:
                body = encode(message)
            except WireError as error:
                body = encode(RpcError(code="failed", message=str(error)))
            answer = RpcEnvelope(
                protocol=PROTOCOL_VERSION, call_id=envelope.call_id, timeout_s=envelope.timeout_s, body=body
            )
            return self._router.send(client, answer)

        if envelope.protocol != PROTOCOL_VERSION:
            text = f"the instance speaks protocol {PROTOCOL_VERSION}, the caller {envelope.protocol}"
            tell(RpcError(code="protocol", message=text))
            return
        if not 0 <= envelope.timeout_s <= MAX_TIMEOUT_S:
            text = f"the timeout is {envelope.timeout_s} s; it must be between 0 and {MAX_TIMEOUT_S:g}"
            tell(RpcError(code="invalid", message=text))
            return
        try:
            request: ControlReqInput = decode(envelope.body, ControlReqInput, MAX_RPC_OPCODES)
        except WireError as error:
            tell(RpcError(code="invalid", message=f"the request cannot be read: {error}"))
            return
        self._begin(request, tell, self._now() + envelope.timeout_s)

    def _begin(self, request: ControlReqInput, tell: Callable[[Message], bool], deadline: float) -> None:
        verb = type(request).__name__
        try:
            answer = self._start(request)
            if isinstance(answer, Generator) and len(self._pending) >= MAX_PENDING:
                raise Refusal("busy", f"{len(self._pending)} calls are under way already")
        except Exception as error:
            tell(_as_error(error, verb))
            return
        if isinstance(answer, Generator):
            call = Pending(verb, tell, answer, deadline)
            # Twice: sending the first progress shows whether the caller is there, and then the work begins.
            if not self._advance(call) and not self._advance(call):
                self._pending.append(call)
        else:
            tell(answer)

    def _advance(self, call: Pending) -> bool:
        """Resumes a verb. True when it has ended: answered, refused, failed, or closed because its caller has left."""
        now = self._now()
        try:
            progress = next(call.work)
            if now >= call.deadline:
                call.work.close()
                raise Refusal("timeout", _late(progress, self._in_step_s()))
            if now - call.told >= PROGRESS_INTERVAL_S or progress.stage != call.stage:
                call.told, call.stage = now, progress.stage
                if not call.tell(progress):
                    call.work.close()
                    log.info("caller left verb=%s", call.verb)
                    return True
        except StopIteration as end:
            call.tell(end.value)
            return True
        except Exception as error:
            call.tell(_as_error(error, call.verb))
            return True
        return False


def _as_error(error: Exception, verb: str) -> RpcError:
    if isinstance(error, Refusal):
        return RpcError(code=error.code, message=error.message)
    log.exception("verb failed verb=%s", verb, exc_info=error)
    return RpcError(code="failed", message=f"internal error ({type(error).__name__}); the instance's log has more")


def _late(progress: RpcProgress, in_step_s: float) -> str:
    """The message of a timeout: how far the work is, and what it waits for."""
    of = f" of {progress.total:g}" if progress.total else ""
    amount = f" ({progress.done:g}{of} {progress.unit})" if progress.unit else ""
    step = f"; the step under way takes {in_step_s:.0f} s already" if in_step_s >= LONG_STEP_S else ""
    return f"not done in time: {progress.stage}{amount}{step}"
