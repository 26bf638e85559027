"""Frames that nobody should send: what test_wire.py, and the tests against real instances, throw at a socket."""

import pickle
import socket
import struct
from collections.abc import Iterator

from llmserve.runtime.messages import AbortReqInput, PingReqInput
from llmserve.runtime.wire import encode

PROTO = b"\x80\x05"


class Caller:
    """Pickles as a call of os.system, which makes the file that is named."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, (f"touch {self.path}",)


def bad_pickles(canary: str) -> dict[str, bytes]:
    """Frames by name, each of which is no message. One that runs code makes the file `canary`."""
    tag = b"\x8c\x04type\x8c\x0cPingReqInput"
    touch = f"touch {canary}".encode()
    call = bytes([len(touch)]) + touch
    return {
        "empty": b"",
        "one byte": b"\x80",
        "only a header": PROTO,
        "truncated": encode(AbortReqInput(rids=("abc",)))[:-7],
        "trailing bytes": encode(PingReqInput()) + b"N.",
        "two pickles": encode(PingReqInput()) * 2,
        "not a pickle": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "json": b'{"type": "PingReqInput"}',
        "protocol 0": b"cos\nsystem\n(S'touch " + canary.encode() + b"'\ntR.",
        "protocol 2": pickle.dumps({"type": "PingReqInput"}, 2),
        "a call by REDUCE": pickle.dumps(Caller(canary), 5),
        "a call among the fields": pickle.dumps({"type": "AbortReqInput", "rids": [Caller(canary)]}, 5),
        "a dotted global": PROTO + b"\x8c\x02os\x8c\x06system\x93\x8c" + call + b"\x85R.",
        "a chain of getattr": PROTO
        + b"\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x04path\x93\x8c\x02os\x86R\x8c\x06system\x86R\x8c"
        + call
        + b"\x85R.",
        "GLOBAL": PROTO + b"cos\nsystem\n\x8c" + call + b"\x85R.",
        "INST": PROTO + b"(\x8c" + call + b"ios\nsystem\n.",
        "OBJ": PROTO + b"(cos\nsystem\n\x8c" + call + b"o.",
        "NEWOBJ": PROTO + b"cos\nsystem\n)\x81.",
        "BUILD on a class": PROTO + b"cllmserve.runtime.messages\nPingReqInput\n}\x8c\x01x\x8c\x01yb.",
        "PERSID": PROTO + b"Pabc\n.",
        "BINPERSID": PROTO + b"\x8c\x03abcQ.",
        "EXT1": PROTO + b"\x82\x01.",
        "EXT2": PROTO + b"\x83\x01\x00.",
        "EXT4": PROTO + b"\x84\x01\x00\x00\x00.",
        "NEXT_BUFFER": PROTO + b"\x97.",
        "BINBYTES8 of 1 TiB": PROTO + b"\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        "BINUNICODE8 of 1 TiB": PROTO + b"\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
        "BYTEARRAY8 of 1 TiB": PROTO + b"\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        "BINBYTES of 4 GiB": PROTO + b"B\xff\xff\xff\xff" + b"x.",
        "BINUNICODE of 4 GiB": PROTO + b"X\xff\xff\xff\xff" + b"x.",
        "a long form of a short text": PROTO + b"X\x01\0\0\0x.",
        "a million empty texts": PROTO + b"(" + b"X\0\0\0\0" * 1_000_000 + b"t.",
        "FRAME of 1 TiB": PROTO + b"\x95" + struct.pack("<Q", 1 << 40) + b"N.",
        "FRAME of a negative size": PROTO + b"\x95" + struct.pack("<q", -1) + b"N.",
        "LONG_BINPUT at the end of a table of 64 GiB": PROTO + b"Nr\xff\xff\xff\xff.",
        "PUT at the end of a table of 64 GiB": PROTO + b"Np4000000000\n.",
        "LONG_BINGET of nothing": PROTO + b"j\xff\xff\xff\x7f.",
        "BINGET of nothing": PROTO + b"h\x07.",
        "LONG4 of 2 GiB": PROTO + b"\x8b\xff\xff\xff\x7f.",
        "a decimal number of a million digits": PROTO + b"I" + b"9" * 1_000_000 + b"\n.",
        "a list nested a million deep": PROTO + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        "a tuple nested 300,000 deep": PROTO + b")" + b"\x85" * 300_000 + b".",
        "a deep list in a field": PROTO + b"}(" + tag + b"\x8c\x04rids" + b"]" * 300_000 + b"a" * 299_999 + b"u.",
        "a list that holds itself": PROTO + b"]\x94h\x00a.",
        "eight million empty lists": PROTO + b"(" + b"]" * 8_000_000 + b"t.",
        "four million references to one list": PROTO + b"]\x94(" + b"h\x00" * 4_000_000 + b"t.",
        "STOP with nothing on the stack": PROTO + b".",
        "items of no list": PROTO + b"N(Nu.",
        "a dict with a list for a key": PROTO + b"}]Ns.",
        "text that is not UTF-8": PROTO + b"\x8c\x01\xff.",
        "None": pickle.dumps(None, 5),
        "a number": pickle.dumps(7, 5),
        "a list": pickle.dumps(["type"], 5),
        "no type": pickle.dumps({"rids": ["a"]}, 5),
        "an unknown type": pickle.dumps({"type": "ShutdownReqInput"}, 5),
        "a list for a type": pickle.dumps({"type": ["PingReqInput"]}, 5),
        "a base class for a type": pickle.dumps({"type": "Message"}, 5),
        "a field of a wrong type": pickle.dumps({"type": "AbortReqInput", "rids": "abc"}, 5),
        "an item of a wrong type": pickle.dumps({"type": "AbortReqInput", "rids": [1]}, 5),
        "a number for bytes": pickle.dumps({"type": "TokenizedEmbeddingReqInput", "rid": "a", "prompts": [12]}, 5),
        "text for bytes": pickle.dumps({"type": "TokenizedEmbeddingReqInput", "rid": "a", "prompts": ["YWJj"]}, 5),
        "a field outside its choices": pickle.dumps({"type": "PauseGenerationReqInput", "mode": "now"}, 5),
        "a missing field": pickle.dumps({"type": "TokenizedEmbeddingReqInput", "rid": "a"}, 5),
        "an extra field": pickle.dumps({"type": "PingReqInput", "force": True}, 5),
        "an extra field in a field": pickle.dumps(
            {"type": "TokenizedGenerateReqInput", "rid": "a", "prompts": [], "sampling_params": {"best_of": 2}}, 5
        ),
        "a row that is too long": pickle.dumps({"type": "BatchStrOutput", "rows": [["a", 0, "", b"", *[0] * 20]]}, 5),
        "a row that is too short": pickle.dumps({"type": "BatchTokenIDOutput", "rows": [["rid", 0]]}, 5),
    }


def zmtp_connection(address: str, socket_type: bytes) -> socket.socket:
    """A connection that has introduced itself as a ZeroMQ socket of a type, and has been let in (ZeroMQ RFC 23).

    Raises ConnectionError when it was not let in.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60.0)
    connection.connect(address.removeprefix("ipc://"))
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    received = b""
    while len(received) < 66 or len(received) < 66 + received[65]:  # the greeting, and the READY with its length
        data = connection.recv(1024)
        if not data:
            connection.close()
            raise ConnectionAbortedError("the other end has closed the connection")
        received += data
    return connection


def one_frame(frame: bytes) -> Iterator[bytes]:
    yield b"\x02" + struct.pack(">Q", len(frame)) + frame


def send_all(connection: socket.socket, chunks: Iterator[bytes]) -> bool:
    """False when the peer has closed the connection meanwhile."""
    try:
        for chunk in chunks:
            connection.sendall(chunk)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def huge_frame(size: int) -> Iterator[bytes]:
    """One frame of `size` bytes of zeros."""
    yield b"\x02" + struct.pack(">Q", size)
    for _ in range(size >> 20):
        yield bytes(1 << 20)


def many_parts(count: int) -> Iterator[bytes]:
    """One message of `count` parts of one byte."""
    yield b"\x01\x01x" * (count - 1)
    yield b"\x00\x01x"
