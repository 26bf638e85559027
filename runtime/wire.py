"""The wire: one message, one ZeroMQ frame, one pickle of plain builtins. The only module that imports zmq.

It owns the format and the settings of the sockets; the messages are in messages.py, the queue in front of a slow
receiver in outbox.py. Sockets are ipc only, in a directory of mode 0700, and each is used by one thread at a time.
"""

import functools
import io
import logging
import math
import os
import pickle
import re
import time
import types
from typing import Any, NoReturn, get_args

import msgspec
import zmq

from llmserve.runtime.messages import AnyMessage, Message, RpcEnvelope
from llmserve.runtime.outbox import Outbox

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
MAX_RPC_FRAME_BYTES = 1 << 20
HIGH_WATER = 1000
RPC_HIGH_WATER = 100
SKIP_S = 0.0005
"""After so many seconds spent on frames that hold no message, a receive returns so that its caller can do other
work.
"""
MAX_OPCODES = 1 << 20
MAX_RPC_OPCODES = 1 << 14
"""Limits on the pickle opcodes in a frame. Each costs one to a few hundred bytes and at most 0.2 us to decode; 3 ms
between two steps are acceptable. A rid takes up to eight of them.
"""


class WireError(Exception):
    """A frame that is not a valid message, or is too large. The text never quotes the frame."""


# ---- the format ----------------------------------------------------------------------------------------------------


def encode(message: msgspec.Struct) -> bytes:
    """The frame of a message: pickle protocol 5 of its builtins. Raises WireError when it exceeds MAX_FRAME_BYTES."""
    frame = pickle.dumps(msgspec.to_builtins(message, builtin_types=(bytes,)), protocol=5)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(frame)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes, kind: Any = AnyMessage, max_opcodes: int = MAX_OPCODES) -> Any:
    """The message in a frame, of type `kind` (a Struct or a union of tagged ones), every field checked.

    Raises WireError, and nothing else, whatever the frame holds.
    """
    try:
        _check_opcodes(frame, max_opcodes)
        data = _DataUnpickler(io.BytesIO(frame)).load()
        return msgspec.convert(data, _struct_of(data, kind), builtin_types=(bytes,))
    except WireError:
        raise
    except Exception as error:
        # Seen: UnpicklingError, EOFError, ValueError, TypeError, IndexError, MemoryError, ValidationError.
        raise WireError(f"a frame of {len(frame)} bytes does not hold a message ({type(error).__name__})") from None


def _struct_of(data: Any, kind: Any) -> Any:
    """The struct that the tag in `data` names. Given the whole union, msgspec.convert would analyse it at every
    call.
    """
    if not isinstance(kind, types.UnionType):
        return kind
    struct = _members(kind).get(data["type"])
    if struct is None:
        raise WireError("a frame holds a message of a type that is not expected here")
    return struct


@functools.lru_cache
def _members(kind: types.UnionType) -> dict[str, type[Message]]:
    return {member.__name__: member for member in get_args(kind)}


