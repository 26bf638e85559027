"""Bytes between ranks, in CPU tensors, never as pickles. Their meaning is in engine/ranks.py."""

import torch
from torch import Tensor

from llmserve.runtime.distributed.collectives import broadcast, finish, receive, send
from llmserve.runtime.distributed.groups import Group

FRAME = 4096
"""Bytes of the first frame of a message, which begins with the length. The rest of a longer message is a second
frame.
"""
HEAD = 8
TAGS = {"results": 1, "reports": 2}
"""Tags of point-to-point messages. Messages of different kinds do not wait for each other."""
ROOM = FRAME - HEAD


def broadcast_bytes(data: bytes, group: Group, operation: str) -> None:
    """Sends bytes from rank 0 to all others, each of which must call receive_broadcast. Raises RankLost."""
    first, rest = _frames(data)
    broadcast(first, group, operation)
    if rest is not None:
        broadcast(rest, group, operation)


def receive_broadcast(group: Group, operation: str) -> bytes:
    first = broadcast(torch.empty(FRAME, dtype=torch.uint8), group, operation)
    length = _length(first)
    if length <= ROOM:
        return _bytes(first[HEAD : HEAD + length])
    rest = broadcast(torch.empty(length - ROOM, dtype=torch.uint8), group, operation)
    return _bytes(first[HEAD:]) + _bytes(rest)


def send_bytes(data: bytes, to: int, group: Group, kind: str) -> None:
    """Sends bytes to one rank; returns when it has received them. Raises RankLost."""
    for frame in _frames(data):
        if frame is not None:
            finish(send(frame, to, group, kind, TAGS[kind]))


def receive_bytes(source: int, group: Group, kind: str) -> bytes:
    first = receive(torch.empty(FRAME, dtype=torch.uint8), source, group, kind, TAGS[kind])
    length = _length(first)
    if length <= ROOM:
        return _bytes(first[HEAD : HEAD + length])
    rest = receive(torch.empty(length - ROOM, dtype=torch.uint8), source, group, kind, TAGS[kind])
    return _bytes(first[HEAD:]) + _bytes(rest)


def _frames(data: bytes) -> tuple[Tensor, Tensor | None]:
    head = len(data).to_bytes(HEAD, "little")
    first = torch.frombuffer(bytearray((head + data[:ROOM]).ljust(FRAME, b"\0")), dtype=torch.uint8)
    rest = torch.frombuffer(bytearray(data[ROOM:]), dtype=torch.uint8) if len(data) > ROOM else None
    return first, rest


def _length(first: Tensor) -> int:
    return int.from_bytes(_bytes(first[:HEAD]), "little")


def _bytes(frame: Tensor) -> bytes:
    return bytes(frame.numpy().tobytes())
