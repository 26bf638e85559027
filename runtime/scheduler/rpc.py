"""The scheduler's end of an RPC: calls in, progress and answers out, between steps and within a budget of time.

What the verbs do is control.py's. A verb that cannot answer at once is a generator: it is resumed once a turn, what it
yields is progress, what it returns is the answer, and it is closed when nobody waits for that any more.
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
"""Calls may take so much of the time while requests run; a burst may take what MAX_CREDIT_S holds."""
MAX_CREDIT_S = 0.005
LONG_STEP_S = 1.0
"""A step that takes longer is named as the reason of a timeout."""
PROGRESS_INTERVAL_S = 0.25
"""Progress is also how the server learns that a client is gone."""


class Refusal(Exception):
    """A verb says no; the caller is told why."""

    def __init__(self, code: ErrorCode, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


class Transport(Protocol):
    """A wire.Router."""

    def recv(self) -> tuple[bytes, RpcEnvelope] | None: ...

    def send(self, client: bytes, envelope: RpcEnvelope) -> bool: ...


class Pending:
    """A verb at work, and who waits for it until `deadline`."""

    def __init__(self, verb: str, tell: Callable[[Message], bool], work: Work, deadline: float):
        self.verb = verb
        self.tell = tell
        self.work = work
        self.deadline = deadline
        self.told = -math.inf
        self.stage = ""
        """When progress was last sent, and of which stage."""


class RpcServer:
    """Serves the calls that come through the ROUTER, and control messages that come through the pipeline.

    `start` begins a verb: it returns the answer, or the work that will give it, or raises Refusal. `reply` sends an
    answer back through the pipeline. `busy` says whether requests run, so that calls are held to their budget, and
    `in_step_s` how long the step under way has taken.
    """

    def __init__(
        self,
        router: Transport,
        start: Callable[[ControlReqInput], Message | Work],
        reply: Callable[[Message], None],
        busy: Callable[[], bool],
        in_step_s: Callable[[], float] = lambda: 0.0,
        now: Callable[[], float] = time.monotonic,
    ):
        self._router = router
        self._start = start
        self._reply = reply
        self._busy = busy
        self._in_step_s = in_step_s
        self._now = now
        self._pending: list[Pending] = []
        self._credit_s = MAX_CREDIT_S
        self._polled = now()

    @property
    def pending(self) -> bool:
        """Whether some verb is at work, so that `poll` must be called soon."""
        return bool(self._pending)

    def handle(self, message: ControlReqInput) -> None:
        """A control message that came through the pipeline; an error has nobody to go to but the log."""

        def tell(answer: Message) -> bool:
            if isinstance(answer, RpcError):
                log.warning("refused verb=%s code=%s reason=%s", type(message).__name__, answer.code, answer.message)
            elif not isinstance(answer, RpcProgress):
                self._reply(answer)
            return True

        self._begin(message, tell, self._now() + MAX_TIMEOUT_S)

    def poll(self, holds_up: bool = True) -> bool:
        """Goes on with what is pending, then takes new calls, as far as the budget allows if that holds up requests.

        Whether it took any.
        """
        began, busy = self._now(), holds_up and self._busy()
        earned_s = (began - self._polled) * SHARE_OF_TIME
        self._credit_s = min(MAX_CREDIT_S, self._credit_s + earned_s) if busy else MAX_CREDIT_S
        self._polled = began
        self._pending = [call for call in self._pending if not self._advance(call)]
        count = 0
        while count < CALLS_PER_TURN and self._credit_s > 0:
            received = self._router.recv()
            if received is not None:
                count += 1
                self._take(*received)
            ended = self._now()
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
            # Twice: the first progress says that there is a caller who can hear, the second that the work has begun.
            if not self._advance(call) and not self._advance(call):
                self._pending.append(call)
        else:
            tell(answer)

    def _advance(self, call: Pending) -> bool:
        """Resumes a verb. True when it has ended: answered, refused, failed, or closed because nobody waits."""
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
    """What is said where the answer is not there in time: how far the work is, and what it waits for."""
    of = f" of {progress.total:g}" if progress.total else ""
    amount = f" ({progress.done:g}{of} {progress.unit})" if progress.unit else ""
    step = f"; the step under way takes {in_step_s:.0f} s already" if in_step_s >= LONG_STEP_S else ""
    return f"not done in time: {progress.stage}{amount}{step}"