class _DataUnpickler(pickle.Unpickler):
    """Loads builtins only: nothing can be imported, called or looked up."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise WireError("a frame names a global")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise WireError("a frame names a persistent object")


# Before a frame is unpickled its opcodes are checked: only those that the pickler writes for builtins are allowed. The
# unpickler alone is not safe against a small frame: LONG_BINPUT makes it fill a table of up to 64 GiB, BINBYTES8
# allocates what it names, EXT consults a registry. The walk is a regular expression over runs of short opcodes, because
# a loop in Python would cost more than the unpickling. The opcodes are described in CPython's Lib/pickletools.py.
_COUNTED = b"(?:" + b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(256)) + b")"
_RUN_OPCODES = 256
_RUN = re.compile(
    b"(?:"  # the most frequent first, and those without an argument together
    rb"[Kh]."  # integers below 256, memoized objects
    rb"|[\x94N\x88\x89(t\x85\x86\x87)e\]}usa]{1,4}+"  # MEMOIZE, None, booleans, tuples, lists, dicts
    rb"|[\x8cC\x8a]" + _COUNTED +  # str, bytes and large integers below 256 bytes
    rb"|G.{8}|M..|[Jj]...."  # floats, other integers, memoized objects
    rb"|\x95.{8}"  # FRAME
    b"){0,%d}+" % (_RUN_OPCODES // 4),
    re.DOTALL,
)  # fmt: skip


def _check_opcodes(frame: bytes, max_opcodes: int) -> None:
    """Raises WireError unless the frame is one complete pickle of plain data with at most `max_opcodes` opcodes."""
    if not frame.startswith(b"\x80\x05"):
        raise WireError("a frame does not begin like a pickle of protocol 5")
    position, left = 2, max_opcodes
    while left > 0:
        run = _RUN.match(frame, position)
        start, position = position, run.end() if run else position
        left -= min(position - start, _RUN_OPCODES)
        opcode = frame[position : position + 1]
        if opcode == b"X" or opcode == b"B":  # str and bytes from 256 bytes on
            length = int.from_bytes(frame[position + 1 : position + 5], "little")
            position += 5 + length
            if length < 256 or position >= len(frame):
                raise WireError("a frame holds a length that is not right")
        elif opcode == b"." and position == len(frame) - 1:
            return
        elif position == start:
            raise WireError("a frame is cut short, or holds more than plain data")
    raise WireError("a frame holds too many objects")


# ---- sockets -------------------------------------------------------------------------------------------------------


class _Socket:
    """A ZeroMQ socket with the settings that all channels share."""

    def __init__(
        self,
        kind: int,
        address: str,
        *,
        bind: bool,
        high_water: int,
        max_bytes: int = MAX_FRAME_BYTES,
        max_opcodes: int = MAX_OPCODES,
    ):
        self.address = address
        self.bad_frames = 0
        self._max_opcodes = max_opcodes
        self._parts: list[bytes] = []
        """Parts of the message that is being received."""
        self._behind = False
        """Whether the last `_take` gave up while there may have been more to read."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._socket.set_hwm(high_water)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        if kind == zmq.ROUTER:
            # A send to a client that is gone or never reads fails, instead of being dropped silently.
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if bind:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            self._socket.bind(address)
            os.chmod(address.removeprefix("ipc://"), 0o600)
        else:
            self._socket.connect(address)

    def close(self) -> None:
        self._socket.close()

    def _send(self, *frames: bytes) -> bool:
        """Sends without blocking; whether the socket took the message."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _take(self, kind: Any, parts: int = 1) -> tuple[bytes, Any] | None:
        """The first part, and the last part decoded, of the next message with exactly `parts` parts.

        None when there is none, or when bad messages have taken SKIP_S, so that the caller can do other work.
        """
        gives_up = time.monotonic() + SKIP_S
        self._behind = False
        while not self._behind:
            try:
                part = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(self._parts) <= parts:  # additional parts are not kept
                self._parts.append(part)
            if not self._socket.getsockopt(zmq.RCVMORE):
                frames, self._parts = self._parts, []
                try:
                    if len(frames) != parts:
                        raise WireError("a message has the wrong number of parts")
                    return frames[0], decode(frames[-1], kind, self._max_opcodes)
                except WireError as error:
                    self._count_bad(error)
            self._behind = time.monotonic() >= gives_up
        return None

    async def _atake(self, kind: Any) -> Any:
        """Waits for the next good message."""
        import asyncio  # imported here to keep the start of commands fast

        while True:
            taken = self._take(kind)
            if taken is not None:
                return taken[1]
            if self._behind:
                await asyncio.sleep(0)
            else:
                await self._readable()

    async def _readable(self) -> None:
        """Waits until there may be something to read. To be called only after a recv has found nothing.

        The descriptor of a ZeroMQ socket is edge-triggered, and a send may consume its event.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        loop.add_reader(self._socket.fileno(), changed.set)
        try:
            await changed.wait()
        finally:
            loop.remove_reader(self._socket.fileno())

    def _count_bad(self, reason: WireError) -> None:
        """Counts a bad frame and logs whenever the count is a power of two, so that a flood of them does not flood the
        log.
        """
        self.bad_frames += 1
        if self.bad_frames.bit_count() == 1:
            log.warning("bad frame dropped: socket=%s count=%d reason=%s", self.address, self.bad_frames, reason)


class Push(_Socket):
    """The sending end of a channel: connects, even before the other end binds, and never blocks.

    Messages that the socket does not take are queued in an outbox; while that is `congested` the caller should start no
    new work.
    """

    def __init__(self, address: str, *, high_water: int = HIGH_WATER, outbox: int = 256):
        super().__init__(zmq.PUSH, address, bind=False, high_water=high_water)
        self._outbox = Outbox(mark=outbox)
        self.dropped = 0
        """Messages passed to `offer` that could not be sent."""

    @property
    def backlog(self) -> int:
        """Messages in the outbox."""
        return len(self._outbox)

    @property
    def congested(self) -> bool:
        return self._outbox.full

    def send(self, message: Message) -> None:
        """Sends a message in order, now or at a later `send` or `flush`; it is never dropped.

        Raises WireError when it, or one of its rows, is too large for a frame.
        """
        self._outbox.append(message)
        self.flush()

    def offer(self, message: Message) -> bool:
        """Sends a message if the socket takes it at once; otherwise drops it and counts it in `dropped`."""
        if self.flush() and self._send(encode(message)):
            return True
        self.dropped += 1
        return False

    def flush(self) -> bool:
        """Sends from the outbox until the socket takes no more. True when the outbox is empty."""
        while self._outbox:
            try:
                frame = encode(self._outbox.head)
            except WireError:
                if self._outbox.split():
                    continue
                self._outbox.pop()
                raise
            if not self._send(frame):
                return False
            self._outbox.pop()
        return True


class Pull(_Socket):
    """The receiving end of a channel: binds. `kind` is the type of the messages that may come, or a union of types."""

    def __init__(self, address: str, kind: Any):
        super().__init__(zmq.PULL, address, bind=True, high_water=HIGH_WATER)
        self._kind = kind

    def recv(self) -> Message | None:
        """The next message; None when there is none now. Bad frames are counted, logged and skipped."""
        taken = self._take(self._kind)
        return taken and taken[1]

    async def arecv(self) -> Message:
        """Waits for the next message."""
        message: Message = await self._atake(self._kind)
        return message


class Router(_Socket):
    """The scheduler's end of the RPC channel: binds, and addresses each answer to the client that asked."""

    def __init__(self, address: str):
        limits = {"high_water": RPC_HIGH_WATER, "max_bytes": MAX_RPC_FRAME_BYTES, "max_opcodes": MAX_RPC_OPCODES}
        super().__init__(zmq.ROUTER, address, bind=True, **limits)

    def recv(self) -> tuple[bytes, RpcEnvelope] | None:
        """The identity of a client and its next request. Bad frames are counted, logged and skipped."""
        return self._take(RpcEnvelope, parts=2)

    def send(self, client: bytes, envelope: RpcEnvelope) -> bool:
        """Whether it was sent: a client that is gone or does not read gets nothing."""
        try:
            return self._send(client, encode(envelope))
        except zmq.ZMQError:  # no route to the client: it has disconnected
            return False


class Dealer(_Socket):
    """A client's end of the RPC channel."""

    def __init__(self, address: str):
        super().__init__(zmq.DEALER, address, bind=False, high_water=RPC_HIGH_WATER)

    def send(self, envelope: RpcEnvelope) -> bool:
        """Whether it was sent: a server that leaves RPC_HIGH_WATER envelopes unread gets no more."""
        return self._send(encode(envelope))

    def recv(self, timeout_s: float) -> RpcEnvelope | None:
        """The next answer; None when none comes within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            taken = self._take(RpcEnvelope)
            left_s = deadline - time.monotonic()
            if taken is not None or left_s <= 0:
                return taken and taken[1]
            self._socket.poll(math.ceil(left_s * 1000))

    async def arecv(self) -> RpcEnvelope:
        """Waits for the next answer. Nothing may be sent on this socket until it has come."""
        envelope: RpcEnvelope = await self._atake(RpcEnvelope)
        return envelope


class Poller:
    """Waits for the first of several sockets that has something to read."""

    def __init__(self, *sockets: _Socket):
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket._socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(math.ceil(timeout_s * 1000))
